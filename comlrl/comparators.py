"""Comparators: who writes the other answers of an iteration's pairs.

Each is a rollout of its own: the same rows, prompts and rewards as the policy's, other models. Its answers become
answers of the policy's agents: ids as they are where the tokenizers are the same, else the text's tokens and EOS.

Models of a comparator only sample. So each process of their group holds them as it holds the policy's sampling copy,
whole and in the compute dtype, whatever ZeRO divides, and only while an iteration samples.
"""

import copy
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from comlrl import embedded
from comlrl.adapters import add_adapter, base_name
from comlrl.agents import Agent, Prompt, copy_on, hub_options, load_tokenizer
from comlrl.checkpoint import load_model_tensors
from comlrl.generation import Sampling
from comlrl.loading import Member, load_team
from comlrl.placement import Group, Placement
from comlrl.preferences import Candidate, JointAnswer, encode_answer, rewarded_answers
from comlrl.processes import World
from comlrl.rollouts import Node, Rollouts, RolloutStats, Row, TreeShape, walk

COMPARATORS = {
    "current": "current",
    "self": "current",
    "online": "current",
    "current_copy": "current_copy",
    "copy": "current_copy",
    "online_copy": "current_copy",
    "current_offload": "current_copy",
    "model": "model",
    "external": "model",
    "comparator": "model",
    "reference": "model",
    "ref": "model",
    "history": "history",
    "checkpoint": "history",
    "previous": "history",
    "previous_iteration": "history",
    "api": "api",
    "http": "api",
    "endpoint": "api",
}
MakeRollouts = Callable[[Sequence[Agent]], Rollouts]


class Comparator(ABC):
    """`open` before an iteration's sampling, `close` after it: between iterations no model of it is in memory.

    make_rollouts: rollouts of given agents on the trainer's task.
    """

    name = "current"

    def __init__(self, make_rollouts: MakeRollouts):
        self.make_rollouts = make_rollouts
        self.rollouts: Rollouts | None = None
        self.loads = 0  # models loaded so far
        self.incidents: list[str] = []

    @abstractmethod
    def agents(self, iteration: int) -> Sequence[Agent]: ...

    def open(self, iteration: int) -> None:
        if self.rollouts is None:
            self.rollouts = self.make_rollouts(self.agents(iteration))

    def close(self) -> None:
        self.rollouts = None

    def expand(
        self, rows: Sequence[tuple[int, Row]], shape: TreeShape, sampling: Sampling, seed_key: tuple
    ) -> tuple[list[Node], RolloutStats]:
        assert self.rollouts is not None, "open the comparator first"
        return self.rollouts.expand(rows, shape, sampling, seed_key)


class CurrentComparator(Comparator):
    """The policy itself, with samples of its own."""

    def __init__(self, make_rollouts: MakeRollouts, policy: Sequence[Agent]):
        super().__init__(make_rollouts)
        self.policy = policy

    def agents(self, iteration: int) -> Sequence[Agent]:
        return self.policy


class CopyComparator(Comparator):
    """The policy as it is when the iteration begins, or as it was, on devices and in processes of its own.

    history: None (a copy of the weights in memory), or iteration -> files with the weights to take, one an agent.
    groups: the processes that hold each model; none: this one. In a process that has no weights of an agent
    (`Agent.unload`), a copy needs files.
    """

    def __init__(
        self,
        make_rollouts: MakeRollouts,
        policy: Sequence[Agent],
        devices: Sequence[torch.device],
        history: Callable[[int], Sequence[Path]] | None = None,
        *,
        groups: Sequence[Group] | None = None,
        idle: bool = False,
        name: str | None = None,
    ):
        super().__init__(make_rollouts)
        self.policy, self.devices, self.history = policy, devices, history
        self.groups = groups or [Group()] * len(policy)
        self.idle = idle  # whether models are on the CPU while they do not sample
        self.name = name or ("current_copy" if history is None else "history")

    def agents(self, iteration: int) -> list[Agent]:
        files = self.history(iteration) if self.history is not None else [None] * len(self.policy)
        found = []
        held: dict[Any, Tensor] = {}
        for agent, device, file, group in zip(self.policy, self.devices, files, self.groups, strict=True):
            if not group.member:
                found.append(agent)  # it only encodes prompts here
                continue
            twin = agent.frozen_twin(whole_copy(agent, device, file, held), device)
            twin.idle = self.idle
            self.loads += 1
            found.append(twin)
        return found


class ModelComparator(Comparator):
    """Other models, by name. One name for several agents is loaded once."""

    name = "model"

    def __init__(
        self,
        make_rollouts: MakeRollouts,
        members: Sequence[Member],
        *,
        groups: Sequence[Group] | None = None,
        idle: bool = False,
    ):
        super().__init__(make_rollouts)
        self.members = members
        self.groups = groups or [Group()] * len(members)
        self.idle = idle

    def agents(self, iteration: int) -> list[Agent]:
        keys = [(member.source, str(member.device)) for member in self.members]
        needed = {key for key, group in zip(keys, self.groups, strict=True) if group.member}
        loaded: dict[tuple[Any, str], Agent] = {}
        for key, member in zip(keys, self.members):
            if key not in loaded:
                # In main memory first: there its fp32 weights become those of the compute dtype.
                agent = load_team([replace(member, device=torch.device("cpu"))])[0]
                if key in needed:
                    loaded[key] = agent.frozen_twin(in_dtype(agent.model, member.compute_dtype), member.device)
                    loaded[key].idle = self.idle
                    self.loads += 1
                else:
                    agent.unload()
                    loaded[key] = agent
        return [loaded[key] for key in keys]


