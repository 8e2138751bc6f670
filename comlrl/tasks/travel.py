"""Travel: two planners fill different slots of one plan, in the form of TravelPlanner, in a small generated world.

Agent 0 (logistics) fills current_city, transportation and accommodation of each day, agent 1 (experience) breakfast,
attraction, lunch and dinner. An answer is one JSON object ``{"agent_id": 0, "items": [{"day": 1, "field":
"transportation", "value": "Flight F12"}, ...]}``. The merge is deterministic: an item of another role's slot is
dropped, a slot that is named twice stays empty. Answers that are longer than ``MAX_CHARS``, nested deeply, or hold
NaN, infinity or a key twice are invalid as a whole. Prices come from the row's lists, never from an answer.

``evaluate_plan`` is the evaluator: it knows the row and the merged plan and nothing of the reward. It gives
delivery, the share of commonsense and of hard constraints that hold, and plan success (all of them). A constraint
holds only if the slots it is about are filled from the lists, so an empty plan meets none.

Profile ``sound``: ``0.3 * B + 0.2 * commonsense + 0.2 * hard + 0.3 * success``, times 0.9 for each agent with an
invalid answer or dropped items; B = 0.2 mean + 0.8 min over the roles of the share of slots that are right by
themselves, so a role that does nothing holds the other one back. Maximum 1. ``published`` takes the weights of the
published sum; what its letters stand for is our reading.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from comlrl.tasks import Prompt, Row, Score, Task
from comlrl.tasks.sources import load_rows
from comlrl.tasks.travel_world import LISTS, ROLES, check_row, generated_rows, options_of, slots_of

Profile = Literal["sound", "published"]
Plan = dict[tuple[int, str], str]  # (day from 1, field) -> value

MAX_CHARS, MAX_DEPTH = 8_000, 6
CONSTANTS: dict[str, dict[str, float]] = {
    "sound": {"balanced": 0.3, "commonsense": 0.2, "hard": 0.2, "success": 0.3},
    "published": {
        "parsed": 0.02,
        "answered": 0.03,
        "valid_items": 0.04,
        "joint": 0.02,
        "joint_balanced": 0.14,
        "joint_quality": 0.57,
        "joint_hard": 0.08,
        "success": 0.10,
        "invalid": -0.10,
        "conflict": -0.05,
        "overlap": -0.05,
        "copy": -0.10,
        "over_length": -0.05,
    },
}
FAULT_FACTOR = 0.9


def travel(
    num_agents: int = 2,
    dataset: str = "generated",
    train_rows: int | None = None,
    eval_rows: int | None = None,
    profile: Profile = "sound",
    style: Literal["chat", "plain"] = "chat",
    seed: int = 0,
) -> Task:
    """``dataset``: generated (64 and 32 rows by default), or a file or hub id with rows of the same fields."""
    if num_agents != 2:
        raise ValueError(f"num_agents={num_agents}: travel has roles for 2 agents")
    if profile not in CONSTANTS:
        raise ValueError(f"task_args.profile={profile!r}: must be sound or published")
    if min(1 if train_rows is None else train_rows, 1 if eval_rows is None else eval_rows + 1) < 1:
        raise ValueError(f"task_args.train_rows={train_rows}, task_args.eval_rows={eval_rows}: must be positive")
    if dataset == "generated":
        counts = (64 if train_rows is None else train_rows, 32 if eval_rows is None else eval_rows)
        rows = generated_rows(sum(counts), seed)
        train, evaluation = rows[: counts[0]], rows[counts[0] :]
    else:
        rows = load_rows(dataset, ["prompt", "origin", "route", "legs", "people", "caps", *LISTS])
        for number, row in enumerate(rows):
            check_row(row, f"task_args.dataset={dataset!r}: row {number}")
        train = [row for i, row in enumerate(rows) if i % 5 != 4][:train_rows]
        evaluation = [row for i, row in enumerate(rows) if i % 5 == 4][:eval_rows]
    score = partial(score_plan, profile=profile)
    return Task(
        name="travel",
        train_rows=train,
        eval_rows=evaluation,
        formatters=[partial(format_prompt, agent=agent, style=style) for agent in range(2)],
        score=score,
        maximum=1.0,
        trivial=trivial_scores(train[:16], score),
        reference=reference_texts,
    )


# --- answers ---


@dataclass(frozen=True)
class Answer:
    """One agent's items by slot. ``foreign``: items of another role's slots; ``twice``: slots named more than once;
    ``malformed``: items of another form; ``invalid``: the whole answer could not be read."""

    items: Plan
    invalid: bool = False
    foreign: int = 0
    twice: int = 0
    malformed: int = 0

    @property
    def faulty(self) -> bool:
        return self.invalid or self.foreign + self.twice + self.malformed > 0


def read_answer(row: Row, text: str, agent: int) -> Answer:
    data = read_json(text)
    if not isinstance(data, dict) or set(data) != {"agent_id", "items"} or not isinstance(data["items"], list):
        return Answer({}, invalid=True)
    if data["agent_id"] != agent or isinstance(data["agent_id"], bool):
        return Answer({}, invalid=True)
    days, own, others = len(row["route"]), ROLES[agent], ROLES[1 - agent]
    found: list[tuple[tuple[int, str], str]] = []
    foreign = malformed = 0
    for item in data["items"]:
        if not isinstance(item, dict) or set(item) != {"day", "field", "value"}:
            malformed += 1
            continue
        day, field, value = item["day"], item["field"], item["value"]
        if type(day) is not int or not 1 <= day <= days or not isinstance(value, str) or not isinstance(field, str):
            malformed += 1
        elif field in own:
            found.append(((day, field), plain(value)))
        else:
            foreign += field in others
            malformed += field not in others
    counts = Counter(slot for slot, _ in found)
    items = {slot: value for slot, value in found if counts[slot] == 1}
    return Answer(items, False, foreign, sum(count > 1 for count in counts.values()), malformed)


def read_json(text: str) -> Any:
    """The one JSON value of a text, perhaps in a code fence; None: none, or one that is refused."""
    if len(text) > MAX_CHARS:
        return None
    match = re.fullmatch(r"\s*```(?:json)?\s*(.*?)```\s*", text, re.DOTALL)
    body = match.group(1) if match else text
    depth = most = 0
    for character in body:  # before the parser, which recurses
        depth += (character in "[{") - (character in "]}")
        most = max(most, depth)
    if most > MAX_DEPTH:
        return None
    try:
        return json.loads(
            body, object_pairs_hook=_distinct, parse_constant=_refuse, parse_float=_finite, parse_int=_small
        )
    except ValueError:  # JSONDecodeError is one
        return None


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({key for key, _ in pairs}) < len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError("infinite")
    return float(text)


def _small(text: str) -> int:
    if len(text) > 9:
        raise ValueError("a huge number")
    return int(text)


def plain(text: str) -> str:
    """As values are compared: white space collapsed, case ignored."""
    return " ".join(text.split()).casefold()


def merge(answers: Sequence[Answer]) -> Plan:
    """The roles' slots are disjoint, so nothing can collide."""
    return {slot: value for answer in answers for slot, value in answer.items.items()}


