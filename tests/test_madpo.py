"""MADPO: the joint loss and its gradients against a plain twin, its reference, phases, settings."""

import copy
import math

import pytest
import torch
from preference_team import build, plain_logprob
from stopping import assert_same_run, interrupted, lines_of
from tiny_team import flat_gradient

from comlrl import losses
from comlrl.signals import StopSignal
from comlrl.tasks import load_task
from comlrl.trainers.preference import MADPOConfig, MADPOTrainer


class Still(MADPOTrainer):
    """Keeps the gradients and metrics of each step and moves no weight."""

    def __init__(self, *args, **kwargs):
        self.seen = []
        super().__init__(*args, **kwargs)

    def apply(self, metrics, norms, useful, problem):
        assert not problem
        self.seen.append((metrics, [flat_gradient(agent.model) for agent in self.agents]))
        super().apply(metrics, norms, [False] * len(useful), problem)


def plain_loss(log_ratio, kind, beta, smoothing):
    if kind == "ipo":
        return (log_ratio - 0.5 / beta) ** 2
    if kind == "hinge":
        return torch.clamp(1 - beta * log_ratio, min=0)
    right = 1 / (1 + torch.exp(-beta * log_ratio))
    return -(1 - smoothing) * torch.log(right) - smoothing * torch.log(1 - right)


VARIANTS = [
    ("sigmoid", 0.7, 0.0, False),
    ("sigmoid", 0.7, 0.0, True),
    ("sigmoid", 0.7, 0.2, False),
    ("ipo", 0.7, 0.0, False),
    ("hinge", 0.1, 0.0, False),
]


def moved(trainer):
    """Policies that are not their references any more, so that log-ratios are not 0."""
    generator = torch.Generator().manual_seed(4)
    for agent in trainer.agents:
        for parameter in agent.model.parameters():
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return trainer


def sampled(trainer):
    """Runs until the pairs are there and their reference log-probs known."""
    stop = StopSignal()
    trainer.evaluation_due = False
    while trainer.phase != "policy":
        trainer.next_piece(trainer.sampling, stop)
    return trainer


def first_step(trainer):
    stop = StopSignal()
    while not trainer.seen:
        trainer.next_piece(trainer.sampling, stop)
    return trainer.seen[0]


@pytest.mark.parametrize(("kind", "beta", "smoothing", "free"), VARIANTS)
@pytest.mark.parametrize("turns", [1, 2])
def test_loss_and_gradients_are_those_of_the_plain_joint_loss(kind, beta, smoothing, free, turns):
    trainer = build(
        Still,
        turns=turns,
        dpo_loss=kind,
        dpo_beta=beta,
        label_smoothing=smoothing,
        reference_free=free,
        train_batch_size=100,
        max_tree_nodes=100,
        preference_num_candidates=4 if turns == 1 else 3,
    )
    assert sum(p.numel() for p in trainer.agents[0].model.parameters()) != sum(
        p.numel() for p in trainer.agents[1].model.parameters()
    )
    sampled(trainer)
    references = [copy.deepcopy(agent.model) for agent in trainer.agents]
    moved(trainer)
    metrics, gradients = first_step(trainer)
    pairs = trainer.pairs
    assert len(pairs) > 5
    assert {pair.turn for pair in pairs} == set(range(turns))
    lengths = {len(ids) for pair in pairs for ids in pair.chosen.token_ids + pair.rejected.token_ids}
    assert len(lengths) > 1  # so there were pads, and answers that ended at once
    assert 1 in lengths
    models = [copy.deepcopy(agent.model) for agent in trainer.agents]
    loss = torch.zeros((), dtype=torch.float64)
    for pair in pairs:
        log_ratio = torch.zeros((), dtype=torch.float64)
        for i, model in enumerate(models):
            for sign, answer in ((1, pair.chosen), (-1, pair.rejected)):
                term = plain_logprob(model, pair.prompt_ids[i], answer.token_ids[i])
                if not free:
                    with torch.no_grad():
                        base = plain_logprob(references[i], pair.prompt_ids[i], answer.token_ids[i])
                    term = term - base
                log_ratio = log_ratio + sign * term
        loss = loss + plain_loss(log_ratio, kind, beta, smoothing) / len(pairs)
    loss.backward()
    assert metrics["dpo/loss"] == pytest.approx(loss.item(), rel=1e-5)
    for model, found in zip(models, gradients):
        expected = flat_gradient(model)
        assert expected.norm() > 1e-4
        assert (found - expected).norm() < 2e-5 * expected.norm()


