"""MAAC, IAC and MAGRPO on the same number of environment steps: the two studies of docs/actor_critic.md.

    export PYTHONPATH=.
    python benchmarks/actor_critic.py relay                   # fifteen runs of about a minute, a table, a picture
    python benchmarks/actor_critic.py str_build --seeds 0 1

Runs go to runs/<study>-<algorithm>-<seed>; one that is finished is not run again. The table goes to the screen, the
picture to docs/<study>.png.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from comlrl.plots import mean_curve, read_curve
from comlrl.records import read_metrics

ROOT = Path(__file__).parent.parent
KEY = "eval/sampled/reward_mean"
STUDENT_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}  # by number of seeds
COLOURS = {"maac": "#4477aa", "iac": "#cc3311", "magrpo": "#228833"}
OPTIMUM = {"relay": 1.0, "str_build": 2.0}


def command(study: str, algorithm: str, seed: int) -> list[str]:
    script, config = ("train_magrpo.py", "magrpo") if algorithm == "magrpo" else ("train_ac.py", "maac")
    name = f"args.run_name={study}-{algorithm}-{seed}"
    settings = [f"algorithm={algorithm}", f"args.seed={seed}", name]
    return [sys.executable, str(ROOT / script), "--config", str(ROOT / f"configs/{study}_{config}.yaml"), *settings]


def finished(folder: Path) -> bool:
    return (folder / "model/agent_1/config.json").is_file()


def values_of(folder: Path) -> list[float]:
    """The measure before the first and after the last step."""
    lines = [line[KEY] for line in read_metrics(folder) if line["kind"] == "eval"]
    return [lines[0], lines[-1]]


def interval(values: list[float]) -> float:
    """Half the 95 % interval of a mean."""
    if len(values) < 2:
        return float("nan")
    return STUDENT_95[len(values)] * float(np.std(values, ddof=1)) / len(values) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=list(OPTIMUM))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--runs", default="runs", help="where run folders go")
    options = parser.parse_args()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    for seed in options.seeds:
        for algorithm in COLOURS:
            if not finished(Path(options.runs, f"{options.study}-{algorithm}-{seed}")):
                words = [*command(options.study, algorithm, seed), f"args.output_dir={options.runs}"]
                subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL)
    figure = Figure(figsize=(7.5, 4.5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    rows = [
        "| algorithm | before | after, mean and 95 % interval | each seed | environment steps |",
        "|---|---|---|---|---|",
    ]
    for algorithm, colour in COLOURS.items():
        folders = [Path(options.runs, f"{options.study}-{algorithm}-{seed}") for seed in options.seeds]
        ends = [values_of(folder) for folder in folders]
        after = [end for _, end in ends]
        steps = [read_metrics(folder)[-1]["env_step"] for folder in folders]
        each = ", ".join(f"{value:.2f}" for value in after)
        mean = f"{np.mean(after):.3f} ± {interval(after):.3f}"
        start = np.mean([first for first, _ in ends])
        rows.append(f"| {algorithm} | {start:.3f} | {mean} | {each} | {min(steps)} to {max(steps)} |")
        curves = [read_curve(folder, "eval", KEY, "env_step") for folder in folders]
        for x, y in curves:
            axes.plot(x, y, color=colour, alpha=0.3, linewidth=0.8)
        x, y = mean_curve(curves)
        axes.plot(x, y, color=colour, linewidth=2, marker="o", label=f"{algorithm}, mean of {len(curves)} seeds")
    axes.axhline(OPTIMUM[options.study], color="0.5", linestyle=":", label="optimum")
    axes.set_xlabel("environment steps (rewarded joint answers)")
    axes.set_ylabel("reward, sampled answers")
    axes.set_title(options.study)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(ROOT / f"docs/{options.study}.png")
    print("\n".join(rows))
    print(json.dumps({"study": options.study, "seeds": options.seeds}))


if __name__ == "__main__":
    main()
