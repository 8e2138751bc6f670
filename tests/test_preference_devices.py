"""Preference trainers in one process on several devices: reward model, critics, references and comparators apart."""

import pytest
import torch
from preference_team import build
from stopping import assert_same_run

from comlrl.checkpoint import model_tensors
from comlrl.trainers.preference import MADPOTrainer, MARLHFIterTrainer

LEARNED = {"reward_model_name": "tiny", "critic_model_name": "tiny", "reward_learning_rate": 1e-3, "max_steps": 4,
           "reward_train_batch_size": 4, "num_generations": 3, "train_batch_size": None,
           "num_iterations": 2, "num_train_epochs": 1, "rl_algorithm": "iac"}  # fmt: skip
AGENTS = {"parallel_training": "mp", "agent_devices": ["cpu", "cpu:0"]}  # two by name


def test_madpo_with_references_on_other_devices():
    serial, apart = build(), build(**AGENTS, reference_devices=["cpu:0", "cpu"])
    for trainer in (serial, apart):
        trainer.train()
    assert_same_run(serial, apart)
    assert serial.pairs == apart.pairs
    apart.close()


def test_marlhf_with_all_other_models_on_other_devices():
    serial = build(MARLHFIterTrainer, **LEARNED, comparator_policy="current")
    devices = {"critic_devices": ["cpu:0", "cpu"], "reward_model_device": "cpu:0", "comparator_devices": "cpu:0"}
    apart = build(MARLHFIterTrainer, **LEARNED, **AGENTS, **devices, comparator_policy="current_copy")
    for trainer in (serial, apart):
        trainer.train()
    assert_same_run(serial, apart)
    assert apart.comparator.loads == 2 * 2  # a copy of each agent in each iteration
    assert [critic.device for critic in apart.critics] == [torch.device("cpu", 0), torch.device("cpu")]
    assert apart.reward_agent.device == torch.device("cpu", 0)
    for one, other in zip((*serial.critics, serial.reward_agent), (*apart.critics, apart.reward_agent)):
        tensors = model_tensors(other.trained)
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in model_tensors(one.trained).items())
    apart.close()


def test_the_devices_of_every_model_are_checked():
    for key in ("reference_devices", "agent_devices"):
        with pytest.raises(ValueError, match=f"{key}='cuda:7'"):
            build(MADPOTrainer, **{key: "cuda:7"})
