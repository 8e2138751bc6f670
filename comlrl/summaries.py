"""Numbers and records of rollout trees: what metrics.jsonl and completions.jsonl say about them."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from comlrl import credit
from comlrl.batches import MicroBatch, Sample
from comlrl.rollouts import Node, RolloutStats, prompt_text, walk

Metrics = dict[str, float]


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def rollout_metrics(roots: Sequence[Node], stats: RolloutStats, num_agents: int) -> Metrics:
    """Metrics of freshly sampled trees.

    `reward_mean`, `return_mean`: of the root's joint actions, rewards summed over turns for the return. Per turn:
    `turn_t/...` (t from 1); per agent and turn: `agent_i/turn_t/...` lengths in tokens and characters, shares.
    """
    metrics: Metrics = {
        "time/generate": stats.generate_seconds,
        "time/reward": stats.reward_seconds,
        "rollout/rows": len(roots),
        "rollout/dropped_rows": stats.dropped_rows,
        "rollout/dropped_branches": stats.dropped_branches,
        "rollout/unparsable": stats.unparsable,
    }
    by_turn: dict[int, list[Node]] = {}
    for node in walk(roots):
        by_turn.setdefault(node.turn, []).append(node)
    every_reward = [r for nodes in by_turn.values() for node in nodes for r in node.known_rewards()]
    root_returns = [r for root in roots for r in root.known_returns()]
    if every_reward:
        metrics["reward_mean"] = mean(every_reward)
        metrics["return_mean"] = mean(root_returns) if root_returns else float("nan")
    for turn, nodes in sorted(by_turn.items()):
        prefix = f"turn_{turn + 1}"
        rewards = [r for node in nodes for r in node.known_rewards()]
        if rewards:
            metrics[f"{prefix}/reward_mean"] = mean(rewards)
            metrics[f"{prefix}/reward_std"] = statistics.pstdev(rewards)
            metrics[f"{prefix}/expected_return"] = mean(r for node in nodes for r in node.known_returns())
        metrics[f"{prefix}/unrewarded_share"] = 1 - len(rewards) / sum(len(node.rewards) for node in nodes)
        for name, value in part_means(nodes).items():
            metrics[f"{prefix}/parts/{name}"] = value
        for agent in range(num_agents):
            metrics |= {f"agent_{agent}/{prefix}/{key}": v for key, v in completion_metrics(nodes, agent).items()}
    return metrics


def part_means(nodes: Iterable[Node]) -> Metrics:
    collected: dict[str, list[float]] = {}
    for node in nodes:
        for parts in node.parts:
            for name, value in parts.items():
                collected.setdefault(name, []).append(value)
    return {name: mean(values) for name, values in collected.items()}


def completion_metrics(nodes: Iterable[Node], agent: int) -> Metrics:
    completions = [completion for node in nodes for completion in node.completions[agent]]
    return {
        "tokens": mean(len(c.token_ids) for c in completions),
        "characters": mean(len(c.text) for c in completions),
        "truncated_share": mean(c.truncated for c in completions),
        "kept_mass": mean(c.kept_mass for c in completions),
    }


def evaluation_metrics(roots: Sequence[Node], num_agents: int) -> Metrics:
    """Metrics of separate trajectories (nothing branches after the first turn).

    `reward_mean`: of the last turn played; `return_mean`: discounted sum over turns; as published also each turn's
    reward and the expected return from that turn on.
    """
    metrics: Metrics = {}
    by_turn: dict[int, list[Node]] = {}
    last_rewards = []
    for node in walk(roots):
        by_turn.setdefault(node.turn, []).append(node)
        children = node.children or [None] * len(node.rewards)
        last_rewards += [r for r, child in zip(node.rewards, children) if child is None and r is not None]
    returns = [r for root in roots for r in root.known_returns()]
    metrics["reward_mean"] = mean(last_rewards) if last_rewards else float("nan")
    metrics["return_mean"] = mean(returns) if returns else float("nan")
    for turn, nodes in sorted(by_turn.items()):
        prefix = f"turn_{turn + 1}"
        rewards = [r for node in nodes for r in node.known_rewards()]
        if rewards:
            metrics[f"{prefix}/reward_mean"] = mean(rewards)
            metrics[f"{prefix}/expected_return"] = mean(r for node in nodes for r in node.known_returns())
        for name, value in part_means(nodes).items():
            metrics[f"{prefix}/parts/{name}"] = value
        for agent in range(num_agents):
            numbers = completion_metrics(nodes, agent)
            numbers.pop("kept_mass")
            metrics |= {f"agent_{agent}/{prefix}/{key}": value for key, value in numbers.items()}
    return metrics


def completion_records(roots: Sequence[Node], kind: str, rollout: int) -> list[dict[str, Any]]:
    """One record an agent and joint answer; `sample` joins the answers of one joint action."""
    records = []
    for node in walk(roots):
        for j, action in enumerate(node.joint_actions):
            for agent, k in enumerate(action):
                completion = node.completions[agent][k]
                records.append(
                    {
                        "kind": kind,
                        "rollout": rollout,
                        "sample": node.sample_id(j),
                        "row": node.row_id,
                        "turn": node.turn + 1,
                        "agent": agent,
                        "prompt": prompt_text(node.prompts[agent]),
                        "completion": completion.text,
                        "tokens": len(completion.token_ids),
                        "finish_reason": completion.finish_reason,
                        "reward": node.rewards[j],
                        "return": node.returns[j],
                        **({"parts": node.parts[j]} if node.parts[j] else {}),
                    }
                )
    return records


class TokenMeter:
    """Token means of one agent's logged tensors, by turn, over the micro-batches of a step.

    A mean is over the tokens of the batches that logged its key: a loss of a fork's own may have more keys in some.
    """

    def __init__(self, index: int):
        self.index = index
        self.sums: dict[str, float] = {}
        self.tokens: dict[str, float] = {}  # behind each sum that is a mean
        self.values = ValueMeter(f"agent_{index}")

    def add(self, batch: MicroBatch, logged: dict[str, Tensor], weighted_loss: Tensor) -> None:
        turns = torch.tensor([s.turn for s in batch.samples], device=batch.completion_mask.device)
        for turn in sorted({s.turn for s in batch.samples}):
            here = (turns == turn)[:, None] & batch.completion_mask.bool()
            prefix = f"agent_{self.index}/turn_{turn + 1}"
            for key, values in logged.items():
                self._add(f"{prefix}/{key}", float(values[here].double().sum()), float(here.sum()))
            self._add(f"{prefix}/loss", float(weighted_loss[here].double().sum()))
            for key, values in batch.logged.items():
                self.values.add(turn, key, values[turns == turn])
            largest = f"{prefix}/sampler_gap_max"
            self.sums[largest] = max(self.sums.get(largest, 0.0), float(logged["sampler_gap"][here].max()))

    def merge(self, other: "TokenMeter") -> None:
        """Take in what another process has measured."""
        self.values.merge(other.values)
        for key, value in other.sums.items():
            if key.endswith("/sampler_gap_max"):
                self.sums[key] = max(self.sums.get(key, 0.0), value)
            else:
                self._add(key, value, other.tokens.get(key))

    def _add(self, key: str, value: float, tokens: float | None = None) -> None:
        self.sums[key] = self.sums.get(key, 0.0) + value
        if tokens is not None:
            self.tokens[key] = self.tokens.get(key, 0.0) + tokens

    def metrics(self) -> Metrics:
        """Token means; the loss is a sum of weighted terms already, and the largest gap a maximum."""
        means = {key: value / max(self.tokens.get(key, 1.0), 1.0) for key, value in self.sums.items()}
        return means | self.values.metrics()


class ValueMeter:
    """Means of numbers that are one a sample, by turn, over the micro-batches of a step."""

    def __init__(self, prefix: str):
        self.prefix = prefix
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}

    def add(self, turn: int, key: str, values: Tensor) -> None:
        name = f"{self.prefix}/turn_{turn + 1}/{key}"
        self._add(name, float(values.double().sum()), values.numel())

    def merge(self, other: "ValueMeter") -> None:
        for name, value in other.sums.items():
            self._add(name, value, other.counts[name])

    def _add(self, name: str, value: float, count: int) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value
        self.counts[name] = self.counts.get(name, 0) + count

    def metrics(self) -> Metrics:
        return {name: value / self.counts[name] for name, value in self.sums.items() if self.counts[name]}


def mean_metrics(each: Sequence[Metrics]) -> Metrics:
    """Mean of each key over those that have it."""
    keys = dict.fromkeys(key for metrics in each for key in metrics)
    return {key: mean(metrics[key] for metrics in each if key in metrics) for key in keys}


@dataclass
class RolloutSample:
    """One agent's answer as a `metrics_callback` gets it: the published fields.

    old_logprob: the generator's sum over the tokens. In evaluation old_value and advantage are 0: no critic is asked.
    """

    agent_idx: int
    prompt: str
    completion: str
    full_input_ids: Tensor
    attention_mask: Tensor
    prompt_len: int
    response_len: int
    old_logprob: float
    old_value: float
    reward: float
    returns: float
    advantage: float
    normalized_advantage: float | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


def rollout_samples(root: Node, samples: Mapping[int, Sequence[Sequence[Sample]]] | None = None) -> list[RolloutSample]:
    """Every rewarded answer of a tree. `samples`: id of a node -> one list an agent, with what the critics said."""
    found = []
    for node in walk([root]):
        for agent, completions in enumerate(node.completions):
            learned = {s.number: s for s in (samples[id(node)][agent] if samples else [])}
            rewards = credit.completion_credits(node.joint_actions, node.rewards, agent, len(completions))
            returns = credit.completion_credits(node.joint_actions, node.returns, agent, len(completions))
            for k, completion in enumerate(completions):
                reward, value, sample = rewards[k], returns[k], learned.get(k)
                if reward is None or value is None:
                    continue
                ids = torch.tensor([*node.prompt_ids[agent], *completion.token_ids])
                metadata = {"turn_idx": node.turn, "generation_idx": k, "batch_item": node.row}
                if sample is not None:
                    metadata |= {"value_target": sample.credit, "environment_reward": reward}
                found.append(
                    RolloutSample(
                        agent_idx=agent,
                        prompt=prompt_text(node.prompts[agent]),
                        completion=completion.text,
                        full_input_ids=ids,
                        attention_mask=torch.ones_like(ids),
                        prompt_len=len(node.prompt_ids[agent]),
                        response_len=len(completion.token_ids),
                        old_logprob=sum(completion.logprobs),
                        old_value=sample.value if sample else 0.0,
                        reward=reward,
                        returns=value,
                        advantage=sample.advantage if sample else 0.0,
                        metadata=metadata,
                    )
                )
    return found
