"""Checkpoint folders: whole or not there, verified, limited in number; and when they are written."""

import collections
import errno
import json
import os
import random
import shutil
import subprocess
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from stopping import build, lines_of, settings, state_of

from comlrl import checkpoint
from comlrl.checkpoint import CheckpointError, Contents, DiskFullError, Schedule
from comlrl.config import option
from comlrl.encoding import decode, encode
from comlrl.trainers import MAGRPOConfig, MAGRPOTrainer
from comlrl.utils import read_checkpoint_metadata


def contents(number):
    weights = {"a": torch.full((3, 2), float(number)), "b": torch.arange(number)}
    return Contents({"number": number}, {"agent_0/weights.safetensors": weights}, {"agent_0/config.json": b"{}"})


def number_in(folder):
    return checkpoint.read(folder).state["number"]


def test_what_is_read_is_what_was_written(tmp_path):
    folder = checkpoint.write(tmp_path / "checkpoint-3", contents(3))
    found = checkpoint.read(folder)
    assert found.state == {"number": 3}
    assert found.files == {"agent_0/config.json": b"{}"}
    assert torch.equal(found.tensors["agent_0/weights.safetensors"]["a"], torch.full((3, 2), 3.0))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def remove_marker(folder):
    (folder / "manifest.json").unlink()


def remove_state(folder):
    (folder / "state.json").unlink()


def flip_a_bit(folder):
    path = folder / "agent_0" / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)


def cut_the_end_off(folder):
    path = folder / "agent_0" / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def spoil_marker(folder):
    (folder / "manifest.json").write_bytes((folder / "manifest.json").read_bytes()[:-9])


DAMAGES = {
    remove_marker: "torn.*manifest",
    remove_state: "torn.*state.json is missing",
    flip_a_bit: "corrupted.*weights",
    cut_the_end_off: "corrupted.*weights",
    spoil_marker: "corrupted.*manifest",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, damage):
    for number in (9, 10):  # by number, not by name
        checkpoint.write(tmp_path / f"checkpoint-{number}", contents(number))
    damage(tmp_path / "checkpoint-10")
    with pytest.raises(CheckpointError, match=f"checkpoint-10.*{DAMAGES[damage]}"):
        checkpoint.verify(tmp_path / "checkpoint-10")
    with pytest.warns(UserWarning, match=f"checkpoint-10.*{DAMAGES[damage]}"):
        assert checkpoint.newest_good(tmp_path).name == "checkpoint-9"
    with pytest.warns(UserWarning, match="taking .*checkpoint-9 in its place"):
        assert checkpoint.find(tmp_path / "checkpoint-10").name == "checkpoint-9"
    shutil.rmtree(tmp_path / "checkpoint-9")
    with pytest.raises(CheckpointError, match="checkpoint-10"):
        checkpoint.find(tmp_path / "checkpoint-10")


def test_an_older_version_is_said_to_be_one(tmp_path):
    folder = checkpoint.write(tmp_path / "checkpoint-1", contents(1))
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "version": 1}))
    with pytest.raises(CheckpointError, match="version 1; this program reads version 2"):
        checkpoint.read(folder)


class Kill(BaseException):
    pass


def kill_at(monkeypatch, call):
    """The process dies at the call-th touch of the file system; returns how many touches there were."""
    touches = [0]

    def deadly(module, name):
        original = getattr(module, name)

        def wrapper(*args, **kwargs):
            touches[0] += 1
            if touches[0] == call:
                raise Kill
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, wrapper)

    for module, name in ((os, "fsync"), (shutil, "rmtree"), (Path, "rename"), (Path, "mkdir"), (Path, "write_text")):
        deadly(module, name)
    return touches


