"""MADPO and MARLHF in iterations: replay, comparators, what goes on through all of them, drift, stopping anywhere."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from api_server import KEY, ApiServer, chat, error
from preference_team import build as build_pairs
from stopping import assert_same_run, interrupted, lines_of, reward

from comlrl.centralized import CentralizedComparatorParseError
from comlrl.checkpoint import model_tensors, tensors_hash
from comlrl.drift import BINS, distribution
from comlrl.replay import check_replay, select_pairs
from comlrl.rewards import set_reward_range
from comlrl.trainers.preference import (
    MADPOIterConfig,
    MADPOIterTrainer,
    MARLHFIterConfig,
    MARLHFIterTrainer,
    MARLHFTrainer,
)


def madpo(**changes):
    settings = {"num_train_epochs": 1, "num_iterations": 3, **changes}
    return build_pairs(MADPOIterTrainer, **settings)


def marlhf(**changes):
    settings = {
        "reward_model_name": "tiny",
        "critic_model_name": "tiny",
        "reward_learning_rate": 1e-3,
        "reward_train_batch_size": 4,
        "reward_num_train_epochs": 1,
        "num_generations": 3,
        "num_train_epochs": 1,
        "num_iterations": 2,
        "train_batch_size": None,
        **changes,
    }
    return build_pairs(MARLHFIterTrainer, **settings)


def weights_hash(agents):
    return [tensors_hash(model_tensors(agent.model)) for agent in agents]


# ---- replay ---------------------------------------------------------------------------------------------------------


def test_current_is_the_newest_iteration_in_order():
    assert select_pairs([5, 3], "current", None, None, None, 0) == [(1, 0), (1, 1), (1, 2)]
    assert select_pairs([5, 0], "current", None, None, None, 0) == []


def test_nearest_k_draws_from_the_newest_k():
    drawn = select_pairs([9, 9, 9, 9], "nearest_k", 2, None, 400, 0)
    counts = Counter(iteration for iteration, _ in drawn)
    assert set(counts) == {2, 3}
    assert abs(counts[2] - 200) < 60  # six deviations
    assert len(select_pairs([9, 9, 4], "nearest_k", 2, None, None, 0)) == 4  # as many as are new


def test_all_history_draws_iterations_evenly_and_pairs_without_repeating():
    drawn = select_pairs([4, 0, 8], "all_history", None, None, 12, 1)
    for iteration, size in ((0, 4), (2, 8)):
        places = [place for i, place in drawn if i == iteration]
        for start in range(0, len(places), size):
            part = places[start : start + size]
            assert len(set(part)) == len(part)
    counts = Counter(i for i, _ in select_pairs([4, 0, 8], "all_history", None, None, 600, 2))
    assert counts[1] == 0
    assert abs(counts[0] - 300) < 75


def test_lambda_decay_weighs_by_age():
    counts = Counter(i for i, _ in select_pairs([5, 5, 5], "lambda_decay", None, 0.5, 7000, 3))
    assert [round(counts[i] / 1000) for i in range(3)] == [1, 2, 4]
    assert {i for i, _ in select_pairs([5, 5, 5], "lambda_decay", None, 0.0, 50, 3)} == {2}
    even = Counter(i for i, _ in select_pairs([5, 5, 5], "lambda_decay", None, 1.0, 3000, 3))
    assert all(abs(count - 1000) < 160 for count in even.values())


def test_an_iteration_without_new_pairs_replays_as_many_as_the_newest_has():
    assert len(select_pairs([4, 7, 0], "all_history", None, None, None, 0)) == 7
    assert select_pairs([0, 0], "all_history", None, None, None, 0) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("nearest_k", None, None, None), "preference_replay_k=None"),
        (("all_history", 2, None, None), "preference_replay_k=2"),
        (("lambda_decay", None, None, None), "preference_replay_lambda=None"),
        (("lambda_decay", None, 1.5, None), "preference_replay_lambda=1.5"),
        (("current", None, 0.5, None), "preference_replay_lambda=0.5"),
        (("current", None, None, 4), "preference_replay_sample_size=4"),
    ],
)
def test_settings_of_replay_that_contradict_each_other(settings, message):
    with pytest.raises(ValueError, match=message):
        check_replay(*settings)


def test_what_is_trained_on_is_what_replay_drew():
    trainer = madpo(preference_replay_mode="all_history", num_iterations=3, num_train_epochs=2, eval_interval=0)
    seen = []
    original = trainer.take_step

    def take_step(stop):
        seen.append((trainer.iteration, [trainer.training_pairs[i].name for i in trainer.chunks[0]]))
        original(stop)

    trainer.take_step = take_step
    draws = []
    end = trainer.end_iteration

    def end_iteration():
        draws.append([trainer.shards[i][n].name for i, n in trainer.selected])
        end()

    trainer.end_iteration = end_iteration
    trainer.train()
    for iteration in range(3):
        trained = [name for i, names in seen if i == iteration for name in names]
        assert Counter(trained) == Counter(draws[iteration] * 2)  # two epochs
    assert len(trainer.shards) == 3


# ---- what goes on through the iterations ----------------------------------------------------------------------------


def test_madpo_goes_round_with_one_reference_and_one_optimizer():
    trainer = madpo()
    before = [tensors_hash(model_tensors(reference.model)) for reference in trainer.references.values()]
    assert before == weights_hash(trainer.agents)
    trainer.train()
    assert [tensors_hash(model_tensors(r.model)) for r in trainer.references.values()] == before
    assert weights_hash(trainer.agents) != before
    assert {pair.reference_key for shard in trainer.shards for pair in shard} == {trainer.reference_key()}
    steps = sum(math.ceil(len(shard) / 3) for shard in trainer.shards)
    assert trainer.step == steps
    assert all(engine.counters()["optimizer_steps"] == steps for engine in trainer.engines.values())
    assert trainer.env_step == 2 * sum(map(len, trainer.shards))
    lines = lines_of(trainer.run.folder, "metrics")
    assert [line["env_step"] for line in lines] == sorted(line["env_step"] for line in lines)
    assert [line["step"] for line in lines if line["kind"] == "eval"][-1] == trainer.step
    files = sorted(path.name for path in (trainer.run.folder / "preferences").iterdir())
    assert files == [f"iteration_{i:04d}.jsonl" for i in range(3)]
    about = [json.loads((trainer.run.folder / "preferences" / name).read_text().splitlines()[0]) for name in files]
    assert [line["about"]["iteration"] for line in about] == [0, 1, 2]
    assert len({tuple(line["about"]["models"]) for line in about}) == 3  # each was sampled by another policy


def test_pairs_are_of_the_policy_against_the_comparator():
    trainer = madpo(comparator_num_candidates=5, pair_selection="comparator_reward")
    trainer.train()
    for pair in (pair for shard in trainer.shards for pair in shard):
        assert {pair.chosen.source, pair.rejected.source} == {"policy", "current"}
        assert pair.chosen.reward > pair.rejected.reward
        for answer in (pair.chosen, pair.rejected):
            for ids in answer.token_ids:
                assert ids  # EOS counts: an empty answer is one token
    first = trainer.shards[0]
    assert any(ids[-1] == trainer.agents[0].eos_ids[0] for pair in first for ids in pair.chosen.token_ids)


@pytest.mark.parametrize("algorithm", ["magrpo", "iac", "maac"])
def test_marlhf_goes_round_with_one_x_axis_and_one_reference(algorithm):
    trainer = marlhf(rl_algorithm=algorithm, reference_kl_enabled=True, preference_scoring_reward="reward_model")
    before = weights_hash(trainer.agents)
    scored = []
    original = trainer.finish_reward_model

    def finish(stop):
        original(stop)
        scored.append(tensors_hash(model_tensors(trainer.reward_agent.trained)))

    trainer.finish_reward_model = finish
    calls = []
    record = trainer.record_candidates
    trainer.record_candidates = lambda *a: (calls.append(trainer.rewards.counters["samples"]), record(*a))
    trainer.train()
    assert [tensors_hash(model_tensors(r.model)) for r in trainer.references.values()] == before
    assert len(set(scored)) == 2  # a new one each
    lines = lines_of(trainer.run.folder, "metrics")
    assert [line["env_step"] for line in lines] == sorted(line["env_step"] for line in lines)
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    assert trainer.env_step == 2 * 4 * 3  # iterations, rows, answers
    # The second iteration's candidates are scored by the model: the task is not asked.
    assert calls[2] == calls[3]
    assert calls[1] > calls[0]
    values = {pair.chosen.value for pair in trainer.shards[1]}
    assert values
    assert not values & {pair.chosen.value for pair in trainer.shards[0]}


@pytest.mark.parametrize("k", [None, 2])
def test_history_reads_each_model_once_an_iteration_and_k_1_is_the_policy_before(k):
    settings = {"comparator_history_k": k, "num_iterations": 3, "rollout_buffer_size": 1}
    trainer = madpo(comparator_policy="history", **settings)
    begun, used = [], []
    original = trainer.propose

    def propose(*args):
        if len(begun) == trainer.iteration:
            begun.append(weights_hash(trainer.agents))
        used.append((trainer.iteration, weights_hash(trainer.comparator.rollouts.agents)))
        return original(*args)

    trainer.propose = propose
    trainer.train()
    assert len(used) > 6  # several rows an iteration
    assert trainer.comparator.loads == 3 * 2
    for iteration, hashes in used:
        assert hashes == begun[max(iteration - (k or 1), 0)]
    assert len({tuple(each) for each in begun}) == 3


def test_other_models_as_comparators(tiny):
    trainer = build_pairs(
        MADPOIterTrainer,
        comparator_policy="model",
        comparator_model_name="tiny",
        num_iterations=2,
        num_train_epochs=1,
        max_new_tokens=6,
    )
    trainer.train()
    assert trainer.comparator.loads == 2  # one name for both agents, once an iteration
    pairs = [pair for shard in trainer.shards for pair in shard]
    assert {pair.chosen.source for pair in pairs} | {pair.rejected.source for pair in pairs} == {"policy", "model"}
    for pair in pairs:  # in the tokens of the policy's agents
        for ids in pair.chosen.token_ids + pair.rejected.token_ids:
            assert max(ids) < trainer.agents[0].model.config.vocab_size


class Halves:
    """A comparator's adapter: text with an `a` is for both roles, half each; other text is for none."""

    def build_prompt(self, batch_item, agent_prompts):
        return agent_prompts[0]

    def parse_completion(self, completion, batch_item, num_agents):
        if "a" not in completion:
            raise CentralizedComparatorParseError("no section")
        return [completion[:2], completion[2:]]


