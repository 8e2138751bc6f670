"""DeepSpeed ZeRO: weights, gradients and optimizer state of one model, divided over its group of processes.

One DeepSpeed engine a model, with the group as its data-parallel group. Weights stay fp32 (the compute dtype is
autocast's, inside the forward), the optimizer is the same AdamW, so the numbers are those of `Engine`.
"""

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comlrl.agents import Agent
from comlrl.engine import Engine, Frozen
from comlrl.optimizers import MOMENTS, OptimizerSettings, make_optimizer, make_scheduler
from comlrl.placement import Group
from comlrl.processes import OutOfStep

OWN = {  # what belongs to the settings of the run, and where it stands there
    "optimizer": "agent_learning_rate, adam_betas, adam_eps, weight_decay",
    "scheduler": "lr_schedule, warmup_steps",
    "fp16": "dtype: bfloat16",
    "bf16": "dtype (weights stay fp32)",
    "amp": "dtype",
}


def read_config(source: str | Mapping[str, Any]) -> dict[str, Any]:
    """A DeepSpeed configuration (a JSON file, or what Accelerate read) as this trainer needs it, or a ValueError."""
    if isinstance(source, str):
        if not Path(source).is_file():
            raise ValueError(f"deepspeed_config={source!r}: no such file; ds_configs/ has some")
        try:
            raw = json.loads(Path(source).read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"deepspeed_config={source!r} is not JSON: {error}") from error
    else:
        raw = copy.deepcopy(dict(source))
    for key, where in OWN.items():
        entry = raw.pop(key, None)
        enabled = isinstance(entry, Mapping) and entry.get("enabled", key in ("optimizer", "scheduler"))
        if enabled is True or (entry and key in ("optimizer", "scheduler")):
            raise ValueError(f"DeepSpeed's {key!r} is set: the run's own settings decide this ({where}); leave it out")
    stage = raw.get("zero_optimization", {}).get("stage", 0)
    if stage not in (1, 2, 3):
        raise ValueError(
            f"DeepSpeed's zero_optimization.stage={stage!r}: must be 1, 2 or 3; without ZeRO use no DeepSpeed"
        )
    # "auto" is Accelerate's, for models that it prepares; DeepSpeed's own defaults do.
    zero = {key: value for key, value in raw["zero_optimization"].items() if value != "auto"}
    rest = {key: value for key, value in raw.items() if value != "auto" and key != "train_batch_size"}
    return {
        **rest,
        "zero_optimization": zero,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW serves CPUs too
    }


OUT_OF_STEP = "out of memory while learning with ZeRO; resume with a smaller micro_batch_tokens"


