"""Show a task: ``python -m comlrl.tasks NAME [key=value ...] [--show 3] [--num-agents 2]``.

Prints prompts, a reference answer with its score, the prompts that follow it, and what trivial answers score.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from comlrl.config import exit_on_value_error, read_settings
from comlrl.tasks import TASKS, Prompt, Row, Task, load_task


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m comlrl.tasks", description=__doc__.partition("\n")[0])
    parser.add_argument("name", help=f"{', '.join(TASKS)}, or file.py:name")
    parser.add_argument("task_args", nargs="*", metavar="key=value", help="arguments of the task")
    parser.add_argument("--show", type=int, default=3, metavar="N", help="training rows to show (default 3)")
    parser.add_argument("--num-agents", type=int, default=2, metavar="N", help="default 2")
    command = parser.parse_intermixed_args(argv)
    with exit_on_value_error():
        task = load_task(command.name, command.num_agents, read_settings(None, command.task_args))
    print(f"{task.name}: {len(task.train_rows)} training rows, {len(task.eval_rows)} evaluation rows")
    print(f"maximum of a joint answer: {task.maximum:g}")
    for name, score in task.trivial.items():
        print(f"  {name}: {score:.4g}")
    for row in task.train_rows[: command.show]:
        show_row(task, row)


def show_row(task: Task, row: Row) -> None:
    prompts = [formatter(row) for formatter in task.formatters]
    print()
    for agent, prompt in enumerate(prompts):
        print(f"agent {agent} is asked    {prompt_text(prompt)}")
    if task.reference is None:
        return
    texts = task.reference(row)
    for agent, text in enumerate(texts):
        print(f"agent {agent} may answer  {text!r}")
    rewards = task.reward(*[[text] for text in texts], batch_items=[row], prompts=prompts[:1])
    print("score  " + ", ".join(f"{name} {value:.4g}" for name, value in rewards[0].items()))
    if task.transition is None:
        return
    following = task.transition(
        prompt=row["prompt"],
        agent_completions=texts,
        num_agents=len(texts),
        prompt_history_per_agent=[[prompt] for prompt in prompts],
        response_history_per_agent=[[text] for text in texts],
        batch_item=row,
    )
    for agent, prompt in enumerate(following):
        print(f"agent {agent} is then asked  {prompt_text(prompt)}")


def prompt_text(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return repr(prompt)
    return " | ".join(f"{message['role']}: {message['content']}" for message in prompt)


if __name__ == "__main__":
    main()
