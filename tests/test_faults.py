"""Faults in the middle of a step: no memory left, numbers that are none. The weights never suffer."""

import math
import time

import pytest
import torch
from stopping import build, interrupted, lines_of, reward, state_of

from comlrl.memory import Limit
from comlrl.placement import AgentPool


def log_of(trainer):
    return (trainer.run.folder / "log.txt").read_text()


# ---- out of memory ----


class OutOfMemory:
    """A model that fails as torch does: at the at-th call, or with more than `rows` rows."""

    def __init__(self, model, rows=None, at=None, learning=False):
        embedding = model.get_input_embeddings()  # which every way of running a model begins with
        self.forward, self.rows, self.at, self.learning = embedding.forward, rows, at, learning
        self.calls = self.failures = 0
        embedding.forward = self

    def __call__(self, input_ids):
        self.calls += 1
        too_many = self.rows is not None and len(input_ids) > self.rows and self.learning == torch.is_grad_enabled()
        if self.calls == self.at or too_many:
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB (injected)")
        return self.forward(input_ids)


def undisturbed(**changes):
    trainer = build(output_dir="a", **changes)
    trainer.train()
    return trainer


def assert_close(one, other):
    for name, tensor in state_of(one).items():
        assert (tensor - state_of(other)[name]).abs().max() < 1e-5, name


def test_generating_goes_on_with_fewer_rows(tmp_path):
    trainer = build(output_dir="b")
    limited = OutOfMemory(trainer.agents[1].model, rows=3)  # two rows with three samples each
    trainer.train(checkpoint_dir="b/ck")
    assert limited.failures == 1  # remembered
    assert trainer.rollouts.limit.value == 3
    assert trainer.token_limit.value == trainer.args.micro_batch_tokens
    assert "step 1: out of memory; generation_batch_rows is 3 from now on (CUDA out of memory" in log_of(trainer)
    assert_close(undisturbed(), trainer)
    again = build(output_dir="b")
    again.load_checkpoint("b/ck")
    assert again.rollouts.limit.value == 3
    changed = build(output_dir="b", generation_batch_rows=5)  # said anew, perhaps on another device
    changed.load_checkpoint("b/ck")
    assert changed.rollouts.limit.value == 5


SETTINGS = {
    "one_step": {},
    "several_steps": {"train_batch_size": 1, "epochs_per_rollout": 2},
    "reference": {"reference_kl_enabled": True},
    "two_turns": {"turns": 2, "joint_mode": "cross", "num_train_epochs": 4},
}


@pytest.mark.parametrize("agent", [0, 1])
@pytest.mark.parametrize("case", SETTINGS)
def test_learning_goes_on_with_smaller_micro_batches(agent, case):
    """It fails in the middle of a step: one agent, or a part of one, has its gradient already."""
    changes = SETTINGS[case]
    trainer = build(output_dir="b", **changes)
    learn, failures = trainer.learn, []

    def failing(index, groups, scale, budget):
        first_time = index == agent and trainer.step == 2 and not failures
        if first_time:
            failures.append(budget)
            learn(index, groups, scale, budget)  # the gradient is there when memory runs out
            raise torch.OutOfMemoryError("injected")
        return learn(index, groups, scale, budget)

    trainer.learn = failing
    trainer.train()
    assert trainer.step == 6
    assert len(failures) == 1
    assert trainer.token_limit.value < 100
    assert f"step 3: out of memory; micro_batch_tokens is {trainer.token_limit.value} from now on" in log_of(trainer)
    assert_close(undisturbed(**changes), trainer)


@pytest.mark.parametrize("at", [1, 2, 5])
def test_any_forward_may_fail(at):
    """Old log-probs, reference log-probs, or the loss: whatever runs out of memory is done again."""
    changes = {"reference_kl_enabled": True, "train_batch_size": 1}
    trainer = build(output_dir="b", **changes)
    broken = {}
    prepare = trainer.prepare

    def breaking(stop):
        if not broken:
            for name, model in (("policy", trainer.agents[0].model), ("reference", trainer.references[1].model)):
                broken[name] = OutOfMemory(model, at=at)
        prepare(stop)

    trainer.prepare = breaking
    trainer.train()
    assert [model.failures for model in broken.values()] == [1, 1]
    assert_close(undisturbed(**changes), trainer)


def test_agents_in_threads_start_anew_together():
    """One agent runs out of memory while the other, on its own device, is at work."""
    trainer = build(output_dir="b")
    trainer.pool = trainer.rollouts.pool = AgentPool("mp", [torch.device("cpu", 0), torch.device("cpu", 1)])
    generating = OutOfMemory(trainer.agents[0].model, rows=3)
    learning = OutOfMemory(trainer.agents[1].model, rows=4, learning=True)
    trainer.train()
    assert generating.failures == 1
    assert learning.failures >= 1
    assert_close(undisturbed(), trainer)


def test_a_pool_waits_for_all_before_it_fails():
    ended = []

    def work(index):
        if index == 0:
            raise RuntimeError("first")
        time.sleep(0.2)
        ended.append(index)

    with pytest.raises(RuntimeError, match="first"):
        AgentPool("mp", [torch.device("cpu", 0), torch.device("cpu", 1)]).map(work, 2)
    assert ended == [1]


def test_the_smaller_micro_batch_is_used_and_saved():
    trainer = build(output_dir="b", num_generations=4)
    limited = OutOfMemory(trainer.agents[0].model, rows=2, learning=True)
    trainer.train(checkpoint_dir="b/ck")
    assert 1 <= limited.failures <= 4
    assert_close(undisturbed(num_generations=4), trainer)
    again = build(output_dir="b", num_generations=4)
    again.load_checkpoint("b/ck")
    assert again.token_limit.value == trainer.token_limit.value < 40