# --- the evaluator ---


def right_slots(row: Row, plan: Plan) -> set[tuple[int, str]]:
    """Slots whose value stands in the lists for that day, and that repeat no restaurant or attraction."""
    right = set[tuple[int, str]]()
    used = Counter[tuple[str | None, str]]()
    for day, field in sorted(slots_of(row)):
        value = plan.get((day, field))
        if value is None or value not in {plain(name) for name in options_of(row, day, field)}:
            continue
        group = "attraction" if field == "attraction" else "meal" if field in ROLES[1] else None
        used[group, value] += 1
        if group is None or used[group, value] == 1:
            right.add((day, field))
    return right


def constraints(row: Row, plan: Plan) -> tuple[dict[str, bool], dict[str, bool]]:
    """(commonsense, hard): each constraint by name, and whether it holds."""
    right, slots = right_slots(row, plan), slots_of(row)

    def all_right(*fields: str) -> bool:
        return all(slot in right for slot in slots if slot[1] in fields)

    commonsense = {
        "complete": all(slot in plan for slot in slots),
        "route": all_right("current_city"),
        "transport": all_right("transportation"),
        "lodging": all_right("accommodation"),
        "meals": all_right("breakfast", "lunch", "dinner"),
        "attractions": all_right("attraction"),
    }
    chosen = chosen_entries(row, plan, right)
    hard = {"budget": right == slots and cost(row, chosen) <= sum(row["caps"])}
    wishes = row.get("wishes", {})
    if "room" in wishes:
        rooms = [entry for entry in chosen if "room" in entry]
        hard["room"] = commonsense["lodging"] and all(entry["room"] == wishes["room"] for entry in rooms)
    if "avoid" in wishes:
        modes = [entry for entry in chosen if "mode" in entry]
        hard["transport"] = commonsense["transport"] and all(entry["mode"] != wishes["avoid"] for entry in modes)
    if "cuisine" in wishes:
        hard["cuisine"] = commonsense["meals"] and any(entry.get("cuisine") == wishes["cuisine"] for entry in chosen)
    return commonsense, hard


