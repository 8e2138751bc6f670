"""Out of memory: halve what goes through a model at once, in all processes together, and do the work again."""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


class Limit:
    """How much goes through a model at once: halved when memory runs out, and it stays halved.

    key: the setting that it starts from, for messages. any_process: whether a flag is set in any process (all of them
    ask). incidents: one line a halving, for the trainer to log and clear.
    """

    def __init__(self, key: str, value: int, any_process: Callable[[bool], bool] = bool):
        self.key, self.value = key, value
        self.any_process = any_process
        self.incidents: list[str] = []

    def run(self, work: Callable[[int], T], most: int, least: int = 1) -> T:
        """work(limit), again with half the limit each time that it runs out of memory, in any process.

        `work` must be able to start anew. `most`: all that there is to do, so that a limit above it bounds nothing;
        `least`: what cannot be divided. Raises torch.OutOfMemoryError when there is nothing left to halve.
        """
        while True:
            failure = None
            try:
                result = work(self.value)
            except torch.OutOfMemoryError as error:
                failure = str(error)  # not the error itself: its frames hold the tensors
            if not self.any_process(failure is not None):
                return result
            bound = min(self.value, most)
            if bound <= least:
                raise torch.OutOfMemoryError(f"{self.key}={self.value} cannot be halved any more. {failure or ''}")
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            self.value = max(bound // 2, least)
            why = failure or "in another process"
            self.incidents.append(f"out of memory; {self.key} is {self.value} from now on ({why})")
