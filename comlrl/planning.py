"""What a run will take, before anything is loaded: models, devices, bytes, samples."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig

from comlrl.adapters import QUANTIZED_BYTES, has_adapter
from comlrl.loading import Member, adapter_size, resolve_devices
from comlrl.placement import Group, Placement
from comlrl.processes import World
from comlrl.rollouts import TreeShape
from comlrl.trainers.reinforce_config import MAGRPOConfig

# Bytes a trained parameter: fp32 weight, gradient, and the two moments of AdamW by `args.optimizer`.
WEIGHT, GRADIENT = 4, 4
MOMENT_BYTES = {"adamw": 8, "adamw_8bit": 2}


def model_size(member: Member) -> tuple[int, PreTrainedConfig]:
    """Parameters and config of a model, from its config alone (tied weights once)."""
    config = member.read_config()
    if not isinstance(member.source, str):
        return sum(p.numel() for p in member.source.parameters()), config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters()), config


def adapter_parameters(member: Member) -> int:
    """Of the adapter that is trained in place of the model's own weights; 0: there is none."""
    if member.lora is not None:
        return adapter_size(member, member.lora)
    if isinstance(member.source, str) or not has_adapter(member.source):
        return 0
    return sum(p.numel() for p in member.source.parameters() if p.requires_grad)


def base_bytes(member: Member, parameters: int) -> float:
    """Of a base model without adapter: in the compute dtype, or with linear layers in fewer bits."""
    width = member.compute_dtype.itemsize
    if member.lora is None or member.lora.quantization is None:
        return float(parameters * width)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(member.read_config())
    head = model.get_output_embeddings()
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not head]
    linear = sum(layer.weight.numel() for layer in layers)
    return (parameters - linear) * width + linear * QUANTIZED_BYTES[member.lora.quantization]


def kv_bytes(config: PreTrainedConfig, rows: int, tokens: int, width: int) -> int:
    """Keys and values of `rows` sequences of `tokens` tokens in numbers of `width` bytes."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * head_dim * rows * tokens * width


def gigabytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


@dataclass(frozen=True)
class Planned:
    """A model of a run, and the processes that hold it.

    trained: fp32 weights with gradients and AdamW's moments; else it is only read, in the compute dtype.
    samples: whether answers are generated from it. divided: whether ZeRO divides it. frozen_body: only a head learns.
    """

    member: Member
    group: Group
    trained: bool = True
    samples: bool = False
    divided: bool = True
    frozen_body: bool = False

    def sizes(self, parameters: int, zero: Mapping[str, Any] | None, optimizer: str) -> dict[str, float]:
        """Bytes that one process holds, without the KV cache."""
        shares = zero_shares(zero if self.divided else None, self.group.size)
        width = self.member.compute_dtype.itemsize
        if not self.trained:
            return {"weights": parameters * width * shares.reference}
        learned = 0 if self.frozen_body else parameters
        sizes = {
            "weights": parameters * WEIGHT * shares.weights + learned * WEIGHT * shares.masters,
            "gradients": learned * GRADIENT * shares.gradients,
            "AdamW": learned * MOMENT_BYTES[optimizer] * shares.moments,
        }
        if self.samples:
            needs_copy = shares.copy or self.member.compute_dtype != torch.float32
            sizes["sampling copy"] = parameters * width if needs_copy else 0
        return sizes


def plan_team(members: Sequence[Member], args: MAGRPOConfig, placement: Placement) -> list[Planned]:
    """The agents, and their references if there are any."""
    agents = [Planned(member, group, samples=True) for member, group in zip(members, placement.of("agents"))]
    if not args.reference_kl_enabled:
        return agents
    devices = [member.device for member in members]
    if args.reference_devices is not None:
        devices = [torch.device(name) for name in resolve_devices(args.reference_devices, len(members))]
    references = [replace(m, name=f"reference of {m.name}", device=device) for m, device in zip(members, devices)]
    return agents + [Planned(m, group, trained=False) for m, group in zip(references, placement.of("references"))]


@dataclass(frozen=True)
class Shares:
    """What one process holds of a model's weights, gradients and AdamW moments: 1 is all. See ZeRO (2019)."""

    weights: float = 1.0
    masters: float = 0.0  # the weights that DeepSpeed steps, apart from those that the forward reads
    gradients: float = 1.0
    moments: float = 1.0
    copy: bool = False  # whether sampling needs a copy of the whole weights
    reference: float = 1.0  # of the weights of a model that is only read


def zero_shares(zero: Mapping[str, Any] | None, size: int) -> Shares:
    """Of a model on a group of `size` processes. ZeRO-1 divides moments, 2 also gradients, 3 also weights."""
    if zero is None:
        return Shares()
    options = zero["zero_optimization"]
    stage, part = options["stage"], 1 / size
    on_device = part if "offload_optimizer" not in options else 0.0
    weights = part if stage == 3 else 1.0
    if "offload_param" in options:
        weights = 0.0
    return Shares(
        weights=weights,
        masters=on_device,
        gradients=part if stage >= 2 else 1.0,
        moments=on_device,
        copy=stage == 3,
        reference=part if stage == 3 else 1.0,
    )