def test_what_cannot_be_halved_is_an_error_and_is_saved():
    trainer = build(output_dir="b")
    interrupted(build(output_dir="c"), "gradients", 3, "c/ck")
    trainer.load_checkpoint("c/ck")
    before = state_of(trainer)
    OutOfMemory(trainer.agents[0].model, rows=0, learning=True)
    with pytest.raises(torch.OutOfMemoryError, match=r"micro_batch_tokens=\d+ cannot be halved any more.*injected"):
        trainer.train(checkpoint_dir="c/ck")
    assert all(torch.equal(before[name], tensor) for name, tensor in state_of(trainer).items())
    assert all(p.grad is None for agent in trainer.agents for p in agent.model.parameters())


def test_limit():
    tried = []

    def work(limit):
        tried.append(limit)
        if limit > 2:
            raise torch.OutOfMemoryError("no")
        return "done"

    limit = Limit("rows", 1000)
    assert limit.run(work, most=12) == "done"
    assert tried == [1000, 6, 3, 1]  # what bounds nothing is not tried
    assert limit.value == 1
    assert limit.run(work, most=12) == "done"
    assert len(limit.incidents) == 3
    with pytest.raises(torch.OutOfMemoryError, match="rows=5 cannot be halved"):
        Limit("rows", 9).run(work, most=10, least=5)


# ---- what is not finite ----


def never_stepped(trainer, message, error=FloatingPointError):
    before = state_of(trainer)
    with pytest.raises(error, match=message):
        trainer.train(checkpoint_dir="ck")
    assert all(torch.equal(before[name], tensor) for name, tensor in state_of(trainer).items())
    return trainer


def nan_loss(trainer, step):
    loss = trainer.loss

    def poisoned(batch, logprobs, entropies, old):
        values, logged = loss(batch, logprobs, entropies, old)
        return (values * math.nan if trainer.step == step and logprobs is not None else values), logged

    trainer.loss = poisoned
    return trainer


def nan_gradient(trainer, step, agent=1):
    """The loss is finite, its gradient is not."""
    parameter = next(trainer.agents[agent].model.parameters())

    def poison(gradient):
        return gradient * math.inf if trainer.step == step else gradient

    parameter.register_hook(poison)
    return trainer


def test_a_loss_that_is_nan_names_agent_samples_and_step():
    message = r"step 1, agent_0: loss nan over samples \d::\d, .*; weights unchanged \(nonfinite: skip"
    never_stepped(nan_loss(build(), 0), message)


def test_a_gradient_that_is_nan_names_agent_samples_and_step():
    message = r"step 1, agent_1: gradient norm (nan|inf) over samples \d::\d, .*; weights unchanged"
    never_stepped(nan_gradient(build(), 0), message)


@pytest.mark.parametrize("poison", [nan_loss, nan_gradient])
def test_a_step_that_is_not_finite_can_be_skipped(poison):
    trainer = poison(build(nonfinite="skip"), 2)
    seen = {}
    apply = trainer.apply

    def watched(*arguments):
        before = state_of(trainer)
        apply(*arguments)
        seen[trainer.step] = any(
            not torch.equal(before[name], new) for name, new in state_of(trainer).items() if name in before
        )

    trainer.apply = watched
    trainer.train()
    assert seen == {1: True, 2: True, 3: False, 4: True, 5: True, 6: True}
    lines = [line for line in lines_of(trainer.run.folder, "metrics") if line["kind"] == "train"]
    assert [line["skipped_step"] for line in lines] == [0, 0, 1, 0, 0, 0]
    assert "step 3, agent_" in log_of(trainer)
    assert all(torch.isfinite(tensor).all() for tensor in state_of(trainer).values())


def nan_reward(at):
    calls = []

    def poisoned(first, second):
        calls.append(None)
        values = reward(first, second)
        return [math.nan, *values[1:]] if len(calls) == at else values

    return poisoned


def test_a_reward_that_is_nan_names_samples_and_step():
    trainer = build(reward_func=nan_reward(3))
    never_stepped(trainer, r"the reward is nan \(poisoned on row \d, turn 1, node root, sample \S+0\)", ValueError)
    assert "stopped in step 1: ValueError: the reward is nan (poisoned on row" in log_of(trainer)


def test_a_reward_that_is_nan_can_be_skipped():
    trainer = build(reward_func=nan_reward(3), reward_on_error="skip")
    trainer.train()
    assert trainer.step == 6
    assert "step 1: reward function poisoned failed on row" in log_of(trainer)
    assert all(torch.isfinite(tensor).all() for tensor in state_of(trainer).values())
    lines = [line for line in lines_of(trainer.run.folder, "metrics") if line["kind"] == "train"]
    assert lines[-1]["reward_calls/nan"] == 1


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_a_hung_or_raising_reward_follows_its_policy(policy):
    calls = []

    def bad(first, second):
        calls.append(None)
        if len(calls) == 4:
            raise RuntimeError("no")
        if len(calls) == 5:
            time.sleep(60)
        return reward(first, second)

    trainer = build(reward_func=bad, reward_on_error=policy, reward_timeout=2.0, max_steps=3)
    if policy == "raise":
        never_stepped(trainer, "no", RuntimeError)
    else:
        trainer.train()
        assert trainer.step == 3
        assert "RuntimeError: no" in log_of(trainer)
        assert "no answer within reward_timeout=2.0 s" in log_of(trainer)
    trainer.close()
