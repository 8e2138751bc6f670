"""Several processes: the same samples, gradients and weights as one, whatever divides the work."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from processes import (
    ENVIRONMENT,
    ROOT,
    assert_same,
    distance,
    finish,
    lines,
    moved,
    sampled,
    start,
    torchrun,
    train,
    weights,
)
from transformers import AutoModelForCausalLM

from comlrl import checkpoint
from comlrl.agents import load_model, load_tokenizer

GROUPS = "args.placement={agents: [[0], [1]]}"
GROUPS_OF_TWO = "args.placement={agents: [[0, 1], [2, 3]]}"
TASKS = {
    "one turn": ["task=pairing"],
    "two turns": ["task=two_turn", "args.reference_kl_enabled=true", "args.epochs_per_rollout=2"],
    "cross": ["task=two_turn", "args.joint_mode=cross", "args.num_generations=2"],
    "centralised": [  # tiny never writes the sections, so that reward is what is learned from
        *("algorithm=centralized_magrpo", "task=two_turn", "args.max_new_tokens=24"),
        *("args.unparsable_reward=1.0", "args.advantage_mode=raw"),
    ],
    "uneven": ["task=two_turn", "args.rollout_buffer_size=1", "args.micro_batch_tokens=60", "args.mask_truncated=true"],
}
ACTOR_CRITIC = ["task=two_turn", "args.num_generations=2", "args.critic_learning_rate=1e-3"]
TASKS |= {
    "maac": ["algorithm=maac", *ACTOR_CRITIC],
    "iac": ["algorithm=iac", *ACTOR_CRITIC],
    "shared": ["algorithm=iac", "args.use_separate_critic=false", *ACTOR_CRITIC[:2]],
}
MODES = {
    "two processes": (2, []),
    "groups": (2, [GROUPS]),
    "overlapping groups": (2, ["args.placement={agents: [[0, 1], [1]]}"]),
    "zero 1": (2, ["args.deepspeed_config=ds_configs/zero1.json"]),
    "zero 2": (2, ["args.deepspeed_config=ds_configs/zero2.json"]),
    "zero 3": (2, ["args.deepspeed_config=ds_configs/zero3.json"]),
    "zero 2, offload": (2, ["args.deepspeed_config=ds_configs/zero2_offload.json"]),
    "zero 3, offload": (2, ["args.deepspeed_config=ds_configs/zero3_offload.json"]),
    "four processes": (4, []),
    "groups of two, zero 2": (4, [GROUPS_OF_TWO, "args.deepspeed_config=ds_configs/zero2.json"]),
    "groups of two, zero 3": (4, [GROUPS_OF_TWO, "args.deepspeed_config=ds_configs/zero3.json"]),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Runs of one process, each made once, by task."""
    runs = {}

    def get(task):
        if task not in runs:
            runs[task] = train(1, tmp_path_factory.mktemp("alone"), *TASKS[task])
        return runs[task]

    return get


@pytest.mark.parametrize("mode", ["two processes", "groups", "zero 2"])
def test_same_result_in_several_processes(alone, mode, tmp_path):
    processes, settings = MODES[mode]
    task = "one turn"
    assert_same(alone(task), train(processes, tmp_path, *TASKS[task], *settings), agents=2)


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_same_result_of_two_turns_in_every_mode(alone, mode, tmp_path):
    processes, settings = MODES[mode]
    assert_same(alone("two turns"), train(processes, tmp_path, *TASKS["two turns"], *settings), agents=2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("task", "mode"),
    [
        ("cross", "zero 3"),
        ("cross", "groups"),
        ("centralised", "zero 2"),
        ("uneven", "four processes"),
        ("uneven", "zero 3"),
        ("uneven", "groups of two, zero 2"),
    ],
)
def test_same_result_of_other_trees(alone, task, mode, tmp_path):
    processes, settings = MODES[mode]
    agents = 1 if task == "centralised" else 2
    assert_same(alone(task), train(processes, tmp_path, *TASKS[task], *settings), agents)