def plan_text(
    models: Sequence[Planned],
    args: MAGRPOConfig,
    shape: TreeShape,
    tree_nodes: int,
    branches: int,
    train_rows: int,
    total_steps: int | None,
    world: World,
    zero: Mapping[str, Any] | None,
) -> str:
    """A readable plan; bytes leave out activations, which `micro_batch_tokens` bounds.

    Raises ValueError if the models cannot fit into the memory of this machine's devices.
    """
    at_once = args.rows_per_rollout or args.rollout_buffer_size
    nodes = args.train_batch_size or args.rollout_buffer_size
    samples = at_once * args.num_generations * sum(branches**turn for turn in range(shape.num_turns))
    lines = ["models"]
    needed: dict[tuple[int, str], float] = {}  # by rank and device
    bases: set[Any] = set()  # of adapters, that are counted
    for model in models:
        member, group = model.member, model.group
        parameters, config = model_size(member)
        adapter = adapter_parameters(member)
        sizes = model.sizes(adapter or parameters, zero, args.optimizer)
        if adapter:
            base = base_bytes(member, parameters)
            sizes = sizes if model.samples else {}  # an agent's reference is the base itself
        if model.samples:
            rows = math.ceil(min(samples, args.generation_batch_rows * group.size) / group.size)
            width = member.compute_dtype.itemsize
            sizes["KV cache about"] = kv_bytes(config, rows, 2 * args.max_new_tokens, width)
        for rank in group.ranks:
            place = (rank, str(member.device))
            needed[place] = needed.get(place, 0.0) + sum(sizes.values())
            if adapter and (member.base_key, rank) not in bases:
                bases.add((member.base_key, rank))
                needed[place] += base
        if adapter:
            sizes = {"base model, once for all of it": base, **sizes}
        name = member.source if isinstance(member.source, str) else type(member.source).__name__
        where = str(member.device) if world.alone else f"ranks {', '.join(map(str, group.ranks))}"
        precision = str(member.compute_dtype).removeprefix("torch.")
        many = f"{parameters / 1e6:.1f} M parameters" + (f" + {adapter / 1e6:.1f} M of an adapter" if adapter else "")
        lines.append(f"  {member.name}: {name}, {many}, {where}, computes in {precision}")
        lines.append("    a process: " + ", ".join(f"{key} {gigabytes(size)}" for key, size in sizes.items()))
    lines.append("devices")
    for (rank, device), count in sorted(needed.items()):
        where = device if world.alone else f"rank {rank}, {device.partition(':')[0]}"
        lines.append(f"  {where}: {gigabytes(count)} and activations")
    holders = {rank for model in models for rank in model.group.ranks}
    for rank in range(world.size):
        if rank not in holders:
            lines.append(f"  rank {rank}: no model; it only scores its share of the rewards")
    check_memory(needed)
    divided = "" if zero is None else f", ZeRO-{zero['zero_optimization']['stage']}"
    lines += [
        "processes",
        f"  {world.size}{divided}",
        "rollouts",
        f"  {shape.num_turns} turn(s), {args.num_generations} answers an agent and node, {shape.joint_mode}: "
        f"{branches} joint answers a node, {tree_nodes} nodes a tree",
        f"  {at_once} rows at once: up to {samples} answers an agent, of up to {args.max_new_tokens} tokens",
        "learning",
        f"  {nodes} nodes ({nodes * args.num_generations} answers an agent) a step, {train_rows or 'unknown'} rows, "
        f"{total_steps if total_steps is not None else 'unknown'} optimizer steps",
    ]
    return "\n".join(lines)


def check_memory(needed: Mapping[tuple[int, str], float]) -> None:
    """Refuse what cannot fit: one process's GPU, or all processes of this machine in its main memory."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    on_cpu = sum(sorted((count for (_, device), count in needed.items() if device == "cpu"), reverse=True)[:local])
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if on_cpu > memory:
        raise ValueError(
            f"the models need {gigabytes(on_cpu)} on this machine's CPU, which has {gigabytes(memory)}: take smaller "
            "models, fewer processes, or DeepSpeed ZeRO"
        )
    for (rank, device), count in needed.items():
        if device.startswith("cuda"):
            memory = torch.cuda.get_device_properties(device).total_memory
            if count > memory:
                raise ValueError(
                    f"rank {rank} needs {gigabytes(count)} on {device}, which has {gigabytes(memory)}: use more "
                    "processes with ZeRO (ds_configs/zero3.json), offload, a placement, or smaller models"
                )
