"""The reward contract: batching, returns, failures, async functions, settings."""

import asyncio
import contextlib
import functools
import math
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest
import torch
from reward_calls import LIMIT, Unlucky, make_call, values

from comlrl.rewards import (
    JointReward,
    Rewards,
    resolve_reward_range,
    set_reward_range,
)
from comlrl.utils.reward_processor import RewardProcessors

# ----------------------------------------------------------------------------------- batching


def test_batch_size_cuts_the_lists_and_leaves_no_sample_out(make_rewards):
    seen = []

    def f(c1, c2, batch_items, prompts):
        seen.append((c1, c2, [item["index"] for item in batch_items], prompts))
        return [float(answer[1:]) for answer in c1]

    calls = [make_call(row=0), make_call(row=1, samples=2)]
    pair = make_rewards(f, 2, batch_size=2)
    assert values(pair(calls)) == [[0.0, 1.0, 2.0], [0.0, 1.0]]
    assert [entry[0] for entry in seen] == [["a0", "a1"], ["a2"], ["a0", "a1"]]
    assert seen[1] == (["a2"], ["b2"], [0], ["p0 for agent 0"])
    assert seen[2][2:] == ([1, 1], ["p1 for agent 0"] * 2)
    assert (pair.counters["calls"], pair.counters["samples"]) == (3, 5)

    seen.clear()
    assert values(make_rewards(f, 2)(calls)) == [[0.0, 1.0, 2.0], [0.0, 1.0]]
    assert [len(entry[0]) for entry in seen] == [3, 2]
    seen.clear()
    assert values(make_rewards(f, 2, batch_size=1)(calls)) == [[0.0, 1.0, 2.0], [0.0, 1.0]]
    assert [len(entry[0]) for entry in seen] == [1] * 5


def test_a_node_without_samples_calls_nothing(make_rewards):
    rewards = make_rewards(lambda c1, c2: 1 / 0, 2)
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
def test_numbers_in_any_wrapping(make_rewards, returned):
    result = make_rewards(lambda c1, c2: returned, 2)([make_call()])
    assert values(result) == [[1.0, 0.0, 2.5]]
    assert all(type(value) is float for value in values(result)[0])


@pytest.mark.parametrize("returned", [0.5, torch.tensor(0.5), np.float32(0.5), {"reward": 0.5}, [0.5]])
def test_a_scalar_for_a_call_of_one_sample(make_rewards, returned):
    assert values(make_rewards(lambda c1, c2: returned, 2, batch_size=1)([make_call()])) == [[0.5, 0.5, 0.5]]


