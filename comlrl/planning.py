"""What a run will take, before anything is loaded: models, devices, bytes, samples."""

from collections.abc import Sequence

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from comlrl import embedded
from comlrl.agents import hub_options
from comlrl.loading import Member
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


def plan_text(
    members: Sequence[Member],
    args: MAGRPOConfig,
    shape: TreeShape,
    tree_nodes: int,
    branches: int,
    train_rows: int,
    total_steps: int | None,
) -> str:
    """A readable plan; bytes leave out activations, which `micro_batch_tokens` bounds."""
    at_once = args.rows_per_rollout or args.rollout_buffer_size
    samples = at_once * args.num_generations * sum(branches**turn for turn in range(shape.num_turns))
    lines = ["models"]
    on_device: dict[str, float] = {}
    for member in members:
        parameters, config = model_size(member)
        copy = 0 if member.compute_dtype == torch.float32 else member.compute_dtype.itemsize
        reference = member.compute_dtype.itemsize if args.reference_kl_enabled else 0
        width = member.compute_dtype.itemsize
        cache = kv_bytes(config, min(samples, args.generation_batch_rows), 2 * args.max_new_tokens, width)
        total = parameters * (WEIGHT + GRADIENT + MOMENTS + copy + reference) + cache
        on_device[str(member.device)] = on_device.get(str(member.device), 0.0) + total
        name = member.source if isinstance(member.source, str) else type(member.source).__name__
        lines.append(
            f"  {member.name}: {name}, {parameters / 1e6:.1f} M parameters, {member.device}, computes in "
            f"{str(member.compute_dtype).removeprefix('torch.')}; weights {gigabytes(parameters * WEIGHT)}, gradients "
            f"{gigabytes(parameters * GRADIENT)}, AdamW {gigabytes(parameters * MOMENTS)}, sampling copy "
            f"{gigabytes(parameters * copy)}, reference {gigabytes(parameters * reference)}, "
            f"KV cache about {gigabytes(cache)}"
        )
    lines.append("devices")
    lines += [f"  {device}: {gigabytes(total)} and activations" for device, total in on_device.items()]
    lines += [
        "rollouts",
        f"  {shape.num_turns} turn(s), {args.num_generations} answers an agent and node, {shape.joint_mode}: "
        f"{branches} joint answers a node, {tree_nodes} nodes a tree",
        f"  {at_once} rows at once: up to {samples} answers an agent, of up to {args.max_new_tokens} tokens",
        "learning",
        f"  {args.train_batch_size or args.rollout_buffer_size} nodes a step, {train_rows or 'unknown'} rows, "
        f"{total_steps if total_steps is not None else 'unknown'} optimizer steps",
    ]
    return "\n".join(lines)