def test_one_model_writes_for_all_and_its_garbled_output_is_counted_and_borne():
    settings = {
        "comparator_generation_mode": "centralized",
        "comparator_centralized_agent_index": 1,
        "comparator_num_candidates": 12,
        "num_iterations": 2,
        "options": {"centralized_comparator_adapter": Halves()},
    }
    trainer = madpo(comparator_max_failures=0.01, **settings)  # which is for answers of an API
    trainer.train()
    pairs = [pair for shard in trainer.shards for pair in shard]
    assert pairs
    for pair in pairs:
        theirs = pair.chosen if pair.chosen.source == "current" else pair.rejected
        assert "a" in "".join(theirs.texts)
        assert all(len(text) <= 2 for text in theirs.texts[:1])
    lines = [line for line in lines_of(trainer.run.folder, "metrics") if "preference/failed" in line]
    assert any(line["preference/unparsable"] > 0 for line in lines)
    assert all(line["preference/failed"] == 0 for line in lines)


def test_a_model_behind_an_api(monkeypatch):
    """The third answer fails for good; a second run with the same cache asks for nothing."""
    monkeypatch.setenv("TEST_API_KEY", KEY)
    server = ApiServer(lambda number, body: error(400) if number == 3 else chat("ab", "cde", "f", "gabc"))
    settings = {
        "comparator_policy": "api",
        "comparator_api_url": server.url,
        "comparator_api_model": "m",
        "comparator_api_key_env": "TEST_API_KEY",
        "comparator_api_cache": "cache.jsonl",
        "comparator_max_failures": 0.5,
        "num_iterations": 2,
    }
    trainer = madpo(**settings)
    trainer.train()
    asked = len(server.seen)
    assert asked >= 2 * 4 * 2  # iterations, rows, agents
    pairs = [pair for shard in trainer.shards for pair in shard]
    assert {pair.chosen.source for pair in pairs} | {pair.rejected.source for pair in pairs} == {"policy", "api"}
    eos = trainer.agents[0].eos_ids[0]
    for pair in pairs:
        theirs = pair.chosen if pair.chosen.source == "api" else pair.rejected
        assert all(ids[-1] == eos for ids in theirs.token_ids)
    assert any(line.get("preference/failed", 0) > 0 for line in lines_of(trainer.run.folder, "metrics"))
    for file in trainer.run.folder.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes()
    madpo(**settings).train()
    assert len(server.seen) - asked <= 2  # only what had failed
    server.shutdown()
    server.server_close()


