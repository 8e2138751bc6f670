"""Known faults of other systems, at the level of the trainer: each must not come back here."""

import asyncio
import copy
import json
import math
import time
from pathlib import Path

import datasets
import pytest
import torch
from stopping import LETTERS, feedback, reward, rows
from tiny_team import build_model, build_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import comlrl.rollouts
from comlrl.batches import Sample
from comlrl.losses import LOSS_AGGREGATIONS
from comlrl.trainers import (
    REINFORCE_ALGORITHMS,
    CentralizedMAGRPOConfig,
    CentralizedMAGRPOTrainer,
    MAGRPOTrainer,
    MARLOOTrainer,
)

SMALL = {
    "dtype": "float32",
    "num_generations": 3,
    "max_new_tokens": 4,
    "agent_learning_rate": 1e-2,
    "max_steps": 3,
    "eval_interval": 0,
}


def build(kind=MAGRPOTrainer, options=None, **settings):
    """Two agents of 600 weights, six rows; `options`: other arguments of the trainer."""
    settings = {**SMALL, **settings}
    given = {
        "agents": [build_model(len(LETTERS) + 1, seed) for seed in (2, 9)],
        "tokenizer": build_tokenizer(LETTERS),
        "train_dataset": rows(6),
        "eval_dataset": rows(2),
        "reward_func": reward,
        "external_transition": feedback if settings.get("num_turns", 1) > 1 else None,
        **(options or {}),
    }
    return kind(args=kind.config_class(**settings), **given)


def weights(trainer):
    return [{k: v.detach().clone() for k, v in agent.model.state_dict().items()} for agent in trainer.agents]


def same(one, other):
    return all(torch.equal(a[name], b[name]) for a, b in zip(one, other, strict=True) for name in a)


def trained(options=None, **settings):
    trainer = build(options=options, **settings)
    trainer.train()
    return trainer


