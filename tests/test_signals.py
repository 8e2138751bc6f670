"""Signals: a worker saves and ends in time, the launcher passes them on, and nothing stays behind."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from stopping import assert_same_run, build, reward

from comlrl import checkpoint
from comlrl.signals import Abandoned, StopSignal
from comlrl.utils import read_checkpoint_metadata

ROOT = Path(checkpoint.__file__).parent.parent
FORWARD = [sys.executable, str(ROOT / "launch" / "forward.py")]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def kill_self(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


# ---- in the worker ----


def test_a_signal_ends_what_may_be_abandoned_at_once():
    done = []

    def work():
        kill_self()
        time.sleep(5)
        done.append("not reached")

    with StopSignal() as stop, pytest.raises(Abandoned), stop.abandonable():
        work()
    assert stop.requested == signal.SIGTERM
    assert done == []


def test_outside_it_is_only_noted():
    with StopSignal() as stop:
        kill_self()
        time.sleep(0.01)
        assert stop.requested == signal.SIGTERM
        with pytest.raises(Abandoned), stop.abandonable():
            raise AssertionError("not reached")
        with pytest.raises(SystemExit) as caught:
            stop.exit()
        assert caught.value.code == 143


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopSignal():
        assert signal.getsignal(signal.SIGINT) != before[0]
        kill_self()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize("kind", ["Exception", "BaseException"])
def test_it_cannot_be_swallowed(kind):
    def careless():
        try:
            kill_self()
            time.sleep(0.01)
        except {"Exception": Exception, "BaseException": BaseException}[kind]:
            pass

    with StopSignal() as stop, pytest.raises(Abandoned), stop.abandonable():
        careless()


@pytest.mark.parametrize("swallow", [Exception, BaseException])
def test_a_reward_that_swallows_errors_spoils_nothing(swallow):
    undisturbed = build(output_dir="a")
    undisturbed.train()
    calls = []

    def careless(first, second):
        calls.append(None)
        try:
            if len(calls) == 9:
                kill_self(signal.SIGINT)
            return reward(first, second)
        except swallow:
            return [0.0] * len(first)

    with pytest.raises(SystemExit) as caught:
        build(output_dir="b", reward_func=careless).train(checkpoint_dir="b/ck")
    assert caught.value.code == 130
    again = build(output_dir="b")
    again.train("b/ck", checkpoint_dir="b/ck")
    assert_same_run(undisturbed, again)


def test_a_long_rollout_is_not_waited_for():
    calls = []

    def slow(first, second):
        calls.append(None)
        if len(calls) == 6:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            time.sleep(300)
        return reward(first, second)

    previous = signal.signal(signal.SIGALRM, lambda number, frame: kill_self())
    trainer = build(output_dir="b", reward_func=slow, checkpoint_steps=1)
    started = time.monotonic()
    with pytest.raises(SystemExit) as caught:
        trainer.train(checkpoint_dir="b/ck")
    signal.signal(signal.SIGALRM, previous)
    assert caught.value.code == 143
    assert time.monotonic() - started < 30
    saved = checkpoint.newest_good(Path("b/ck"))
    assert read_checkpoint_metadata(saved)["step"] == 1
    log = Path("b/run/log.txt").read_text()
    assert f"stopped by signal 15 after step 1, saved in {saved}" in log


def test_async_rewards_are_cancelled_too():
    import asyncio

    calls = []

    async def slow(first, second):
        calls.append(None)
        if len(calls) == 9:
            asyncio.get_running_loop().call_later(0.2, kill_self)
            await asyncio.sleep(300)
        return reward(first, second)

    trainer = build(output_dir="b", reward_func=slow)
    started = time.monotonic()
    with pytest.raises(SystemExit):
        trainer.train(checkpoint_dir="b/ck")
    assert time.monotonic() - started < 30
    assert read_checkpoint_metadata(checkpoint.newest_good(Path("b/ck")))["step"] > 0


SCRIPT = """
import os, signal, sys, time
from comlrl.signals import Abandoned, StopSignal, end_with_parent
end_with_parent()
print(os.getpid(), file=open("started.part", "w"), flush=True)
os.rename("started.part", "started")
with StopSignal() as stop:
    try:
        with stop.abandonable():
            time.sleep(300)
    except Abandoned:
        print("saving", file=open("saving", "w"), flush=True)
        time.sleep(float(sys.argv[1]))
        print("saved", file=open("saved", "w"), flush=True)
        stop.exit()
"""


@pytest.fixture
def script(tmp_path):
    """A worker that takes its first argument's seconds to save."""
    path = tmp_path / "worker.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_second_ctrl_c_exits_at_once(script):
    worker = subprocess.Popen([sys.executable, script, "300"], env=ENVIRONMENT)
    wait_for(Path("started").exists)
    worker.send_signal(signal.SIGINT)
    wait_for(Path("saving").exists)
    worker.send_signal(signal.SIGINT)
    assert worker.wait(5) == -signal.SIGINT  # 130 in a shell
    assert not Path("saved").exists()


def test_a_second_sigterm_changes_nothing(script):
    worker = subprocess.Popen([sys.executable, script, "1"], env=ENVIRONMENT)
    wait_for(Path("started").exists)
    worker.send_signal(signal.SIGINT)
    wait_for(Path("saving").exists)
    worker.send_signal(signal.SIGTERM)  # the kernel's, as the launcher is gone
    assert worker.wait(20) == 130
    assert Path("saved").exists()


# ---- launchers ----

LAUNCHER = """
import os, subprocess, sys
environment = {**os.environ, "ACCELERATE_MIXED_PRECISION": "no"}
sys.exit(1 if subprocess.Popen([sys.executable, *sys.argv[1:]], env=environment).wait() else 0)
"""


