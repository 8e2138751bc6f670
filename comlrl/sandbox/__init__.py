"""Runs code written by models, and tests of it, each in an isolated process of its own.

    from comlrl.sandbox import Module, Sandbox

    with Sandbox() as sandbox:
        report = sandbox.check([Module("def f(x): return x + 1")], "f", "def check(c):\\n    assert c(1) == 2")
    report.passed, report.total     # 1, 1

A pool of *slots*, each with two warm interpreters in namespaces of their own: one forks the process that runs the code
under test, the other the process that runs the tests. They talk by value, through this process, which executes nothing
and decodes nothing that the code under test sent. docs/sandbox.md says what this protects from, and what it does not.
"""

from __future__ import annotations

import atexit
import os
import queue
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from comlrl.sandbox import isolation
from comlrl.sandbox.isolation import NoIsolation
from comlrl.sandbox.values import decode, encode

__all__ = ["Limits", "Module", "NoIsolation", "Report", "Sandbox", "SandboxError"]

START_SECONDS = 30.0
CLEAN_SECONDS = 10.0
CHECKER_SECONDS = 3.0  # what the tests themselves may take after the candidate's time is over


@dataclass(frozen=True)
class Limits:
    """Of one run (all tests of one answer). Output to stdout and stderr is discarded, whatever its size."""

    wall_seconds: float = 6.0
    memory_mb: int = 512  # of address space
    cpu_seconds: int = 8
    file_mb: int = 8  # of one file; 64 MB for all together
    message_bytes: int = 1 << 20  # of one argument list or result


@dataclass(frozen=True)
class Module:
    """Source text run in a namespace of its own, with the names ``take`` from the module before it."""

    source: str
    take: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    name: str
    passed: bool
    message: str


@dataclass(frozen=True)
class Report:
    """What became of each test. ``status``: done, timeout (of the candidate), died (it ended), or tests (they failed
    to run or ran out of time; ``error`` says how)."""

    outcomes: tuple[Outcome, ...]
    status: str
    error: str = ""

    @property
    def passed(self) -> int:
        return sum(outcome.passed for outcome in self.outcomes)

    @property
    def total(self) -> int:
        return len(self.outcomes)


class SandboxError(RuntimeError):
    """The sandbox itself failed, twice in a row; no verdict on the code."""


class Sandbox:
    """``workers`` runs at a time (default: one a processor, at most 4). Safe to use from several threads.

    Interpreters start at the first use. A process that was forked with a Sandbox gets interpreters of its own.
    """

    def __init__(
        self,
        workers: int | None = None,
        limits: Limits | None = None,
        isolation_method: str = "auto",
        allow_unisolated: bool = False,
    ):
        if workers is not None and workers < 1:
            raise ValueError(f"workers={workers}: must be at least 1")
        self.workers = workers or min(4, os.cpu_count() or 1)
        self.limits = limits or Limits()
        self.method = isolation.choose(isolation_method, allow_unisolated)
        self._lock = threading.Lock()
        self._owner = 0
        self._slots: list[_Slot] = []
        self._free: queue.Queue[_Slot] = queue.Queue()
        self._starter: ThreadPoolExecutor | None = None

    def __reduce__(self) -> tuple:
        """Sent to another process (where a reward with a time limit runs), it starts interpreters of its own there."""
        return _again, (self.workers, self.limits, self.method)

    def check(
        self,
        modules: Sequence[Module],
        entry: str,
        tests: str,
        setup: str = "",
        withhold: str | None = None,
        limits: Limits | None = None,
    ) -> Report:
        """Runs ``tests``, which define ``check(candidate)``, on the function ``entry`` of the last module.

        Each assert of ``tests`` that can fail is one outcome. ``setup`` is run before the tests, in their process.
        ``withhold`` names a function whose value is replaced by one that fails as soon as it is looked at.
        """
        job = {"role": "checker", "kind": "check", "source": tests, "setup": setup, "entry": entry}
        return self._run(modules, entry, job, withhold, live=False, limits=limits)

    def unittest(self, modules: Sequence[Module], entry: str, tests: str, limits: Limits | None = None) -> Report:
        """Runs the unittest classes of ``tests`` on the class ``entry`` of the last module.

        Objects stay in the candidate's process; tests hold stand-ins and compare values on their own side.
        """
        job = {"role": "checker", "kind": "unittest", "source": tests, "setup": "", "entry": entry}
        return self._run(modules, entry, job, None, live=True, limits=limits)

    def close(self) -> None:
        with self._lock:
            if self._owner == os.getpid():
                for slot in self._slots:
                    slot.close()
            self._slots, self._owner = [], 0

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        modules: Sequence[Module],
        entry: str,
        job: dict,
        withhold: str | None,
        live: bool,
        limits: Limits | None,
    ) -> Report:
        limits = limits or self.limits
        program = {
            "role": "candidate",
            "modules": [{"source": module.source, "take": list(module.take)} for module in modules],
            "entry": entry,
            "withhold": withhold,
            "live": live,
        }
        self._open()
        slot = self._free.get()
        try:
            for attempt in range(2):
                try:
                    return slot.run(encode(program), encode(job), limits)
                except (OSError, EOFError) as error:
                    slot.close()
                    if attempt:
                        raise SandboxError(f"the sandbox failed twice: {type(error).__name__}: {error}") from error
        finally:
            self._free.put(slot)
        raise AssertionError

    def _open(self) -> None:
        with self._lock:
            if self._owner == os.getpid():
                return
            for slot in self._slots:  # of the process that this one was forked from
                slot.forget()
            # Interpreters end with the thread that started them, so that one has to stay.
            self._starter = ThreadPoolExecutor(1, thread_name_prefix="sandbox-starter")
            self._free = queue.Queue()
            self._slots = [_Slot(self.method, self._starter) for _ in range(self.workers)]
            for slot in self._slots:
                self._free.put(slot)
            if self._owner == 0:
                atexit.register(self.close)
            self._owner = os.getpid()


