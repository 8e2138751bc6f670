"""What a run will take, before anything is loaded: models, devices, bytes, samples."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from comlrl import embedded
from comlrl.agents import hub_options
from comlrl.loading import Member, resolve_devices
from comlrl.placement import Placement
from comlrl.rollouts import TreeShape
from comlrl.trainers.reinforce_config import MAGRPOConfig

# Bytes a trained parameter: fp32 weight, gradient, and the two moments of AdamW.
WEIGHT, GRADIENT, MOMENTS = 4, 4, 8


def model_size(member: Member) -> tuple[int, PreTrainedConfig]:
    """Parameters and config of a model, from its config alone (tied weights once)."""
    if not isinstance(member.source, str):
        return sum(p.numel() for p in member.source.parameters()), member.source.config
    config = AutoConfig.from_pretrained(embedded.resolve(member.source), **hub_options(member.model_config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for p in model.parameters()), config


def kv_bytes(config: PreTrainedConfig, rows: int, tokens: int, width: int) -> int:
    """Keys and values of `rows` sequences of `tokens` tokens in numbers of `width` bytes."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * head_dim * rows * tokens * width


def gigabytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


@dataclass(frozen=True)
class Shares:
    """What one process holds of a trained model's weights, gradients and AdamW moments: 1 is all. See ZeRO (2019)."""

    weights: float = 1.0
    gradients: float = 1.0
    moments: float = 1.0
    copy: bool = False  # whether sampling needs a copy of the whole weights
    reference: float = 1.0


def zero_shares(zero: Mapping[str, Any] | None, size: int) -> Shares:
    """Of a model on a group of `size` processes. ZeRO-1 divides moments, 2 also gradients, 3 also weights."""
    if zero is None:
        return Shares()
    options = zero["zero_optimization"]
    stage, part = options["stage"], 1 / size
    on_device = "offload_optimizer" not in options
    # DeepSpeed keeps the weights that it steps apart from those that the forward reads, with the moments.
    masters = WEIGHT * part if on_device else 0.0
    weights = part if stage == 3 else 1.0
    if "offload_param" in options:
        weights = 0.0
    return Shares(
        weights=weights + masters / WEIGHT,
        gradients=part if stage >= 2 else 1.0,
        moments=part if on_device else 0.0,
        copy=stage == 3,
        reference=part if stage == 3 else 1.0,
    )


def plan_text(
    members: Sequence[Member],
    args: MAGRPOConfig,
    shape: TreeShape,
    tree_nodes: int,
    branches: int,
    train_rows: int,
    total_steps: int | None,
    placement: Placement,
    zero: Mapping[str, Any] | None,
) -> str:
    """A readable plan; bytes leave out activations, which `micro_batch_tokens` bounds.

    Raises ValueError if the models cannot fit into the memory of this machine's devices.
    """
    at_once = args.rows_per_rollout or args.rollout_buffer_size
    samples = at_once * args.num_generations * sum(branches**turn for turn in range(shape.num_turns))
    lines = ["models"]
    needed: dict[tuple[int, str], float] = {}  # by rank and device

    def add(ranks: Sequence[int], device: str, count: float) -> None:
        for rank in ranks:
            needed[rank, device] = needed.get((rank, device), 0.0) + count

    homes = placement.of("agents")
    reference_homes = placement.of("references") if args.reference_kl_enabled else homes
    for index, (member, group) in enumerate(zip(members, homes)):
        parameters, config = model_size(member)
        shares = zero_shares(zero, group.size)
        width = member.compute_dtype.itemsize
        copy = width if shares.copy or member.compute_dtype != torch.float32 else 0
        rows = math.ceil(min(samples, args.generation_batch_rows * group.size) / group.size)
        cache = kv_bytes(config, rows, 2 * args.max_new_tokens, width)
        sizes = {
            "weights": parameters * WEIGHT * shares.weights,
            "gradients": parameters * GRADIENT * shares.gradients,
            "AdamW": parameters * MOMENTS * shares.moments,
            "sampling copy": parameters * copy,
            "KV cache about": cache,
        }
        add(group.ranks, str(member.device), sum(sizes.values()))
        if args.reference_kl_enabled:
            home = reference_homes[index]
            sizes["reference"] = parameters * width * zero_shares(zero, home.size).reference
            places = resolve_devices(args.reference_devices, len(members)) if args.reference_devices else None
            add(home.ranks, places[index] if places else str(member.device), sizes["reference"])
        name = member.source if isinstance(member.source, str) else type(member.source).__name__
        where = str(member.device) if placement.world.alone else f"ranks {', '.join(map(str, group.ranks))}"
        precision = str(member.compute_dtype).removeprefix("torch.")
        lines.append(f"  {member.name}: {name}, {parameters / 1e6:.1f} M parameters, {where}, computes in {precision}")
        lines.append("    a process: " + ", ".join(f"{key} {gigabytes(size)}" for key, size in sizes.items()))
    lines.append("devices")
    for (rank, device), count in sorted(needed.items()):
        where = device if placement.world.alone else f"rank {rank}, {device.partition(':')[0]}"
        lines.append(f"  {where}: {gigabytes(count)} and activations")
    check_memory(needed)
    divided = "" if zero is None else f", ZeRO-{zero['zero_optimization']['stage']}"
    lines += [
        "processes",
        f"  {placement.world.size}{divided}",
        "rollouts",
        f"  {shape.num_turns} turn(s), {args.num_generations} answers an agent and node, {shape.joint_mode}: "
        f"{branches} joint answers a node, {tree_nodes} nodes a tree",
        f"  {at_once} rows at once: up to {samples} answers an agent, of up to {args.max_new_tokens} tokens",
        "learning",
        f"  {args.train_batch_size or args.rollout_buffer_size} nodes a step, {train_rows or 'unknown'} rows, "
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