CRITICS_APART = "args.placement={agents: [[0], [1]], critics: [[1]]}"


@pytest.mark.full
@pytest.mark.parametrize(
    ("task", "processes", "settings"),
    [
        ("maac", 2, ["args.deepspeed_config=ds_configs/zero2.json"]),
        ("maac", 2, ["args.deepspeed_config=ds_configs/zero3.json"]),
        ("maac", 2, [CRITICS_APART]),
        ("iac", 2, []),
        ("iac", 2, ["args.deepspeed_config=ds_configs/zero1.json"]),
        ("shared", 2, ["args.deepspeed_config=ds_configs/zero2.json"]),
    ],
)
def test_critics_are_the_same_in_several_processes(alone, task, processes, settings, tmp_path):
    assert_same(alone(task), train(processes, tmp_path, *TASKS[task], *settings), agents=2)


# ---- checkpoints ----------------------------------------------------------------------------------------------------

RESUMABLE = [*TASKS["two turns"], "args.eval_interval=0", "args.checkpoint_steps=2", "args.max_steps=6"]


def resume(processes, out, *settings):
    launcher = torchrun(processes) if processes > 1 else [sys.executable]
    finish(start(launcher, out, [*RESUMABLE, "--resume", "auto", *settings]))


@pytest.mark.full
@pytest.mark.parametrize("mode", ["two processes", "zero 2", "zero 3", "groups"])
def test_a_resumed_run_is_the_undisturbed_one_bit_for_bit(mode, tmp_path):
    processes, settings = MODES[mode]
    whole = train(processes, tmp_path / "whole", *RESUMABLE, *settings)
    train(processes, tmp_path / "parts", *RESUMABLE, *settings, "args.max_steps=3")
    resume(processes, tmp_path / "parts", *settings)
    parts = tmp_path / "parts" / "run"
    assert sampled(parts) == sampled(whole)
    assert weights(parts).keys() == weights(whole).keys()
    assert distance(weights(parts), weights(whole)) == 0.0
    steps = [line["step"] for line in lines(parts, "metrics")]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.full
def test_a_checkpoint_goes_on_with_other_numbers_of_processes_and_stages(tmp_path):
    """2 processes with ZeRO-2, then 1, then 4 in groups with ZeRO-3."""
    whole = train(1, tmp_path / "whole", *RESUMABLE)
    out = tmp_path / "parts"
    train(2, out, *RESUMABLE, "args.deepspeed_config=ds_configs/zero2.json", "args.max_steps=2")
    layout = files(out)
    resume(1, out, "args.max_steps=4")
    assert files(out) == layout
    resume(4, out, GROUPS_OF_TWO, "args.deepspeed_config=ds_configs/zero3.json")
    assert files(out) == layout
    run = out / "run"
    assert sampled(run) == sampled(whole)
    pristine = dict(load_model("tiny").named_parameters())
    start_weights = {key: pristine[key[1]].detach() for key in weights(run)}
    assert distance(weights(run), weights(whole)) < 0.01 * moved(whole, start_weights)


def files(out):
    newest = checkpoint.newest_good(out / "run" / "checkpoints")
    return sorted(str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file())


# ---- faults ---------------------------------------------------------------------------------------------------------

FAULTY = """
import os, sys, time
from comlrl.tasks.matrix_game import pairing as game

RANK = int(os.environ["RANK"])
calls = 0


def pairing(num_agents: int):
    task = game(num_agents)
    score = task.score

    def faulty(row, texts):
        global calls
        calls += 1
        {fault}
        return score(row, texts)

    task.score = faulty
    return task
"""


def faulty_task(tmp_path, fault):
    path = tmp_path / "faulty.py"
    path.write_text(FAULTY.format(fault=fault))
    return [f"task={path}:pairing"]


