"""What the learner reads: samples of one agent, cut into padded micro-batches."""

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from comlrl.agents import Agent
from comlrl.generation import left_pad, right_pad
from comlrl.logprobs import completion_logprobs
from comlrl.placement import Group
from comlrl.value_head import CausalLMWithValueHead

Run = Callable[..., Any]


class Loaded(Protocol):
    """A model on this process's device, as `comlrl.engine` has them."""

    device: torch.device  # may be another than its agent's
    group: Group
    lockstep: bool

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any: ...

    def awake(self) -> AbstractContextManager: ...


class Tokens(Protocol):
    """What has a length in tokens."""

    @property
    def prompt_ids(self) -> list[int]: ...

    @property
    def token_ids(self) -> list[int]: ...


Item = TypeVar("Item", bound=Tokens)


@dataclass(eq=False)
class Sample:
    """One completion as a training example of one agent.

    `credit`: its return in this agent's eyes, None if no joint action with it was rewarded. `weight`: what its node
    counts. `trained` is False for a truncated answer under mask_truncated. Log-probs are [len(token_ids)], fp32, CPU.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    turn: int
    name: str
    credit: float | None
    weight: float
    trained: bool
    truncated: bool
    sampler_logprobs: Tensor
    number: int = 0  # of the completion among its agent's at the node
    advantage: float = 0.0
    value: float = 0.0  # a critic's baseline
    raw_advantage: float | None = None  # before it was normalised over the minibatch; none: it was not yet
    value_output: float = 0.0  # of a value head on this agent's model, before the first step
    value_target: float = 0.0  # of that head
    value_weight: float = 0.0  # of that head's loss in this minibatch
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None


@dataclass
class MicroBatch:
    """Samples and their tensors; shapes, and `most_tokens`, as in `completion_logprobs`."""

    samples: list[Sample]
    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    prompt_index: Tensor
    most_tokens: int = 0
    tokens: int = 0  # that the model reads: a prompt counts once
    values: Tensor | None = None  # [N], of a model with a value head
    logged: dict[str, Tensor] = field(default_factory=dict)  # numbers of samples, [N]

    def logprobs(self, run: Run, agent: Agent, temperature: float, entropy: str) -> tuple[Tensor, Tensor]:
        """`run(function, ...)` calls function(model, ...), as `Engine.run` does."""

        def forward(model: torch.nn.Module) -> tuple[Tensor, Tensor]:
            with agent.autocast(self.prompt_ids.device):  # inside: DeepSpeed's forward switches an outer one off
                return completion_logprobs(
                    model.backbone if isinstance(model, CausalLMWithValueHead) else model,
                    self.prompt_ids,
                    self.prompt_mask,
                    self.completion_ids,
                    self.completion_mask,
                    self.prompt_index,
                    temperature,
                    entropy,
                    agent.finish,
                    self.most_tokens,
                )

        return run(forward)

    def pad(self, rows: Sequence[Tensor]) -> Tensor:
        """Per-token numbers of the samples -> [N, C], zeros on pads."""
        padded = torch.zeros(self.completion_ids.shape, dtype=torch.float32)
        for row, values in enumerate(rows):
            padded[row, : len(values)] = values
        return padded.to(self.completion_ids.device)


def cut(samples: Sequence[Item], budget: int) -> list[list[Item]]:
    """Batches of at most `budget` tokens, pads included (one sample may exceed it).

    The longest come first, so a batch that does not fit in memory fails at once; samples of one prompt stay together,
    since they share its keys and values.
    """
    ordered = sorted(samples, key=lambda s: (-len(s.prompt_ids) - len(s.token_ids), s.prompt_ids))
    by_prompt: dict[tuple[int, ...], list[Item]] = {}
    for sample in ordered:
        by_prompt.setdefault(tuple(sample.prompt_ids), []).append(sample)
    batches: list[list[Item]] = []
    batch: list[Item] = []
    prompts: set[tuple[int, ...]] = set()
    width_prompt = width_answer = 0
    for prompt, group in by_prompt.items():
        for sample in group:
            rows = len(prompts | {prompt})
            wide_prompt, wide_answer = max(width_prompt, len(prompt)), max(width_answer, len(sample.token_ids))
            if batch and rows * wide_prompt + (len(batch) + 1) * wide_answer > budget:
                batches.append(batch)
                batch, prompts, wide_prompt, wide_answer = [], set(), len(prompt), len(sample.token_ids)
            batch.append(sample)
            prompts.add(prompt)
            width_prompt, width_answer = wide_prompt, wide_answer
    return [*batches, batch] if batch else batches


@dataclass
class Part(Generic[Item]):
    """A micro-batch of one process's share; `counts` is False for one that only keeps step with the others.

    most_tokens: with lockstep the largest number of sampled tokens that any process has in its batch of this number.
    """

    items: list[Item]
    counts: bool = True
    most_tokens: int = 0


def share(samples: Sequence[Item], group: Group, budget: int, lockstep: bool = False) -> list[Part[Item]]:
    """This process's share of one agent's samples in batches.

    lockstep: all processes of the group get equally many; who has fewer repeats one that does not count.
    """
    if group.place is None or not samples:
        return []
    if not lockstep:
        return [Part(batch) for batch in cut(group.share(samples), budget)]
    shortest = [min(samples, key=lambda s: len(s.prompt_ids) + len(s.token_ids))]
    batches = [cut(group.part(samples, place), budget) for place in range(group.size)]
    rounds = list(itertools.zip_longest(*batches, fillvalue=shortest))
    most = [max(sum(len(s.token_ids) for s in batch) for batch in each) for each in rounds]
    own = len(batches[group.place])
    return [Part(each[group.place], n < own, most[n]) for n, each in enumerate(rounds)]


def collate(
    samples: list[Sample], agent: Agent, device: torch.device | None = None, most_tokens: int = 0
) -> MicroBatch:
    """The samples as tensors on `device` (none: the agent's). most_tokens: that of the `Part`, 0 without lockstep."""
    device = device or agent.device
    place: dict[tuple[int, ...], int] = {}
    for sample in samples:
        place.setdefault(tuple(sample.prompt_ids), len(place))
    prompt_ids, prompt_mask = left_pad(list(place), agent.pad_id, device)
    # Two columns where processes keep step: `read_completions` makes one forward less for answers of one token.
    least = 2 if most_tokens else 1
    completion_ids, completion_mask = right_pad([s.token_ids for s in samples], agent.pad_id, device, least)
    index = torch.tensor([place[tuple(s.prompt_ids)] for s in samples], device=device)
    tokens = sum(map(len, place)) + sum(len(sample.token_ids) for sample in samples)
    return MicroBatch(samples, prompt_ids, prompt_mask, completion_ids, completion_mask, index, most_tokens, tokens)


@torch.no_grad()
def frozen_logprobs(
    samples: Sequence[Sample], agent: Agent, model: Loaded, temperature: float, budget: int
) -> dict[int, Tensor]:
    """Log-probs of this process's share of the samples, without gradient, under `model`: an `Engine` or a `Frozen`.

    Returns place in `samples` -> [len(token_ids)], fp32, on the CPU.
    """
    places = {id(sample): place for place, sample in enumerate(samples)}
    result = {}
    started, tokens = time.perf_counter(), 0
    with model.awake():
        for part in share(samples, model.group, budget, model.lockstep):
            batch = collate(part.items, agent, model.device, part.most_tokens)
            logprobs, _ = batch.logprobs(model.run, agent, temperature, entropy="none")
            tokens += batch.tokens
            if part.counts:
                for sample, row in zip(part.items, logprobs.cpu()):
                    result[places[id(sample)]] = row[: len(sample.token_ids)].clone()
    if tokens:
        agent.worked("reference", started, tokens, model.device)
    return result