def whole_copy(agent: Agent, device: torch.device, file: Path | None, held: dict[Any, Tensor]) -> PreTrainedModel:
    """The agent's model for sampling, with its weights or those of a file. held: see `copy_on`."""
    if agent.device.type == "meta":
        assert file is not None, f"{agent.name} has no weights in this process"
    if agent.device.type == "meta" and agent.adapter is not None:
        model = in_dtype(add_adapter(agent.adapter.reload(device), agent.adapter.config, 0), agent.compute_dtype)
    elif agent.device.type == "meta":
        model = in_dtype(type(agent.model)(copy.deepcopy(agent.model.config)).eval(), agent.compute_dtype)
    else:
        model = copy_on(agent.sampler, device, held)
    if file is not None:
        load_model_tensors(model, load_file(file), str(file))
    return model


def in_dtype(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Weights in `dtype`, in place; buffers stay as they are, see `frozen_copy`."""
    for parameter in model.requires_grad_(False).parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def comparator_placement(
    world: World, spec: Mapping[str, Sequence[Sequence[int]]] | None, homes: Sequence[Sequence[int]]
) -> Placement:
    """Where a comparator's models are, as the "agents" of its rollouts: `placement.comparators`, else `homes`, the
    ranks of each one's agent. All processes have to call."""
    ranks = (spec or {}).get("comparators") or homes
    return Placement(world, {"agents": ranks}, {"agents": len(ranks)})


# ---- checks before anything is loaded -------------------------------------------------------------------------------


def check_comparator_models(
    members: Sequence[Member], prompts: Sequence[Prompt], chat_template: str, max_new_tokens: int
) -> None:
    """Refuse models that could not read the prompts (those of a first row, one a model) or write an answer.

    Reads configs and tokenizers only.
    """
    for member, prompt in zip(members, prompts, strict=True):
        name, options = member.source, member.model_config
        tokenizer = member.tokenizer
        if isinstance(tokenizer, str):
            tokenizer = load_tokenizer(tokenizer, options)
        if (not isinstance(prompt, str) or chat_template == "always") and tokenizer.chat_template is None:
            raise ValueError(
                f"{member.name}={name!r}: its tokenizer has no chat template, and the prompts are chat messages; take "
                "a chat model, or make the formatters return strings (with chat_template other than always)"
            )
        room = context(name, tokenizer, options)
        if room <= max_new_tokens:
            raise ValueError(
                f"{member.name}={name!r} holds {room} tokens, so that with max_new_tokens={max_new_tokens} no room is "
                "left for a prompt"
            )


def context(source: str | PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> int:
    """Tokens that prompt and answer may have together."""
    config = source.config if isinstance(source, PreTrainedModel) else None
    if config is None:
        config = AutoConfig.from_pretrained(embedded.resolve(base_name(str(source))), **hub_options(options))
    positions = config.get_text_config().to_dict().get("max_position_embeddings")
    return int(positions if positions is not None else tokenizer.model_max_length)


# ---- their answers as answers of the policy's agents ----------------------------------------------------------------


def failed_answers(roots: Sequence[Node], stats: RolloutStats) -> tuple[int, int]:
    """Answers of a comparator that cannot be used, and how many there are: of each agent, so the parts of a joint
    answer count one by one. An API's fail if they are missing, empty, or without any role's section. A model that is
    here, and may be at the beginning of learning to write sections, does not fail: `stats.unparsable` counts those."""
    asked = [completion for node in walk(roots) for said in node.completions for completion in said]
    from_api = any(not completion.token_ids for completion in asked)  # what is sampled here has at least EOS
    failed = sum(completion.finish_reason == "failed" for completion in asked)
    return failed + (stats.unparsable if from_api else 0), len(asked)


def check_failures(failed: int, asked: int, share: float, incidents: Sequence[str] = ()) -> None:
    """RuntimeError if more than `share` of the answers failed. asked: of the iteration in all, so that one failure at
    its start ends nothing."""
    if failed > share * asked:
        lines = "; ".join(incidents[-3:]) or "the answers hold no role's section"
        raise RuntimeError(
            f"the comparator failed {failed} of {asked} answers, more than comparator_max_failures={share}: {lines}"
        )


def foreign_candidates(
    node: Node,
    policy: Sequence[Agent],
    *,
    same_tokens: bool,
    by_role: bool,
    use_return: bool,
    keep_truncated: bool,
    source: str,
    longest: int | None = None,
    counts: Counter[str] | None = None,
) -> list[Candidate]:
    """A comparator's rewarded joint answers at a node.

    same_tokens: take the ids that were sampled. by_role: the comparator's one model wrote for all roles, and each role
    is an agent of the policy. longest: tokens; answers that have more as the policy's agents read them are left out and
    counted as `too_long` (their reward is that of the whole text, and the context may not hold them).
    """
    found = []
    for number, said, value, truncated in rewarded_answers(node, use_return, keep_truncated):
        if by_role:
            texts = list(node.responses[number])
            cut = [truncated and role == len(texts) - 1 for role in range(len(texts))]  # only the last part
        else:
            texts, cut = [completion.text for completion in said], [completion.truncated for completion in said]
        if same_tokens and not by_role:
            ids = [list(completion.token_ids) for completion in said]
        else:
            ids = [encode_answer(agent, text, not short) for agent, text, short in zip(policy, texts, cut, strict=True)]
        if longest is not None and any(len(tokens) > longest for tokens in ids):
            if counts is not None:
                counts["too_long"] += 1
            continue
        answer = JointAnswer(ids, texts, node.rewards[number], value, source, truncated)
        found.append(Candidate(answer, list(node.responses[number])))
    return found
