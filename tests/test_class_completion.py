"""The scoring of the class-completion task: division, merge, and what reference, empty and cheating answers get."""

# ruff: noqa: E501  (programs in strings)

import ast
import json

import pytest

from comlrl.sandbox import isolation
from comlrl.tasks import load_task
from comlrl.tasks.class_completion import CONSTANTS, merge, owned_methods, reference_texts, unwritten
from comlrl.tasks.class_rows import written_rows

needs_isolation = pytest.mark.skipif(
    not any(not isolation.works(method) for method in isolation.METHODS),
    reason="neither bubblewrap nor unshare works here",
)
ROW = {
    "class_name": "Box",
    "import_statement": ["import math"],
    "skeleton": "class Box:\n    def __init__(self, n=2):\n        self.n = n\n\n    def double(self):\n        '''Twice n.'''\n\n"
    "    @staticmethod\n    def root(x):\n        '''Square root.'''\n        pass\n",
    "solution_code": "class Box:\n    def __init__(self, n=2):\n        self.n = n\n    def double(self):\n        return 2 * self.n\n"
    "    @staticmethod\n    def root(x):\n        return math.sqrt(x)\n",
    "test": "import unittest\nclass T(unittest.TestCase):\n    def test_init(self):\n        self.assertEqual(Box(3).n, 3)\n"
    "    def test_double(self):\n        self.assertEqual(Box(3).double(), 6)\n    def test_root(self):\n        self.assertEqual(Box.root(9), 3)\n"
    "    def test_both(self):\n        self.assertEqual(Box.root(Box(8).double()), 4)\n    def test_name(self):\n        self.assertTrue(Box(1).double())\n",
}
DOUBLE, ROOT = "def double(self):\n    return 2 * self.n", "def root(x):\n    return math.sqrt(x)"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("\n".join(json.dumps(ROW) for _ in range(4)))
    return {
        profile: load_task("class_completion", 2, {"dataset": str(path), "profile": profile}) for profile in CONSTANTS
    }


def test_methods_are_divided_evenly_and_given_ones_are_not():
    assert owned_methods(ROW, 2) == [["double"], ["root"]]
    for row in written_rows():
        for agents in (1, 2, 3, 4):
            owned = owned_methods(row, agents)
            names = unwritten(ast.parse(row["skeleton"]).body[0])
            assert sorted(name for names in owned for name in names) == sorted(names)
            assert max(map(len, owned)) - min(map(len, owned)) <= 1


def test_merge_keeps_nested_async_decorated_and_imported_code_and_only_the_owners_methods():
    texts = [
        "```python\nfrom functools import cache\nasync def double(self):\n    def inner():\n        return 1\n    return inner()\n"
        "def root(x):\n    return 'not mine'\n```",
        "    @staticmethod\n    def root(x):\n        return K\n    K = 5\n",
    ]
    source, written, overlap = merge(ROW, texts)
    assert written == ["double", "root"]
    assert overlap == 1
    for text in ("import math", "from functools import cache", "async def double", "def inner", "return K", "K = 5"):
        assert text in source
    assert "not mine" not in source
    assert source.count("def root") == source.count("@staticmethod") == 1
    assert merge(ROW, texts) == (source, written, overlap)