def test_how_the_work_is_cut_changes_nothing():
    def gradients(budget):
        trainer = build(Still, train_batch_size=100, micro_batch_tokens=budget)
        return first_step(moved(sampled(trainer)))[1]

    for whole, alone in zip(gradients(10**5), gradients(1)):
        assert (whole - alone).norm() < 1e-5 * whole.norm()


def test_the_loss_depends_on_the_reference():
    def loss(other, **changes):
        trainer = build(Still, train_batch_size=100, **changes)
        if other:  # zeroed weights: a uniform reference
            for reference in trainer.references.values():
                for parameter in reference.model.parameters():
                    parameter.data.zero_()
        return first_step(moved(sampled(trainer)))[0]["dpo/loss"]

    assert abs(loss(False) - loss(True)) > 1e-3
    assert build(reference_free=True).references == {}


def test_before_the_first_step_policy_and_reference_agree():
    metrics, _ = first_step(sampled(build(Still, train_batch_size=100)))
    assert metrics["dpo/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert metrics["agent_0/chosen_log_ratio"] == pytest.approx(0, abs=1e-5)


def test_cached_reference_log_probs_are_those_computed_now():
    trainer = sampled(build())
    now = trainer.answer_logprobs(trainer.pair_samples(trainer.pairs), trainer.references)
    for n, pair in enumerate(trainer.pairs):
        for i, model in trainer.references.items():
            for k, answer in enumerate((pair.chosen, pair.rejected)):
                with torch.no_grad():
                    plain = plain_logprob(model.model, pair.prompt_ids[i], answer.token_ids[i]).item()
                assert pair.reference[i][k] == pytest.approx(plain, abs=1e-5)
                assert pair.reference[i][k] == pytest.approx(now[i, 2 * n + k].double().sum().item(), abs=1e-5)


def test_losses_at_extreme_margins_are_finite():
    for kind in losses.PREFERENCE_LOSSES:
        margins = torch.tensor([-1e4, 0.0, 1e4], dtype=torch.float64, requires_grad=True)
        value = losses.preference_loss(margins, kind, 0.1)
        (slope,) = torch.autograd.grad(value.sum(), margins)
        assert torch.isfinite(value).all()
        assert torch.isfinite(slope).all()
        assert slope[0] < 0


# ---- the phases -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "at"), [("propose", 2), ("answer_logprobs", 1), ("gradients", 1), ("gradients", 4), ("evaluate_team", 2)]
)
@pytest.mark.parametrize("turns", [1, 2])
def test_stopped_in_any_phase_it_goes_on_bit_for_bit(method, at, turns):
    changes = {"turns": turns, "max_tree_nodes": 100, "max_steps": 7}
    whole = build(output_dir="a", **changes)
    whole.train()
    first = interrupted(build(output_dir="b", **changes), method, at, "b/ck")
    again = build(output_dir="b", **changes)
    again.train(resume_from_checkpoint="b/ck", checkpoint_dir="b/ck")
    assert first.step < whole.step
    assert_same_run(whole, again)
    assert again.pairs == whole.pairs
    assert again.pair_path().read_text().count("\n") == len(whole.pairs)


