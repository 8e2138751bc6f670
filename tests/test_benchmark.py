"""The benchmark's own arithmetic, and one small job of ours."""

import json
import subprocess
import sys
from pathlib import Path

import floor
import pytest
import speed
import torch
from clock import RewardClock
from torch import nn

ROOT = Path(__file__).parent.parent


def test_the_floor_is_operations_over_rate_and_passes_over_the_weights():
    found = floor.floor_of(parameters=10, trained_tokens=100, prompt_tokens=50, decode_steps=8, rate=1000.0, step=0.25)
    assert found.learn == (6 * 10 * 100 + 2 * 10 * 50) / 1000.0 == 7.0
    assert found.decode == 2.0
    assert found.total == 9.0


def test_rates_are_measured():
    assert floor.matmul_rate(torch.float32, 64) > 0
    small, large = nn.Linear(64, 64), nn.Linear(1024, 1024)
    assert floor.decode_step_seconds(large, 4, torch.float32) > floor.decode_step_seconds(small, 4, torch.float32)


def test_nodes_and_answers_of_an_update():
    workload = {"agents": 2, "prompts": 4, "samples": 3, "turns": 2}
    assert speed.nodes_and_answers(workload) == (4 * (1 + 3), 4 * 4 * 3)
    assert speed.nodes_and_answers({**workload, "joint_mode": "cross"}) == (4 * (1 + 9), 4 * 10 * 9)


def test_cycles_begin_with_the_first_reward_call_of_an_update():
    """An update of four answers, rewarded in calls of one or two."""
    clock = RewardClock()
    clock.calls = [(0.0, 2), (1.0, 2), (5.0, 1), (5.5, 1), (6.0, 2), (9.0, 4)]
    assert clock.cycles(4) == [5.0, 4.0]


def test_the_reward_of_the_clock():
    clock = RewardClock()
    assert clock(["aaaa", "aaaa"], ["b" * 10, "b" * 4]) == pytest.approx([1.0, 2.718281828**-1])
    assert clock(["a" * 50]) == [0.5]


def test_exponents_are_fitted():
    assert speed.exponent([1, 2, 4, 8], [3, 12, 48, 192]) == pytest.approx(2.0)


@pytest.mark.full
def test_the_benchmark_runs_without_peers(tmp_path):
    """What takes longest, growth, on its smallest updates."""
    workload = {**speed.SMALL, "tokens": 4, "prompts": 2, "samples": 2}
    result = speed.run_job("ours", sys.executable, workload, updates=2)
    assert len(result["cycles"]) == 2
    assert result["cycle"] > 0
    assert len(result["rewards"]) == 3 * 4
    command = [
        sys.executable,
        str(ROOT / "benchmarks/speed.py"),
        "--only",
        "small",
        "--no-peers",
        "--out",
        str(tmp_path),
    ]
    subprocess.run(command, check=True, cwd=tmp_path, env={"PATH": "", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)})
    assert json.loads((tmp_path / "speed.json").read_text())["threads"] >= 1
