"""The script as its user starts it: launched, dry, with a reward and a task of one's own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import train_ac
import train_magrpo
import train_pbrl
from comlrl.config import load_object
from comlrl.evaluate import main as evaluate
from comlrl.trainers import ACTOR_CRITIC_ALGORITHMS, PREFERENCE_ALGORITHMS, REINFORCE_ALGORITHMS

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def launch(*words, cwd):
    """accelerate launch train_magrpo.py ..., on the CPU, with one thread."""
    program = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--num_processes", "1"]
    program += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*program, str(ROOT / "train_magrpo.py"), *words], cwd=cwd, env=environment, capture_output=True, text=True
    )


def lines(run, kind):
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if record["kind"] == kind]


def test_smoke_learns_and_says_where_everything_lies(tmp_path):
    """The smoke configuration gains at least 0.2, greedy and sampled."""
    done = launch("--config", str(ROOT / "configs/smoke.yaml"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs/smoke"
    evaluations = lines(run, "eval")
    assert [line["step"] for line in evaluations] == [0, 35, 70]
    for key in ("eval/reward_mean", "eval/sampled/reward_mean"):
        assert evaluations[-1][key] - evaluations[0][key] >= 0.2
    assert len(lines(run, "train")) == 70
    assert {"agent_0", "agent_1"} <= {path.name for path in (run / "model").iterdir()}
    assert "runs/smoke" in re.sub(r"\s", "", done.stdout + done.stderr)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.full
def test_smoke_learns_on_other_seeds(tmp_path, seed):
    done = launch("--config", str(ROOT / "configs/smoke.yaml"), f"args.seed={seed}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, *_, last = lines(tmp_path / "runs/smoke", "eval")
    for key in ("eval/reward_mean", "eval/sampled/reward_mean"):
        assert last[key] - first[key] >= 0.2


SCRIPTS = {
    **dict.fromkeys(REINFORCE_ALGORITHMS, train_magrpo),
    **dict.fromkeys(ACTOR_CRITIC_ALGORITHMS, train_ac),
    **dict.fromkeys(PREFERENCE_ALGORITHMS, train_pbrl),
}
FROM_THE_HUB = ("classeval",)  # configs whose rows are nowhere else; the offline rows of the task stand in


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_config_passes_a_dry_run(config, capsys):
    """With the tiny model, since the dry run of another one would have to convert it first."""
    script = SCRIPTS[OmegaConf.load(config).algorithm]
    rows = ["task_args.dataset=written"] if config.stem in FROM_THE_HUB else []
    script.main(["--config", str(config), "model=tiny", *rows, "--dry-run"])
    plan = capsys.readouterr().out
    for word in ("agent_0: tiny", "devices", "nodes a tree", "optimizer steps"):
        assert word in plan


def test_help_lists_every_key(capsys):
    with pytest.raises(SystemExit):
        train_magrpo.main(["--help"])
    text = capsys.readouterr().out
    for key in ("algorithm", "task_args", "args.num_turns", "args.clip_range", "args.checkpoint_minutes"):
        assert key in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["args.num_turn=2"], "args.num_turns"),
        (["num_turns=2"], "args.num_turns"),
        (["args.num_generations=two"], "args.num_generations"),
        (["algorithm=magrp"], "magrpo"),
        (["task=length_rati"], "length_ratio"),
        (["args.num_generations=1"], "num_generations"),
        (["model=no-such-model"], "no-such-model"),
        (["reward=missing.py:f"], "missing.py"),
    ],
)
def test_a_mistake_is_one_line_before_any_model_is_loaded(words, said, capsys, monkeypatch):
    monkeypatch.setattr("comlrl.loading.load_model", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit) as stopped:
        train_magrpo.main(["--config", str(ROOT / "configs/smoke.yaml"), *words])
    assert stopped.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error:")
    assert said in error


def readme_block(language, containing):
    blocks = re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    return next(block for block in blocks if containing in block)


def test_the_readmes_reward_runs_as_pasted(tmp_path, monkeypatch):
    """A reward in ten lines."""
    monkeypatch.chdir(tmp_path)
    Path("my_reward.py").write_text(readme_block("python", "def short_and_long"))
    command = readme_block("bash", "my_reward.py").strip()
    words = command.split()
    assert words[:3] == ["accelerate", "launch", "train_magrpo.py"]
    words = [str(ROOT / word) if word.startswith("configs/") else word for word in words[3:]]
    train_magrpo.main([*words, "args.max_steps=2", "args.num_generations=4"])
    run = next(Path("runs").iterdir())
    assert "turn_1/parts/ratio" in lines(run, "train")[0]
    assert lines(run, "train")[0]["reward_mean"] > 0


TASK = """
from comlrl.tasks import Task

