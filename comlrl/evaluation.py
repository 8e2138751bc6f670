"""Evaluation of a team on a set of rows: greedy, and best of k samples."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from comlrl.generation import Sampling
from comlrl.rollouts import Node, Rollouts, Row, TreeShape
from comlrl.summaries import Metrics, completion_records, evaluation_metrics, mean

EvalLogger = Callable[..., list[dict[str, Any]]]


@dataclass
class Evaluation:
    """metrics: keys without the `eval/` prefix; sampled ones start with `sampled/`. records: completions."""

    metrics: Metrics
    records: list[dict[str, Any]]


def evaluate_team(
    rollouts: Rollouts,
    rows: Sequence[tuple[int, Row]],
    shape: TreeShape,
    sampling: Sampling,
    *,
    num_agents: int,
    generations: int,
    batch_size: int,
    seed_key: tuple,
    rollout: int = 0,
    eval_logger: EvalLogger | None = None,
    eval_aggregator: Callable[..., Metrics] | None = None,
    trajectory_metrics: Callable[[list[Node]], Metrics] | None = None,
) -> Evaluation:
    """Greedy trajectories of every row; with `generations` = k also k sampled ones a row (mean, and best of k).

    Sampled trajectories use the same seeds at every evaluation, so curves differ by the policy and not by luck.
    `trajectory_metrics`: further numbers of all greedy trajectories.
    """
    path = replace(
        shape,
        num_generations=max(generations, 1),
        branch_once=True,
        joint_mode="aligned",
        greedy_baseline=False,
        early_termination_threshold=None,  # as published: an evaluation plays every turn
    )
    greedy: list[Node] = []
    sampled: list[Node] = []
    for start in range(0, len(rows), batch_size):
        chunk = rows[start : start + batch_size]
        greedy += rollouts.expand(chunk, path, sampling, seed_key, greedy=True)[0]
        if generations:
            sampled += rollouts.expand(chunk, path, sampling, seed_key)[0]
    metrics = evaluation_metrics(greedy, num_agents)
    metrics["rows"] = len(greedy)
    records = completion_records(greedy, "eval", rollout)
    if generations:
        metrics |= {f"sampled/{key}": value for key, value in evaluation_metrics(sampled, num_agents).items()}
        best = [max(root.known_returns()) for root in sampled if root.known_returns()]
        metrics["sampled/best_of_k"] = mean(best) if best else float("nan")
        metrics |= {f"sampled/{key}": value for key, value in pass_at_k(sampled).items()}
        records += completion_records(sampled, "eval_sampled", rollout)
    if eval_logger is not None and eval_aggregator is not None:
        metrics |= user_metrics(greedy, shape.num_turns, eval_logger, eval_aggregator)
    if trajectory_metrics is not None and greedy:
        metrics |= trajectory_metrics(greedy)
    return Evaluation(metrics, records)


def pass_at_k(roots: Sequence[Node]) -> Metrics:
    """Chance that one of k sampled trajectories solves the row, for k = 1, 2, 4, ..., if a score has the part `solved`.

    With c of n trajectories solved: 1 - C(n - c, k) / C(n, k), which is unbiased (Chen et al. 2021).
    """
    rows = [[parts["solved"] for parts in last_parts(root) if "solved" in parts] for root in roots]
    rows = [solved for solved in rows if solved]
    fewest = min(map(len, rows), default=0)
    metrics = {}
    for k in [2**i for i in range(fewest.bit_length())]:
        missed = [math.comb(len(solved) - round(sum(solved)), k) / math.comb(len(solved), k) for solved in rows]
        metrics[f"pass_at_{k}"] = 1 - mean(missed)
    return metrics


def last_parts(node: Node) -> list[dict[str, float]]:
    """The named parts of each trajectory's last turn."""
    children = node.children or [None] * len(node.parts)
    pairs = zip(node.parts, children)
    return [last for parts, child in pairs for last in ([parts] if child is None else last_parts(child))]


def user_metrics(
    roots: Sequence[Node], num_turns: int, eval_logger: EvalLogger, eval_aggregator: Callable[..., Metrics]
) -> Metrics:
    """The published hooks: eval_logger(agent_completions_turns=[agent][sample][turn], batch_items=, prompts=) gives one
    mapping a sample; eval_aggregator(those, num_turns=) gives the metrics."""
    if not roots:
        return {}
    num_roles = len(roots[0].responses[0])
    turns: list[list[list[str]]] = [[] for _ in range(num_roles)]
    for root in roots:
        for role in range(num_roles):
            said, node = [], root
            while True:
                said.append(node.responses[0][role])
                if not node.children or node.children[0] is None:
                    break
                node = node.children[0]
            turns[role].append(said)
    per_sample = eval_logger(
        agent_completions_turns=turns,
        batch_items=[root.row for root in roots],
        prompts=[root.row.get("prompt", "") for root in roots],
    )
    return dict(eval_aggregator(per_sample, num_turns=num_turns))
