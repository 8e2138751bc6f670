"""Writing: two agents write two texts about one source, without seeing each other's. ``tldr`` and ``arxiv``.

tldr: a brief summary and a detailed one of a post. arxiv: background and motivation, then method and implications, of
an abstract. Four levels, at most 3 points: both lengths (0.5), how much longer text 2 is (1), how many more distinct
words it has (0.5), style (1): transitions, and words that both texts share. A level whose value is 0 ends the
count, so later ones give nothing.

Profile ``published`` uses the published intervals and weights; its maximum is 2.98, with phrases of all twelve kinds.
The phrase and stopword lists are this package's own, and phrases are found as whole words in both profiles, so levels
1 to 3 compare with published numbers and level 4 does nearly. Profile ``sound`` asks for four kinds of transitions only
and multiplies the points by ``source``, the smaller one of the two texts' ``source_factor``: words from the source, but
not copied passages, not the same words again and again, and not a list of content words; and by ``distinct``, which
falls to 0 as the two texts become the same. Maximum 3. No count of words can tell sense from nonsense: sentences made
of the source's words by a template reach the maximum (``reference``), so read the texts.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

from comlrl.tasks import Prompt, Row, Score, Task
from comlrl.tasks.sources import load_rows
from comlrl.tasks.writing_rows import ABSTRACTS, POSTS, STOPWORDS, TRANSITIONS

Profile = Literal["sound", "published"]
MAX_CHARS = 8_000  # more than the longest allowed text needs; longer ones fail the first level unread


@dataclass(frozen=True)
class Ramp:
    """1 between ``low`` and ``high``, falling to 0 at ``zero_low`` and ``zero_high``."""

    zero_low: float
    low: float
    high: float
    zero_high: float

    def __call__(self, value: float) -> float:
        if value < self.low:
            return max(0.0, (value - self.zero_low) / (self.low - self.zero_low))
        if value > self.high:
            return max(0.0, (self.zero_high - value) / (self.zero_high - self.high))
        return 1.0


@dataclass(frozen=True)
class Levels:
    """``words``: allowed number in each text. ``jaccard``: share of common words that is enough.
    ``first_too``: transitions are looked for in text 1 as well."""

    words: tuple[int, int]
    length_ratio: Ramp
    unique_ratio: Ramp
    jaccard: float
    first_too: bool


LEVELS = {
    "tldr": Levels((8, 256), Ramp(1.1, 1.6, 3.2, 5.0), Ramp(1.3, 2.0, float("inf"), float("inf")), 0.03, False),
    "arxiv": Levels((128, 256), Ramp(0.8, 1.3, 1.6, 2.0), Ramp(0.5, 0.7, 1.3, 1.7), 0.23, True),
}
WEIGHTS = {"length": 0.5, "ratio": 1.0, "unique": 0.5, "transitions": 0.4, "common": 0.6}
# Transitions: first kind, each further one, and the kinds after which no more is earned.
KINDS = {"published": (0.4, 0.05, 12), "sound": (0.25, 0.25, 4)}
MAXIMUM = {"published": 2.98, "sound": 3.0}
# source_factor of the profile sound: each rises from 0 to 1 on the interval given.
GROUNDED = (0.1, 0.5)  # share of a text's distinct content words that stand in the source
FRESH = (0.0, 0.5)  # share of a text's runs of eight words that are not in the source
VARIED = (0.1, 0.25)  # distinct words among all words
LINKED = (0.05, 0.2)  # stopwords among all words
DISTINCT = (0.0, 0.5)  # 1 - Jaccard of the two texts' content words
RUN = 8

ROLES = {
    "tldr": [
        "Write a brief summary of the post below: its main facts in one to three sentences.",
        "Write a detailed summary of the post below, two to three times as long as a brief one, with more different "
        "words and with transitions between the sentences. Somebody else writes the brief one.",
    ],
    "arxiv": [
        "Write one paragraph of at least 130 words on the background and motivation of the paper below, and nothing "
        "on its method. Somebody else writes on that.",
        "Write one paragraph of at least 170 words on the method and the implications of the paper below, and nothing "
        "on its background. Somebody else writes on that.",
    ],
}
HUB = {"tldr": ("trl-lib/tldr", "train", "test"), "arxiv": ("OpenMLRL/arXiv_abstract", "train", "val")}
FIELD = {"tldr": "prompt", "arxiv": "abstract_text"}


def tldr(
    num_agents: int = 2,
    dataset: str = "builtin",
    eval_dataset: str | None = None,
    train_rows: int | None = 1000,
    eval_rows: int | None = 1000,
    profile: Profile = "sound",
    style: Literal["chat", "plain"] = "chat",
) -> Task:
    """``dataset``: builtin (a few short posts), hub (trl-lib/tldr), another hub id, or a local file with ``prompt``."""
    return writing("tldr", num_agents, dataset, eval_dataset, train_rows, eval_rows, profile, style)


def arxiv(
    num_agents: int = 2,
    dataset: str = "builtin",
    eval_dataset: str | None = None,
    train_rows: int | None = 1000,
    eval_rows: int | None = 1000,
    profile: Profile = "sound",
    style: Literal["chat", "plain"] = "chat",
) -> Task:
    """``dataset``: builtin (a few abstracts), hub (OpenMLRL/arXiv_abstract), another hub id, or a local file with
    ``abstract_text``."""
    return writing("arxiv", num_agents, dataset, eval_dataset, train_rows, eval_rows, profile, style)


def writing(
    name: str,
    num_agents: int,
    dataset: str,
    eval_dataset: str | None,
    train_rows: int | None,
    eval_rows: int | None,
    profile: Profile,
    style: str,
) -> Task:
    if num_agents != 2:
        raise ValueError(f"num_agents={num_agents}: {name} is written by 2 agents")
    if profile not in KINDS:
        raise ValueError(f"task_args.profile={profile!r}: must be sound or published")
    for key, count in (("train_rows", train_rows), ("eval_rows", eval_rows)):
        if count is not None and count < (1 if key == "train_rows" else 0):
            raise ValueError(f"task_args.{key}={count}: must be positive, or null for all")
    train, evaluation = _splits(name, dataset, eval_dataset)
    score = partial(score_texts, kind=name, profile=profile)
    train, evaluation = train[:train_rows], evaluation[:eval_rows]
    return Task(
        name=name,
        train_rows=train,
        eval_rows=evaluation,
        formatters=[partial(format_prompt, kind=name, agent=agent, style=style) for agent in range(2)],
        score=score,
        maximum=MAXIMUM[profile],
        trivial=trivial_scores(train[:8], name, profile),
        reference=partial(reference_texts, kind=name, profile=profile),
    )


def _splits(name: str, dataset: str, eval_dataset: str | None) -> tuple[list[Row], list[Row]]:
    """Training and evaluation rows, each with its source under ``prompt``. A single file: every fifth row evaluates."""
    field, (hub, train_split, eval_split) = FIELD[name], HUB[name]
    if dataset == "builtin":
        rows = [{field: text} for text in (POSTS if name == "tldr" else ABSTRACTS)]
        parts = [[row for i, row in enumerate(rows) if (i % 4 == 3) is last] for last in (False, True)]
    elif dataset == "hub" or (eval_dataset is None and "." not in dataset and dataset.count("/") == 1):
        source = hub if dataset == "hub" else dataset
        parts = [load_rows(source, [field], split) for split in (train_split, eval_split)]
    else:
        rows = load_rows(dataset, [field], train_split)
        if eval_dataset is None:
            parts = [[row for i, row in enumerate(rows) if (i % 5 == 4) is last] for last in (False, True)]
        else:
            parts = [rows, load_rows(eval_dataset, [field], eval_split, key="eval_dataset")]
    train, evaluation = ([{**row, "prompt": row[field]} for row in part] for part in parts)
    return train, evaluation


def format_prompt(row: Row, kind: str, agent: int, style: str) -> Prompt:
    text = f"{ROLES[kind][agent]}\n\n{row['prompt']}"
    return [{"role": "user", "content": text}] if style == "chat" else f"{text}\n\n"


# --- scores ---


def score_texts(row: Row, texts: Sequence[str], kind: str, profile: Profile) -> Score:
    levels, (first, second) = LEVELS[kind], [text[: MAX_CHARS + 1] for text in texts]
    counts = [len(text.split()) for text in (first, second)]
    unique = [len(set(words_of(text))) for text in (first, second)]
    contents = [content_words(text) for text in (first, second)]
    kinds = transition_kinds(f"{first}\n{second}" if levels.first_too else second)
    common = jaccard(*contents)
    start, step, most = KINDS[profile]
    low, high = levels.words
    fits = all(low <= count <= high and len(text) <= MAX_CHARS for count, text in zip(counts, (first, second)))
    values = {
        "length": float(fits),
        "ratio": levels.length_ratio(len(second) / max(len(first), 1)),
        "unique": levels.unique_ratio(unique[1] / max(unique[0], 1)),
        "transitions": min(1.0, start + step * (min(kinds, most) - 1)) if kinds else 0.0,
        "common": min(common / levels.jaccard, 1.0),
    }
    points = 0.0
    for level in (["length"], ["ratio"], ["unique"], ["transitions", "common"]):
        value = sum(WEIGHTS[name] * values[name] for name in level)
        if value == 0:
            break
        points += value
    source = min(source_factor(text, row["prompt"]) for text in (first, second))
    distinct = rise(1.0 - common, DISTINCT) if any(contents) else 0.0
    total = points * source * distinct if profile == "sound" else points
    parts = values | {"points": points, "source": source, "distinct": distinct, "transition_kinds": float(kinds)}
    return total, parts | {f"words_{i}": float(count) for i, count in enumerate(counts)}


def words_of(text: str) -> list[str]:
    """Lower-case words; compatibility forms (wide letters, ligatures) are folded and invisible characters dropped."""
    folded = unicodedata.normalize("NFKC", text).lower()
    return re.findall(r"\w+", "".join(c for c in folded if unicodedata.category(c) != "Cf"))


def content_words(text: str) -> set[str]:
    return set(words_of(text)) - STOPWORDS


def jaccard(first: set[str], second: set[str]) -> float:
    """Two empty sets are the same, as published."""
    return len(first & second) / len(first | second) if first | second else 1.0


@lru_cache(maxsize=1)
def _patterns() -> list[re.Pattern[str]]:
    return [re.compile(rf"\b(?:{'|'.join(map(re.escape, phrases))})\b") for phrases in TRANSITIONS.values()]


def transition_kinds(text: str) -> int:
    """How many of the twelve kinds of transition phrases occur, as whole words."""
    spaced = " ".join(text.lower().split())
    return sum(pattern.search(spaced) is not None for pattern in _patterns())


def rise(value: float, interval: tuple[float, float]) -> float:
    low, high = interval
    return min(max((value - low) / (high - low), 0.0), 1.0)


def source_factor(text: str, source: str) -> float:
    """From 0 to 1: grounded * fresh * varied * linked, see the constants."""
    words, content = words_of(text), content_words(text)
    if not content:
        return 0.0
    known, runs = _source_words(source)
    own = [tuple(words[i : i + RUN]) for i in range(max(len(words) - RUN + 1, 1))]
    grounded = rise(len(content & known) / len(content), GROUNDED)
    fresh = rise(sum(run not in runs for run in own) / len(own), FRESH)
    varied = rise(len(set(words)) / len(words), VARIED)
    linked = rise(sum(word in STOPWORDS for word in words) / len(words), LINKED)
    return grounded * fresh * varied * linked


@lru_cache(maxsize=256)
def _source_words(source: str) -> tuple[frozenset[str], frozenset[tuple[str, ...]]]:
    words = words_of(source)
    runs = {tuple(words[i : i + RUN]) for i in range(max(len(words) - RUN + 1, 1))}
    return frozenset(set(words) - STOPWORDS), frozenset(runs)


# --- answers to compare with ---

PLAIN = [
    "This is about {0} and the {1}.",
    "There was {0}, and then the {1}.",
    "It has to do with {0} or with the {1}.",
]
# One sentence for each kind of transition; words in braces come from the source.
LINKING = [
    "In addition, there is {0} and the {1}.",
    "For example, there is {0} with the {1}.",
    "In other words, it was {0} and the {1}.",
    "Therefore there was {0} in the {1}.",
    "However, it was not {0} but the {1}.",
    "Finally, there was {0} and its {1}.",
    "Indeed, it was about {0} and the {1}.",
    "In summary, it was {0} for the {1}.",
    "Similarly, there is {0} with its {1}.",
    "Although there was {0}, there was the {1}.",
    "Unless it is {0}, it is the {1}.",
    "Meanwhile there was {0} and a {1}.",
]


def reference_texts(row: Row, kind: str, profile: Profile) -> list[str]:
    """Sentences from templates around the source's words: the best of a small search, the maximum as a rule."""
    words = list(dict.fromkeys(w for w in words_of(row["prompt"]) if w not in STOPWORDS and len(w) > 2)) or ["nothing"]
    low, best, result = LEVELS[kind].words[0], -1.0, ["", ""]
    pools = [words[20:44] or words, words[:30], words[:12], words]
    for number, factor, pool in itertools.product(range(1, 24), (1.3, 1.2, 1.15, 1.5, 2.2, 2.6), pools):
        first = template_text(words, number, PLAIN)
        if len(first.split()) < low:
            continue
        second = template_text(pool, max(round(number * factor), 12), LINKING)
        total, _ = score_texts(row, [first, second], kind, profile)
        if total > best + 1e-9:
            best, result = total, [first, second]
        if best > MAXIMUM[profile] - 1e-9:
            break
    return result


