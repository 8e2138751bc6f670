"""What the processes of a run tell each other.

The rollout tree is small and the same in every process; what is divided is the work of models, rewards and transitions.
All that is said in words (results, counts, errors, a signal) goes through `World.exchange`, where every process waits
for every other as long as it takes: one of them may evaluate, save or score for an hour. Only then do collectives on
tensors begin, so a time-out set for those never strikes while there is work.
"""

import atexit
import os
import sys
import time
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.elastic.multiprocessing.errors import record
from transformers.integrations import unset_hf_deepspeed_config

from comlrl.signals import Abandoned, StopSignal

T = TypeVar("T")
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)

PATIENCE = timedelta(days=30)  # of a process that waits for what another one works on
SECONDS_TO_BE_ENDED = 15


class ProcessError(RuntimeError):
    """Another process failed. Its own message is the one to read."""


class LostProcess(ProcessError):
    """Another process is gone, so nothing can be agreed on any more."""


class OutOfStep(ProcessError):
    """This process cannot go on with something that the others are in the middle of: their collectives wait for it."""


def process_count() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def by_deepspeed() -> bool:
    """Whether `accelerate launch` was told to use DeepSpeed."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def run_script(main: Callable[[], None]) -> None:
    """main() of a script. With several processes the launcher then shows the error that came first, and its process."""

    def guarded() -> None:
        try:
            main()
        except ProcessError as error:
            if process_count() == 1:
                raise
            print(f"process {os.environ['RANK']} ends: {error}", file=sys.stderr, flush=True)
            time.sleep(SECONDS_TO_BE_ENDED)  # the launcher names the one that ends first, and ends the others
            os._exit(1)

    try:
        record(guarded)()
    except SystemExit as end:
        if dist.is_initialized() and isinstance(end.code, int):
            exit_without_teardown(end.code)
        raise
    if dist.is_initialized():
        exit_without_teardown(0)


def exit_without_teardown(code: int) -> NoReturn:
    """Exit handlers, then out, without taking the interpreter apart.

    One of gloo's threads may still hold a tensor that Python has seen. To free it, it asks for the interpreter; while
    that is being taken apart the answer is an abort ("terminate called without an active exception"), after a whole
    run. The threads cannot be joined first: DeepSpeed keeps references to their groups.
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class World:
    """All processes of this run: `rank` of `size`. With one process everything here returns at once.

    collective_timeout: seconds. deepspeed: whether it is wanted, also in one process.
    """

    def __init__(self, collective_timeout: float | None = None, deepspeed: bool = False):
        self.rank, self.size = 0, 1
        self.stop: StopSignal | None = None  # a signal in one process stops all
        self.deepspeed_config: dict[str, Any] | None = None  # as `accelerate launch` was told
        if process_count() == 1 and not deepspeed and not by_deepspeed():
            return
        timeout = None if collective_timeout is None else timedelta(seconds=collective_timeout)
        if not dist.is_initialized():
            gpus = torch.cuda.is_available()
            if gpus:
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            backend = "nccl" if gpus else "gloo"
            if "RANK" in os.environ:
                dist.init_process_group(backend, timeout=timeout)
            else:  # started without a launcher: DeepSpeed wants a group of one
                os.environ.setdefault("LOCAL_RANK", "0")
                dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._control = dist.new_group(backend="gloo", timeout=PATIENCE)
        if by_deepspeed():
            plugin = Accelerator().state.deepspeed_plugin
            assert plugin is not None
            self.deepspeed_config = dict(plugin.deepspeed_config)
            # The plugin tells transformers of ZeRO-3, which would then divide weights while it loads them: here a model
            # is loaded whole, and its own engine divides it over its own group.
            unset_hf_deepspeed_config()

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.size == 1

    def exchange(self, value: T, failure: Exception | None = None, what: str = "") -> list[T]:
        """Every process's value, in order of rank. All have to call, at the same place (`what`).

        A failure in one process is raised in all of them, and a signal that reached one abandons the piece of work in
        all, so that they stay together and can still save.
        """
        if self.alone:
            if failure is not None:
                raise failure
            return [value]
        signal = self.stop.received if self.stop is not None else None
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        answers: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(answers, (value, text, signal, what), group=self._control)
        except RuntimeError as error:
            raise failure or LostProcess("another process ended; its own message says why") from error
        if failure is not None:
            raise failure
        for rank, (_, said, _, where) in enumerate(answers):
            if said is not None:
                raise ProcessError(f"process {rank} failed: {said}")
            if where != what:
                raise LostProcess(f"process {rank} is at {where!r}, process {self.rank} at {what!r}")
        signals = [number for _, _, number, _ in answers if number is not None]
        if signals and self.stop is not None:
            self.stop.requested = signals[0]
            if self.stop.may_abandon:
                raise Abandoned
        return [value for value, _, _, _ in answers]

    def together(self, work: Callable[[], T]) -> list[T]:
        """work() in every process, then every process's result, in order of rank.

        `work` may exchange as well, but not call `together`: an error is told to the others once.
        """
        try:
            value = work()
        except ProcessError:
            raise
        except Exception as error:
            self.exchange(None, error)
            raise
        return self.exchange(value, what=work.__qualname__)

    def union(self, work: Callable[[], dict[Key, T]]) -> dict[Key, T]:
        """The dictionaries of all processes in one."""
        return {key: value for part in self.together(work) for key, value in part.items()}

    def divide(self, items: Sequence[Item], work: Callable[[Item], T]) -> list[T]:
        """work(item) of each item, divided over the processes; every process gets all results, in order."""
        if self.alone:
            return [work(item) for item in items]
        mine = range(self.rank, len(items), self.size)
        results = self.union(lambda: {place: work(items[place]) for place in mine})
        return [results[place] for place in range(len(items))]

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process."""
        return any(self.exchange(flag))

    def from_main(self, value: T) -> T:
        """What the main process has."""
        return self.exchange(value)[0]
