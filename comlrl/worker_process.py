"""A process that runs a user's functions and can be killed when one of them takes too long.

Two processes are forked when a `WorkerProcess` is built, which should be before any model is loaded: a
supervisor, which never runs a user's code, and its child, the worker.

Fork, because the functions are often closures and lambdas, which spawn cannot pickle. A supervisor, because
fork is safe only from a process without other threads and device contexts: after a time-out the next worker
is forked from the supervisor, not from a trainer that by now holds models, CUDA contexts and NCCL threads. It
also outlives the trainer by half a second, so that even a `kill -9` of the trainer leaves no hung worker
behind.
"""

import math
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import psutil
import torch

_POLL_SECONDS = 0.5
_STOP = b""
_TIMED_OUT = b"timed out"


class TimedOut(Exception):
    """The call was killed at its time limit. Not TimeoutError, which users' functions raise themselves."""


class WorkerClosed(RuntimeError):
    """The processes have been ended: by `close`, by a Ctrl-C in the middle of a call, or by someone else."""


class UnpicklableArguments(ValueError):
    """The arguments of the call cannot be sent to another process."""


class _OwnerGone(Exception):
    pass


class WorkerProcess:
    """Runs one call at a time, in the main thread of a child, for at most `timeout` seconds each.

    The child is killed at the time limit, and a new one starts from the state that the functions had when
    this object was built: whatever a function stored since is lost.
    """

    def __init__(self, functions: Sequence[Callable], timeout: float):
        self._connection, remote = multiprocessing.Pipe()
        self._supervisor = _fork(_supervise, self._connection, remote, functions, timeout, os.getpid())
        remote.close()

    def call(self, index: int, *args: Any) -> Any:
        """functions[index](*args). Raises what it raised, TimedOut, or RuntimeError if the child died.

        An exception that does not pickle arrives as a RuntimeError with its traceback as text. Also raises
        WorkerClosed and UnpicklableArguments.
        """
        if self._connection.closed:
            raise WorkerClosed("the worker process is closed")
        try:
            request = pickle.dumps((index, args))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise UnpicklableArguments(str(error)) from error
        try:
            self._connection.send_bytes(request)
            answer = self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            self.close()
            raise WorkerClosed("the supervisor of the worker process was killed") from error
        except BaseException:  # a Ctrl-C: the answer still to come would be taken for that of the next call
            self.close()
            raise
        if answer == _TIMED_OUT:
            raise TimedOut
        ok, content, text = pickle.loads(answer)
        if not ok:
            raise _received(content, text)
        return content

    def close(self) -> None:
        """Ends both processes and all that the functions started. A second call does nothing."""
        if self._connection.closed:
            return
        with suppress(OSError):
            self._connection.send_bytes(_STOP)
        self._connection.close()
        with suppress(ChildProcessError):  # someone else waits for all children of this process
            os.waitpid(self._supervisor, 0)


def add_note(error: BaseException, line: str) -> None:
    if sys.version_info >= (3, 11):
        error.add_note(line)


def _received(pickled: bytes | None, text: str) -> BaseException:
    if pickled is not None:
        with suppress(Exception):  # its class may be one that only the worker has imported
            error = pickle.loads(pickled)
            add_note(error, f"In the worker process:\n{text}")
            return error
    return RuntimeError(f"raised in the worker process:\n{text}")


# ------------------------------------------------------------------------------------------- in the processes


def _fork(target: Callable, *args: Any) -> int:
    sys.stdout.flush()  # what is still buffered would be written twice
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        target(*args)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # without the exit handlers, which are the parent's


def _supervise(
    owners_end: Connection,
    connection: Connection,
    functions: Sequence[Callable],
    timeout: float,
    owner: int,
) -> None:
    owners_end.close()
    os.setsid()  # a Ctrl-C in the terminal is for the trainer
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in _job_signals():
        signal.signal(number, signal.SIG_IGN)  # this process goes when the trainer goes, or says so
    pid, worker = _start_worker(connection, functions)
    try:
        while True:
            _wait([connection], owner, math.inf)
            request = connection.recv_bytes()
            if request == _STOP:
                return
            answer = None
            with suppress(EOFError, OSError):  # the worker died, answer stays None
                worker.send_bytes(request)
                ready = _wait([worker, connection], owner, timeout)
                if connection in ready:  # closed in the middle of the call
                    return
                answer = worker.recv_bytes() if ready else _TIMED_OUT
            if answer is None or answer is _TIMED_OUT:
                code = _kill(pid)
                worker.close()
                pid, worker = _start_worker(connection, functions)
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                answer = answer or pickle.dumps((False, None, f"the process died with {how}"))
            connection.send_bytes(answer)
    except (EOFError, OSError, _OwnerGone):
        return
    finally:
        _kill(pid)


def _wait(connections: list[Connection], owner: int, timeout: float) -> list:
    """The connections that can be read, none at the time limit. Raises _OwnerGone."""
    deadline = time.monotonic() + timeout
    while (left := deadline - time.monotonic()) > 0:
        if ready := wait(connections, min(left, _POLL_SECONDS)):
            return ready
        # The end of file is not enough: other children of the owner may hold copies of its end of the pipe.
        if os.getppid() != owner:
            raise _OwnerGone
    return []


def _start_worker(connection: Connection, functions: Sequence[Callable]) -> tuple[int, Connection]:
    ours, theirs = multiprocessing.Pipe()
    pid = _fork(_work, [ours, connection], theirs, functions)
    theirs.close()
    return pid, ours


def _work(others: list[Connection], connection: Connection, functions: Sequence[Callable]) -> None:
    for other in others:
        other.close()
    os.setsid()  # a group of its own, so that what the functions start can be killed with it
    for number in _job_signals():  # the worker stays while the trainer reacts, for example saves
        signal.signal(number, lambda *_: None)
    os.register_at_fork(  # its own children react as usual, also to a signal sent right after the fork
        before=partial(signal.pthread_sigmask, signal.SIG_BLOCK, _job_signals()),
        after_in_parent=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, _job_signals()),
        after_in_child=_restore_signals,
    )
    torch.set_num_threads(1)  # the threads of the parent's pool do not exist here, waiting for them would hang
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):  # the supervisor is gone
            return
        try:
            index, args = pickle.loads(request)
            answer = pickle.dumps((True, functions[index](*args), ""))
        except BaseException as error:
            answer = pickle.dumps((False, _pickled(error), traceback.format_exc()))
        sys.stdout.flush()
        connection.send_bytes(answer)


def _job_signals() -> list[signal.Signals]:
    """What terminals and cluster managers send to all processes of a job, to warn or to end it."""
    return [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]


def _restore_signals() -> None:
    for number in _job_signals():
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _job_signals())


def _pickled(error: BaseException) -> bytes | None:
    with suppress(Exception):  # whatever the class does in __reduce__ and __init__
        data = pickle.dumps(error)
        if type(pickle.loads(data)) is type(error):
            return data
    return None


def _kill(pid: int) -> int:
    """Kills a worker with its group and descendants. Returns its exit code, -n if signal n ended it."""
    descendants: list[psutil.Process] = []
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        process.suspend()  # so that it starts no more of them
        descendants = process.children(recursive=True)
    with suppress(ProcessLookupError, PermissionError):  # it may not have had the time to make its group
        os.killpg(pid, signal.SIGKILL)
    for descendant in descendants:
        with suppress(psutil.Error):
            descendant.kill()
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
