"""The profile in the metrics: shares of time, tokens and operations a second."""

import time

import pytest
import torch

from comlrl.profile import PARTS, Work, agent_metrics, model_operations, model_sizes, peak_rate, shares
from comlrl.tracking import read_metrics
from comlrl.trainers import MAGRPOConfig, MAGRPOTrainer


def test_shares_add_up_to_one_and_idle_is_the_rest():
    found = shares({"time/generate": 2.0, "time/learn": 1.0, "time/save": 0.5, "other": 9.0}, wall=5.0)
    assert found["time/share/generate"] == 0.4
    assert found["time/share/learn"] == 0.2
    assert found["time/share/idle"] == pytest.approx(0.3)
    assert sum(found.values()) == pytest.approx(1.0)
    assert shares({"time/learn": 5.1}, wall=5.0)["time/share/idle"] == 0.0


def test_operations_of_a_model_are_six_a_weight_and_token_when_all_is_trained():
    model = torch.nn.Sequential(torch.nn.Linear(10, 20, bias=False), torch.nn.Linear(20, 5, bias=False))
    assert model_sizes(model) == (300, 300)
    assert model_operations(300, 300, 7, learning=True) == 6 * 300 * 7
    assert model_operations(300, 300, 7, learning=False) == 2 * 300 * 7
    model[0].requires_grad_(False)  # as under an adapter: its activations' gradient still goes through
    assert model_operations(*model_sizes(model), 7, learning=True) == (4 * 300 + 2 * 100) * 7


def test_work_of_several_processes_is_one_rate():
    one, other = Work(peak=100.0), Work(peak=300.0)
    one.add("generate", 1.0, 10, 40.0)
    other.add("generate", 2.0, 20, 60.0)
    other.add("learn", 1.0, 50, 100.0)
    found = agent_metrics([{0: one}, {0: other}], 1, wall=2.0)
    assert found["agent_0/time/generate"] == 3.0
    assert found["agent_0/time/learn"] == 1.0
    assert found["agent_0/time/reference"] == 0.0
    assert found["agent_0/time/tokens_per_second"] == 80 / 4
    assert found["agent_0/time/flops_share"] == 200 / 400
    assert found["time/tokens_per_second"] == 30 / 2
    assert agent_metrics([{0: Work()}], 1, wall=1.0)["agent_0/time/flops_share"] == 0.0


def test_the_peak_is_measured_once():
    rate = peak_rate(torch.device("cpu"), torch.float32)
    assert rate > 1e8
    started = time.perf_counter()
    assert peak_rate(torch.device("cpu"), torch.float32) == rate
    assert time.perf_counter() - started < 0.001


def test_every_step_says_where_its_time_went(tmp_path):
    def slow(first, second):
        time.sleep(0.2)
        return [float(len(text)) for text in first]

    trainer = MAGRPOTrainer(
        agent_model="tiny",
        num_agents=2,
        train_dataset=[{"prompt": "ab"}, {"prompt": "c"}],
        reward_func=slow,
        args=MAGRPOConfig(
            max_new_tokens=8,
            num_generations=2,
            rollout_buffer_size=1,
            num_train_epochs=1,
            reference_kl_enabled=True,
            checkpoint_steps=1,
            eval_interval=0,
            output_dir=str(tmp_path),
        ),
    )
    trainer.train(checkpoint_dir=str(tmp_path / "checkpoints"))
    lines = [line for line in read_metrics(trainer.run.folder) if line["kind"] == "train"]
    assert len(lines) == 2
    for line in lines:
        parts = {part: line[f"time/share/{part}"] for part in (*PARTS, "idle")}
        assert sum(parts.values()) == pytest.approx(1.0, abs=1e-3)
        assert all(share >= 0 for share in parts.values())
        assert parts["reward"] * line["time/step"] == pytest.approx(line["time/reward"])
        assert line["time/reward"] >= 0.2
        assert min(parts["generate"], parts["learn"], parts["reference"]) > 0
        for agent in (0, 1):
            assert line[f"agent_{agent}/time/generate"] > 0
            assert line[f"agent_{agent}/time/learn"] > 0
            assert line[f"agent_{agent}/time/reference"] > 0
            assert 0 < line[f"agent_{agent}/time/flops_share"] < 2
        assert line["time/tokens_per_second"] > 0
    assert lines[1]["time/share/save"] > 0
