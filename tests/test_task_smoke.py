"""One optimizer step of the model `tiny` on each task of this field, from its own config file."""

import json
from pathlib import Path

import pytest

from comlrl.config import load_object
from comlrl.tasks import load_task

ROOT = Path(__file__).parent.parent
SMALL = [
    "model=tiny",
    "args.max_steps=1",
    "args.max_new_tokens=12",
    "args.num_generations=2",
    "args.rollout_buffer_size=2",
    "args.eval_num_samples=1",
    "args.eval_generations=1",
    "args.output_dir=.",
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        ("writing", []),
        ("writing", ["task=arxiv"]),
        ("str_build", []),
        ("house_build", []),
        ("travel", []),
        ("tool_use", []),
    ],
)
def test_one_step(config, overrides, tmp_path):
    main = load_object(f"{ROOT / 'train_magrpo.py'}:main", "script")
    main(["--config", str(ROOT / f"configs/{config}.yaml"), *SMALL, *overrides])
    (written,) = tmp_path.glob("*/metrics.jsonl")
    keys = {key for line in written.read_text().splitlines() for key in json.loads(line)}
    name = overrides[0].partition("=")[2] if overrides else {"writing": "tldr"}.get(config, config)
    task = load_task(name, 2)
    parts = task.score(task.train_rows[0], ["", ""])[1]
    assert parts
    assert {f"eval/turn_1/parts/{part}" for part in parts} <= keys


@pytest.mark.full
def test_tiny_agents_learn_to_build(tmp_path):
    """About 30 seconds; random answers earn 0.87 of 2. Seeds 0 to 3 gain 0.31 to 0.60."""
    main = load_object(f"{ROOT / 'train_magrpo.py'}:main", "script")
    changes = ["args.max_steps=100", "args.output_dir=.", "args.eval_interval=100"]
    main(["--config", str(ROOT / "configs/str_build_tiny.yaml"), *changes])
    (written,) = tmp_path.glob("*/metrics.jsonl")
    scores = [
        line["eval/sampled/reward_mean"] for line in map(json.loads, written.open()) if "eval/reward_mean" in line
    ]
    assert scores[-1] > scores[0] + 0.15
