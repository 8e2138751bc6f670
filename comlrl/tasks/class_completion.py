"""Completing a class (ClassEval's form): the methods of a skeleton are divided, each agent writes its own.

A row has ``skeleton`` (a class whose unwritten methods have a docstring only), ``test`` (unittest classes), and
``class_name``. The unwritten methods go round the agents in order, so loads differ by at most one. An answer is
``def`` blocks, alone or inside the class; its imports and helpers are kept. The merged class is made from syntax
trees: a method comes from its owner only, a name that two agents define outside the class from the first of them.

Tests run against stand-ins of objects that live in the sandbox; they compare values on their own side. What a
stand-in cannot do (change a list in place through an attribute, share files, patch functions) fails for every answer,
so ``verify: true`` drops rows of which the row's own ``solution_code`` does not pass.

Parts: written (own methods that are there / all), tests (of those that fail for the bare skeleton, the share that
passes), solved, overlap (methods that an agent wrote and does not own / all). ``sound`` (default): 0.1 written +
0.9 tests - 0.1 overlap, not below 0, maximum 1. ``published``: 2 written + 4 tests - overlap, 0 if the merged class is
no Python, maximum 6.
"""

from __future__ import annotations

import ast
import copy
import random
import textwrap
import warnings
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Literal

from comlrl.sandbox import Module, Report, Sandbox
from comlrl.tasks import Message, Prompt, Row, Score, Task
from comlrl.tasks.class_rows import written_rows
from comlrl.tasks.code_text import Code, Function, defined_names, fenced, read_code
from comlrl.tasks.programming import shared_sandbox
from comlrl.tasks.sources import load_rows

Profile = Literal["sound", "published"]
CONSTANTS: dict[str, dict[str, float]] = {
    "sound": {"written": 0.1, "tests": 0.9, "overlap": -0.1},
    "published": {"written": 2.0, "tests": 4.0, "overlap": -1.0},
}
MAXIMUM = {"sound": 1.0, "published": 6.0}
FIELDS = ("skeleton", "test", "class_name")


def class_completion(
    num_agents: int = 2,
    dataset: str = "written",
    split: str = "test",
    train_rows: int | None = None,
    eval_rows: int | None = None,
    verify: bool = False,
    profile: Profile = "sound",
    style: Literal["chat", "plain"] = "chat",
    feedback: Literal["tests", "plain"] = "tests",
    shown_tests: int = 5,
    wall_seconds: float = 10.0,
    workers: int | None = None,
    allow_unisolated: bool = False,
    seed: int = 0,
) -> Task:
    """``dataset``: written (4 classes of this package), or a file or hub id (FudanSELab/ClassEval) with the rows'
    fields, of which ``split`` is read. Every fourth row, after a shuffle by ``seed``, is for evaluation.
    """
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
    rows = written_rows() if dataset == "written" else load_rows(dataset, FIELDS, split)
    for number, row in enumerate(rows):
        check_row(row, f"task_args.dataset={dataset!r}: row {number}", num_agents)
    judge = Judge(shared_sandbox(workers, wall_seconds, allow_unisolated))
    if verify:
        rows = [row for row in rows if solved_by_reference(row, judge)]
        if not rows:
            raise ValueError(f"task_args.verify=true: no row of {dataset!r} whose solution_code passes its own tests")
    random.Random(seed).shuffle(rows)
    train = [row for i, row in enumerate(rows) if i % 4 != 3][:train_rows]
    score = partial(score_class, judge=judge, profile=profile)
    return Task(
        name="class_completion",
        train_rows=train,
        eval_rows=[row for i, row in enumerate(rows) if i % 4 == 3][:eval_rows],
        formatters=[
            partial(format_prompt, agent=agent, num_agents=num_agents, style=style) for agent in range(num_agents)
        ],
        score=score,
        maximum=MAXIMUM[profile],
        transition=partial(tell_results, judge=judge, style=style, mode=feedback, shown=shown_tests),
        trivial=trivial_scores(train[:2], score, num_agents),
        reference=partial(reference_texts, num_agents=num_agents),
        parallel=judge.sandbox.workers,
    )


# --- rows ---


def check_row(row: Row, where: str, num_agents: int) -> None:
    row.setdefault("prompt", f"Complete the class {row['class_name']}.")
    try:
        node = class_node(ast.parse(skeleton_source(row)), row["class_name"])
        tests = ast.parse(row["test"])
    except SyntaxError as error:
        raise ValueError(f"{where}: skeleton or test is no Python: {error}") from error
    if node is None:
        raise ValueError(f"{where}: the skeleton has no class {row['class_name']!r}")
    if len(unwritten(node)) < num_agents:
        raise ValueError(f"{where}: {len(unwritten(node))} methods to write for num_agents={num_agents}")
    if not any(isinstance(part, ast.FunctionDef) and part.name.startswith("test") for part in ast.walk(tests)):
        raise ValueError(f"{where}: test has no test method")


