"""The reward contract: binding, batching, returns, failures, time-outs, and no process left behind."""

import asyncio
import contextlib
import functools
import math
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
import torch

from comlrl.rewards import (
    JointReward,
    RewardCall,
    RewardContractError,
    Rewards,
    bind,
    resolve_reward_range,
    set_reward_range,
)
from comlrl.utils.reward_processor import RewardProcessors

LIMIT = 0.5  # seconds


def make_call(agents=2, samples=3, row=0):
    return RewardCall(
        row={"prompt": f"p{row}", "index": row},
        prompts=[f"p{row} for agent {agent}" for agent in range(agents)],
        completions=[[f"{'abcd'[agent]}{sample}" for sample in range(samples)] for agent in range(agents)],
        name=f"row {row}, turn 1, node 0/2",
        sample_ids=[f"s{row}.{sample}" for sample in range(samples)],
    )


@pytest.fixture
def build():
    built = []

    def make(*args, **kwargs):
        built.append(Rewards(*args, **kwargs))
        return built[-1]

    yield make
    for rewards in built:
        rewards.close()


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


# ----------------------------------------------------------------------------------- binding

C1, C2, C3 = (["a0", "a1", "a2"], ["b0", "b1", "b2"], ["c0", "c1", "c2"])
PROMPTS = ["p0 for agent 0"] * 3
ITEMS = [{"prompt": "p0", "index": 0}] * 3


def bound(function, agents):
    """What a function that returns its arguments is given for the three joint samples of a node."""
    args, kwargs = bind(function, agents).arguments(make_call(agents), 0, 3)
    return function(*args, **kwargs)


class Callable2:
    def __call__(self, c1, c2, batch_items=None):
        return c1, c2, batch_items

    def method(self, prompts, c1, c2):
        return prompts, c1, c2