def lines(trainer, kind="train"):
    text = (trainer.run.folder / "metrics.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if line["kind"] == kind]


def log_of(trainer):
    return (trainer.run.folder / "log.txt").read_text()


def seen_advantages(trainer):
    """A list that fills with (row, agent, credits, advantages) of each group that is learned from."""
    seen, original = [], trainer.advantages

    def advantages(node, agent, group):
        original(node, agent, group)
        if group:
            seen.append((node.row_id, agent, [s.credit for s in group], [s.advantage for s in group]))

    trainer.advantages = advantages
    return seen


def seen_ratios(trainer):
    """A list that fills with the largest |log ratio| of each agent's micro-batch."""
    seen, original = [], trainer.loss

    def loss(batch, logprobs, entropies, old):
        seen.append((logprobs.detach() - old).abs().max().item())
        return original(batch, logprobs, entropies, old)

    trainer.loss = loss
    return seen


# ---- groups and advantages ------------------------------------------------------------------------------------------


def test_the_algorithms_differ_by_default():
    """A z-score after the baseline made four algorithms one."""
    results = {}
    for name in ("mareinforce", "magrpo", "marloo", "maremax"):
        trainer = build(REINFORCE_ALGORITHMS[name][1], max_steps=1)
        results[name] = seen_advantages(trainer)
        trainer.train()
    assert len(results["magrpo"]) == 4
    for raw, group, others, greedy in zip(*results.values(), strict=True):
        credits = torch.tensor(raw[2], dtype=torch.float64)
        assert raw[2] == group[2] == others[2] == greedy[2]  # the same samples
        centred = credits - credits.mean()
        assert raw[3] == pytest.approx(credits.tolist())
        assert group[3] == pytest.approx((centred / centred.square().mean().sqrt()).tolist())
        assert others[3] == pytest.approx((centred * 1.5).tolist())  # K / (K - 1)
        shift = credits[0].item() - greedy[3][0]
        assert greedy[3] == pytest.approx((credits - shift).tolist())
        assert greedy[3] != pytest.approx(raw[3])


@pytest.mark.parametrize("kind", [MAGRPOTrainer, MARLOOTrainer])
def test_a_group_of_equal_rewards_moves_no_weight(kind):
    """And the line says that nothing was to be learned."""
    trainer = build(kind, {"reward_func": lambda first, second: [0.1 * 3] * len(first)}, weight_decay=0.0)
    before = weights(trainer)
    trainer.train()
    assert trainer.step == 3
    assert same(weights(trainer), before)
    for line in lines(trainer):
        for agent in range(2):
            assert line[f"agent_{agent}/turn_1/zero_signal_share"] == 1
            assert line[f"agent_{agent}/grad_norm"] == 0
            assert line[f"agent_{agent}/skipped_samples"] == 6


@pytest.mark.parametrize("aggregation", LOSS_AGGREGATIONS)
def test_when_every_answer_is_masked_nothing_moves(aggregation):
    """No 0/0 where no token is left."""
    trainer = build(mask_truncated=True, loss_aggregation=aggregation, reference_kl_enabled=True, max_steps=2)
    for agent in trainer.agents:
        agent.eos_ids = ()  # no answer ever ends
    before = weights(trainer)
    trainer.train()
    assert same(weights(trainer), before)  # not even by weight decay
    assert len(lines(trainer)) == 2
    for line in lines(trainer):
        assert line["skipped_step"] == 1
        for agent in range(2):
            assert line[f"agent_{agent}/turn_1/masked_share"] == line[f"agent_{agent}/turn_1/truncated_share"] == 1
        assert all(math.isfinite(value) for value in line.values() if isinstance(value, float))


def test_rows_of_one_text_are_groups_of_their_own():
    """Rewards {0, 1} and {10, 11} are the same signal."""

    def by_row(first, second, batch_items):
        return [10.0 * batch_items[0]["n"] + k for k in range(len(first))]

    data = [{"prompt": "abc", "n": 0}, {"prompt": "abc", "n": 1}]
    trainer = build(options={"reward_func": by_row, "train_dataset": data}, num_generations=2, max_steps=1)
    seen = seen_advantages(trainer)
    trainer.train()
    assert sorted(seen) == [
        (row, agent, [10.0 * row, 10.0 * row + 1], [-1.0, 1.0]) for row in range(2) for agent in range(2)
    ]


def test_crossed_is_cross():
    """It was cross in the rollout and aligned in the credits."""
    ours = trained(joint_mode="crossed", num_generations=2, max_steps=2)
    other = trained(joint_mode="cross", num_generations=2, max_steps=2)
    assert ours.args.joint_mode == "cross"
    assert ours.env_step == 2 * 2 * 4
    assert same(weights(ours), weights(other))


def test_the_number_of_agents_is_said_once():
    """Three agents and no number; formatters were made for two."""
    models = [build_model(len(LETTERS) + 1, seed) for seed in (2, 9, 4)]
    options = {"agents": models, "reward_func": lambda a, b, c: [float(len(x)) for x in a]}
    trainer = trained(options, max_steps=1)
    assert trainer.args.num_agents == len(trainer.agents) == len(trainer.formatters) == 3
    assert "agent_2/grad_norm" in lines(trainer)[0]


# ---- rewards --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [None, math.nan])
def test_missing_rewards_leave_the_group(bad):
    """Statistics over the other three; a group without any reward is left out."""

    def some(first, second, batch_items):
        return [1.0, bad, 0.0, 1.0] if batch_items[0]["n"] == 0 else [bad] * 4

    options = {"reward_func": some, "train_dataset": rows(2)}
    trainer = build(options=options, num_generations=4, max_steps=1, reward_on_error="skip")
    seen = seen_advantages(trainer)
    trainer.train()
    assert [(row, agent) for row, agent, *_ in seen] == [(0, 0), (0, 1)]
    for *_, credits, values in seen:
        assert credits == [1.0, 0.0, 1.0]
        assert values == pytest.approx([0.5**0.5, -(2**0.5), 0.5**0.5])
    (line,) = lines(trainer)
    assert line["reward_calls/" + ("none" if bad is None else "nan")] == 5
    assert line["reward_mean"] == pytest.approx(2 / 3)
    assert line["turn_1/unrewarded_share"] == pytest.approx(5 / 8)
    assert line["agent_0/grad_norm"] > 0
    assert trainer.env_step == 3


def test_a_team_without_any_reward_moves_no_weight():
    """All groups empty; also no weight decay."""
    trainer = build(options={"reward_func": lambda first, second: [None] * len(first)}, max_steps=2)
    before = weights(trainer)
    trainer.train()
    assert same(weights(trainer), before)
    assert [line["skipped_step"] for line in lines(trainer)] == [1, 1]
    assert trainer.env_step == 0


@pytest.mark.parametrize(("kind", "counter"), [("hangs", "timeouts"), ("raises", "errors")])
def test_one_failed_reward_costs_one_sample(kind, counter, tmp_path):
    """The run goes on, the failure is counted, the log names the sample, and it has no reward."""
    marker = tmp_path / "failed once"

    def judge(first, second, batch_items):
        if batch_items[0]["n"] == 3 and not marker.exists():
            marker.touch()
            if kind == "hangs":
                time.sleep(600)
            raise OSError("the judge is down")
        return reward(first, second)

    limit = {"reward_timeout": 2.0} if kind == "hangs" else {}
    settings = {"num_train_epochs": 1, "max_steps": None, "reward_batch_size": 1, "reward_on_error": "skip", **limit}
    trainer = trained({"reward_func": judge}, **settings)
    trainer.close()
    assert trainer.step == 3
    last = lines(trainer)[-1]
    assert last[f"reward_calls/{counter}"] == 1
    assert last["reward_calls/samples"] == 18
    assert trainer.env_step == 17
    assert "reward function judge failed on row 3, turn 1, node root, sample 3.0" in log_of(trainer)
    records = [json.loads(line) for line in (trainer.run.folder / "completions.jsonl").read_text().splitlines()]
    assert {r["sample"] for r in records if r["reward"] is None} == {"3.0"}
    assert {r["sample"] for r in records} == {f"{i}.{k}" for i in range(6) for k in range(3)}


def test_a_prompt_over_the_limit_costs_its_row_only():
    """The run goes on and counts it."""
    data = rows(6)
    data[3] = {"prompt": "a" * 50, "n": 3}
    settings = {"max_prompt_length": 5, "shuffle": False, "num_train_epochs": 1, "max_steps": None}
    trainer = trained({"train_dataset": data}, **settings)
    assert sum(line.get("rollout/dropped_rows", 0) for line in lines(trainer)) == 1
    assert trainer.env_step == 5 * 3


def test_rewards_are_called_once_a_node_and_at_once():
    """A judge gets all joint answers of a node, and an async one all nodes of a turn at a time."""
    sizes, running, most = [], [], []

    async def judge(first, second):
        sizes.append(len(first))
        running.append(1)
        most.append(len(running))
        await asyncio.sleep(0.01)
        running.pop()
        return reward(first, second)

    trained({"reward_func": judge}, rows_per_rollout=4, num_turns=2, num_generations=2, max_steps=1)
    assert sizes == [2] * (4 + 8)
    assert max(most) == 8


# ---- records --------------------------------------------------------------------------------------------------------


def test_every_line_has_the_metrics_of_every_agent_and_turn():
    """With no tracker at all."""
    trainer = trained(num_turns=2, train_batch_size=8, reference_kl_enabled=True)
    assert [line["step"] for line in lines(trainer)] == [1, 2, 3]
    of_turns = (
        "loss entropy clip_fraction reference_kl sampler_gap sampler_gap_max advantage_std zero_signal_share tokens "
        "characters truncated_share"
    )
    for line in lines(trainer):
        for agent in range(2):
            for turn in (1, 2):
                for name in of_turns.split():
                    assert math.isfinite(line[f"agent_{agent}/turn_{turn}/{name}"])
            assert line[f"agent_{agent}/grad_norm"] > 0
            assert line[f"agent_{agent}/learning_rate"] == 1e-2
            assert line[f"agent_{agent}/turn_1/entropy"] > 0
        for name in ("reward_mean", "reward_std", "expected_return"):
            assert {f"turn_1/{name}", f"turn_2/{name}"} <= line.keys()
        assert {f"time/{part}" for part in ("generate", "reward", "learn", "save")} <= line.keys()
        assert {"reward_mean", "return_mean"} <= line.keys()
    first, *later = lines(trainer)
    assert first["agent_0/turn_1/reference_kl"] == pytest.approx(0, abs=1e-9)
    assert all(line["agent_0/turn_1/reference_kl"] > 1e-6 for line in later)

    minibatches = lines(trained(num_turns=2, train_batch_size=2, max_steps=4))  # of one rollout: together they have all
    assert set().union(*minibatches) == {key for key in first if "reference_kl" not in key}


def test_evaluation_counts_rows_and_not_samples():
    """Seven rows with K = 4; greedy and sampled, before the first and after the last step."""
    scored = {"reward_func": lambda first, second, batch_items: [float(row["n"]) for row in batch_items]}
    settings = {"num_generations": 4, "eval_generations": 4, "eval_batch_size": 3, "eval_interval": 100}
    trainer = trained({**scored, "eval_dataset": rows(7)}, **settings)
    evaluations = lines(trainer, "eval")
    assert [line["step"] for line in evaluations] == [0, 3]
    for line in evaluations:
        assert line["eval/rows"] == 7
        assert line["eval/reward_mean"] == line["eval/sampled/reward_mean"] == line["eval/sampled/best_of_k"] == 3
    first, second = trainer.evaluate(), trainer.evaluate()
    assert {**first, "eval/time/evaluate": 0} == {**second, "eval/time/evaluate": 0}
    assert trainer.evaluate(2)["eval/rows"] == 2
    assert trainer.evaluate(0) == {}


def test_the_published_evaluation_hooks():
    """eval_logger sees the greedy answers by agent, row and turn; what eval_aggregator makes of them is logged."""
    seen = {}

    def logger(agent_completions_turns, batch_items, prompts):
        seen.update(said=agent_completions_turns, items=batch_items, prompts=prompts)
        return [{"length": len(turns[-1])} for turns in agent_completions_turns[0]]

    def aggregator(metrics, num_turns):
        return {"longest": max(row["length"] for row in metrics), "turns": num_turns}

    hooks = {"eval_logger": logger, "eval_aggregator": aggregator, "eval_dataset": rows(5)}
    trainer = trained(hooks, num_turns=2, max_steps=1, eval_interval=10, eval_batch_size=2)
    last = lines(trainer, "eval")[-1]
    assert last["eval/turns"] == 2
    assert last["eval/longest"] == max(len(turns[1]) for turns in seen["said"][0])
    assert seen["items"] == rows(5)
    assert seen["prompts"] == [row["prompt"] for row in rows(5)]
    records = [json.loads(line) for line in (trainer.run.folder / "completions.jsonl").read_text().splitlines()]
    played = [r for r in records if (r["kind"], r["step"]) == ("eval", 1)]
    assert len(played) == 5 * 2 * 2
    for r in played:
        assert seen["said"][r["agent"]][r["row"]][r["turn"] - 1] == r["completion"]


def test_two_runs_in_one_folder_leave_each_other_alone():
    """Nothing of the first changes."""
    settings = {"run_name": "same", "eval_interval": 1}
    first = trained(**settings)
    first.close()
    files = {path: path.read_bytes() for path in sorted(Path().rglob("*")) if path.is_file()}
    assert len(files) >= 4
    second = trained(**settings)
    assert second.run.folder != first.run.folder
    assert {path: path.read_bytes() for path in files} == files


def test_the_seed_decides():
    """The same samples and weights again, and others with another seed."""
    one, again, other = (trained(seed=seed, eval_interval=1) for seed in (5, 5, 6))
    said = [(trainer.run.folder / "completions.jsonl").read_bytes() for trainer in (one, again, other)]
    assert said[0] == said[1] != said[2]
    assert same(weights(one), weights(again))
    assert not same(weights(one), weights(other))


# ---- sampling and learning ------------------------------------------------------------------------------------------


def test_truncated_sampling_warns_and_its_kept_mass_is_logged():
    """Whole sampling keeps all."""
    with pytest.warns(UserWarning, match=r"top_p=0\.6, top_k=None: truncated sampling biases"):
        trainer = trained(top_p=0.6, max_steps=1)
    assert 0.5 < lines(trainer)[0]["agent_0/turn_1/kept_mass"] < 0.99
    assert lines(trained(max_steps=1))[0]["agent_0/turn_1/kept_mass"] == pytest.approx(1)


def test_later_steps_on_a_rollout_use_the_old_logprobs():
    """The ratio is 1 in the first step on a rollout and is not in the second."""
    trainer = build(epochs_per_rollout=2, max_steps=4)
    seen = seen_ratios(trainer)
    trainer.train()
    first, second = seen[0:2] + seen[4:6], seen[2:4] + seen[6:8]
    assert len(seen) == 8
    assert max(first) < 1e-5
    assert min(second) > 1e-3
    assert lines(trainer)[0]["agent_0/turn_1/sampler_gap_max"] < 1e-4


def test_train_takes_sampling_settings(monkeypatch):
    """Answers are drawn at train(temperature=...), and learned from at the same temperature."""
    trainer = build(epochs_per_rollout=2, reference_kl_enabled=True, max_steps=2)
    used, original = [], comlrl.rollouts.generate

    def generate(agent, requests, sampling, max_rows):
        used.append((sampling.temperature, sampling.max_new_tokens))
        return original(agent, requests, sampling, max_rows)

    monkeypatch.setattr(comlrl.rollouts, "generate", generate)
    seen = seen_ratios(trainer)
    trainer.train(temperature=0.5, max_new_tokens=2)
    assert set(used) == {(0.5, 2)}
    assert max(seen[:2]) < 1e-5
    first = lines(trainer)[0]
    assert first["agent_0/turn_1/tokens"] <= 2
    assert first["agent_0/turn_1/sampler_gap_max"] < 1e-4
    assert first["agent_0/turn_1/reference_kl"] == pytest.approx(0, abs=1e-9)


def test_dropout_acts_nowhere(gpt2):
    """A KL term switched dropout on for all that came after."""
    options = {
        "agents": [AutoModelForCausalLM.from_pretrained(gpt2) for _ in range(2)],
        "tokenizer": AutoTokenizer.from_pretrained(gpt2),
    }
    trainer = build(options=options, reference_kl_enabled=True, epochs_per_rollout=2, max_steps=2)
    seen = seen_ratios(trainer)
    trainer.train()
    first = lines(trainer)[0]
    assert max(seen[:2]) < 1e-5  # the old log-probs are of a forward of their own
    for agent in range(2):
        assert first[f"agent_{agent}/turn_1/sampler_gap_max"] < 1e-4
        assert first[f"agent_{agent}/turn_1/reference_kl"] == pytest.approx(0, abs=1e-9)
    models = [*(agent.model for agent in trainer.agents), *(frozen.model for frozen in trainer.references.values())]
    assert not any(module.training for model in models for module in model.modules())


def test_an_entropy_bonus_raises_the_entropy():
    """Its gradient reaches the weights, where the rewards say nothing."""
    constant = {"reward_func": lambda first, second: [1.0] * len(first)}
    trainer = trained(constant, entropy_coef=1.0, max_steps=8, weight_decay=0.0)
    entropies = [line["agent_0/turn_1/entropy"] for line in lines(trainer)]
    assert entropies[-1] > entropies[0] + 0.05


def test_updates_in_bf16_are_not_rounded_away():
    """At a learning rate of 5e-6, bf16 weights hardly ever change; fp32 masters do."""
    trainer = build(dtype="bfloat16", agent_learning_rate=5e-6, weight_decay=0.0)
    before = weights(trainer)
    trainer.train()
    for old, new in zip(before, weights(trainer)):
        used = [name for name in old if "embed" not in name]  # rows of tokens that never came have no gradient
        count = sum(old[name].numel() for name in used)
        changed = sum((old[name] != new[name]).sum().item() for name in used)
        in_bf16 = sum((old[name].bfloat16() != new[name].bfloat16()).sum().item() for name in used)
        assert changed / count > 0.9
        assert in_bf16 / count < 0.2  # what would be left without masters


def test_the_learning_rate_warms_up_and_falls():
    trainer = trained(lr_schedule="linear", warmup_steps=2, max_steps=6, agent_learning_rate=1e-3)
    assert trainer.step == trainer.total_steps == 6  # of 60 in 20 epochs
    for agent in range(2):
        rates = [line[f"agent_{agent}/learning_rate"] for line in lines(trainer)]
        assert rates == pytest.approx([0, 5e-4, 1e-3, 7.5e-4, 5e-4, 2.5e-4])


@pytest.mark.parametrize("limit", [1e-3, None])
def test_gradients_are_clipped_by_their_global_norm(limit):
    trainer = build(max_grad_norm=limit)
    norms = []
    optimizer = trainer.engines[0].optimizer
    optimizer.register_step_pre_hook(
        lambda *_: norms.append(torch.cat([p.grad.flatten() for p in trainer.agents[0].model.parameters()]).norm())
    )
    trainer.train()
    logged = [line["agent_0/grad_norm"] for line in lines(trainer)]
    assert min(logged) > 1e-2  # before clipping
    assert [n.item() for n in norms] == pytest.approx([limit] * 3 if limit else logged, rel=1e-2)


def test_a_stream_of_unknown_length_trains(capsys):
    """With the progress display, which is on by default."""
    stream = datasets.IterableDataset.from_generator(lambda: iter(rows(5)))
    options = {"train_dataset": stream, "eval_dataset": stream}
    trainer = trained(options, num_train_epochs=2, max_steps=None, shuffle=False, eval_interval=10)
    assert trainer.total_steps is None
    assert trainer.step == 6  # 2 + 2 + 1 rows an epoch
    assert trainer.env_step == 2 * 5 * 3
    assert [line["eval/rows"] for line in lines(trainer, "eval")] == [5, 5]
    assert "step" in "".join(capsys.readouterr())


def test_a_coordinator_plays_several_turns():
    """Two turns of two samples; the transition is told row, rewards and turn."""
    told = []

    def transition(agent_completions, batch_item, rewards, turn):
        told.append((batch_item["n"], len(rewards), turn))
        return ["again"] * len(agent_completions)

    trainer = CentralizedMAGRPOTrainer(
        agent_model="tiny",
        train_dataset=rows(1),
        reward_func=reward,
        external_transition=transition,
        args=CentralizedMAGRPOConfig(**{**SMALL, "num_generations": 2, "num_turns": 2, "max_steps": 1}),
    )
    trainer.train()
    assert told == [(0, 1, 1)] * 2
    assert trainer.env_step == 2 + 4
    assert "agent_0/turn_2/tokens" in lines(trainer)[0]


# ---- time -----------------------------------------------------------------------------------------------------------


def made_samples(count, length):
    generator = torch.Generator().manual_seed(length)
    return [
        Sample(
            prompt_ids=[65, 66],
            token_ids=torch.randint(0, 250, (length,), generator=generator).tolist(),
            turn=0,
            name=str(k),
            credit=0.0,
            weight=1.0,
            trained=True,
            truncated=False,
            sampler_logprobs=torch.zeros(length),
            advantage=1.0 - 2 * (k % 2),
        )
        for k in range(count)
    ]


def test_the_time_of_an_update_grows_linearly_with_the_answers(tiny):
    """A row of logits a token made it quadratic (64 times here)."""
    model = AutoModelForCausalLM.from_pretrained(tiny)
    options = {"agents": [model, copy.deepcopy(model)], "tokenizer": AutoTokenizer.from_pretrained(tiny)}
    trainer = build(options=options)

    def seconds(length):
        groups, times = [made_samples(4, length)], []
        for _ in range(4):
            started = time.process_time()
            _, problem = trainer.learn(0, groups, 1.0, 10**5)
            times.append(time.process_time() - started)
            assert not problem
        return min(times)

    assert seconds(512) < 8 * 2.5 * seconds(64)


def test_an_update_and_a_turn_are_few_calls_of_the_model(monkeypatch):
    """One generation an agent and turn, for training and evaluation; one forward a micro-batch."""
    calls, forwards, original = [], [], comlrl.rollouts.generate

    def generate(agent, requests, sampling, max_rows):
        calls.append((agent.name, len(requests)))
        return original(agent, requests, sampling, max_rows)

    monkeypatch.setattr(comlrl.rollouts, "generate", generate)
    trainer = build(num_turns=2, max_steps=1, eval_interval=10, train_batch_size=8)
    learn = trainer.learn

    def watched(index, *arguments):
        model = trainer.agents[index].model.base_model
        handle = model.register_forward_pre_hook(lambda *_: forwards.append(index))
        result = learn(index, *arguments)
        handle.remove()
        return result

    trainer.learn = watched
    trainer.train()
    evaluation = [("agent_0", 2), ("agent_1", 2)] * 2
    training = [("agent_0", 2), ("agent_1", 2), ("agent_0", 6), ("agent_1", 6)]
    assert calls == evaluation + training + evaluation
    assert 2 <= len(forwards) <= 4  # an agent: the prompts once, then all 24 answers together
