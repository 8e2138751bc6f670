"""AdamW and its schedule: with moments in fp32 (torch), or in 8 bits (torchao)."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import get_scheduler

# Schedules of transformers.get_scheduler that need no number of steps, and those that do.
OPEN_SCHEDULES = ("constant", "constant_with_warmup")
PLANNED_SCHEDULES = ("linear", "cosine", "cosine_with_restarts")
OPTIMIZERS = ("adamw", "adamw_8bit")
MOMENTS = ("exp_avg", "exp_avg_sq")
SAVED = (*MOMENTS, *(f"{key}_scale" for key in MOMENTS))  # what a checkpoint may hold of a parameter


@dataclass(frozen=True)
class OptimizerSettings:
    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float | None = 1.0
    schedule: str = "constant"
    warmup_steps: int = 0
    name: str = "adamw"


def check_optimizer(name: str, zero: Any) -> None:
    """Refuse an 8-bit optimizer that cannot be had; `zero`: DeepSpeed's config, or None."""
    if name == "adamw":
        return
    if zero is not None:
        raise ValueError(
            f"optimizer={name!r}: DeepSpeed divides or offloads the moments itself; leave one of the two out"
        )
    if importlib.util.find_spec("torchao") is None:
        raise ValueError(f"optimizer={name!r}: the package torchao is not installed; run: pip install torchao")


def make_optimizer(model: nn.Module, settings: OptimizerSettings) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    options: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": settings.betas,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
    }
    if settings.name == "adamw":
        return torch.optim.AdamW(parameters, **options, fused=True)
    from torchao.optim import AdamW8bit  # takes seconds, so only where it is used

    return AdamW8bit(parameters, **options)


def make_scheduler(optimizer: torch.optim.Optimizer, settings: OptimizerSettings, total_steps: int | None) -> Any:
    name = settings.schedule
    if name == "constant" and settings.warmup_steps:
        name = "constant_with_warmup"
    return get_scheduler(name, optimizer, num_warmup_steps=settings.warmup_steps, num_training_steps=total_steps)


def set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    for group, rate in zip(optimizer.param_groups, rates):
        if isinstance(group["lr"], Tensor):  # torchao: a number there would compile its step again
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def read_moments(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """`exp_avg` and `exp_avg_sq` in fp32, of a parameter's shape; nothing before the first step.

    For moments in 8 bits also the scales of their blocks, `exp_avg_scale` and `exp_avg_sq_scale`: the numbers alone do
    not give them back, since the smallest code stands for -0.993 of a scale and not for all of it.
    """
    state = optimizer.state.get(parameter, {})
    tensors = {}
    for key in MOMENTS:
        if key in state and type(state[key]) is Tensor:  # torchao keeps small ones in fp32
            tensors[key] = state[key]
        elif key in state:
            tensors |= {key: state[key].dequantize(), f"{key}_scale": state[key].scale}
    return tensors


def write_moments(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, tensors: Mapping[str, Tensor], steps: int
) -> None:
    """What `read_moments` gave, of this optimizer or of the other one."""
    state: dict[str, Any] = {"step": torch.tensor(float(steps))}
    if isinstance(optimizer, torch.optim.AdamW):
        state["step"] = state["step"].to(parameter.device)
        for key in MOMENTS:
            state[key] = torch.empty_like(parameter).copy_(tensors[key])
    else:
        for key in MOMENTS:
            value = tensors[key].to(parameter.device)
            state[key] = optimizer._new_buffer(parameter.detach(), key == "exp_avg")  # type: ignore[attr-defined]
            if f"{key}_scale" in tensors:
                set_codes(state[key], value, tensors[f"{key}_scale"])
            else:
                state[key].copy_(value)
    optimizer.state[parameter] = state


def set_codes(moment: Any, value: Tensor, scale: Tensor) -> None:
    """Give one of torchao's tensors the very codes that `value` was read from, at the scales of its blocks."""
    moment.scale.copy_(scale)
    scaled = value.view(len(moment.scale), -1) / moment.scale.clamp(min=1e-30).unsqueeze(1)
    middles = (moment.qmap[1:] + moment.qmap[:-1]) / 2
    moment.codes.copy_(torch.bucketize(scaled, middles).view_as(value))
