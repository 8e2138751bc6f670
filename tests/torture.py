"""`kill -9` at random moments: each time `--resume auto` must reach what the undisturbed run reaches, bit for bit.

    python -m tests.torture --kills 20 --seed 0

One undisturbed run of train_magrpo.py; then, for every kill, a run that is killed and a second process that goes on
from what it finds. Every other kill waits for a checkpoint that is being written. Compared are the final weights, the
moments of AdamW, every line of metrics.jsonl (without times) and every completion.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from comlrl import checkpoint

ROOT = Path(__file__).resolve().parent.parent
STEPS = 36
SETTINGS = [
    *("model=tiny", "task=length_ratio", "args.run_name=run", "args.dtype=float32"),
    *("args.num_turns=2", "args.num_generations=2", "args.max_new_tokens=12", "args.rollout_buffer_size=3"),
    *("args.train_batch_size=4", "args.rows_per_rollout=2", "args.num_train_epochs=100", f"args.max_steps={STEPS}"),
    *("args.agent_learning_rate=1e-3", "args.reference_kl_enabled=true", "args.eval_interval=12"),
    *("args.checkpoint_steps=2", "args.checkpoint_total_limit=2", "args.logging_steps=1", "args.eval_num_samples=2"),
]


@dataclass
class Kill:
    aim: str  # "any moment" or "while saving"
    step: int  # last step in the killed process's records; -1: it had not begun
    resumed_at: int | None  # none: there was no checkpoint yet, so it started anew
    torn: int  # unfinished checkpoints that the kill left
    seconds: float  # from the start of the second process to its end


def start(folder: Path) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(ROOT / "train_magrpo.py"), *SETTINGS, "--resume", "auto"]
    with (folder / "out.txt").open("a") as out:
        return subprocess.Popen(command, cwd=folder, stdout=out, stderr=out, env=environment)


def finish(folder: Path) -> float:
    started = time.monotonic()
    process = start(folder)
    if process.wait() != 0:
        raise RuntimeError(f"the run in {folder} ended with {process.returncode}: {(folder / 'out.txt').read_text()}")
    return time.monotonic() - started


def newest(folder: Path) -> Path | None:
    return checkpoint.newest_run(folder / "runs", "run")


def lines(run: Path, name: str) -> list[dict]:
    records = [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if k != "time" and "time/" not in k} for record in records]


def result(folder: Path) -> dict:
    """Everything that has to be equal."""
    run = newest(folder)
    assert run is not None, folder
    last = checkpoint.newest_good(run / "checkpoints")
    assert last is not None, run
    hashes = checkpoint.verify(last)["files"]
    tensors = {name: value for name, value in hashes.items() if name.endswith(".safetensors")}
    models = {str(p.relative_to(run)): checkpoint.file_hash(p) for p in sorted(run.glob("model/*/model.safetensors"))}
    assert len(models) == 2, run
    return {**tensors, **models, "metrics": lines(run, "metrics"), "completions": lines(run, "completions")}


def steps_done(folder: Path) -> int:
    """Steps in the records of the newest run; -1 before there is one."""
    run = newest(folder)
    if run is None or not (run / "metrics.jsonl").exists():
        return -1
    whole = (run / "metrics.jsonl").read_bytes().rpartition(b"\n")[0].splitlines()
    return json.loads(whole[-1])["step"] if whole else -1


def kill(process: subprocess.Popen, folder: Path, aim: str, chance: random.Random) -> None:
    """Some time after a random step; or when the first checkpoint after that is being written."""
    step = chance.randint(-4, STEPS - 1)
    if step < 0:  # before there is anything
        time.sleep(chance.uniform(1, 10))
    while process.poll() is None and steps_done(folder) < step:
        time.sleep(0.01)
    if aim == "while saving":
        while process.poll() is None and not list(folder.glob("runs/*/checkpoints/.*")):
            time.sleep(0.0005)
        time.sleep(chance.uniform(0, 0.02))
    else:
        time.sleep(chance.uniform(0, 0.5))
    process.kill()
    process.wait()


def one(folder: Path, expected: dict, aim: str, chance: random.Random) -> Kill:
    kill(start(folder), folder, aim, chance)
    step, torn = steps_done(folder), len(list(folder.glob("runs/*/checkpoints/.*")))
    run = newest(folder)
    good = checkpoint.newest_good(run / "checkpoints") if run is not None else None
    resumed_at = checkpoint.read_checkpoint_metadata(good)["step"] if good is not None else None
    seconds = finish(folder)
    found = result(folder)
    different = [name for name in expected if found.get(name) != expected[name]]
    if different or found.keys() != expected.keys():
        raise AssertionError(f"{folder}: after a kill at step {step}, other {', '.join(different)}")
    finished = newest(folder)  # a run that was killed before its first checkpoint stays as it is beside it
    assert finished is not None
    if left := [path for path in finished.glob("checkpoints/*") if not checkpoint.NAME.match(path.name)]:
        raise AssertionError(f"{folder}: left behind {left}")
    return Kill(aim, step, resumed_at, torn, seconds)


def say(text: str) -> None:
    print(text, flush=True)


def torture(folder: Path, kills: int, seed: int) -> list[Kill]:
    """Raises AssertionError at the first run that is not as the undisturbed one."""
    chance = random.Random(seed)
    folder.mkdir(parents=True)
    duration = finish(folder / "undisturbed")
    expected = result(folder / "undisturbed")
    say(f"undisturbed: {duration:.1f} s, {len(expected['metrics'])} lines of metrics")
    done = []
    for number in range(kills):
        aim = ("any moment", "while saving")[number % 2]
        done.append(one(folder / f"kill-{number}", expected, aim, chance))
        say(f"kill {number + 1}: {done[-1]}")
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="a new folder for the runs; none: a temporary one")
    command = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        done = torture(command.folder or Path(scratch) / "torture", command.kills, command.seed)
    print(
        f"{len(done)} kills, all as undisturbed: {sum(k.torn > 0 for k in done)} left an unfinished checkpoint, "
        f"{sum(k.resumed_at is None for k in done)} came before the first one"
    )


if __name__ == "__main__":
    main()
