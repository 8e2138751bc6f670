"""Where a run's time goes, and how much of the machine's arithmetic its models use."""

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from comlrl.adapters import frozen_weights

Metrics = dict[str, float]

PARTS = ("generate", "reward", "reference", "learn", "sync", "save", "evaluate")


@dataclass
class Work:
    """What one process did with one agent's model: seconds, tokens read or written, and operations, by kind.

    Kinds are "generate", "reference" (log-probs without gradient) and "learn".
    """

    seconds: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    operations: float = 0.0
    peak: float = 0.0  # operations that the device can do in these seconds

    def add(self, kind: str, seconds: float, tokens: int, operations: float) -> None:
        self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds
        self.tokens[kind] = self.tokens.get(kind, 0) + tokens
        self.operations += operations

    def merge(self, other: "Work") -> None:
        """Take in what another process did."""
        for kind, seconds in other.seconds.items():
            self.add(kind, seconds, other.tokens[kind], 0.0)
        self.operations += other.operations
        self.peak += other.peak

    def metrics(self, index: int) -> Metrics:
        """Seconds and rates of one device: with several processes, their seconds are added up."""
        total = sum(self.seconds.values())
        kinds = {
            f"agent_{index}/time/{kind}": self.seconds.get(kind, 0.0) for kind in ("generate", "reference", "learn")
        }
        return kinds | {
            f"agent_{index}/time/tokens_per_second": sum(self.tokens.values()) / total if total else 0.0,
            f"agent_{index}/time/flops_share": self.operations / self.peak if self.peak else 0.0,
        }


def model_sizes(model: nn.Module) -> tuple[int, int]:
    """Weights, and those of them that are trained; before DeepSpeed divides them, which leaves none to be counted."""
    weights = [*model.parameters(), *frozen_weights(model)]
    sizes = [(weight.numel(), weight.requires_grad) for weight in weights]
    return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def model_operations(weights: int, trained: int, tokens: int, learning: bool) -> float:
    """Of one forward of `tokens` tokens, and of its backward; attention itself, small beside the weights, is left out.

    Backward: gradients of activations through all weights, and of the weights that are trained. All trained: 6 a weight
    and token.
    """
    return float((4 * weights + 2 * trained if learning else 2 * weights) * tokens)


def shares(line: Mapping[str, float], wall: float) -> Metrics:
    """Share of each part in the `wall` seconds since the last line; `idle` is what no part accounts for."""
    spent = {part: max(line.get(f"time/{part}", 0.0), 0.0) / wall for part in PARTS}
    spent["idle"] = max(0.0, 1.0 - sum(spent.values()))
    return {f"time/share/{part}": share for part, share in spent.items()}


def agent_metrics(parts: Sequence[Mapping[int, Work]], count: int, wall: float) -> Metrics:
    """Of every agent, from what each process did; and all agents' tokens that were sampled a second."""
    metrics: Metrics = {}
    written = 0
    for index in range(count):
        total = Work()
        for part in parts:
            total.merge(part[index])
        metrics |= total.metrics(index)
        written += total.tokens.get("generate", 0)
    metrics["time/tokens_per_second"] = written / wall
    return metrics


@functools.cache
def peak_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large matrix product, the best of three: measured once, on first use."""
    size = 8192 if device.type == "cuda" else 512
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(4):  # the first one warms up
        started = time.perf_counter()
        product = matrix @ matrix
        float(product[0, 0])  # waits for a GPU
        best = min(best, time.perf_counter() - started)
    return 2.0 * size**3 / best
