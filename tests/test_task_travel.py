"""Travel: strict reading, a deterministic merge, constraints one by one, and answers that try to cheat."""

import json

import pytest

from comlrl.tasks.travel import evaluate_plan, merge, read_answer, travel
from comlrl.tasks.travel_world import generated_rows, slots_of

ROW = generated_rows(1, seed=5)[0] | {"wishes": {"room": "private room", "avoid": "bus", "cuisine": "Thai"}}


def items_of(text):
    return json.loads(text)["items"]


def answer(agent, items):
    return json.dumps({"agent_id": agent, "items": items})


def plan_of(row, texts):
    return merge([read_answer(row, text, agent) for agent, text in enumerate(texts)])


def changed(row, day, field, value):
    """The reference plan with one slot changed."""
    plan = plan_of(row, travel().reference(row))
    return plan | {(day, field): value.casefold()}


# --- the evaluator ---


def test_the_reference_meets_everything():
    task = travel(train_rows=150, eval_rows=50)
    for row in [*task.train_rows, *task.eval_rows, ROW | {"caps": [9999, 9999]}]:
        texts = task.reference(row)
        assert task.score(row, texts)[0] == pytest.approx(1.0)
        assert set(plan_of(row, texts)) == slots_of(row)


@pytest.mark.parametrize(
    ("field", "find", "lost"),
    [
        ("accommodation", lambda row: next(e for e in row["hotels"] if e["room"] != "private room"), "room"),
        ("transportation", lambda row: next(e for e in row["journeys"] if e["mode"] == "bus"), "transport"),
    ],
)
def test_hard_constraints(field, find, lost):
    row = ROW | {"caps": [9999, 9999]}
    before = evaluate_plan(row, plan_of(row, travel().reference(row)))
    after = evaluate_plan(row, changed(row, 1, field, find(row)["name"]))
    assert (before["hard"], before["success"]) == (1.0, 1.0)
    assert (after["hard"], after["success"], after["commonsense"]) == (0.75, 0.0, 1.0), lost


def test_the_budget_counts_people_and_rooms():
    row = ROW | {"people": 3}
    plan = plan_of(row, travel().reference(row))
    prices = 0
    for name, times in (("journeys", 3), ("hotels", 2), ("restaurants", 3), ("attractions", 3)):
        for entry in row[name]:
            prices += times * entry["price"] * sum(value == entry["name"].casefold() for value in plan.values())
    assert evaluate_plan(row | {"caps": [prices, 0]}, plan)["hard"] == 1.0
    assert evaluate_plan(row | {"caps": [prices - 1, 0]}, plan)["hard"] == 0.75


@pytest.mark.parametrize(
    ("field", "value", "lost"),
    [
        ("current_city", "Atlantis", 1),  # route
        ("accommodation", "Hilton", 1),
        ("lunch", "", 1),
        ("attraction", "Moon", 1),
        ("transportation", "-", 1),
    ],
)
def test_commonsense(field, value, lost):
    row = ROW | {"caps": [9999, 9999]}
    parts = evaluate_plan(row, changed(row, 1, field, value))
    assert parts["commonsense"] == pytest.approx(1 - lost / 6)
    assert (parts["delivery"], parts["success"]) == (1.0, 0.0)


def test_repeated_restaurants_do_not_count():
    plan = plan_of(ROW, travel().reference(ROW))
    parts = evaluate_plan(ROW, plan | {(1, "lunch"): plan[1, "breakfast"]})
    assert parts["commonsense"] == pytest.approx(5 / 6)


def test_an_empty_plan_meets_nothing():
    assert evaluate_plan(ROW, {}) == {"delivery": 0.0, "commonsense": 0.0, "hard": 0.0, "success": 0.0}


# --- reading ---


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Sure! {}",
        "[]",
        "null",
        '{"agent_id": 0}',
        '{"agent_id": 1, "items": []}',
        '{"agent_id": false, "items": []}',
        '{"agent_id": 0, "items": {}}',
        '{"agent_id": 0, "items": [], "price": -100}',
        '{"agent_id": 0, "agent_id": 0, "items": []}',
        '{"agent_id": 0, "items": [{"day": 1, "day": 1, "field": "current_city", "value": "x"}]}',
        '{"agent_id": 0, "items": [NaN]}',
        '{"agent_id": 0, "items": [-Infinity]}',
        '{"agent_id": 0, "items": [1e999]}',
        '{"agent_id": 0, "items": [' + "9" * 5000 + "]}",
        '{"agent_id": 0, "items": ' + "[" * 3000 + "]" * 3000 + "}",
        '{"agent_id": 0, "items": ' + '{"a":' * 1000 + "1" + "}" * 1000 + "}",
        '{"agent_id": 0, "items": []}{"agent_id": 0, "items": []}',
        '{"agent_id": 0, "items": []} ' + " " * 10_000,
        '{"agent_id": 0, "items": [] // }',
    ],
)
def test_answers_that_are_invalid(text):
    read = read_answer(ROW, text, 0)
    assert (read.items, read.invalid) == ({}, True)


