"""What the building tasks are played in: the rules, how answers become commands, and how work can be divided."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from comlrl.tasks import Row

Cell = tuple[int, int, int]
World = dict[Cell, str]
Profile = Literal["sound", "published"]

BLOCKS = ["oak_planks", "stone", "white_concrete", "obsidian", "bricks", "sandstone"]
BLOCKS += ["glass", "hay_block", "copper_block", "quartz_block", "gold_block", "terracotta"]
AIR = "air"
# fair_share: what part of its even share of the target each block must cover, in str_build; 0: one cell is enough.
CONSTANTS: dict[str, dict[str, float]] = {
    "published": {"coverage": 2.0, "extra": 1.5, "adjacency": 1.0, "palette": 0.25, "fair_share": 0.0, "spider": 0.1},
    "sound": {"coverage": 2.0, "extra": 0.0, "adjacency": 1.0, "palette": 0.25, "fair_share": 0.5, "spider": 0.1},
}
COMMANDS_OF_ALL = {"published": {"str": 300, "house": 600}, "sound": {"str": 0, "house": 600}}
PLAYER_HEALTH = 5
LINE = re.compile(r"/?(setblock|fill)((?: -?[0-9]{1,4}){3}|(?: -?[0-9]{1,4}){6}) (?:minecraft:)?([a-z_]{1,30})")


@dataclass(frozen=True)
class Command:
    """One accepted line: ``cells`` that it sets to ``block``."""

    cells: tuple[Cell, ...]
    block: str
    text: str


@dataclass(frozen=True)
class Rules:
    """What one task allows. ``stock``: a row has numbers of blocks an agent, else ``palettes`` (one an agent) hold."""

    profile: Profile
    palettes: list[list[str]]
    kind: Literal["str", "house"]
    tiny: bool = False

    def __post_init__(self) -> None:
        if self.profile not in CONSTANTS:
            raise ValueError(f"task_args.profile={self.profile!r}: must be sound or published")

    @property
    def num_agents(self) -> int:
        return len(self.palettes)

    def limit(self, row: Row) -> int:
        """Commands an agent: in the sound str_build one and a half times its fair share, so a flood is cut off."""
        total = COMMANDS_OF_ALL[self.profile][self.kind] or ceil(1.5 * len(row["target"]))
        return ceil(total / self.num_agents)


def target_of(row: Row) -> World:
    return {(x, y, z): kind for x, y, z, kind in row["target"]}


# --- answers ---


def read_answer(row: Row, text: str, agent: int, rules: Rules) -> tuple[list[Command], int, bool]:
    """(accepted commands, refused lines that look like commands, whether ``/kill`` was written)."""
    if rules.tiny:
        return _read_cells(row, text, rules.palettes[agent]), 0, False
    stock: Counter[str] | None = Counter(row["stock"]) if "stock" in row else None
    commands: list[Command] = []
    limit, refused, kill = rules.limit(row), 0, False
    for line in text.split("\n"):
        if len(line) > 100:
            continue
        line = " ".join(line.split())
        kill |= line in ("/kill", "kill")
        match = LINE.fullmatch(line)
        if match is None:
            continue
        verb, numbers, block = match.group(1), [int(n) for n in match.group(2).split()], match.group(3)
        cells = _box(numbers, row["size"]) if len(numbers) == (3 if verb == "setblock" else 6) else ()
        allowed = block == AIR or (block in stock if stock is not None else block in rules.palettes[agent])
        short = stock is not None and block != AIR and stock[block] < len(cells)
        verb_fits = verb == "setblock" or rules.kind == "house"
        if not cells or not allowed or short or not verb_fits or len(commands) == limit:
            refused += 1
            continue
        if stock is not None and block != AIR:
            stock[block] -= len(cells)
        commands.append(Command(cells, block, command_text(cells, block, rules)))
    return commands, refused, kill


def _read_cells(row: Row, text: str, palette: Sequence[str]) -> list[Command]:
    """The tiny form: character k is cell k in reading order, its code modulo (blocks + 1) the block; 0: none."""
    width, height, _ = row["size"]
    order = [(x, y, 0) for y in reversed(range(height)) for x in range(width)]
    choices = [ord(character) % (len(palette) + 1) for character in text[: len(order)]]
    return [Command((cell,), palette[choice - 1], "") for cell, choice in zip(order, choices) if choice]


def _box(numbers: Sequence[int], size: Sequence[int]) -> tuple[Cell, ...]:
    """All cells between two corners (or the one cell); none if a corner lies outside the canvas."""
    corners = [numbers[:3], numbers[-3:]]
    if any(not 0 <= corner[axis] < size[axis] for corner in corners for axis in range(3)):
        return ()
    xs, ys, zs = (range(min(a, b), max(a, b) + 1) for a, b in zip(*corners))
    return tuple(itertools.product(xs, ys, zs))


def command_text(cells: Sequence[Cell], block: str, rules: Rules) -> str:
    if rules.kind == "str":
        return "/setblock {} {} {} {}".format(*cells[0], block)
    return "/fill {} {} {} {} {} {} {}".format(*cells[0], *cells[-1], block)


# --- a division of the work that earns the maximum, for references and feedback ---


def shares(row: Row, rules: Rules) -> list[World]:
    """What each agent places: disjoint, together the target.

    Words: cell after cell, the block that is used least so far and is not beside the same one. Houses: each
    kind's voxels in reading order, cut into one piece an agent, so that no stock is exceeded.
    """
    result: list[World] = [{} for _ in rules.palettes]
    target = target_of(row)
    if rules.kind == "house":
        for kind in sorted(set(target.values())):
            voxels = sorted((cell for cell in target if target[cell] == kind), key=lambda c: (c[1], c[2], c[0]))
            piece = ceil(len(voxels) / rules.num_agents)
            for i, cell in enumerate(voxels):
                result[i // piece][cell] = kind
        return result
    owner = {block: agent for agent, palette in enumerate(rules.palettes) for block in palette}
    chosen: World = {}
    for x, y, z in sorted(target):
        beside = {chosen.get(other) for other in ((x - 1, y, z), (x, y - 1, z))}
        used = Counter(chosen.values())
        free = [block for block in owner if block not in beside] or list(owner)
        # Among equals the parity decides: two blocks suffice then wherever the cells hang together.
        block = min(
            free, key=lambda name: (0 if rules.tiny else used[name], (list(owner).index(name) + x + y) % len(owner))
        )
        chosen[x, y, z] = block
        result[owner[block]][x, y, z] = block
    return result


def boxes(world: World) -> list[tuple[tuple[Cell, ...], str]]:
    """The voxels of ``world`` as boxes: runs along x, equal runs joined along z, then along y."""
    left, result = dict(world), []
    for start in sorted(world, key=lambda c: (c[1], c[2], c[0])):
        if start not in left:
            continue
        block, end = left[start], start
        for axis in (0, 2, 1):
            while True:
                larger = tuple(value + (i == axis) for i, value in enumerate(end))
                cells = _box([*start, *larger], [value + 1 for value in larger])
                if any(left.get(cell) != block for cell in cells):
                    break
                end = (larger[0], larger[1], larger[2])
        cells = _box([*start, *end], [value + 1 for value in end])
        for cell in cells:
            del left[cell]
        result.append((cells, block))
    return result


def commands_for(world: World, rules: Rules) -> list[str]:
    if rules.kind == "str":
        return [command_text([cell], block, rules) for cell, block in sorted(world.items())]
    return [command_text(cells, block, rules) for cells, block in boxes(world)]


def cells_for(row: Row, share: World, palette: Sequence[str]) -> str:
    """The tiny form of a share: ``.`` for an empty cell and ``#`` for a block (one agent, two blocks: ``!"#``)."""
    width, height, _ = row["size"]
    signs = ".#" if len(palette) == 1 else '!"#'  # by character code modulo (blocks + 1)
    order = [(x, y, 0) for y in reversed(range(height)) for x in range(width)]
    return "".join(signs[palette.index(share[cell]) + 1 if cell in share else 0] for cell in order)


def reference_texts(row: Row, rules: Rules) -> list[str]:
    divided = shares(row, rules)
    if rules.tiny:
        return [cells_for(row, share, palette) for share, palette in zip(divided, rules.palettes)]
    texts = ["\n".join(commands_for(share, rules)) for share in divided]
    if rules.kind == "house":
        texts[0] += "\n/kill"
    return texts
