"""Building tasks: formulas by hand and against a slow twin, feedback that earns the maximum, answers without skill."""

import itertools
import random

import pytest

from comlrl.tasks.building import equal_neighbours, house_build, picture, str_build, word_row
from comlrl.tasks.building_shapes import FONT
from comlrl.tasks.building_world import BLOCKS, boxes, read_answer, shares

OAK, STONE, WHITE, OBSIDIAN = BLOCKS[:4]
# Six cells in a row of three, two high; the target is the left column and the middle of the bottom line.
ROW = {"name": "x", "size": [3, 2, 1], "target": [[0, 0, 0, ""], [0, 1, 0, ""], [1, 0, 0, ""]], "prompt": ""}


def total(task, row, *texts):
    return task.score(row, texts)[0]


def place(*blocks):
    return "\n".join(f"/setblock {x} {y} 0 {block}" for x, y, block in blocks)


def rules_of(task):
    return task.score.keywords["rules"]


# --- str_build by hand ---


def test_sound_score_by_hand():
    task = str_build()
    perfect = [place((0, 0, OAK), (0, 1, STONE)), place((1, 0, WHITE))]
    # Everything is there, but obsidian is missing: 0.25 for the palette of agent 1.
    assert total(task, ROW, *perfect) == pytest.approx(2 - 0.25)
    # One cell beside the target: IoU 3/4; no equal neighbours.
    assert total(task, ROW, perfect[0], perfect[1] + "\n" + place((2, 1, OBSIDIAN))) == pytest.approx(0.75 * 1.75)
    # Two of three cells, side by side, of one block: all pairs are equal, both palettes are incomplete.
    assert total(task, ROW, place((0, 0, OAK), (0, 1, OAK)), "") == pytest.approx(2 / 3 * (2 - 1 - 0.5))
    assert total(task, ROW, "", "") == 0.0


def test_published_score_by_hand():
    task = str_build(profile="published")
    perfect = [place((0, 0, OAK), (0, 1, STONE)), place((1, 0, WHITE))]
    assert total(task, ROW, *perfect) == pytest.approx(2 - 0.25)
    # One of the three background cells is built, and the palette of agent 1 is complete now.
    assert total(task, ROW, perfect[0], perfect[1] + "\n" + place((2, 1, OBSIDIAN))) == pytest.approx(2 - 1.5 / 3)
    assert total(task, ROW, place((0, 0, OAK), (0, 1, OAK)), "") == pytest.approx(2 * 2 / 3 - 1 - 0.5)
    assert total(task, ROW, "", "") == -0.5  # the published number
    task, word = str_build(profile="published"), word_row("ICML", FONT)
    stones = place(*[(x, y, STONE) for x, y, _, _ in word["target"]])
    assert total(task, word, stones, "") == pytest.approx(0.5)  # all stone by one agent, as published


def slow_score(row, texts, palettes, limit):
    """The sound score again, cell by cell."""
    grid = {}
    for text, palette in zip(texts, palettes):
        accepted = 0
        for line in text.splitlines():
            words = line.split()
            if len(words) != 5 or words[0] != "/setblock" or words[4] not in [*palette, "air"]:
                continue
            x, y, z = map(int, words[1:4])
            if 0 <= x < row["size"][0] and 0 <= y < row["size"][1] and z == 0 and accepted < limit:
                accepted += 1
                grid[x, y] = words[4]
    grid = {cell: block for cell, block in grid.items() if block != "air"}
    target = {(x, y) for x, y, _, _ in row["target"]}
    hit = [cell for cell in grid if cell in target]
    union = len(target) + sum(cell not in target for cell in grid)
    pairs = equal = 0
    for (x1, y1), (x2, y2) in itertools.combinations(grid, 2):
        if abs(x1 - x2) + abs(y1 - y2) == 1:
            pairs += 1
            equal += grid[x1, y1] == grid[x2, y2]
    penalty = equal / pairs if pairs else 0.0
    for palette in palettes:
        rarest = min(sum(grid[cell] == block for cell in hit) for block in palette)
        needed = max(1.0, 0.5 * len(target) / sum(map(len, palettes)))
        penalty += 0.25 * (1 - min(1.0, rarest / needed))
    return len(hit) / union * max(0.0, 2 - penalty)