def template_text(words: Sequence[str], sentences: int, patterns: Sequence[str]) -> str:
    picked = itertools.cycle(words)
    return " ".join(patterns[i % len(patterns)].format(next(picked), next(picked)) for i in range(sentences))


def trivial_scores(rows: Sequence[Row], kind: str, profile: Profile) -> dict[str, float]:
    """Means over ``rows`` of answers without skill."""
    low, _ = LEVELS[kind].words
    short, phrases = max(low, 20), " ".join(group[0] for group in TRANSITIONS.values())

    def invented(count: int, start: int) -> str:
        return " ".join(f"the zq{start + i}x" for i in range(count // 2))

    def copy(row: Row, count: int) -> str:
        return " ".join(itertools.islice(itertools.cycle(row["prompt"].split()), count))

    long = round(short * (2.3 if kind == "tldr" else 1.45))
    answers = {
        "empty answers": lambda row: ["", ""],
        "the source, copied by both": lambda row: [row["prompt"]] * 2,
        "the source, copied to fitting lengths": lambda row: [copy(row, short), copy(row, long)],
        "one word, repeated to fitting lengths": lambda row: ["word " * short, "word " * long],
        "invented words and transitions": lambda row: [
            invented(short, 0),
            invented(long - 20 if kind == "tldr" else long - 4, short // 4) + " " + phrases,
        ],
        "the same text from both": lambda row: [reference_texts(row, kind, profile)[1]] * 2,
    }
    return {
        name: sum(score_texts(row, make(row), kind, profile)[0] for row in rows) / len(rows)
        for name, make in answers.items()
    }
