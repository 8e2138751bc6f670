"""A run that was stopped and resumed is the run that was not, bit for bit; what may change on resume, what may not."""

import itertools
import math
import os
import random
import re
import shutil
import signal
import time
import warnings
from pathlib import Path

import datasets
import pytest
import torch
import wandb
from stopping import assert_same_run, build, interrupted, lines_of, reward, rows, state_of
from tiny_team import build_model, build_tokenizer
from torture import torture
from transformers import AutoTokenizer

from comlrl import checkpoint, embedded
from comlrl.checkpoint import CheckpointError
from comlrl.trainers import MAGRPOConfig, MAGRPOTrainer, MAREINFORCETrainer
from comlrl.trainers.reinforce_config import MAREINFORCEConfig
from comlrl.utils import read_checkpoint_metadata


class Stream:
    """Rows without a length."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


def stopped_and_resumed(method, at, folder="b", **changes):
    """The run that was stopped when `method` was called for the at-th time, and went on in a fresh trainer."""
    interrupted(build(output_dir=folder, **changes), method, at, f"{folder}/ck")
    again = build(output_dir=folder, **changes)
    again.train(resume_from_checkpoint=f"{folder}/ck", checkpoint_dir=f"{folder}/ck")
    return again


def whole(**changes):
    trainer = build(output_dir="a", **changes)
    trainer.train()
    assert trainer.step == 6
    return trainer


CASES = {
    "in_a_gradient": ("gradients", 4, {}),
    "while_a_step_is_taken": ("apply", 3, {"advantage_mode": "raw"}),
    "in_a_rollout": ("collect", 5, {"advantage_mode": "rloo"}),
    "in_an_evaluation": ("evaluate_team", 3, {"advantage_mode": "greedy"}),
    "two_turns": ("gradients", 3, {"turns": 2, "joint_mode": "cross", "num_train_epochs": 4}),
    "greedy_two_turns": (
        "prepare",
        2,
        {"turns": 2, "advantage_mode": "greedy", "discount": 0.9, "num_train_epochs": 4},
    ),
    "reference_kl": ("gradients", 4, {"reference_kl_enabled": True}),
    "kl_in_return": ("prepare", 5, {"reference_kl_enabled": True, "reference_kl_in": "return"}),
    "partly_filled_buffer": ("collect", 5, {"rows_per_rollout": 1, "rollout_buffer_size": 3, "num_train_epochs": 3}),
    "unshuffled": ("gradients", 2, {"shuffle": False}),
    "first_epoch_ends": ("plan_evaluation", 4, {}),
    "steps_of_one_buffer": ("apply", 4, {"train_batch_size": 1, "epochs_per_rollout": 2, "reference_kl_enabled": True}),
    "schedule": ("gradients", 4, {"lr_schedule": "cosine", "warmup_steps": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_stopped_and_resumed_is_as_never_stopped(case):
    method, at, changes = CASES[case]
    assert_same_run(whole(**changes), stopped_and_resumed(method, at, **changes))


@pytest.mark.parametrize("count", [6, 5])  # the last rollout of an epoch is full, or not
@pytest.mark.parametrize("at", [2, 4, 5])
def test_a_stream_goes_on_at_its_place(count, at):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(shuffle is ignored|cannot be compared)")
        changes = {"data": Stream(rows(count)), "max_steps": 6, "rows_per_rollout": 1, "num_train_epochs": 3}
        assert_same_run(whole(**changes), stopped_and_resumed("collect", at, **changes))


FULL = list(
    itertools.product(
        ("raw", "mean", "rloo", "greedy"),
        (1, 2),
        ("aligned", "cross"),
        (False, True),
        ("shuffled", "unshuffled", "stream"),
        ("middle", "edge", "buffer"),
    )
)


@pytest.mark.full
@pytest.mark.parametrize(("mode", "turns", "joint", "kl", "data", "place"), FULL)
def test_every_combination(mode, turns, joint, kl, data, place):
    stream = datasets.IterableDataset.from_generator(lambda: iter(rows(6))) if data == "stream" else None
    nodes = 2 * (1 if turns == 1 else 3 if joint == "aligned" else 5)  # of two rows: one step
    changes = {
        "advantage_mode": mode,
        "turns": turns,
        "joint_mode": joint,
        "reference_kl_enabled": kl,
        "shuffle": data == "shuffled",
        "data": stream,
        "num_generations": 2,
        "num_train_epochs": 6,
        "eval_interval": 3,
        "rows_per_rollout": 1 if place == "buffer" else 2,
        "rollout_buffer_size": nodes,
        "train_batch_size": nodes,
    }
    method, at = {"middle": ("gradients", 3), "edge": ("plan_evaluation", 4), "buffer": ("collect", 6)}[place]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*cannot be compared")
        assert_same_run(whole(**changes), stopped_and_resumed(method, at, **changes))


def test_killed_at_every_step_in_turn():
    """A run of six steps in seven processes."""
    interrupted(build(output_dir="b"), "evaluate_team", 1, "b/ck")
    assert not checkpoint.complete(Path("b/ck"))  # nothing to lose yet
    interrupted(build(output_dir="b", run_name="other"), "gradients", 2, "b/ck")
    for _ in range(4):
        interrupted(build(output_dir="b", run_name="other"), "gradients", 2, "b/ck", resume_from_checkpoint="b/ck")
    last = build(output_dir="b", run_name="other")
    last.train(resume_from_checkpoint="b/ck", checkpoint_dir="b/ck")
    assert_same_run(whole(), last)


@pytest.mark.parametrize("edge", [3, 4])
def test_more_steps_after_the_last(edge):
    """max_steps ends a run in the middle of a buffer; with more steps it goes on there."""
    changes = {"train_batch_size": 1, "eval_interval": 0}
    short = build(output_dir="b", **{**changes, "max_steps": edge})
    short.train(checkpoint_dir="b/ck")
    assert (short.step, len(short.chunks)) == (edge, edge % 2)
    again = build(output_dir="b", **changes)
    again.train(resume_from_checkpoint="b/ck", checkpoint_dir="b/ck")
    assert_same_run(whole(**changes), again)


@pytest.mark.parametrize("data", ["list", "stream"])
def test_at_the_edge_of_an_epoch_all_of_the_next_is_done(data):
    """Known elsewhere to perform no step at all, silently."""
    changes = {"data": Stream(rows(6)) if data == "stream" else None, "max_steps": None, "eval_interval": 0}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(shuffle is ignored|cannot be compared)")
        short = build(output_dir="b", num_train_epochs=1, **changes)
        short.train(checkpoint_dir="b/ck")
        assert (short.epoch, short.step) == (1, 3)
        again = build(output_dir="b", num_train_epochs=2, **changes)
        again.train(resume_from_checkpoint="b/ck/checkpoint-1", checkpoint_dir="b/ck")
        assert (again.epoch, again.step) == (2, 6)
        assert_same_run(whole(num_train_epochs=2, **changes), again)
    used = [line["row"] for line in lines_of("b/run", "completions")]
    assert sorted(set(used[len(used) // 2 :])) == list(range(6))


class Noisy:
    """A reward that draws from every shared generator and counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, first, second):
        self.calls += 1
        noise = random.random() + torch.rand(()).item() + 0.01 * self.calls
        return [value + noise * i for i, value in enumerate(reward(first, second))]

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