def _again(workers: int, limits: Limits, method: str) -> Sandbox:
    return Sandbox(workers, limits, method, allow_unisolated=method not in isolation.METHODS)


class _Slot:
    """An interpreter for candidates, one for tests."""

    def __init__(self, method: str, starter: ThreadPoolExecutor):
        self.candidate, self.checker = _Interpreter(method, starter), _Interpreter(method, starter)

    def run(self, program: bytes, job: bytes, limits: Limits) -> Report:
        deadline = time.monotonic() + limits.wall_seconds
        # The tests get more: they wait while the candidate uses its time.
        generous = replace(limits, memory_mb=limits.memory_mb * 2, cpu_seconds=limits.cpu_seconds + 10)
        with self.checker.child(generous) as tests, self.candidate.child(limits) as candidate:
            tests.send(job, deadline + CHECKER_SECONDS)
            status = "done"
            try:
                candidate.send(program, deadline)
            except (OSError, EOFError):
                status = "died"
            while True:
                try:
                    message = tests.receive(deadline + CHECKER_SECONDS)
                except (OSError, EOFError) as error:
                    return Report((), "tests", f"{type(error).__name__}: {error}")
                if message[:1] == b"D":
                    outcomes = tuple(Outcome(*entry) for entry in decode(message[1:]))
                    return Report(outcomes, status)
                reply = b""
                if status == "done":
                    try:
                        candidate.send(message[1:], deadline)
                        reply = candidate.receive(deadline)
                    except TimeoutError:
                        status = "timeout"
                    except (OSError, EOFError):
                        status = "died"
                tests.send(reply, deadline + CHECKER_SECONDS)

    def close(self) -> None:
        self.candidate.close()
        self.checker.close()

    def forget(self) -> None:
        self.candidate.forget()
        self.checker.forget()


class _Interpreter:
    """One warm interpreter and its control socket; see inside.py for what is said on it."""

    def __init__(self, method: str, starter: ThreadPoolExecutor):
        self.method, self.starter = method, starter
        self.process: subprocess.Popen | None = None
        self.control: socket.socket | None = None
        self.folder: str | None = None

    def child(self, limits: Limits) -> _Child:
        if self.control is None:
            self.start()
        assert self.control is not None
        ours, theirs = socket.socketpair()
        numbers = struct.pack("=IIII", limits.memory_mb, limits.cpu_seconds, limits.file_mb, limits.message_bytes)
        try:
            socket.send_fds(self.control, [numbers], [theirs.fileno()])
        except OSError:  # it ended since the last run
            self.close()
            ours.close()
            raise
        finally:
            theirs.close()
        return _Child(self, ours, limits.message_bytes)

    def start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.folder = tempfile.mkdtemp(prefix="comlrl-unisolated-") if self.method == "none" else None
        program = [isolation.interpreter(), "-s", "-S", "-B", "-c", _program(self.method != "none", self.folder or "")]
        self.process = self.starter.submit(
            lambda: subprocess.Popen(
                isolation.command(self.method, program),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=isolation.ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        ).result()
        theirs.close()
        self.control = ours
        self.ready(START_SECONDS)

    def ready(self, seconds: float) -> None:
        """Waits until the interpreter can fork the next child; ends it if it does not answer."""
        assert self.control is not None
        self.control.settimeout(seconds)
        try:
            if self.control.recv(1) == b"R":
                return
        except OSError:
            pass
        self.close()

    def end_child(self) -> None:
        if self.control is None:
            return
        try:
            self.control.send(b"E")
        except OSError:
            self.close()
            return
        self.ready(CLEAN_SECONDS)

    def close(self) -> None:
        if self.control is not None:
            self.control.close()
        if self.process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
        self.process = self.control = self.folder = None

    def forget(self) -> None:
        if self.control is not None:
            self.control.close()
        self.process = self.control = self.folder = None


class _Child:
    """The socket of one child; as a context, the child and all it left end with it."""

    def __init__(self, interpreter: _Interpreter, link: socket.socket, max_bytes: int):
        self.interpreter, self.link, self.max_bytes = interpreter, link, max_bytes

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()
        self.interpreter.end_child()

    def send(self, data: bytes, deadline: float) -> None:
        self.link.settimeout(_left(deadline))
        self.link.sendall(struct.pack("=I", len(data)) + data)

    def receive(self, deadline: float) -> bytes:
        (length,) = struct.unpack("=I", self._exactly(4, deadline))
        if length > self.max_bytes:
            raise OSError(f"a message of {length} bytes, {self.max_bytes} are allowed")
        return self._exactly(length, deadline)

    def _exactly(self, length: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            if not select.select([self.link], [], [], _left(deadline))[0]:
                raise TimeoutError("no time left")
            part = self.link.recv(min(length - len(parts), 1 << 16))
            if not part:
                raise EOFError("the process ended")
            parts += part
        return bytes(parts)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no time left")
    return left


def _program(isolated: bool, folder: str) -> str:
    """The text of the three files that run inside, and the line that starts them."""
    here = Path(__file__).parent
    parts = [(here / name).read_text(encoding="utf-8") for name in ("values.py", "lockdown.py", "inside.py")]
    start = (
        "control = socket.socket(fileno=os.dup(0))\n"
        "os.dup2(os.open('/dev/null', os.O_RDWR), 0)\n"
        f"serve(control, {isolated}, {folder!r})\n"
    )
    return "\n".join([*parts, start])
