"""Building: agents place blocks in an empty world until a target stands. ``str_build``: words; ``house_build``: houses.

An answer is one command a line; other lines, blocks an agent does not own, cells outside the canvas, commands after
the limit, and fills larger than what is left in stock are refused. Commands take effect agent after agent, so a later
agent overwrites. Every turn starts from an empty world. A row's ``target`` is a list of ``[x, y, z, kind]``; the kind
is ``""`` where any block will do.

str_build, profile ``sound``: IoU of built and target cells, times ``2 - equal - 0.25 * (agents whose palette lacks)``,
where ``equal`` is the share of adjacent built pairs of the same block, and a palette lacks in as far as one of its
blocks covers less than half its fair share of the target. Maximum 2, nothing built: 0. ``published``:
``2 * coverage - 1.5 * extra / background - equal - 0.25`` for each agent whose palette is not completely present.

house_build, ``sound``: IoU of solid voxels (the kind must be right), times ``1 - 0.1 * damage`` unless an agent wrote
``/kill``. ``published``: share of all voxels, air included, that equal the target, minus ``0.1 * damage``.
Maximum 1.

``str_build`` with ``size: tiny`` is for byte-level models: a letter is one column of two cells, each agent has one
block, and an answer is a string whose k-th character says whether the agent fills cell k in reading order (odd
character code: yes). Random answers already earn something, so a tiny model learns it in minutes.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from typing import Any, Literal

from comlrl.tasks import Message, Prompt, Row, Score, Task
from comlrl.tasks.building_shapes import FONT, PUBLISHED_WORDS, TINY_FONT, house
from comlrl.tasks.building_world import (
    AIR,
    BLOCKS,
    CONSTANTS,
    PLAYER_HEALTH,
    Cell,
    Command,
    Profile,
    Rules,
    World,
    cells_for,
    commands_for,
    read_answer,
    reference_texts,
    shares,
    target_of,
)

Feedback = Literal["plan", "position", "score"]


def str_build(
    num_agents: int = 2,
    size: Literal["full", "tiny"] = "full",
    words: Literal["generated", "published"] = "generated",
    word_length: int | None = None,
    train_rows: int | None = None,
    eval_rows: int | None = None,
    seed: int = 0,
    feedback: Feedback = "plan",
    profile: Profile = "sound",
    style: Literal["chat", "plain"] = "chat",
) -> Task:
    """Write a word in blocks. ``word_length`` null: 2 or 3 letters (tiny: 3). ``words: published``: ten known ones.

    Training and evaluation rows are different words; 64 and 32 by default (tiny: 12 and 6).
    """
    tiny, font = size == "tiny", TINY_FONT if size == "tiny" else FONT
    if tiny and (words == "published" or num_agents > 3):
        raise ValueError(f"task_args.size=tiny: has generated words and 1 to 3 agents, got {words}, {num_agents}")
    if not 1 <= num_agents <= 6:
        raise ValueError(f"num_agents={num_agents}: str_build has blocks for 1 to 6 agents")
    if word_length is not None and not 1 <= word_length <= 8:
        raise ValueError(f"task_args.word_length={word_length}: must be from 1 to 8")
    if tiny:
        palettes = [[block] for block in BLOCKS[: max(num_agents, 2)]]
    else:
        palettes = [BLOCKS[2 * i : 2 * i + 2] for i in range(num_agents)]
    if num_agents == 1:  # two textures are not enough where equal neighbours are to be avoided
        palettes = [BLOCKS[:2] if tiny else BLOCKS[:4]]
    rules = Rules(profile, palettes, "str", tiny)
    if words == "published":
        made = [word_row(word, font) for word in PUBLISHED_WORDS]
        return _task("str_build", made[:8], made[8:], rules, feedback, style)
    counts = _split_sizes(train_rows, eval_rows, (12, 6) if tiny else (64, 32))
    lengths = [word_length] if word_length else [3] if tiny else [2, 3]
    made = word_rows(sum(counts), lengths, font, rules, seed)
    return _task("str_build", made[: counts[0]], made[counts[0] :], rules, feedback, "plain" if tiny else style)


def house_build(
    num_agents: int = 2,
    train_rows: int | None = None,
    eval_rows: int | None = None,
    seed: int = 0,
    feedback: Feedback = "plan",
    profile: Profile = "sound",
    style: Literal["chat", "plain"] = "chat",
) -> Task:
    """Build a house; each agent's stock is three quarters (of two agents) of what the house needs of each kind."""
    if not 1 <= num_agents <= 6:
        raise ValueError(f"num_agents={num_agents}: house_build is for 1 to 6 agents")
    counts = _split_sizes(train_rows, eval_rows, (64, 32))
    generator, seen = random.Random(seed), set[tuple[Any, ...]]()
    made: list[Row] = []
    for _ in range(100 * sum(counts)):
        if len(made) == sum(counts):
            break
        size, target = house(generator)
        attacks = [generator.randint(1, 3) for _ in range(3)]
        if tuple(target) not in seen:
            seen.add(tuple(target))
            row: Row = {"name": f"house {len(made)}", "size": size, "target": [list(v) for v in target]}
            made.append(row | {"stock": stock_of(target, num_agents), "attacks": attacks})
    if len(made) < sum(counts):
        raise ValueError(f"task_args.train_rows + eval_rows = {sum(counts)}: only {len(made)} different houses found")
    rules = Rules(profile, [[] for _ in range(num_agents)], "house")
    for row in made:
        row["prompt"] = picture(row)
    return _task("house_build", made[: counts[0]], made[counts[0] :], rules, feedback, style)