def test_checkpoints_are_also_written_while_sampling():
    trainer = build(checkpoint_steps=1, output_dir="b")
    trainer.propose = None  # the first piece fails
    with pytest.raises(TypeError):
        trainer.train(checkpoint_dir="b/ck")
    trainer = build(checkpoint_steps=1, output_dir="c")
    original, calls = trainer.propose, []

    def dies(*args):
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt  # as good as a kill: nothing is saved on the way out
        return original(*args)

    trainer.propose = dies
    with pytest.raises(KeyboardInterrupt):
        trainer.train(checkpoint_dir="c/ck")
    again = build(checkpoint_steps=1, output_dir="c")
    again.load_checkpoint("c/ck")
    assert again.position == 2
    assert again.pairs


def test_the_step_count_the_epochs_and_the_env_steps():
    trainer = build(eval_interval=0)
    trainer.train()
    pairs = len(trainer.pairs)
    assert trainer.step == 2 * math.ceil(pairs / 3)
    assert trainer.env_step == 2 * 2 * pairs
    assert trainer.epoch == 2
    counted = build(eval_interval=0, use_environment_step=False)
    counted.train()
    assert counted.env_step == 4 * 4  # rows times candidates
    lines = [line for line in lines_of(trainer.run.folder, "metrics") if "dpo/loss" in line]
    assert len(lines) == trainer.step


def test_constant_rewards_are_no_silent_end():
    trainer = build(reward_func=lambda first, second: [1.0] * len(first))
    with pytest.raises(ValueError, match=r"no preference pairs: .*ties"):
        trainer.train()


def test_a_coordinator_writes_for_all():
    from tiny_team import build_model, build_tokenizer

    class Halves:
        def build_prompt(self, batch_item, agent_prompts):
            return agent_prompts[0]

        def parse_completion(self, completion, batch_item, num_agents):
            return [completion[:2], completion[2:]]

    trainer = MADPOTrainer(
        agents=[build_model(8, 2)],
        tokenizer=build_tokenizer("abcdefg"),
        num_agents=2,
        train_dataset=[{"prompt": "a"}, {"prompt": "b"}],
        reward_func=lambda first, second: [len(a) - len(b) + 0.1 * a.count("a") for a, b in zip(first, second)],
        centralized_comparator_adapter=Halves(),
        args=MADPOConfig(
            collaboration_mode="centralized",
            preference_num_candidates=6,
            max_new_tokens=4,
            max_steps=2,
            num_agents=2,
            dtype="float32",
        ),
    )
    trainer.verbose = False
    trainer.train()
    assert trainer.step == 2
    assert len(trainer.pairs[0].chosen.texts) == 1
    assert len(trainer.pairs[0].role_texts[0]) == 2


# ---- settings -------------------------------------------------------------------------------------------------------

REFUSED = {
    "all_with_cap": ({"pair_selection": "all"}, "preference_pairs_per_sample=16 must be none"),
    "selection": ({"pair_selection": "best"}, "pair_selection='best'"),
    "candidates": ({"preference_num_candidates": 1}, "preference_num_candidates=1: must be at least 2"),
    "beta": ({"dpo_beta": 0.0}, "dpo_beta=0.0"),
    "smoothing": ({"label_smoothing": 0.1, "dpo_loss": "ipo"}, "label_smoothing=0.1 is for dpo_loss sigmoid"),
    "loss": ({"dpo_loss": "cross"}, "dpo_loss='cross'"),
    "generations": ({"num_generations": 8}, "leave num_generations out"),
    "entropy": ({"entropy_coef": 0.1}, "entropy_coef=0.1 is a setting of policy gradients"),
    "env": ({"environment_steps_per_pair": 0}, "environment_steps_per_pair=0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_cannot_be(case):
    settings, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        MADPOConfig(**settings)


def test_a_schedule_needs_max_steps():
    with pytest.raises(ValueError, match="pairs are counted only once"):
        build(lr_schedule="linear")
    build(lr_schedule="linear", max_steps=3).train()


def test_published_positional_arguments():
    task = load_task("pairing", 2)
    trainer = MADPOTrainer(
        "tiny", None, 2, None, None, task.train_rows, None, task.reward, args=MADPOConfig(), dry_run=True
    )
    assert len(trainer.rows) == 4
