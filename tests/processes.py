"""Start train_magrpo.py in several processes, and compare what they did."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from comlrl.agents import load_model

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"}
# This environment's programs first, for all alike: another ninja would compile DeepSpeed's extension anew.
ENVIRONMENT["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
SETTINGS = [
    *("model=tiny", "args.run_name=run", "args.dtype=float32", "args.agent_learning_rate=1e-3", "args.seed=1"),
    *("args.max_new_tokens=6", "args.rollout_buffer_size=3", "args.num_generations=3", "args.eval_num_samples=3"),
    *("args.eval_interval=3", "args.max_steps=3", "args.num_train_epochs=100", "args.micro_batch_tokens=400"),
]
SCRIPTS = {
    **dict.fromkeys(("iac", "maac"), "train_ac.py"),
    **dict.fromkeys(("madpo", "marlhf", "madpo_iter", "marlhf_iter"), "train_pbrl.py"),
}


def torchrun(processes: int, port: int = 0, machines: int = 1, machine: int = 0) -> list[str]:
    """`port`: where the machines meet; none: a free one, for one machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    if machines == 1:
        return [*command, "--standalone"]
    return [
        *command,
        *("--nnodes", str(machines), "--node_rank", str(machine)),
        *("--master_addr", "127.0.0.1", "--master_port", str(port)),
    ]


def command_line(out: Path, settings: list[str]) -> list[str]:
    algorithm = next((word.removeprefix("algorithm=") for word in settings if word.startswith("algorithm=")), "")
    return [SCRIPTS.get(algorithm, "train_magrpo.py"), *SETTINGS, f"args.output_dir={out}", *settings]


def start(launcher: list[str], out: Path, settings: list[str], **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*launcher, *command_line(out, settings)],
        cwd=ROOT,
        env={**ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen, timeout: float = 200) -> str:
    text, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, text[-20000:]
    return text


def train(processes: int, out: Path, *settings: str) -> Path:
    """A finished run's folder. One process starts without a launcher."""
    launcher = torchrun(processes) if processes > 1 else [sys.executable]
    finish(start(launcher, out, list(settings)))
    return out / "run"


def lines(run: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]


def sampled(run: Path) -> list[tuple]:
    """Every completion with its rewards, in an order that does not depend on who made it."""
    return [
        (r["kind"], r["rollout"], r["sample"], r["turn"], r["agent"], r["completion"], r["reward"])
        for r in lines(run, "completions")
    ]


def weights(run: Path) -> dict:
    return {
        (agent, name): tensor
        for agent in sorted(p.name for p in (run / "model").iterdir())
        for name, tensor in load_file(next((run / "model" / agent).glob("*model.safetensors"))).items()
    }


def moved(run: Path, start: dict) -> float:
    """2-norm of how far the weights went."""
    return distance(weights(run), start)


def distance(one: dict, other: dict) -> float:
    return sum(float((one[key] - other[key]).double().square().sum()) for key in one) ** 0.5


def assert_same(run, other, agents):
    """Samples are the same, gradients within 1e-5, weights within 1 % of how far they moved; records are complete."""
    assert sampled(run) == sampled(other)
    mine, theirs = lines(run, "metrics"), lines(other, "metrics")
    assert [line.keys() for line in mine] == [line.keys() for line in theirs]
    for one, two in zip(mine, theirs):
        for key, value in one.items():
            if isinstance(value, float) and "time" not in key:
                assert two[key] == pytest.approx(value, rel=1e-4, abs=1e-4), (key, one["step"])
        for agent in range(agents):
            if one["kind"] == "train" and one["step"] == 1:
                key = f"agent_{agent}/grad_norm"
                assert two[key] == pytest.approx(one[key], rel=1e-5)
    pristine = dict(load_model("tiny").named_parameters())
    start_weights = {key: pristine[key[1]].detach() for key in weights(run)}
    assert distance(weights(run), weights(other)) < 0.01 * moved(run, start_weights)
    assert moved(run, start_weights) > 0.1
