"""Who does the work of which agent."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

Result = TypeVar("Result")


class AgentPool:
    """Runs one piece of work an agent: in turn, or with `mp` at the same time, a thread an agent.

    Threads serve agents on devices of their own: the work is inside torch, which lets go of the interpreter. The pool
    lives as long as the trainer. Nothing random is drawn from a shared generator, so the results are the same.
    """

    def __init__(self, mode: str, devices: Sequence[torch.device]):
        self.executor = None
        if mode == "mp" and len(set(devices)) > 1:
            self.executor = ThreadPoolExecutor(len(devices), thread_name_prefix="agent")

    def map(self, work: Callable[[int], Result], count: int) -> list[Result]:
        """[work(0), ..., work(count - 1)]; the first error reaches the caller, once all have ended."""
        if self.executor is None:
            return [work(index) for index in range(count)]
        futures = [self.executor.submit(work, index) for index in range(count)]
        wait(futures)
        return [future.result() for future in futures]


def check_parallel_training(mode: str, agent_devices: str | Sequence[str] | None) -> None:
    if mode == "mp" and agent_devices is None:
        raise ValueError("parallel_training='mp' needs agent_devices: one device an agent, or auto")
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        raise ValueError(
            f"started with {processes} processes, but this version trains in one; add --num_processes 1 "
            "(one process can use several GPUs: parallel_training: mp, agent_devices)"
        )