def random_answer(generator, row, palette):
    width, height, _ = row["size"]
    lines = [
        f"/setblock {generator.randint(-1, width)} {generator.randint(0, height)} {generator.choice([0, 0, 0, 1])} "
        f"{generator.choice([*palette, *palette, 'air', 'dirt'])}"
        for _ in range(generator.randint(0, 60))
    ]
    return "\n".join(lines)


@pytest.mark.parametrize("num_agents", [2, 3])
def test_sound_score_equals_a_slow_twin(num_agents):
    task, generator = str_build(num_agents), random.Random(0)
    rules = rules_of(task)
    for row in task.train_rows[:30]:
        texts = [random_answer(generator, row, palette) for palette in rules.palettes]
        slow = slow_score(row, texts, rules.palettes, rules.limit(row))
        assert total(task, row, *texts) == pytest.approx(slow, abs=1e-12)


def test_equal_neighbours_counts_pairs_in_the_plane():
    world = {(0, 0, 0): "a", (1, 0, 0): "a", (1, 1, 0): "b", (3, 0, 0): "a"}
    assert equal_neighbours(world) == 0.5
    assert equal_neighbours({}) == 0.0


# --- what may be written ---


def test_lines_that_are_refused():
    task = str_build()
    rules, row = rules_of(task), ROW
    for line in [
        f"/setblock 0 0 0 {WHITE}",  # the other agent's
        f"/setblock 3 0 0 {OAK}",
        f"/setblock -1 0 0 {OAK}",
        f"/setblock 0 0 1 {OAK}",
        f"/setblock 9999 0 0 {OAK}",
        "/setblock 0 0 0 dirt",
        f"/fill 0 0 0 1 1 0 {OAK}",
        f"/setblock 0 0 0 0 0 0 {OAK}",
    ]:
        commands, refused, _ = read_answer(row, line, 0, rules)
        assert (commands, refused) == ([], 1), line
    for line in ["", "hello", f"/setblock ٠ 0 0 {OAK}", f"setblock 0 0 {OAK}", "/setblock 0 0 0 " + "oak_planks" * 99]:
        assert read_answer(row, line, 0, rules)[0] == [], line
    spaced = f"  /setblock   1 0 0  minecraft:{OAK} "
    assert read_answer(row, spaced, 0, rules)[0][0].text == f"/setblock 1 0 0 {OAK}"


