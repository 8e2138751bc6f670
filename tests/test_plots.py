"""Curves of runs: read, smoothed, averaged, drawn."""

import math
import sys

import numpy as np
import pytest

from comlrl import plots
from comlrl.tracking import Run


def start(root, name="run", config=None, **options):
    options.setdefault("verbose", False)
    return Run(root, name, config or {"seed": 3}, **options)


def write_curve(root, offset):
    with start(root, "curve") as run:
        run.log({"reward_mean": offset}, step=0, env_step=0, epoch=0, kind="eval")
        for step in range(1, 9):
            run.log({"reward_mean": offset + step}, step=step, env_step=4 * step, epoch=0)
        run.log({"loss": math.nan, "reward_mean": math.nan}, step=9, env_step=36, epoch=1)
        metrics = {"reward_mean": offset + 9, "sampled/reward_mean": offset + 8}
        run.log(metrics, step=9, env_step=36, epoch=1, kind="eval")
    return run.folder


def test_curves_are_read_smoothed_and_averaged(tmp_path):
    folder = write_curve(tmp_path, 1.0)
    x, y = plots.read_curve(folder, "train", "reward_mean", "env_step")
    assert x.tolist() == [4.0 * step for step in range(1, 9)]
    assert y.tolist() == [1.0 + step for step in range(1, 9)]
    assert plots.moving_mean(np.array([1.0, 2.0, 6.0, 4.0]), 3).tolist() == [1.0, 1.5, 3.0, 4.0]
    one, two = (
        (np.array([0.0, 2.0]), np.array([0.0, 2.0])),
        (np.array([1.0, 2.0, 3.0]), np.array([3.0, 4.0, 9.0])),
    )
    x, y = plots.mean_curve([one, two])
    assert x.tolist() == [1.0, 2.0]
    assert y.tolist() == [2.0, 3.0]


def test_learning_curve_writes_a_picture(tmp_path, monkeypatch):
    folders = [write_curve(tmp_path, offset) for offset in (0.0, 1.0)]
    plots.learning_curve(folders[0], tmp_path / "one.png")
    picture = tmp_path / "new" / "both.png"
    monkeypatch.setattr(sys, "argv", ["plots", *map(str, folders), "--out", str(picture), "--axis", "env_step"])
    plots.main()
    for path in (tmp_path / "one.png", picture):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_learning_curve_names_what_is_missing(tmp_path):
    with pytest.raises(ValueError, match=r"no metrics\.jsonl"):
        plots.learning_curve(tmp_path, tmp_path / "x.png")
    empty = start(tmp_path)
    with pytest.raises(ValueError, match="no reward"):
        plots.learning_curve(empty.folder, tmp_path / "x.png")
    with pytest.raises(ValueError, match="axis='time'"):
        plots.learning_curve(empty.folder, tmp_path / "x.png", axis="time")
    assert not (tmp_path / "x.png").exists()