def skeleton_source(row: Row) -> str:
    """The skeleton after the row's imports, of which ClassEval has a list."""
    imports = row.get("import_statement") or []
    return "\n".join([*([imports] if isinstance(imports, str) else imports), row["skeleton"]])


def class_node(tree: ast.Module, name: str) -> ast.ClassDef | None:
    return next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)


def unwritten(node: ast.ClassDef) -> list[str]:
    """Methods whose body is a docstring, ``pass``, ``...`` or ``raise NotImplementedError``."""
    return [part.name for part in node.body if isinstance(part, Function) and all(map(says_nothing, part.body))]


def says_nothing(node: ast.stmt) -> bool:
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant or isinstance(node, ast.Pass) or (isinstance(node, ast.Raise) and "NotImpl" in ast.unparse(node))


def owned_methods(row: Row, num_agents: int) -> list[list[str]]:
    """The methods of each agent, in the skeleton's order."""
    node = class_node(ast.parse(skeleton_source(row)), row["class_name"])
    assert node is not None
    names = list(dict.fromkeys(unwritten(node)))
    return [names[agent::num_agents] for agent in range(num_agents)]


# --- answers ---


def read_methods(text: str, class_name: str) -> tuple[dict[str, Function], list[ast.stmt], str]:
    """An answer's methods by name (the last of equal ones), what else stands outside the class, and the error."""
    code: Code = read_code(text)
    if code.error:
        code = read_code(textwrap.dedent(fenced(text).strip("\n")))  # blocks indented as in the class
    inner = code.classes[class_name].body if class_name in code.classes else []
    top = [node for node in code.tree.body if not (isinstance(node, ast.ClassDef) and node.name == class_name)]
    methods = {node.name: node for node in (*top, *inner) if isinstance(node, Function)}
    return methods, top, code.error


