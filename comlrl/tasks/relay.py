"""A two-turn game in which only the joint history says what an answer is worth.

Answers are symbols as in ``matrix_game``: a text's first character, its code modulo 4. Each row has a *pairing*, two
*best* symbols and a *code* (a permutation of the symbols without fixed points).

- Turn 1: both agents say a symbol. Nothing is earned. The *stake* is 1 if agent 1 said the pairing's partner of agent
  0's symbol and that one is a best one, 0.5 if it only matches, else 0.
- Turn 2: agent 0 reads both symbols and is done. Agent 1 reads only its own symbol, and shall say the code of it. The
  team earns the stake if it does, else 0.

So the reward comes only at the end, and a right answer of agent 1 earns nothing in three of four histories that look
the same to it: a critic of agent 1's own history takes a lost stake for a wrong answer, one of the joint history does
not. The maximum is 1; a uniform policy earns 0.1875 / 4 = 0.047.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import permutations

from comlrl.tasks import Prompt, Row, Score, Task
from comlrl.tasks.matrix_game import SIZE, SYMBOLS, make_rows, read_symbol, score_pairing


def relay(num_agents: int = 2, rows: int = 4, copies: int = 32, seed: int = 0) -> Task:
    """``rows`` different rows, each ``copies`` times in the training rows, so that one rollout can hold many."""
    if num_agents != 2:
        raise ValueError(f"num_agents={num_agents}: relay is a game of 2 agents")
    table = make_rows(2, rows, seed)
    codes = [code for code in permutations(range(SIZE)) if all(a != b for a, b in enumerate(code))]
    random.Random(seed + 1).shuffle(codes)
    for row, code in zip(table, codes):
        row["code"] = list(code)
    return Task(
        name="relay",
        train_rows=table * copies,
        eval_rows=table,
        formatters=[format_row] * 2,
        score=score_relay,
        maximum=1.0,
        transition=tell_first_answers,
        trivial={"uniform policy": 0.75 / SIZE / SIZE},
        row_of_turn=row_of_turn,
    )


def format_row(row: Row) -> Prompt:
    return row["prompt"]


def stake(row: Row, first: Sequence[int]) -> float:
    return score_pairing(row, [SYMBOLS[symbol] for symbol in first])[0]


def score_relay(row: Row, texts: Sequence[str]) -> Score:
    if "first" not in row:
        return 0.0, {}
    said = read_symbol(texts[1])
    right = said is not None and said == row["code"][row["first"][1]]
    return stake(row, row["first"]) * right, {"stake": stake(row, row["first"]), "right": float(right)}


def tell_first_answers(
    prompt: str,
    agent_completions: Sequence[str],
    num_agents: int,
    prompt_history_per_agent: Sequence[Sequence[Prompt]] | None = None,
    response_history_per_agent: Sequence[Sequence[str]] | None = None,
    batch_item: Row | None = None,
) -> list[Prompt]:
    """``2>ab>`` for agent 0 (both symbols), ``2>b>`` for agent 1 (its own); an empty answer counts as the symbol d."""
    start = batch_item["prompt"] if batch_item else prompt
    first = [SYMBOLS[read_symbol(text) or 0] for text in agent_completions]
    return [f"{start}{first[0]}{first[1]}>", f"{start}{first[1]}>"]


def row_of_turn(row: Row, prompt: Prompt) -> Row:
    """The row, in the second turn with both first answers, as agent 0's prompt tells them."""
    if prompt == row["prompt"]:
        return row
    told = prompt[len(row["prompt"]) : -1]
    return row | {"first": [SYMBOLS.index(symbol) for symbol in told]}