@pytest.mark.parametrize("number", [14, 21, 26, 30])  # in an evaluation, or a rollout
def test_random_numbers_and_states_of_callbacks_go_on_even_from_a_rollout_that_was_given_up(number):
    class Stopping(Noisy):
        def __call__(self, first, second):
            values = super().__call__(first, second)
            stop(self.calls)
            return values

    def run(stop_at, folder, resume=None):
        nonlocal stop
        torch.manual_seed(0)
        random.seed(0)
        trainer = build(output_dir=folder, reward_func=Stopping(), turns=2, num_train_epochs=4)

        def stop(calls):
            if calls == stop_at:
                os.kill(os.getpid(), signal.SIGINT)

        if stop_at:
            with pytest.raises(SystemExit):
                trainer.train(checkpoint_dir=f"{folder}/ck")
        else:
            trainer.train(resume, checkpoint_dir=f"{folder}/ck")
        return trainer

    stop = None
    undisturbed = run(None, "a")
    stopped = run(number, "b")
    assert stopped.rewards.counters["calls"] == number  # one more than what was saved, at least
    assert_same_run(undisturbed, run(None, "b", "b/ck"))


def test_an_error_loses_nothing_but_its_step():
    calls = []

    def failing(first, second):
        calls.append(None)
        if len(calls) == 14:  # in the fourth rollout: evaluations make four calls
            raise ConnectionError("the judge is away")
        return reward(first, second)

    trainer = build(output_dir="b", reward_func=failing)
    with pytest.raises(ConnectionError):
        trainer.train(checkpoint_dir="b/ck", checkpoint_interval=10)
    saved = checkpoint.newest_good(trainer.checkpoint_dir)
    assert read_checkpoint_metadata(saved)["step"] == trainer.step > 0
    log = Path("b/run/log.txt").read_text()
    assert f"stopped in step {trainer.step + 1}: ConnectionError: the judge is away" in log
    again = build(output_dir="b")
    again.train(resume_from_checkpoint=str(saved), checkpoint_dir="b/ck")
    other, mine = state_of(whole()), state_of(again)
    for name, tensor in other.items():
        assert torch.equal(tensor, mine[name]), name