def decorator(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@decorator
def decorated(c1, c2, batch_items=None):
    return c1, c2, batch_items


def keyword_items(*args, batch_items):
    return args, batch_items


def keyword_prompts(*cs, prompts=None):
    return cs, prompts


def positional_only(prompts, c1, c2, /):
    return prompts, c1, c2


def keyword_only_completions(*, c1, c2):
    return c1, c2


@pytest.mark.parametrize(
    ("function", "agents", "expected"),
    [
        # the published forms
        (lambda c1, c2: (c1, c2), 2, (C1, C2)),
        (lambda p, c1, c2: (p, c1, c2), 2, (PROMPTS, C1, C2)),
        (lambda completions: completions, 2, [C1, C2]),
        (lambda *args: args, 2, (C1, C2)),
        (lambda c1, c2, c3: (c1, c2, c3), 3, (C1, C2, C3)),
        (lambda p, a, b, c: (p, a, b, c), 3, (PROMPTS, C1, C2, C3)),
        # defaulted parameters are not completions
        (lambda c1, c2, batch_items=None: (c1, c2, batch_items), 2, (C1, C2, ITEMS)),
        (lambda c1, c2, scale=2.0: (c1, c2, scale), 2, (C1, C2, 2.0)),
        (lambda c1, c2, cache=None: (c1, c2, cache), 2, (C1, C2, None)),
        (lambda completions, scale=2.0: (completions, scale), 2, ([C1, C2], 2.0)),
        (lambda completions, *, judge=None: (completions, judge), 2, ([C1, C2], None)),
        (lambda completions, judge=None: (completions, judge), 3, ([C1, C2, C3], None)),
        # unless the count fits and the default says nothing else
        (lambda c1, c2=None: (c1, c2), 2, (C1, C2)),
        (lambda c1=None, c2=None: (c1, c2), 2, (C1, C2)),
        (lambda c1, k=2.0, c2=None: (c1, k, c2), 2, (C1, 2.0, C2)),
        # by name, anywhere
        (lambda prompts, c1, c2: (prompts, c1, c2), 2, (PROMPTS, C1, C2)),
        (lambda c1, prompts, c2: (c1, prompts, c2), 2, (C1, PROMPTS, C2)),
        (lambda batch_items, c1, c2, prompts: (batch_items, c1, c2, prompts), 2, (ITEMS, C1, C2, PROMPTS)),
        (lambda c1, c2, scale=2.0, batch_items=None: (c1, scale, batch_items), 2, (C1, 2.0, ITEMS)),
        (lambda p, c1, c2, batch_items: (p, c1, c2, batch_items), 2, (PROMPTS, C1, C2, ITEMS)),
        (lambda prompts, completions: (prompts, completions), 2, (PROMPTS, [C1, C2])),
        (lambda completions, batch_items: (completions, batch_items), 2, ([C1, C2], ITEMS)),
        (positional_only, 2, (PROMPTS, C1, C2)),
        (keyword_items, 2, ((C1, C2), ITEMS)),
        (keyword_prompts, 3, ((C1, C2, C3), PROMPTS)),
        (lambda prompts, *cs: (prompts, cs), 2, (PROMPTS, (C1, C2))),
        (lambda first, *rest: (first, rest), 3, (C1, (C2, C3))),
        # **kwargs get both, except prompts that are passed already
        (lambda *c, **kw: (c, kw), 2, ((C1, C2), {"prompts": PROMPTS, "batch_items": ITEMS})),
        (lambda c1, c2, batch_items=None, **kw: (batch_items, kw), 2, (ITEMS, {"prompts": PROMPTS})),
        (lambda p, c1, c2, **kw: (p, c1, kw), 2, (PROMPTS, C1, {"batch_items": ITEMS})),
        # one agent
        (lambda completions: completions, 1, C1),
        (lambda p, completions: (p, completions), 1, (PROMPTS, C1)),
        (lambda completions, batch_items: (completions, batch_items), 1, (C1, ITEMS)),
        (lambda completions, prompts: (completions, prompts), 1, (C1, PROMPTS)),
        (lambda completions, scale=2.0, cache=None: (completions, scale, cache), 1, (C1, 2.0, None)),
        (lambda *args: args, 1, (C1,)),
        # other callables
        (Callable2(), 2, (C1, C2, ITEMS)),
        (Callable2().method, 2, (PROMPTS, C1, C2)),
        (decorated, 2, (C1, C2, ITEMS)),
        (functools.partial(lambda c1, c2, scale: (c1, c2, scale), scale=3.0), 2, (C1, C2, 3.0)),
        (functools.partial(lambda scale, c1, c2: (scale, c1, c2), scale=3.0), 2, (3.0, C1, C2)),
        (functools.partial(lambda scale, c1, c2: (scale, c1, c2), 3.0), 2, (3.0, C1, C2)),
        (functools.partial(lambda c1, c2, prompts: (c1, prompts), prompts="mine"), 2, (C1, "mine")),
        (functools.partial(lambda c1, c2, **kw: kw, prompts="x"), 2, {"prompts": "x", "batch_items": ITEMS}),
        (keyword_only_completions, 2, (C1, C2)),
        (max, 2, C2),  # a builtin without a signature
    ],
)
def test_arguments(function, agents, expected):
    assert bound(function, agents) == expected


def too_many_positional(a, b=None, c=None):
    """Two agents: a list of lists and two options, or two lists and one option?"""


@pytest.mark.parametrize(
    ("function", "agents"),
    [
        (lambda: 0, 2),
        (lambda **kw: 0, 2),
        (lambda prompts, batch_items: 0, 2),
        (lambda a, b, c, d: 0, 2),
        (lambda a, b: 0, 3),
        (lambda prompts, p, c1, c2: 0, 2),
        (lambda c1, k=2.0, *rest: 0, 2),
        (lambda a, b, c: 0, 1),
        (too_many_positional, 2),
    ],
)
def test_a_signature_that_cannot_fit_is_refused_at_construction(function, agents):
    with pytest.raises(ValueError, match="does not fit num_agents") as refused:
        Rewards(function, agents)
    text = str(refused.value)
    assert "f(c1, c2" in text if agents > 1 else "f(c1)" in text
    assert "f(*args)" in text
    assert "f(prompts, c1" in text


def test_the_refusal_shows_the_functions_own_signature():
    with pytest.raises(ValueError, match=r"too_many_positional\(a, b=None, c=None\) does not fit num_agents=2"):
        Rewards(too_many_positional, 2)


def test_lists_are_new_so_that_a_function_cannot_change_the_callers(build):
    def greedy(c1, c2):
        scores = [float(len(c1))] * len(c1)
        c1.clear()
        return scores

    call = make_call()
    assert values(build([greedy, lambda c1, c2: [float(len(c1))] * len(c2)], 2)([call])) == [[6.0, 6.0, 6.0]]
    assert call.completions[0] == C1


# ----------------------------------------------------------------------------------- batching


def test_batch_size_cuts_the_lists_and_leaves_no_sample_out(build):
    seen = []

    def f(c1, c2, batch_items, prompts):
        seen.append((c1, c2, [item["index"] for item in batch_items], prompts))
        return [float(answer[1:]) for answer in c1]

    calls = [make_call(row=0), make_call(row=1, samples=2)]
    pair = build(f, 2, batch_size=2)
    assert values(pair(calls)) == [[0.0, 1.0, 2.0], [0.0, 1.0]]
    assert [entry[0] for entry in seen] == [["a0", "a1"], ["a2"], ["a0", "a1"]]
    assert seen[1] == (["a2"], ["b2"], [0], ["p0 for agent 0"])
    assert seen[2][2:] == ([1, 1], ["p1 for agent 0"] * 2)
    assert (pair.counters["calls"], pair.counters["samples"]) == (3, 5)

    seen.clear()
    assert values(build(f, 2)(calls)) == [[0.0, 1.0, 2.0], [0.0, 1.0]]
    assert [len(entry[0]) for entry in seen] == [3, 2]
    seen.clear()
    assert values(build(f, 2, batch_size=1)(calls)) == [[0.0, 1.0, 2.0], [0.0, 1.0]]
    assert [len(entry[0]) for entry in seen] == [1] * 5


def test_a_node_without_samples_calls_nothing(build):
    rewards = build(lambda c1, c2: 1 / 0, 2)
    assert rewards([make_call(samples=0)]) == [[]]
    assert rewards([]) == []
    assert rewards.counters["calls"] == 0


# ----------------------------------------------------------------------------------- what is returned


@pytest.mark.parametrize(
    "returned",
    [
        [1.0, 0.0, 2.5],
        (1, False, 2.5),
        torch.tensor([1.0, 0.0, 2.5], requires_grad=True),
        torch.tensor([1.0, 0.0, 2.5], dtype=torch.bfloat16),
        np.array([1.0, 0.0, 2.5], dtype=np.float32),
        [torch.tensor(1.0), torch.tensor([0]), np.float32(2.5)],
        [True, np.bool_(False), np.float64(2.5)],
        [{"reward": 1}, {"reward": False}, {"reward": np.float16(2.5)}],
    ],
)
def test_numbers_in_any_wrapping(build, returned):
    result = build(lambda c1, c2: returned, 2)([make_call()])
    assert values(result) == [[1.0, 0.0, 2.5]]
    assert all(type(value) is float for value in values(result)[0])


@pytest.mark.parametrize("returned", [0.5, torch.tensor(0.5), np.float32(0.5), {"reward": 0.5}, [0.5]])
def test_a_scalar_for_a_call_of_one_sample(build, returned):
    assert values(build(lambda c1, c2: returned, 2, batch_size=1)([make_call()])) == [[0.5, 0.5, 0.5]]


def test_parts_are_returned_and_none_parts_left_out(build):
    def f(c1, c2):
        return [{"reward": 1.0, "format": 0.25, "cover": None}, {"reward": None, "format": 0.5}, 3.0]

    assert build(f, 2)([make_call()]) == [
        [JointReward(1.0, {"format": 0.25}), JointReward(None, {"format": 0.5}), JointReward(3.0, {})]
    ]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], "must return a list of 3 rewards, one a joint sample; got 1. If it scores"),
        ([1.0] * 4, "got 4. If it scores one joint sample at a time, set reward_batch_size: 1"),
        (1.0, "got 1.0, of type float. If it scores one joint sample at a time, set reward_batch_size: 1"),
        (None, "got None"),
        ("abc", "got 'abc', of type str"),
        ({"reward": 1.0}, "of type dict"),
        (torch.ones(3, 1), "of type list"),
        (["1", "2", "3"], "a reward is '1', of type str"),
        ([1.0, 1.0, [2.0]], "a reward is [2.0], of type list"),
        ([1.0, 1.0, {"score": 2.0}], "the key 'reward'; got {'score': 2.0}"),
        ([1.0, 1.0, {"reward": 2.0, "note": "good"}], "part 'note' is 'good', of type str"),
        ([1.0, 1.0, 1j], "a reward is 1j, of type complex"),
    ],
)
def test_a_wrong_length_or_type_always_raises(build, returned, message, on_error):
    def grade(c1, c2):
        return returned

    with pytest.raises(ValueError, match="reward function grade must return ") as wrong:
        build(grade, 2, on_error=on_error)([make_call()])
    assert message in str(wrong.value)
    assert "row 0, turn 1, node 0/2, samples s0.0, s0.1, s0.2" in str(wrong.value)


