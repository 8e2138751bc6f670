"""A two-turn game in which only the joint history says what an answer is worth.

Answers are symbols as in ``matrix_game``: a text's first character, its code modulo 4. The game has a *pairing*, two
*best* symbols and a *code* (a permutation of the symbols without fixed points). Each row is one day: agent 0 reads the
sky (a digit from 0 to 3), agent 1 the wind (another one), and neither reads the other's.

- Turn 1: both agents say a symbol. Nothing is earned. The *stake* is 1 if agent 1 said the pairing's partner of agent
  0's symbol and that one is a best one, 0.5 if it only matches, else 0.
- Turn 2: agent 0 reads both symbols and is done. Agent 1 reads only its own symbol, and shall say the code of it. The
  team earns the stake if it does, else 0, and the *weather* on top: +-1.5 for the sky and +-1.5 for the wind.

Nobody acts on the weather and its mean over the rows is 0, but it is far larger than what can be earned. A critic of
one agent's history knows one half of it, a critic of the joint history both. The mean reward over all rows is 1 at
most; a uniform policy earns 0.1875 / 4 = 0.047.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from itertools import product

from comlrl.tasks import Prompt, Row, Score, Task
from comlrl.tasks.matrix_game import SIZE, SYMBOLS, make_rows, read_symbol, score_pairing


def relay(num_agents: int = 2, copies: int = 8, weather: float = 1.5, seed: int = 0) -> Task:
    """All 16 days, each ``copies`` times in the training rows, so that one rollout can hold many of them."""
    if num_agents != 2:
        raise ValueError(f"num_agents={num_agents}: relay is a game of 2 agents")
    game, code = make_rows(2, 2, seed)  # two pairings: the second one is the code
    signs = [[-weather, -weather, weather, weather] for _ in range(2)]
    for part, each in enumerate(signs):
        random.Random(seed + part).shuffle(each)
    table = [
        {
            "prompt": f"{sky}>",
            "wind": f"{wind}>",
            "pairing": game["pairing"],
            "best": game["best"],
            "code": code["pairing"],
            "weather": signs[0][sky] + signs[1][wind],
        }
        for sky, wind in product(range(SIZE), repeat=2)
    ]
    return Task(
        name="relay",
        train_rows=table * copies,
        eval_rows=table,
        formatters=[partial(format_row, key="prompt"), partial(format_row, key="wind")],
        score=score_relay,
        maximum=1.0 + 2 * weather,
        transition=tell_first_answers,
        trivial={"uniform policy": 0.75 / SIZE / SIZE},
        row_of_turn=row_of_turn,
    )


def format_row(row: Row, key: str) -> Prompt:
    return row[key]


def stake(row: Row, first: Sequence[int]) -> float:
    return score_pairing(row, [SYMBOLS[symbol] for symbol in first])[0]


def score_relay(row: Row, texts: Sequence[str]) -> Score:
    if "first" not in row:
        return 0.0, {}
    said = read_symbol(texts[1])
    right = said is not None and said == row["code"][row["first"][1]]
    earned = stake(row, row["first"]) * right
    return earned + row["weather"], {"earned": earned, "stake": stake(row, row["first"]), "right": float(right)}


def tell_first_answers(
    prompt: str,
    agent_completions: Sequence[str],
    num_agents: int,
    prompt_history_per_agent: Sequence[Sequence[Prompt]] | None = None,
    response_history_per_agent: Sequence[Sequence[str]] | None = None,
    batch_item: Row | None = None,
) -> list[Prompt]:
    """``2>ab>`` for agent 0 (both symbols), ``0>b>`` for agent 1 (its own); an empty answer counts as the symbol d."""
    assert batch_item is not None
    first = [SYMBOLS[read_symbol(text) or 0] for text in agent_completions]
    return [f"{batch_item['prompt']}{first[0]}{first[1]}>", f"{batch_item['wind']}{first[1]}>"]


def row_of_turn(row: Row, prompt: Prompt) -> Row:
    """The row, in the second turn with both first answers, as agent 0's prompt tells them."""
    if prompt == row["prompt"]:
        return row
    told = str(prompt)[len(row["prompt"]) : -1]
    return row | {"first": [SYMBOLS.index(symbol) for symbol in told]}