@pytest.mark.parametrize("limit", [1, 2, None])
def test_a_kill_at_any_point_of_writing_leaves_a_good_checkpoint(tmp_path, limit, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # takes time, and nothing is unplugged here
    call = 0
    while True:
        call += 1
        root = tmp_path / str(call)
        for number in (1, 2, 3):
            checkpoint.write(root / f"checkpoint-{number}", contents(number), limit)
        with monkeypatch.context() as patch:
            kill_at(patch, call)
            try:
                checkpoint.write(root / "checkpoint-4", contents(4), limit)
                break
            except Kill:
                pass
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it is not even in the way
            assert number_in(checkpoint.newest_good(root)) in (3, 4)
        before = number_in(checkpoint.newest_good(root))
        checkpoint.settle(root)
        assert number_in(checkpoint.newest_good(root)) == before
        assert all(path.name.startswith("checkpoint-") for path in root.iterdir())
        checkpoint.write(root / "checkpoint-5", contents(5), limit)
        assert number_in(checkpoint.newest_good(root)) == 5
        assert len(checkpoint.complete(root)) == (limit or len(checkpoint.complete(root)))
    assert call > 10


def test_a_kill_while_the_best_one_is_replaced_keeps_one(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    call = 0
    while True:
        call += 1
        root = tmp_path / str(call)
        checkpoint.write(root / "checkpoint-best", contents(1))
        with monkeypatch.context() as patch:
            kill_at(patch, call)
            try:
                checkpoint.write(root / "checkpoint-best", contents(2))
                break
            except Kill:
                pass
        checkpoint.settle(root)
        assert number_in(root / "checkpoint-best") in (1, 2)
    assert call > 10


@pytest.mark.parametrize("limit", [1, 2])
def test_there_are_never_more_than_the_limit_and_one_in_progress(tmp_path, limit, monkeypatch):
    seen = []
    original = os.fsync

    def look(descriptor):
        original(descriptor)
        others = [path.name for path in tmp_path.iterdir() if not path.name.startswith("checkpoint-")]
        seen.append((len(checkpoint.complete(tmp_path)), len(others)))

    monkeypatch.setattr(os, "fsync", look)
    for number in range(1, 7):
        checkpoint.write(tmp_path / f"checkpoint-{number}", contents(number), limit)
    assert max(seen) == (limit, 1)
    assert max(whole + others for whole, others in seen) == limit + 1
    assert [path.name for path in checkpoint.complete(tmp_path)] == [f"checkpoint-{7 - k}" for k in range(limit, 0, -1)]


# ---- the disk ----


@pytest.fixture(params=["tmpfs", "injected"])
def small_disk(request, tmp_path, monkeypatch):
    """fill(free bytes) -> nothing more than that fits into the folder `disk`."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if request.param == "tmpfs":
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
        try:
            subprocess.run(mount, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("needs the right to mount")

    def fill(free):
        if request.param == "tmpfs":
            ballast = disk / "ballast"
            ballast.write_bytes(bytes(shutil.disk_usage(disk).free - free))
            return

        def no_space(*args, **kwargs):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", no_space)

    yield disk, fill
    if request.param == "tmpfs":
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_is_a_clear_error_and_older_checkpoints_stay(small_disk):
    disk, fill = small_disk
    large = Contents({}, {"w.safetensors": {"w": torch.zeros(50_000)}}, {"x": b"x"})
    checkpoint.write(disk / "checkpoint-1", large, 1)
    fill(free=150_000)
    with pytest.raises(DiskFullError, match=r"no space for checkpoint .*checkpoint-2 \(0.19 MiB needed\)") as caught:
        checkpoint.write(disk / "checkpoint-2", large, 1)
    assert caught.value.errno == errno.ENOSPC
    assert {path.name for path in disk.iterdir()} - {"ballast"} == {"checkpoint-1"}
    checkpoint.verify(disk / "checkpoint-1")


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_training_on_a_full_disk_stops_or_goes_on_as_declared(small_disk, policy, capfd):
    disk, fill = small_disk

    class FullAfterStepTwo(MAGRPOTrainer):
        def apply(self, *arguments):
            super().apply(*arguments)
            if self.step == 2:
                fill(free=20_000)

    trainer = build(FullAfterStepTwo, checkpoint_steps=2, checkpoint_total_limit=1, checkpoint_full_disk=policy)
    if policy == "stop":
        with pytest.raises(DiskFullError, match="checkpoint_full_disk"):
            trainer.train(checkpoint_dir=str(disk), checkpoint_interval=100)
        assert trainer.step == 2
    else:
        trainer.train(checkpoint_dir=str(disk), checkpoint_interval=100)
        assert trainer.step == 6
        assert (trainer.run.folder / "log.txt").read_text().count("checkpoint not saved: ") == 3
    assert "no space for checkpoint" in (trainer.run.folder / "log.txt").read_text()
    assert checkpoint.complete(disk) == []
    assert not list(disk.glob(".*"))


def test_the_last_good_checkpoint_stays_on_a_full_disk(small_disk):
    disk, fill = small_disk

    class FullAfterStepThree(MAGRPOTrainer):
        def apply(self, *arguments):
            super().apply(*arguments)
            if self.step == 3:
                fill(free=20_000)

    trainer = build(FullAfterStepThree, checkpoint_steps=2, checkpoint_total_limit=1)
    with pytest.raises(DiskFullError):
        trainer.train(checkpoint_dir=str(disk), checkpoint_interval=100)
    assert [read_checkpoint_metadata(path)["step"] for path in checkpoint.complete(disk)] == [2]
    checkpoint.verify(disk / "checkpoint-1")


def test_the_size_is_said_beforehand_and_right(tmp_path):
    trainer = build(output_dir=str(tmp_path))
    trainer.train(checkpoint_dir=str(tmp_path / "ck"))
    folder = checkpoint.newest_good(tmp_path / "ck")
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    lines = (trainer.run.folder / "log.txt").read_text().splitlines()
    assert "a checkpoint takes about" in lines[0]
    said = float(lines[0].split("about ")[1].split(" MiB")[0]) * 2**20
    extra = sum((folder / name).stat().st_size for name in ("state.json", "manifest.json"))
    assert said == pytest.approx(size - extra, rel=0.25, abs=2**20 / 100)


def test_space_that_will_not_do_is_said_beforehand(tmp_path, monkeypatch):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 0, 100))
    trainer = build(output_dir=str(tmp_path), max_steps=1)
    trainer.train(checkpoint_dir=str(tmp_path / "ck"))
    assert "warning: 0.00 MiB are free there" in (trainer.run.folder / "log.txt").read_text()


# ---- when ----


def test_schedule_by_steps_epochs_and_minutes():
    time = [0.0]
    schedule = Schedule(steps=3, minutes=None, epochs=2, start=(2, 0), clock=lambda: time[0])
    assert [schedule.due(step, 0) for step in (2, 3, 4, 5, 7, 8)] == [False, True, False, False, True, False]
    assert [schedule.due(8, epoch) for epoch in (1, 2, 3, 4)] == [False, True, False, True]
    schedule = Schedule(steps=None, minutes=2, epochs=None, start=(0, 0), clock=lambda: time[0])
    due = []
    for now in (60, 119, 121, 180, 240, 242):
        time[0] = now
        due.append(schedule.due(1, 0))
    assert due == [False, False, True, False, False, True]


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, [3, 6]),  # an epoch has three steps
        ({"checkpoint_interval": 2}, [6]),
        ({"checkpoint_interval": None, "checkpoint_steps": 2}, [2, 4, 6]),
        ({"checkpoint_interval": None, "checkpoint_steps": 4}, [4, 6]),
        ({"checkpoint_interval": None, "checkpoint_minutes": 1e-9}, [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]),
        ({"checkpoint_interval": None, "checkpoint_steps": 1, "checkpoint_total_limit": 2}, [5, 6]),
    ],
)
def test_checkpoints_come_when_asked_for(tmp_path, changes, steps):
    build(**changes).train(checkpoint_dir=str(tmp_path))
    found = [read_checkpoint_metadata(path)["step"] for path in checkpoint.complete(tmp_path)]
    assert found[: len(steps)] == steps
    assert found[-1] == 6


def test_arguments_of_train_go_before_the_settings(tmp_path):
    trainer = build(checkpoint_interval=1, checkpoint_total_limit=5)
    trainer.train(checkpoint_dir=str(tmp_path / "ck"), checkpoint_interval=2, checkpoint_total_limit=1)
    assert [path.name for path in (tmp_path / "ck").iterdir()] == ["checkpoint-1"]
    for bad in ({"checkpoint_interval": 0}, {"checkpoint_interval": 1.5}, {"checkpoint_total_limit": -1}):
        with pytest.raises(ValueError, match=f"{next(iter(bad))}=.*whole number of at least 1"):
            build().train(checkpoint_dir=str(tmp_path / "other"), **bad)


def test_nothing_is_saved_unasked(tmp_path, working_directory):
    build(checkpoint_steps=1).train()
    assert not list(working_directory.rglob("checkpoint-*"))


def test_the_best_checkpoint_is_kept_beside_the_others(tmp_path):
    values = iter([1.0, float("nan"), 3.0, 2.0])

    class Judged(MAGRPOTrainer):
        def evaluate_team(self, num_eval_samples=None):
            evaluation = super().evaluate_team(num_eval_samples)
            evaluation.metrics["eval/mine"] = next(values)
            return evaluation

    best = {"checkpoint_best_metric": "eval/mine", "checkpoint_steps": 1, "checkpoint_total_limit": 1}
    trainer = build(Judged, **best)
    root = tmp_path / "ck"
    trainer.train(checkpoint_dir=str(root))
    assert {path.name for path in root.iterdir()} == {"checkpoint-6", "checkpoint-best"}
    assert read_checkpoint_metadata(root / "checkpoint-best")["step"] == 4
    again = build(Judged, **best)
    again.load_checkpoint(root / "checkpoint-best")
    assert (again.step, again.best) == (4, 3.0)
    with pytest.raises(ValueError, match=r"checkpoint_best_metric='eval/nothing'.*eval/reward_mean"):
        build(checkpoint_best_metric="eval/nothing").train(checkpoint_dir=str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"checkpoint_best_metric.*eval_interval"):
        settings(checkpoint_best_metric="eval/reward_mean", eval_interval=0)


# ---- what is in it ----


def test_random_numbers_go_on_where_they_were():
    def draw():
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(2).tolist()

    random.gauss(0, 1), np.random.randn()  # each leaves half a pair behind
    state = json.loads(json.dumps(checkpoint.rng_state()))
    first = [draw(), draw()]
    checkpoint.set_rng_state(state)
    assert [draw(), draw()] == first


def test_values_of_a_state_dict_come_back_as_they_were():
    value = {
        "numbers": [1, 2.5, float("inf"), True, None],
        3: ("tuple", {"x": {1, 2}}),
        (1, 2): b"bytes",
        "kind": "a key that the encoding uses too",
        "tensor": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "scalar": np.float32(0.1),
        "ordered": collections.OrderedDict(z=1, a=torch.ones(())),
    }
    tensors = {}
    back = decode(json.loads(json.dumps(encode(value, tensors, "reward_0"))), tensors, "reward_0")
    assert list(back) == list(value)
    for key in ("tensor", "array"):
        assert back[key].dtype == value[key].dtype
        assert (back[key] == value[key]).all()
    assert back["scalar"] == value["scalar"]
    assert list(back["ordered"]) == ["z", "a"]
    assert {k: back[k] for k in ("numbers", 3, (1, 2), "kind")} == {k: value[k] for k in ("numbers", 3, (1, 2), "kind")}
    with pytest.raises(ValueError, match=r"cannot hold reward_0.*of type object"):
        encode({"a": [object()]}, {}, "reward_0")


@dataclass
class SecretConfig(MAGRPOConfig):
    judge_api_key: str | None = option(None, "a fork's own setting")
    judge_headers: dict[str, str] | None = option(None, "a fork's own setting")
    judge_url: str = option("", "a fork's own setting")


class SecretTrainer(MAGRPOTrainer):
    config_class = SecretConfig


def test_secrets_are_nowhere_and_may_change(tmp_path):
    def build_with(key):
        args = SecretConfig(
            judge_api_key=f"sk-{key}",
            judge_headers={"Authorization": f"Bearer {key}"},
            judge_url=f"https://me:{key}@example.org",
            run_name="run",
            max_new_tokens=4,
            dtype="float32",
            max_steps=2,
            num_train_epochs=1,
            output_dir=str(tmp_path / "runs"),
        )
        sections = {"judge": {"api_key": f"sk-{key}", "headers": {"x": key}}}
        wandb = {"project": "p", "mode": "offline", "dir": str(tmp_path / "wandb"), "config_sections": sections}
        sections["judge"]["url"] = f"https://me:{key}@example.org"
        config = {"judge_api_key": f"sk-{key}", "task": "t"}
        options = {"wandb_config": wandb if key == "FIRSTSECRET" else None, "run_config": config}
        return build(SecretTrainer, args=args, options=options)

    trainer = build_with("FIRSTSECRET")
    trainer.train(checkpoint_dir=str(tmp_path / "ck"))
    trainer.close()
    build_with("OTHERSECRET").train(resume_from_checkpoint=str(tmp_path / "ck"))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 20
    for path in files:
        data = path.read_bytes()
        assert b"FIRSTSECRET" not in data, path
        assert b"OTHERSECRET" not in data, path
    assert json.loads((tmp_path / "ck" / "checkpoint-1" / "state.json").read_text())["config"] == {
        "judge_api_key": "***",
        "task": "t",
    }


def test_an_unknown_wandb_key_is_refused_without_its_value(tmp_path):
    with pytest.raises(ValueError, match=r"wandb\.api_key") as caught:
        build(options={"wandb_config": {"api_key": "SECRET"}})
    assert "SECRET" not in str(caught.value)


def test_metadata(tmp_path):
    trainer = build(num_train_epochs=1, output_dir=str(tmp_path))
    trainer.train(checkpoint_dir=str(tmp_path / "ck"))
    assert read_checkpoint_metadata(str(tmp_path / "ck" / "checkpoint-1")) == {
        "version": 2,
        "trainer_class": "MAGRPOTrainer",
        "sequence": 1,
        "run_id": trainer.run.id,
        "wandb": None,
        "step": 3,
    }
    for bad, message in ((tmp_path / "ck", "not a complete checkpoint"), (tmp_path / "no", "not a complete")):
        with pytest.raises(ValueError, match=message):
            read_checkpoint_metadata(bad)
    (tmp_path / "ck" / "checkpoint-1" / "state.json").write_text('{"version": 2}')
    with pytest.raises(ValueError, match=r"corrupted.*state\.json"):
        read_checkpoint_metadata(tmp_path / "ck" / "checkpoint-1")


def test_save_and_load_by_hand(tmp_path):
    trainer = build(max_steps=2, output_dir=str(tmp_path))
    trainer.train()
    folder = trainer.save_checkpoint(tmp_path / "mine")
    assert folder == str(tmp_path / "mine")
    assert read_checkpoint_metadata(folder)["step"] == 2
    trainer.save_checkpoint(folder)  # replaces it
    trainer.close()
    trainer.save_checkpoint(folder)
    other = build(seeds=(5, 6), output_dir=str(tmp_path))
    other.load_checkpoint(Path(folder) / "state.json")
    for name, tensor in state_of(trainer).items():
        assert torch.equal(tensor, state_of(other)[name]), name
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("my only copy")
    with pytest.raises(ValueError, match="holds other files"):
        trainer.save_checkpoint(tmp_path / "full")


def test_frozen_references_are_a_name_and_a_hash_or_kept_once(tmp_path, tiny):
    kl = {"reference_kl_enabled": True, "checkpoint_steps": 1}
    trainer = build(**kl)  # loaded modules
    trainer.train(checkpoint_dir=str(tmp_path / "a"))
    assert len(list((tmp_path / "a" / "references").iterdir())) == 2
    files = {path.name for path in (tmp_path / "a" / "checkpoint-6").rglob("*.safetensors")}
    assert files == {"weights.safetensors", "optimizer.safetensors"}


# ---- finding it ----


def test_find_resume(tmp_path):
    def run(name, *numbers):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
        for number in numbers:
            checkpoint.write(tmp_path / name / "checkpoints" / f"checkpoint-{number}", contents(number))

    find = checkpoint.find_resume
    assert find(None, tmp_path, "run") == (None, "")
    assert find("auto", tmp_path, "run")[0] is None
    assert "no run run" in find("auto", tmp_path / "nowhere", "run")[1]
    run("run", 1, 2)
    run("run-2", 4)
    run("run-10", 3)
    run("runner", 7)
    (tmp_path / "run-11").mkdir()  # somebody else's folder
    assert find("auto", tmp_path, "run") == (tmp_path / "run-10" / "checkpoints" / "checkpoint-3", "")
    # The newest run of that name is meant, not an older one that happens to have something.
    run("run-12")
    assert find("auto", tmp_path, "run") == (
        None,
        f"--resume auto: {tmp_path}/run-12 has no good checkpoint, so this run starts anew",
    )
    for path in ("run", "run/checkpoints", "run/checkpoints/checkpoint-2", "run/checkpoints/checkpoint-2/state.json"):
        assert find(str(tmp_path / path), tmp_path, "x") == (tmp_path / "run/checkpoints/checkpoint-2", "")
    with pytest.raises(CheckpointError, match="does not exist"):
        find(str(tmp_path / "run" / "checkpoints" / "checkpoint-9"), tmp_path, "run")
    with pytest.raises(CheckpointError, match="holds no good checkpoint"):
        find(str(tmp_path / "run-12"), tmp_path, "run")


def test_another_runs_folder_is_refused(tmp_path):
    build(max_steps=1, output_dir=str(tmp_path)).train(checkpoint_dir=str(tmp_path / "ck"))
    before = (tmp_path / "ck" / "checkpoint-1" / "manifest.json").read_bytes()
    with pytest.raises(ValueError, match="another run; go on from one of them"):
        build(max_steps=1, output_dir=str(tmp_path)).train(checkpoint_dir=str(tmp_path / "ck"))
    other = build(max_steps=1, output_dir=str(tmp_path))
    other.train(checkpoint_dir=str(tmp_path / "other"))
    with pytest.raises(ValueError, match="another run"):
        build(max_steps=2).train(str(tmp_path / "other"), checkpoint_dir=str(tmp_path / "ck"))
    assert (tmp_path / "ck" / "checkpoint-1" / "manifest.json").read_bytes() == before
    assert len(lines_of(tmp_path / "run", "metrics")) == 3
