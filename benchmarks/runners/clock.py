"""Timing that works for every trainer alike: the reward function notes when it is called and for how many answers.

Runs in environments where this repository is not installed, so it needs nothing but Python.
"""

import itertools
import json
import statistics
import sys
import time
from pathlib import Path

PROMPTS = [
    "Describe a city in the clouds.",
    "Invent a new holiday.",
    "Tell a dragon's bedtime story.",
    "Design a playground on Mars.",
]


class RewardClock:
    """A reward function f(c1, ..., cn) -> list of floats: the second answer shall be two to three times as long."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, int]] = []  # seconds, joint answers
        self.rewards: list[float] = []
        self.tokens_at_limit = 0

    def __call__(self, *completions: list[str]) -> list[float]:
        self.calls.append((time.perf_counter(), len(completions[0])))
        rewards = []
        for texts in zip(*completions):
            first, last = len(texts[0]), len(texts[-1])
            ratio = last / max(first, 1)
            distance = max(2 - ratio, ratio - 3, 0.0)
            rewards.append(2.718281828**-distance if len(texts) > 1 else min(last / 100, 1.0))
        self.rewards += rewards
        return rewards

    def cycles(self, answers: int) -> list[float]:
        """Seconds of each update cycle of `answers` joint answers, from its first reward call to the next cycle's."""
        starts, seen = [], 0
        for moment, count in self.calls:
            if seen % answers == 0:
                starts.append(moment)
            seen += count
        return [after - before for before, after in itertools.pairwise(starts)]


def read_job() -> dict:
    return json.loads(Path(sys.argv[1]).read_text())


def write_result(clock: RewardClock, job: dict, **more: object) -> None:
    cycles = clock.cycles(job["answers"])
    # The first cycle pays for warming up.
    typical = statistics.median(cycles[1:] or cycles) if cycles else None
    result = {"cycle": typical, "cycles": cycles, "rewards": clock.rewards, **more}
    Path(sys.argv[2]).write_text(json.dumps(result))


def rows(job: dict) -> list[dict]:
    """The prompts of one update, repeated for each update and one more, whose first reward call ends the last."""
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(job["prompts"])]
    return [{"prompt": prompt} for prompt in prompts] * (job["updates"] + 1)
