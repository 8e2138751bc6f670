"""How the sandbox's interpreter is started: bubblewrap, else ``unshare``, else not at all unless that is allowed."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

TMP_BYTES = 64 << 20  # of the temporary folder, which lies in memory
SYSTEM_FOLDERS = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/sbin", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
METHODS = ("bwrap", "unshare")
# A fixed hash seed: the order of a set must not change a score.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


class NoIsolation(ValueError):
    """Neither bubblewrap nor unshare works on this machine."""


def interpreter() -> str:
    """The Python under any virtual environment, whose site packages the sandbox does not get."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable) or sys.executable)


def visible_paths() -> list[str]:
    """What is seen inside, read-only: the system's programs and libraries, and the Python installation."""
    python = {str(Path(sys.base_prefix).resolve()), str(Path(sys.base_exec_prefix).resolve())}
    outside = [path for path in sorted(python) if not path.startswith("/usr")]
    return [path for path in SYSTEM_FOLDERS if os.path.exists(path)] + outside


def command(method: str, program: list[str]) -> list[str]:
    """The command line that runs ``program`` as process 1 of new namespaces."""
    if method == "none":
        return program
    return bwrap_command(program) if method == "bwrap" else unshare_command(program)


def bwrap_command(program: list[str]) -> list[str]:
    line = [shutil.which("bwrap") or "bwrap", "--unshare-user", "--unshare-all", "--as-pid-1", "--die-with-parent"]
    line += ["--uid", "65534", "--gid", "65534", "--cap-drop", "ALL", "--hostname", "sandbox"]
    for path in visible_paths():
        line += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    for path in DEVICES:
        line += ["--dev-bind", path, path]
    line += ["--size", str(TMP_BYTES), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/"]
    return [*line, *program]


def unshare_command(program: list[str]) -> list[str]:
    """The same with util-linux: a shell makes the new root in an empty folder, then leaves the old one."""
    root = next((folder for folder in ("/mnt", "/media", "/srv", "/opt") if os.path.isdir(folder)), "/mnt")
    script = [f"mount -t tmpfs -o mode=755,size=1m tmpfs {root}"]
    for path in visible_paths():
        source, target = shlex.quote(path), shlex.quote(root + path)
        if os.path.islink(path):
            script.append(f"ln -s {shlex.quote(os.readlink(path))} {target}")
            continue
        script.append(f"mkdir -p $(dirname {target})")
        script.append(f"mkdir -p {target}" if os.path.isdir(path) else f": > {target}")
        script += [f"mount --rbind {source} {target}", f"mount -o remount,bind,ro {target}"]
    script.append(f"mkdir -p {root}/tmp {root}/dev")
    for path in DEVICES:
        script += [f": > {root}{path}", f"mount --bind {path} {root}{path}"]
    script += [
        f"mount -t tmpfs -o mode=700,size={TMP_BYTES},nr_inodes=4096 tmpfs {root}/tmp",
        f"mount -o remount,ro {root}",
        f"cd {root}",
        f'exec chroot {root} "$@"',
    ]
    line = [shutil.which("unshare") or "unshare", "--user", "--map-root-user", "--mount", "--net", "--ipc", "--uts"]
    line += ["--pid", "--fork", "--kill-child=SIGKILL", "/bin/sh", "-ec", "\n".join(script), "sandbox"]
    return [*line, *program]


@lru_cache
def works(method: str) -> str:
    """An empty text if ``method`` isolates here, else why not. Runs it once a process."""
    if shutil.which(method) is None:
        return f"{method}: not installed"
    probe = [interpreter(), "-c", "import os; assert os.getpid() == 1; print('isolated')"]
    try:
        result = subprocess.run(
            command(method, probe),
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=20,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"{method}: took more than 20 s"
    if result.returncode == 0 and result.stdout.strip() == "isolated":
        return ""
    return f"{method}: {(result.stderr.strip() or 'failed').splitlines()[-1][:200]}"


def choose(wanted: str = "auto", allow_none: bool = False) -> str:
    """``bwrap``, ``unshare`` or, only if ``allow_none``, ``none``. Raises NoIsolation with the reasons."""
    if wanted not in ("auto", "none", *METHODS):
        raise ValueError(f"isolation={wanted!r}: must be auto, bwrap, unshare or none")
    tried = METHODS if wanted == "auto" else (wanted,) if wanted != "none" else ()
    reasons = []
    for method in tried:
        why_not = works(method)
        if not why_not:
            return method
        reasons.append(why_not)
    if allow_none:
        return "none"
    raise NoIsolation(
        "code written by models can't be isolated on this machine (" + ("; ".join(reasons) or "isolation=none") + "); "
        "install bubblewrap (Debian: apt-get install bubblewrap), allow unprivileged user namespaces, or, on a machine "
        "that may be harmed, set task_args.allow_unisolated=true"
    )
