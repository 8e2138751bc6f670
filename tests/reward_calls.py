"""What the tests of rewards share: a call to score, and looking at processes."""

import time

import psutil

from comlrl.rewards import (
    RewardCall,
)

LIMIT = 0.5  # seconds


def make_call(agents=2, samples=3, row=0):
    return RewardCall(
        row={"prompt": f"p{row}", "index": row},
        prompts=[f"p{row} for agent {agent}" for agent in range(agents)],
        completions=[[f"{'abcd'[agent]}{sample}" for sample in range(samples)] for agent in range(agents)],
        name=f"row {row}, turn 1, node 0/2",
        sample_ids=[f"s{row}.{sample}" for sample in range(samples)],
    )


def values(result):
    return [[reward.value for reward in node] for node in result]


def children():
    return {process.pid for process in psutil.Process().children(recursive=True)}


def started(before, count):
    """Waits until there are so many new children: a supervisor forks its worker in its own time."""
    for _ in range(100):
        if len(children() - before) >= count:
            break
        time.sleep(0.05)
    return len(children() - before) == count


def gone(pid):
    """Waits until a process has ended (or is only a zombie that its new parent has not collected yet)."""
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


class Unlucky(Exception):
    """An exception with a state that wrapping would lose."""

    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code