def merge(row: Row, texts: Sequence[str]) -> tuple[str, list[str], int]:
    """The merged module, the methods that their owners wrote, and how many an agent wrote without owning them."""
    tree = ast.parse(skeleton_source(row))
    node = class_node(tree, row["class_name"])
    assert node is not None
    owned = owned_methods(row, len(texts))
    wanted = {name for names in owned for name in names}
    chosen: dict[str, Function] = {}
    outside: list[ast.stmt] = []
    overlap: set[str] = set()
    for agent, text in enumerate(texts):
        methods, top, _ = read_methods(text, row["class_name"])
        written = {name for name, method in methods.items() if not all(map(says_nothing, method.body))}
        chosen |= {name: methods[name] for name in owned[agent] if name in written}
        overlap |= (written & wanted) - set(owned[agent])
        taken = {name for statement in outside for name in defined_names(statement)}
        outside += [item for item in top if not set(defined_names(item)) & (taken | wanted | {row["class_name"]})]
    body: list[ast.stmt] = []
    for part in node.body:
        if not (isinstance(part, Function) and part.name in wanted):
            body.append(part)
        elif part.name in chosen:
            method = copy.deepcopy(chosen[part.name])
            if not method.decorator_list:  # an answer may leave @staticmethod to the skeleton
                method.decorator_list = part.decorator_list
            body.append(method)
    node.body = body or [ast.Pass()]
    position = tree.body.index(node)
    tree.body[position:position] = outside
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            source = ast.unparse(ast.fix_missing_locations(tree))
            compile(source, "<merged>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # `return` outside a function, for example
        return "", sorted(chosen), len(overlap)
    return source, sorted(chosen), len(overlap)


class Judge:
    """Runs merged classes in the sandbox, each once: reward, feedback and evaluation ask for the same ones."""

    def __init__(self, sandbox: Sandbox):
        self.sandbox = sandbox
        self.report = lru_cache(maxsize=1024)(self._report)

    def __reduce__(self) -> tuple:
        return Judge, (self.sandbox,)  # a copy in another process remembers no reports

    def _report(self, source: str, class_name: str, test: str) -> Report:
        return self.sandbox.unittest([Module(source)], class_name, test)


def run_class(row: Row, source: str, judge: Judge) -> Report:
    return judge.report(source, row["class_name"], row["test"])


def score_class(row: Row, texts: Sequence[str], judge: Judge, profile: str) -> Score:
    weight = CONSTANTS[profile]
    source, written, overlap = merge(row, texts)
    count = sum(map(len, owned_methods(row, len(texts))))
    parts = dict.fromkeys(["written", "tests", "solved", "overlap", "passed", "total", "timeout"], 0.0)
    parts["overlap"] = overlap / count
    if not source:
        return 0.0, parts
    parts["written"] = len(written) / count
    if written:
        report, bare = run_class(row, source, judge), run_class(row, merge(row, [""] * len(texts))[0], judge)
        free = {outcome.name for outcome in bare.outcomes if outcome.passed}  # these say nothing about the answers
        counted = [outcome.passed for outcome in report.outcomes if outcome.name not in free]
        parts |= {"passed": float(sum(counted)), "total": float(len(counted))}
        parts["tests"] = sum(counted) / len(counted) if counted else 0.0
        parts["solved"] = float(bool(report.outcomes) and report.passed == report.total)
        parts["timeout"] = float(report.status == "timeout")
    total = sum(value * parts[name] for name, value in weight.items())
    return (max(total, 0.0) if profile == "sound" else total), parts


# --- prompts, feedback ---


def format_prompt(row: Row, agent: int, num_agents: int, style: str) -> Prompt:
    names = ", ".join(f"`{name}`" for name in owned_methods(row, num_agents)[agent])
    others = "The others are written by somebody else; you may call them. " if num_agents > 1 else ""
    text = (
        f"Complete the class `{row['class_name']}`: write the methods {names}. {others}Reply with their `def` "
        f"blocks only: no explanation, no tests.\n\n{row['skeleton'].strip()}"
    )
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
        raise ValueError("class_completion: feedback needs the row (batch_item)")
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
    again = "Write all your methods again, improved, as `def` blocks only."
    if mode == "plain":
        return again
    methods, _, error = read_methods(texts[agent], row["class_name"])
    own = owned_methods(row, len(texts))[agent]
    lines = [f"Your code is no valid Python: {error}."] if error else []
    if missing := [name for name in own if name not in methods]:
        lines.append(f"Not written: {', '.join(missing)}.")
    source, written, _ = merge(row, texts)
    if source and written:
        report = run_class(row, source, judge)
        lines.append(f"{report.passed} of {report.total} tests pass.")
        failed = [outcome for outcome in report.outcomes if not outcome.passed][:shown]
        lines += [f"Failed: {outcome.name}   {outcome.message}".rstrip() for outcome in failed]
    return "\n".join([*lines, again])


# --- answers to compare with ---


def reference_texts(row: Row, num_agents: int) -> list[str]:
    """Each agent's methods, from the row's ``solution_code``; its imports and helpers come with the first agent."""
    if not row.get("solution_code"):
        raise ValueError(f"row {row.get('task_id')}: no solution_code to show")
    tree = ast.parse(row["solution_code"])
    node = class_node(tree, row["class_name"])
    assert node is not None
    written = {part.name: part for part in node.body if isinstance(part, Function)}
    texts = ["\n\n".join(ast.unparse(written[name]) for name in names) for names in owned_methods(row, num_agents)]
    outside = "\n".join(ast.unparse(part) for part in tree.body if part is not node)
    return [f"{outside}\n\n{texts[0]}".strip(), *texts[1:]]


def solved_by_reference(row: Row, judge: Judge) -> bool:
    texts = reference_texts(row, 1)
    return score_class(row, texts, judge, "sound")[1]["solved"] == 1.0


def trivial_scores(rows: Sequence[Row], score: partial[Score], num_agents: int) -> dict[str, float]:
    """Means over ``rows`` of answers without skill."""

    def constant(row: Row) -> list[str]:
        owned = owned_methods(row, num_agents)
        return ["\n".join(f"def {name}(self, *args):\n    return 0" for name in names) for names in owned]

    def mean(totals: list[float]) -> float:
        return sum(totals) / len(totals)

    scores = {
        "empty answers": mean([score(row, [""] * num_agents)[0] for row in rows]),
        "the skeleton, copied": mean([score(row, [row["skeleton"]] * num_agents)[0] for row in rows]),
        "every method returns 0": mean([score(row, constant(row))[0] for row in rows]),
    }
    if num_agents > 1 and all(row.get("solution_code") for row in rows):
        whole = [score(row, [row["solution_code"]] * num_agents)[0] for row in rows]
        first = [score(row, [row["solution_code"], *[""] * (num_agents - 1)])[0] for row in rows]
        scores |= {"every agent writes everything": mean(whole), "only agent 0 writes, everything": mean(first)}
    return scores
