"""Cooperative games for tiny byte-level models: answers of one letter, learned in seconds.

Every answer is read as one of four symbols, its first character's code modulo 4, so a byte-level model is
understood from its first random answer on. Each row hides a pairing (a permutation of the symbols, none of
which is its own partner) and two *best* symbols. Agent i+1 shall answer the partner of agent i's symbol: the
total is 1 if all neighbours match and agent 0 said a best symbol, 0.5 if all match otherwise, else 0. So
there are four equilibria, two of them best, and agents have to settle on the same one without seeing each
other's answer. (If all paid the same, a uniform policy would have no gradient; the best symbols let agent 0
begin.)

A uniform policy of two agents scores 0.1875: a match has probability 1/4 and is worth 0.75 on average. An
untrained model is near that, not at it: it may end at once (0), and a byte that is no text is read as the
symbol a. The maximum is 1. ``two_turn`` plays again, where the pairing is shifted by what agent 0 said in the
first turn, which everybody is told; its maximum is 1 a turn. The rows are the whole game, so evaluation uses
the training rows.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import pairwise, permutations

from comlrl.tasks import Prompt, Row, Score, Task

SYMBOLS = "dabc"  # SYMBOLS[ord(character) % 4] is the character itself
SIZE = len(SYMBOLS)


def pairing(num_agents: int = 2, rows: int = 4, seed: int = 0) -> Task:
    """One turn: find each row's pairing. ``seed`` draws the pairings and the best symbols."""
    table = make_rows(num_agents, rows, seed)
    return Task(
        name="pairing",
        train_rows=table,
        eval_rows=table,
        formatters=[format_row] * num_agents,
        score=score_pairing,
        maximum=1.0,
        trivial=trivial_scores(table, num_agents),
        reference=partial(reference_answers, num_agents=num_agents),
    )


def two_turn(num_agents: int = 2, rows: int = 4, seed: int = 0) -> Task:
    """Two turns: the second turn's pairing depends on agent 0's first answer, which its prompt shows."""
    task = pairing(num_agents, rows, seed)
    task.name, task.transition, task.row_of_turn = "two_turn", tell_first_answer, row_of_turn
    return task


def make_rows(num_agents: int, rows: int, seed: int) -> list[Row]:
    if num_agents < 2:
        raise ValueError(f"num_agents={num_agents}: a pairing needs at least 2 agents")
    if not 1 <= rows <= 10:
        raise ValueError(f"task_args.rows={rows}: must be from 1 to 10, a row is asked for by its digit")
    generator = random.Random(seed)
    # No fixed points: agents that all say the same never match. Best symbols alternate between two halves, so
    # that agents must read the prompt.
    pairings = [p for p in permutations(range(SIZE)) if all(symbol != other for symbol, other in enumerate(p))]
    generator.shuffle(pairings)
    order = generator.sample(range(SIZE), SIZE)
    return [
        {
            "prompt": f"{i}>",
            "pairing": list(pairings[i % len(pairings)]),
            "best": order[:2] if i % 2 == 0 else order[2:],
        }
        for i in range(rows)
    ]


def read_symbol(text: str) -> int | None:
    """The number of the symbol that a text begins with; None for an empty text."""
    return ord(text[0]) % SIZE if text else None


def score_pairing(row: Row, texts: Sequence[str]) -> Score:
    symbols = [read_symbol(text) for text in texts]
    said = [symbol for symbol in symbols if symbol is not None]
    if len(said) < len(texts):
        return 0.0, {"match": 0.0, "best": 0.0, "valid": 0.0}
    match = all(after == partner(row, before) for before, after in pairwise(said))
    best = said[0] in row["best"]
    total = (1.0 if best else 0.5) if match else 0.0
    return total, {"match": float(match), "best": float(best), "valid": 1.0}


def partner(row: Row, symbol: int) -> int:
    """The symbol that the next agent shall answer, shifted in a later turn by agent 0's answer before."""
    return (row["pairing"][symbol] + row.get("answer_before", 0)) % SIZE


def format_row(row: Row) -> Prompt:
    return row["prompt"]


def tell_first_answer(
    prompt: str,
    agent_completions: Sequence[str],
    num_agents: int,
    prompt_history_per_agent: Sequence[Sequence[Prompt]] | None = None,
    response_history_per_agent: Sequence[Sequence[str]] | None = None,
    batch_item: Row | None = None,
) -> list[Prompt]:
    """The row's prompt and agent 0's symbol, such as ``2>a>``; an empty answer counts as the symbol d."""
    start = batch_item["prompt"] if batch_item else prompt
    return [f"{start}{SYMBOLS[read_symbol(agent_completions[0]) or 0]}>"] * num_agents


def row_of_turn(row: Row, prompt: Prompt) -> Row:
    """The row, in a later turn with agent 0's answer before, as the prompt tells it."""
    if prompt == row["prompt"]:
        return row
    for answer, symbol in enumerate(SYMBOLS):
        if prompt == f"{row['prompt']}{symbol}>":
            return row | {"answer_before": answer}
    raise ValueError(f"two_turn: the prompt {prompt!r} belongs to no turn of the row {row['prompt']!r}")


def reference_answers(row: Row, num_agents: int) -> list[str]:
    return chain(row, row["best"][0], num_agents)


def chain(row: Row, symbol: int, num_agents: int) -> list[str]:
    """The joint answer that matches and begins with ``symbol``."""
    symbols = [symbol]
    for _ in range(num_agents - 1):
        symbols.append(partner(row, symbols[-1]))
    return [SYMBOLS[symbol] for symbol in symbols]


def trivial_scores(table: Sequence[Row], num_agents: int) -> dict[str, float]:
    """Scores of policies without skill, in the first turn."""

    def mean_score(texts: Sequence[str]) -> float:
        return sum(score_pairing(row, texts)[0] for row in table) / len(table)

    # An answer that scores in no row cannot be the best one, so trying every row's matches is enough.
    matches = [chain(row, symbol, num_agents) for row in table for symbol in range(SIZE)]
    return {
        "uniform policy": 0.75 / SIZE ** (num_agents - 1),
        "the best joint answer that ignores the prompt": max(mean_score(texts) for texts in matches),
        "the same letter from every agent": mean_score(["a"] * num_agents),
        "empty answers": mean_score([""] * num_agents),
    }