def test_commands_after_the_limit_are_refused():
    task = str_build()
    row = word_row("AB", FONT)
    limit = rules_of(task).limit(row)
    assert limit == -(-3 * len(row["target"]) // 4)  # 1.5 times the target, divided by two agents
    text = place(*[(0, 0, OAK)] * (limit + 1), (1, 0, OAK)) + "\n" + "noise\n" * 100_000
    commands, refused, _ = read_answer(row, text, 0, rules_of(task))
    assert (len(commands), refused) == (limit, 2)


def test_later_agents_overwrite_and_air_removes():
    task = str_build()
    first = place((0, 0, OAK), (0, 1, STONE), (1, 0, OAK))
    score, parts = task.score(ROW, [first, f"/setblock 1 0 0 {WHITE}\n/setblock 0 1 0 air"])
    assert (parts["iou"], parts["overlap"], parts["equal_neighbours"]) == (2 / 3, 1 / 3, 0.0)
    assert score == pytest.approx(2 / 3 * (2 - 0.5))


# --- feedback ---


def follow(prompt, plain):
    """What an obedient agent answers: the commands to keep, and those to add."""
    text = prompt if plain else prompt[-1]["content"]
    return "\n".join(line for line in text[text.index("Keep only") :].split("\n") if line.startswith("/"))


@pytest.mark.parametrize("profile", ["sound", "published"])
@pytest.mark.parametrize(("make", "num_agents"), [(str_build, 1), (str_build, 2), (house_build, 2), (house_build, 3)])
def test_following_the_feedback_earns_the_maximum(make, num_agents, profile):
    task, generator = make(num_agents, profile=profile, train_rows=8, eval_rows=4), random.Random(0)
    rules = rules_of(task)
    for row in [*task.train_rows, *task.eval_rows]:
        reference = task.reference(row)
        junk = [random_answer(generator, row, palette or list(row["stock"])) for palette in rules.palettes]
        half = ["\n".join(text.split("\n")[::2]) for text in reference]
        doubled = [f"{text}\n{text}\nplease" for text in reference]
        for texts in ([""] * num_agents, junk, half, doubled, reference[::-1]):
            prompts = task.transition(
                prompt=row["prompt"], agent_completions=texts, num_agents=num_agents, batch_item=row
            )
            assert [prompt[1] for prompt in prompts] == [{"role": "assistant", "content": text} for text in texts]
            answers = [follow(prompt, plain=False) for prompt in prompts]
            assert total(task, row, *answers) == pytest.approx(task.maximum)


@pytest.mark.parametrize("num_agents", [1, 2, 3])
def test_the_tiny_feedback_is_the_answer(num_agents):
    task = str_build(num_agents, size="tiny")
    row = task.train_rows[0]
    prompts = task.transition(prompt="", agent_completions=["x"] * num_agents, num_agents=num_agents, batch_item=row)
    answers = [prompt.split("|")[1].rstrip(">") for prompt in prompts]
    assert answers == task.reference(row)
    assert total(task, row, *answers) == task.maximum


def test_other_feedback():
    row = word_row("I", FONT)
    texts = [place((0, 0, OAK), (0, 1, STONE)), ""]
    position = str_build(feedback="position", style="plain").transition(
        prompt="", agent_completions=texts, num_agents=2, batch_item=row
    )
    assert "Wrong:\n0 1 0\n" in position[0]
    assert "Still empty:\n0 4 0\n" in position[1]
    score = str_build(feedback="score").transition(prompt="", agent_completions=texts, num_agents=2, batch_item=row)
    assert score[0][-1]["content"].startswith("The last joint answer scored 0.1")
    with pytest.raises(ValueError, match="needs batch_item"):
        str_build().transition(prompt="", agent_completions=texts, num_agents=2)


def test_the_first_prompt_shows_the_target():
    for task in (str_build(), house_build(), str_build(style="plain")):
        for formatter in task.formatters:
            prompt = formatter(task.train_rows[0])
            assert picture(task.train_rows[0]) in (prompt if isinstance(prompt, str) else prompt[0]["content"])
    tiny = str_build(size="tiny")
    assert tiny.formatters[1](word_row("I", FONT) | {"prompt": "#.#\n.#."}) == "1#.#/.#.>"


# --- division of the work ---


@pytest.mark.parametrize("make", [str_build, house_build])
def test_shares_are_disjoint_and_complete(make):
    task = make(3)
    for row in task.train_rows[:10]:
        divided = shares(row, rules_of(task))
        cells = [cell for share in divided for cell in share]
        assert sorted(cells) == sorted({(x, y, z) for x, y, z, _ in row["target"]})
        assert min(map(len, divided)) > len(cells) / 6


def test_boxes_cover_each_voxel_once():
    generator = random.Random(0)
    world = {cell: generator.choice("ab") for cell in itertools.product(range(4), repeat=3) if generator.random() < 0.8}
    cells = [(cell, block) for box, block in boxes(world) for cell in box]
    assert len(cells) == len(world)
    assert dict(cells) == world
    assert len(boxes(dict.fromkeys(itertools.product(range(3), range(4), range(5)), "a"))) == 1


# --- houses ---

HOUSE = {
    "name": "h",
    "size": [2, 2, 1],
    "target": [[0, 0, 0, "stone"], [1, 0, 0, "stone"]],
    "stock": {"stone": 2},
    "attacks": [1, 1, 1],
    "prompt": "",
}


def test_house_scores_by_hand():
    sound, published = house_build(), house_build(profile="published")
    half = "/fill 0 0 0 0 0 0 stone"
    assert total(sound, HOUSE, half, "") == pytest.approx(0.5 * (1 - 0.1 * 3 / 5))
    assert total(published, HOUSE, half, "") == pytest.approx(3 / 4 - 0.06)
    assert total(sound, HOUSE, half + "\n/kill", "") == 0.5
    assert total(sound, HOUSE, "/fill 1 0 0 0 0 0 stone", "/kill") == 1.0
    assert total(sound, HOUSE, "", "/kill") == 0.0  # empty space earns nothing
    assert total(published, HOUSE, "", "/kill") == 0.5
    # Three are more than the stock: refused as a whole; what fits afterwards is placed.
    text = "/fill 0 0 0 1 1 0 stone\n/fill 0 1 0 0 1 0 stone"
    score, parts = sound.score(HOUSE, [text, "/kill"])
    assert (score, parts["refused"], parts["extra"]) == (0.0, 1.0, 1.0)
    # A wrong kind counts as built, not as right.
    mixed = HOUSE | {"target": [[0, 0, 0, "stone"], [1, 0, 0, "glass"]], "stock": {"stone": 2, "glass": 1}}
    assert total(sound, mixed, "/fill 0 0 0 1 0 0 stone", "/kill") == 0.5


def test_houses_differ_and_stock_is_short():
    task = house_build(train_rows=100, eval_rows=50)
    targets = [tuple(map(tuple, row["target"])) for row in [*task.train_rows, *task.eval_rows]]
    assert len(set(targets)) == 150
    for row in task.train_rows:
        for kind, number in row["stock"].items():
            needed = sum(voxel[3] == kind for voxel in row["target"])
            assert needed / 2 <= number < needed or needed <= 3


# --- splits, trivial answers, mistakes ---


def test_words_differ_and_splits_have_any_size():
    task = str_build(train_rows=300, eval_rows=200, seed=3)
    words = [row["name"] for row in [*task.train_rows, *task.eval_rows]]
    assert len(set(words)) == 500
    assert (task.train_rows, task.eval_rows) == (
        str_build(train_rows=300, eval_rows=200, seed=3).train_rows,
        str_build(train_rows=300, eval_rows=200, seed=3).eval_rows,
    )
    published = str_build(words="published")
    assert [len(published.train_rows), len(published.eval_rows)] == [8, 2]
    assert all(total(published, row, *published.reference(row)) == 2.0 for row in published.train_rows)


def test_what_trivial_answers_score():
    sound, published = str_build().trivial, str_build(profile="published").trivial
    assert sound["empty answers"] == sound["the picture, copied"] == 0.0
    assert sound["the whole canvas filled"] < 0.8
    assert sound["agent 0's part from every agent"] == sound["only agent 0's part"] < 1.0
    assert published["empty answers"] == -0.5
    houses, free = house_build().trivial, house_build(profile="published").trivial
    assert houses["empty answers"] == 0.0 < 0.1 < free["empty answers"]
    assert houses["the whole canvas filled"] < 0.3
    assert houses["only agent 0's part"] < 0.6
    tiny = str_build(size="tiny").trivial
    assert tiny["empty answers"] == 0.0
    assert tiny["the whole canvas filled"] < 1.45  # tiny words are dense


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (str_build, {"num_agents": 7}, "num_agents=7: .* 1 to 6 agents"),
        (str_build, {"size": "tiny", "num_agents": 4}, r"task_args\.size=tiny"),
        (str_build, {"size": "tiny", "words": "published"}, r"task_args\.size=tiny"),
        (str_build, {"size": "tiny", "train_rows": 30}, "= 36: only 2[0-9] words"),
        (str_build, {"word_length": 0}, r"task_args\.word_length=0"),
        (str_build, {"train_rows": 0}, r"task_args\.train_rows=0"),
        (str_build, {"feedback": "x"}, r"task_args\.feedback='x'"),
        (str_build, {"profile": "x"}, r"task_args\.profile='x'"),
        (house_build, {"num_agents": 0}, "num_agents=0"),
        (house_build, {"eval_rows": -1}, r"task_args\.eval_rows=-1"),
    ],
)
def test_mistakes(make, arguments, message):
    with pytest.raises(ValueError, match=message):
        make(**arguments)
