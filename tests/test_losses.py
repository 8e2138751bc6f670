"""Policy losses against plain per-token loops, and the KL term against an enumerated distribution."""

import math

import pytest
import torch

from comlrl import losses

SAMPLES, TOKENS, VOCABULARY = 5, 4, 6
LENGTHS = [4, 1, 3, 2, 4]


@pytest.fixture
def tokens():
    """Log-probs of 5 samples of up to 4 tokens, exactly 0 on pads, and what goes with them."""
    generator = torch.Generator().manual_seed(3)
    mask = torch.tensor([[float(t < length) for t in range(TOKENS)] for length in LENGTHS])

    def draw():
        return -torch.rand(SAMPLES, TOKENS, generator=generator, dtype=torch.float64).mul(2) * mask

    old = draw()
    return {
        "logprobs": (old + 0.4 * torch.randn(SAMPLES, TOKENS, generator=generator).double() * mask),
        "old": old,
        "reference": draw(),
        "sampler": draw(),
        "mask": mask.double(),
        "advantages": torch.tensor([1.5, -2.0, 0.7, -0.3, 0.0], dtype=torch.float64),
    }


def each_token():
    return [(n, t) for n in range(SAMPLES) for t in range(LENGTHS[n])]


# ---- the policy loss -------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_range", [0.2, 0.05, None])
def test_policy_loss_equals_a_loop(tokens, clip_range):
    loss, clipped = losses.policy_loss(tokens["logprobs"], tokens["old"], tokens["advantages"], clip_range)
    for n, t in each_token():
        new, old = tokens["logprobs"][n, t].item(), tokens["old"][n, t].item()
        advantage = tokens["advantages"][n].item()
        if clip_range is None:
            expected, cut = -advantage * new, False
        else:
            ratio = math.exp(new - old)
            bounded = min(max(ratio, 1 - clip_range), 1 + clip_range)
            expected = -min(ratio * advantage, bounded * advantage)
            cut = bounded * advantage < ratio * advantage
        assert loss[n, t].item() == pytest.approx(expected, abs=1e-12)
        assert clipped[n, t].item() == float(cut)
    assert clip_range is None or 0 < clipped.sum() < len(each_token())


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        # gradient: of the loss by the log-prob, ratio * -advantage unless the clipped branch is taken
        (1.0, 2.0, -2.0, -2.0),
        (1.0, -2.0, 2.0, 2.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),  # above the range and worth more of it: no further
        (0.5, 2.0, -1.0, -1.0),  # below the range but worth more of it: goes back
        (1.5, -2.0, 3.0, 3.0),
        (0.5, -2.0, 1.6, 0.0),
        (0.9, -2.0, 1.8, 1.8),
    ],
)
def test_clip_cases(ratio, advantage, loss, gradient):
    old = torch.tensor([[-1.0]], dtype=torch.float64)
    new = (old + math.log(ratio)).requires_grad_()
    value, clipped = losses.policy_loss(new, old, torch.tensor([advantage]), 0.2)
    value.sum().backward()
    assert value.item() == pytest.approx(loss)
    assert new.grad.item() == pytest.approx(gradient)
    assert clipped.item() == float(gradient == 0)


def test_at_ratio_one_clipping_changes_no_gradient(tokens):
    gradients = []
    for clip_range in (0.2, None):
        new = tokens["old"].clone().requires_grad_()
        loss, _ = losses.policy_loss(new, new.detach(), tokens["advantages"], clip_range)
        (loss * tokens["mask"]).sum().backward()
        gradients.append(new.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[0], -tokens["advantages"][:, None] * tokens["mask"])


# ---- KL --------------------------------------------------------------------------------------------


def test_k3_equals_a_loop_and_is_never_negative(tokens):
    values = losses.k3(tokens["logprobs"], tokens["reference"])
    for n, t in each_token():
        ratio = math.exp(tokens["reference"][n, t].item() - tokens["logprobs"][n, t].item())
        assert values[n, t].item() == pytest.approx(ratio - math.log(ratio) - 1, abs=1e-12)
    assert (values >= 0).all()
    assert (values * (1 - tokens["mask"]) == 0).all()
    assert (losses.k3(tokens["logprobs"], tokens["logprobs"]) == 0).all()


def test_kl_loss_equals_a_loop(tokens):
    values = losses.kl_loss(tokens["logprobs"], tokens["old"], tokens["reference"])
    for n, t in each_token():
        new, old, reference = (tokens[key][n, t].item() for key in ("logprobs", "old", "reference"))
        expected = math.exp(new - old) * (math.exp(reference - new) - (reference - new) - 1)
        assert values[n, t].item() == pytest.approx(expected, abs=1e-12)


