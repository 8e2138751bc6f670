"""Tool use: calls read safely, matched as the official checker does, and scored by hand."""

import importlib.util
import itertools
import json
import random

import pytest

from comlrl.tasks.tool_use import best_sum, compare, read_calls, tool_use


def function(name, required, **types):
    shape = {key: {"type": kind} for key, kind in types.items()}
    return {"name": name, "description": "", "parameters": {"type": "dict", "properties": shape, "required": required}}


WEATHER = function("get_weather", ["city"], city="string", days="integer")
ADD = function("math.add", ["a"], a="float", b="float")
ROW = {
    "prompt": "Weather in Oslo for 3 days, then in Lima, then add 1 and 2.",
    "functions": [WEATHER, ADD],
    "ground_truth": [
        {"get_weather": {"city": ["Oslo"], "days": [3]}},
        {"get_weather": {"city": ["Lima", "Lima, Peru"], "days": ["", 1]}},
        {"math.add": {"a": [1.0], "b": [2.0]}},
    ],
}
FIRST, SECOND, THIRD = "get_weather(city='Oslo', days=3)", "get_weather(city='Lima')", "math.add(a=1, b=2.0)"


def score(*texts, **arguments):
    return tool_use(len(texts), **arguments).score(ROW, texts)


# --- reading ---


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (FIRST, [("get_weather", {"city": "Oslo", "days": 3})]),
        (f"[{FIRST}, f()]", [("get_weather", {"city": "Oslo", "days": 3}), ("f", {})]),
        ("```python\nf(a=(1, 2))\n```", [("f", {"a": [1, 2]})]),
        ("a.b.c(x=-1.5, y=None, z={'k': [True]})", [("a.b.c", {"x": -1.5, "y": None, "z": {"k": [True]}})]),
        ("[]", []),
        ("", []),
    ],
)
def test_calls(text, calls):
    answer = read_calls(text)
    assert (answer.calls, answer.malformed) == (calls, 0)


@pytest.mark.parametrize(
    "line",
    [
        "I call get_weather.",
        "f(1)",
        "f(a=1, a=2)",
        "f(**{'a': 1})",
        "f(*[1])",
        "f(a=b)",
        "f(a=g())",
        "f(a=1e999)",
        "f(a=-1e999)",
        "f(a=float('nan'))",
        "f(a=1j)",
        "f(a=b'x')",
        "f(a={'k': 1, 'k': 2})",
        "f(a={1: 2})",
        "f(a={**{}})",
        "f(a=" + "9" * 5000 + ")",
        "f(a=" + "[" * 5000 + "]" * 5000 + ")",
        "f(a=" + "-" * 5000 + "1)",
        "f(a=" + "not " * 3000 + "1)",
        "f" + ".x" * 6000 + "(a=1)",
        "f(a='\x00')",
        "f()()",
        "x = f()",
        "f(a='" + "x" * 30_000 + "')",
        "[1, 2]",
        "__import__('os').system('true')",
    ],
)
def test_lines_that_are_wrong(line):
    answer = read_calls(line)
    assert (answer.calls, answer.malformed) == ([], 1)


def test_many_calls_are_cut_but_counted():
    answer = read_calls("f()\n" * 1000)
    assert (len(answer.calls), answer.malformed) == (32, 968)


# --- matching ---


def matches(text, expected, *functions):
    (call,) = read_calls(text).calls
    return compare(call, expected, functions)[0]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("get_weather(city='Oslo', days=3)", True),
        ("get_weather(days=3, city='OS-LO ')", True),  # strings: without case, blanks and some signs
        ("get_weather(city='Oslo')", False),  # days is not optional here
        ("get_weather(city='Oslo', days='3')", False),
        ("get_weather(city='Oslo', days=3.0)", False),
        ("get_weather(city='Oslo', days=True)", False),
        ("get_weather(city='Oslo', days=3, unit='C')", False),
        ("get_weather(city=['Oslo'], days=3)", False),
        ("weather(city='Oslo', days=3)", False),
    ],
)
def test_matching(text, right):
    assert matches(text, ROW["ground_truth"][0], WEATHER) is right


