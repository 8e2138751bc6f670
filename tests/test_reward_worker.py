"""The reward contract: functions with a time limit run in a worker process, and none is left behind."""

import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
from reward_calls import LIMIT, Unlucky, children, gone, make_call, started, values

from comlrl.rewards import (
    RewardCall,
    RewardContractError,
    Rewards,
)


def test_one_hung_sample_costs_one_sample_and_the_run_goes_on(make_rewards):
    before = children()
    pids = []

    def f(c1, c2):
        if c1 == ["a3"]:
            time.sleep(3600)
        return [{"reward": 1.0, "pid": os.getpid()}]

    rewards = make_rewards(f, 2, batch_size=1, timeout=LIMIT, on_error="skip")
    assert started(before, 2)  # a supervisor and a worker
    for _ in range(2):
        node = rewards([make_call(samples=5)])[0]
        assert [reward.value for reward in node] == [1.0, 1.0, 1.0, None, 1.0]
        pids += [reward.parts["pid"] for reward in node if reward.value is not None]
    assert rewards.counters["timeouts"] == 2
    assert "sample s0.3: TimeoutError" in rewards.incidents[0]
    assert len(set(pids)) == 3  # before, between and after the two kills
    assert os.getpid() not in pids
    assert all(gone(int(pid)) for pid in set(pids[:-1]) - {pids[-1]})
    assert started(before, 2)
    rewards.close()
    assert children() == before


def test_a_hung_call_costs_its_whole_chunk(make_rewards):
    def f(c1, c2):
        if "a3" in c1:
            time.sleep(3600)
        return [1.0] * len(c1)

    rewards = make_rewards(f, 2, batch_size=2, timeout=LIMIT, on_error="skip")
    assert values(rewards([make_call(samples=6)])) == [[1.0, 1.0, None, None, 1.0, 1.0]]
    assert rewards.counters["timeouts"] == 1


def test_a_time_out_raises_and_names_function_and_samples(make_rewards):
    def hang(c1, c2):
        time.sleep(3600)

    rewards = make_rewards(hang, 2, timeout=LIMIT)
    with pytest.raises(TimeoutError, match=r"reward_timeout=0\.5 s \(hang on row 0, turn 1, node 0/2, samples s0\.0"):
        rewards([make_call()])


def test_alarms_work_in_the_worker(make_rewards):
    """They need a main thread, also where the trainer itself is in another thread."""

    class Late(Exception):
        pass

    def on_alarm(number, frame):
        raise Late

    def f(c1, c2):
        assert threading.current_thread() is threading.main_thread()
        signal.signal(signal.SIGALRM, on_alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            time.sleep(3600)
        except Late:
            return [0.5] * len(c1)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    results = []

    def trainer():
        rewards = Rewards(f, 2, timeout=30)
        results.extend(rewards([make_call()]))
        rewards.close()

    thread = threading.Thread(target=trainer)
    thread.start()
    thread.join(20)
    assert [reward.value for reward in results[0]] == [0.5] * 3


def test_the_worker_keeps_the_contract(make_rewards):
    rows = []

    def f(c1, c2, batch_items, prompts):  # a closure
        rows.append(1)
        assert batch_items[0] is batch_items[1]
        return torch.tensor([float(len(rows)), 2.0, float(batch_items[0]["index"])])

    async def g(c1, c2):
        return [None, 1.0, {"reward": 1.0, "pid": os.getpid()}]

    rewards = make_rewards([f, g], 2, timeout=30, weights=[1, 10])
    assert values(rewards([make_call(row=4), make_call(row=5)])) == [[None, 12.0, 14.0], [None, 12.0, 15.0]]
    assert rewards([make_call()])[0][0].parts == {"f": 3.0}  # the worker lives on between calls
    assert rewards([make_call()])[0][2].parts["g/pid"] == os.getpid()  # async functions stay here
    assert rows == []  # what the function stores stays there
    assert rewards.counters["none"] == 4

    for on_error in ("raise", "skip"):
        wrong = make_rewards(lambda c1, c2: [1.0], 2, timeout=30, on_error=on_error)
        with pytest.raises(RewardContractError, match=r"a list of 3 rewards.* got 1.*reward_batch_size: 1.*row 0"):
            wrong([make_call()])


def test_exceptions_come_back_from_the_worker(make_rewards):
    class Local(Exception):
        """Does not pickle."""

    def f(c1, c2):
        raise {"a0": ValueError("out of range"), "b0": Unlucky(5), "c0": Local("lost")}[c1[0]]

    def call(first):
        return RewardCall({}, ["", ""], [[first], [first]], "row 0", ["s"])

    rewards = make_rewards(f, 2, timeout=30)
    with pytest.raises(ValueError, match="out of range") as caught:
        rewards([call("a0")])
    assert str(caught.value) == "out of range"
    assert type(caught.value) is ValueError
    if sys.version_info >= (3, 11):
        assert "in f\n" in caught.value.__notes__[0]  # the traceback in the worker
        assert "sample s" in caught.value.__notes__[1]
    # pickle gives an exception's text to its __init__, which here puts "code" before it once more
    with pytest.raises(Unlucky, match="code 5") as unlucky:
        rewards([call("b0")])
    assert unlucky.value.code == 5
    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*Local: lost"):
        rewards([call("c0")])
    assert rewards.counters["errors"] == 3
    assert "ValueError: out of range" in rewards.incidents[0]


@pytest.mark.parametrize(
    ("end", "how"), [(lambda: os._exit(3), "exit code 3"), (lambda: os.kill(os.getpid(), 9), "SIGKILL")]
)
def test_a_worker_that_dies_is_an_error_and_is_replaced(make_rewards, end, how):
    def f(c1, c2):
        if c1 == ["a1"]:
            end()
        return 1.0

    rewards = make_rewards(f, 2, batch_size=1, timeout=30, on_error="skip")
    assert values(rewards([make_call()])) == [[1.0, None, 1.0]]
    assert rewards.counters["errors"] == 1
    assert f"the process died with {how}" in rewards.incidents[0]


def test_rows_that_cannot_be_sent_are_a_mistake(make_rewards):
    rewards = make_rewards(lambda c1, c2, batch_items: [1.0] * 3, 2, timeout=30, on_error="skip")
    call = make_call()
    call.row["lock"] = threading.Lock()
    with pytest.raises(ValueError, match=r"cannot be sent to the worker process.*keep plain data in the rows"):
        rewards([call])
    assert values(rewards([make_call()])) == [[1.0] * 3]


def test_what_a_hung_function_started_is_killed_with_it(make_rewards, tmp_path):
    """In the worker's group, in a session of its own, and as a process of multiprocessing."""

    def f(c1, c2):
        started = [
            subprocess.Popen(["sleep", "3600"]),
            subprocess.Popen(["sleep", "3600"], start_new_session=True),
            multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,)),
        ]
        started[2].start()
        (tmp_path / "pids").write_text(" ".join(str(process.pid) for process in started))
        time.sleep(3600)

    before = children()
    rewards = make_rewards(f, 2, timeout=1.5, on_error="skip")
    assert values(rewards([make_call()])) == [[None] * 3]
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3
    assert all(gone(pid) for pid in pids)
    rewards.close()
    assert children() == before


