"""Which model runs on which processes and devices.

A trainer says what work there is; placement says who does it. Each model has a group of processes: by default all of
them. In one process, `AgentPool` serves agents on devices of their own with a thread each.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from comlrl.processes import World, process_count

Result = TypeVar("Result")
Item = TypeVar("Item")


class Group:
    """The processes that hold one model; `place` is this one's among them, None if it is not."""

    def __init__(self, ranks: Sequence[int] = (0,), rank: int = 0, process_group: Any = None):
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.place = self.ranks.index(rank) if rank in self.ranks else None
        self.process_group = process_group  # for collectives on tensors; None: a group of one, or all processes

    @property
    def member(self) -> bool:
        return self.place is not None

    @property
    def leader(self) -> bool:
        return self.place == 0

    def part(self, items: Sequence[Item], place: int) -> list[Item]:
        """The share of the process at `place`: neighbours stay together, as samples of one prompt do."""
        return list(items[len(items) * place // self.size : len(items) * (place + 1) // self.size])

    def share(self, items: Sequence[Item]) -> list[Item]:
        """This process's share; nothing outside the group."""
        return [] if self.place is None else self.part(items, self.place)


ALONE = Group()


class Placement:
    """The groups of a run's models. `spec`: kind -> a list of ranks for each model; see `check_placement`."""

    def __init__(self, world: World, spec: Mapping[str, Sequence[Sequence[int]]] | None, counts: Mapping[str, int]):
        self.world = world
        self._made: dict[tuple[int, ...], Any] = {tuple(range(world.size)): None}
        everyone = [list(range(world.size))]
        agents = (spec or {}).get("agents") or everyone * counts["agents"]
        chosen = {kind: (spec or {}).get(kind) or everyone * count for kind, count in counts.items()}
        if "references" not in (spec or {}) and counts.get("references"):
            chosen["references"] = agents
        chosen["agents"] = agents
        self.groups = {kind: [self._group(ranks) for ranks in lists] for kind, lists in chosen.items()}

    def _group(self, ranks: Sequence[int]) -> Group:
        key = tuple(sorted(ranks))
        if key not in self._made:  # every process makes every group, in the same order
            self._made[key] = dist.new_group(list(key))
        return Group(key, self.world.rank, self._made[key])

    def of(self, kind: str) -> list[Group]:
        return self.groups[kind]


def check_placement(spec: Any, counts: Mapping[str, int], processes: int) -> None:
    """Refuse a placement map that cannot be: `{agents: [[0, 1], [2, 3]], references: [[0, 1], [2, 3]]}` for example."""
    if spec is None:
        return
    if not isinstance(spec, Mapping):
        raise ValueError(f"placement={spec!r}: must be a mapping such as {{agents: [[0], [1]]}}")
    for kind, lists in spec.items():
        if kind not in counts:
            raise ValueError(f"placement.{kind}: no such models here; one of {', '.join(counts)}")
        if not isinstance(lists, (list, tuple)) or len(lists) != counts[kind]:
            raise ValueError(f"placement.{kind}={lists!r}: give a list of {counts[kind]} lists of ranks, one a model")
        for index, ranks in enumerate(lists):
            where = f"placement.{kind}[{index}]={ranks!r}"
            if not isinstance(ranks, (list, tuple)) or not ranks:
                raise ValueError(f"{where}: a model needs at least one rank, for example [0]")
            if any(type(rank) is not int or not 0 <= rank < processes for rank in ranks):
                raise ValueError(
                    f"{where}: ranks go from 0 to {processes - 1}, as {processes} process(es) were started"
                )
            if len(set(ranks)) < len(ranks):
                raise ValueError(f"{where}: a rank stands there twice")


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

    def close(self) -> None:
        """End the threads; the pool then works in turn."""
        if self.executor is not None:
            self.executor.shutdown()
            self.executor = None


def check_parallel_training(
    mode: str, devices: Mapping[str, str | Sequence[str] | None], deepspeed: bool = False
) -> None:
    """devices: the settings of the run that name devices."""
    if mode == "mp" and devices["agent_devices"] is None:
        raise ValueError("parallel_training='mp' needs agent_devices: one device an agent, or auto")
    if mode == "mp" and process_count() > 1:
        raise ValueError(
            f"parallel_training='mp' is for one process, and {process_count()} were started; give agents processes of "
            "their own with placement: {agents: [[0], [1]]}, or add --num_processes 1"
        )
    for key, value in devices.items():
        if value is not None and (process_count() > 1 or deepspeed):
            raise ValueError(
                f"{key}={value!r} is for one process without DeepSpeed: each of several processes uses the device of "
                "its local rank; leave it out, or use placement"
            )
