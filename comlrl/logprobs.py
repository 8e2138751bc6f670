"""Log-probs of sampled tokens, without ever holding batch x length x vocabulary.

A model is run up to its last hidden states; its own language-model head then reads the sampled positions, a chunk at a
time, and where the chunks are many, backward makes each of them again instead of keeping all.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin
from transformers.modeling_layers import GradientCheckpointingLayer

CHUNK = 2**24  # logits made at once: 64 MiB in fp32, of which backward makes a few copies
PIECE = 2**18  # numbers in fp32 of one chunk at a time: 1 MiB, which stays in a core's cache
KEPT = 2**26  # logits that a forward keeps for backward at most; of more, each chunk is made again in backward

Finish = Callable[[Tensor], Tensor]  # what a model does to the output of its language-model head, number by number
Read = Callable[..., tuple[Tensor, Cache]]


def completion_logprobs(
    model: Callable[..., Any],
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    prompt_index: Tensor,
    temperature: float = 1.0,
    entropy: str = "value",
    finish: Finish | None = None,
    most_tokens: int = 0,
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the sampled tokens, the final EOS included.

    Args:
        prompt_ids, prompt_mask: [R, P], left-padded.
        completion_ids, completion_mask: [N, C], right-padded.
        prompt_index: [N], which of the R prompts each completion answers.
        temperature: of the sampling distribution; the log-prob is log_softmax(logits / temperature)[id].
        finish: see `head_finish`; none: the model's own forward, whose logits are all held.
        most_tokens: see `head_logprobs`.

    Returns:
        log-probs and entropies (nats), both [N, C] in fp32, exactly 0 on pads; for `entropy` see `token_logprobs`.

    A prompt is read once and its keys and values are shared by its completions, gradients included: K answers of a
    prompt as long as themselves cost half. Only sampled positions go through the language-model head.
    """
    inputs = (prompt_ids, prompt_mask, completion_ids, completion_mask, prompt_index)
    if finish is None:
        logits = read_completions(logits_reader(model), *inputs)
        return token_logprobs(logits, completion_ids, completion_mask, temperature, entropy)
    assert isinstance(model, nn.Module)
    states = completion_states(model, *inputs)
    return head_logprobs(model, finish, states, completion_ids, completion_mask, temperature, entropy, most_tokens)


def logits_reader(model: Callable[..., Any]) -> Read:
    def read(last_only: bool, **inputs: Any) -> tuple[Tensor, Cache]:
        output = model(**inputs, **({"logits_to_keep": 1} if last_only else {}))
        return output.logits, output.past_key_values

    return read


def states_reader(model: nn.Module) -> Read:
    def read(last_only: bool, **inputs: Any) -> tuple[Tensor, Cache]:
        output = model.base_model(**inputs)  # type: ignore[operator]
        return output.last_hidden_state, output.past_key_values

    return read


def completion_states(model: nn.Module, *inputs: Tensor) -> Tensor:
    """Last hidden states at the positions that predict the sampled tokens, [N, C, H]; inputs: see `read_completions`.

    With gradient checkpointing, each answer is read with a prompt of its own: what is computed again in backward must
    not write to a cache.
    """
    if not (torch.is_grad_enabled() and model.is_gradient_checkpointing):
        return read_completions(states_reader(model), *inputs)
    prompt_ids, prompt_mask, completion_ids, completion_mask, index = inputs
    mask = torch.cat([prompt_mask[index], completion_mask[:, :-1]], dim=1)
    with recomputing(model):
        output = model.base_model(  # type: ignore[operator]
            input_ids=torch.cat([prompt_ids[index], completion_ids[:, :-1]], dim=1),
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            use_cache=False,
        )
    return output.last_hidden_state[:, prompt_ids.shape[1] - 1 :]


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """Inside, layers keep nothing but their input for backward, if gradient checkpointing is switched on.

    transformers itself does so in training mode only, which a model here is never in.
    """
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer) and m.gradient_checkpointing]
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def read_completions(
    read: Read,
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    prompt_index: Tensor,
) -> Tensor:
    """What `read` gives at the positions that predict the sampled tokens, [N, C, ...]; each prompt is read once."""
    positions = (prompt_mask.cumsum(1) - 1).clamp(min=0)
    first, cache = read(True, input_ids=prompt_ids, attention_mask=prompt_mask, position_ids=positions, use_cache=True)
    found = first[:, -1:][prompt_index]
    if completion_ids.shape[1] == 1:
        return found
    select_rows(cache, prompt_index)
    length = prompt_mask.sum(1)[prompt_index]
    steps = torch.arange(completion_ids.shape[1] - 1, device=completion_ids.device)
    rest, _ = read(
        False,
        input_ids=completion_ids[:, :-1],
        attention_mask=torch.cat([prompt_mask[prompt_index], completion_mask[:, :-1]], dim=1),
        position_ids=length[:, None] + steps,
        past_key_values=cache,
        use_cache=True,
    )
    return torch.cat([found, rest], dim=1)