# --- rows ---


def word_row(word: str, font: Mapping[str, Sequence[str]]) -> Row:
    """The target of a word in the plane z = 0; y grows upwards. Letters of FONT stand one column apart."""
    gap = 0 if font is TINY_FONT else 1
    height, width = len(next(iter(font.values()))), len(next(iter(font.values()))[0])
    target = [
        [i * (width + gap) + x, height - 1 - line, 0, ""]
        for i, letter in enumerate(word)
        for line, pixels in enumerate(font[letter])
        for x, pixel in enumerate(pixels)
        if pixel == "#"
    ]
    row = {"name": word, "size": [len(word) * (width + gap) - gap, height, 1], "target": target}
    return row | {"prompt": picture(row)}


def word_rows(
    count: int, lengths: Sequence[int], font: Mapping[str, Sequence[str]], rules: Rules, seed: int
) -> list[Row]:
    """``count`` different words, for each of which the maximum can be reached."""
    possible = sum(len(font) ** length for length in lengths)
    generator, tried = random.Random(seed), set[str]()
    made: list[Row] = []
    while len(made) < count and len(tried) < possible:
        word = "".join(generator.choices(sorted(font), k=generator.choice(lengths)))
        if word in tried:
            continue
        tried.add(word)
        row = word_row(word, font)
        if score_building(row, reference_texts(row, rules), rules)[0] == maximum(rules):
            made.append(row)
    if len(made) < count:
        raise ValueError(
            f"task_args.train_rows + eval_rows = {count}: only {len(made)} words of length {list(lengths)} fit; "
            "ask for fewer rows or a larger word_length"
        )
    return made


def stock_of(target: Sequence[Sequence[Any]], num_agents: int) -> dict[str, int]:
    return {kind: ceil(1.5 * number / num_agents) for kind, number in Counter(v[3] for v in target).items()}


