"""One optimizer step of one model: plain torch here, DeepSpeed ZeRO in `comlrl.zero`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comlrl import checkpoint
from comlrl.agents import Agent
from comlrl.offload import move, move_moments, on_device
from comlrl.optimizers import (
    SAVED,
    OptimizerSettings,
    make_optimizer,
    make_scheduler,
    read_moments,
    set_rates,
    write_moments,
)
from comlrl.placement import ALONE, Group

BUCKET = 50_000_000  # numbers that travel at once


class Engine:
    """AdamW on fp32 weights with clipping and a learning-rate schedule.

    A step has four parts, so that a team can check every agent's gradient before any weight moves: `backward` (any
    number of times), `reduce`, `grad_norm`, then `step` or `skip`. With several processes each has its share of the
    loss, a sum, and `reduce` adds the gradients up. Not DDP: gradients are accumulated over micro-batches first, so
    there is nothing that communication could overlap with, and processes may have different numbers of them.
    """

    lockstep = False  # whether every process of the group has to call `run` and `backward` equally often
    stage = 0  # of ZeRO

    def __init__(self, model: nn.Module, settings: OptimizerSettings, total_steps: int | None, group: Group = ALONE):
        self.model = model
        self.settings = settings
        self.group = group
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(model, settings)
        self.scheduler = make_scheduler(self.optimizer, settings, total_steps)
        self.idle = False  # see `leave_device`
        self.device = next(model.parameters()).device

    def leave_device(self) -> None:
        """From now on everything is on the CPU between two calls of `awake`."""
        self.idle = True
        move(self.model, "cpu")
        move_moments(self.optimizer, "cpu")

    def awake(self) -> AbstractContextManager:
        """Inside, the weights are on the device: around forwards, backwards and steps."""
        return on_device(self.model, self.device, self.idle)

    @property
    def learning_rate(self) -> float:
        return float(self.scheduler.get_last_lr()[0])

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """function(model, ...): every forward of the trained weights goes through here."""
        return function(self.model, *args, **kwargs)

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """`last`: whether no other one follows before `reduce`."""
        loss.backward()

    def reduce(self) -> None:
        """Add up the gradients of the group's processes; all of them have to call."""
        if self.group.size == 1:
            return
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.parameters]
        for bucket in buckets(gradients, BUCKET):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            dist.all_reduce(flat, group=self.group.process_group)
            for gradient, total in zip(bucket, flat.split([g.numel() for g in bucket])):
                gradient.copy_(total.view_as(gradient))
        for parameter, gradient in zip(self.parameters, gradients):
            parameter.grad = gradient

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
        if self.idle:
            move_moments(self.optimizer, self.device)
        self.optimizer.step()
        if self.idle:
            move_moments(self.optimizer, "cpu")
        self.scheduler.step()
        self.clear()

    def skip(self) -> None:
        """Leave the weights and moments as they are; the schedule goes on."""
        self.scheduler.step()
        self.clear()

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def refresh(self, agent: Agent) -> None:
        """Bring an agent's sampling copy up to date with the weights."""
        agent.weights_changed()

    # What a checkpoint holds, by parameter name, so that it does not depend on how parameters are grouped.

    def named_parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def weights(self) -> dict[str, Tensor]:
        """Whole fp32 weights and buffers by name. With ZeRO, all processes of the group have to call."""
        return checkpoint.model_tensors(self.model)

    def load_weights(self, tensors: Mapping[str, Tensor], where: str) -> None:
        checkpoint.load_model_tensors(self.model, tensors, where)

    def state_tensors(self) -> dict[str, Tensor]:
        """AdamW's moments: `exp_avg.<name>` and so on, see `read_moments`; none before the first step."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters().items():
            moments = read_moments(self.optimizer, parameter)
            tensors |= {f"{key}.{name}": value for key, value in moments.items()}
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
            moments = {key: tensors[f"{key}.{name}"] for key in SAVED if f"{key}.{name}" in tensors}
            if moments:
                write_moments(self.optimizer, parameter, moments, counters["optimizer_steps"])
        self.load_schedule(counters["schedule_steps"])

    def load_schedule(self, steps: int) -> None:
        self.scheduler.last_epoch = steps
        rates = [base * scale(steps) for base, scale in zip(self.scheduler.base_lrs, self.scheduler.lr_lambdas)]
        set_rates(self.optimizer, rates)
        self.scheduler._last_lr = rates


class Frozen:
    """A model that is not trained (a reference), and the group of processes that share its work."""

    lockstep = False

    def __init__(self, model: nn.Module, group: Group = ALONE):
        self.model = model
        self.group = group
        self.device = next(chain(model.parameters(), model.buffers())).device  # an adapter's base has only buffers
        self.idle = False

    def leave_device(self) -> None:
        self.idle = True
        move(self.model, "cpu")

    def awake(self) -> AbstractContextManager:
        return on_device(self.model, self.device, self.idle)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(self.model, *args, **kwargs)

    def weights(self) -> dict[str, Tensor]:
        """Whole weights by name. With ZeRO-3, all processes of the group have to call."""
        return checkpoint.model_tensors(self.model)

    def load_weights(self, tensors: Mapping[str, Tensor], where: str) -> None:
        checkpoint.load_model_tensors(self.model, tensors, where)


def buckets(tensors: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Neighbours, together at most `size` numbers (a larger one stands alone)."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(t.numel() for t in bucket) + tensor.numel() > size:
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def shared_parameter(models: Sequence[nn.Module]) -> tuple[int, int] | None:
    """Two models that hold the same weights in memory, if any: two optimizers would fight over them."""
    owner: dict[int, int] = {}
    for index, model in enumerate(models):
        for parameter in model.parameters():
            first = owner.setdefault(parameter.data_ptr(), index)
            if first != index:
                return first, index
    return None