@needs_isolation
@pytest.mark.parametrize(
    ("name", "first", "second", "published", "sound"),
    [
        ("good", DOUBLE, ROOT, 6.0, 1.0),
        ("in the class, fenced", "```\nclass Box:\n    def double(self):\n        return 2 * self.n\n```", ROOT, 6.0, 1.0),
        ("only the first", DOUBLE, "", 1 + 2.0, 0.05 + 0.45),
        ("one is wrong", DOUBLE, "def root(x):\n    return 0", 2 + 2.0, 0.1 + 0.45),
        ("both write everything", f"{DOUBLE}\n{ROOT}", f"{DOUBLE}\n{ROOT}", 5.0, 0.9),
        ("swapped", ROOT, DOUBLE, -1.0, 0.0),
        ("empty", "", "", 0.0, 0.0),
        ("copied", ROW["skeleton"], ROW["skeleton"], 0.0, 0.0),
        ("no Python", "def double(self) return", "x", 0.0, 0.0),
        ("a print", f"print('x')\n{DOUBLE}", ROOT, 6.0, 1.0),
        ("exit in a default argument", "import os\ndef double(self, x=os._exit(0)):\n    return 1", ROOT, 2.0, 0.1),
        ("forged line and exit", "import os\ndef double(self, x=print('passed 5') or os._exit(0)):\n    return 1", ROOT, 2.0, 0.1),
        ("patched unittest", "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\ndef double(self):\n    return 0", "def root(x):\n    return 0", 2.0, 0.1),
        ("always equal", "class A:\n    def __eq__(s, o):\n        return True\n    def __len__(s):\n        return 0\ndef double(self):\n    return A()", "def root(x):\n    return A()", 2.0 + 1.0, 0.1 + 0.225),
    ],
)  # fmt: skip
def test_scores(tasks, name, first, second, published, sound):
    for profile, expected in (("published", published), ("sound", sound)):
        total, parts = tasks[profile].score(ROW, [first, second])
        assert total == pytest.approx(expected), parts
        assert parts["total"] in (0, 4)  # test_init passes without any answer


@needs_isolation
@pytest.mark.parametrize("num_agents", [1, 2, 3])
@pytest.mark.parametrize("profile", ["sound", "published"])
def test_the_written_references_get_the_maximum(num_agents, profile):
    task = load_task("class_completion", num_agents, {"profile": profile})
    for row in (*task.train_rows, *task.eval_rows):
        total, parts = task.score(row, task.reference(row))
        assert total == pytest.approx(task.maximum), (row["class_name"], parts)
    assert task.trivial["empty answers"] == task.trivial["the skeleton, copied"] == 0
    assert task.trivial["every method returns 0"] < 0.5 * task.maximum


@needs_isolation
def test_verify_drops_rows_whose_own_solution_fails(tmp_path):
    bad = ROW | {"solution_code": ROW["solution_code"].replace("2 * self.n", "3")}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([ROW, bad]))
    assert len(load_task("class_completion", 2, {"dataset": str(path)}).train_rows) == 2
    assert len(load_task("class_completion", 2, {"dataset": str(path), "verify": True}).train_rows) == 1


@needs_isolation
def test_feedback_tells_what_failed(tasks):
    answers = [DOUBLE, "def other(x):\n    return 0"]
    prompts = tasks["sound"].transition(prompt="", agent_completions=answers, num_agents=2, batch_item=ROW)
    told = [prompt[-1]["content"] for prompt in prompts]
    assert "Not written: root." in told[1]
    assert "Not written" not in told[0]
    assert all("3 of 5 tests pass" in text and "Failed: T.test_root" in text for text in told)


def test_references_are_divided_like_the_methods():
    texts = reference_texts(ROW, 2)
    assert "def double" in texts[0]
    assert "def root" in texts[1]
    assert "def root" not in texts[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"skeleton": ""}, "row 0 lacks skeleton"),
        ({"test": None}, "row 0 lacks test"),
        ({"class_name": "Other"}, "has no class 'Other'"),
        ({"skeleton": "class Box:\n    def f(self):\n        return 1\n"}, "0 methods to write"),
        ({"test": "x = 1"}, "no test method"),
        ({"skeleton": "class Box"}, "no Python"),
    ],
)
def test_rows_that_lack_something_are_refused(tmp_path, change, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROW | change))
    with pytest.raises(ValueError, match=message):
        load_task("class_completion", 2, {"dataset": str(path)})


@pytest.mark.parametrize("arguments", [{"profile": "x"}, {"style": "x"}, {"workers": 0}, {"wall_seconds": 0.0}])
def test_mistakes(arguments):
    with pytest.raises(ValueError, match=f"task_args.{next(iter(arguments))}|task_args.shown_tests"):
        load_task("class_completion", 2, arguments)
