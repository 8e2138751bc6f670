"""The least time that an update can take on this machine, from two rates measured in the same run.

floor = (6 x parameters x trained tokens + 2 x parameters x prompt tokens) / rate of matrix products
        + decode steps x time of one pass of a batch over the weights

6 operations a parameter and trained token: forward 2, backward 4. A decode step reads every weight once whatever the
batch, so it is timed as it is: the products of a batch of vectors with each of the model's matrices.
"""

import statistics
import time
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Floor:
    matmul_rate: float  # operations a second
    decode_step: float  # seconds
    learn: float  # seconds an update, one agent
    decode: float

    @property
    def total(self) -> float:
        return self.learn + self.decode


def median_seconds(work, repeats: int = 5) -> float:
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def matmul_rate(dtype: torch.dtype, size: int = 1024) -> float:
    """Operations a second of a square matrix product."""
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return 2 * size**3 / median_seconds(lambda: left @ right)


def decode_step_seconds(model: nn.Module, batch: int, dtype: torch.dtype) -> float:
    """One token for each row of a batch: every matrix that a token goes through, once; the head too if it is tied."""
    matrices = [module.weight.detach().to(dtype) for module in model.modules() if isinstance(module, nn.Linear)]
    inputs = {matrix.shape[1]: torch.randn(batch, matrix.shape[1]).to(dtype) for matrix in matrices}

    def work() -> None:
        for matrix in matrices:
            nn.functional.linear(inputs[matrix.shape[1]], matrix)

    with torch.no_grad():
        return median_seconds(work)


def floor_of(
    parameters: int, trained_tokens: int, prompt_tokens: int, decode_steps: int, rate: float, step: float
) -> Floor:
    operations = 6 * parameters * trained_tokens + 2 * parameters * prompt_tokens
    return Floor(rate, step, operations / rate, decode_steps * step)
