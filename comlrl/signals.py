"""SIGTERM and SIGINT: finish or abandon the running piece of work, save, exit.

The worker exits with 128 + the signal's number: 143 after SIGTERM, 130 after SIGINT. A second SIGINT ends it at once.
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
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1


class Abandoned(KeyboardInterrupt):
    """The running piece of work was given up because of a signal; no weight has moved.

    Not an Exception: a reward's `except Exception` must not swallow it.
    """


class StopSignal:
    """Within `with StopSignal() as stop`, signals set `stop.requested` instead of ending the process.

    Inside `with stop.abandonable()` a signal raises `Abandoned` there and then: nobody waits for a rollout of an hour.
    Python runs no handler while one call of torch is running, but there are many of them a second.

    With several processes (`alone` is False) a signal is only noted, in `received`; when they next exchange something,
    it becomes `requested` in all of them, and inside `abandonable` all of them raise `Abandoned` together.
    """

    def __init__(self, alone: bool = True) -> None:
        self.alone = alone
        self.received: int | None = None  # by this process
        self.requested: int | None = None  # what all processes know
        self.may_abandon = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # The next Ctrl-C is the kernel's: it ends us even inside a long call.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if self.received is None:
            self.received = number
            # Not print, which may be what was interrupted.
            os.write(2, f"signal {number}: saving, then exit; Ctrl-C again exits at once\n".encode())
        if self.alone:
            self.requested = self.received
            if self.may_abandon:
                self.may_abandon = False
                raise Abandoned

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        self.may_abandon = True
        try:
            self._give_up_if_requested()
            yield
            self._give_up_if_requested()  # somebody's bare `except:` may have swallowed it
        finally:
            self.may_abandon = False

    def _give_up_if_requested(self) -> None:
        if self.requested is not None:
            raise Abandoned

    def exit(self) -> NoReturn:
        assert self.requested is not None
        sys.exit(128 + self.requested)


def end_with_parent() -> None:
    """Get a SIGTERM when `accelerate launch` dies. Linux only; elsewhere its workers outlive it until they end.

    To be called early: before, the launcher's death goes unnoticed. Not for a script started by hand:
    `nohup python train.py &` shall outlive its shell.
    """
    if sys.platform == "linux" and "ACCELERATE_MIXED_PRECISION" in os.environ:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
