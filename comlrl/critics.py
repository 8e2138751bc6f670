"""Critics: what they read, and what they say of it.

A critic is a language model with a value head (`comlrl.value_head`). It reads text with a tokenizer of its own, so its
architecture and vocabulary may be others than the agents'.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from comlrl import credit, losses
from comlrl.agents import Agent, Prompt
from comlrl.batches import Loaded, MicroBatch, share
from comlrl.generation import right_pad
from comlrl.loading import Member, check_team, load_team
from comlrl.logprobs import Finish, Read, completion_states, head_logprobs, read_completions, token_logprobs
from comlrl.rollouts import Node
from comlrl.summaries import Metrics, mean
from comlrl.value_head import CausalLMWithValueHead, without_language


@dataclass(eq=False)
class ValueItem:
    """One history (or history and action) that one critic values, and what the value should have been.

    `prompt_ids`: the text in the critic's tokens. `targets`: lambda-returns, whose mean squared distance is the loss;
    empty: no loss. They and `output`, what the head said before the first step, are in the head's units.
    """

    prompt_ids: list[int]
    turn: int
    name: str
    cut: bool = False  # the oldest part did not fit into the critic's context
    targets: list[float] = field(default_factory=list)
    output: float = 0.0

    @property
    def token_ids(self) -> list[int]:
        """Nothing follows the text."""
        return []


def history_text(node: Node, agents: Sequence[int], action: Sequence[str] | None = None) -> str:
    """What these agents have read and said up to a node, one line each, oldest first.

        0< the first prompt of agent 0
        1< the first prompt of agent 1
        0> what agent 0 answered
        1> what agent 1 answered
        0< the second prompt of agent 0
        ...

    It ends with the node's own prompts or, if `action` is given (one text an agent of `agents`), with these answers.
    """
    lines = []
    for turn in range(node.turn + 1):
        lines += [f"{agent}< {whole_text(node.prompt_history[agent][turn])}" for agent in agents]
        if turn < node.turn:
            lines += [f"{agent}> {node.response_history[agent][turn]}" for agent in agents]
    if action is not None:
        lines += [f"{agent}> {text}" for agent, text in zip(agents, action, strict=True)]
    return "\n".join(lines)


def whole_text(prompt: Prompt) -> str:
    """All of a message list: a critic reads no chat template."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def value_item(text: str, critic: Agent, turn: int, name: str) -> ValueItem:
    """A text that does not fit into the critic's context loses its oldest tokens."""
    ids = critic.encode(text)
    return ValueItem(ids[-critic.context_length :], turn, name, cut=len(ids) > critic.context_length)


def check_critics(
    critic_model: Any,
    critics: Sequence[Any] | None,
    names: Sequence[str],
    tokenizer: Any,
    homes: Sequence[Member],
    model_kwargs: dict[str, Any] | None,
    devices: str | Sequence[str] | None,
) -> tuple[list[Member], list[CausalLMWithValueHead | None]]:
    """The critics called `names` before they are loaded, and those that came with a head. Refuses what cannot work.

    `homes`: the agent that each stands beside: its device and precision and, for a loaded critic, its tokenizer.
    """
    count = len(names)
    if (critic_model is None) == (critics is None):
        raise ValueError(
            f"give critic_model (one for all) or critics (a list of {count}), one of the two: a name or a model each"
        )
    if critics is None:
        if count > 1 and not isinstance(critic_model, str):
            raise ValueError(f"critic_model is one loaded model for {count} critics; give critics, a list of {count}")
        critics = [critic_model] * count
    if isinstance(critics, str) or len(critics) != count:
        raise ValueError(f"critics={critics!r:.100}: must be a list of {count} ({', '.join(names)})")
    heads = [critic if isinstance(critic, CausalLMWithValueHead) else None for critic in critics]
    sources = [critic.backbone if isinstance(critic, CausalLMWithValueHead) else critic for critic in critics]
    tokenizers = list(tokenizer) if isinstance(tokenizer, (list, tuple)) else [tokenizer] * count
    if len(tokenizers) != count:
        raise ValueError(f"critic_tokenizer has {len(tokenizers)} entries for {count} critics; give one, or {count}")
    given = [
        home.tokenizer if own is None and not isinstance(source, str) else own
        for own, source, home in zip(tokenizers, sources, homes)
    ]
    config = {"model_kwargs": dict(model_kwargs or {})}
    places = devices if devices is not None else [str(home.device) for home in homes]
    members = check_team(None, sources, count, given, config, places, "float32")
    members = [
        replace(member, name=name, compute_dtype=home.compute_dtype)
        for member, name, home in zip(members, names, homes)
    ]
    return members, heads


def load_critics(members: Sequence[Member], heads: Sequence[CausalLMWithValueHead | None]) -> list[Agent]:
    """Critics with the value heads that they came with.

    Raises ValueError if a critic's model cannot embed all ids of its tokenizer.
    """
    critics = load_team(members)
    for critic, given in zip(critics, heads):
        fix = "give the critic its own tokenizer (critic_tokenizer)"
        without_language(critic.model, critic.tokenizer, critic.name, fix)
        if given is not None and given.value_head is not None:
            given.value_head.float().to(critic.device)
            critic.value_model = given.eval()
    return critics


def head_outputs(
    model: CausalLMWithValueHead, critic: Agent, items: Sequence[ValueItem], device: torch.device
) -> Tensor:
    """Of the last token of each item, [N] in fp32."""
    ids, mask = right_pad([item.prompt_ids for item in items], critic.pad_id, device)
    with critic.autocast():
        return model.last_values(ids, mask)


