"""Runs that are stopped in the middle and resumed, for the tests of checkpoints."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from tiny_team import build_model, build_tokenizer

from comlrl import checkpoint
from comlrl.trainers import MAGRPOConfig, MAGRPOTrainer

LETTERS = "abcdefg"


def rows(count, prefix="x"):
    return [{"prompt": "abcdefg"[i % 7] * (1 + i % 3), "n": i} for i in range(count)]


def reward(first, second, *others):
    """Other for every pair of texts, so that nothing is ever exactly zero."""

    def score(a, b):
        return sum(7 * ord(c) for c in a) % 11 - sum(3 * ord(c) for c in b) % 5 + 0.25 * len(a)

    return [score(a, b) for a, b in zip(first, second)]


def feedback(agent_completions, num_agents):
    return [f"{agent_completions[(i + 1) % num_agents][:3]}{'a' * (i + 1)}" for i in range(num_agents)]


def settings(**changes):
    defaults = {
        "run_name": "run",
        "dtype": "float32",
        "num_generations": 3,
        "max_new_tokens": 4,
        "rollout_buffer_size": 2,
        "agent_learning_rate": 1e-2,
        "num_train_epochs": 2,
        "max_steps": 6,
        "eval_interval": 2,
        "logging_steps": 1,
    }
    return MAGRPOConfig(**{**defaults, **changes})


def build(kind=MAGRPOTrainer, data=None, reward_func=reward, args=None, seeds=(2, 9), **changes):
    """A fresh team: as a new process would make it."""
    turns = changes.pop("turns", 1)
    options = changes.pop("options", {})
    return kind(
        agents=[build_model(len(LETTERS) + 1, seed) for seed in seeds],
        tokenizer=build_tokenizer(LETTERS),
        train_dataset=rows(6) if data is None else data,
        eval_dataset=rows(2),
        reward_func=reward_func,
        external_transition=feedback if turns > 1 else None,
        args=args or settings(num_turns=turns, **changes),
        **options,
    )


def state_of(trainer):
    """Everything that two runs must agree on, as tensors and numbers."""
    tensors = {}
    for index, (agent, engine) in enumerate(zip(trainer.agents, trainer.engines.values())):
        named = {**checkpoint.model_tensors(agent.model), **engine.state_tensors()}
        tensors |= {f"{index}.{name}": tensor.detach().clone() for name, tensor in named.items()}
    return tensors


def lines_of(folder, name):
    """Lines of a record file without the times."""
    lines = [json.loads(line) for line in (Path(folder) / f"{name}.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "time" and "time/" not in k} for line in lines]


def assert_same_run(one, other):
    """Weights, moments, every metric and every completion, bit for bit."""
    first, second = state_of(one), state_of(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert [e.counters() for e in one.engines.values()] == [e.counters() for e in other.engines.values()]
    for name in ("metrics", "completions"):
        mine, theirs = lines_of(one.run.folder, name), lines_of(other.run.folder, name)
        assert len(mine) == len(theirs)
        for a, b in zip(mine, theirs):
            assert a == b


class Interrupt:
    """Sends a signal when it is called for the n-th time."""

    def __init__(self, at, number=signal.SIGTERM):
        self.at, self.number, self.calls = at, number, 0

    def __call__(self):
        self.calls += 1
        if self.calls == self.at:
            os.kill(os.getpid(), self.number)


def interrupted(trainer, method, at, folder, number=signal.SIGTERM, **train):
    """Trains until `method` of the trainer is called for the at-th time; the process would exit there."""
    interrupt, original = Interrupt(at, number), getattr(trainer, method)

    def wrapper(*args, **kwargs):
        interrupt()
        return original(*args, **kwargs)

    setattr(trainer, method, wrapper)
    with pytest.raises(SystemExit) as caught:
        trainer.train(checkpoint_dir=str(folder), **train)
    assert caught.value.code == 128 + number
    return trainer