class Call(nn.Module):
    """Makes function(model, ...) the forward of one module, which is what DeepSpeed wraps."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return function(self.model, *args, **kwargs)


class Topology:
    """The group as DeepSpeed asks for it (its `mpu`): data-parallel only."""

    def __init__(self, group: Group):
        self.group = group

    def get_data_parallel_group(self) -> Any:
        return self.group.process_group or dist.group.WORLD

    def get_data_parallel_world_size(self) -> int:
        return self.group.size

    def get_data_parallel_rank(self) -> int | None:
        return self.group.place

    def get_model_parallel_group(self) -> None:
        return None

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0


@contextmanager
def confined(group: Group) -> Iterator[None]:
    """Inside, DeepSpeed's barriers are the group's: it takes them over all processes, of which some lack this model."""
    from deepspeed import comm
    from deepspeed.runtime.zero import partitioned_param_coordinator

    if group.process_group is None:
        yield
        return
    # A check, over all processes too, that they call modules in the same order: each group has modules of its own.
    partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda numbers: None
    barrier = comm.barrier
    comm.barrier = lambda *args, **kwargs: dist.barrier(group=group.process_group)
    try:
        yield
    finally:
        comm.barrier = barrier


class ZeroEngine(Engine):
    """`Engine` over DeepSpeed. Its processes have to make each call together."""

    lockstep = True

    def __init__(
        self,
        model: nn.Module,
        settings: OptimizerSettings,
        total_steps: int | None,
        group: Group,
        config: Mapping[str, Any],
    ):
        import deepspeed  # takes seconds, so only where it is used

        self.model = model
        self.settings = settings
        self.group = group
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(model, settings)
        self.scheduler = make_scheduler(self.optimizer, settings, total_steps)
        self.stage = config["zero_optimization"]["stage"]
        full = dict(config)
        if settings.max_grad_norm is not None:
            full["gradient_clipping"] = settings.max_grad_norm
        self.idle = False  # DeepSpeed has its own offload
        self.device = next(model.parameters()).device
        with confined(group):
            self.engine, *_ = deepspeed.initialize(
                model=Call(model), optimizer=self.optimizer, config=full, mpu=Topology(group), dist_init_required=False
            )
        self.pending = False  # whether a gradient has been accumulated

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return self.engine(function, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise OutOfStep(OUT_OF_STEP) from error

    def backward(self, loss: Tensor, last: bool = True) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        try:
            self.engine.backward(loss * self.group.size)  # DeepSpeed takes the mean, a loss here is a sum
        except torch.OutOfMemoryError as error:
            raise OutOfStep(OUT_OF_STEP) from error
        self.pending = True

    def refresh(self, agent: Agent) -> None:
        agent.weights_changed(self.gathered if self.stage == 3 else None)

    def reduce(self) -> None:
        """DeepSpeed has done it in the last `backward`."""

    def grad_norm(self) -> float:
        from deepspeed.runtime.utils import combine_grad_norm_groups

        if not self.pending:
            return 0.0
        if self.stage == 3:
            return float(combine_grad_norm_groups(self.engine.optimizer._get_norm_groups()))
        return float(self.engine.optimizer.scaled_global_norm())

    def step(self, grad_norm: float) -> None:
        if not self.pending:  # every sample was left out as exactly zero: a step of gradient zero
            self.backward(self.run(whole_sum) * 0)
        self.engine.step()
        self.scheduler.step()
        self.pending = False

    def skip(self) -> None:
        self.scheduler.step()
        self.clear()

    def clear(self) -> None:
        """Throw accumulated gradients away. DeepSpeed does that itself, in all its buffers, when the norm is NaN."""
        if not self.pending:
            return
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.backward(self.run(whole_sum) * float("nan"))
        self.engine.step()
        self.pending = False

    # ---- whole tensors ----------------------------------------------------------------------------------------------

    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager:
        """Inside, these parameters are whole in every process of the group."""
        from deepspeed.runtime.zero import GatheredParameters

        return GatheredParameters(list(parameters), enabled=self.stage == 3)

    def weights(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        saved = self.model.state_dict()
        tensors = {name: buffer for name, buffer in self.model.named_buffers() if name in saved}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                tensors[name] = safe_get_full_fp32_param(parameter).cpu()
            else:
                with self.gathered([parameter]):
                    tensors[name] = parameter.detach().cpu().clone()
        return tensors

    def load_weights(self, tensors: Mapping[str, Tensor], where: str) -> None:
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_set_full_fp32_param

        self.clear()
        own = dict(self.model.named_buffers())
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                value = tensors[name].to(self.engine.device)
                # The weights that the forward reads, and the ones that the optimizer steps.
                with GatheredParameters([parameter], modifier_rank=0, enabled=self.stage == 3):
                    if self.stage < 3 or self.group.leader:
                        parameter.data.copy_(value)
                if parameter.requires_grad:
                    safe_set_full_fp32_param(parameter, value)
            for name in own.keys() & tensors.keys():
                own[name].copy_(tensors[name])

    def state_tensors(self) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_optimizer_state

        if not self.optimizer.state:
            return {}
        return {
            f"{key}.{name}": safe_get_full_optimizer_state(parameter, key).cpu()
            for name, parameter in self.named_parameters().items()
            for key in MOMENTS
        }

    def load_state(self, tensors: Mapping[str, Tensor], counters: Mapping[str, int]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        self.clear()
        if not tensors and not self.optimizer.state:
            self.load_schedule(counters["schedule_steps"])
            return
        if not self.optimizer.state:
            # DeepSpeed can only set moments that exist. A step with gradient 0 and learning rate 0 changes no weight.
            for group in self.optimizer.param_groups:
                group["lr"] = 0.0
            self.backward(self.run(whole_sum) * 0)
            self.engine.step()
            self.pending = False
        for name, parameter in self.named_parameters().items():
            for key in MOMENTS:
                value = tensors.get(f"{key}.{name}")
                zeros = torch.zeros(full_shape(parameter))
                safe_set_full_optimizer_state(
                    parameter, (value if value is not None else zeros).to(self.engine.device), key
                )
        for state in self.optimizer.state.values():
            state["step"] = torch.full_like(state["step"], float(counters["optimizer_steps"]))
        self.load_schedule(counters["schedule_steps"])


def whole_sum(model: nn.Module) -> Tensor:
    """A number that depends on the model: the smallest forward there is, one token."""
    ids = torch.zeros((1, 1), dtype=torch.long, device=next(model.parameters()).device)
    return model(input_ids=ids).logits.float().sum()


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """Of a parameter that stage 3 may hold a part of only."""
    return parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape  # DeepSpeed's attribute


class ZeroFrozen(Frozen):
    """A frozen model under ZeRO-3, divided over its group."""

    lockstep = True

    def __init__(self, model: nn.Module, group: Group, config: Mapping[str, Any], device: torch.device):
        import deepspeed

        zero = {key: value for key, value in config["zero_optimization"].items() if "optimizer" not in key}
        self.model = model
        self.group = group
        self.device = device
        self.idle = False
        with confined(group):
            self.engine, *_ = deepspeed.initialize(
                model=Call(model),
                config={**config, "zero_optimization": zero},
                mpu=Topology(group),
                dist_init_required=False,
            )

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.engine(function, *args, **kwargs)

    def weights(self) -> dict[str, Tensor]:
        from deepspeed.runtime.zero import GatheredParameters

        saved = self.model.state_dict()
        tensors = {name: buffer for name, buffer in self.model.named_buffers() if name in saved}
        for name, parameter in self.model.named_parameters():
            with GatheredParameters([parameter]):
                tensors[name] = parameter.detach().cpu().clone()
        return tensors

    def load_weights(self, tensors: Mapping[str, Tensor], where: str) -> None:
        from deepspeed.runtime.zero import GatheredParameters

        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                with GatheredParameters([parameter], modifier_rank=0):
                    if self.group.leader:
                        parameter.data.copy_(tensors[name])
