"""Prompts in, completions out: token ids, log-probs, finish reason.

One small interface, `generate`; another engine is one more function with this signature.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from comlrl.agents import Agent


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. top_p 1 and top_k None leave the distribution whole."""

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop_strings: tuple[str, ...] = ()

    @property
    def truncated(self) -> bool:
        return self.top_p < 1.0 or self.top_k is not None


@dataclass
class Request:
    """One prompt and the samples wanted from it: a seed each, or None for the greedy answer."""

    prompt_ids: list[int]
    seeds: list[int | None]


@dataclass
class Completion:
    """`token_ids` as sampled, the final EOS included; `text` without EOS and without the stop string.

    finish_reason: "eos", "stop" (a stop string) or "length" (truncated). `logprobs`: what the generator itself
    computed, at the sampling temperature, over the whole vocabulary. `kept_mass`: mean probability that top_p and
    top_k left in (1 without them).
    """

    token_ids: list[int]
    text: str
    logprobs: list[float]
    finish_reason: str
    kept_mass: float = 1.0

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"


def sample_seed(*key: object) -> int:
    """64 bits from (run seed, rollout, row, branch, agent, sample, ...): never from the batch or the rank."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")


def generate(
    agent: Agent, requests: Sequence[Request], sampling: Sampling, max_rows: int = 256
) -> list[list[Completion]]:
    """Complete every request: result[i][k] answers requests[i] with its k-th seed.

    All requests go through the model in one batch (of up to `max_rows` samples; sorted by prompt length). Each sample
    has its own stream of random numbers, so what it says depends on neither the batch nor its place in it.
    """
    for request in requests:
        room = agent.context_length - sampling.max_new_tokens
        assert len(request.prompt_ids) <= room, (
            f"{agent.name}: prompt of {len(request.prompt_ids)} tokens, room for {room}"
        )
    order = sorted(range(len(requests)), key=lambda i: len(requests[i].prompt_ids))
    results: list[list[Completion]] = [[] for _ in requests]
    batch: list[tuple[int, int | None]] = []
    jobs = [(i, seed) for i in order for seed in requests[i].seeds]
    for start in range(0, len(jobs), max_rows):
        batch = jobs[start : start + max_rows]
        prompts = list(dict.fromkeys(i for i, _ in batch))
        place = {i: row for row, i in enumerate(prompts)}
        completions = _decode_batch(
            agent,
            [requests[i].prompt_ids for i in prompts],
            [place[i] for i, _ in batch],
            [seed for _, seed in batch],
            sampling,
        )
        for (i, _), completion in zip(batch, completions, strict=True):
            results[i].append(completion)
    return results


@torch.no_grad()
def _decode_batch(
    agent: Agent,
    prompts: list[list[int]],
    prompt_index: list[int],
    seeds: list[int | None],
    sampling: Sampling,
) -> list[Completion]:
    """R prompts, N samples: prefill each prompt once, then decode all samples together; finished rows leave."""
    model, device = agent.sampler, agent.device
    ids, mask = left_pad(prompts, agent.pad_id, device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    output = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
    cache = output.past_key_values
    index = torch.tensor(prompt_index, device=device)
    cache.reorder_cache(index)  # not batch_select_indices, which layers of linear attention lack
    logits = output.logits[index, -1]
    mask = mask[index]
    position = mask.sum(1)

    uniforms = torch.tensor(
        np.stack(
            [np.random.Generator(np.random.Philox(key=seed or 0)).random(sampling.max_new_tokens) for seed in seeds]
        )
    ).to(device)
    greedy = torch.tensor([seed is None for seed in seeds], device=device)
    eos = torch.tensor(agent.eos_ids, device=device, dtype=torch.long)
    tokens: list[list[int]] = [[] for _ in seeds]
    logprobs: list[list[float]] = [[] for _ in seeds]
    kept: list[list[float]] = [[] for _ in seeds]
    # A stop string that is complete now lies in the last tokens, of which a character takes four at most (its bytes).
    stops = sampling.stop_strings
    tail = 4 * max(map(len, stops), default=0) + 4
    reasons = ["length"] * len(seeds)
    alive = list(range(len(seeds)))  # sample numbers of the rows in the batch
    for step in range(sampling.max_new_tokens):
        rows = torch.tensor(alive, device=device)
        token, logprob, mass = choose_tokens(logits.float(), uniforms[rows, step], greedy[rows], sampling)
        ended = torch.isin(token, eos).tolist()
        for row, (sample, t, lp, m) in enumerate(zip(alive, token.tolist(), logprob.tolist(), mass.tolist())):
            if not math.isfinite(lp):
                raise FloatingPointError(f"{agent.name}: the model's logits are not finite, so nothing can be sampled")
            tokens[sample].append(t)
            logprobs[sample].append(lp)
            kept[sample].append(m)
            if ended[row]:
                reasons[sample] = "eos"
            elif stops and _find_stop(agent.decode(tokens[sample][-tail:]), stops) is not None:
                reasons[sample] = "stop"
                ended[row] = True
        keep = [row for row, end in enumerate(ended) if not end]
        if not keep or step == sampling.max_new_tokens - 1:
            break
        if len(keep) < len(alive):
            select = torch.tensor(keep, device=device)
            cache.reorder_cache(select)
            alive = [alive[row] for row in keep]
            token, mask, position = token[select], mask[select], position[select]
        mask = torch.cat([mask, mask.new_ones(len(alive), 1)], dim=1)
        output = model(
            input_ids=token[:, None],
            attention_mask=mask,
            position_ids=position[:, None],
            past_key_values=cache,
            use_cache=True,
        )
        logits, position = output.logits[:, -1], position + 1

    completions = []
    for sample in range(len(seeds)):
        text = agent.decode(tokens[sample][:-1] if reasons[sample] == "eos" else tokens[sample])
        if reasons[sample] == "stop":
            text = text[: _find_stop(text, stops)]
        mean_mass = sum(kept[sample]) / len(kept[sample])
        completions.append(Completion(tokens[sample], text, logprobs[sample], reasons[sample], mean_mass))
    return completions


def choose_tokens(logits: Tensor, uniform: Tensor, greedy: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution at `uniform`; greedy rows take the maximum.

    Args: logits [N, V] fp32; uniform [N] in [0, 1) float64; greedy [N] bool.
    Returns: token ids [N], their log-probs at the temperature over the whole vocabulary [N], kept mass [N].
    """
    # One uniform a token makes a row's sample independent of the batch. float64: a cumulative sum of 150,000 fp32
    # probabilities is off by more than the rare tokens weigh.
    logprobs = torch.log_softmax(logits / sampling.temperature, dim=-1)
    probabilities = logprobs.double().exp()
    if sampling.truncated:
        ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
        drop = ranked.cumsum(-1) - ranked >= sampling.top_p
        if sampling.top_k is not None:
            drop[:, sampling.top_k :] = True
        drop[:, 0] = False
        probabilities = probabilities.masked_fill(drop.gather(-1, order.argsort(-1)), 0.0)
    cumulative = probabilities.cumsum(-1)
    mass = cumulative[:, -1]
    token = torch.searchsorted(cumulative, (uniform * mass)[:, None], right=True)[:, 0]
    token = torch.where(greedy, logits.argmax(-1), token.clamp(max=logits.shape[-1] - 1))
    return token, logprobs.gather(-1, token[:, None])[:, 0], torch.where(greedy, 1.0, mass)


def left_pad(sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask [R, longest], values at the right end."""
    width = max(len(sequence) for sequence in sequences)
    ids = torch.full((len(sequences), width), pad_id, dtype=torch.long)
    mask = torch.zeros(len(sequences), width, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, width - len(sequence) :] = torch.tensor(sequence)
        mask[row, width - len(sequence) :] = 1
    return ids.to(device), mask.to(device)


def right_pad(sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask [N, longest], values at the left end."""
    width = max(len(sequence) for sequence in sequences)
    ids = torch.full((len(sequences), width), pad_id, dtype=torch.long)
    mask = torch.zeros(len(sequences), width, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence, dtype=torch.long)
        mask[row, : len(sequence)] = 1
    return ids.to(device), mask.to(device)


def _find_stop(text: str, stop_strings: Sequence[str]) -> int | None:
    places = [text.find(stop) for stop in stop_strings if stop in text]
    return min(places) if places else None
