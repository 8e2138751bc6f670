"""Tasks: what a team is asked, and how its joint answer is scored. One file a task.

``load_task("length_ratio", num_agents=2, task_args={"min_chars": 20})`` makes a task of this package;
``load_task("my_task.py:my_task", ...)`` one of the user's. Both are functions ``f(num_agents, ...) -> Task``.
``python -m comlrl.tasks NAME`` shows a task.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from comlrl.config import convert, load_object, nearest

Row = dict[str, Any]
Message = dict[str, str]
Prompt = str | list[Message]  # a string is used verbatim; a message list goes through the chat template
Score = tuple[float, dict[str, float]]

TASKS = {
    "length_ratio": "comlrl.tasks.length_ratio:length_ratio",
    "pairing": "comlrl.tasks.matrix_game:pairing",
    "two_turn": "comlrl.tasks.matrix_game:two_turn",
    "str_build": "comlrl.tasks.building:str_build",
    "house_build": "comlrl.tasks.building:house_build",
    "tool_use": "comlrl.tasks.tool_use:tool_use",
    "programming": "comlrl.tasks.programming:programming",
    "class_completion": "comlrl.tasks.class_completion:class_completion",
    "tldr": "comlrl.tasks.writing:tldr",
    "arxiv": "comlrl.tasks.writing:arxiv",
    "travel": "comlrl.tasks.travel:travel",
}


@dataclass
class Task:
    """Rows, prompts and scores of one task for n agents.

    ``score(row, texts)`` gets one text an agent and returns the total and its named parts. ``transition``
    makes the n prompts of the next turn, as the agents get them, from ``prompt, agent_completions, num_agents,
    prompt_history_per_agent, response_history_per_agent, batch_item``, all given by keyword. Where the score
    depends on the turn, ``row_of_turn(row, prompt)`` returns what ``score`` gets as row when agent 0's prompt
    is ``prompt``.
    """

    name: str
    train_rows: Sequence[Row]
    eval_rows: Sequence[Row]
    formatters: list[Callable[[Row], Prompt]]  # one an agent
    score: Callable[[Row, Sequence[str]], Score]
    maximum: float  # the best total of one joint answer
    transition: Callable[..., list[Prompt]] | None = None
    trivial: dict[str, float] = field(default_factory=dict)  # what answers without any skill score
    reference: Callable[[Row], list[str]] | None = None  # answers that reach the maximum (in the first turn)
    row_of_turn: Callable[[Row, Prompt], Row] | None = None
    parallel: int = 1  # joint answers that are scored at the same time, in threads

    def reward(
        self, *completions: Sequence[str], batch_items: Sequence[Row], prompts: Sequence[Prompt] | None = None
    ) -> list[dict[str, float]]:
        """The reward function of the trainers, for joint answers of one node.

        ``completions[i][k]`` is agent i's text in joint answer k, ``batch_items[k]`` its row and
        ``prompts[0]`` agent 0's prompt of this turn. Returns ``{"reward": total, **parts}`` a joint answer.
        """
        if self.row_of_turn is not None:
            if not prompts:
                raise ValueError(f"task {self.name}: the score depends on the turn, so reward needs prompts")
            batch_items = [self.row_of_turn(row, prompts[0]) for row in batch_items]
        if self.parallel > 1:
            with ThreadPoolExecutor(self.parallel) as pool:
                scores = list(pool.map(self.score, batch_items, zip(*completions)))
        else:
            scores = [self.score(row, texts) for row, texts in zip(batch_items, zip(*completions))]
        return [{"reward": total, **parts} for total, parts in scores]


def load_task(spec: str, num_agents: int, task_args: Mapping[str, Any] | None = None) -> Task:
    """The task ``spec`` (a name of ``TASKS`` or ``file.py:name``) for ``num_agents``, or a ValueError."""
    if spec not in TASKS and ":" not in spec:
        close = nearest(spec, TASKS)
        hint = f"did you mean {close!r}?" if close else f"one of {', '.join(TASKS)}, or file.py:name"
        raise ValueError(f"task={spec!r}: unknown task; {hint}")
    function = load_object(TASKS.get(spec, spec), "task")
    arguments = _checked_arguments(function, dict(task_args or {}), spec)
    task = function(num_agents=num_agents, **arguments)
    if not isinstance(task, Task):
        raise ValueError(f"task={spec!r}: must return a comlrl.tasks.Task, got {type(task).__name__}")
    if len(task.formatters) != num_agents:
        raise ValueError(f"task={spec!r}: {len(task.formatters)} formatters for num_agents={num_agents}")
    if len(task.train_rows) == 0:
        raise ValueError(f"task={spec!r}: train_rows is empty")
    return replace(task, formatters=[partial(first_or_told, formatter=formatter) for formatter in task.formatters])


def first_or_told(row: Row, external_prompts: Prompt | None = None, *, formatter: Callable[[Row], Prompt]) -> Prompt:
    """A task's formatters make the first prompts; those of later turns its transition makes, as they are."""
    return formatter(row) if external_prompts is None else external_prompts


def load_rewards(reward: Any, task: Task) -> tuple[list[Callable], list[float]]:
    """The task's reward, or the user's: `file.py:name`, or a list of {use: file.py:name, weight: 1.0}."""
    if reward is None:
        return [task.reward], [1.0]
    entries = reward if isinstance(reward, list) else [{"use": reward}]
    functions, weights = [], []
    for entry in entries:
        if not isinstance(entry, dict) or "use" not in entry or set(entry) - {"use", "weight"}:
            raise ValueError(
                f"reward: {entry!r} must be a mapping with use: file.py:name (or 'task') and weight: a number"
            )
        functions.append(task.reward if entry["use"] == "task" else load_object(entry["use"], "reward"))
        weights.append(float(entry.get("weight", 1.0)))
    return functions, weights


def _checked_arguments(function: Callable[..., Task], arguments: dict[str, Any], spec: str) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if "num_agents" in arguments:
        raise ValueError("task_args.num_agents: set num_agents of the run instead")
    if "num_agents" not in parameters and not open_ended:
        raise ValueError(f"task={spec!r}: the function needs a parameter num_agents")
    names = [name for name, item in parameters.items() if item.kind is not item.VAR_KEYWORD and name != "num_agents"]
    for key in arguments:
        if key not in names and not open_ended:
            close = nearest(key, names)
            hint = f"did you mean task_args.{close}?" if close else f"{spec} takes {', '.join(names) or 'none'}"
            raise ValueError(f"unknown key task_args.{key}: {hint}")
    for name in names:
        if parameters[name].default is inspect.Parameter.empty and name not in arguments:
            raise ValueError(f"task_args.{name}: {spec} needs a value for it")
    if spec not in TASKS:  # a user's annotations can be anything, also names that exist for type checkers only
        return arguments
    hints = typing.get_type_hints(function)
    return {key: convert(value, hints[key], f"task_args.{key}") for key, value in arguments.items()}
