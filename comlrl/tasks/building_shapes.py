"""Shapes of the building tasks: a font of five by five cells, a tiny one, and boxes with door, windows and roof."""

from __future__ import annotations

import random

_FONT = """
A .###. #...# ##### #...# #...#
B ####. #...# ####. #...# ####.
C .#### #.... #.... #.... .####
D ####. #...# #...# #...# ####.
E ##### #.... ###.. #.... #####
F ##### #.... ###.. #.... #....
G .#### #.... #..## #...# .####
H #...# #...# ##### #...# #...#
I ##### ..#.. ..#.. ..#.. #####
J ..### ...#. ...#. #..#. .##..
K #...# #..#. ###.. #..#. #...#
L #.... #.... #.... #.... #####
M #...# ##.## #.#.# #...# #...#
N #...# ##..# #.#.# #..## #...#
O .###. #...# #...# #...# .###.
P ####. #...# ####. #.... #....
Q .###. #...# #.#.# #..#. .##.#
R ####. #...# ####. #..#. #...#
S .#### #.... .###. ....# ####.
T ##### ..#.. ..#.. ..#.. ..#..
U #...# #...# #...# #...# .###.
V #...# #...# .#.#. .#.#. ..#..
W #...# #...# #.#.# ##.## #...#
X #...# .#.#. ..#.. .#.#. #...#
Y #...# .#.#. ..#.. ..#.. ..#..
Z ##### ...#. ..#.. .#... #####
"""
FONT = {line[0]: tuple(line[2:].split()) for line in _FONT.strip().split("\n")}
# One column of two cells a letter.
TINY_FONT = {"a": ("#", "."), "b": (".", "#"), "c": ("#", "#")}
PUBLISHED_WORDS = ["I", "C", "M", "L", "MC", "CM", "LI", "LLM", "ICML", "CLIM"]

FLOORS = ["oak_planks", "stone", "terracotta"]
WALLS = ["bricks", "white_concrete", "sandstone"]
ROOFS = ["hay_block", "copper_block", "quartz_block"]
WINDOW = "glass"


def house(generator: random.Random) -> tuple[list[int], list[tuple[int, int, int, str]]]:
    """([width, height, depth], voxels (x, y, z, kind)): floor, four walls, a door in front, windows, a flat roof."""
    width, depth, walls = generator.randint(4, 7), generator.randint(4, 7), generator.randint(2, 4)
    floor, wall, roof = generator.choice(FLOORS), generator.choice(WALLS), generator.choice(ROOFS)
    top = walls + 1
    kinds: dict[tuple[int, int, int], str] = {}
    for x in range(width):
        for z in range(depth):
            kinds[x, 0, z] = floor
            kinds[x, top, z] = roof
            if x in (0, width - 1) or z in (0, depth - 1):
                for y in range(1, top):
                    kinds[x, y, z] = wall
    door = generator.randint(1, width - 2)
    del kinds[door, 1, 0], kinds[door, 2, 0]
    for side in generator.sample([0, width - 1], generator.randint(1, 2)):
        kinds[side, walls, generator.randint(1, depth - 2)] = WINDOW
    kinds[generator.randint(1, width - 2), walls, depth - 1] = WINDOW
    return [width, top + 1, depth], [(*cell, kind) for cell, kind in sorted(kinds.items())]
