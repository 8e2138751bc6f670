"""One optimizer step of one model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import get_scheduler

# Schedules of transformers.get_scheduler that need no number of steps, and those that do.
OPEN_SCHEDULES = ("constant", "constant_with_warmup")
MOMENTS = ("exp_avg", "exp_avg_sq")
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

    # What a checkpoint holds: moments by parameter name, so that it does not depend on how parameters are grouped.

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def state_tensors(self) -> dict[str, Tensor]:
        """AdamW's moments: `exp_avg.<name>` and `exp_avg_sq.<name>`; none before the first step."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters().items():
            moments = self.optimizer.state.get(parameter, {})
            tensors |= {f"{key}.{name}": moments[key] for key in MOMENTS if key in moments}
        return tensors

    def counters(self) -> dict[str, int]:
        """Steps that AdamW took (it corrects its bias by them), and steps of the schedule."""
        steps = [int(state["step"]) for state in self.optimizer.state.values()]
        return {"optimizer_steps": max(steps, default=0), "schedule_steps": self.scheduler.last_epoch}

    def load_state(self, tensors: Mapping[str, Tensor], counters: Mapping[str, int]) -> None:
        """The learning rate and the schedule's shape are this engine's own: they may change on resume."""
        self.clear()
        self.optimizer.state.clear()
        for name, parameter in self.named_parameters().items():
            if f"{MOMENTS[0]}.{name}" in tensors:
                state = {key: torch.empty_like(parameter).copy_(tensors[f"{key}.{name}"]) for key in MOMENTS}
                state["step"] = torch.tensor(float(counters["optimizer_steps"]), device=parameter.device)
                self.optimizer.state[parameter] = state
        self.scheduler.last_epoch = counters["schedule_steps"]
        rates = [
            base * scale(self.scheduler.last_epoch)
            for base, scale in zip(self.scheduler.base_lrs, self.scheduler.lr_lambdas)
        ]
        for group, rate in zip(self.optimizer.param_groups, rates):
            group["lr"] = rate
        self.scheduler._last_lr = rates


def shared_parameter(models: Sequence[nn.Module]) -> tuple[int, int] | None:
    """Two models that hold the same weights in memory, if any: two optimizers would fight over them."""
    owner: dict[int, int] = {}
    for index, model in enumerate(models):
        for parameter in model.parameters():
            first = owner.setdefault(parameter.data_ptr(), index)
            if first != index:
                return first, index
    return None
