"""From names and loaded objects to a team of agents, its references and its formatters."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from comlrl.agents import (
    DTYPES,
    Agent,
    Prompt,
    add_special_tokens,
    check_loadable,
    check_model_config,
    check_tokenizer,
    frozen_copy,
    load_model,
    load_tokenizer,
    resolve_dtype,
)
from comlrl.engine import shared_parameter


@dataclass
class Member:
    """One agent before it is loaded: where its weights and tokenizer come from, and where it will live."""

    name: str
    source: str | PreTrainedModel
    tokenizer: str | PreTrainedTokenizerBase
    device: torch.device
    compute_dtype: torch.dtype
    model_config: dict[str, Any]


def check_team(
    agent_model: str | None,
    agents: Sequence[Any] | None,
    count: int,
    tokenizer: Any,
    model_config: dict[str, Any] | None,
    devices: str | Sequence[str] | None,
    dtype: str,
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
    return [
        Member(f"agent_{i}", sources[i], tokenizers[i], places[i], resolve_dtype(precision, places[i]), config)
        for i in range(count)
    ]


def load_team(members: Sequence[Member]) -> list[Agent]:
    team = []
    for member in members:
        model = load_model(member.source, member.model_config) if isinstance(member.source, str) else member.source
        tokenizer = member.tokenizer
        if isinstance(tokenizer, str):
            tokenizer = load_tokenizer(tokenizer, member.model_config)
        if member.model_config.get("special_tokens"):
            add_special_tokens(model, tokenizer, member.model_config["special_tokens"])
        team.append(Agent(model, tokenizer, member.name, member.device, member.compute_dtype))
    pair = shared_parameter([agent.model for agent in team])
    if pair is not None:
        raise ValueError(
            f"agents {pair[0]} and {pair[1]} share weights in memory, so two optimizers would fight over them; give "
            "separate models (copy.deepcopy), or the name of a model, which is loaded once an agent"
        )
    return team


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
    """A frozen copy of each wanted agent's weights as they are now, in its compute dtype; by default on its device."""
    places = [agent.device for agent in agents]
    if devices is not None:
        places = [torch.device(name) for name in resolve_devices(devices, len(agents), "reference_devices")]
    return {
        index: frozen_copy(agent.model, agent.compute_dtype).to(device=places[index])  # type: ignore[call-arg]
        for index, agent in enumerate(agents)
        if wanted is None or wanted[index]
    }


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