# ---- records ----


def test_the_run_folder_goes_on_wherever_it_is(tmp_path):
    trainer = build()
    interrupted(trainer, "gradients", 4, trainer.open_run().folder / "checkpoints")
    (tmp_path / "runs").rename(tmp_path / "moved")
    again = build()
    again.train(resume_from_checkpoint="moved/run", checkpoint_dir="moved/run/checkpoints")
    assert again.run.folder == Path("moved/run")
    assert [line["step"] for line in lines_of("moved/run", "metrics")] == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6]


def test_lost_lines_are_noticed():
    interrupted(build(output_dir="b"), "gradients", 4, "b/ck")
    path = Path("b/run/metrics.jsonl")
    path.write_bytes(path.read_bytes().partition(b"\n")[2])
    build(output_dir="b").train(resume_from_checkpoint="b/ck")
    assert "metrics.jsonl is shorter than it was at the checkpoint" in Path("b/run/log.txt").read_text()


def test_without_its_folder_the_run_keeps_its_id(tmp_path):
    first = interrupted(build(), "gradients", 4, "ck")
    (tmp_path / "runs" / "run" / "run.json").unlink()
    again = build()
    again.train(resume_from_checkpoint="ck", checkpoint_dir="ck")
    assert again.run.folder.name == "run-2"
    assert again.run.id == first.run.id


def test_an_evaluation_after_the_checkpoint_is_not_there_twice():
    """Lines are cut where the checkpoint was written, not by step: an evaluation may come later in the same step."""
    interrupted(build(output_dir="b"), "evaluate_team", 2, "b/ck")
    killed = build(output_dir="b")
    killed.collect = None  # this process gets no further than the evaluation
    with pytest.raises(TypeError):
        killed.train(resume_from_checkpoint="b/ck")
    assert [line["step"] for line in lines_of("b/run", "metrics") if line["kind"] == "eval"] == [0, 2]
    again = build(output_dir="b")
    again.train(resume_from_checkpoint="b/ck", checkpoint_dir="b/ck")
    assert_same_run(whole(), again)


def test_a_branch_from_an_older_checkpoint_overwrites_nothing():
    build(output_dir="b", checkpoint_steps=1).train(checkpoint_dir="b/ck", checkpoint_interval=10)
    before = checkpoint.complete(Path("b/ck"))
    again = build(output_dir="b", checkpoint_steps=3)
    again.train(resume_from_checkpoint="b/ck/checkpoint-2", checkpoint_dir="b/ck", checkpoint_interval=10)
    after = checkpoint.complete(Path("b/ck"))
    assert after[: len(before)] == before
    assert [read_checkpoint_metadata(path)["step"] for path in after] == [1, 2, 3, 4, 5, 6, 3, 6]
    assert_same_run(whole(), again)


