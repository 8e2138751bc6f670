"""One optimizer step of one model."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import get_scheduler

# Schedules of transformers.get_scheduler that need no number of steps, and those that do.
OPEN_SCHEDULES = ("constant", "constant_with_warmup")
PLANNED_SCHEDULES = ("linear", "cosine", "cosine_with_restarts")


@dataclass(frozen=True)
class OptimizerSettings:
    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0
    schedule: str = "constant"
    warmup_steps: int = 0


class Engine:
    """AdamW on fp32 weights with clipping and a learning-rate schedule.

    A step has three parts, so that a team can check every agent's gradient before any weight moves:
    `backward` (any number of times), `grad_norm`, then `step` or `skip`.
    """

    def __init__(self, model: nn.Module, settings: OptimizerSettings, total_steps: int | None):
        self.model = model
        self.settings = settings
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        name = settings.schedule
        if name == "constant" and settings.warmup_steps:
            name = "constant_with_warmup"
        self.scheduler = get_scheduler(
            name, self.optimizer, num_warmup_steps=settings.warmup_steps, num_training_steps=total_steps
        )

    @property
    def learning_rate(self) -> float:
        return self.scheduler.get_last_lr()[0]

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def grad_norm(self) -> float:
        """Global 2-norm of the accumulated gradient, before clipping; 0 if there is none."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0

    def step(self, grad_norm: float) -> None:
        limit = self.settings.max_grad_norm
        if limit is not None and grad_norm > limit:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(limit / (grad_norm + 1e-6))
        # A parameter without gradient is one whose samples were all skipped as exactly zero: step it as zero.
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.scheduler.step()
        self.clear()

    def skip(self) -> None:
        """Leave the weights and moments as they are; the schedule goes on."""
        self.scheduler.step()
        self.clear()

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


def shared_parameter(models: Sequence[nn.Module]) -> tuple[int, int] | None:
    """Two models that hold the same weights in memory, if any: two optimizers would fight over them."""
    owner: dict[int, int] = {}
    for index, model in enumerate(models):
        for parameter in model.parameters():
            first = owner.setdefault(parameter.data_ptr(), index)
            if first != index:
                return first, index
    return None
