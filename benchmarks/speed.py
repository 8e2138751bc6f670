"""How fast an update is: this repository, the published package, TRL, and the floor of the machine, in one run.

    python benchmarks/speed.py                        # everything; an hour on two cores
    python benchmarks/speed.py --only small --quick   # minutes
    python benchmarks/speed.py --no-peers             # nothing is installed

The peers, comlrl 1.4.3 and trl 1.16.0, are installed into environments of their own (--peers says where). Every
system trains on the same prompts with the same settings, one job a process, in turns (ours, peer, ours, peer); a
number is the median over the jobs of the median time between the first reward calls of two updates, warm-up left
out. Ratios hold for one machine and one run. Results go to --out as speed.json and tables.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from floor import decode_step_seconds, floor_of, matmul_rate
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

from comlrl import embedded
from comlrl.agents import resolve_dtype

RUNNERS = Path(__file__).parent / "runners"
ROOT = Path(__file__).parent.parent
PEERS = {"published": "comlrl==1.4.3", "trl_grpo": "trl==1.16.0"}
# torch first and pinned: a range pulls another build.
PEER_REQUIREMENTS = ["torch==2.13.0", "gguf==0.19.0"]

SMALL = {"model": "tiny", "agents": 2, "prompts": 4, "samples": 4, "tokens": 64, "turns": 1, "learning_rate": 1e-4}
# Ours and TRL compute in bf16 where the machine is fast at it; the published package cannot.
FASTEST = str(resolve_dtype("auto", torch.device("cuda" if torch.cuda.is_available() else "cpu"))).split(".")[1]
REAL = {**SMALL, "model": "smollm2-135m", "learning_rate": 1e-6, "dtype": FASTEST}
TREE = {**SMALL, "prompts": 1, "turns": 3}
# name: (workload, peer, wanted ratio peer / ours)
COMPARISONS: dict[str, tuple[dict[str, Any], str, float]] = {
    "small": (SMALL, "published", 12.0),
    "tree": (TREE, "published", 20.0),
    "smollm2": (REAL, "published", 8.0),
    "trl": ({**REAL, "agents": 1}, "trl_grpo", 2.5),
}
SAMPLES = (2, 4, 8, 16, 32, 64)


def nodes_and_answers(workload: dict[str, Any]) -> tuple[int, int]:
    """Nodes, and joint answers, of one update: all nodes of its prompts' trees."""
    per_node = workload["samples"] ** (workload["agents"] if workload.get("joint_mode") == "cross" else 1)
    nodes = workload["prompts"] * sum(per_node**turn for turn in range(workload["turns"]))
    return nodes, nodes * per_node


def peer_python(name: str, folder: Path) -> Path:
    """The interpreter of a peer's environment, which is made on first use."""
    python = folder / name / "bin" / "python"
    stamp = folder / name / "complete"
    if not stamp.exists():
        print(f"installing {PEERS[name]} into {folder / name} (once; minutes)")
        subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *PEER_REQUIREMENTS, PEERS[name]], check=True)
        stamp.touch()
    return python


def run_job(runner: str, python: str | Path, workload: dict[str, Any], updates: int, seed: int = 0) -> dict[str, Any]:
    """One process; its result, see runners/clock.py."""
    nodes, answers = nodes_and_answers(workload)
    with tempfile.TemporaryDirectory() as folder:
        job = {"dtype": "float32", "cpu": not torch.cuda.is_available(), **workload}
        job |= {"model": embedded.resolve(workload["model"]), "updates": updates, "seed": seed, "folder": folder}
        job |= {"nodes": nodes, "answers": answers}
        Path(folder, "job.json").write_text(json.dumps(job))
        words = [str(python), str(RUNNERS / f"{runner}.py"), f"{folder}/job.json", f"{folder}/result.json"]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
        # Only our own runner may see this repository: the published package has the same name.
        environment["PYTHONPATH"] = str(ROOT) if runner == "ours" else ""
        log = Path(folder, "log.txt")
        with log.open("w") as output:
            process = subprocess.run(words, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=folder)
        if process.returncode != 0:
            raise RuntimeError(f"{runner} failed:\n{log.read_text()[-3000:]}")
        return json.loads(Path(folder, "result.json").read_text())


def compare(workload: dict[str, Any], peer: str, python: Path, repeats: int, updates: int) -> dict[str, Any]:
    """Seconds for each completion of an agent, of ours and of the peer, taken in turns."""
    ours, theirs = [], []
    for _ in range(repeats):
        ours.append(run_job("ours", sys.executable, workload, updates)["cycle"])
        theirs.append(run_job(peer, python, workload, updates)["cycle"])
    nodes, _ = nodes_and_answers(workload)
    completions = workload["agents"] * nodes * workload["samples"]
    seconds = statistics.median(ours) / completions, statistics.median(theirs) / completions
    return {"ours": seconds[0], "peer": seconds[1], "ratio": seconds[1] / seconds[0], "runs": [ours, theirs]}