def chosen_entries(row: Row, plan: Plan, right: set[tuple[int, str]]) -> list[Mapping[str, Any]]:
    """The list entries that the right slots name."""
    entries = []
    for day, field in sorted(right):
        named = [e for e in options_of(row, day, field).values() if e and plain(e["name"]) == plan[day, field]]
        entries += named[:1]
    return entries


def cost(row: Row, entries: Sequence[Mapping[str, Any]]) -> float:
    """Hotels are paid a night and room for two, everything else a person."""
    rooms = math.ceil(row["people"] / 2)
    return sum(entry.get("price", 0) * (rooms if "room" in entry else row["people"]) for entry in entries)


def evaluate_plan(row: Row, plan: Plan) -> dict[str, float]:
    """delivery, commonsense and hard (micro shares), success. It knows nothing of the reward."""
    commonsense, hard = constraints(row, plan)
    return {
        "delivery": float(commonsense["complete"]),
        "commonsense": sum(commonsense.values()) / len(commonsense),
        "hard": sum(hard.values()) / len(hard),
        "success": float(all(commonsense.values()) and all(hard.values())),
    }


# --- scores ---


def score_plan(row: Row, texts: Sequence[str], profile: Profile) -> Score:
    answers = [read_answer(row, text, agent) for agent, text in enumerate(texts)]
    plan = merge(answers)
    right, slots = right_slots(row, plan), slots_of(row)
    coverage = [
        sum(slot in right for slot in slots if slot[1] in role) / sum(slot[1] in role for slot in slots)
        for role in ROLES
    ]
    faulty = sum(answer.faulty for answer in answers)
    parts = evaluate_plan(row, plan) | {
        "balanced": 0.2 * sum(coverage) / len(coverage) + 0.8 * min(coverage),
        "logistics": coverage[0],
        "experience": coverage[1],
        "invalid": sum(answer.invalid for answer in answers) / len(answers),
        "faulty": faulty / len(answers),
    }
    if profile == "published":
        parts |= published_terms(answers, texts, parts)
    total = sum(weight * parts[name] for name, weight in CONSTANTS[profile].items())
    if profile == "published":
        return min(max(total, -0.25), 1.0), parts
    return total * FAULT_FACTOR**faulty, parts


def published_terms(answers: Sequence[Answer], texts: Sequence[str], parts: Mapping[str, float]) -> dict[str, float]:
    count = len(answers)
    items = sum(len(a.items) + a.foreign + a.twice + a.malformed for a in answers)
    joint = float(not any(answer.invalid for answer in answers))
    coverage = (parts["logistics"] + parts["experience"]) / 2
    quality = (coverage + parts["commonsense"] + parts["hard"]) / 3
    return {
        "parsed": 1 - parts["invalid"],
        "answered": sum(bool(answer.items) for answer in answers) / count,
        "valid_items": sum(len(answer.items) for answer in answers) / max(items, 1),
        "joint": joint,
        "joint_balanced": joint * parts["balanced"],
        "joint_quality": joint * parts["balanced"] ** 0.65 * quality**0.35,
        "joint_hard": joint * parts["hard"],
        "conflict": float(any(answer.twice for answer in answers)),
        "overlap": float(any(answer.foreign for answer in answers)),
        "copy": float(len(set(texts)) < count),
        "over_length": sum(len(text) > MAX_CHARS for text in texts) / count,
    }


# --- prompts and answers to compare with ---

