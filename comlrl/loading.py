"""From names and loaded objects to a team of agents, its references and its formatters."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from comlrl import embedded
from comlrl.adapters import (
    NAME,
    Adapter,
    LoraSettings,
    add_adapter,
    base_name,
    check_quantization,
    check_target,
    freeze,
    has_adapter,
    is_adapter,
    quantized_kwargs,
    read_adapter,
    unwrapped,
    without_adapter,
)
from comlrl.agents import (
    DTYPES,
    Agent,
    Prompt,
    add_special_tokens,
    check_loadable,
    check_model_config,
    check_tokenizer,
    copy_on,
    frozen_copy,
    load_model,
    load_tokenizer,
    resolve_dtype,
)
from comlrl.checkpoint import tensors_hash
from comlrl.engine import shared_parameter
from comlrl.generation import sample_seed


@dataclass
class Member:
    """One agent before it is loaded: where its weights and tokenizer come from, and where it will live.

    lora: what is trained of it; None: all weights, or the adapter that a loaded model came with. seed: of a fresh
    adapter. recompute: whether backward computes activations again (gradient checkpointing).
    """

    name: str
    source: str | PreTrainedModel
    tokenizer: str | PreTrainedTokenizerBase
    device: torch.device
    compute_dtype: torch.dtype
    model_config: dict[str, Any]
    lora: LoraSettings | None = None
    seed: int = 0
    recompute: bool = False

    @property
    def base_source(self) -> Any:
        """The model without an adapter, by name or as an object."""
        return base_name(self.source) if isinstance(self.source, str) else self.source

    @property
    def base_key(self) -> tuple[Any, str, torch.dtype]:
        """Agents with adapters share a base if theirs are equal."""
        source = self.base_source
        name = embedded.resolve(source) if isinstance(source, str) else id(source)
        return name, str(self.device), self.compute_dtype

    def read_config(self) -> PreTrainedConfig:
        """The model's config, with what model_kwargs changes in it; loads no weights."""
        if not isinstance(self.source, str):
            return self.source.config
        return AutoConfig.from_pretrained(
            embedded.resolve(self.base_source), **(self.model_config.get("model_kwargs") or {})
        )


def check_team(
    agent_model: str | None,
    agents: Sequence[Any] | None,
    count: int,
    tokenizer: Any,
    model_config: dict[str, Any] | None,
    devices: str | Sequence[str] | None,
    dtype: str,
    lora: LoraSettings | None = None,
    seed: int = 0,
    recompute: bool = False,
) -> list[Member]:
    """`count` agents from one name, or from one name or loaded model each. Refuses what cannot work; loads nothing."""
    config = dict(model_config or {})
    check_model_config(config)
    sources = _sources(agent_model, agents, count)
    tokenizers = _tokenizers(tokenizer, sources, count)
    for name in dict.fromkeys(source for source in sources if isinstance(source, str)):
        check_loadable(name, config)
    for name in dict.fromkeys(item for item in tokenizers if isinstance(item, str) and item not in sources):
        check_tokenizer(name, config)
    # As published, either spelling, and also inside model_kwargs.
    given = {**(config.get("model_kwargs") or {}), **config}
    asked = given.get("dtype", given.get("torch_dtype"))
    precision = str(asked).removeprefix("torch.") if asked is not None and dtype == "auto" else dtype
    if asked is not None and str(asked).removeprefix("torch.") != precision:
        raise ValueError(f"model_config.dtype={asked!r} and args.dtype={dtype!r} differ; give one of the two")
    if precision not in ("auto", *DTYPES):
        raise ValueError(f"model_config.dtype={asked!r}: must be one of auto, {', '.join(DTYPES)}")
    places = [torch.device(name) for name in resolve_devices(devices, count)]
    members = [
        Member(f"agent_{i}", sources[i], tokenizers[i], places[i], resolve_dtype(precision, places[i]), config, lora)
        for i in range(count)
    ]
    if lora is not None:
        check_lora(members, lora)
    return [replace(member, seed=sample_seed(seed, "adapter", member.name), recompute=recompute) for member in members]


def check_lora(members: Sequence[Member], lora: LoraSettings) -> None:
    """Refuse adapters that cannot be; loads no weights."""
    check_quantization(lora)
    for member in members:
        if lora.quantization is not None and not isinstance(member.source, str):
            raise ValueError(f"lora.quantization={lora.quantization!r}: {member.name} is a loaded model; give a name")
        if member.model_config.get("special_tokens"):
            raise ValueError(
                "model_config.special_tokens: LoRA does not train the embeddings of new tokens; leave it out"
            )
        if not isinstance(member.source, str) and has_adapter(member.source):
            raise ValueError(f"{member.name} is a model that has an adapter already; leave lora out to train that one")
        if isinstance(member.source, str) and is_adapter(member.source):
            config, _ = read_adapter(member.source)
            for key, own, given in (("r", lora.r, config.r), ("alpha", lora.alpha, config.lora_alpha)):
                if own != given:
                    raise ValueError(
                        f"lora.{key}={own}: {member.name} goes on with {member.source!r}, which has {given}"
                    )
    for member in {member.base_key: member for member in reversed(members)}.values():
        adapter_size(member, lora)


