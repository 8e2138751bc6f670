"""Tool use: the calls that one request needs, divided among the agents; nothing is executed.

A row has ``functions`` (name, description, parameters with types), and ``ground_truth``: one ``{name: {argument:
[accepted values]}}`` a call, the form of BFCL v4. ``""`` among the accepted values means that the argument may be
left out. An answer is one Python call a line with keyword arguments, or ``[]``; a line that is neither counts as a
wrong call. A call matches as in the official checker: the right name, all required arguments, no unknown one, types
as declared (an int passes for a float), strings compared without case, blanks and ``,./-_*^``.

``exact`` (all calls there and nothing else) and ``f1`` are what to report. The reward of profile ``sound`` is
``0.5 * soft F1 + 0.25 * exact + 0.25 * owned``; soft F1 counts a call with the right name by its share of right
arguments, and ``owned`` is the share of calls made by the agent whose turn it is (``split: free``: whether every
agent makes its even share). Maximum 1. ``published`` rebuilds the weighted sum of the published environment, whose
maximum is 1.1.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from comlrl.tasks import Prompt, Row, Score, Task
from comlrl.tasks.sources import load_rows, read_file
from comlrl.tasks.tool_rows import generated_rows

Split = Literal["odd_even", "free"]
Profile = Literal["sound", "published"]
Call = tuple[str, dict[str, Any]]

CONSTANTS: dict[str, dict[str, float]] = {
    "sound": {"soft_f1": 0.5, "exact": 0.25, "owned": 0.25},
    "published": {
        "parsed": 0.05,
        "name_f1": 0.25,
        "arguments": 0.35,
        "count": 0.10,
        "balance": 0.15,
        "exact": 0.20,
        "overlap": -0.20,
        "lazy": -0.15,
        "extra": -0.05,
    },
}
MAXIMUM = {"sound": 1.0, "published": 1.1}
# What is longer, more, or deeper than this is not read: it counts as wrong calls. Python's parser recurses.
MAX_CHARS, MAX_LINE, MAX_CALLS, MAX_DEPTH = 20_000, 2_000, 32, 12
BFCL_PACKAGE = "bfcl-eval==2026.3.23"
FIELDS = ("prompt", "functions", "ground_truth")
PYTHON_TYPES: dict[str, type] = {
    "string": str,
    "integer": int,
    "float": float,
    "boolean": bool,
    "array": list,
    "tuple": list,
    "dict": dict,
    "any": str,
}


def tool_use(
    num_agents: int = 2,
    dataset: str = "generated",
    categories: list[str] | None = None,
    train_rows: int | None = None,
    eval_rows: int | None = None,
    split: Split = "odd_even",
    profile: Profile = "sound",
    style: Literal["chat", "plain"] = "chat",
    seed: int = 0,
) -> Task:
    """``dataset``: generated; bfcl (of the package ``bfcl-eval``; ``categories`` default parallel and
    parallel_multiple); or a local file or hub id whose rows have prompt, functions and ground_truth.

    Generated: 64 and 32 rows by default. Otherwise every fifth row is for evaluation; ``train_rows`` and
    ``eval_rows`` cut both parts.
    """
    if profile not in CONSTANTS or split not in ("odd_even", "free"):
        raise ValueError(
            f"task_args.profile={profile!r}, task_args.split={split!r}: sound or published; odd_even or free"
        )
    if min(1 if train_rows is None else train_rows, 1 if eval_rows is None else eval_rows + 1) < 1:
        raise ValueError(f"task_args.train_rows={train_rows}, task_args.eval_rows={eval_rows}: must be positive")
    if dataset == "generated":
        counts = (64 if train_rows is None else train_rows, 32 if eval_rows is None else eval_rows)
        rows = generated_rows(sum(counts), seed)
        train, evaluation = rows[: counts[0]], rows[counts[0] :]
    else:
        rows = (
            bfcl_rows(categories or ["parallel", "parallel_multiple"])
            if dataset == "bfcl"
            else load_rows(dataset, FIELDS)
        )
        check_rows(rows, dataset)
        random.Random(seed).shuffle(rows)
        train = [row for i, row in enumerate(rows) if i % 5 != 4][:train_rows]
        evaluation = [row for i, row in enumerate(rows) if i % 5 == 4][:eval_rows]
    score = partial(score_calls, split=split, profile=profile)
    return Task(
        name="tool_use",
        train_rows=train,
        eval_rows=evaluation,
        formatters=[
            partial(format_prompt, agent=agent, num_agents=num_agents, split=split, style=style)
            for agent in range(num_agents)
        ],
        score=score,
        maximum=MAXIMUM[profile],
        trivial=trivial_scores(train[:32], score, num_agents),
        reference=partial(reference_texts, num_agents=num_agents),
    )


# --- rows ---


def bfcl_rows(categories: Sequence[str]) -> list[Row]:
    """Rows of the installed package's data files; its code is never imported."""
    spec = importlib.util.find_spec("bfcl_eval")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"task_args.dataset=bfcl: not installed; pip install --no-deps {BFCL_PACKAGE}")
    data, rows = Path(spec.submodule_search_locations[0]) / "data", []
    known = sorted(path.stem.removeprefix("BFCL_v4_") for path in (data / "possible_answer").glob("BFCL_v4_*.json"))
    known = [name for name in known if not name.startswith(("multi_turn", "memory", "web_search", "simple_java"))]
    for category in categories:
        if category not in known:
            raise ValueError(f"task_args.categories: {category!r} must be one of {', '.join(known)}")
        answers = read_file(data / "possible_answer" / f"BFCL_v4_{category}.json")
        truth = {answer["id"]: answer["ground_truth"] for answer in answers}
        for item in read_file(data / f"BFCL_v4_{category}.json"):
            messages = [message for turn in item["question"] for message in turn]
            prompt = "\n".join(message["content"] for message in messages)
            row = {"prompt": prompt, "functions": item["function"], "ground_truth": truth[item["id"]]}
            rows.append(row | {"id": item["id"], "category": category})
    return rows