def picture(row: Row) -> str:
    """The target as text. One plane: lines from top to bottom; a house: its layers from the ground up."""
    (width, height, depth), target = row["size"], target_of(row)
    kinds = sorted({kind for kind in target.values() if kind})
    mark = {kind: kind[0].upper() for kind in kinds}

    def sign(cell: Cell) -> str:
        return mark.get(target[cell], "#") if cell in target else "."

    if depth == 1:
        return "\n".join("".join(sign((x, y, 0)) for x in range(width)) for y in reversed(range(height)))
    layers = [
        f"y={y}:\n" + "\n".join("".join(sign((x, y, z)) for x in range(width)) for z in range(depth))
        for y in range(height)
    ]
    return "\n".join(["; ".join(f"{mark[kind]} = {kind}" for kind in kinds), *layers])


# --- scores ---


def maximum(rules: Rules) -> float:
    return CONSTANTS[rules.profile]["coverage"] if rules.kind == "str" else 1.0


def score_building(row: Row, texts: Sequence[str], rules: Rules) -> Score:
    """The total, ``iou`` (the measure to compare runs by), and what the total is made of."""
    world: World = {}
    target, refused, kill, placed = target_of(row), 0, False, Counter[Cell]()
    for agent, text in enumerate(texts):
        commands, bad, killed = read_answer(row, text, agent, rules)
        refused, kill = refused + bad, kill or killed
        mine: World = {}
        for command in commands:
            mine |= dict.fromkeys(command.cells, command.block)
        world |= mine
        placed.update(cell for cell, block in mine.items() if block != AIR)
    world = {cell: block for cell, block in world.items() if block != AIR}
    hits = [cell for cell, block in world.items() if cell in target and target[cell] in ("", block)]
    extra = sum(cell not in target for cell in world)
    parts = {
        "iou": len(hits) / len(target.keys() | world.keys()),
        "coverage": len(hits) / len(target),
        "extra": float(extra),
        "overlap": sum(number > 1 for number in placed.values()) / max(len(placed), 1),
        "refused": float(refused),
    }
    if rules.kind == "house":
        return _score_house(row, world, target, parts, kill, rules)
    constants = CONSTANTS[rules.profile]
    equal = equal_neighbours(world)
    on_target = {cell: world[cell] for cell in hits} if rules.profile == "sound" else world
    lacking = sum(palette_lack(palette, on_target, target, rules) for palette in rules.palettes)
    penalty = constants["adjacency"] * equal + constants["palette"] * lacking
    if rules.profile == "sound":
        total = parts["iou"] * max(constants["coverage"] - penalty, 0.0)
    else:
        width, height, depth = row["size"]
        background = max(width * height * depth - len(target), 1)
        total = constants["coverage"] * parts["coverage"] - constants["extra"] * extra / background - penalty
    return total, parts | {"equal_neighbours": equal, "palettes_lacking": lacking}


def equal_neighbours(world: World) -> float:
    """The share of pairs of built cells, side by side in the plane, that have the same block."""
    pairs = [
        world[x, y, z] == world[other]
        for x, y, z in world
        for other in ((x + 1, y, z), (x, y + 1, z))
        if other in world
    ]
    return sum(pairs) / len(pairs) if pairs else 0.0


def palette_lack(palette: Sequence[str], world: World, target: World, rules: Rules) -> float:
    """From 0 (every block of the palette is there often enough) to 1 (one of them is not there at all)."""
    counts, blocks = Counter(world.values()), sum(len(palette) for palette in rules.palettes)
    needed = max(CONSTANTS[rules.profile]["fair_share"] * len(target) / blocks, 1.0)
    rarest = min(counts[block] for block in palette)
    return 1.0 - min(rarest / needed, 1.0)


def _score_house(row: Row, world: World, target: World, parts: dict[str, float], kill: bool, rules: Rules) -> Score:
    damage = 0.0 if kill else min(1.0, sum(row["attacks"]) / PLAYER_HEALTH)
    width, height, depth = row["size"]
    cells = itertools.product(range(width), range(height), range(depth))
    equal = sum(world.get(cell, AIR) == target.get(cell, AIR) for cell in cells)
    spider = CONSTANTS[rules.profile]["spider"] * damage
    parts |= {"equal_voxels": equal / (width * height * depth), "damage": damage}
    total = parts["iou"] * (1.0 - spider) if rules.profile == "sound" else parts["equal_voxels"] - spider
    return total, parts