def ends(processes, out, settings, seconds=60):
    """What is printed by a run that fails within this time."""
    process = start(torchrun(processes), out, settings)
    try:
        text, _ = process.communicate(timeout=seconds + 30)
    finally:
        process.kill()
    assert process.returncode != 0
    return text


def children_of_test():
    found = subprocess.run(["pgrep", "-f", "train_magrpo.py"], capture_output=True, text=True, check=False)
    return found.stdout.split()


@pytest.mark.full
def test_an_error_in_one_process_ends_all_and_is_the_one_that_is_shown(tmp_path):
    fault = "if RANK == 1 and calls > 5: raise OSError('the disk of rank 1')"
    settings = faulty_task(tmp_path, fault)
    began = time.monotonic()
    text = ends(2, tmp_path, settings)
    assert time.monotonic() - began < 60
    summary = text[text.index("Root Cause (first observed failure)") :]
    assert "rank      : 1" in summary
    assert "the disk of rank 1" in text
    assert "process 0 ends: process 1 failed" in text
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "process 1 failed" in log
    assert "the disk of rank 1" in log
    # What was computed is saved: all processes were still together.
    assert checkpoint.newest_good(tmp_path / "run" / "checkpoints") is not None


@pytest.mark.full
def test_a_killed_process_ends_all(tmp_path):
    settings = faulty_task(tmp_path, "if RANK == 1 and calls > 5: os.kill(os.getpid(), 9)")
    began = time.monotonic()
    text = ends(2, tmp_path, settings)
    assert time.monotonic() - began < 60
    summary = text[text.index("Root Cause (first observed failure)") :]
    assert "rank      : 1" in summary
    assert "exitcode  : -9" in summary


@pytest.mark.full
def test_long_work_in_one_process_is_waited_for(tmp_path):
    settings = faulty_task(tmp_path, "if RANK == 1 and calls == 5: time.sleep(20)")
    run = train(2, tmp_path, *settings, "args.collective_timeout=10")
    assert lines(run, "metrics")[-1]["step"] == 3


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_leaves_no_process(tmp_path, number):
    settings = [*faulty_task(tmp_path, "time.sleep(0.05)"), "args.max_steps=1000"]
    process = start([sys.executable, "launch/forward.py", *torchrun(2)], tmp_path, settings)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.2)
    process.send_signal(number)
    process.communicate(timeout=45)
    deadline = time.monotonic() + 15
    while (left := [p for p in children_of_test() if str(tmp_path) in command_of(p)]) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []
    assert process.returncode != 0
    assert checkpoint.newest_good(tmp_path / "run" / "checkpoints") is not None


def command_of(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


@pytest.mark.full
def test_kill_9_under_zero_2_loses_nothing(tmp_path):
    """As in one process: whenever it is killed, the resumed run ends with the same weights."""
    settings = [*RESUMABLE, "args.deepspeed_config=ds_configs/zero2.json"]
    whole = train(2, tmp_path / "whole", *settings)
    for kill_at in (1, 4):
        out = tmp_path / f"killed-{kill_at}"
        process = start(torchrun(2), out, settings)
        metrics = out / "run" / "metrics.jsonl"
        while not metrics.exists() or metrics.read_text().count("\n") < kill_at:
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.01)
        for pid in children_of_test():
            if str(out) in command_of(pid):
                os.kill(int(pid), signal.SIGKILL)
        process.wait(timeout=60)
        resume(2, out, "args.deepspeed_config=ds_configs/zero2.json")
        runs = sorted((path for path in out.iterdir() if path.is_dir()), key=lambda p: len(p.name))
        assert sampled(runs[-1]) == sampled(whole)
        assert distance(weights(runs[-1]), weights(whole)) == 0.0