def select_rows(cache: Cache, index: Tensor) -> None:
    """Make the cache hold row index[n] at row n, for a forward whose gradient is wanted."""
    cache.reorder_cache(index)  # type: ignore[arg-type]
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            # Models such as Qwen3.5: the next forward would overwrite this state in place, but backward needs it.
            # Marked as new, it gets another tensor.
            layer.is_recurrent_states_initialized = dict.fromkeys(layer.is_recurrent_states_initialized, False)


def head_logprobs(
    model: nn.Module,
    finish: Finish,
    states: Tensor,
    ids: Tensor,
    mask: Tensor,
    temperature: float = 1.0,
    entropy: str = "value",
    most_tokens: int = 0,
) -> tuple[Tensor, Tensor]:
    """`token_logprobs` of the logits that the model's head makes of `states` [N, C, H], in chunks.

    most_tokens: the largest number of tokens that any process of the model's group brings to this call, where the
    processes have to run the head equally often (ZeRO-3).
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    vocabulary = model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
    keep = mask.bool()

    def of_chunk(states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return logits_logprobs(finish(head(states)), ids, temperature, entropy)

    picked, wanted = states[keep], ids[keep]
    count = -(-max(len(picked), most_tokens) * vocabulary // CHUNK)
    chunks = list(zip(picked.tensor_split(count), wanted.tensor_split(count)))
    if count * CHUNK > KEPT and torch.is_grad_enabled():
        results = [checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    else:
        results = [of_chunk(*chunk) for chunk in chunks]
    logprobs, entropies = (torch.cat(parts) for parts in zip(*results))
    empty = torch.zeros(ids.shape, dtype=torch.float32, device=ids.device)
    return empty.masked_scatter(keep, logprobs), empty.masked_scatter(keep, entropies)


def logits_logprobs(logits: Tensor, ids: Tensor, temperature: float, entropy: str) -> tuple[Tensor, Tensor]:
    """log_softmax(logits / temperature) at `ids`, and the entropy: [T, V], [T] -> two [T] in fp32.

    `entropy`: "value" has no gradient (to log), "gradient" has one (for a bonus), "none" is 0.
    """
    return PickedLogProbs.apply(logits, ids, temperature, entropy)


class PickedLogProbs(torch.autograd.Function):
    """`logits_logprobs` and its gradient, some rows at a time.

    Autograd would hold several [T, V] in fp32, and what takes its time is fetching them from memory. Here only the
    logits are kept, as the head made them; with p the probabilities, l their logarithms and H the entropy:

        d log-prob / d logit_j = ([j = id] - p_j) / temperature
        d H / d logit_j = -p_j (l_j + H) / temperature
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, temperature: float, entropy: str) -> tuple[Tensor, Tensor]:
        normalizer = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
        logprobs, entropies = torch.empty_like(normalizer), torch.zeros_like(normalizer)
        for rows in row_slices(logits):
            scaled = logits[rows].float() / temperature
            normalizer[rows] = scaled.logsumexp(-1)
            logprobs[rows] = scaled.gather(-1, ids[rows, None])[:, 0] - normalizer[rows]
            if entropy != "none":
                entropies[rows] = row_entropy(scaled - normalizer[rows, None])
        ctx.save_for_backward(logits, ids, normalizer, entropies)
        ctx.temperature = temperature
        if entropy != "gradient":
            ctx.mark_non_differentiable(entropies)
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprob: Tensor | None, of_entropy: Tensor | None) -> tuple[Tensor, None, None, None]:
        logits, ids, normalizer, entropies = ctx.saved_tensors
        if of_logprob is None:  # a loss of entropies alone
            of_logprob = torch.zeros_like(normalizer)
        gradient = torch.empty_like(logits)
        for rows in row_slices(logits):
            logs = (logits[rows].float() / ctx.temperature).sub_(normalizer[rows, None])
            weight = of_logprob[rows, None]
            if of_entropy is not None:
                weight = torch.addcmul(weight, of_entropy[rows, None], logs + entropies[rows, None])
            piece = logs.exp_().mul_(-weight)
            piece.scatter_add_(-1, ids[rows, None], of_logprob[rows, None])
            gradient[rows] = piece.div_(ctx.temperature)
        return gradient, None, None, None