def test_one_at_a_time_functions_get_no_hint_that_they_followed_already(build):
    with pytest.raises(ValueError, match="a list of 1 rewards") as wrong:
        build(lambda c1, c2: [1.0, 2.0], 2, batch_size=1)([make_call()])
    assert "reward_batch_size" not in str(wrong.value)


def test_a_hidden_coroutine_is_named(build):
    async def slow(c1, c2):
        return [1.0] * len(c1)

    with pytest.raises(ValueError, match=r"returned a coroutine.*async def"):
        build(lambda c1, c2: slow(c1, c2), 2)([make_call()])


# ----------------------------------------------------------------------------------- None, several, processor


def test_none_leaves_the_statistics_and_is_counted(build):
    rewards = build(lambda c1, c2: [1.0, None, 0.0, 1.0], 2)
    assert values(rewards([make_call(samples=4)])) == [[1.0, None, 0.0, 1.0]]
    assert rewards.counters == {"calls": 1, "samples": 4, "errors": 0, "timeouts": 0, "none": 1, "nan": 0}
    assert rewards.incidents == []


def test_several_functions_are_weighted_and_logged(build):
    def right(c1, c2):
        return [1.0, 0.0, None]

    def brief(c1, c2):
        return [{"reward": 0.5, "words": 7}, {"reward": 2.0, "words": 3}, {"reward": 4.0, "words": 1}]

    assert build([right, brief], 2, weights=[10, 0.5])([make_call()]) == [
        [
            JointReward(10.25, {"right": 1.0, "brief": 0.5, "brief/words": 7.0}),
            JointReward(1.0, {"right": 0.0, "brief": 2.0, "brief/words": 3.0}),
            JointReward(None, {"brief": 4.0, "brief/words": 1.0}),
        ]
    ]
    assert values(build([right, brief], 2)([make_call()])) == [[1.5, 2.0, None]]
    assert values(build(right, 2, weights=[3.0])([make_call()])) == [[3.0, 0.0, None]]