@torch.no_grad()
def frozen_outputs(items: Sequence[ValueItem], critic: Agent, model: Loaded, budget: int) -> dict[int, float]:
    """Outputs of this process's share of the items, by their place, without gradient; see `frozen_logprobs`."""
    places = {id(item): place for place, item in enumerate(items)}
    result: dict[int, float] = {}
    with model.awake():
        for part in share(items, model.group, budget, model.lockstep):
            outputs = model.run(head_outputs, critic, part.items, model.device)
            if part.counts:
                result |= {places[id(item)]: output for item, output in zip(part.items, outputs.tolist())}
    return result


def item_losses(outputs: Tensor, items: Sequence[ValueItem], clip_range: float | None) -> Tensor:
    """Mean value loss over each item's targets: [N] -> [N]."""
    device = outputs.device
    rows = torch.tensor([n for n, item in enumerate(items) for _ in item.targets], device=device)
    targets = torch.tensor([target for item in items for target in item.targets], device=device)
    old = torch.tensor([item.output for item in items], device=device)
    errors = losses.value_loss(outputs[rows], targets, old[rows], clip_range)
    counts = torch.tensor([len(item.targets) for item in items], device=device)
    return torch.zeros_like(outputs).index_add(0, rows, errors) / counts


def logits_and_values_reader(model: CausalLMWithValueHead) -> Read:
    """Logits, and behind them the value: [N, L, V + 1]."""

    def read(last_only: bool, **inputs: Any) -> tuple[Tensor, Cache]:
        output = model(**inputs, **({"logits_to_keep": 1} if last_only else {}))
        assert output.values is not None
        return torch.cat([output.logits.float(), output.values[..., None]], dim=-1), output.past_key_values

    return read


def policy_and_values(
    model: CausalLMWithValueHead,
    batch: MicroBatch,
    finish: Finish | None,
    temperature: float,
    entropy: str,
    of_actions: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs and entropies as `completion_logprobs` gives them, and a value a sample, [N], from the same forward.

    The value is at the prompt's last token, or with `of_actions` at the answer's last token. `finish`: see
    `head_finish`.
    """
    assert model.value_head is not None
    ids, mask = batch.completion_ids, batch.completion_mask
    if of_actions:  # one column more, so that the last token is read too
        ids, mask = torch.nn.functional.pad(ids, (0, 1)), torch.nn.functional.pad(mask, (0, 1))
    inputs = (batch.prompt_ids, batch.prompt_mask, ids, mask, batch.prompt_index)
    if finish is None:
        both = read_completions(logits_and_values_reader(model), *inputs)
        values = both[..., -1]
        logprobs, entropies = token_logprobs(both[..., :-1], ids, mask, temperature, entropy)
    else:
        states = completion_states(model.backbone, *inputs)
        values = model.value_head(states)
        logprobs, entropies = head_logprobs(
            model.backbone, finish, states, ids, mask, temperature, entropy, batch.most_tokens
        )
    last = batch.completion_mask.sum(1) if of_actions else torch.zeros_like(batch.prompt_index)
    values = values[torch.arange(len(ids), device=ids.device), last]
    width = batch.completion_ids.shape[1]
    return logprobs[:, :width], entropies[:, :width], values


@dataclass
class RunningStatistics:
    """Mean and variance of all value targets so far, by which a critic's outputs are scaled (Welford's sums)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of squared distances from the mean

    def add(self, values: Sequence[float]) -> "RunningStatistics":
        """With these values too; this object stays as it is."""
        count, mean, squares = self.count, self.mean, self.squares
        for value in values:
            count += 1
            step = value - mean
            mean += step / count
            squares += step * (value - mean)
        return RunningStatistics(count, mean, squares)

    @property
    def deviation(self) -> float:
        """1 before there are two values, and where all are equal."""
        variance = self.squares / self.count if self.count > 1 else 1.0
        return variance**0.5 if variance > 1e-12 else 1.0

    def normalize(self, value: float) -> float:
        return (value - self.mean) / self.deviation

    def restore(self, output: float) -> float:
        return output * self.deviation + self.mean


def value_metrics(
    prefix: str,
    items: Sequence[Sequence[ValueItem]],
    values: Sequence[Sequence[float]],
    returns: Sequence[Sequence[Sequence[float]]],
) -> Metrics:
    """How good a critic was before it learned from a buffer, by turn.

    Of each node's items: the values, and the lambda-returns that each was to predict, both in units of the reward.
    """
    metrics: Metrics = {}
    flat = [
        (item, value, targets)
        for group, said, wanted in zip(items, values, returns, strict=True)
        for item, value, targets in zip(group, said, wanted, strict=True)
    ]
    for turn in sorted({item.turn for item, _, _ in flat}):
        here = [entry for entry in flat if entry[0].turn == turn]
        pairs = [(value, target) for _, value, targets in here for target in targets]
        metrics[f"{prefix}/turn_{turn + 1}/history_cut_share"] = mean(item.cut for item, _, _ in here)
        if pairs:
            said, wanted = [value for value, _ in pairs], [target for _, target in pairs]
            metrics[f"{prefix}/turn_{turn + 1}/explained_variance"] = credit.explained_variance(said, wanted)
            metrics[f"{prefix}/turn_{turn + 1}/value_mean"] = mean(said)
            metrics[f"{prefix}/turn_{turn + 1}/value_target_mean"] = mean(wanted)
    return metrics