def against_floor(workload: dict[str, Any], updates: int) -> dict[str, Any]:
    """The floor's share of our time: 1 would be a machine that does nothing but the products."""
    name = embedded.resolve(workload["model"])
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(name)
    sys.path.insert(0, str(RUNNERS))
    from clock import PROMPTS

    batch = workload["prompts"] * workload["samples"]
    prompt_tokens = sum(len(tokenizer(PROMPTS[i % len(PROMPTS)]).input_ids) for i in range(workload["prompts"]))
    parameters = sum(p.numel() for p in model.parameters())
    result: dict[str, Any] = {"ours": run_job("ours", sys.executable, workload, updates)["cycle"]}
    trained = batch * workload["tokens"]
    for dtype in dict.fromkeys([torch.bfloat16, resolve_dtype("auto", torch.device("cpu"))]):
        rate, step = matmul_rate(dtype), decode_step_seconds(model, batch, dtype)
        floor = floor_of(parameters, trained, prompt_tokens, workload["tokens"], rate, step)
        total = workload["agents"] * floor.total
        key = str(dtype).removeprefix("torch.")
        result[key] = {"rate": rate, "decode_step": step, "floor": total, "share": total / result["ours"]}
    return result


def growth(updates: int) -> dict[str, Any]:
    """Seconds of an update when one quantity grows and the others stay; and the fitted exponent."""
    small = {**SMALL, "prompts": 2}
    quantities: dict[str, Sequence[tuple[float, dict[str, Any]]]] = {
        "agents": [(n, {**small, "agents": n}) for n in (1, 2, 4)],
        "samples": [(n, {**small, "samples": n}) for n in SAMPLES],
        "tokens": [(n, {**small, "tokens": n}) for n in (16, 64, 256)],
        "turns": [(n, {**small, "turns": n, "samples": 2}) for n in (1, 2, 3, 4)],
        "branches": [(n, {**small, "turns": 2, "samples": n}) for n in (2, 4, 8)],
    }
    table = {}
    for name, points in quantities.items():
        seconds = [run_job("ours", sys.executable, workload, updates)["cycle"] for _, workload in points]
        table[name] = {"at": [at for at, _ in points], "seconds": seconds}
        table[name]["exponent"] = exponent([at for at, _ in points], seconds)
    with tempfile.TemporaryDirectory() as folder:
        sizes, seconds = [], []
        for width in (32, 64, 128, 256):
            path = f"{folder}/{width}"
            embedded.build_tiny(path, hidden_size=width)
            result = run_job("ours", sys.executable, {**small, "model": path}, updates)
            sizes.append(result["parameters"])
            seconds.append(result["cycle"])
        table["parameters"] = {"at": sizes, "seconds": seconds, "exponent": exponent(sizes, seconds)}
    return table


def exponent(at: Sequence[float], seconds: Sequence[float]) -> float:
    """b of the least-squares fit seconds = a * at^b."""
    x = torch.tensor(at, dtype=torch.float64).log()
    y = torch.tensor(seconds, dtype=torch.float64).log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())


def tables(results: dict[str, Any]) -> list[Table]:
    shown = []
    if any(name in results for name in COMPARISONS):
        table = Table("workload", "ours", "peer", "peer / ours", "wanted", title="seconds for a completion of an agent")
        for name, (_, peer, wanted) in COMPARISONS.items():
            if name in results:
                row = results[name]
                table.add_row(
                    f"{name} ({peer})", f"{row['ours']:.4f}", f"{row['peer']:.4f}", f"{row['ratio']:.1f}", f"{wanted}"
                )
        shown.append(table)
    if "samples" in results:
        table = Table("samples", "ours", "published", "published / ours", title="by the number of samples")
        for count, row in results["samples"].items():
            table.add_row(str(count), f"{row['ours']:.4f}", f"{row['peer']:.4f}", f"{row['ratio']:.1f}")
        shown.append(table)
    if "floor" in results:
        table = Table(
            "dtype", "floor (s)", "ours (s)", "floor / ours", "operations / s", title="the floor of an update"
        )
        for dtype in ("bfloat16", "float32"):
            if dtype in results["floor"]:
                row = results["floor"][dtype]
                ours = results["floor"]["ours"]
                table.add_row(dtype, f"{row['floor']:.2f}", f"{ours:.2f}", f"{row['share']:.2f}", f"{row['rate']:.2e}")
        shown.append(table)
    if "growth" in results:
        table = Table("quantity", "at", "seconds an update", "exponent", title="how cost grows (tiny model)")
        for name, row in results["growth"].items():
            at, seconds = ", ".join(map(str, row["at"])), ", ".join(f"{value:.2f}" for value in row["seconds"])
            table.add_row(name, at, seconds, f"{row['exponent']:.2f}")
        shown.append(table)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = [*COMPARISONS, "samples", "floor", "growth"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--quick", action="store_true", help="one repeat, two updates")
    parser.add_argument("--no-peers", action="store_true", help="leave out what needs another package")
    parser.add_argument("--peers", type=Path, default=embedded.cache_root() / "peers", help="their environments")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"))
    options = parser.parse_args()
    repeats, updates = (1, 2) if options.quick else (3, 4)
    results: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    options.out.mkdir(parents=True, exist_ok=True)
    for part in options.only:
        if part in COMPARISONS and not options.no_peers:
            workload, peer, _ = COMPARISONS[part]
            results[part] = compare(workload, peer, peer_python(peer, options.peers), repeats, updates)
        elif part == "samples" and not options.no_peers:
            python = peer_python("published", options.peers)
            results[part] = {n: compare({**SMALL, "samples": n}, "published", python, 1, 2) for n in SAMPLES}
        elif part == "floor":
            results[part] = against_floor(REAL, updates)
        elif part == "growth":
            results[part] = growth(updates)
        (options.out / "speed.json").write_text(json.dumps(results, indent=1))
    console = Console()
    for table in tables(results):
        console.print(table)
    print(f"results: {options.out / 'speed.json'}")


if __name__ == "__main__":
    main()