def check_rows(rows: Sequence[Row], dataset: str) -> None:
    """Every row has its fields, and its own reference answer is right."""
    for number, row in enumerate(rows):
        lacking = [field for field in FIELDS if not row.get(field)]
        if lacking:
            raise ValueError(f"task_args.dataset={dataset!r}: row {number} lacks {', '.join(lacking)}")
        if len(row["ground_truth"]) > 10:
            raise ValueError(f"task_args.dataset={dataset!r}: row {number} has more than 10 calls")
        schemas = {function["name"]: function for function in row["functions"]}
        for expected in row["ground_truth"]:
            name = next(iter(expected))
            if name not in schemas:
                raise ValueError(f"task_args.dataset={dataset!r}: row {number} calls {name!r}, which it does not offer")


# --- answers ---


@dataclass(frozen=True)
class Answer:
    """The calls of one text; ``malformed``: lines (or calls after the limit) that are wrong whatever is asked."""

    calls: list[Call]
    malformed: int


def read_calls(text: str) -> Answer:
    if len(text) > MAX_CHARS:
        return Answer([], 1)
    lines = [line.strip() for line in text.split("\n")]
    lines = [line for line in lines if line and not line.startswith("```")]
    calls: list[Call] = []
    malformed = 0
    for line in lines:
        found = read_line(line)
        if found is None:
            malformed += 1
        else:
            calls += found
    return Answer(calls[:MAX_CALLS], malformed + max(len(calls) - MAX_CALLS, 0))


