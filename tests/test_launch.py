"""The scripts of launch/ and the files of ds_configs/: syntax, names, real and dry runs, and what SLURM is told."""

import signal
import socket
import subprocess
import sys
import time

import pytest
from processes import ENVIRONMENT, ROOT, SETTINGS, assert_same, finish, lines, train

from comlrl import checkpoint
from comlrl.zero import read_config

SCRIPTS = sorted([*(ROOT / "launch").glob("*.sh"), *(ROOT / "launch").glob("*.sbatch")])
TASK = ["task=pairing", "args.max_steps=1", "args.eval_interval=0"]
PAIRS = ["algorithm=madpo", "args.preference_num_candidates=8", "args.num_generations=4"]
ARGUMENTS = {
    "train_magrpo.py": TASK,
    "train_ac.py": ["algorithm=maac", "critic_model=tiny", "args.num_generations=1", *TASK],
    "train_pbrl.py": [*PAIRS, *TASK],
}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_syntax_of_each_script(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "set -euo pipefail" in script.read_text() or script.name == "setup.sh"  # setup.sh is sourced


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "ds_configs").glob("*.json")))
def test_each_deepspeed_file_has_the_stage_and_offload_of_its_name(name):
    zero = read_config(f"{ROOT}/ds_configs/{name}")["zero_optimization"]
    assert zero["stage"] == int(name.removeprefix("zero")[0])
    assert ("offload_optimizer" in zero) == ("offload" in name)
    assert (ROOT / "launch" / "accelerate" / name.replace(".json", ".yaml")).read_text().count(
        f"ds_configs/{name}"
    ) == 1


# ---- real runs ------------------------------------------------------------------------------------------------------


def launch(words, out, settings, **environment):
    return subprocess.Popen(
        [*words, *SETTINGS, f"args.output_dir={out}", *settings],
        cwd=ROOT,
        env={**ENVIRONMENT, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return train(1, tmp_path_factory.mktemp("alone"), "task=pairing")


@pytest.mark.full
def test_zero_2(alone, tmp_path):
    """`accelerate launch` with its file."""
    finish(launch(["bash", "launch/zero2.sh"], tmp_path, ["task=pairing"], PROCESSES="2"))
    assert_same(alone, tmp_path / "run", agents=2)


@pytest.mark.full
def test_two_machines(alone, tmp_path):
    """Two launchers meet on this one; every model is divided over both by ZeRO-3."""
    place = {"MACHINES": "2", "GPUS": "1", "MAIN_ADDRESS": "127.0.0.1", "MAIN_PORT": free_port()}
    words = ["bash", "launch/machines.sh"]
    both = [launch(words, tmp_path, ["task=pairing"], MACHINE=str(number), **place) for number in range(2)]
    for process in both:
        finish(process)
    assert_same(alone, tmp_path / "run", agents=2)


@pytest.mark.full
def test_groups(alone, tmp_path):
    finish(launch(["bash", "launch/groups.sh"], tmp_path, ["task=pairing"]))
    assert_same(alone, tmp_path / "run", agents=2)


@pytest.mark.full
@pytest.mark.parametrize(("script", "program"), [("zero3.sh", "train_ac.py"), ("zero2.sh", "train_pbrl.py")])
def test_zero_with_the_other_scripts(script, program, tmp_path):
    finish(launch(["bash", f"launch/{script}"], tmp_path, ARGUMENTS[program], PROCESSES="2", SCRIPT=program))
    assert lines(tmp_path / "run", "metrics")[-1]["step"] == 1


# ---- dry runs -------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "program"),
    [
        ("ddp", "train_magrpo.py"),
        ("zero1", "train_ac.py"),
        ("zero1_offload", "train_pbrl.py"),
        ("zero2_offload", "train_magrpo.py"),
        ("zero3_offload", "train_ac.py"),
    ],
)
def test_dry_runs_of_the_accelerate_files(name, program, tmp_path):
    words = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", f"launch/accelerate/{name}.yaml"]
    text = finish(launch([*words, program], tmp_path, [*ARGUMENTS[program], "--dry-run"]))
    stage = "" if name == "ddp" else f", ZeRO-{name[4]}"
    assert text.count(f"processes\n  2{stage}\n") == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "program", "where"),
    [
        ("one_gpu.sh", "train_pbrl.py", ["\n  agent_0: tiny, 0.1 M parameters, cpu,", "processes\n  1\n"]),
        ("gpu_per_agent.sh", "train_magrpo.py", ["agent_0: tiny, 0.1 M parameters, ranks 0,", "ranks 1,"]),
    ],
)
def test_dry_runs_of_the_scripts(script, program, where, tmp_path):
    words = ["bash", f"launch/{script}"]
    text = finish(launch(words, tmp_path, [*ARGUMENTS[program], "--dry-run"], SCRIPT=program))
    assert [text.count(said) for said in where] == [1, 1]


# ---- SLURM ----------------------------------------------------------------------------------------------------------


def test_what_slurm_is_told():
    told = [line.split()[1] for line in (ROOT / "launch/slurm.sbatch").read_text().splitlines() if "#SBATCH" in line]
    assert {"--requeue", "--open-mode=append", "--ntasks-per-node=1", "--signal=B:TERM@120"} <= set(told)


SRUN = """#!/usr/bin/env bash
[ "$1" = --kill-on-bad-exit=1 ] || exit 3
shift
SLURM_NNODES=1 SLURM_NODEID=0 SLURM_GPUS_ON_NODE=1 exec "$@"
"""
SCONTROL = """#!/usr/bin/env bash
case "$1" in
    show) echo 127.0.0.1 ;;
    requeue) echo "$2" >> "$REQUEUED" ;;
esac
"""


@pytest.mark.full
def test_a_job_that_is_told_to_end_saves_goes_back_into_the_queue_and_goes_on(tmp_path):
    """With programs in the place of SLURM's, which know one node."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    place = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1]"}
    place |= {"REQUEUED": str(tmp_path / "requeued"), "DEEPSPEED_CONFIG": "null"}
    place["PATH"] = f"{tmp_path}:{ENVIRONMENT['PATH']}"
    words, settings = ["bash", "launch/slurm.sbatch"], ["task=pairing", "args.eval_interval=0"]
    process = launch(words, tmp_path, [*settings, "args.max_steps=100000"], MAIN_PORT=free_port(), **place)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)  # the batch script alone gets it, as --signal=B:TERM says
    finish(process)
    assert (tmp_path / "requeued").read_text() == "7\n"
    assert checkpoint.newest_good(tmp_path / "run" / "checkpoints") is not None
    done = len(lines(tmp_path / "run", "metrics"))
    assert done >= 2
    finish(launch(words, tmp_path, [*settings, f"args.max_steps={done + 2}"], MAIN_PORT=free_port(), **place))
    assert (tmp_path / "requeued").read_text() == "7\n"
    assert [line["step"] for line in lines(tmp_path / "run", "metrics")] == list(range(1, done + 3))