def test_optional_arguments_may_be_left_out():
    expected = ROW["ground_truth"][1]
    assert matches("get_weather(city='Lima')", expected, WEATHER)
    assert matches("get_weather(city='Lima Peru', days=1)", expected, WEATHER)
    assert not matches("get_weather(city='Lima', days=2)", expected, WEATHER)
    assert not matches("get_weather(days=1)", expected, WEATHER)


def test_types():
    assert matches("math.add(a=1, b=2)", ROW["ground_truth"][2], ADD)  # an int passes for a float
    assert not matches("math.add(a=1, b='2')", ROW["ground_truth"][2], ADD)
    listing = function("f", ["x"], x="array")
    listing["parameters"]["properties"]["x"]["items"] = {"type": "integer"}
    assert matches("f(x=[1, 2])", {"f": {"x": [[1, 2]]}}, listing)
    assert matches("f(x=(1, 2))", {"f": {"x": [[1, 2]]}}, listing)
    assert not matches("f(x=[2, 1])", {"f": {"x": [[1, 2]]}}, listing)
    assert not matches("f(x=[1.0, 2.0])", {"f": {"x": [[1, 2]]}}, listing)
    nested = function("f", ["x"], x="dict")
    accepted = {"f": {"x": [{"a": ["One"], "b": ["", 2]}]}}
    assert matches("f(x={'a': 'one'})", accepted, nested)
    assert matches("f(x={'a': 'one', 'b': 2})", accepted, nested)
    assert not matches("f(x={'b': 2})", accepted, nested)
    assert not matches("f(x={'a': 'one', 'c': 1})", accepted, nested)
    variable = function("f", ["x"], x="integer")
    assert matches("f(x='n')", {"f": {"x": ["n"]}}, variable)  # a variable's name where a number is declared
    assert not matches("f(x='N')", {"f": {"x": ["n"]}}, variable)


def test_best_sum_equals_trying_everything():
    generator = random.Random(0)
    for _ in range(50):
        rows, columns = generator.randint(0, 5), generator.randint(1, 4)
        table = [[generator.choice([0.0, generator.random()]) for _ in range(columns)] for _ in range(rows)]
        padded = table + [[0.0] * columns] * columns
        slow = max(
            sum(padded[row][column] for column, row in enumerate(chosen))
            for chosen in itertools.permutations(range(len(padded)), columns)
        )
        assert best_sum(table, columns) == pytest.approx(slow)


# --- scores ---


def test_scores_by_hand():
    total, parts = score(f"{FIRST}\n{THIRD}", SECOND)
    assert (total, parts["exact"], parts["f1"], parts["owned"]) == (1.0, 1.0, 1.0, 1.0)
    # Agent 0 makes everything: right calls, but one is not its own.
    total, parts = score(f"{FIRST}\n{SECOND}\n{THIRD}", "[]")
    assert (parts["exact"], parts["owned"]) == (1.0, 2 / 3)
    assert total == pytest.approx(0.5 + 0.25 + 0.25 * 2 / 3)
    # A sentence beside the calls is one wrong call: f1 = 2 * 3 / (4 + 3).
    total, parts = score(f"Here you are:\n{FIRST}\n{THIRD}", SECOND)
    assert (parts["exact"], parts["malformed"]) == (0.0, 1.0)
    assert total == pytest.approx(0.5 * 6 / 7 + 0.25)
    # One argument of two is right: similarity 1/2, no match.
    total, parts = score("get_weather(city='Oslo', days=4)", "[]")
    assert (parts["f1"], parts["soft_f1"], parts["name_f1"]) == (0.0, 0.25, 0.5)
    assert total == pytest.approx(0.5 * 0.25)
    # The same right call twice counts once.
    assert score(FIRST, FIRST)[1]["f1"] == pytest.approx(2 / 5)


