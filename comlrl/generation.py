"""Prompts in, completions out: token ids, log-probs, finish reason.

One small interface, `generate`; another engine is one more function with this signature.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from comlrl.agents import Agent
from comlrl.decoder import start_decoding


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
    device, count = agent.device, len(seeds)
    decoding = start_decoding(
        agent.sampler, *left_pad(prompts, agent.pad_id, device), torch.tensor(prompt_index, device=device)
    )
    uniforms = torch.tensor(
        np.stack(
            [np.random.Generator(np.random.Philox(key=seed or 0)).random(sampling.max_new_tokens) for seed in seeds]
        )
    ).to(device)
    greedy = torch.tensor([seed is None for seed in seeds], device=device) if None in seeds else None
    eos = torch.tensor(agent.eos_ids, device=device, dtype=torch.long)
    tokens: list[list[int]] = [[] for _ in seeds]
    # Step by step, so that only the tokens have to be waited for.
    logprobs = torch.zeros(count, sampling.max_new_tokens, device=device)
    kept = torch.ones(count, sampling.max_new_tokens, device=device, dtype=torch.float64)
    # A stop string that is complete now lies in the last tokens, of which a character takes four at most (its bytes).
    stops = sampling.stop_strings
    tail = 4 * max(map(len, stops), default=0) + 4
    reasons = ["length"] * count
    alive = list(range(count))  # sample numbers of the rows in the batch
    rows = torch.arange(count, device=device)  # the same
    for step in range(sampling.max_new_tokens):
        uniform, take_best = uniforms[rows, step], None if greedy is None else greedy[rows]
        token, logprob, mass = choose_tokens(decoding.logits.float(), uniform, take_best, sampling)
        logprobs[rows, step], kept[rows, step] = logprob, mass
        ended = torch.isin(token, eos).tolist()
        for row, (sample, t) in enumerate(zip(alive, token.tolist())):
            tokens[sample].append(t)
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
            decoding.select(select)
            alive = [alive[row] for row in keep]
            token, rows = token[select], rows[select]
        decoding.step(token)

    if not torch.isfinite(logprobs).all():
        raise FloatingPointError(f"{agent.name}: the model's logits are not finite, so nothing can be sampled")
    completions = []
    for sample, (said, sums) in enumerate(zip(logprobs.tolist(), kept.tolist())):
        length = len(tokens[sample])
        text = agent.decode(tokens[sample][:-1] if reasons[sample] == "eos" else tokens[sample])
        if reasons[sample] == "stop":
            text = text[: _find_stop(text, stops)]
        mean_mass = sum(sums[:length]) / length
        completions.append(Completion(tokens[sample], text, said[:length], reasons[sample], mean_mass))
    return completions


def choose_tokens(
    logits: Tensor, uniform: Tensor, greedy: Tensor | None, sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token a row by inverting the cumulative distribution at `uniform`; greedy rows take the maximum.

    Args: logits [N, V] fp32; uniform [N] in [0, 1) float64; greedy [N] bool, or None if no row is.
    Returns: token ids [N], their log-probs at the temperature over the whole vocabulary [N], kept mass [N].
    """
    # One uniform a token makes a row's sample independent of the batch. Summed in float64: a cumulative sum of 150,000
    # fp32 probabilities is off by more than the rare tokens weigh.
    scaled = logits if sampling.temperature == 1.0 else logits / sampling.temperature
    logprobs = torch.log_softmax(scaled, dim=-1)
    probabilities = logprobs.exp()
    if sampling.truncated:
        ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
        drop = ranked.cumsum(-1, dtype=torch.float64) - ranked >= sampling.top_p
        if sampling.top_k is not None:
            drop[:, sampling.top_k :] = True
        drop[:, 0] = False
        probabilities = probabilities.masked_fill(drop.gather(-1, order.argsort(-1)), 0.0)
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    mass = cumulative[:, -1]
    token = torch.searchsorted(cumulative, (uniform * mass)[:, None], right=True)[:, 0]
    token = token.clamp(max=logits.shape[-1] - 1)
    if greedy is not None:
        token, mass = torch.where(greedy, logits.argmax(-1), token), torch.where(greedy, 1.0, mass)
    return token, logprobs.gather(-1, token[:, None])[:, 0], mass


def left_pad(sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask [R, longest], values at the right end."""
    width = max(len(sequence) for sequence in sequences)
    ids = torch.full((len(sequences), width), pad_id, dtype=torch.long)
    mask = torch.zeros(len(sequences), width, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, width - len(sequence) :] = torch.tensor(sequence)
        mask[row, width - len(sequence) :] = 1
    return ids.to(device), mask.to(device)


def right_pad(
    sequences: Sequence[Sequence[int]], pad_id: int, device: torch.device, least: int = 1
) -> tuple[Tensor, Tensor]:
    """Ids and mask [N, longest], values at the left end; `least` columns at least."""
    width = max(least, *(len(sequence) for sequence in sequences))
    ids = torch.full((len(sequences), width), pad_id, dtype=torch.long)
    mask = torch.zeros(len(sequences), width, dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence, dtype=torch.long)
        mask[row, : len(sequence)] = 1
    return ids.to(device), mask.to(device)


def _find_stop(text: str, stop_strings: Sequence[str]) -> int | None:
    places = [text.find(stop) for stop in stop_strings if stop in text]
    return min(places) if places else None
