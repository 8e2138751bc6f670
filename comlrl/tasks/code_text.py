"""Answers that are Python: taken from the text, read as a syntax tree, never run here."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MAX_CHARS = 20_000
MAX_DEPTH = 100
FENCE = re.compile(r"^[ \t]*```[^\n]*$", re.MULTILINE)
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Code:
    """A module as it is kept, or ``error``. ``functions`` and ``classes``: the top-level definitions by name."""

    source: str
    tree: ast.Module
    error: str = ""

    @property
    def functions(self) -> dict[str, Function]:
        return {node.name: node for node in self.tree.body if isinstance(node, Function)}

    @property
    def classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}


def fenced(text: str) -> str:
    """What stands between fences, of all blocks; the whole text if there is none. The last one may be open."""
    marks = [(match.start(), match.end()) for match in FENCE.finditer(text)]
    if not marks:
        return text
    ends = [start for start, _ in marks[1::2]] + [len(text)]
    return "\n".join(text[end:stop] for (_, end), stop in zip(marks[::2], ends))


def read_code(text: str, drop: Sequence[str] = ()) -> Code:
    """The module of an answer: whole, but for top-level calls, asserts and ``if __name__`` blocks, and for the
    definitions of the names in ``drop``."""
    empty = ast.Module([], [])
    source = fenced(text).strip("\n")
    if len(source) > MAX_CHARS:
        return Code("", empty, f"more than {MAX_CHARS} characters")
    if nesting(source) > MAX_DEPTH:
        return Code("", empty, "brackets or signs nested too deeply")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an invalid escape in an answer is not the trainer's matter
            tree = ast.parse(source)
            tree.body = [node for node in tree.body if kept(node) and not set(defined_names(node)) & set(drop)]
            return Code(ast.unparse(tree), tree)
    except SyntaxError as error:
        return Code("", empty, f"line {error.lineno}: {error.msg}")
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes, or nested too deeply
        return Code("", empty, f"{type(error).__name__}: {error}"[:200])


def nesting(source: str) -> int:
    """How deep brackets nest, or how many prefix operators stand in a row: the parser recurses on them."""
    depth = most = signs = 0
    for character in source:
        depth = max(depth + (character in "([{") - (character in ")]}"), 0)
        signs = signs + 1 if character in "-+~" else 0
        most = max(most, depth, signs)
    return most


def kept(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assert | ast.Expr | ast.For | ast.While | ast.With):
        return False
    if isinstance(node, ast.If):  # `if __name__ == "__main__"`, but not `if sys.version_info ...`
        return not any(isinstance(part, ast.Name) and part.id == "__name__" for part in ast.walk(node.test))
    return True


def defined_names(node: ast.stmt) -> list[str]:
    if isinstance(node, Function | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [part.id for target in node.targets for part in ast.walk(target) if isinstance(part, ast.Name)]
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name for alias in node.names]
    return []


def returns_value(function: Function) -> bool:
    return any(isinstance(part, ast.Return) and part.value is not None for part in live(function.body))


def live(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    """Every node below the statements that can be reached: not after a return, not under ``if False``."""
    for statement in body:
        if isinstance(statement, ast.If | ast.While) and isinstance(statement.test, ast.Constant):
            yield from live(statement.body if statement.test.value else statement.orelse)
        else:
            yield statement
            for _, value in ast.iter_fields(statement):
                if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                    yield from live(value)
                elif isinstance(value, list):
                    for part in value:
                        if isinstance(part, ast.ExceptHandler | ast.match_case):
                            yield from live(part.body)
                        elif isinstance(part, ast.AST):
                            yield from ast.walk(part)
                elif isinstance(value, ast.AST):
                    yield from ast.walk(value)
        if isinstance(statement, ast.Return | ast.Raise | ast.Continue | ast.Break):
            return


@dataclass(frozen=True)
class HelperUse:
    """called: in code reachable from the entry point. ignored: called, but no call's value goes anywhere.
    wrapper: the entry point only returns what the helper gave."""

    called: bool
    ignored: bool
    wrapper: bool


def helper_use(code: Code, entry: str, helper: str) -> HelperUse:
    functions = code.functions
    todo, seen, nodes = [entry], set(), []
    while todo:
        name = todo.pop()
        if name in seen or name not in functions:
            continue
        seen.add(name)
        parts = list(live(functions[name].body))
        nodes += parts
        todo += [part.id for part in parts if isinstance(part, ast.Name)]
    calls = [node for node in nodes if is_call(node, helper)]
    loaded = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    dropped = [
        node.value
        for node in nodes
        if isinstance(node, ast.Expr)
        or (isinstance(node, ast.Assign) and not loaded & set(defined_names(node)))
        or (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id not in loaded)
    ]
    lost = {id(value) for value in dropped}
    ignored = bool(calls) and all(id(call) in lost for call in calls)
    return HelperUse(bool(calls), ignored, entry in functions and is_wrapper(functions[entry], helper))


def is_call(node: ast.AST | None, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def is_wrapper(function: Function, helper: str) -> bool:
    """``return helper(...)``, or ``x = helper(...)`` and ``return x``."""
    body = [node for node in function.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    if len(body) == 1 and isinstance(body[0], ast.Return):
        return is_call(body[0].value, helper)
    if len(body) != 2 or not isinstance(body[0], ast.Assign) or not isinstance(body[1], ast.Return):
        return False
    value = body[1].value
    return is_call(body[0].value, helper) and isinstance(value, ast.Name) and value.id in defined_names(body[0])
