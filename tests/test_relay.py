"""The relay game: its optimum, what skill-less policies earn, and who knows what."""

from itertools import product

import pytest

from comlrl.tasks import load_task
from comlrl.tasks.matrix_game import SYMBOLS
from comlrl.tasks.relay import relay


def play_all(task, row):
    """(earned without the weather, second prompts) of every play: two first answers and agent 1's second."""
    for first, second, last in product(SYMBOLS, repeat=3):
        prompts = task.transition(prompt=row["prompt"], agent_completions=[first, second], num_agents=2, batch_item=row)
        reward = task.reward(["x"], [last], batch_items=[row], prompts=prompts[:1])[0]
        yield reward["reward"] - row["weather"], prompts


def test_optimum_and_uniform_policy():
    task = relay(copies=2)
    assert len(task.train_rows) == 32
    assert sum(row["weather"] for row in task.eval_rows) == 0
    assert {abs(row["weather"]) for row in task.eval_rows} == {0.0, 3.0}
    for row in task.eval_rows:
        earned = [value for value, _ in play_all(task, row)]
        assert max(earned) == 1.0
        assert sum(earned) / len(earned) == pytest.approx(task.trivial["uniform policy"])
        first = task.reward(["a"], ["b"], batch_items=[row], prompts=[row["prompt"]])[0]
        assert first["reward"] == 0.0  # nothing before the end
    assert task.maximum == 4.0


def test_neither_agent_reads_what_the_other_one_knows():
    """Agent 1's prompts do not depend on the sky or on agent 0's symbol, agent 0's not on the wind."""
    task = relay()
    seen = {}
    for row in task.eval_rows:
        assert [formatter(row) for formatter in task.formatters] == [row["prompt"], row["wind"]]
        for first, second in product(SYMBOLS, repeat=2):
            told = task.transition(prompt="", agent_completions=[first, second], num_agents=2, batch_item=row)
            assert seen.setdefault((row["wind"], second), told[1]) == told[1]
            assert told[0] == f"{row['prompt']}{first}{second}>"


def test_it_is_named_by_its_function_and_is_for_two():
    assert load_task("comlrl.tasks.relay:relay", 2, {"weather": 0.0}).maximum == 1.0
    with pytest.raises(ValueError, match="relay is a game of 2 agents"):
        relay(num_agents=3)