SHORT_OF_MEMORY = """
import os
import torch
from comlrl.engine import Engine
from comlrl.tasks.matrix_game import two_turn

failed = []
backward = Engine.backward


def short_of_memory(self, loss, last=True):
    if os.environ.get("RANK") == "1" and not failed:
        failed.append(True)
        raise torch.OutOfMemoryError("injected")
    backward(self, loss, last)


Engine.backward = short_of_memory
"""


@pytest.mark.full
def test_memory_that_runs_out_in_one_process_halves_the_batch_in_all(alone, tmp_path):
    path = tmp_path / "short.py"
    path.write_text(SHORT_OF_MEMORY)
    settings = [f"task={path}:two_turn" if s == "task=two_turn" else s for s in TASKS["two turns"]]
    run = train(2, tmp_path, *settings)
    assert_same(alone("two turns"), run, agents=2)
    said = [line for line in (run / "log.txt").read_text().splitlines() if "out of memory" in line]
    assert len(said) == 1
    assert re.search(r"micro_batch_tokens is \d+ from now on \(in another process\)", said[0])


# ---- the plan -------------------------------------------------------------------------------------------------------


def test_a_dry_run_prints_the_placement_once(tmp_path):
    settings = [*TASKS["one turn"], GROUPS, "--dry-run"]
    text = finish(start(torchrun(2), tmp_path, settings))
    assert text.count("agent_0: tiny") == 1
    assert "ranks 0, computes in float32" in text
    assert "ranks 1, computes in float32" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["args.agent_devices=auto", "args.deepspeed_config=ds_configs/zero2.json"], "agent_devices='auto' is for one"),
        (["args.placement={agents: [[0], [5]]}"], "ranks go from 0 to 1, as 2 process"),
        (["args.placement={agents: [[0], []]}"], "a model needs at least one rank"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(tmp_path, settings, message):
    process = start(torchrun(2), tmp_path, [*TASKS["one turn"], *settings, "--dry-run"])
    text, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert message in text
    assert 'train_magrpo.py", line' not in text  # one line; the launcher adds its own summary


@pytest.mark.full
@pytest.mark.parametrize("mode", ["zero 2", "zero 3", "groups of two, zero 3"])
def test_agents_of_different_widths_have_engines_of_their_own(mode, tmp_path):
    wide = load_model("tiny").config
    wide.hidden_size, wide.intermediate_size = 96, 128
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(wide).save_pretrained(tmp_path / "wide")
    load_tokenizer("tiny").save_pretrained(tmp_path / "wide")
    settings = [*TASKS["two turns"], f"models=[tiny, {tmp_path / 'wide'}]"]
    processes, more = MODES[mode]
    alone, divided = train(1, tmp_path / "alone", *settings), train(processes, tmp_path / "divided", *settings, *more)
    assert sampled(alone) == sampled(divided)
    pristine = [dict(load_model(source).named_parameters()) for source in ("tiny", str(tmp_path / "wide"))]
    begun = {(agent, name): pristine[int(agent[-1])][name].detach() for agent, name in weights(alone)}
    assert distance(weights(alone), weights(divided)) < 0.01 * moved(alone, begun)


@pytest.mark.parametrize("code", [0, 143])
def test_a_script_with_process_groups_ends_with_its_exit_code_and_its_exit_handlers(code, tmp_path):
    """It leaves before the interpreter is taken apart, which gloo's threads do not always survive."""
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, sys\n"
        "from comlrl.processes import World, run_script\n"
        "class Teardown:\n"
        "    def __del__(self):\n"
        "        print('taken apart')\n"
        "kept = Teardown()\n"
        "def main():\n"
        "    World(deepspeed=True)\n"  # a process group, also in one process
        "    atexit.register(print, 'handlers ran')\n"
        f"    if {code}:\n"
        f"        sys.exit({code})\n"
        "run_script(main)\n"
    )
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}  # the script is elsewhere
    done = subprocess.run([sys.executable, script], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (code, "handlers ran\n"), done.stderr