def test_functions_of_one_name_do_not_overwrite_each_other(build):
    rewards = build([lambda c1, c2: [1.0] * 3, lambda c1, c2: [2.0] * 3], 2)
    assert rewards([make_call()])[0][0] == JointReward(3.0, {"<lambda>": 1.0, "<lambda>_2": 2.0})


def test_names_of_partials_objects_and_methods(build):
    def f(c1, c2, k):
        return [k] * 3

    class Judge:
        def __call__(self, c1, c2):
            return [1.0] * 3

        def strict(self, c1, c2):
            return [0.0] * 3

    parts = build([functools.partial(f, k=2.0), Judge(), Judge().strict], 2)([make_call()])[0][0].parts
    assert parts == {"f": 2.0, "Judge": 1.0, "strict": 0.0}


def test_the_processor_is_applied_to_the_total_and_not_to_none(build):
    rewards = build(
        [lambda c1, c2: [1.0, 2.0, None], lambda c1, c2: [1.0, 1.0, 1.0]],
        2,
        processor=RewardProcessors.shift(-6),
    )
    assert values(rewards([make_call()])) == [[-4.0, -3.0, None]]
    assert rewards([make_call()])[0][0].parts == {"<lambda>": 1.0, "<lambda>_2": 1.0}  # raw