def read_line(line: str) -> list[Call] | None:
    """One call, or a list of calls in brackets; None: neither."""
    if len(line) > MAX_LINE or _depth(line) > MAX_DEPTH:
        return None
    try:
        body = ast.parse(line, mode="eval").body
        nodes = body.elts if isinstance(body, ast.List) else [body]
        return [_call(node) for node in nodes]
    # ValueError: a null byte, or what _call refuses. The last two: a deep nesting that _depth does not see.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _depth(line: str) -> int:
    """How deep brackets and prefix operators nest at most: the parser recurses on them."""
    depth = most = signs = 0
    for character in line:
        depth += (character in "([{") - (character in ")]}")
        signs = signs + 1 if character in "-+~ " else 0
        most = max(most, depth, signs)
    return most


def _call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with keyword arguments only")
    names = [keyword.arg for keyword in node.keywords]
    if None in names or len(set(names)) < len(names):
        raise ValueError("unpacked or repeated arguments")
    return _name(node.func), {str(keyword.arg): _value(keyword.value) for keyword in node.keywords}


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError("no name")


def _value(node: ast.expr) -> Any:
    """A literal; tuples become lists, as in JSON. NaN, infinity and complex numbers are refused."""
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_value(key) if key is not None else None for key in node.keys]
        if not all(isinstance(key, str) for key in keys) or len(set(keys)) < len(keys):
            raise ValueError("keys must be different strings")
        return dict(zip(keys, [_value(item) for item in node.values]))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _value(node.operand)
        if type(value) in (int, float):
            return -value
    if isinstance(node, ast.Constant) and type(node.value) in (str, int, float, bool, type(None)):
        if isinstance(node.value, float) and not math.isfinite(node.value):
            raise ValueError("not finite")
        return node.value
    raise ValueError("no literal")


# --- matching, as in the official checker ---


def plain_string(text: str) -> str:
    return re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')


def plain_item(value: Any) -> Any:
    return plain_string(value) if isinstance(value, str) else value


def argument_matches(value: Any, accepted: Sequence[Any], schema: Mapping[str, Any]) -> bool:
    """Whether ``value`` is one of the ``accepted`` values of a parameter with this ``schema``."""
    declared = PYTHON_TYPES.get(schema["type"], str)
    if schema["type"] == "float" and type(value) is int:
        value = float(value)
    samples = [type(option) for option in accepted if option != ""][:1]
    variable = bool(samples) and samples[0] is not declared  # then only what is written counts
    if type(value) is not declared and type(value) not in samples:
        return False
    if variable:
        return value in accepted
    if declared is dict:
        return any(_dict_matches(value, option) for option in accepted if option != "")
    if declared is list:
        items = PYTHON_TYPES.get(schema.get("items", {}).get("type", ""))
        options = [option for option in accepted if isinstance(option, list)]
        if items is dict:
            return any(_dicts_match(value, option) for option in options)
        plain = [plain_item(item) for item in value]
        return any(
            plain == [plain_item(item) for item in option] and _items_typed(value, option, items) for option in options
        )
    if declared is str:
        return plain_string(value) in [plain_string(option) for option in accepted if isinstance(option, str)]
    return value in accepted


def _items_typed(value: Sequence[Any], option: Sequence[Any], declared: type | None) -> bool:
    allowed = {declared, type(next((item for item in option if item != ""), None))}
    return declared is None or all(type(item) in allowed for item in value)


def _dict_matches(value: Mapping[str, Any], option: Mapping[str, Any]) -> bool:
    if any(key not in option for key in value):
        return False
    return all(
        plain_item(value[key]) in [plain_item(item) for item in accepted] if key in value else "" in accepted
        for key, accepted in option.items()
    )


def _dicts_match(value: Sequence[Any], option: Sequence[Any]) -> bool:
    return len(value) == len(option) and all(
        isinstance(item, dict) and _dict_matches(item, accepted) for item, accepted in zip(value, option)
    )


