"""Agents on devices of their own: at the same time, with the same results."""

import threading
import time
from pathlib import Path

import pytest
import torch
from stopping import assert_same_run, build

from comlrl.placement import AgentPool

ROOT = Path(__file__).resolve().parent.parent

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_agents_on_devices_of_their_own_work_at_the_same_time():
    devices = [torch.device("cpu"), torch.device("cpu", 0)]  # two by name
    pool = AgentPool("mp", devices)
    meeting = threading.Barrier(2, timeout=20)

    def work(index):
        meeting.wait()  # only together
        return index

    assert pool.map(work, 2) == [0, 1]
    ended = []

    def fail(index):
        if index == 0:
            raise OSError("first")
        time.sleep(0.05)
        ended.append(index)

    with pytest.raises(OSError, match="first"):
        pool.map(fail, 2)
    assert ended == [1]
    for alone in (AgentPool("none", devices), AgentPool("mp", devices[:1] * 2)):
        assert alone.map(lambda index: threading.current_thread(), 2) == [threading.main_thread()] * 2


def test_results_of_mp_are_those_of_one_after_the_other():
    settings = {"turns": 2, "reference_kl_enabled": True, "epochs_per_rollout": 2, "max_steps": 4}
    serial = build(**settings)
    parallel = build(**settings, parallel_training="mp", agent_devices=["cpu", "cpu:0"])
    assert serial.pool.executor is None
    assert parallel.pool.executor is not None
    for trainer in (serial, parallel):
        trainer.train()
    assert_same_run(serial, parallel)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=needs_gpu)])
def test_idle_models_leave_the_device_and_nothing_else_changes(device):
    settings = {"turns": 2, "reference_kl_enabled": True, "epochs_per_rollout": 2, "max_steps": 4}
    staying, leaving = (build(**settings, agent_devices=device, offload_idle=idle) for idle in (False, True))
    for trainer in (staying, leaving):
        trainer.train()
    assert_same_run(staying, leaving)
    models = [*(agent.model for agent in leaving.agents), *(frozen.model for frozen in leaving.references.values())]
    tensors = [parameter for model in models for parameter in model.parameters()]
    tensors += [
        value for engine in leaving.engines.values() for s in engine.optimizer.state.values() for value in s.values()
    ]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}


def test_offload_by_two_hands_is_refused():
    with pytest.raises(ValueError, match="DeepSpeed has its own offload"):
        build(offload_idle=True, deepspeed_config=str(ROOT / "ds_configs" / "zero2.json"))