def test_reward_processors():
    assert RewardProcessors.scale(0.5)(3.0) == 1.5
    assert RewardProcessors.scale()(3.0) == 3.0
    assert RewardProcessors.shift(-6)(4.0) == -2.0
    assert RewardProcessors.shift()(4.0) == 4.0


def test_a_processor_that_fails_follows_the_policy(build):
    def f(c1, c2):
        return [1.0, 0.0, 2.0]

    with pytest.raises(ZeroDivisionError):
        build(f, 2, processor=lambda reward: 1 / reward)([make_call()])
    skipping = build(f, 2, processor=lambda reward: 1 / reward, on_error="skip")
    assert values(skipping([make_call()])) == [[1.0, None, 0.5]]
    assert skipping.counters["errors"] == 1
    assert "reward_processor" in skipping.incidents[0]
    assert "sample s0.1" in skipping.incidents[0]
    with pytest.raises(ValueError, match="reward_processor must return a number; got None"):
        build(f, 2, processor=lambda reward: None, on_error="skip")([make_call()])
    infinite = build(f, 2, processor=lambda reward: math.inf, on_error="skip")
    assert values(infinite([make_call()])) == [[None, None, None]]
    assert infinite.counters["nan"] == 3


# ----------------------------------------------------------------------------------- failures


class Unlucky(Exception):
    """An exception with a state that wrapping would lose."""

    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code


def test_a_users_exception_arrives_unchanged_after_one_call(build):
    error, count = TypeError("mine"), []

    def f(c1, c2, batch_items=None):
        count.append(1)
        raise error

    rewards = build(f, 2)
    with pytest.raises(TypeError) as caught:
        rewards([make_call()])
    assert caught.value is error
    assert error.args == ("mine",)
    assert count == [1]
    line = "reward function f failed on row 0, turn 1, node 0/2, samples s0.0, s0.1, s0.2"
    assert rewards.incidents == [f"{line}: TypeError: mine"]
    assert rewards.counters["errors"] == 1
    if sys.version_info >= (3, 11):
        assert error.__notes__ == [line]


def test_skip_leaves_out_the_samples_of_the_call_and_says_which(build):
    def f(c1, c2):
        if "a3" in c1:
            raise Unlucky(7)
        return [1.0] * len(c1)

    rewards = build(f, 2, batch_size=1, on_error="skip")
    assert values(rewards([make_call(samples=8)])) == [[1.0] * 3 + [None] + [1.0] * 4]
    assert rewards.counters == {"calls": 8, "samples": 8, "errors": 1, "timeouts": 0, "none": 0, "nan": 0}
    assert rewards.incidents == ["reward function f failed on row 0, turn 1, node 0/2, sample s0.3: Unlucky: code 7"]
    whole = build(f, 2, on_error="skip")
    assert values(whole([make_call(samples=8), make_call(samples=2, row=1)])) == [[None] * 8, [1.0, 1.0]]
    assert whole.counters["errors"] == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_follow_the_policy(build, bad):
    def f(c1, c2):
        return [1.0, bad, {"reward": 0.0, "speed": bad, "size": 2.0}]

    raising = build(f, 2)
    with pytest.raises(ValueError, match=rf"the reward is {bad} \(f on row 0, turn 1, node 0/2, sample s0\.1\)"):
        raising([make_call()])
    assert raising.counters["nan"] == 1
    skipping = build(f, 2, on_error="skip")
    assert skipping([make_call()]) == [[JointReward(1.0, {}), JointReward(None, {}), JointReward(0.0, {"size": 2.0})]]
    assert (skipping.counters["nan"], skipping.counters["none"]) == (2, 0)
    assert "sample s0.1" in skipping.incidents[0]
    assert "part 'speed'" in skipping.incidents[1]
    assert "sample s0.2" in skipping.incidents[1]


