"""Policy losses: pure functions on tensors. Shapes: N samples, C tokens; pads are exactly 0 everywhere."""

import torch
from torch import Tensor

LOSS_AGGREGATIONS = ("sequence_sum", "token_mean", "constant")
PREFERENCE_LOSSES = ("sigmoid", "ipo", "hinge")


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, clip_range: float | None
) -> tuple[Tensor, Tensor]:
    """-min(ratio * A, clip(ratio, 1 +- clip_range) * A) a token (PPO); clip_range None: -A * log pi.

    Args: logprobs, old_logprobs [N, C] (old without gradient), advantages [N].
    Returns: loss [N, C], and 1 where the clipped branch was taken [N, C].
    """
    advantage = advantages[:, None].to(logprobs.dtype)
    if clip_range is None:
        return -advantage * logprobs, torch.zeros_like(logprobs)
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    loss = -torch.minimum(ratio * advantage, clipped * advantage)
    return loss, (ratio * advantage > clipped * advantage).to(logprobs.dtype)


def k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """Schulman's estimator of KL(pi || reference) a token: exp(d) - d - 1 >= 0 with d = log reference - log pi."""
    delta = reference_logprobs - logprobs
    return torch.exp(delta) - delta - 1


def kl_loss(logprobs: Tensor, old_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """ratio * k3 a token, gradient through both.

    The ratio (current over behaviour) makes the mean over sampled tokens the exact KL of the current policy, and its
    gradient the gradient of that KL; k3 alone has another gradient.
    """
    return torch.exp(logprobs - old_logprobs) * k3(logprobs, reference_logprobs)


def sampler_correction(old_logprobs: Tensor, sampler_logprobs: Tensor, cap: float) -> Tensor:
    """min(pi_old / pi_sampler, cap) a token, without gradient: truncated importance sampling for the gap between the
    learner's precision and the generator's."""
    return torch.exp(old_logprobs.detach() - sampler_logprobs).clamp(max=cap)


def aggregation_weights(
    sample_weights: Tensor, mask: Tensor, aggregation: str, *, max_new_tokens: int, samples: int, tokens: int
) -> Tensor:
    """What each token's loss is multiplied by, [N, C]; the loss of a minibatch is the sum of the products.

    `sample_weights` [N]: node weight / number of the node's credits / number of nodes, so they sum to 1 in a minibatch
    of root nodes. sequence_sum: the token sum of each sample. token_mean: every trained token of the minibatch counts
    the same (`samples`: all, `tokens`: trained; of the whole minibatch, on all ranks). constant: sum / max_new_tokens.
    """
    weights = sample_weights[:, None] * mask
    if aggregation == "sequence_sum":
        return weights
    if aggregation == "constant":
        return weights / max_new_tokens
    assert aggregation == "token_mean", aggregation
    return weights * samples / max(tokens, 1)


def value_loss(outputs: Tensor, targets: Tensor, old_outputs: Tensor, clip_range: float | None) -> Tensor:
    """(output - target)^2 each, all [N]; with a clip range the larger of that and the same at the old output +- range.

    The maximum (as in PPO) stops a step that already went far, never one that comes back.
    """
    loss = (outputs - targets) ** 2
    if clip_range is None:
        return loss
    near = old_outputs + (outputs - old_outputs).clamp(-clip_range, clip_range)
    clipped = (near - targets) ** 2
    return torch.where(clipped > loss, clipped, loss)


def preference_loss(log_ratios: Tensor, kind: str, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Loss of each preference pair, [P] -> [P].

    `log_ratios`: of the whole team, log pi / reference of the chosen joint answer minus that of the rejected one (sums
    over agents and tokens). With m = beta * log_ratio:
    sigmoid (DPO, Rafailov et al. 2023): -log sigmoid(m); with label smoothing e (cDPO) the label is wrong with
    probability e: -(1 - e) log sigmoid(m) - e log sigmoid(-m).
    ipo (Azar et al. 2023): (log_ratio - 1 / (2 beta))^2. hinge (SLiC, Zhao et al. 2023): max(0, 1 - m).
    """
    scaled = beta * log_ratios
    if kind == "ipo":
        return (log_ratios - 1 / (2 * beta)) ** 2
    if kind == "hinge":
        return torch.relu(1 - scaled)
    assert kind == "sigmoid", kind
    right, wrong = torch.nn.functional.logsigmoid(scaled), torch.nn.functional.logsigmoid(-scaled)
    return -(1 - label_smoothing) * right - label_smoothing * wrong


def bradley_terry_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """-log sigmoid(chosen - rejected) of each pair's scores, [P], [P] -> [P]."""
    return -torch.nn.functional.logsigmoid(chosen - rejected)
