"""Models that leave their device while they have nothing to do (`offload_idle`)."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def move(module: nn.Module, device: torch.device | str) -> None:
    """Weights, gradients and buffers, in place: the parameters stay the same objects, as an optimizer knows them."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(device)
        if parameter.grad is not None:
            parameter.grad.data = parameter.grad.data.to(device)
    for buffer in module.buffers():
        buffer.data = buffer.data.to(device)


def move_moments(optimizer: torch.optim.Optimizer, device: torch.device | str) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            state[key] = value.to(device)


@contextmanager
def on_device(module: nn.Module, device: torch.device, idle: bool) -> Iterator[None]:
    """Inside, the module is on `device`; with `idle` it is on the CPU before and after."""
    if not idle:
        yield
        return
    move(module, device)
    try:
        yield
    finally:
        move(module, "cpu")