def adapter_size(member: Member, lora: LoraSettings) -> int:
    """Parameters of an adapter, from the model's config alone."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(member.read_config())
    return check_target(model, lora, member.name)


def check_context(members: Sequence[Member], max_new_tokens: int) -> None:
    """Refuse answers that leave no room for a prompt. Models without learned positions (ALiBi, Mamba) have no limit."""
    for member in members:
        positions = member.read_config().get_text_config().to_dict().get("max_position_embeddings")
        if positions is not None and max_new_tokens >= positions:
            raise ValueError(
                f"max_new_tokens={max_new_tokens}: {member.name} reads at most {positions} tokens, prompt and answer "
                f"together; use {positions // 2} or fewer, or a model with a longer context"
            )


def load_team(members: Sequence[Member]) -> list[Agent]:
    team = []
    bases: dict[Any, tuple[PreTrainedModel, str]] = {}
    for member in members:
        tokenizer, adapter = member.tokenizer, None
        if isinstance(tokenizer, str):
            tokenizer = load_tokenizer(tokenizer, member.model_config)
        if member.lora is not None or has_adapter(member.source):
            model, adapter = load_adapted(member, bases)
        else:
            model = load_model(member.source, member.model_config) if isinstance(member.source, str) else member.source
        if member.model_config.get("special_tokens"):
            add_special_tokens(model, tokenizer, member.model_config["special_tokens"])
        if member.recompute:
            model.gradient_checkpointing_enable()
        team.append(Agent(model, tokenizer, member.name, member.device, member.compute_dtype, adapter))
    pair = shared_parameter([agent.model for agent in team])
    if pair is not None:
        raise ValueError(
            f"agents {pair[0]} and {pair[1]} share weights in memory, so two optimizers would fight over them; give "
            "separate models (copy.deepcopy), or the name of a model, which is loaded once an agent"
        )
    return team


def load_adapted(member: Member, bases: dict[Any, tuple[PreTrainedModel, str]]) -> tuple[PreTrainedModel, Adapter]:
    """An agent's model with its adapter, around a base that is loaded once a device. bases: those that are there."""
    source = member.base_source

    def reload(device: torch.device) -> PreTrainedModel:
        if not isinstance(source, str):
            raise ValueError(f"{member.name} was given as a loaded model: other processes cannot load its base")
        return load_base(replace(member, device=device))[0]

    if member.lora is None:  # a model that came with its adapter
        freeze(source.float())
        base = without_adapter(source)
        return source, Adapter(source.peft_config[NAME], base, place_base(base, member), reload)
    if member.base_key not in bases:
        bases[member.base_key] = load_base(member)
    base, digest = bases[member.base_key]
    config, weights = member.lora.peft_config(embedded.resolve(_name_of(source))), None
    if isinstance(member.source, str) and is_adapter(member.source):
        config, weights = read_adapter(member.source)
    return add_adapter(base, config, member.seed, weights), Adapter(config, base, digest, reload)


def load_base(member: Member) -> tuple[PreTrainedModel, str]:
    """The model without adapters, and the hash of its weights."""
    source, lora = member.base_source, member.lora
    if lora is not None and lora.quantization is not None:
        more = quantized_kwargs(lora.quantization, member.device, member.compute_dtype)
        kwargs = {**(member.model_config.get("model_kwargs") or {}), **more}
        model = load_model(source, {**member.model_config, "model_kwargs": kwargs})
    else:
        model = (load_model(source, member.model_config) if isinstance(source, str) else source).float()
    return model, place_base(model.requires_grad_(False).eval(), member)