def test_free_split_asks_for_even_shares():
    assert score(FIRST, f"{SECOND}\n{THIRD}", split="free")[0] == 1.0
    assert score(f"{FIRST}\n{SECOND}", THIRD, split="free")[0] == 1.0  # an odd number favours nobody
    assert score(f"{FIRST}\n{SECOND}\n{THIRD}", "[]", split="free")[0] == 0.75
    assert score(FIRST, SECOND, THIRD, "[]", split="free")[0] == 1.0  # fewer calls than agents


def test_published_terms_by_hand():
    total, parts = score(f"{FIRST}\n{THIRD}", SECOND, profile="published")
    assert total == pytest.approx(1.1)
    assert score("", "", profile="published")[0] == pytest.approx(-0.15)
    # Everything by agent 0: half of the agents lazy, balance 1 - 2/3.
    total, parts = score(f"{FIRST}\n{SECOND}\n{THIRD}", "[]", profile="published")
    assert (parts["lazy"], parts["balance"]) == (0.5, pytest.approx(1 / 3))
    assert total == pytest.approx(0.05 / 2 + 0.25 + 0.35 + 0.1 + 0.15 / 3 + 0.2 - 0.15 / 2)
    assert score(*["f()\n" * 50] * 2, profile="published")[0] >= -0.4


def test_what_trivial_answers_score():
    trivial = tool_use().trivial
    for name in (
        "empty answers",
        "[] from every agent",
        "the request, copied",
        "a call without arguments from every agent",
    ):
        assert trivial[name] == 0.0
    assert 0.8 < trivial["all right calls from agent 0"] < 0.9
    assert trivial["all right calls from every agent"] < 0.6
    row = tool_use().train_rows[0]
    assert tool_use().score(row, ["f()\n" * 5000, "x" * 10**6])[0] == 0.0


# --- rows ---


def test_generated_rows_differ():
    task = tool_use(train_rows=200, eval_rows=100)
    assert len({row["prompt"] for row in [*task.train_rows, *task.eval_rows]}) == 300
    assert all(2 <= len(row["ground_truth"]) <= 4 for row in task.train_rows)
    assert {len(row["functions"]) for row in task.train_rows} >= {1, 2, 3, 4}


def test_rows_of_a_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(ROW | {"prompt": f"number {i}"}) for i in range(10)))
    task = tool_use(dataset=str(path), train_rows=5)
    assert (len(task.train_rows), len(task.eval_rows)) == (5, 2)
    assert task.score(ROW, task.reference(ROW))[0] == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"functions": []}, "row 0 lacks functions"),
        ({"ground_truth": None}, "row 0 lacks ground_truth"),
        ({"ground_truth": [{"h": {}}]}, "row 0 calls 'h', which it does not offer"),
        ({"ground_truth": ROW["ground_truth"] * 4}, "row 0 has more than 10 calls"),
    ],
)
def test_rows_that_are_refused(tmp_path, change, message):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([ROW | change]))
    with pytest.raises(ValueError, match=message):
        tool_use(dataset=str(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": "nowhere.jsonl"}, r"task_args\.dataset='nowhere\.jsonl': no such file"),
        ({"profile": "x"}, r"task_args\.profile='x'"),
        ({"train_rows": 0}, r"task_args\.train_rows=0"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(ValueError, match=message):
        tool_use(**arguments)


@pytest.mark.skipif(importlib.util.find_spec("bfcl_eval") is None, reason="pip install --no-deps bfcl-eval==2026.3.23")
def test_every_row_of_bfcl_has_its_reference():
    names = ["parallel", "parallel_multiple", "live_parallel", "live_parallel_multiple", "simple_python", "multiple"]
    task = tool_use(dataset="bfcl", categories=names)
    rows = [*task.train_rows, *task.eval_rows]
    assert len(rows) == 200 + 200 + 16 + 24 + 400 + 200
    assert all(task.score(row, task.reference(row))[0] == 1.0 for row in rows)
    with pytest.raises(ValueError, match="'paralel' must be one of"):
        tool_use(dataset="bfcl", categories=["paralel"])


def test_bfcl_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps bfcl-eval==2026\.3\.23"):
        tool_use(dataset="bfcl")
