"""How the rewards of policy and comparator move from iteration to iteration: statistics and pictures."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from comlrl.records import write_text

BINS = 16
COLOURS = {"target": "#4477aa", "comparator": "#cc3311"}


def distribution(rewards: Sequence[float], low: float, high: float) -> dict[str, Any]:
    """Count, mean, deviation, counts of 16 equal bins from low to high, how many are outside, and all rewards."""
    values = np.array(rewards, dtype=float)
    inside = values[(values >= low) & (values <= high)]
    return {
        "count": len(values),
        "mean": float(values.mean()) if len(values) else None,
        "deviation": float(values.std()) if len(values) else None,
        "bins": np.histogram(inside, BINS, (low, high))[0].tolist(),
        "outside": len(values) - len(inside),
        "rewards": values.tolist(),
    }


def reward_range(declared: tuple[float, float] | None, groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The declared range, else that of the rewards."""
    if declared is not None:
        return declared
    every = [reward for group in groups for reward in group]
    low, high = min(every, default=0.0), max(every, default=1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def write_drift(
    folder: Path,
    iteration: int,
    sections: Mapping[str, Mapping[str, Sequence[float]]],
    scored_by: str,
    declared: tuple[float, float] | None,
) -> None:
    """`iteration_<k>.json` and `.png`, and `drift.png` of all iterations so far.

    sections: candidates and selected, each with the rewards of target and comparator. declared: the range of the task's
    rewards; None where a reward model scored, whose scores have no range.
    """
    folder.mkdir(parents=True, exist_ok=True)
    groups = [rewards for section in sections.values() for rewards in section.values()]
    low, high = reward_range(declared, groups)
    data = {
        "iteration": iteration,
        "scored_by": scored_by,
        "range": [low, high],
        **{
            name: {who: distribution(rewards, low, high) for who, rewards in section.items()}
            for name, section in sections.items()
        },
    }
    write_text(folder / f"iteration_{iteration:04d}.json", json.dumps(data, indent=1) + "\n")
    draw_iteration(data, folder / f"iteration_{iteration:04d}.png")
    every = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("iteration_*.json"))]
    draw_drift([each for each in every if each["iteration"] <= iteration], folder / "drift.png")


def draw_iteration(data: Mapping[str, Any], path: Path) -> None:
    low, high = data["range"]
    edges = np.linspace(low, high, BINS + 1)
    figure = Figure(figsize=(7.5, 3.5), dpi=120, layout="constrained")
    names = [name for name in ("candidates", "selected") if name in data]
    for place, name in enumerate(names):
        axes = figure.add_subplot(1, len(names), place + 1)
        for who, numbers in data[name].items():
            axes.stairs(numbers["bins"], edges, color=COLOURS[who], label=who, linewidth=1.5)
        axes.set_title(name)
        axes.set_xlabel(f"reward ({data['scored_by']})")
        axes.set_ylabel("joint answers")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.suptitle(f"iteration {data['iteration']}")
    figure.savefig(path)


def draw_drift(every: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Means over iterations. Scores of a reward model are of another unit than the task's, so they are marked."""
    figure = Figure(figsize=(6, 3.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for who, colour in COLOURS.items():
        for scored_by, marker in (("task", "o"), ("reward_model", "x")):
            points = [
                (each["iteration"], each["candidates"][who]["mean"])
                for each in every
                if each["scored_by"] == scored_by and each["candidates"][who]["mean"] is not None
            ]
            if points:
                axes.plot(*zip(*points), color=colour, marker=marker, label=f"{who}, {scored_by}")
    axes.set_xlabel("iteration")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("mean reward of the candidates")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    if axes.has_data():
        axes.legend(frameon=False)
    figure.savefig(path)