def test_a_torn_checkpoint_is_passed_over():
    build(output_dir="b", checkpoint_steps=2, max_steps=4).train(checkpoint_dir="b/ck", checkpoint_interval=10)
    (Path("b/ck/checkpoint-2/agent_1/optimizer.safetensors")).write_bytes(b"")
    again = build(output_dir="b")
    with pytest.warns(UserWarning, match=r"checkpoint-2 is corrupted: agent_1/optimizer\.safetensors"):
        again.train(resume_from_checkpoint="b/ck", checkpoint_dir="b/ck")
    assert_same_run(whole(), again)


def test_tutorial_two_epochs_then_two_more_and_one_wandb_run(tiny):
    prompts = datasets.Dataset.from_dict({"prompt": ["a house", "a tree", "the sea", "rain"]})

    def ratio_reward(completions1, completions2):
        scores = []
        for one, two in zip(completions1, completions2):
            ratio = len(two) / max(len(one), 1)
            gap = 0.0 if 2 <= ratio <= 3 else min(abs(ratio - 2), abs(ratio - 3))
            scores.append(math.exp(-gap))
        return scores

    def build_program(num_train_epochs, wandb_config):
        return MAGRPOTrainer(
            agent_model=tiny,
            num_agents=2,
            tokenizer=AutoTokenizer.from_pretrained(tiny),
            reward_func=ratio_reward,
            train_dataset=prompts,
            args=MAGRPOConfig(num_turns=1, num_train_epochs=num_train_epochs, num_generations=4, max_new_tokens=4),
            wandb_config=wandb_config,
        )

    first = build_program(num_train_epochs=2, wandb_config={"project": "p", "name": "n"})
    first.train(checkpoint_dir="ckpt")
    first.save_model("out")
    assert wandb.run.id == first.run.wandb_state()["id"]  # nothing but close() ends it
    first.close()
    meta = read_checkpoint_metadata("ckpt/checkpoint-2")
    assert meta["wandb"]["id"] == first.run.wandb_state()["id"]
    again = build_program(
        num_train_epochs=4, wandb_config={"project": "p", "name": "n", "id": meta["wandb"]["id"], "resume": "allow"}
    )
    again.train(resume_from_checkpoint="ckpt/checkpoint-2", checkpoint_dir="ckpt")
    again.close()
    assert (first.step, again.step, again.epoch) == (4, 8, 4)
    assert again.run.wandb_state() == first.run.wandb_state()
    assert [path.name for path in checkpoint.complete(Path("ckpt"))] == [f"checkpoint-{k}" for k in (1, 2, 3, 4)]
    ids = {read_checkpoint_metadata(path)["wandb"]["id"] for path in checkpoint.complete(Path("ckpt"))}
    assert ids == {meta["wandb"]["id"]}


# ---- what may change ----


def test_what_may_change_works_and_is_logged():
    build(output_dir="b", num_train_epochs=1).train(checkpoint_dir="b/ck")
    changes = {
        "agent_learning_rate": 0.02,
        "num_train_epochs": 3,
        "max_steps": 9,
        "eval_interval": 4,
        "logging_steps": 7,
        "checkpoint_steps": 5,
        "agent_devices": "cpu",
        "train_batch_size": 1,
        "num_generations": 4,
    }
    again = build(output_dir="b", **changes)
    again.train(resume_from_checkpoint="b/ck", checkpoint_dir="b/ck")
    assert again.step == 9
    log = Path("b/run/log.txt").read_text()
    assert "resumed with agent_learning_rate=0.02 (was 0.01)" in log
    for name in changes:
        assert f"resumed with {name}=" in log
    assert lines_of("b/run", "metrics")[-2]["agent_0/learning_rate"] == 0.02


class Renamed(MAGRPOTrainer):
    pass


def other_config(trainer):
    trainer.agents[1].model.config.num_attention_heads = 1


def freeze(trainer):
    next(trainer.agents[0].model.parameters()).requires_grad_(False)


