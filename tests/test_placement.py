"""Agents on devices of their own: at the same time, with the same results."""

import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from stopping import assert_same_run, build, lines_of, rows, state_of

from comlrl.agents import load_model
from comlrl.batches import share
from comlrl.engine import Engine
from comlrl.loading import resolve_devices
from comlrl.placement import AgentPool, Group
from comlrl.planning import check_memory
from comlrl.processes import World
from comlrl.trainers import (
    MAACConfig,
    MAACTrainer,
    MADPOIterConfig,
    MADPOIterTrainer,
    MAGRPOConfig,
    MAGRPOTrainer,
    MARLHFConfig,
    MARLHFTrainer,
)
from comlrl.zero import read_config

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


def agent_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith("agent")}


def test_threads_are_made_once_and_end_with_the_run():
    before = agent_threads()
    trainer = build(turns=2, max_steps=3, parallel_training="mp", agent_devices=["cpu", "cpu:0"])
    seen = []
    learn = trainer.learn

    def watched(*args):
        seen.append(agent_threads() - before)
        return learn(*args)

    trainer.learn = watched
    trainer.train()
    assert len(seen) == 2 * 3
    assert all(len(threads) == 2 and threads == seen[0] for threads in seen)
    trainer.close()
    assert agent_threads() <= before


def test_every_device_of_a_list_is_used_also_without_mp():
    trainer = build(agent_devices=["cpu", "cpu:0"])
    assert [agent.device for agent in trainer.agents] == [torch.device("cpu"), torch.device("cpu", 0)]