@pytest.fixture
def launcher(tmp_path):
    """Like `accelerate launch`: it forwards nothing, and every failure of the worker becomes a 1."""
    path = tmp_path / "launcher.py"
    path.write_text(LAUNCHER)
    return [sys.executable, str(path)]


def descendants(process):
    return psutil.Process(process.pid).children(recursive=True)


def assert_gone(processes, seconds=15):
    _, left = psutil.wait_procs(processes, seconds)
    assert [p for p in left if p.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_worker_saves_and_ends_when_its_launcher_dies(launcher, script, number):
    process = subprocess.Popen([*launcher, script, "0.5"], env=ENVIRONMENT)
    wait_for(Path("started").exists)
    worker = descendants(process)
    process.send_signal(number)
    process.wait()
    assert_gone(worker)
    assert Path("saved").exists()


def test_a_worker_started_by_hand_outlives_its_parent(script):
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, {script!r}, '0'])"
    environment = {key: value for key, value in ENVIRONMENT.items() if key != "ACCELERATE_MIXED_PRECISION"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    wait_for(Path("started").exists)
    worker = psutil.Process(int(Path("started").read_text()))
    time.sleep(0.3)
    assert worker.is_running()
    assert not Path("saving").exists()
    worker.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143)])
def test_forward_passes_signals_on_and_waits(launcher, script, number, code):
    process = subprocess.Popen([*FORWARD, *launcher, script, "2"], env=ENVIRONMENT)
    wait_for(Path("started").exists)
    everyone = descendants(process)
    process.send_signal(number)
    wait_for(Path("saving").exists)
    assert process.wait(30) == code
    assert Path("saved").exists()
    assert_gone(everyone, 0)


def test_forward_passes_a_second_ctrl_c_on(launcher, script):
    process = subprocess.Popen([*FORWARD, *launcher, script, "300"], env=ENVIRONMENT)
    wait_for(Path("started").exists)
    everyone = descendants(process)
    process.send_signal(signal.SIGINT)
    wait_for(Path("saving").exists)
    process.send_signal(signal.SIGINT)
    assert process.wait(15) == 130
    assert not Path("saved").exists()
    assert_gone(everyone, 0)


def test_forward_before_there_is_a_worker():
    process = subprocess.Popen([*FORWARD, sys.executable, "-c", "import time; time.sleep(300)"], env=ENVIRONMENT)
    wait_for(lambda: descendants(process))
    process.send_signal(signal.SIGTERM)
    assert process.wait(15) == 143


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child")
def test_all_end_when_forward_is_killed(launcher, script):
    process = subprocess.Popen([*FORWARD, *launcher, script, "0"], env=ENVIRONMENT)
    wait_for(Path("started").exists)
    everyone = descendants(process)
    process.kill()
    process.wait()
    assert_gone(everyone)
    assert Path("saved").exists()


@pytest.mark.parametrize(("program", "code"), [("pass", 0), ("raise SystemExit(3)", 3), ("import os; os.abort()", 134)])
def test_forward_gives_the_launchers_code(program, code):
    assert subprocess.run([*FORWARD, sys.executable, "-c", program], env=ENVIRONMENT).returncode == code


def test_forward_leaves_nobody_behind(tmp_path):
    """A stray that the worker started in its session, and that nobody waits for."""
    worker = "import subprocess; print(subprocess.Popen(['sleep', '300']).pid, flush=True)"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}])"
    done = subprocess.run(
        [*FORWARD, sys.executable, "-c", launcher], env=ENVIRONMENT, stdout=subprocess.PIPE, timeout=40
    )
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(done.stdout)).status() == psutil.STATUS_ZOMBIE


# ---- the real thing ----

RUN = [
    *("model=tiny", "task=length_ratio", "args.run_name=run", "args.num_generations=2", "args.max_new_tokens=8"),
    *("args.num_train_epochs=1000", "args.eval_interval=0", "args.checkpoint_interval=none", "args.num_turns=1"),
    *("args.checkpoint_total_limit=2", "args.reward_timeout=60"),
]
ACCELERATE = [
    *(sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--num_processes", "1", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no", str(ROOT / "train_magrpo.py")),
]


def steps_done():
    path = Path("runs/run/metrics.jsonl")
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("forward", [True, False])
def test_accelerate_launch_leaves_no_process_and_a_good_checkpoint(number, forward):
    """Without forward.py the kernel tells the worker, a moment later."""
    process = subprocess.Popen(
        [*(FORWARD if forward else []), *ACCELERATE, *RUN], env=ENVIRONMENT, start_new_session=True
    )
    wait_for(lambda: steps_done() >= 3, 180)
    everyone = descendants(process)
    assert len(everyone) >= 3  # the worker, and the two processes of its reward
    process.send_signal(number)
    code = process.wait(60)
    assert code == (128 + number if forward else code)
    assert_gone(everyone, 15)
    saved = checkpoint.newest_good(Path("runs/run/checkpoints"))
    state = checkpoint.read(saved).state
    lines = [json.loads(line) for line in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    assert state["step"] == lines[-1]["step"] >= 3
    assert "stopped by signal" in Path("runs/run/log.txt").read_text()


@pytest.mark.full
def test_quickstart_script_forwards(tmp_path):
    """The shell script ends with the signal's code, and its worker has saved."""
    command = ["bash", str(ROOT / "launch" / "quickstart.sh"), *RUN, f"args.output_dir={tmp_path / 'runs'}"]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**ENVIRONMENT, "PATH": path, "VIRTUAL_ENV": sys.prefix}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    wait_for(lambda: steps_done() >= 2, 180)
    everyone = descendants(process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    assert_gone(everyone, 15)
    checkpoint.verify(checkpoint.newest_good(Path("runs/run/checkpoints")))