def score(row, texts):
    return float(len(texts[0]) > len(texts[1])), {"first": float(len(texts[0]))}

def longest(num_agents=2, letter="a"):
    rows = [{"prompt": letter * n} for n in range(1, 5)]
    return Task("longest", rows, rows, [lambda row: row["prompt"]] * num_agents, score, maximum=1.0)

def zero(c1, c2):
    return [0.5] * len(c1)
"""


@pytest.mark.parametrize("algorithm", ["magrpo", "mareinforce", "marloo", "maremax", "centralized_magrpo"])
def test_a_task_of_ones_own_with_every_algorithm(tmp_path, monkeypatch, algorithm):
    """And two weighted rewards: the task's, and one that gives 0.5 always."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(TASK)
    rewards = "reward=[{use: task, weight: 2.0}, {use: 'mine.py:zero', weight: 1.0}]"
    settings = ["args.max_steps=2", "args.num_generations=3", "args.max_new_tokens=4", "args.eval_generations=2"]
    train_magrpo.main(
        [f"algorithm={algorithm}", "model=tiny", "task=mine.py:longest", "task_args.letter=b", rewards, *settings]
    )
    (run,) = Path("runs").iterdir()
    assert len(lines(run, "train")) == 2
    for line in lines(run, "train"):
        assert 0.5 <= line["reward_mean"] <= 2.5
    evaluate([str(run), "--samples", "2"])
    assert (run / "evaluation.json").exists()


@pytest.mark.parametrize("form", PREFERENCE_ALGORITHMS)
def test_preferences_go_on_where_they_were_and_are_evaluated(tmp_path, monkeypatch, form):
    """Two steps, then `--resume auto` for two more; then the command that evaluates a run."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(TASK)
    words = [f"algorithm={form}", "model=tiny", "task=mine.py:longest", "args.preference_num_candidates=6"]
    words += ["args.max_new_tokens=4", "args.preference_pairs_per_sample=4", "args.run_name=run"]
    train_pbrl.main([*words, "args.max_steps=2"])
    train_pbrl.main([*words, "args.max_steps=4", "--resume", "auto"])
    assert [path.name for path in Path("runs").iterdir()] == ["run"]
    run = Path("runs/run")
    assert [line["step"] for line in lines(run, "train") if "skipped_step" in line] == [1, 2, 3, 4]
    assert {line["step"] for line in lines(run, "eval")} >= {0, 4}
    assert (run / "model" / "agent_1").is_dir()
    assert (run / "model" / "reward_model").is_dir() == form.startswith("marlhf")
    assert len(list(run.rglob("preferences.jsonl")) + list(run.rglob("preferences/iteration_*.jsonl"))) >= 1
    evaluate([str(run), "--samples", "2"])
    assert (run / "evaluation.json").exists()


def apply_diff(lines, diff):
    """The patched lines: what is added follows the context line before it, or stands before the first one."""
    result, added, rest = [], [], iter(lines)
    for change in diff:
        sign, text = change[:1], change[1:]
        if sign == "+":
            (result if result else added).append(text)
            continue
        for line in rest:
            if line == text:
                break
            result.append(line)
        else:
            pytest.fail(f"not in the script: {text!r}")
        result += [*added, *([] if sign == "-" else [text])]
        added = []
    return [*result, *rest]


def test_the_readmes_fork_runs(tmp_path, monkeypatch):
    """A copied script with one method of its own, in about ten lines; what its loss logs is in the records."""
    monkeypatch.chdir(tmp_path)
    diff = readme_block("diff", "class WideClip").splitlines()
    script = (ROOT / "train_magrpo.py").read_text().splitlines()
    assert sum(line.startswith("+") for line in diff) <= 15
    Path("train_wide.py").write_text("\n".join(apply_diff(script, diff)))
    smoke = str(ROOT / "configs/smoke.yaml")
    words = ["args.max_steps=1", "args.num_generations=4", "args.eval_interval=0"]
    load_object("train_wide.py:main", "script")(["--config", smoke, *words])
    (line,) = lines(Path("runs/smoke"), "train")
    assert line["agent_0/turn_1/ratio"] == pytest.approx(1)
    assert "agent_0/turn_1/clip_fraction" not in line