def test_without_a_timeout_the_function_runs_in_the_callers_thread(build):
    seen = []

    def f(c1, c2):
        seen.append((os.getpid(), threading.current_thread()))
        return [1.0] * 3

    build(f, 2)([make_call()])
    assert seen == [(os.getpid(), threading.main_thread())]


# ----------------------------------------------------------------------------------- async functions


def test_async_calls_of_a_turn_run_concurrently_and_in_order(build):
    running, most = 0, 0

    async def f(c1, c2, batch_items):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05 if c1[0] == "a0" else 0.01)
        running -= 1
        return [float(batch_items[0]["index"] * 10 + int(answer[1:])) for answer in c1]

    rewards = build(f, 2, batch_size=1)
    assert values(rewards([make_call(row=0), make_call(row=1)])) == [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]
    assert most == 6


def test_sync_and_async_functions_together(build):
    async def slow(c1, c2):
        await asyncio.sleep(0)
        return [{"reward": 1.0, "x": 5.0}] * len(c1)

    class Judge:
        async def __call__(self, c1, c2, scale=1.0):
            return [scale] * len(c1)

    def fast(c1, c2):
        return [2.0] * len(c1)

    result = build([fast, slow, Judge(), functools.partial(Judge(), scale=7.0)], 2)([make_call()])
    assert result[0][2] == JointReward(11.0, {"fast": 2.0, "slow": 1.0, "slow/x": 5.0, "Judge": 1.0, "Judge_2": 7.0})


def test_a_module_level_semaphore_serves_several_turns(build):
    """It is bound to the loop of its first contention, so that a loop a turn would break it."""
    limit = asyncio.Semaphore(1)

    async def f(c1, c2):
        async with limit:
            await asyncio.sleep(0.001)
        return [1.0] * len(c1)

    rewards = build(f, 2)
    for _ in range(2):
        assert values(rewards([make_call(), make_call(row=1)])) == [[1.0] * 3] * 2


def test_async_timeouts_and_failures(build):
    async def f(c1, c2):
        if c1 == ["a1"]:
            await asyncio.sleep(60)
        if c1 == ["a2"]:
            raise Unlucky(3)
        return 1.0

    skipping = build(f, 2, batch_size=1, timeout=LIMIT, on_error="skip")
    start = time.monotonic()
    assert values(skipping([make_call(row=row) for row in range(6)])) == [[1.0, None, None]] * 6
    assert time.monotonic() - start < 4 * LIMIT  # all at the same time
    assert (skipping.counters["timeouts"], skipping.counters["errors"]) == (6, 6)
    assert any("sample s1.1: TimeoutError: no answer within reward_timeout=0.5 s" in x for x in skipping.incidents)

    raising = build(f, 2, batch_size=1, timeout=60)
    start = time.monotonic()
    with pytest.raises(Unlucky) as caught:
        raising([make_call()])
    assert caught.value.code == 3
    assert time.monotonic() - start < 20  # the sleeper is cancelled, not waited for


def test_an_async_timeout_raises_and_names_the_call(build):
    cancelled = []

    async def f(c1, c2):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    rewards = build(f, 2, timeout=LIMIT)
    with pytest.raises(TimeoutError, match=r"reward_timeout=0\.5 s \(f on row 0, turn 1, node 0/2, samples s0\.0"):
        rewards([make_call()])
    assert cancelled == [1]


def test_async_exceptions_are_the_users_own_object(build):
    error = Unlucky(1)

    async def f(c1, c2):
        raise error

    with pytest.raises(Unlucky) as caught:
        build(f, 2)([make_call()])
    assert caught.value is error


def test_a_users_own_timeout_is_an_error_and_not_ours(build):
    async def f(c1, c2):
        raise TimeoutError("mine")

    rewards = build(f, 2, timeout=60, on_error="skip")
    assert values(rewards([make_call()])) == [[None] * 3]
    assert (rewards.counters["timeouts"], rewards.counters["errors"]) == (0, 1)