def test_parts_are_returned_and_none_parts_left_out(make_rewards):
    def f(c1, c2):
        return [{"reward": 1.0, "format": 0.25, "cover": None}, {"reward": None, "format": 0.5}, 3.0]

    assert make_rewards(f, 2)([make_call()]) == [
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
def test_a_wrong_length_or_type_always_raises(make_rewards, returned, message, on_error):
    def grade(c1, c2):
        return returned

    with pytest.raises(ValueError, match="reward function grade must return ") as wrong:
        make_rewards(grade, 2, on_error=on_error)([make_call()])
    assert message in str(wrong.value)
    assert "row 0, turn 1, node 0/2, samples s0.0, s0.1, s0.2" in str(wrong.value)


def test_one_at_a_time_functions_get_no_hint_that_they_followed_already(make_rewards):
    with pytest.raises(ValueError, match="a list of 1 rewards") as wrong:
        make_rewards(lambda c1, c2: [1.0, 2.0], 2, batch_size=1)([make_call()])
    assert "reward_batch_size" not in str(wrong.value)


def test_a_hidden_coroutine_is_named(make_rewards):
    async def slow(c1, c2):
        return [1.0] * len(c1)

    with pytest.raises(ValueError, match=r"returned a coroutine.*async def"):
        make_rewards(lambda c1, c2: slow(c1, c2), 2)([make_call()])


# ----------------------------------------------------------------------------------- None, several, processor


def test_none_leaves_the_statistics_and_is_counted(make_rewards):
    rewards = make_rewards(lambda c1, c2: [1.0, None, 0.0, 1.0], 2)
    assert values(rewards([make_call(samples=4)])) == [[1.0, None, 0.0, 1.0]]
    assert rewards.counters == {"calls": 1, "samples": 4, "errors": 0, "timeouts": 0, "none": 1, "nan": 0}
    assert rewards.incidents == []


def test_several_functions_are_weighted_and_logged(make_rewards):
    def right(c1, c2):
        return [1.0, 0.0, None]

    def brief(c1, c2):
        return [{"reward": 0.5, "words": 7}, {"reward": 2.0, "words": 3}, {"reward": 4.0, "words": 1}]

    assert make_rewards([right, brief], 2, weights=[10, 0.5])([make_call()]) == [
        [
            JointReward(10.25, {"right": 1.0, "brief": 0.5, "brief/words": 7.0}),
            JointReward(1.0, {"right": 0.0, "brief": 2.0, "brief/words": 3.0}),
            JointReward(None, {"brief": 4.0, "brief/words": 1.0}),
        ]
    ]
    assert values(make_rewards([right, brief], 2)([make_call()])) == [[1.5, 2.0, None]]
    assert values(make_rewards(right, 2, weights=[3.0])([make_call()])) == [[3.0, 0.0, None]]


def test_functions_of_one_name_do_not_overwrite_each_other(make_rewards):
    rewards = make_rewards([lambda c1, c2: [1.0] * 3, lambda c1, c2: [2.0] * 3], 2)
    assert rewards([make_call()])[0][0] == JointReward(3.0, {"<lambda>": 1.0, "<lambda>_2": 2.0})


def test_names_of_partials_objects_and_methods(make_rewards):
    def f(c1, c2, k):
        return [k] * 3

    class Judge:
        def __call__(self, c1, c2):
            return [1.0] * 3

        def strict(self, c1, c2):
            return [0.0] * 3

    parts = make_rewards([functools.partial(f, k=2.0), Judge(), Judge().strict], 2)([make_call()])[0][0].parts
    assert parts == {"f": 2.0, "Judge": 1.0, "strict": 0.0}


def test_the_processor_is_applied_to_the_total_and_not_to_none(make_rewards):
    rewards = make_rewards(
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


def test_a_processor_that_fails_follows_the_policy(make_rewards):
    def f(c1, c2):
        return [1.0, 0.0, 2.0]

    with pytest.raises(ZeroDivisionError):
        make_rewards(f, 2, processor=lambda reward: 1 / reward)([make_call()])
    skipping = make_rewards(f, 2, processor=lambda reward: 1 / reward, on_error="skip")
    assert values(skipping([make_call()])) == [[1.0, None, 0.5]]
    assert skipping.counters["errors"] == 1
    assert "reward_processor" in skipping.incidents[0]
    assert "sample s0.1" in skipping.incidents[0]
    with pytest.raises(ValueError, match="reward_processor must return a number; got None"):
        make_rewards(f, 2, processor=lambda reward: None, on_error="skip")([make_call()])
    infinite = make_rewards(f, 2, processor=lambda reward: math.inf, on_error="skip")
    assert values(infinite([make_call()])) == [[None, None, None]]
    assert infinite.counters["nan"] == 3


# ----------------------------------------------------------------------------------- failures


def test_a_users_exception_arrives_unchanged_after_one_call(make_rewards):
    error, count = TypeError("mine"), []

    def f(c1, c2, batch_items=None):
        count.append(1)
        raise error

    rewards = make_rewards(f, 2)
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


def test_skip_leaves_out_the_samples_of_the_call_and_says_which(make_rewards):
    def f(c1, c2):
        if "a3" in c1:
            raise Unlucky(7)
        return [1.0] * len(c1)

    rewards = make_rewards(f, 2, batch_size=1, on_error="skip")
    assert values(rewards([make_call(samples=8)])) == [[1.0] * 3 + [None] + [1.0] * 4]
    assert rewards.counters == {"calls": 8, "samples": 8, "errors": 1, "timeouts": 0, "none": 0, "nan": 0}
    assert rewards.incidents == ["reward function f failed on row 0, turn 1, node 0/2, sample s0.3: Unlucky: code 7"]
    whole = make_rewards(f, 2, on_error="skip")
    assert values(whole([make_call(samples=8), make_call(samples=2, row=1)])) == [[None] * 8, [1.0, 1.0]]
    assert whole.counters["errors"] == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_follow_the_policy(make_rewards, bad):
    def f(c1, c2):
        return [1.0, bad, {"reward": 0.0, "speed": bad, "size": 2.0}]

    raising = make_rewards(f, 2)
    with pytest.raises(ValueError, match=rf"the reward is {bad} \(f on row 0, turn 1, node 0/2, sample s0\.1\)"):
        raising([make_call()])
    assert raising.counters["nan"] == 1
    skipping = make_rewards(f, 2, on_error="skip")
    assert skipping([make_call()]) == [[JointReward(1.0, {}), JointReward(None, {}), JointReward(0.0, {"size": 2.0})]]
    assert (skipping.counters["nan"], skipping.counters["none"]) == (2, 0)
    assert "sample s0.1" in skipping.incidents[0]
    assert "part 'speed'" in skipping.incidents[1]
    assert "sample s0.2" in skipping.incidents[1]


def test_without_a_timeout_the_function_runs_in_the_callers_thread(make_rewards):
    seen = []

    def f(c1, c2):
        seen.append((os.getpid(), threading.current_thread()))
        return [1.0] * 3

    make_rewards(f, 2)([make_call()])
    assert seen == [(os.getpid(), threading.main_thread())]


# ----------------------------------------------------------------------------------- async functions


def test_async_calls_of_a_turn_run_concurrently_and_in_order(make_rewards):
    running, most = 0, 0

    async def f(c1, c2, batch_items):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05 if c1[0] == "a0" else 0.01)
        running -= 1
        return [float(batch_items[0]["index"] * 10 + int(answer[1:])) for answer in c1]

    rewards = make_rewards(f, 2, batch_size=1)
    assert values(rewards([make_call(row=0), make_call(row=1)])) == [[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]
    assert most == 6


def test_sync_and_async_functions_together(make_rewards):
    async def slow(c1, c2):
        await asyncio.sleep(0)
        return [{"reward": 1.0, "x": 5.0}] * len(c1)

    class Judge:
        async def __call__(self, c1, c2, scale=1.0):
            return [scale] * len(c1)

    def fast(c1, c2):
        return [2.0] * len(c1)

    result = make_rewards([fast, slow, Judge(), functools.partial(Judge(), scale=7.0)], 2)([make_call()])
    assert result[0][2] == JointReward(11.0, {"fast": 2.0, "slow": 1.0, "slow/x": 5.0, "Judge": 1.0, "Judge_2": 7.0})


def test_a_module_level_semaphore_serves_several_turns(make_rewards):
    """It is bound to the loop of its first contention, so that a loop a turn would break it."""
    limit = asyncio.Semaphore(1)

    async def f(c1, c2):
        async with limit:
            await asyncio.sleep(0.001)
        return [1.0] * len(c1)

    rewards = make_rewards(f, 2)
    for _ in range(2):
        assert values(rewards([make_call(), make_call(row=1)])) == [[1.0] * 3] * 2


def test_async_timeouts_and_failures(make_rewards):
    async def f(c1, c2):
        if c1 == ["a1"]:
            await asyncio.sleep(60)
        if c1 == ["a2"]:
            raise Unlucky(3)
        return 1.0

    skipping = make_rewards(f, 2, batch_size=1, timeout=LIMIT, on_error="skip")
    start = time.monotonic()
    assert values(skipping([make_call(row=row) for row in range(6)])) == [[1.0, None, None]] * 6
    assert time.monotonic() - start < 4 * LIMIT  # all at the same time
    assert (skipping.counters["timeouts"], skipping.counters["errors"]) == (6, 6)
    assert any("sample s1.1: TimeoutError: no answer within reward_timeout=0.5 s" in x for x in skipping.incidents)

    raising = make_rewards(f, 2, batch_size=1, timeout=60)
    start = time.monotonic()
    with pytest.raises(Unlucky) as caught:
        raising([make_call()])
    assert caught.value.code == 3
    assert time.monotonic() - start < 20  # the sleeper is cancelled, not waited for


def test_an_async_timeout_raises_and_names_the_call(make_rewards):
    cancelled = []

    async def f(c1, c2):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    rewards = make_rewards(f, 2, timeout=LIMIT)
    with pytest.raises(TimeoutError, match=r"reward_timeout=0\.5 s \(f on row 0, turn 1, node 0/2, samples s0\.0"):
        rewards([make_call()])
    assert cancelled == [1]


def test_async_exceptions_are_the_users_own_object(make_rewards):
    error = Unlucky(1)

    async def f(c1, c2):
        raise error

    with pytest.raises(Unlucky) as caught:
        make_rewards(f, 2)([make_call()])
    assert caught.value is error


def test_a_users_own_timeout_is_an_error_and_not_ours(make_rewards):
    async def f(c1, c2):
        raise TimeoutError("mine")

    rewards = make_rewards(f, 2, timeout=60, on_error="skip")
    assert values(rewards([make_call()])) == [[None] * 3]
    assert (rewards.counters["timeouts"], rewards.counters["errors"]) == (0, 1)


def test_a_ctrl_c_cancels_async_calls(make_rewards):
    cancelled = []

    async def f(c1, c2):
        if c1 == ["a1"]:
            os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.extend(c1)
            raise

    rewards = make_rewards(f, 2, batch_size=1)
    with pytest.raises(KeyboardInterrupt):
        rewards([make_call()])
    assert "a0" in cancelled
    with pytest.raises(RuntimeError, match="closed"):
        rewards([make_call()])


def test_a_coroutine_that_refuses_to_end_freezes_nothing(make_rewards, monkeypatch):
    monkeypatch.setattr("comlrl.rewards._CANCEL_SECONDS", 0.1)

    async def f(c1, c2):
        for _ in range(1000):
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
        return 1.0

    rewards = make_rewards(f, 2, timeout=LIMIT, on_error="skip")
    assert values(rewards([make_call()])) == [[None] * 3]
    rewards.close()


def test_async_functions_work_where_a_loop_is_running(make_rewards):
    """As in a notebook."""

    async def f(c1, c2):
        await asyncio.sleep(0.001)
        if "a9" in c1:
            raise Unlucky(9)
        return [1.0] * len(c1)

    rewards = make_rewards(f, 2)
    assert values(rewards([make_call()])) == [[1.0] * 3]

    async def notebook():
        return rewards([make_call()])

    assert values(asyncio.run(notebook())) == [[1.0] * 3]

    async def failing():
        return rewards([make_call(samples=10)])

    with pytest.raises(Unlucky):
        asyncio.run(failing())
    assert values(rewards([make_call()])) == [[1.0] * 3]


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
