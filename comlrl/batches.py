"""What the learner reads: samples of one agent, cut into padded micro-batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from comlrl.agents import Agent, completion_logprobs
from comlrl.generation import left_pad, right_pad


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
    advantage: float = 0.0
    old_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None


@dataclass
class MicroBatch:
    """Samples and their tensors; shapes as in `completion_logprobs`."""

    samples: list[Sample]
    prompt_ids: Tensor
    prompt_mask: Tensor
    completion_ids: Tensor
    completion_mask: Tensor
    prompt_index: Tensor

    def logprobs(self, agent: Agent, model: torch.nn.Module, temperature: float, entropy: str) -> tuple[Tensor, Tensor]:
        with agent.autocast():
            return completion_logprobs(
                model,
                self.prompt_ids,
                self.prompt_mask,
                self.completion_ids,
                self.completion_mask,
                self.prompt_index,
                temperature,
                entropy,
            )

    def pad(self, rows: Sequence[Tensor]) -> Tensor:
        """Per-token numbers of the samples -> [N, C], zeros on pads."""
        padded = torch.zeros(self.completion_ids.shape, dtype=torch.float32)
        for row, values in enumerate(rows):
            padded[row, : len(values)] = values
        return padded.to(self.completion_ids.device)


def micro_batches(
    samples: Sequence[Sample], agent: Agent, budget: int, device: torch.device | None = None
) -> Iterator[MicroBatch]:
    """Cut samples into batches of at most `budget` tokens, pads included (one sample may exceed it).

    The longest come first, so a batch that does not fit in memory fails at once; samples of one prompt stay together,
    since they share its keys and values.
    """
    ordered = sorted(samples, key=lambda s: (-len(s.prompt_ids) - len(s.token_ids), s.prompt_ids))
    by_prompt: dict[tuple[int, ...], list[Sample]] = {}
    for sample in ordered:
        by_prompt.setdefault(tuple(sample.prompt_ids), []).append(sample)
    batch: list[Sample] = []
    prompts: dict[tuple[int, ...], None] = {}
    width_prompt = width_answer = 0
    for prompt, group in by_prompt.items():
        for sample in group:
            rows = len(prompts | {prompt: None})
            wide_prompt, wide_answer = (
                max(width_prompt, len(prompt)),
                max(width_answer, len(sample.token_ids)),
            )
            if batch and rows * wide_prompt + (len(batch) + 1) * wide_answer > budget:
                yield collate(batch, agent, device)
                batch, prompts, width_prompt, width_answer = [], {}, 0, 0
            batch.append(sample)
            prompts[prompt] = None
            width_prompt, width_answer = (
                max(width_prompt, len(prompt)),
                max(width_answer, len(sample.token_ids)),
            )
    if batch:
        yield collate(batch, agent, device)


def collate(samples: list[Sample], agent: Agent, device: torch.device | None = None) -> MicroBatch:
    device = device or agent.device
    place: dict[tuple[int, ...], int] = {}
    for sample in samples:
        place.setdefault(tuple(sample.prompt_ids), len(place))
    prompt_ids, prompt_mask = left_pad(list(place), agent.pad_id, device)
    completion_ids, completion_mask = right_pad([s.token_ids for s in samples], agent.pad_id, device)
    index = torch.tensor([place[tuple(s.prompt_ids)] for s in samples], device=device)
    return MicroBatch(samples, prompt_ids, prompt_mask, completion_ids, completion_mask, index)


@torch.no_grad()
def frozen_logprobs(
    samples: Sequence[Sample], agent: Agent, model: torch.nn.Module, temperature: float, budget: int
) -> dict[int, Tensor]:
    """Log-probs of every sample under `model`, by id(sample): [len(token_ids)] each, fp32, on the CPU."""
    result = {}
    device = next(model.parameters()).device  # a reference may live elsewhere than its agent
    for batch in micro_batches(samples, agent, budget, device):
        logprobs, _ = batch.logprobs(agent, model, temperature, entropy="none")
        for sample, row in zip(batch.samples, logprobs.cpu()):
            result[id(sample)] = row[: len(sample.token_ids)].clone()
    return result