# --- prompts ---


def format_prompt(row: Row, agent: int, rules: Rules, style: str) -> Prompt:
    if rules.tiny:
        return f"{agent}{row['prompt']}>".replace("\n", "/")
    text = instructions(row, agent, rules)
    return [{"role": "user", "content": text}] if style == "chat" else text + "\n"


def instructions(row: Row, agent: int, rules: Rules) -> str:
    width, height, depth = row["size"]
    start = f"You are builder {agent + 1} of {rules.num_agents}; together you build "
    last = f"Write at most {rules.limit(row)} commands, one a line, and nothing else. Builders do not see each other."
    if rules.kind == "str":
        own = ", ".join(rules.palettes[agent])
        return (
            f"{start}this picture in blocks ({width} wide, {height} high, in the plane z=0; x=0 is the left column, "
            f"y=0 the bottom line):\n{picture(row)}\nFill every # and nothing else. Blocks side by side should differ. "
            f"Your blocks: {own}; use each of them for about an equal part. Command: /setblock x y z block\n{last}"
        )
    stock = ", ".join(f"{number} {kind}" for kind, number in row["stock"].items())
    return (
        f"{start}this house ({width} wide in x, {height} high in y, {depth} deep in z; in each layer x grows to the "
        f"right and z downwards, from 0):\n{picture(row)}\nYour stock: {stock}. A command that needs more than is left "
        f"does nothing. Commands: /fill x1 y1 z1 x2 y2 z2 block, and /kill against the spiders, once.\n{last}"
    )


def feedback_prompts(
    prompt: str,
    agent_completions: Sequence[str],
    num_agents: int,
    prompt_history_per_agent: Sequence[Sequence[Prompt]] | None = None,
    response_history_per_agent: Sequence[Sequence[str]] | None = None,
    batch_item: Row | None = None,
    *,
    rules: Rules,
    feedback: Feedback,
    style: str,
) -> list[Prompt]:
    """The first prompt, the agent's last answer, and what to change. Every turn starts from an empty world."""
    if batch_item is None:
        raise ValueError("feedback of building tasks needs batch_item: the target is in the row")
    texts = list(agent_completions)
    prompts: list[Prompt] = []
    for agent, text in enumerate(texts):
        first = format_prompt(batch_item, agent, rules, style)
        news = feedback_text(batch_item, texts, agent, rules, feedback)
        if isinstance(first, str):
            prompts.append(f"{first[:-1]}|{news}>" if rules.tiny else f"{first}{text}\n\n{news}\n")
        else:
            answer: list[Message] = [{"role": "assistant", "content": text}, {"role": "user", "content": news}]
            prompts.append([*first, *answer])
    return prompts


def feedback_text(row: Row, texts: Sequence[str], agent: int, rules: Rules, feedback: Feedback) -> str:
    """plan: the commands to keep and to add, which together earn the maximum; position: what the world lacks;
    score: the last total."""
    total, parts = score_building(row, texts, rules)
    share = shares(row, rules)[agent]
    if rules.tiny:
        return cells_for(row, share, rules.palettes[agent]) if feedback == "plan" else f"{total:.1f}"
    result = f"The last joint answer scored {total:.2f} of {maximum(rules):g} (IoU {parts['iou']:.2f})."
    ending = "The world is empty again: write your whole answer."
    if feedback == "score":
        return f"{result} {ending}"
    accepted, _, kill = read_answer(row, texts[agent], agent, rules)
    if feedback == "plan":
        keep, left = [], dict(share)
        for command in accepted:
            if all(left.get(cell) == command.block for cell in command.cells):
                keep.append(command.text)
                for cell in command.cells:
                    del left[cell]
        if rules.kind == "house" and agent == 0:
            keep, add_kill = (keep + ["/kill"], []) if kill else (keep, ["/kill"])
        else:
            add_kill = []
        lists = {"Keep only these of your commands:": keep, "Add these:": commands_for(left, rules) + add_kill}
    else:
        built = {cell: command.block for command in _all_commands(row, texts, rules) for cell in command.cells}
        built = {cell: block for cell, block in built.items() if block != AIR}
        target = target_of(row)
        wrong = [cell for cell in built if cell not in target or target[cell] not in ("", built[cell])]
        lists = {
            "Still empty:": ["{} {} {}".format(*cell) for cell in sorted(target) if cell not in built],
            "Wrong:": ["{} {} {}".format(*cell) for cell in sorted(wrong)],
        }
    return "\n".join([result, *("\n".join([name, *(lines or ["(none)"])]) for name, lines in lists.items()), ending])