def test_a_ctrl_c_cancels_async_calls(build):
    cancelled = []

    async def f(c1, c2):
        if c1 == ["a1"]:
            os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.extend(c1)
            raise

    rewards = build(f, 2, batch_size=1)
    with pytest.raises(KeyboardInterrupt):
        rewards([make_call()])
    assert "a0" in cancelled
    with pytest.raises(RuntimeError, match="closed"):
        rewards([make_call()])


def test_a_coroutine_that_refuses_to_end_freezes_nothing(build, monkeypatch):
    monkeypatch.setattr("comlrl.rewards._CANCEL_SECONDS", 0.1)

    async def f(c1, c2):
        for _ in range(1000):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
        return 1.0

    rewards = build(f, 2, timeout=LIMIT, on_error="skip")
    assert values(rewards([make_call()])) == [[None] * 3]
    rewards.close()


def test_async_functions_work_where_a_loop_is_running(build):
    """As in a notebook."""

    async def f(c1, c2):
        await asyncio.sleep(0.001)
        if "a9" in c1:
            raise Unlucky(9)
        return [1.0] * len(c1)

    rewards = build(f, 2)
    assert values(rewards([make_call()])) == [[1.0] * 3]

    async def notebook():
        return rewards([make_call()])

    assert values(asyncio.run(notebook())) == [[1.0] * 3]

    async def failing():
        return rewards([make_call(samples=10)])

    with pytest.raises(Unlucky):
        asyncio.run(failing())
    assert values(rewards([make_call()])) == [[1.0] * 3]


# ----------------------------------------------------------------------------------- the worker process


def test_one_hung_sample_costs_one_sample_and_the_run_goes_on(build):
    before = children()
    pids = []

    def f(c1, c2):
        if c1 == ["a3"]:
            time.sleep(3600)
        return [{"reward": 1.0, "pid": os.getpid()}]

    rewards = build(f, 2, batch_size=1, timeout=LIMIT, on_error="skip")
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


def test_a_hung_call_costs_its_whole_chunk(build):
    def f(c1, c2):
        if "a3" in c1:
            time.sleep(3600)
        return [1.0] * len(c1)

    rewards = build(f, 2, batch_size=2, timeout=LIMIT, on_error="skip")
    assert values(rewards([make_call(samples=6)])) == [[1.0, 1.0, None, None, 1.0, 1.0]]
    assert rewards.counters["timeouts"] == 1


def test_a_time_out_raises_and_names_function_and_samples(build):
    def hang(c1, c2):
        time.sleep(3600)

    rewards = build(hang, 2, timeout=LIMIT)
    with pytest.raises(TimeoutError, match=r"reward_timeout=0\.5 s \(hang on row 0, turn 1, node 0/2, samples s0\.0"):
        rewards([make_call()])


def test_alarms_work_in_the_worker(build):
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


def test_the_worker_keeps_the_contract(build):
    rows = []

    def f(c1, c2, batch_items, prompts):  # a closure
        rows.append(1)
        assert batch_items[0] is batch_items[1]
        return torch.tensor([float(len(rows)), 2.0, float(batch_items[0]["index"])])

    async def g(c1, c2):
        return [None, 1.0, {"reward": 1.0, "pid": os.getpid()}]

    rewards = build([f, g], 2, timeout=30, weights=[1, 10])
    assert values(rewards([make_call(row=4), make_call(row=5)])) == [[None, 12.0, 14.0], [None, 12.0, 15.0]]
    assert rewards([make_call()])[0][0].parts == {"f": 3.0}  # the worker lives on between calls
    assert rewards([make_call()])[0][2].parts["g/pid"] == os.getpid()  # async functions stay here
    assert rows == []  # what the function stores stays there
    assert rewards.counters["none"] == 4

    for on_error in ("raise", "skip"):
        wrong = build(lambda c1, c2: [1.0], 2, timeout=30, on_error=on_error)
        with pytest.raises(RewardContractError, match=r"a list of 3 rewards.* got 1.*reward_batch_size: 1.*row 0"):
            wrong([make_call()])