REFUSED = {
    "number_of_agents": ("num_agents was 2 and is 3", {"options": {"num_agents": 3}, "seeds": (1, 2, 3)}),
    "turns": ("num_turns was 1 and is 2", {"turns": 2}),
    "seed": ("seed was 0 and is 1", {"seed": 1}),
    "baseline": ("advantage_mode was 'mean' and is 'raw'", {"advantage_mode": "raw"}),
    "kl": ("reference_kl_enabled was False and is True", {"reference_kl_enabled": True}),
    "tokenizer": ("agent_0: the tokenizer", {"tokenizer": "bacdefg"}),
    "shape": (r"agent_1 \(model shape\).*model.layers.1", {"layers": 2}),
    "heads": (r"agent_1 \(model shape\): num_attention_heads.* was 2 and is 1", {"spoil": other_config}),
    "frozen": ("agent_0: model.embed_tokens.weight is trained only in the checkpoint", {"spoil": freeze}),
    "fewer_rows": ("train_dataset had 6 rows and has 5", {"data": rows(5)}),
    "other_rows": ("train_dataset has other rows", {"data": rows(6)[::-1]}),
    "trainer": ("is of MAGRPOTrainer, this is Renamed", {"kind": Renamed}),
    "callback": ("a state of reward_0, which has no load_state_dict", {"saved_reward": Noisy()}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_may_not_change_is_refused_by_name_before_anything_is_touched(case):
    message, changes = REFUSED[case]
    changes = dict(changes)
    saved_reward = changes.pop("saved_reward", reward)
    spoil = changes.pop("spoil", lambda trainer: None)
    letters, layers = changes.pop("tokenizer", None), changes.pop("layers", None)
    build(output_dir="b", reward_func=saved_reward, max_steps=2).train(checkpoint_dir="b/ck")
    if letters or layers:
        models = [build_model(8, 2), build_model(8, 9, layers=layers or 1)]
        trainer = MAGRPOTrainer(
            agents=models,
            tokenizer=build_tokenizer(letters or "abcdefg"),
            train_dataset=rows(6),
            reward_func=reward,
            args=build(output_dir="b").args,
        )
    else:
        trainer = build(output_dir="b", **changes)
    spoil(trainer)
    before = state_of(trainer)
    generators = checkpoint.rng_state()
    files = {path: path.read_bytes() for path in Path("b").rglob("*") if path.is_file()}
    with pytest.raises(CheckpointError, match=message):
        trainer.train(resume_from_checkpoint="b/ck", checkpoint_dir="b/ck")
    after = state_of(trainer)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert trainer.step == 0
    assert generators == checkpoint.rng_state()
    assert files == {path: path.read_bytes() for path in Path("b").rglob("*") if path.is_file()}


def test_rows_that_cannot_be_compared_only_warn():
    def odd_rows(thing):
        return [{"prompt": "abc"[: 1 + i % 3], "thing": thing} for i in range(6)]

    build(output_dir="b", data=odd_rows(object()), max_steps=2).train(checkpoint_dir="b/ck")
    again = build(output_dir="b", data=odd_rows(object()))
    with pytest.warns(UserWarning, match="cannot be compared"):
        again.train(resume_from_checkpoint="b/ck")
    assert again.step == 6


def test_rows_of_a_mapped_dataset_are_compared_by_content():
    """The published fingerprint differed whenever a `map` could not be hashed."""

    def mapped():
        unhashable = (i for i in range(3))
        return datasets.Dataset.from_list(rows(6)).map(lambda row: {"n": row["n"] if unhashable else 0})

    build(output_dir="b", data=mapped(), max_steps=2).train(checkpoint_dir="b/ck")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        build(output_dir="b", data=mapped()).load_checkpoint("b/ck")


def test_settings_of_the_algorithm_stay_those_of_the_trainer():
    trainer = build(MAREINFORCETrainer, args=MAREINFORCEConfig(max_new_tokens=4, max_steps=1, dtype="float32"))
    trainer.train(checkpoint_dir="ck")
    with pytest.raises(CheckpointError, match="is of MAREINFORCETrainer"):
        build().load_checkpoint("ck")


# ---- references ----


def test_references_are_those_of_the_start():
    changes = {"reference_kl_enabled": True}
    interrupted(build(output_dir="b", **changes), "gradients", 4, "b/ck")
    # The models that the user gives now are others, as if trained on elsewhere.
    again = build(output_dir="b", seeds=(4, 5), **changes)
    again.train(resume_from_checkpoint="b/ck", checkpoint_dir="b/ck")
    undisturbed = whole(**changes)
    assert_same_run(undisturbed, again)
    for one, other in zip(undisturbed.references.values(), again.references.values()):
        assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters()))