def row_slices(logits: Tensor) -> list[slice]:
    """On a GPU all rows at once: there, launching costs more than memory does."""
    rows = len(logits) if logits.is_cuda else max(1, PIECE // logits.shape[-1])
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]


def token_logprobs(
    logits: Tensor, ids: Tensor, mask: Tensor, temperature: float = 1.0, entropy: str = "value"
) -> tuple[Tensor, Tensor]:
    """log_softmax(logits / temperature) at `ids`, and the entropy; [N, C, V], [N, C] -> two [N, C] in fp32.

    Exactly 0 where the mask is. `entropy`: see `logits_logprobs`.
    """
    # Row by row: the peak then holds no second [N, C, V].
    rows = [logits_logprobs(logits[n], ids[n], temperature, entropy) for n in range(len(logits))]
    logprobs, entropies = (torch.stack(parts) for parts in zip(*rows))
    keep = mask.bool()
    return torch.where(keep, logprobs, 0.0), torch.where(keep, entropies, 0.0)


def row_entropy(logprobs: Tensor) -> Tensor:
    """Entropy in nats of each distribution: [C, V] -> [C]."""
    return -(logprobs.exp() * logprobs).sum(-1)


@torch.no_grad()
def head_finish(model: PreTrainedModel) -> Finish | None:
    """What the model does to the output of its language-model head; None if that is not known.

    Most models do nothing, Gemma caps the logits (soft-capping), Cohere and Granite scale them. Not taken from the
    config alone: the model is run on a few tokens, and the answer must give its logits to the last bit.
    """
    head = model.get_output_embeddings()
    if head is None:
        return None
    embeddings: int = model.get_input_embeddings().num_embeddings  # type: ignore[assignment]
    ids = (torch.arange(8, device=model.device) % embeddings)[None]
    expected = model(input_ids=ids, use_cache=False).logits
    raw = head(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    for finish in possible_finishes(model.config.get_text_config().to_dict()):
        if torch.equal(finish(raw).float(), expected.float()):
            return finish
    return None


def possible_finishes(config: dict[str, Any]) -> list[Finish]:
    """The most special first: on small logits, soft-capping may differ from nothing in no bit."""
    found: list[Finish] = []
    cap = config.get("final_logit_softcapping")
    if cap:
        found.append(lambda logits: torch.tanh(logits / cap) * cap)
    for key in ("logit_scale", "logits_scaling"):
        scale = config.get(key)
        if scale:
            found += [lambda logits, s=scale: logits * s, lambda logits, s=scale: logits / s]  # type: ignore[misc]
    return [*found, lambda logits: logits]
