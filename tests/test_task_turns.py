"""The prompts of later turns are what a task's transition says, whatever its formatters do to a row."""

import json
from pathlib import Path

import pytest

from comlrl.config import load_object
from comlrl.tasks import load_task

ROOT = Path(__file__).parent.parent
TWO_TURNS = [
    ("length_ratio", {"style": "plain"}),
    ("str_build", {"size": "tiny", "word_length": 2, "train_rows": 5, "eval_rows": 2}),
    ("str_build", {"style": "plain"}),
    ("house_build", {"style": "plain"}),
    ("two_turn", {}),
]


@pytest.mark.parametrize(("name", "task_args"), TWO_TURNS)
def test_second_prompts_are_those_of_the_transition(name, task_args, tmp_path):
    main = load_object(f"{ROOT / 'train_magrpo.py'}:main", "script")
    settings = "num_turns=2 max_steps=1 num_generations=2 rollout_buffer_size=3 max_new_tokens=4 eval_interval=0"
    settings += f" shuffle=false output_dir={tmp_path} run_name=run"
    words = [f"task={name}", f"task_args={task_args}", "model=tiny", *(f"args.{word}" for word in settings.split())]
    main(["--config", str(ROOT / "configs/smoke.yaml"), *words])
    lines = [json.loads(line) for line in (tmp_path / "run/completions.jsonl").read_text().splitlines()]
    said = {(line["sample"], line["agent"]): line for line in lines if line["row"] == 0 and line["kind"] == "train"}
    task = load_task(name, 2, task_args)
    branches = [sample for sample, agent in said if agent == 0 and sample.count(".") == 1]
    assert len(branches) == 2
    for branch in branches:
        agents = [said[branch, agent] for agent in range(2)]
        told = task.transition(
            prompt=task.train_rows[0]["prompt"],
            agent_completions=[line["completion"] for line in agents],
            num_agents=2,
            prompt_history_per_agent=[[line["prompt"]] for line in agents],
            response_history_per_agent=[[line["completion"]] for line in agents],
            batch_item=task.train_rows[0],
        )
        for agent in range(2):
            assert said[f"{branch}.0", agent]["prompt"] == told[agent]