def test_items_that_are_dropped():
    city = {"day": 1, "field": "current_city", "value": "Oslo"}
    wrong = [
        city | {"day": 0},
        city | {"day": 99},
        city | {"day": True},
        city | {"day": 1.0},
        city | {"value": 3},
        city | {"field": "price"},
        city | {"price": -5},
        "x",
        None,
    ]
    foreign = {"day": 1, "field": "lunch", "value": "x"}
    read = read_answer(ROW, answer(0, [*wrong, foreign, city]), 0)
    assert (read.malformed, read.foreign, read.twice) == (len(wrong), 1, 0)
    assert read.items == {(1, "current_city"): "oslo"}
    read = read_answer(ROW, answer(0, [city, city, city | {"day": 2}]), 0)
    assert (read.twice, read.items) == (1, {(2, "current_city"): "oslo"})  # a slot named twice stays empty


def test_a_code_fence_and_spaces_are_read():
    texts = travel().reference(ROW)
    fenced = [f"```json\n{texts[0]}\n```", f"\n  {texts[1]}\n"]
    assert plan_of(ROW, fenced) == plan_of(ROW, texts)
    loud = texts[0].replace(ROW["hotels"][0]["name"], f"  {ROW['hotels'][0]['name'].upper()} ")
    assert plan_of(ROW, [loud, texts[1]]) == plan_of(ROW, texts)


# --- scores ---


def test_scores_by_hand():
    task, row = travel(), ROW | {"caps": [9999, 9999]}
    texts = task.reference(row)
    # Only logistics: B = 0.2 * 0.5; route, transport and lodging hold (3 of 6), room and transport of 4 wishes.
    total, parts = task.score(row, [texts[0], answer(1, [])])
    assert (parts["logistics"], parts["experience"], parts["faulty"]) == (1.0, 0.0, 0.0)
    assert total == pytest.approx(0.3 * 0.1 + 0.2 * 3 / 6 + 0.2 * 2 / 4)
    # One item of the other role is dropped, and costs a tenth.
    extra = answer(0, [*items_of(texts[0]), {"day": 1, "field": "lunch", "value": "x"}])
    assert task.score(row, [extra, texts[1]])[0] == pytest.approx(0.9)
    # The same text from both: agent 1's answer is invalid.
    assert task.score(row, [texts[0]] * 2)[0] == pytest.approx(0.9 * (0.3 * 0.1 + 0.1 + 0.1))


def test_published_sum_by_hand():
    task, row = travel(profile="published"), ROW | {"caps": [9999, 9999]}
    texts = task.reference(row)
    assert task.score(row, texts)[0] == pytest.approx(1.0)
    assert task.score(row, ["", ""])[0] == pytest.approx(-0.1 - 0.1)  # invalid and the same
    # Only logistics: B = 0.1, quality = (0.5 + 0.5 + 0.5) / 3.
    expected = 0.02 + 0.03 / 2 + 0.04 + 0.02 + 0.14 * 0.1 + 0.57 * 0.1**0.65 * 0.5**0.35 + 0.08 * 0.5
    assert task.score(row, [texts[0], answer(1, [])])[0] == pytest.approx(expected)
    assert task.score(row, ["x" * 9000] * 2)[0] == -0.25


def test_what_trivial_answers_score():
    trivial = travel().trivial
    for name in ("empty answers", "the request, copied", "empty plans"):
        assert trivial[name] == 0.0
    assert trivial["- in every slot"] < 0.05
    assert trivial["the first day's first entry in every slot"] < 0.1
    assert trivial["agent 0's answer from both"] < trivial["only logistics"] < 0.25


# --- rows ---


def test_prompts_show_only_the_role_s_lists():
    task = travel(style="plain")
    first, second = (formatter(ROW) for formatter in task.formatters)
    assert all(entry["name"] in first for entry in ROW["hotels"] + ROW["journeys"])
    assert all(entry["name"] in second for entry in ROW["restaurants"] + ROW["attractions"])
    assert not any(entry["name"] in first for entry in ROW["restaurants"])
    assert ROW["journeys"][0]["leg"] in first


def test_rows_of_a_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = generated_rows(10, seed=1)
    path.write_text("\n".join(map(json.dumps, rows)))
    task = travel(dataset=str(path))
    assert (len(task.train_rows), len(task.eval_rows)) == (8, 2)
    assert len({row["prompt"] for row in generated_rows(300, seed=0)}) == 300


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row.pop("hotels"), "row 0 lacks hotels"),
        (lambda row: row["hotels"][0].update(price=-10), "row 0: price -10 .* not negative"),
        (lambda row: row["hotels"][0].update(price=float("nan")), "row 0: price nan"),
        (lambda row: row["hotels"][0].update(price="10"), "row 0: price '10'"),
        (lambda row: row["hotels"][0].pop("city"), "row 0: an entry of hotels lacks city"),
        (lambda row: row.update(hotels=["x"]), "row 0: an entry of hotels must be a mapping"),
        (
            lambda row: row.update(restaurants=row["restaurants"][10:][:0] or [row["restaurants"][0] | {"city": "Y"}]),
            "nothing in the lists fits breakfast of day 1",
        ),
        (lambda row: row.update(caps=[1]), "caps must be two numbers"),
    ],
)
def test_rows_that_are_refused(tmp_path, change, message):
    (row,) = generated_rows(1, seed=1)
    change(row)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row]))
    with pytest.raises(ValueError, match=message):
        travel(dataset=str(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_agents": 3}, "num_agents=3: travel has roles for 2 agents"),
        ({"profile": "x"}, r"task_args\.profile='x'"),
        ({"eval_rows": -1}, r"task_args\.eval_rows=-1"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(ValueError, match=message):
        travel(**arguments)