TASK = [
    "Fill current_city (where the night is spent), transportation (a name of the list on days with a journey, else -) "
    "and accommodation (a name of that city's list; - on the last day).",
    "Fill breakfast, lunch, dinner (names of that day's city, no restaurant twice) and attraction (none twice).",
]


def format_prompt(row: Row, agent: int, style: str) -> Prompt:
    days = "; ".join(f"day {i}: {city}" for i, city in enumerate(row["route"], start=1))
    lists = LISTS[:2] if agent == 0 else LISTS[2:]
    lines = [f"{name}: " + "; ".join(_entry_text(entry) for entry in row[name]) for name in lists]
    text = "\n".join(
        [
            f"{row['prompt']}\nYou are planner {agent} of 2; the other one fills the other fields of the same plan.",
            f"Days are spent in: {days}; the last evening in {row['origin']} again.",
            *lines,
            f"{TASK[agent]} Spend at most {row['caps'][agent]}. Prices: a hotel's for a night and a room for two, "
            "others for a person.",
            f'Answer with one JSON object only: {{"agent_id": {agent}, "items": [{{"day": 1, "field": '
            f'"{ROLES[agent][0]}", "value": "..."}}, ...]}}',
        ]
    )
    return [{"role": "user", "content": text}] if style == "chat" else text + "\n"


def _entry_text(entry: Mapping[str, Any]) -> str:
    details = [str(value) for key, value in entry.items() if key != "name"]
    return f"{entry['name']} ({', '.join(details)})"


def reference_texts(row: Row) -> list[str]:
    """The cheapest choice that meets the wishes."""
    wishes, used = row.get("wishes", {}), set[str]()
    chosen: list[list[dict[str, Any]]] = [[], []]
    dish = wishes.get("cuisine")
    for day, field in sorted(slots_of(row)):
        agent = 0 if field in ROLES[0] else 1
        options = {k: entry for k, entry in options_of(row, day, field).items() if agent == 0 or k not in used}
        value = min(options, key=partial(_rank, options, wishes, dish), default="-")
        if agent == 1:
            used.add(value)
            if field != "attraction":
                dish = None  # one meal of the wanted kind is enough
        chosen[agent].append({"day": day, "field": field, "value": value})
    return [json.dumps({"agent_id": agent, "items": items}) for agent, items in enumerate(chosen)]


def _rank(
    options: Mapping[str, Mapping[str, Any] | None], wishes: Mapping[str, str], dish: str | None, name: str
) -> tuple[bool, bool, float]:
    """The smallest is the best: what is not refused, then the wanted dish, then the price."""
    entry = options[name] or {}
    refused = "room" in entry and entry["room"] != wishes.get("room", entry["room"])
    refused |= "mode" in entry and entry["mode"] == wishes.get("avoid")
    return refused, dish is not None and entry.get("cuisine") != dish, entry.get("price", 0)


def trivial_scores(rows: Sequence[Row], score: Callable[[Row, Sequence[str]], Score]) -> dict[str, float]:
    """Means over ``rows`` of answers without skill."""

    def mean(answers: Callable[[Row], list[str]]) -> float:
        return sum(score(row, answers(row))[0] for row in rows) / len(rows)

    def constant(row: Row) -> list[str]:
        """Each role's first list entry in every slot."""
        return [
            json.dumps(
                {
                    "agent_id": agent,
                    "items": [
                        {"day": day, "field": field, "value": next(iter(options_of(row, 1, field)))}
                        for day, field in sorted(slots_of(row))
                        if field in role
                    ],
                }
            )
            for agent, role in enumerate(ROLES)
        ]

    def dashes(row: Row) -> list[str]:
        return [re.sub(r'"value": "[^"]*"', '"value": "-"', text) for text in reference_texts(row)]

    return {
        "empty answers": mean(lambda row: ["", ""]),
        "the request, copied": mean(lambda row: [row["prompt"]] * 2),
        "empty plans": mean(lambda row: ['{"agent_id": 0, "items": []}', '{"agent_id": 1, "items": []}']),
        "- in every slot": mean(dashes),
        "the first day's first entry in every slot": mean(constant),
        "only logistics": mean(lambda row: [reference_texts(row)[0], '{"agent_id": 1, "items": []}']),
        "agent 0's answer from both": mean(lambda row: [reference_texts(row)[0]] * 2),
    }