def test_exceptions_come_back_from_the_worker(build):
    class Local(Exception):
        """Does not pickle."""

    def f(c1, c2):
        raise {"a0": ValueError("out of range"), "b0": Unlucky(5), "c0": Local("lost")}[c1[0]]

    def call(first):
        return RewardCall({}, ["", ""], [[first], [first]], "row 0", ["s"])

    rewards = build(f, 2, timeout=30)
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
def test_a_worker_that_dies_is_an_error_and_is_replaced(build, end, how):
    def f(c1, c2):
        if c1 == ["a1"]:
            end()
        return 1.0

    rewards = build(f, 2, batch_size=1, timeout=30, on_error="skip")
    assert values(rewards([make_call()])) == [[1.0, None, 1.0]]
    assert rewards.counters["errors"] == 1
    assert f"the process died with {how}" in rewards.incidents[0]


def test_rows_that_cannot_be_sent_are_a_mistake(build):
    rewards = build(lambda c1, c2, batch_items: [1.0] * 3, 2, timeout=30, on_error="skip")
    call = make_call()
    call.row["lock"] = threading.Lock()
    with pytest.raises(ValueError, match=r"cannot be sent to the worker process.*keep plain data in the rows"):
        rewards([call])
    assert values(rewards([make_call()])) == [[1.0] * 3]


def test_what_a_hung_function_started_is_killed_with_it(build, tmp_path):
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
    rewards = build(f, 2, timeout=1.5, on_error="skip")
    assert values(rewards([make_call()])) == [[None] * 3]
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 3
    assert all(gone(pid) for pid in pids)
    rewards.close()
    assert children() == before


def test_functions_may_end_their_own_processes_by_terminate(build):
    """The worker ignores a job's SIGTERM, the processes that it starts do not."""

    def f(c1, c2):
        os.kill(os.getpid(), signal.SIGTERM)
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,))
        process.start()
        process.terminate()
        process.join(10)
        return [float(process.exitcode)] * len(c1)

    assert values(build(f, 2, timeout=20)([make_call()])) == [[-15.0] * 3]


def test_torch_works_in_the_worker(build):
    torch.ones(400, 400) @ torch.ones(400, 400)  # starts this process's thread pool

    def f(c1, c2):
        return (torch.ones(400, 400) @ torch.ones(400, 400))[:3, 0]

    assert values(build(f, 2, timeout=20)([make_call()])) == [[400.0] * 3]


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


# ----------------------------------------------------------------------------------- settings, ranges


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 0}, "reward_batch_size=0: give a whole number"),
        ({"batch_size": 1.5}, r"reward_batch_size=1\.5"),
        ({"timeout": 0}, "reward_timeout=0: give a number of seconds"),
        ({"timeout": "2"}, "reward_timeout='2'"),
        ({"timeout": math.nan}, "reward_timeout=nan"),
        ({"on_error": "zero"}, "reward_on_error='zero': give 'raise' or 'skip'"),
        ({"weights": [1.0, 2.0]}, "reward_weights=.*give 1 finite numbers"),
        ({"weights": [math.nan]}, "reward_weights="),
        ({"processor": 3}, "reward_processor=3"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        Rewards(lambda c1, c2: [1.0], 2, **settings)


@pytest.mark.parametrize("functions", [[], [3], [None]])
def test_functions_must_be_callable(functions):
    with pytest.raises(ValueError, match="reward_func="):
        Rewards(functions, 2)


def test_reward_range():
    def f(c1, c2):
        return [0.0]

    assert resolve_reward_range(f) is None
    assert set_reward_range(f, -1, 2.5) is f
    assert f.reward_range == (-1, 2.5)
    assert resolve_reward_range(f) == (-1.0, 2.5)


@pytest.mark.parametrize("bad", [(1, 1), (2, 1), (0, math.inf), (math.nan, 1), (0,), (0, 1, 2), 3, ("a", 1)])
def test_a_bad_reward_range_is_refused(bad):
    def f(c1, c2):
        return [0.0]

    f.reward_range = bad
    with pytest.raises(ValueError, match="reward_range="):
        resolve_reward_range(f)