def test_functions_may_end_their_own_processes_by_terminate(make_rewards):
    """The worker ignores a job's SIGTERM, the processes that it starts do not."""

    def f(c1, c2):
        os.kill(os.getpid(), signal.SIGTERM)
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,))
        process.start()
        process.terminate()
        process.join(10)
        return [float(process.exitcode)] * len(c1)

    assert values(make_rewards(f, 2, timeout=20)([make_call()])) == [[-15.0] * 3]


def test_torch_works_in_the_worker(make_rewards):
    torch.ones(400, 400) @ torch.ones(400, 400)  # starts this process's thread pool

    def f(c1, c2):
        return (torch.ones(400, 400) @ torch.ones(400, 400))[:3, 0]

    assert values(make_rewards(f, 2, timeout=20)([make_call()])) == [[400.0] * 3]


def test_close_ends_everything_and_twice_is_fine():
    before = children()
    first, second = (Rewards(lambda c1, c2: [1.0] * 3, 2, timeout=30) for _ in range(2))
    assert started(before, 4)
    first.close()
    assert len(children() - before) == 2  # though the second's supervisor holds a copy of the first's pipe
    assert values(second([make_call()])) == [[1.0] * 3]
    second.close()
    second.close()
    assert children() == before
    with pytest.raises(RuntimeError, match="closed"):
        second([make_call()])


def test_an_object_that_is_dropped_leaves_nothing():
    before = children()
    rewards = Rewards(lambda c1, c2: [1.0] * 3, 2, timeout=30)
    assert started(before, 2)
    del rewards
    assert children() == before


def train(pids):
    """A trainer whose reward function hangs in its first call."""
    before = children()
    rewards = Rewards(lambda c1, c2: time.sleep(3600), 2, timeout=3600, on_error="skip")
    assert started(before, 2)
    pids.send(children())
    rewards([make_call()])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_worker_dies_with_a_trainer_that_is_killed(number):
    receiver, sender = multiprocessing.Pipe()
    trainer = multiprocessing.get_context("fork").Process(target=train, args=(sender,))
    trainer.start()
    pids = receiver.recv()
    assert len(pids) == 2
    time.sleep(0.1)
    assert all(psutil.pid_exists(pid) for pid in pids)
    os.kill(trainer.pid, number)
    trainer.join(10)
    assert trainer.exitcode == (-9 if number is signal.SIGKILL else 1)  # 1: KeyboardInterrupt
    assert all(gone(pid) for pid in pids)


@pytest.mark.full  # it has to import torch once more
def test_a_script_that_ends_without_close_leaves_nothing():
    script = """
import psutil, time
from comlrl.rewards import RewardCall, Rewards
async def g(c1, c2):
    return 1.0
rewards = Rewards([lambda c1, c2: [1.0], g], 2, timeout=3600)
while len(pids := [process.pid for process in psutil.Process().children(recursive=True)]) < 2:
    time.sleep(0.01)
print(rewards([RewardCall({}, ["", ""], [[""], [""]], "row 0", ["s"])])[0][0].value, *pids)
"""
    root = pathlib.Path(__file__).parent.parent
    ended = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    value, *pids = ended.stdout.split()
    assert (value, len(pids)) == ("2.0", 2)
    assert all(gone(int(pid)) for pid in pids)
