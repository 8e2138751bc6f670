"""SIGTERM and SIGINT: finish or abandon the running step, save, exit.

The worker exits with 128 + the signal's number: 143 after SIGTERM, 130 after SIGINT. A second SIGINT exits at once.
`accelerate launch` ends at a SIGTERM without telling its worker, so the worker asks the kernel to be told
(`end_with_parent`).
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

PR_SET_PDEATHSIG = 1


class Abandoned(Exception):
    """The running step was given up because of a signal; no weight has moved."""


class StopSignal:
    """Within `with StopSignal() as stop`, signals set `stop.requested` instead of ending the process.

    Inside `with stop.abandonable()` a signal raises `Abandoned` there and then: a rollout of an hour need not be waited for.
    """

    def __init__(self) -> None:
        self.requested: int | None = None
        self._abandon = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None and number == signal.SIGINT:
            os._exit(128 + number)
        self.requested = number
        print(f"signal {number}: saving, then exit; Ctrl-C again exits at once", file=sys.stderr, flush=True)
        if self._abandon:
            self._abandon = False
            raise Abandoned

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        if self.requested is not None:
            raise Abandoned
        self._abandon = True
        try:
            yield
        finally:
            self._abandon = False

    def exit(self) -> None:
        assert self.requested is not None
        sys.exit(128 + self.requested)


def end_with_parent() -> None:
    """Get a SIGTERM when `accelerate launch` dies. Linux only; elsewhere its workers outlive it until they end.

    Not for a script started by hand: `nohup python train.py &` shall outlive its shell.
    """
    if sys.platform == "linux" and "ACCELERATE_MIXED_PRECISION" in os.environ:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
