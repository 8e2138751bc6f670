"""Learning curves from the files of one or several runs.

python -m comlrl.plots runs/magrpo runs/magrpo-2 --out curve.png
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from comlrl.records import read_metrics

Axis = Literal["step", "env_step"]
AXIS_LABELS = {"step": "optimizer step", "env_step": "environment steps (rewarded joint answers)"}
TRAIN_COLOUR = "#4477aa"
EVALUATIONS = (  # key, label, colour, marker
    ("eval/reward_mean", "evaluation, greedy", "#cc3311", "o"),
    ("eval/sampled/reward_mean", "evaluation, sampled", "#ee9a33", "s"),
)


def read_curve(folder: str | os.PathLike, kind: str, key: str, axis: Axis) -> tuple[np.ndarray, np.ndarray]:
    """The x and y values, float arrays of one length, of `key` in a run's lines of this kind.

    A step that was logged twice counts once, with its last value; steps without a finite value are left out.
    """
    points = {
        line[axis]: line[key] for line in read_metrics(folder) if line["kind"] == kind and line.get(key) is not None
    }
    x = np.array(sorted(points), dtype=float)
    return x, np.array([points[position] for position in sorted(points)], dtype=float)


def moving_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of each value and up to `window - 1` values before it, never of later ones."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def mean_curve(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Mean of several curves, interpolated linearly to all their x values, where all of them have values."""
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.unique(np.concatenate([x for x, _ in curves]))
    grid = grid[(grid >= first) & (grid <= last)]
    return grid, np.mean([np.interp(grid, x, y) for x, y in curves], axis=0)


def learning_curve(
    folders: str | os.PathLike | Sequence[str | os.PathLike],
    out_png: str | os.PathLike,
    *,
    axis: Axis = "step",
    window: int = 10,
    title: str | None = None,
) -> None:
    """Draw the train reward and the evaluation rewards of one run, or of several with their mean.

    `axis`: `step` (optimizer steps) or `env_step` (rewarded joint answers). `window`: steps in the moving
    mean of the train reward. Raises ValueError for a folder without metrics and for runs without any reward.
    """
    if axis not in AXIS_LABELS:
        raise ValueError(f"axis={axis!r} must be one of {', '.join(AXIS_LABELS)}")
    if window < 1:
        raise ValueError(f"window={window} must be at least 1")
    runs = [folders] if isinstance(folders, str | os.PathLike) else list(folders)
    figure = Figure(figsize=(7.5, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()

    train = [read_curve(run, "train", "reward_mean", axis) for run in runs]
    train = [(x, y) for x, y in train if len(x)]
    if len(runs) == 1:
        for x, y in train:
            axes.plot(x, y, color=TRAIN_COLOUR, alpha=0.25, linewidth=0.8, label="train, each step")
    draw(axes, [(x, moving_mean(y, window)) for x, y in train], f"train, mean of {window} steps", TRAIN_COLOUR)
    for key, label, colour, marker in EVALUATIONS:
        curves = [read_curve(run, "eval", key, axis) for run in runs]
        draw(axes, [(x, y) for x, y in curves if len(x)], label, colour, marker)
    if not axes.has_data():
        raise ValueError(f"no reward in {', '.join(str(run) for run in runs)}: the runs have logged no step")

    axes.set_xlabel(AXIS_LABELS[axis])
    axes.set_ylabel("mean reward")
    axes.set_title(title or (Path(runs[0]).name if len(runs) == 1 else f"{len(runs)} runs and their mean"))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    Path(out_png).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out_png)


def draw(
    axes: Axes,
    curves: Sequence[tuple[np.ndarray, np.ndarray]],
    label: str,
    colour: str,
    marker: str | None = None,
) -> None:
    """One curve, or several thin ones with their mean in front."""
    if not curves:
        return
    if len(curves) > 1:
        for x, y in curves:
            axes.plot(x, y, color=colour, alpha=0.35, linewidth=0.8)
    x, y = mean_curve(curves)
    axes.plot(x, y, color=colour, linewidth=2.0, marker=marker, markersize=5, label=label, zorder=3)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m comlrl.plots", description="Draw the learning curve of runs.")
    parser.add_argument("runs", nargs="+", help="run folders, for example runs/magrpo")
    parser.add_argument("--out", default="curve.png", help="picture to write (curve.png)")
    parser.add_argument("--axis", choices=list(AXIS_LABELS), default="step", help="x axis (step)")
    parser.add_argument("--window", type=int, default=10, help="steps in the mean of the train reward (10)")
    parser.add_argument("--title", help="title of the picture")
    options = parser.parse_args()
    try:
        learning_curve(options.runs, options.out, axis=options.axis, window=options.window, title=options.title)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
