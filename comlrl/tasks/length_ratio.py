"""Length ratio: each agent's answer shall be two to three times as long as the answer of the agent before it.

The smallest task in which agents must agree: nobody is told the rule, and the reward of a length depends on
what the others write. The total is the mean over neighbours of 1 if ``len(next) / len(previous)`` is in
[low, high], else exp(-distance to that interval); its maximum is 1. Lengths are characters. Without
``min_chars`` the cheapest joint answer ("a", "aa") is already perfect, so a run that shall keep real text
sets it (20, for example).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Literal

from comlrl.tasks import Message, Prompt, Row, Score, Task

# Every fourth one is kept for evaluation.
PROMPTS = [
    "Describe a city in the clouds.",
    "Invent a new holiday.",
    "Tell a dragon's bedtime story.",
    "Design a playground on Mars.",
    "Describe the last bookshop on Earth.",
    "Introduce a lighthouse keeper who fears the sea.",
    "Explain why cats would make good spies.",
    "Describe a market that opens only at midnight.",
    "Invent a sport for astronauts.",
    "Write a postcard from the bottom of the ocean.",
    "Describe a train that never stops.",
    "Introduce a robot that collects old umbrellas.",
    "Explain rain to someone from the desert.",
    "Invent a dessert for a king who hates sugar.",
    "Describe a garden where music grows.",
    "Write a note from a ghost to its landlord.",
    "Describe the first school on the Moon.",
    "Introduce a detective who is also a baker.",
    "Invent an instrument made of ice.",
    "Explain how a river got its name.",
    "Describe a museum of forgotten sounds.",
    "Write a weather report for a volcano.",
    "Introduce a whale that dreams of flying.",
    "Describe a village built on a giant turtle.",
    "Invent a tool for painting sunsets.",
    "Write a letter to a lost left sock.",
    "Describe a library without any books.",
    "Introduce a clockmaker who sells spare hours.",
    "Explain why the tower leans to the north.",
    "Describe a bridge between two winters.",
    "Invent a breakfast for time travellers.",
    "Write a speech for a retiring scarecrow.",
]
# Of agent 0, 1, ...; further agents share the last. Short: every token is paid for in each sample.
ROLES = ["Answer in a few words.", "Answer in a couple of sentences.", "Answer in a long paragraph."]


def length_ratio(
    num_agents: int = 2,
    min_chars: int = 0,
    low: float = 2.0,
    high: float = 3.0,
    style: Literal["chat", "plain"] = "chat",
) -> Task:
    """The task. An answer of fewer than ``min_chars`` characters (stripped) makes its comparisons score 0.

    ``style`` chat: message lists with a line of system text for each role; plain: the row's text as it is.
    """
    if num_agents < 2:
        raise ValueError(f"num_agents={num_agents}: length_ratio compares agents, so it needs at least 2")
    if not 0 < low <= high:
        raise ValueError(f"task_args.low={low}, task_args.high={high}: must be 0 < low <= high")
    if min_chars < 0:
        raise ValueError(f"task_args.min_chars={min_chars}: must not be negative")
    if style not in ("chat", "plain"):
        raise ValueError(f"task_args.style={style!r}: must be chat or plain")
    score = partial(score_lengths, min_chars=min_chars, low=low, high=high)
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    filler = _lengths(num_agents, max(min_chars, 1), (low + high) / 2)
    return Task(
        name="length_ratio",
        train_rows=[row for i, row in enumerate(rows) if i % 4 != 3],
        eval_rows=[row for i, row in enumerate(rows) if i % 4 == 3],
        formatters=[partial(format_chat, agent=i) if style == "chat" else format_plain for i in range(num_agents)],
        score=score,
        maximum=1.0,
        transition=feedback_chat if style == "chat" else feedback_plain,
        trivial={
            "empty answers": score({}, [""] * num_agents)[0],
            "the same text from every agent": score({}, ["x" * max(min_chars, 1)] * num_agents)[0],
            "one letter, repeated in the right ratio": score({}, ["x" * length for length in filler])[0],
        },
        reference=partial(reference_texts, num_agents=num_agents, min_chars=min_chars, factor=(low + high) / 2),
    )


def score_lengths(row: Row, texts: Sequence[str], min_chars: int, low: float, high: float) -> Score:
    lengths = [len(text) for text in texts]
    long_enough = [len(text.strip()) >= min_chars for text in texts]
    ratios = [after / max(before, 1) for before, after in pairwise(lengths)]
    gaps = [max(low - ratio, ratio - high, 0.0) for ratio in ratios]
    both_long = [before and after for before, after in pairwise(long_enough)]
    total = _mean([math.exp(-gap) if enough else 0.0 for gap, enough in zip(gaps, both_long)])
    parts = {
        "ratio": _mean(ratios),
        "in_range": _mean([gap == 0.0 for gap in gaps]),
        "long_enough": _mean(long_enough),
        "first_chars": float(lengths[0]),
        "second_chars": float(lengths[1]),
    }
    return total, parts | {f"agent_{i}_chars": float(length) for i, length in enumerate(lengths) if i > 1}


def format_plain(row: Row) -> str:
    return row["prompt"]


def format_chat(row: Row, agent: int) -> list[Message]:
    return [
        {"role": "system", "content": ROLES[min(agent, len(ROLES) - 1)]},
        {"role": "user", "content": row["prompt"]},
    ]


def feedback_plain(
    prompt: str,
    agent_completions: Sequence[str],
    num_agents: int,
    prompt_history_per_agent: Sequence[Sequence[Prompt]] | None = None,
    response_history_per_agent: Sequence[Sequence[str]] | None = None,
    batch_item: Row | None = None,
) -> list[Prompt]:
    """The row's text, then how many characters each agent wrote."""
    text = batch_item["prompt"] if batch_item else prompt
    return [f"{text}\n{_counts(agent_completions, agent)}\n" for agent in range(num_agents)]


def feedback_chat(
    prompt: str,
    agent_completions: Sequence[str],
    num_agents: int,
    prompt_history_per_agent: Sequence[Sequence[Prompt]] | None = None,
    response_history_per_agent: Sequence[Sequence[str]] | None = None,
    batch_item: Row | None = None,
) -> list[Prompt]:
    """Each agent's own conversation so far, then how many characters each agent wrote in the last turn."""
    row = batch_item or {"prompt": prompt}
    responses = response_history_per_agent or [[text] for text in agent_completions]
    prompts: list[Prompt] = []
    for agent in range(num_agents):
        messages = format_chat(row, agent)
        for turn, text in enumerate(responses[agent]):
            counts = _counts([history[turn] for history in responses], agent)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": counts}]
        prompts.append(messages)
    return prompts


def reference_texts(row: Row, num_agents: int, min_chars: int, factor: float) -> list[str]:
    sentence = f"{row['prompt'].rstrip('.')}: once, far away, it was so. "
    lengths = _lengths(num_agents, max(min_chars, 40), factor)
    # A cut may end with a space, which does not count as text.
    return [(sentence * (length // len(sentence) + 1))[: length - 1].rstrip().ljust(length, ".") for length in lengths]


def _counts(texts: Sequence[str], agent: int) -> str:
    own = len(texts[agent])
    others = " and ".join(str(len(text)) for i, text in enumerate(texts) if i != agent)
    return f"You wrote {own} characters, the others {others}. Answer again."


def _lengths(num_agents: int, first: int, factor: float) -> list[int]:
    """Whole lengths, each ``factor`` times the one before."""
    lengths = [first]
    for _ in range(num_agents - 1):
        lengths.append(round(lengths[-1] * factor))
    return lengths


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