def compare(call: Call, expected: Mapping[str, Any], functions: Sequence[Mapping[str, Any]]) -> tuple[bool, float]:
    """(whether the call matches, how similar it is: 0 for another name, else the share of arguments that are right).

    The share is taken over all arguments that were given or had to be given.
    """
    name, given = call
    wanted, accepted = next(iter(expected.items()))
    if name != wanted:
        return False, 0.0
    parameters = next(function for function in functions if function["name"] == name)["parameters"]
    properties, required = parameters["properties"], set(parameters.get("required", []))
    must = {key for key, options in accepted.items() if "" not in options} | required
    right = [
        key
        for key, value in given.items()
        if key in accepted and key in properties and argument_matches(value, accepted[key], properties[key])
    ]
    every = set(given) | must
    if not every:
        return True, 1.0
    return len(right) == len(every), len(right) / len(every)


def best_sum(table: Sequence[Sequence[float]], columns: int) -> float:
    """The largest sum of entries, at most one in each row and column. Exact; columns are at most 10."""
    best = {0: 0.0}  # used columns as bits -> sum
    for row in table:
        grown = dict(best)
        for used, total in best.items():
            for column, value in enumerate(row[:columns]):
                if value > 0 and not used >> column & 1:
                    key = used | 1 << column
                    grown[key] = max(grown.get(key, 0.0), total + value)
        best = grown
    return max(best.values())


# --- scores ---


def score_calls(row: Row, texts: Sequence[str], split: Split, profile: Profile) -> Score:
    answers, gold, functions = [read_calls(text) for text in texts], row["ground_truth"], row["functions"]
    calls = [(agent, call) for agent, answer in enumerate(answers) for call in answer.calls]
    pairs = [[compare(call, expected, functions) for expected in gold] for _, call in calls]
    malformed = sum(answer.malformed for answer in answers)
    count = len(calls) + malformed
    hits = best_sum([[float(match) for match, _ in line] for line in pairs], len(gold))
    soft = best_sum([[similarity for _, similarity in line] for line in pairs], len(gold))
    names = sum((Counter(call[0] for _, call in calls) & Counter(next(iter(g)) for g in gold)).values())
    parts = {
        "exact": float(hits == len(gold) == count),
        "f1": 2 * hits / (count + len(gold)),
        "soft_f1": 2 * soft / (count + len(gold)),
        "name_f1": 2 * names / (count + len(gold)),
        "owned": owned_share([agent for agent, _ in calls], pairs, len(gold), len(texts), split),
        "calls": float(count),
        "malformed": float(malformed),
    }
    if profile == "published":
        parts |= published_terms(calls, answers, pairs, len(gold))
    total = sum(weight * parts[name] for name, weight in CONSTANTS[profile].items())
    return max(total, -0.4) if profile == "published" else total, parts


def owned_share(
    callers: Sequence[int], pairs: Sequence[Sequence[tuple[bool, float]]], gold: int, num_agents: int, split: Split
) -> float:
    """odd_even: the share of expected calls that their owner made; free: the smallest share of its even part that
    an agent made rightly (1 if there are fewer calls than agents and one is right)."""

    def made_by(agent: int, columns: Sequence[int]) -> float:
        table = [[float(line[c][0]) for c in columns] for caller, line in zip(callers, pairs) if caller == agent]
        return best_sum(table, len(columns))

    if split == "odd_even":
        return sum(made_by(agent, range(agent, gold, num_agents)) for agent in range(num_agents)) / gold
    even = gold // num_agents
    made = [made_by(agent, range(gold)) for agent in range(num_agents)]
    return min(1.0, sum(made)) if even == 0 else min(min(one / even, 1.0) for one in made)


