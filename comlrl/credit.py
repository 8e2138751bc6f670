"""Returns, baselines and advantages: pure functions on numbers and tensors.

The four baselines are those of REINFORCE (none), GRPO (group mean), RLOO (mean of the others) and ReMax (greedy
answer), over the K credits of one agent at one node of the rollout tree.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ADVANTAGE_MODES = ("raw", "mean", "rloo", "greedy", "max")
NORMALIZATION_FLOOR = 1e-6


def mean(values: Sequence[float]) -> float:
    """Equal values give that very value, and their order does not matter: equal credits stay equal floats."""
    return values[0] if len(set(values)) == 1 else math.fsum(values) / len(values)


def joint_returns(
    rewards: Sequence[float | None], child_returns: Sequence[Sequence[float | None] | None], discount: float
) -> list[float | None]:
    """R_j = r_j + discount * mean of R over the child's joint actions; without a child R_j = r_j.

    A joint action without reward has no return; inside a child such actions leave the mean.
    """
    returns: list[float | None] = []
    for reward, child in zip(rewards, child_returns, strict=True):
        known = [value for value in child or [] if value is not None]
        if reward is None:
            returns.append(None)
        else:
            returns.append(reward + discount * mean(known) if known else reward)
    return returns


def completion_credits(
    joint_actions: Sequence[tuple[int, ...]],
    returns: Sequence[float | None],
    agent: int,
    num_completions: int,
) -> list[float | None]:
    """One agent's K credits: the mean return of the joint actions that contain each completion.

    The mean, not the sum, so `aligned` and `cross` have one scale. A completion in no rewarded joint action has none.
    """
    groups: list[list[float]] = [[] for _ in range(num_completions)]
    for action, value in zip(joint_actions, returns, strict=True):
        if value is not None:
            groups[action[agent]].append(value)
    return [mean(group) if group else None for group in groups]


def advantages(credits: Tensor, mode: str, normalize: bool, greedy_return: float | None = None) -> Tensor:
    """A_k = R_k - b_k over one agent's credits at one node, [K] -> [K] in float64.

    `mode`: raw b=0; mean b=group mean; rloo b=mean of the other K-1; greedy b=the greedy answer's return; max b=group
    maximum. `normalize` divides by the population standard deviation of the credits (floor 1e-6) and never re-centres:
    a z-score would make all modes the same. If all credits are equal, mean, rloo and max give exactly 0.
    """
    credits = credits.double()
    count = credits.numel()
    equal = bool((credits == credits[0]).all()) if count else True
    if mode == "raw":
        result = credits.clone()
    elif mode == "greedy":
        assert greedy_return is not None, "mode greedy needs the greedy return"
        result = credits - greedy_return
    elif equal:
        result = torch.zeros_like(credits)
    elif mode == "mean":
        result = credits - credits.mean()
    elif mode == "rloo":
        result = credits - (credits.sum() - credits) / (count - 1)
    else:
        assert mode == "max", mode
        result = credits - credits.max()
    if normalize and not equal:  # equal credits have no deviation to divide by
        result = result / credits.std(correction=0).clamp(min=NORMALIZATION_FLOOR)
    return result


def child_weight(parent_weight: float, num_joint_actions: int, discount: float, weighting: str) -> float:
    """`tree`: discount * parent's weight / the number of the parent's rewarded joint actions. `equal`: 1.

    With the root at 1, `tree` makes the sum over nodes the policy gradient of the expected discounted return.
    """
    return discount * parent_weight / num_joint_actions if weighting == "tree" else 1.0


def tree_size(num_joint_actions: int, num_turns: int, greedy_baseline: bool) -> int:
    """Nodes of one full tree; a greedy baseline adds a chain down to the last turn to every node."""
    total = 0
    for turn in range(num_turns):
        nodes = num_joint_actions**turn
        total += nodes + (nodes * (num_turns - turn) if greedy_baseline else 0)
    return total


# ---- critics --------------------------------------------------------------------------------------------------------


def lambda_returns(
    rewards: Sequence[float | None],
    child_values: Sequence[float | None],
    child_returns: Sequence[Sequence[float | None] | None],
    discount: float,
    lam: float,
) -> list[float | None]:
    """G_j = r_j + discount * [(1 - lam) * V(child) + lam * mean of G over the child's joint actions]: GAE on a tree.

    Without a child, or if no joint action of the child was rewarded, G_j = r_j. None where the reward is. lam 0 is the
    one-step target, lam 1 the return of `joint_returns`.
    """
    result: list[float | None] = []
    for reward, value, child in zip(rewards, child_values, child_returns, strict=True):
        known = [target for target in child or [] if target is not None]
        if reward is None:
            result.append(None)
        elif not known:
            result.append(reward)
        else:
            assert value is not None
            result.append(reward + discount * ((1 - lam) * value + lam * mean(known)))
    return result


def sibling_baselines(
    joint_actions: Sequence[tuple[int, ...]], values: Sequence[float | None], agent: int, num_completions: int
) -> list[float | None]:
    """For each of an agent's completions the mean value of the joint actions without it: a baseline it cannot act on.

    `values`: of the joint actions, None for those that do not count. None where nothing is left.
    """
    groups: list[list[float]] = [[] for _ in range(num_completions)]
    for action, value in zip(joint_actions, values, strict=True):
        if value is not None:
            for k in range(num_completions):
                if action[agent] != k:
                    groups[k].append(value)
    return [mean(group) if group else None for group in groups]


def z_scores(values: Tensor) -> Tensor:
    """(values - mean) / population deviation (floor 1e-6), [N] -> [N] in float64; 0 if all are equal."""
    values = values.double()
    if not values.numel() or bool((values == values[0]).all()):
        return torch.zeros_like(values)
    return (values - values.mean()) / values.std(correction=0).clamp(min=NORMALIZATION_FLOOR)


def explained_variance(values: Sequence[float], returns: Sequence[float]) -> float:
    """1 - variance(returns - values) / variance(returns): 1 is perfect, 0 as good as a constant, NaN undefined."""
    target = torch.tensor(returns, dtype=torch.float64)
    variance = target.var(correction=0).item()
    if variance <= 1e-12:
        return float("nan")
    return 1 - (target - torch.tensor(values, dtype=torch.float64)).var(correction=0).item() / variance
