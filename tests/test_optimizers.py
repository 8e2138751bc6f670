"""AdamW with moments in 8 bits (torchao), run op by op: compiling its step takes a minute on a CPU."""

import sys
from pathlib import Path

import pytest
import torch
from stopping import assert_same_run, build, interrupted, state_of
from tiny_team import build_model, build_tokenizer

from comlrl.engine import Engine
from comlrl.loading import Member
from comlrl.optimizers import OptimizerSettings, read_moments
from comlrl.placement import ALONE
from comlrl.planning import Planned
from comlrl.trainers import MAGRPOTrainer

ROOT = Path(__file__).parent.parent


class Wide(MAGRPOTrainer):
    """Of models whose layers have 4,096 weights or more: torchao keeps smaller ones in fp32."""

    def __init__(self, agents, tokenizer, **others):
        wide = [build_model(8, seed, width=64) for seed in (2, 9)]
        super().__init__(agents=wide, tokenizer=build_tokenizer("abcdefg"), **others)


@pytest.fixture
def eager():
    with torch.compiler.set_stance("force_eager"):
        yield


def test_a_stopped_run_goes_on_bit_for_bit(eager):
    changes = {"optimizer": "adamw_8bit", "lr_schedule": "linear"}
    whole = build(Wide, output_dir="a", **changes)
    whole.train()
    interrupted(build(Wide, output_dir="b", **changes), "gradients", 4, "b/ck")
    again = build(Wide, output_dir="b", **changes)
    again.train(resume_from_checkpoint="b/ck", checkpoint_dir="b/ck")
    assert_same_run(whole, again)


@pytest.mark.parametrize(("before", "after"), [("adamw", "adamw_8bit"), ("adamw_8bit", "adamw")])
def test_a_run_goes_on_with_the_other_optimizer(eager, before, after):
    first = interrupted(build(Wide, output_dir="b", optimizer=before), "gradients", 4, "b/ck")
    again = build(Wide, output_dir="b", optimizer=after)
    again.load_checkpoint("b/ck")
    for name, tensor in state_of(first).items():
        if "_scale" not in name:
            assert torch.allclose(tensor, state_of(again)[name], atol=0.02 * tensor.abs().max()), name
    again.train(checkpoint_dir="b/ck")
    assert again.step == 6


def test_moments_in_8_bits_are_near_those_in_32(eager):
    """The first step moves every weight by about the learning rate; later the blocks' rounding shows."""
    start = build_model(8, 2, width=64)
    moved, moments = {}, {}
    for name in ("adamw", "adamw_8bit"):
        model = build_model(8, 2, width=64)
        engine = Engine(model, OptimizerSettings(1e-2, name=name, max_grad_norm=None), total_steps=None)
        for step in range(3):
            torch.manual_seed(step)
            for parameter in engine.parameters:
                parameter.grad = torch.randn_like(parameter)
            engine.step(0.0)
        layer = "model.layers.0.self_attn.q_proj.weight"
        moved[name] = model.get_parameter(layer) - start.get_parameter(layer)
        moments[name] = read_moments(engine.optimizer, model.get_parameter(layer))["exp_avg"]
    assert not torch.equal(moments["adamw_8bit"], moments["adamw"])  # they are rounded
    assert torch.allclose(moments["adamw_8bit"], moments["adamw"], atol=0.02)
    far = (moved["adamw_8bit"] - moved["adamw"]).norm() / moved["adamw"].norm()
    assert 0 < far < 0.05


def test_moments_leave_the_device_with_their_model(eager):
    staying, leaving = (build(Wide, optimizer="adamw_8bit", offload_idle=idle, max_steps=3) for idle in (False, True))
    for trainer in (staying, leaving):
        trainer.train()
    assert_same_run(staying, leaving)


def test_the_plan_counts_two_bytes_a_parameter():
    member = Member("agent_0", "tiny", "tiny", torch.device("cpu"), torch.float32, {})
    sizes = [Planned(member, ALONE).sizes(1000, None, name) for name in ("adamw", "adamw_8bit")]
    assert [size["AdamW"] for size in sizes] == [8000, 2000]


def test_where_it_cannot_be_had(monkeypatch):
    with pytest.raises(ValueError, match="optimizer='adam8': must be one of adamw, adamw_8bit"):
        build(optimizer="adam8")
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setattr("comlrl.optimizers.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="optimizer='adamw_8bit': the package torchao is not installed"):
        build(optimizer="adamw_8bit")
    with pytest.raises(ValueError, match="optimizer='adamw_8bit': DeepSpeed divides or offloads"):
        build(optimizer="adamw_8bit", deepspeed_config=str(ROOT / "ds_configs/zero2.json"))