def test_a_named_reference_that_has_changed_is_refused(tmp_path, tiny):
    name = str(tmp_path / "model")
    shutil.copytree(tiny, name)

    def build_named(**changes):
        args = MAGRPOConfig(
            max_new_tokens=4, max_steps=1, reference_kl_enabled=True, dtype="float32", output_dir="b", **changes
        )
        return MAGRPOTrainer(agent_model=name, train_dataset=rows(6), reward_func=reward, args=args)

    build_named().train(checkpoint_dir="b/ck")
    assert not Path("b/ck/references").exists()
    build_named().load_checkpoint("b/ck")
    shutil.rmtree(name)
    embedded.build_tiny(name, seed=3)
    other = build_named()
    before = state_of(other)
    with pytest.raises(CheckpointError, match=r"reference of agent_0 .*model.* is not what"):
        other.load_checkpoint("b/ck")
    assert all(torch.equal(before[name], tensor) for name, tensor in state_of(other).items())


# ---- late in a run ----


@pytest.mark.parametrize("data", ["list", "stream"])
def test_step_5000_is_there_in_seconds_and_no_reward_is_called(data):
    many = rows(30_000)
    calls = []

    def counted(first, second):
        calls.append(len(first))
        return reward(first, second)

    def build_late():
        changes = {"data": many if data == "list" else Stream(many), "shuffle": data == "list", "reward_func": counted}
        return build(output_dir="b", max_steps=5001, num_train_epochs=1, eval_interval=0, **changes)

    trainer = build_late()
    trainer.step = trainer.rollout = 5000
    trainer.env_step, trainer.position = 30_000, 10_000
    trainer.save_checkpoint("b/ck")
    again = build_late()
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*cannot be compared")
        again.load_checkpoint("b/ck")
    assert calls == []
    again.train()
    assert time.perf_counter() - started < 10
    assert again.step == 5001
    assert calls == [3, 3]  # the next step's, of two rows
    expected = again.rows.order(0)[10_000:10_002] if data == "list" else [10_000, 10_001]
    assert {line["row"] for line in lines_of("b/run", "completions")} == set(expected)


def test_a_finished_run_has_nothing_left_and_says_so():
    build(output_dir="b").train(checkpoint_dir="b/ck")
    again = build(output_dir="b")
    again.train(resume_from_checkpoint="b/ck", checkpoint_dir="b/ck")
    assert "nothing is left to do: num_train_epochs=2, max_steps=6" in Path("b/run/log.txt").read_text()
    assert len(checkpoint.complete(Path("b/ck"))) == 2
    assert_same_run(whole(), again)


def test_half_a_stateful_callback_is_refused():
    class Half:
        def __call__(self, first, second):
            return reward(first, second)

        def state_dict(self):
            return {}

    with pytest.raises(ValueError, match=re.escape("reward_0 has one of state_dict and load_state_dict")):
        build(reward_func=Half())
    with pytest.raises(ValueError, match="reward_0 has a state_dict, but with reward_timeout"):
        build(reward_func=Noisy(), reward_timeout=10.0)


@pytest.mark.full
def test_kill_9_at_random_moments(tmp_path):
    """TORTURE_KILLS=20 is the long form: `python -m tests.torture` prints what happens."""
    kills = int(os.environ.get("TORTURE_KILLS", "3"))
    assert len(torture(tmp_path / "torture", kills, seed=1)) == kills