def published_terms(
    calls: Sequence[tuple[int, Call]],
    answers: Sequence[Answer],
    pairs: Sequence[Sequence[tuple[bool, float]]],
    gold: int,
) -> dict[str, float]:
    """The published sum's other terms, each in [0, 1]; their exact definitions were not published in words."""
    count, agents = len(calls), len(answers)
    made = [len(answer.calls) for answer in answers]
    even = [gold // agents + (agent < gold % agents) for agent in range(agents)]
    different = len({repr(call) for _, call in calls})
    soft = best_sum([[similarity for _, similarity in line] for line in pairs], gold)
    return {
        "parsed": sum(not answer.malformed and bool(answer.calls) for answer in answers) / min(agents, gold)
        if gold < agents
        else sum(not answer.malformed and bool(answer.calls) for answer in answers) / agents,
        "arguments": soft / gold,
        "count": max(0.0, 1 - abs(count - gold) / gold),
        "balance": max(0.0, 1 - sum(abs(a - b) for a, b in zip(made, even)) / gold),
        "overlap": (count - different) / max(count, 1),
        "lazy": sum(not m and bool(e) for m, e in zip(made, even)) / agents,
        "extra": min(max(count - gold, 0) / gold, 1.0),
    }


# --- prompts and answers to compare with ---


def format_prompt(row: Row, agent: int, num_agents: int, split: Split, style: str) -> Prompt:
    if split == "odd_even":
        numbers = ", ".join(str(k) for k in range(agent + 1, agent + 1 + 3 * num_agents, num_agents))
        part = f"Number the calls that the request needs in its own order. Make only the calls {numbers} and so on."
    else:
        part = "Make an even share of the calls that the request needs; together you make each of them once."
    text = (
        f"You are agent {agent + 1} of {num_agents}; you do not see each other's answers. {part}\n"
        "Write one Python call a line with keyword arguments, such as name(city='Oslo', days=2), and nothing else. "
        "If no call is yours, write [].\n"
        f"Functions: {json.dumps(row['functions'], ensure_ascii=False)}\nRequest: {row['prompt']}"
    )
    return [{"role": "user", "content": text}] if style == "chat" else text + "\n"


def reference_texts(row: Row, num_agents: int) -> list[str]:
    texts = [call_text(expected, row["functions"]) for expected in row["ground_truth"]]
    return ["\n".join(texts[agent::num_agents]) or "[]" for agent in range(num_agents)]


def call_text(expected: Mapping[str, Any], functions: Sequence[Mapping[str, Any]]) -> str:
    name, accepted = next(iter(expected.items()))
    required = next(f for f in functions if f["name"] == name)["parameters"].get("required", [])
    chosen = {
        key: next((option for option in options if option != ""), "")
        for key, options in accepted.items()
        if "" not in options or key in required
    }
    return f"{name}({', '.join(f'{key}={written(value)!r}' for key, value in chosen.items())})"


def written(value: Any) -> Any:
    """An accepted value as one writes it: inside a dictionary, each key has a list of accepted values."""
    if isinstance(value, dict):
        picked = {key: options for key, options in value.items() if not isinstance(options, list) or "" not in options}
        return {key: options[0] if isinstance(options, list) else options for key, options in picked.items()}
    return [written(item) for item in value] if isinstance(value, list) else value


def trivial_scores(
    rows: Sequence[Row], score: Callable[[Row, Sequence[str]], Score], num_agents: int
) -> dict[str, float]:
    """Means over ``rows`` of answers without skill."""

    def mean(answers: Callable[[Row], list[str]]) -> float:
        return sum(score(row, answers(row))[0] for row in rows) / len(rows)

    def everything(row: Row) -> list[str]:
        return [reference_texts(row, 1)[0]] * num_agents

    def names_only(row: Row) -> list[str]:
        return [f"{function['name']}()" for function in itertools.islice(itertools.cycle(row["functions"]), num_agents)]

    return {
        "empty answers": mean(lambda row: [""] * num_agents),
        "[] from every agent": mean(lambda row: ["[]"] * num_agents),
        "the request, copied": mean(lambda row: [row["prompt"]] * num_agents),
        "a call without arguments from every agent": mean(names_only),
        "all right calls from agent 0": mean(lambda row: [reference_texts(row, 1)[0]] + ["[]"] * (num_agents - 1)),
        "all right calls from every agent": mean(everything),
    }