@pytest.mark.parametrize(("gpus", "expected"), [(0, "cpu cpu cpu"), (1, "0 0 0"), (2, "0 1 0"), (4, "0 1 2")])
def test_auto_takes_gpus_in_turn(monkeypatch, gpus, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    names = [name if name == "cpu" else f"cuda:{name}" for name in expected.split()]
    assert resolve_devices("auto", 3) == names
    if gpus == 2:  # a process of a launcher uses its own
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert resolve_devices(None, 3) == ["cuda:1"] * 3


# ---- shares ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 10])
def test_every_item_is_in_one_share_and_lockstep_gives_all_ranks_as_many(size, count):
    items = [Piece([1] * (3 + i), [2] * (1 + 5 * i % 7)) for i in range(count)]
    groups = [Group(range(size), rank) for rank in range(size)]
    assert [item for group in groups for item in group.share(items)] == items
    sizes = [len(group.share(items)) for group in groups]
    assert max(sizes) - min(sizes) <= 1
    assert Group(range(size), size).share(items) == []  # another rank's group
    plain = [share(items, group, 20) for group in groups]
    together = [share(items, group, 20, lockstep=True) for group in groups]
    assert len({len(parts) for parts in together}) == 1
    for parts, others in zip(plain, together):
        counted = [part for part in others if part.counts]
        assert [part.items for part in counted] == [part.items for part in parts]
        assert all(len(part.items) == 1 for part in others if not part.counts)
    seen = [item for parts in together for part in parts if part.counts for item in part.items]
    assert sorted(map(id, seen)) == sorted(map(id, items))


@dataclass
class Piece:
    prompt_ids: list[int]
    token_ids: list[int]


def test_the_last_minibatch_is_learned_from_and_leaves_no_gradient():
    """10 nodes in minibatches of 4: three steps, each of its own nodes' gradient alone, also in the next epoch."""
    norms = []
    for budget in (10**6, 12):  # one micro-batch, and one a sample
        trainer = build(
            data=rows(10),
            rollout_buffer_size=10,
            train_batch_size=4,
            max_steps=None,
            eval_interval=0,
            micro_batch_tokens=budget,
            agent_learning_rate=1e-3,
        )
        chunks = []
        take_step = trainer.take_step

        def counted(stop, trainer=trainer, chunks=chunks, take_step=take_step):
            chunks.append(len(trainer.chunks[0]))
            assert all(p.grad is None for engine in trainer.engines.values() for p in engine.parameters)
            take_step(stop)

        trainer.take_step = counted
        trainer.train()
        assert trainer.step == 6
        assert chunks == [4, 4, 2] * 2
        assert all(engine.counters()["optimizer_steps"] == 6 for engine in trainer.engines.values())
        assert all(p.grad is None for engine in trainer.engines.values() for p in engine.parameters)
        norms.append([line["agent_0/grad_norm"] for line in lines_of(trainer.run.folder, "metrics")])
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert len(norms[0]) == 6


def test_an_agent_without_advantage_stays_bit_for_bit_while_the_other_moves():
    """In `cross` every credit of agent 1 is the same mean when the reward reads agent 0 only."""
    trainer = build(
        reward_func=lambda first, second: [float(len(text)) for text in first],
        joint_mode="cross",
        weight_decay=0.0,
        eval_interval=0,
    )
    before = state_of(trainer)
    trainer.train()
    assert all(torch.equal(before[f"1.{n}"], p) for n, p in trainer.agents[1].model.named_parameters())
    assert any(not torch.equal(before[f"0.{n}"], p) for n, p in trainer.agents[0].model.named_parameters())


# ---- the plan -------------------------------------------------------------------------------------------------------


class Many(World):
    """As if four processes had been started; nothing is sent."""

    def __init__(self):
        super().__init__()
        self.size = 4


def planned(kind, args, **arguments):
    """A trainer that has loaded nothing."""
    return kind(
        agents=["tiny", "tiny"],
        reward_func=lambda a, b: [0.0] * len(a),
        train_dataset=[{"prompt": "x"}],
        args=args,
        dry_run=True,
        **arguments,
    )


def in_four_processes(trainer, monkeypatch, placement):
    trainer.world = Many()
    trainer.args.placement = placement
    monkeypatch.setattr(torch.distributed, "new_group", lambda ranks: ranks)
    monkeypatch.setattr("comlrl.planning.gigabytes", lambda count: f"{count:.0f} bytes")


def bytes_of(text):
    """Of a plan: model -> (its ranks, its bytes by what they are for)."""
    found = {}
    for name, ranks, said in re.findall(
        r"^  ([\w ]+): tiny.*, ranks ([\d, ]+), computes.*\n    a process: (.*)$", text, re.M
    ):
        sizes = {key: int(count) for key, count in re.findall(r"([A-Za-z][A-Za-z ]*) (\d+) bytes", said)}
        found[name] = ([int(rank) for rank in ranks.split(",")], sizes)
    return found


@pytest.mark.parametrize(
    ("config", "parts"),  # of the bytes of the weights: weights, gradients, moments, a copy for sampling
    [
        (None, (1, 1, 2, 0)),
        ("zero1", (1.5, 1, 1, 0)),
        ("zero2", (1.5, 0.5, 1, 0)),
        ("zero3", (1, 0.5, 1, 1)),
        ("zero2_offload", (1, 0.5, 0, 0)),
        ("zero3_offload", (0, 0.5, 0, 1)),
    ],
)
def test_the_plan_says_who_holds_what(monkeypatch, config, parts):
    """Groups of two ranks; rank 3 has no model, and the plan says so."""
    trainer = planned(MAGRPOTrainer, MAGRPOConfig(dtype="float32", eval_interval=0))
    in_four_processes(trainer, monkeypatch, {"agents": [[0, 1], [1, 2]]})
    trainer.zero = read_config(str(ROOT / "ds_configs" / f"{config}.json")) if config else None
    text = trainer.plan()
    weight = 4 * sum(p.numel() for p in load_model("tiny").parameters())
    names = ("weights", "gradients", "AdamW", "sampling copy")
    expected = ", ".join(f"{name} {part * weight:.0f} bytes" for name, part in zip(names, parts))
    assert text.count(f"a process: {expected}, KV cache about ") == 2
    assert "agent_0: tiny" in text
    assert "ranks 0, 1, computes in float32" in text
    assert "ranks 1, 2, computes in float32" in text
    held = [int(n) for n in re.findall(r"rank \d, cpu: (\d+) bytes", text)]
    assert held[1] == 2 * held[0] == 2 * held[2]
    assert "rank 3: no model" in text
    assert "rank 2: no model" not in text


WEIGHT = 4 * sum(p.numel() for p in load_model("tiny").parameters())
WHOLE = {"weights": WEIGHT, "gradients": WEIGHT, "AdamW": 2 * WEIGHT}


def test_the_plan_counts_references_and_critics(monkeypatch):
    args = MAACConfig(dtype="float32", eval_interval=0, num_turns=1, reference_kl_enabled=True)
    trainer = planned(MAACTrainer, args, critic_model="tiny")
    in_four_processes(trainer, monkeypatch, {"agents": [[0], [1]], "references": [[3], [1]], "critics": [[2, 3]]})
    text = trainer.plan()
    found = bytes_of(text)
    assert found["critic"] == ([2, 3], WHOLE)
    assert found["reference of agent_0"] == ([3], {"weights": WEIGHT})
    assert found["reference of agent_1"] == ([1], {"weights": WEIGHT})
    held = dict(re.findall(r"rank (\d), cpu: (\d+) bytes", text))
    cache = found["agent_0"][1]["KV cache about"]
    expected = {"0": 4 * WEIGHT + cache, "1": 5 * WEIGHT + cache, "2": 4 * WEIGHT, "3": 5 * WEIGHT}
    assert {rank: int(count) for rank, count in held.items()} == expected
    trainer.zero = read_config(str(ROOT / "ds_configs/zero3.json"))
    found = bytes_of(trainer.plan())
    assert found["critic"][1] == {"weights": WEIGHT, "gradients": WEIGHT // 2, "AdamW": WEIGHT}  # and no copy
    trainer.args.placement["references"] = [[2, 3], [1]]
    assert bytes_of(trainer.plan())["reference of agent_0"] == ([2, 3], {"weights": WEIGHT // 2})


@pytest.mark.parametrize("frozen", [False, True])
def test_the_plan_counts_the_reward_model(monkeypatch, frozen):
    args = MARLHFConfig(dtype="float32", eval_interval=0, num_turns=1, reward_freeze_backbone=frozen)
    trainer = planned(MARLHFTrainer, args)
    in_four_processes(trainer, monkeypatch, {"agents": [[0], [1]], "reward_model": [[2]]})
    ranks, sizes = bytes_of(trainer.plan())["reward_model"]
    assert ranks == [2]
    assert sizes == ({**WHOLE, "gradients": 0, "AdamW": 0} if frozen else WHOLE)


@pytest.mark.parametrize(
    ("settings", "placement", "expected"),  # ranks of each comparator's model
    [
        ({"comparator_policy": "current"}, {}, {}),
        ({"comparator_policy": "current_copy"}, {}, {}),  # the agent itself
        ({"comparator_policy": "current_copy"}, {"comparators": [[2], [3]]}, {0: [2], 1: [3]}),
        ({"comparator_policy": "history"}, {}, {0: [0], 1: [1]}),
        ({"comparator_policy": "history", "comparator_generation_mode": "centralized"}, {}, {0: [0]}),
        ({"comparator_policy": "model", "comparator_model_name": "tiny"}, {}, {0: [0, 1]}),  # loaded once
        ({"comparator_policy": "model", "comparator_agents": ["tiny", "tiny"]}, {"comparators": [[3], [3]]}, {0: [3]}),
    ],
)
def test_the_plan_counts_comparators(monkeypatch, settings, placement, expected):
    trainer = planned(MADPOIterTrainer, MADPOIterConfig(dtype="float32", eval_interval=0, num_turns=1, **settings))
    in_four_processes(trainer, monkeypatch, {"agents": [[0], [1]], **placement})
    trainer.zero = read_config(str(ROOT / "ds_configs/zero3.json"))
    found = {name: entry for name, entry in bytes_of(trainer.plan()).items() if name.startswith("comparator")}
    assert {int(name[-1]): ranks for name, (ranks, _) in found.items()} == expected
    for _, sizes in found.values():  # whole, whatever ZeRO divides
        assert sizes.keys() == {"weights", "KV cache about"}
        assert sizes["weights"] == WEIGHT


def test_what_cannot_fit_is_refused(monkeypatch):
    """All agents, references and caches count."""
    trainer = planned(MAGRPOTrainer, MAGRPOConfig(dtype="float32", eval_interval=0, reference_kl_enabled=True))
    needed = sum(sum(sizes.values()) for _, sizes in plan_bytes(trainer, monkeypatch).values())
    for memory, fits in ((needed, True), (needed - 4096, False)):
        with monkeypatch.context() as patch:
            patch.setattr("os.sysconf", lambda name, memory=memory: 1 if name == "SC_PAGE_SIZE" else memory)
            if fits:
                trainer.plan()
            else:
                with pytest.raises(ValueError, match=f"the models need {needed} bytes on this machine's CPU"):
                    trainer.plan()


def plan_bytes(trainer, monkeypatch):
    monkeypatch.setattr("comlrl.planning.gigabytes", lambda count: f"{count:.0f} bytes")
    return bytes_of(trainer.plan().replace(", cpu, computes", ", ranks 0, computes"))


def test_processes_of_one_machine_share_its_memory_and_each_has_its_own_gpu(monkeypatch):
    monkeypatch.setattr("os.sysconf", lambda name: 1 if name == "SC_PAGE_SIZE" else 100)
    needed = {(rank, "cpu"): 40.0 for rank in range(4)}
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # two machines
    check_memory(needed)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="take smaller models, fewer processes, or DeepSpeed ZeRO"):
        check_memory(needed)
    memory = SimpleNamespace(total_memory=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)
    check_memory({(0, "cuda:0"): 90.0, (1, "cuda:0"): 90.0})  # each process names its own device so
    with pytest.raises(ValueError, match=r"rank 1 needs .* on cuda:0, which has .*ds_configs/zero3.json"):
        check_memory({(0, "cuda:0"): 90.0, (1, "cuda:0"): 101.0})


def test_only_agents_have_a_copy_to_sample_from_under_zero_3(monkeypatch):
    """DeepSpeed itself is not needed to see it."""
    trainer = planned(MAACTrainer, MAACConfig(dtype="float32", eval_interval=0, num_turns=1), critic_model="tiny")
    trainer.zero = read_config(str(ROOT / "ds_configs/zero3.json"))
    monkeypatch.setattr("comlrl.trainers.base.ZeroEngine", lambda *given: Engine(*given[:4]))
    trainer.load_models()
    assert all(agent.sampler is not agent.model for agent in trainer.agents)
    assert all(critic.sampler is critic.model for critic in trainer.critics)


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