def test_between_iterations_no_model_of_a_comparator_is_in_memory():
    trainer = madpo(comparator_policy="history", num_iterations=2)
    seen = []
    original = trainer.take_step
    trainer.take_step = lambda stop: (seen.append(trainer.comparator.rollouts), original(stop))
    trainer.train()
    assert seen
    assert set(seen) == {None}


def test_iterations_without_pairs():
    said = {"calls": 0}

    def sometimes(first, second):
        said["calls"] += 1
        return reward(first, second) if said["calls"] > 8 else [0.0] * len(first)

    trainer = madpo(reward_func=sometimes, eval_interval=0, num_iterations=4)
    trainer.train()
    assert not trainer.shards[0]
    assert trainer.step > 0
    with pytest.raises(ValueError, match="no preference pairs in any iteration"):
        madpo(reward_func=lambda first, second: [0.0] * len(first)).train()


def test_several_turns():
    trainer = madpo(turns=2, max_tree_nodes=100, preference_num_candidates=3, num_iterations=2)
    trainer.train()
    assert {pair.turn for shard in trainer.shards for pair in shard} == {0, 1}


# ---- drift ----------------------------------------------------------------------------------------------------------


def test_distribution_counts_what_is_outside_and_clips_nothing():
    numbers = distribution([0.0, 0.5, 1.0, 7.0], 0.0, 1.0)
    assert numbers["count"] == 4
    assert numbers["mean"] == pytest.approx(2.125)
    assert sum(numbers["bins"]) == 3
    assert numbers["outside"] == 1
    assert len(numbers["bins"]) == BINS
    assert numbers["bins"][-1] == 1