@pytest.fixture
def categorical():
    """Logits of a policy, of the older policy that sampled, and the reference's log-probs, all float64."""
    generator = torch.Generator().manual_seed(4)
    logits, behaviour, reference = torch.randn(3, VOCABULARY, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), torch.log_softmax(behaviour, -1), torch.log_softmax(reference, -1)


@pytest.mark.parametrize("on_policy", [True, False])
def test_mean_and_gradient_of_kl_loss_are_those_of_the_exact_kl(categorical, on_policy):
    """The mean over tokens is enumerated: a sum over the vocabulary, weighted by the sampler."""
    logits, behaviour, reference = categorical
    policy = torch.log_softmax(logits, -1)
    exact = (policy.exp() * (policy - reference)).sum()
    (exact_gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    old = policy.detach() if on_policy else behaviour
    expected = (old.exp() * losses.kl_loss(policy, old, reference)).sum()
    (gradient,) = torch.autograd.grad(expected, logits, retain_graph=True)
    assert expected.item() == pytest.approx(exact.item())
    torch.testing.assert_close(gradient, exact_gradient)
    # k3 alone has the right mean only on policy, and the gradient of something else.
    plain = (old.exp() * losses.k3(policy, reference)).sum()
    (wrong,) = torch.autograd.grad(plain, logits)
    assert (wrong - exact_gradient).abs().max() > 0.05


def test_sampler_correction_is_a_truncated_ratio_without_gradient(tokens):
    old = tokens["old"].clone().requires_grad_()
    values = losses.sampler_correction(old, tokens["sampler"], cap=1.3)
    assert not values.requires_grad
    for n, t in each_token():
        ratio = math.exp(tokens["old"][n, t].item() - tokens["sampler"][n, t].item())
        assert values[n, t].item() == pytest.approx(min(ratio, 1.3))
    assert (values == 1.3).any()
    assert (values < 1).any()


# ---- aggregation -----------------------------------------------------------------------------------

# Two nodes of three and two samples; nodes weigh 1 and 0.25.
WEIGHTS = [1 / 3 / 2] * 3 + [0.25 / 2 / 2] * 2


def aggregate(loss, mask, aggregation, rows=range(SAMPLES)):
    rows = list(rows)
    factors = losses.aggregation_weights(
        torch.tensor(WEIGHTS, dtype=torch.float64)[rows],
        mask[rows],
        aggregation,
        max_new_tokens=TOKENS + 3,
        samples=SAMPLES,
        tokens=sum(LENGTHS),
    )
    return (loss[rows] * factors).sum()


@pytest.mark.parametrize("aggregation", losses.LOSS_AGGREGATIONS)
def test_aggregation_equals_loops(tokens, aggregation):
    loss, _ = losses.policy_loss(tokens["logprobs"], tokens["old"], tokens["advantages"], 0.2)
    loss = loss + (1 - tokens["mask"]) * 100  # a pad must never count
    expected = 0.0
    for n in range(SAMPLES):
        over_tokens = sum(loss[n, t].item() for t in range(LENGTHS[n]))
        if aggregation == "sequence_sum":
            expected += WEIGHTS[n] * over_tokens
        elif aggregation == "constant":
            expected += WEIGHTS[n] * over_tokens / (TOKENS + 3)
        else:
            expected += WEIGHTS[n] * over_tokens * SAMPLES / sum(LENGTHS)
    assert aggregate(loss, tokens["mask"], aggregation).item() == pytest.approx(expected, abs=1e-12)


def test_token_mean_of_root_nodes_is_the_plain_mean_over_tokens(tokens):
    values = torch.randn(SAMPLES, TOKENS, generator=torch.Generator().manual_seed(0)).double()
    factors = losses.aggregation_weights(
        torch.full((SAMPLES,), 1 / SAMPLES),
        tokens["mask"],
        "token_mean",
        max_new_tokens=9,
        samples=SAMPLES,
        tokens=sum(LENGTHS),
    )
    plain = [values[n, t].item() for n, t in each_token()]
    assert (values * factors).sum().item() == pytest.approx(sum(plain) / len(plain), abs=1e-7)


@pytest.mark.parametrize("aggregation", losses.LOSS_AGGREGATIONS)
def test_micro_batches_add_up_to_the_whole(tokens, aggregation):
    def gradient(parts):
        new = tokens["logprobs"].clone().requires_grad_()
        for rows in parts:
            loss, _ = losses.policy_loss(new, tokens["old"], tokens["advantages"], 0.2)
            loss = loss + 0.1 * losses.kl_loss(new, tokens["old"], tokens["reference"])
            aggregate(loss, tokens["mask"], aggregation, rows).backward()
        return new.grad

    whole = gradient([range(SAMPLES)])
    assert whole.abs().max() > 0
    for parts in ([[0, 1], [2, 3, 4]], [[4], [2], [0], [3], [1]]):
        torch.testing.assert_close(gradient(parts), whole)