def place_base(model: PreTrainedModel, member: Member) -> str:
    """Bring a base model's weights into the compute dtype and to the device, in place; the hash of what they were."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    weights = {name: tensor for name, tensor in tensors if isinstance(tensor, nn.Parameter)}
    digest = tensors_hash(weights)
    for weight in weights.values():
        if weight.is_floating_point():  # quantised ones are integers, and are there already
            weight.data = weight.data.to(member.device, member.compute_dtype)
    model.to(device=member.device)  # type: ignore[call-arg]  # what else there is, rotary frequencies for one
    return digest


def _sources(agent_model: str | None, agents: Sequence[Any] | None, count: int) -> list[Any]:
    if agents is None:
        if agent_model is None:
            raise ValueError("give agent_model (one name for all agents) or agents (a list of names or models)")
        if not isinstance(agent_model, str):
            raise ValueError(
                f"agent_model must be a name or a path, not {type(agent_model).__name__}; give models as a list: "
                "agents=[model_1, model_2]"
            )
        return [agent_model] * count
    if isinstance(agents, str) or not isinstance(agents, Sequence):
        raise ValueError(f"agents must be a list, one an agent, not {type(agents).__name__}")
    if len(agents) != count:
        raise ValueError(f"agents has {len(agents)} entries for {count} models")
    agents = [unwrapped(source, f"agents[{index}]") for index, source in enumerate(agents)]
    for index, source in enumerate(agents):
        if not isinstance(source, (str, PreTrainedModel)):
            raise ValueError(f"agents[{index}] must be a name or a transformers model, not {type(source).__name__}")
        if agent_model is not None and _name_of(source) != agent_model:
            raise ValueError(
                f"agent_model={agent_model!r} and agents[{index}]={_name_of(source)!r} differ; give one of the two"
            )
    objects = [id(source) for source in agents if not isinstance(source, str)]
    if len(set(objects)) < len(objects):
        raise ValueError("the same model object is given for two agents; give copies (copy.deepcopy) or a name")
    return list(agents)


def _name_of(source: Any) -> str:
    return source if isinstance(source, str) else source.config.name_or_path


def _tokenizers(tokenizer: Any, sources: list[Any], count: int) -> list[str | PreTrainedTokenizerBase]:
    """One a model: as given, else the model's own."""
    if isinstance(tokenizer, (list, tuple)):
        if len(tokenizer) != count:
            raise ValueError(f"tokenizer has {len(tokenizer)} entries for {count} models; give one, or one a model")
        given = list(tokenizer)
    else:
        given = [tokenizer] * count
    for index, (item, source) in enumerate(zip(given, sources)):
        if item is None and not isinstance(source, str):
            raise ValueError(
                f"agents[{index}] is a loaded model: give its tokenizer too (tokenizer=..., one or a list)"
            )
    return [source if item is None else item for item, source in zip(given, sources)]


def load_references(
    agents: Sequence[Agent], devices: str | Sequence[str] | None, wanted: Sequence[bool] | None = None
) -> dict[int, nn.Module]:
    """A frozen copy of each wanted agent's weights as they are now, in its compute dtype; by default on its device.

    Of an agent with an adapter it is the base model itself, which all agents of it share.
    """
    places = [agent.device for agent in agents]
    if devices is not None:
        places = [torch.device(name) for name in resolve_devices(devices, len(agents), "reference_devices")]
    found: dict[int, nn.Module] = {}
    moved: dict[tuple[int, torch.device], nn.Module] = {}  # bases of adapters that are wanted on other devices
    for index, (agent, place) in enumerate(zip(agents, places)):
        if wanted is not None and not wanted[index]:
            continue
        if agent.adapter is None:
            found[index] = frozen_copy(agent.model, agent.compute_dtype).to(device=place)  # type: ignore[call-arg]
            continue
        base = agent.adapter.base
        assert base is not None
        found[index] = base
        if place != agent.device:
            if (id(base), place) not in moved:
                moved[id(base), place] = copy_on(base, place, {})
            found[index] = moved[id(base), place]
    return found


def resolve_devices(spec: str | Sequence[str] | None, count: int, key: str = "agent_devices") -> list[str]:
    """One device a model: as named; none: this process's GPU, else cpu; auto: the GPUs in turn, else cpu."""
    gpus = torch.cuda.device_count()
    if spec is None:
        local = int(os.environ.get("LOCAL_RANK", "0")) % max(gpus, 1)
        return [f"cuda:{local}" if gpus else "cpu"] * count
    if spec == "auto":
        return [f"cuda:{index % gpus}" if gpus else "cpu" for index in range(count)]
    names = [spec] if isinstance(spec, str) else list(spec)
    if len(names) not in (1, count):
        raise ValueError(f"{key}={spec!r}: give one device, or {count} (one an agent)")
    for name in names:
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise ValueError(f"{key}={spec!r}: {name!r} is no device; use for example cpu or cuda:0") from error
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"{key}={spec!r}: {name} does not exist; this process sees {torch.cuda.device_count()} GPUs"
            )
    return names * count if len(names) == 1 else names


def build_formatters(formatters: Any, num_roles: int) -> list[Callable[..., Prompt]]:
    """One formatter a role: given as one, as a list, or none (the row's prompt)."""
    if formatters is None:
        return [row_prompt] * num_roles
    if callable(formatters):
        return [formatters] * num_roles
    if not isinstance(formatters, (list, tuple)) or len(formatters) != num_roles:
        raise ValueError(f"formatters must be one function, or a list of {num_roles}, one an agent")
    for index, formatter in enumerate(formatters):
        if formatter is not None and not callable(formatter):
            raise ValueError(f"formatters[{index}] is not callable: {formatter!r}")
    return [formatter or row_prompt for formatter in formatters]


def row_prompt(row: dict[str, Any]) -> Prompt:
    if "prompt" not in row:
        raise ValueError(f"a row has no column 'prompt' (it has {', '.join(row)}); give formatters")
    return row["prompt"]