def test_drift_is_written_for_each_iteration_with_the_scale_of_its_scores():
    ranged = set_reward_range(lambda first, second: reward(first, second), -50.0, 50.0)
    trainer = marlhf(log_reward_distribution=True, preference_scoring_reward="reward_model", reward_func=ranged)
    trainer.train()
    folder = trainer.run.folder / "reward_distributions"
    first, second = (json.loads((folder / f"iteration_{i:04d}.json").read_text()) for i in range(2))
    assert first["scored_by"] == "task"
    assert first["range"] == [-50.0, 50.0]
    assert second["scored_by"] == "reward_model"
    assert second["range"][1] < 50
    assert second["candidates"]["target"]["outside"] == 0
    assert first["candidates"]["target"]["count"] == 4 * 4
    for name in ("iteration_0000.png", "iteration_0001.png", "drift.png"):
        assert (folder / name).stat().st_size > 5000


def test_two_runs_in_one_folder_share_no_file():
    shared = {"preference_replay_dir": "pairs", "policy_checkpoint_dir": "policies", "num_iterations": 1}
    one, other = madpo(**shared), madpo(**shared)
    one.train()
    before = {path: path.read_bytes() for path in Path("pairs").rglob("*.jsonl")}
    other.train()
    assert len(list(Path("pairs").iterdir())) == len(list(Path("policies").iterdir())) == 2
    assert all(path.read_bytes() == data for path, data in before.items())


# ---- stopping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "at"),
    [
        ("propose", 3),
        *(
            pytest.param(*where, marks=pytest.mark.full)
            for where in [
                ("propose", 2),
                ("answer_logprobs", 3),
                ("gradients", 2),
                ("gradients", 5),
                ("end_iteration", 1),
            ]
        ),
    ],
)
def test_madpo_stopped_anywhere_goes_on_bit_for_bit(method, at):
    changes = {"comparator_policy": "history", "preference_replay_mode": "all_history", "num_iterations": 2}
    whole = madpo(output_dir="a", **changes)
    whole.train()
    interrupted(madpo(output_dir="b", **changes), method, at, "b/ck")
    again = madpo(output_dir="b", **changes)
    again.train(resume_from_checkpoint="b/ck", checkpoint_dir="b/ck")
    assert_same_run(whole, again)
    assert again.shards == whole.shards


