"""Activations computed again in backward: the same numbers and less memory; off while generating."""

import ac_team
import pytest
import torch
from stopping import build, lines_of
from torch.autograd.graph import saved_tensors_hooks

from comlrl.agents import load_model
from comlrl.generation import left_pad, right_pad
from comlrl.logprobs import completion_logprobs, head_finish
from comlrl.trainers import IACTrainer, MAACTrainer

PROMPTS = [[65, 66, 67, 68, 69], [70, 71]]
ANSWERS = [[72, 73, 74], [75], [76, 77, 78, 79]]
INDEX = [0, 0, 1]


def read(model):
    """Log-probs, gradients, and bytes that were kept for backward."""
    device = torch.device("cpu")
    inputs = (*left_pad(PROMPTS, 0, device), *right_pad(ANSWERS, 0, device), torch.tensor(INDEX))
    kept = {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, _ = completion_logprobs(model, *inputs, finish=head_finish(model))
    logprobs.sum().backward()
    return logprobs.detach(), [p.grad.clone() for p in model.parameters()], sum(kept.values())


@pytest.mark.parametrize("name", ["tiny", "gpt2"])
def test_same_log_probs_and_gradients_with_less_kept(name, request):
    folder = request.getfixturevalue(name)
    plain, again = load_model(folder).eval(), load_model(folder).eval()
    again.gradient_checkpointing_enable()
    expected, gradients, kept = read(plain)
    logprobs, others, less = read(again)
    assert torch.allclose(logprobs, expected, atol=1e-5)
    for one, other in zip(gradients, others):
        assert torch.allclose(one, other, atol=1e-4)
    assert less < 0.8 * kept


def test_a_run_is_the_same_and_generates_with_its_cache(monkeypatch):
    plain = build(output_dir="a", turns=2, num_train_epochs=4)
    plain.train()
    again = build(output_dir="b", turns=2, num_train_epochs=4, gradient_checkpointing=True)
    seen = []
    monkeypatch.setattr("comlrl.logprobs.checkpoint", recording(seen))
    again.train()
    assert set(seen) == {True}  # only where a gradient is taken
    assert lines_of("a/run", "completions") == lines_of("b/run", "completions")
    for one, other in zip(lines_of("a/run", "metrics"), lines_of("b/run", "metrics"), strict=True):
        assert {k: v for k, v in other.items() if isinstance(v, float)} == pytest.approx(
            {k: v for k, v in one.items() if isinstance(v, float)}, rel=1e-4, abs=1e-4
        )


def recording(seen):
    from torch.utils.checkpoint import checkpoint

    def wrapper(function, *args, **kwargs):
        seen.append(torch.is_grad_enabled())
        return checkpoint(function, *args, **kwargs)

    return wrapper


@pytest.mark.parametrize(("kind", "settings"), [(MAACTrainer, {}), (IACTrainer, {"use_separate_critic": False})])
def test_critics_and_heads_too(kind, settings):
    plain = ac_team.play(kind, output_dir="a", **settings)
    plain.train()
    again = ac_team.play(kind, output_dir="b", gradient_checkpointing=True, **settings)
    assert all(critic.model.is_gradient_checkpointing for critic in again.critics)
    again.train()
    pairs = zip((*plain.agents, *plain.critics), (*again.agents, *again.critics), strict=True)
    for one, other in pairs:
        for a, b in zip(one.trained.parameters(), other.trained.parameters()):
            assert torch.allclose(a, b, atol=1.5e-3)  # AdamW makes much of little; a step is 1e-2
