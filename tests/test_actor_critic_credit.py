"""Advantages and value targets of whole actor-critic trainers: what forks change, scales, and what is logged."""

import pytest
import torch
from ac_team import play
from preference_team import plain_logprob
from stopping import lines_of

from comlrl.rollouts import walk
from comlrl.signals import StopSignal
from comlrl.trainers import MAACTrainer


def watch_buffers(trainer, look):
    """Calls look(nodes of the buffer) each time a buffer was made ready for learning."""
    prepare = trainer.prepare

    def watched(stop):
        nodes = list(walk(trainer.buffer))
        prepare(stop)
        look(nodes)

    trainer.prepare = watched


@pytest.mark.parametrize("normalization", [False, True])
def test_a_fork_may_change_the_advantages(normalization):
    """As documented for the REINFORCE family: what `advantages` sets is what is learned from, or z-scored before."""

    class OnlyBetter(MAACTrainer):
        def advantages(self, node, agent, group):
            super().advantages(node, agent, group)
            for sample in group:
                sample.advantage = max(sample.advantage, 0.0)

    settings = {"advantage_normalization": normalization, "epochs_per_rollout": 2, "rollout_buffer_size": 12}
    trainer = play(OnlyBetter, gae_lambda=1.0, **settings)
    seen = []
    gradients = trainer.gradients

    def watched(groups, scale):
        found = gradients(groups, scale)
        seen.append([sample for group in groups[0] for sample in group])
        return found

    trainer.gradients = watched
    trainer.train()
    assert len(seen) == 2  # one buffer, twice
    for samples in seen:
        raw = torch.tensor([max(s.credit - s.value, 0.0) for s in samples], dtype=torch.float64)
        assert 0 < (raw == 0).sum() < len(raw)
        expected = (raw - raw.mean()) / raw.std(correction=0) if normalization else raw
        assert [s.advantage for s in samples] == pytest.approx(expected.tolist())


def test_a_kl_in_the_return_lowers_the_advantage_of_what_became_more_likely():
    kl = {"reference_kl_enabled": True, "reference_kl_in": "return", "reference_kl_coef": 0.7}
    trainer = play(MAACTrainer, rollout_buffer_size=12, gae_lambda=1.0, advantage_normalization=False, **kl)
    for agent in trainer.agents:
        with torch.no_grad():
            agent.model.lm_head.weight.mul_(3.0)
        agent.weights_changed()
    seen = []

    def look(nodes):
        for agent, groups in enumerate(trainer.prepared):
            for node, group in zip(nodes, groups):
                for sample in group:
                    now, then = (
                        plain_logprob(model, node.prompt_ids[agent], sample.token_ids).item()
                        for model in (trainer.agents[agent].model, trainer.references[agent].model)
                    )
                    seen.append(now - then)
                    expected = sample.credit - sample.value - 0.7 * (now - then)
                    assert sample.advantage == pytest.approx(expected, abs=1e-5)

    watch_buffers(trainer, look)
    trainer.collect(trainer.sampling, StopSignal())
    trainer.open_run()
    with torch.no_grad():
        trainer.prepare(StopSignal())
    assert len(seen) == 2 * 12 * 2
    assert min(map(abs, seen)) > 1e-3


def variance(values):
    return torch.tensor(values, dtype=torch.float64).var(correction=0).item()


@pytest.mark.parametrize("normalization", [False, True])
def test_targets_are_normalised_values_are_not_and_diagnostics_say_how_good_they_were(normalization):
    """With lambda 1 the targets are the returns; the scale is that of all targets so far, this buffer's included."""
    trainer = play(MAACTrainer, value_normalization=normalization, rows_per_rollout=2, gae_lambda=1.0)
    targets, buffers = [], []

    def scale():
        if not normalization or not targets:
            return 0.0, 1.0
        return sum(targets) / len(targets), variance(targets) ** 0.5

    def look(nodes):
        mean, deviation = scale()  # under which the critic said its values
        said = [item.output * deviation + mean for (item,) in trainer.value_items[0]]
        targets.extend(value for node in nodes for value in node.returns)
        mean, deviation = scale()
        for n, (node, (item,), value) in enumerate(zip(nodes, trainer.value_items[0], said)):
            assert item.targets == pytest.approx([(r - mean) / deviation for r in node.returns])
            for agent in range(2):
                assert [s.value for s in trainer.prepared[agent][n]] == pytest.approx([value] * 2)
        for turn in range(2):
            pairs = [(v, r) for node, v in zip(nodes, said) if node.turn == turn for r in node.returns]
            returns = [r for _, r in pairs]
            expected = 1 - variance([r - v for v, r in pairs]) / variance(returns)
            assert trainer.pending[f"critic/turn_{turn + 1}/explained_variance"] == pytest.approx(expected)
            advantages = [r - v for v, r in pairs]
            buffers.append((turn, sum(advantages) / len(advantages), variance(advantages) ** 0.5))

    watch_buffers(trainer, look)
    trainer.train()
    lines = [line for line in lines_of(trainer.run.folder, "metrics") if line["kind"] == "train"]
    assert trainer.statistics[0].count == (len(targets) if normalization else 0)
    assert len(buffers) == 2 * len(lines) == 4  # two turns; a step a buffer
    for turn, mean, deviation in buffers[:2]:  # aligned: an answer's advantage is its joint answer's
        for agent in range(2):
            prefix = f"agent_{agent}/turn_{turn + 1}"
            assert lines[0][f"{prefix}/advantage_mean"] == pytest.approx(mean)
            assert lines[0][f"{prefix}/advantage_std"] == pytest.approx(deviation)
            assert lines[0][f"{prefix}/clip_fraction"] == 0.0  # one step a buffer: the ratio is 1
        assert lines[0][f"critic/turn_{turn + 1}/value_loss"] > 0