def _all_commands(row: Row, texts: Sequence[str], rules: Rules) -> list[Command]:
    return [command for agent, text in enumerate(texts) for command in read_answer(row, text, agent, rules)[0]]


# --- the task ---


def _task(name: str, train: list[Row], evaluation: list[Row], rules: Rules, feedback: Feedback, style: str) -> Task:
    if feedback not in ("plan", "position", "score"):
        raise ValueError(f"task_args.feedback={feedback!r}: must be plan, position or score")
    agents = range(rules.num_agents)
    formatters: list[Callable[[Row], Prompt]] = [
        partial(format_prompt, agent=agent, rules=rules, style=style) for agent in agents
    ]
    score = partial(score_building, rules=rules)
    return Task(
        name=name,
        train_rows=train,
        eval_rows=evaluation,
        formatters=formatters,
        score=score,
        maximum=maximum(rules),
        transition=partial(feedback_prompts, rules=rules, feedback=feedback, style=style),
        trivial=trivial_scores(train[:16], rules),
        reference=partial(reference_texts, rules=rules),
    )


def trivial_scores(rows: Sequence[Row], rules: Rules) -> dict[str, float]:
    """Means over ``rows`` of answers without skill."""

    def mean(answers: Callable[[Row], list[str]]) -> float:
        return sum(score_building(row, answers(row), rules)[0] for row in rows) / len(rows)

    def flood(row: Row) -> list[str]:
        """Every cell of the canvas in a good pattern; in houses, one by one, of the kind that there is most of."""
        cells = list(itertools.product(*(range(length) for length in row["size"])))
        if "stock" in row:
            kind = max(row["stock"], key=row["stock"].__getitem__)
            lines = ["/fill {0} {1} {2} {0} {1} {2} {3}".format(*cell, kind) for cell in cells]
            return ["\n".join(lines[agent :: rules.num_agents]) for agent in range(rules.num_agents)]
        return reference_texts({"size": row["size"], "target": [[*cell, ""] for cell in cells]}, rules)

    def one_agent(row: Row) -> list[str]:
        return [reference_texts(row, rules)[0]] + [""] * (rules.num_agents - 1)

    def same(row: Row) -> list[str]:
        return [reference_texts(row, rules)[0]] * rules.num_agents

    def copied(row: Row) -> list[str]:
        return [picture(row)] * rules.num_agents

    return {
        "empty answers": mean(lambda row: [""] * rules.num_agents),
        "the picture, copied": mean(copied),
        "the whole canvas filled": mean(flood),
        "only agent 0's part": mean(one_agent),
        "agent 0's part from every agent": mean(same),
    }


def _split_sizes(train_rows: int | None, eval_rows: int | None, default: tuple[int, int]) -> tuple[int, int]:
    sizes = (default[0] if train_rows is None else train_rows, default[1] if eval_rows is None else eval_rows)
    if sizes[0] < 1 or sizes[1] < 0:
        raise ValueError(f"task_args.train_rows={sizes[0]}, task_args.eval_rows={sizes[1]}: must be positive")
    return sizes