@pytest.mark.parametrize(
    ("method", "at", "algorithm"),
    [
        ("propose", 3, "maac"),  # of the second iteration
        ("learn_reward", 2, "magrpo"),
        *(
            pytest.param(*where, marks=pytest.mark.full)
            for where in [
                ("propose", 2, "magrpo"),
                ("learn_reward", 3, "magrpo"),
                ("gradients", 1, "maac"),
                ("gradients", 3, "magrpo"),
            ]
        ),
    ],
)
def test_marlhf_stopped_anywhere_goes_on_bit_for_bit(method, at, algorithm):
    changes = {"rl_algorithm": algorithm, "preference_scoring_reward": "reward_model", "reward_train_batch_size": 6}
    whole = marlhf(output_dir="a", **changes)
    whole.train()
    interrupted(marlhf(output_dir="b", **changes), method, at, "b/ck")
    again = marlhf(output_dir="b", **changes)
    again.train(resume_from_checkpoint="b/ck", checkpoint_dir="b/ck")
    assert_same_run(whole, again)
    assert again.shards == whole.shards
    for one, other in zip(whole.reward_agent.trained.parameters(), again.reward_agent.trained.parameters()):
        assert torch.equal(one, other)


# ---- settings -------------------------------------------------------------------------------------------------------

REFUSED = {
    "model": ({"comparator_policy": "model"}, "needs comparator_model_name or comparator_agents"),
    "name": ({"comparator_model_name": "tiny"}, "comparator_model_name is for comparator_policy model"),
    "history": ({"comparator_history_k": 2}, "comparator_history_k is for comparator_policy history"),
    "policy": ({"comparator_policy": "nobody"}, "comparator_policy='nobody'"),
    "key": ({"comparator_api_key": "sk-1"}, "put it into an environment variable"),
    "field": ({"comparator_api_response_field": "x"}, "generic format, which is not here"),
    "format": (
        {"comparator_policy": "api", "comparator_api_format": "generic"},
        "must be openai or anthropic",
    ),
    "url": ({"comparator_policy": "api"}, "needs comparator_api_url"),
    "file": ({"preference_file": "x.jsonl"}, "preference_file is not for iterations"),
    "iterations": ({"num_iterations": 0}, "num_iterations=0"),
    "replay": ({"preference_replay_mode": "nearest_k"}, "preference_replay_k=None"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("kind", [MADPOIterConfig, MARLHFIterConfig])
def test_settings_that_cannot_be(kind, case):
    settings, message = REFUSED[case]
    with pytest.raises(ValueError, match=message) as caught:
        kind(**settings)
    assert "sk-1" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"comparator_policy": "current_copy", "comparator_devices": "cuda:9"}, "comparator_devices='cuda:9'"),
        ({"comparator_policy": "model", "comparator_model_name": "nowhere/at-all"}, "nowhere/at-all"),
        ({"comparator_policy": "model", "comparator_agents": ["tiny"]}, "1 names for 2 models"),
        ({"comparator_centralized_agent_index": 2}, "comparator_centralized_agent_index=2: must be from 0 to 1"),
        (
            {"comparator_policy": "api", "comparator_api_url": "http://x/v1", "comparator_api_model": "m",
             "comparator_api_key_env": "NO_SUCH_KEY"},
            "NO_SUCH_KEY",
        ),
    ],
)  # fmt: skip
def test_devices_models_and_keys_are_checked_before_anything_is_sampled(changes, message):
    with pytest.raises(ValueError, match=message):
        madpo(**changes)


def test_published_names_are_accepted():
    config = MADPOIterConfig(comparator_policy="previous_iteration", preference_replay_mode="td-lambda",
                             preference_replay_lambda=0.5, comparator_generation_mode="single_agent")  # fmt: skip
    assert config.comparator_policy == "history"
    assert config.preference_replay_mode == "lambda_decay"
    assert config.comparator_generation_mode == "centralized"
    assert issubclass(MARLHFIterTrainer, MARLHFTrainer)
