"""Plain files of a run: folders that are never shared, valid JSON lines, and the versions behind them."""

import importlib.metadata
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from comlrl.config import is_secret, without_password
from comlrl.version import __version__

MASK = "***"
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "tokenizers", "datasets", "vllm")


def printable(text: str) -> str:
    """`text` with lone surrogates spelled out (`\\udcff`): UTF-8, and so strict JSON, cannot carry them."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def plain(value: Any, nonfinite: list[str] | None = None, key: str = "") -> Any:
    """`value` as JSON data: tensors and arrays become lists or numbers, unknown objects their text.

    With a list `nonfinite`, NaN and infinities become None, since JSON has no word for them, and the list
    gets their keys.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().tolist()
    elif isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)  # YAML refuses subclasses, such as enumerations
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, float):
        if nonfinite is None or math.isfinite(value):
            return float(value)
        nonfinite.append(printable(key))
        return None
    if isinstance(value, Mapping):
        prefix = f"{key}." if key else ""
        return {printable(str(name)): plain(v, nonfinite, f"{prefix}{name}") for name, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v, nonfinite, f"{key}[{i}]") for i, v in enumerate(value)]
    return printable(str(value))


def json_line(record: Mapping[str, Any]) -> str:
    """`record` as one line of valid JSON; the keys of NaN and infinite values are listed in `nonfinite`."""
    nonfinite: list[str] = []
    data = plain(record, nonfinite)
    if nonfinite:
        data["nonfinite"] = nonfinite
    return json.dumps(data, allow_nan=False) + "\n"


def as_number(key: str, value: Any) -> float | int | None:
    """A metric's value as a Python number; None means "not defined at this step". Else raises ValueError."""
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else value
    elif isinstance(value, np.ndarray | np.generic):
        value = value.item() if value.size == 1 else value
    if isinstance(value, bool):
        return int(value)
    if value is None or isinstance(value, int | float):
        return value
    raise ValueError(f"metric {key!r} is {value!r}: a metric must be one number")


def create_folder(root: str | os.PathLike, name: str) -> Path:
    """Make `root/name`, or `root/name-2`, `-3`, ... if taken. `mkdir` is atomic: nobody else gets it."""
    if name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"run name {name!r} must be one folder name, without {os.sep!r}")
    Path(root).mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        folder = Path(root) / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()
        except FileExistsError:
            number += 1
        else:
            return folder


def write_text(path: Path, text: str) -> None:
    """Write through a temporary file, so that a killed process never leaves half a file."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)


def write_keeping_old(path: Path, text: str) -> None:
    """Write `path`; a different earlier version stays beside it (`config.1.yaml`: of the first start)."""
    if path.exists() and path.read_text(encoding="utf-8") != text:
        number = 1
        while (kept := path.with_suffix(f".{number}{path.suffix}")).exists():
            number += 1
        os.replace(path, kept)
    write_text(path, text)


def run_id(folder: Path) -> str | None:
    """The id of the run whose folder it is; None if it is none."""
    path = folder / "run.json"
    return json.loads(path.read_text(encoding="utf-8"))["id"] if path.is_file() else None


def truncate_lines(path: Path, last_step: int | None, size: int | None = None) -> int:
    """Drop the lines after the first `size` bytes, or (None) those of steps after `last_step` (None: of no step), and
    unreadable ones, such as the torn last line of a killed process. Returns how many were dropped."""
    if not path.exists():
        return 0
    temporary = path.with_name(path.name + ".tmp")
    dropped = position = 0
    with path.open("rb") as source, temporary.open("wb") as kept:
        for line in source:
            record = parse_line(line)
            position += len(line)
            late = last_step is not None and record is not None and (record.get("step") or 0) > last_step
            if record is None or (position > size if size is not None else late):
                dropped += 1
            else:
                kept.write(line.rstrip(b"\n") + b"\n")
    os.replace(temporary, path)
    return dropped


def parse_line(line: str | bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # cut in the middle, perhaps of a character
        return None
    return record if isinstance(record, dict) else None


def read_metrics(folder: str | os.PathLike) -> list[dict[str, Any]]:
    """The lines of a run's `metrics.jsonl`, also of a run that is being written or was killed."""
    path = Path(folder) / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{str(folder)!r} is not a run's folder: it has no metrics.jsonl")
    with path.open("rb") as lines:
        return [record for line in lines if (record := parse_line(line)) is not None]


def environment_versions() -> dict[str, Any]:
    """What a result depends on besides the configuration: packages (if installed), machine, command."""
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "comlrl": __version__,
        "git_commit": git_commit(Path(__file__).resolve().parent.parent),
        "python": platform.python_version(),
        **installed,
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "cpu": f"{os.cpu_count()} x {cpu_name()}",
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "processes": int(os.environ.get("WORLD_SIZE", "1")),
        "command": shlex.join(masked_command(sys.orig_argv)),
    }


def git_commit(checkout: Path) -> str | None:
    """The checkout's commit, with `+changes` if tracked files differ; None outside a checkout or before the
    first commit. A package installed inside another project's checkout is not taken for that project."""
    git = shutil.which("git")
    if git is None or not (checkout / ".git").exists():
        return None
    command = [git, "-C", str(checkout)]
    commit = subprocess.run([*command, "rev-parse", "--verify", "HEAD"], capture_output=True, text=True, check=False)
    if commit.returncode != 0:
        return None
    changes = subprocess.run([*command, "diff", "--quiet", "HEAD"], capture_output=True, check=False)
    return commit.stdout.strip() + ("+changes" if changes.returncode != 0 else "")


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")  # `platform.processor()` is empty on most Linux systems
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def masked_command(arguments: list[str]) -> list[str]:
    """A command line without secrets, given as `--name value`, `--name=value` or `name=value`.

    Of a mapping or list as value nothing is shown: a secret may stand anywhere in it.
    """
    masked = []
    previous = ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        named = [part for part in name.lstrip("-").split(".") if is_secret(part)]
        if equals and (named or value.lstrip().startswith(("{", "["))):
            argument = f"{name}={MASK}"
        elif previous.startswith("--") and "=" not in previous and is_secret(last_part(previous)):
            argument = MASK
        masked.append(without_password(argument))
        previous = argument
    return masked


def last_part(name: str) -> str:
    return name.lstrip("-").rpartition(".")[2]
