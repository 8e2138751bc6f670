"""Run a launcher, pass SIGTERM and SIGINT on to the workers that it starts, and wait until all have ended.

    python launch/forward.py accelerate launch train_magrpo.py --config configs/quickstart.yaml

`accelerate launch` ends at a SIGTERM and leaves its worker alone with it; here the worker gets the signal and the time
to save. The launcher has a session of its own, so Ctrl-C in a terminal reaches the worker once, through this process.

Exit code: 128 + the number of the first signal, if there was one; else the launcher's.
"""

import ctypes
import os
import signal
import sys
import threading
from contextlib import suppress

import psutil

PR_SET_PDEATHSIG = 1
SECONDS_BETWEEN_LOOKS = 0.5
GRACE_SECONDS = 5.0  # for what is left of the session when all workers have ended


def main(command: list[str]) -> int:
    signals: list[int] = []
    awake = threading.Event()

    def receive(number: int, frame: object) -> None:
        # A terminal that was closed is no reason to lose a step.
        signals.append(signal.SIGTERM if number == signal.SIGHUP else number)
        awake.set()

    signal.signal(signal.SIGTERM, receive)
    signal.signal(signal.SIGINT, receive)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, receive)
    launcher = psutil.Popen(command, start_new_session=True, preexec_fn=end_with_parent)
    workers: dict[int, psutil.Process] = {}
    told: dict[int, int] = {}  # how many of the signals each worker got
    while True:
        code = launcher.poll()
        alive = [worker for worker in workers.values() if is_alive(worker)]
        if code is None and (signals or not alive):
            with suppress(psutil.Error):
                workers |= {child.pid: child for child in launcher.children() if child.pid not in workers}
            alive = [worker for worker in workers.values() if is_alive(worker)]
        if code is not None and not alive:
            break
        for worker in alive:
            for number in signals[told.get(worker.pid, 0) :]:
                send(worker, number)
            told[worker.pid] = len(signals)
        if signals and not alive:
            send(launcher, signal.SIGTERM)  # it has started none yet
        awake.wait(SECONDS_BETWEEN_LOOKS)
        awake.clear()
    end_session(launcher.pid)
    if signals:
        return 128 + signals[0]
    return code if code >= 0 else 128 - code


def send(process: psutil.Process, number: int) -> None:
    with suppress(psutil.Error):
        process.send_signal(number)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def end_session(session: int) -> None:
    """Kill what is still there after a while: no process outlives its run."""
    left = [process for process in psutil.process_iter() if session_of(process.pid) == session and is_alive(process)]
    _, left = psutil.wait_procs(left, GRACE_SECONDS)
    for process in left:
        send(process, signal.SIGKILL)


def session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def end_with_parent() -> None:
    """Even a `kill -9` of this process ends the launcher, and with it the workers (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
