"""The reward contract: which arguments a function gets."""

import functools

import pytest
from reward_calls import make_call, values

from comlrl.rewards import (
    Rewards,
    bind,
)

PROMPTS = ["p0 for agent 0"] * 3
ITEMS = [{"prompt": "p0", "index": 0}] * 3


C1, C2, C3 = (["a0", "a1", "a2"], ["b0", "b1", "b2"], ["c0", "c1", "c2"])


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


def test_lists_are_new_so_that_a_function_cannot_change_the_callers(make_rewards):
    def greedy(c1, c2):
        scores = [float(len(c1))] * len(c1)
        c1.clear()
        return scores

    call = make_call()
    assert values(make_rewards([greedy, lambda c1, c2: [float(len(c1))] * len(c2)], 2)([call])) == [[6.0, 6.0, 6.0]]
    assert call.completions[0] == C1
