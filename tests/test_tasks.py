"""Tasks: scores by hand, splits, prompts, feedback, matrix games, loading, and `python -m comlrl.tasks`."""

import itertools
import math
import pickle
import sys

import numpy as np
import pytest

from comlrl.tasks import TASKS, load_task
from comlrl.tasks.__main__ import main
from comlrl.tasks.length_ratio import length_ratio
from comlrl.tasks.matrix_game import SYMBOLS, pairing, read_symbol, score_pairing, two_turn

PAIRS = ["tldr", "arxiv", "travel", "programming"]  # tasks of at most two roles


def text(length: int) -> str:
    return "x" * length


def total(task, *texts: str, row=None) -> float:
    return task.score(row or task.train_rows[0], texts)[0]


# --- length ratio ---


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (10, 20, 1.0),
        (10, 25, 1.0),
        (10, 30, 1.0),
        (10, 15, math.exp(-0.5)),
        (10, 40, math.exp(-1.0)),
        (10, 0, math.exp(-2.0)),
        (0, 2, 1.0),  # an empty text counts as one character
        (0, 0, math.exp(-2.0)),
        (1, 103, math.exp(-100.0)),
    ],
)
def test_length_ratio_by_hand(first, second, expected):
    assert total(length_ratio(), text(first), text(second)) == pytest.approx(expected, rel=1e-12)


def test_min_chars_counts_stripped_characters():
    task = length_ratio(min_chars=20)
    assert total(task, text(20), text(40)) == 1.0
    assert total(task, text(19), text(40)) == 0.0
    assert total(task, text(19) + "\n", text(40)) == 0.0
    assert total(task, text(20), " " * 30 + text(10)) == 0.0
    assert total(length_ratio(), text(19), text(40)) == 1.0


def test_parts_and_reward_of_a_batch():
    task = length_ratio(min_chars=5)
    row = task.train_rows[0]
    rewards = task.reward([text(10), text(10)], [text(25), text(4)], batch_items=[row, row], prompts=["p", "p"])
    assert rewards[0] == {
        "reward": 1.0,
        "ratio": 2.5,
        "in_range": 1.0,
        "long_enough": 1.0,
        "first_chars": 10.0,
        "second_chars": 25.0,
    }
    assert (rewards[1]["reward"], rewards[1]["ratio"], rewards[1]["long_enough"]) == (0.0, 0.4, 0.5)


def test_more_agents_are_compared_with_their_predecessors():
    task = length_ratio(num_agents=3, min_chars=5)
    value, parts = task.score({}, [text(10), text(20), text(80)])
    assert value == pytest.approx((1 + math.exp(-1)) / 2)
    assert parts["agent_2_chars"] == 80
    assert parts["ratio"] == 3.0
    assert total(task, text(10), text(20), text(4)) == 0.5  # only the second comparison is lost
    assert total(task, text(4), text(20), text(50)) == 0.5


def test_split_is_disjoint_and_fixed():
    one, two = length_ratio(), length_ratio(num_agents=3, style="plain")
    train, evaluation = ([row["prompt"] for row in rows] for rows in (one.train_rows, one.eval_rows))
    assert len(set(train + evaluation)) == len(train) + len(evaluation) >= 32
    assert len(evaluation) >= 8
    assert 4 * len(evaluation) == len(train) + len(evaluation)
    assert (two.train_rows, two.eval_rows) == (one.train_rows, one.eval_rows)
    everything = " ".join(train + evaluation).lower()
    for subject in (
        "a city in the clouds",
        "a new holiday",
        "a dragon's bedtime story",
        "a playground on mars",
    ):
        assert subject in everything
    assert all("\n" not in prompt and len(prompt) < 60 for prompt in train + evaluation)


def test_prompts_name_roles_and_not_the_rule():
    task = length_ratio(num_agents=4)
    row = task.train_rows[0]
    prompts = [formatter(row) for formatter in task.formatters]
    assert all([message["role"] for message in prompt] == ["system", "user"] for prompt in prompts)
    assert all(prompt[1]["content"] == row["prompt"] for prompt in prompts)
    roles = [prompt[0]["content"] for prompt in prompts]
    assert "few words" in roles[0]
    assert "couple of sentences" in roles[1]
    for role in roles:
        assert len(role.split()) < 12
        assert not {"ratio", "times", "characters", "longer", "length"} & set(role.lower().strip(".").split())
    assert [formatter(row) for formatter in length_ratio(style="plain").formatters] == [row["prompt"]] * 2


def test_feedback_continues_each_agents_own_conversation():
    task = length_ratio()
    row = task.train_rows[0]
    first = [formatter(row) for formatter in task.formatters]
    second = task.transition(
        prompt=row["prompt"],
        agent_completions=["abc", "defgh"],
        num_agents=2,
        prompt_history_per_agent=[[prompt] for prompt in first],
        response_history_per_agent=[["abc"], ["defgh"]],
        batch_item=row,
    )
    for agent, own in enumerate(["abc", "defgh"]):
        assert second[agent][:2] == first[agent]
        assert second[agent][2] == {"role": "assistant", "content": own}
        assert second[agent][3]["role"] == "user"
    assert second[0][3]["content"] == "You wrote 3 characters, the others 5. Answer again."
    assert second[1][3]["content"] == "You wrote 5 characters, the others 3. Answer again."
    third = task.transition(
        prompt=row["prompt"],
        agent_completions=["x", "yy"],
        num_agents=2,
        prompt_history_per_agent=[list(pair) for pair in zip(first, second)],
        response_history_per_agent=[["abc", "x"], ["defgh", "yy"]],
        batch_item=row,
    )
    assert [prompt[:4] for prompt in third] == second
    assert third[1][4:] == [
        {"role": "assistant", "content": "yy"},
        {"role": "user", "content": "You wrote 2 characters, the others 1. Answer again."},
    ]
    short = task.transition(prompt=row["prompt"], agent_completions=["abc", "defgh"], num_agents=2)
    assert short == second  # histories and row are optional
    assert len(first[0]) == 2  # the first prompts are left alone


def test_plain_feedback():
    task = length_ratio(num_agents=3, style="plain")
    prompts = task.transition(prompt="Go.", agent_completions=["a", "bb", "ccc"], num_agents=3)
    assert prompts[1] == "Go.\nYou wrote 2 characters, the others 1 and 3. Answer again.\n"
    assert len(prompts) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_agents": 1}, "num_agents=1: .* at least 2"),
        ({"low": 4.0}, r"task_args\.low=4\.0, task_args\.high=3\.0: must be 0 < low <= high"),
        ({"low": 0.0}, r"must be 0 < low <= high"),
        ({"min_chars": -1}, r"task_args\.min_chars=-1"),
        ({"style": "prose"}, r"task_args\.style='prose'"),
    ],
)
def test_length_ratio_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        length_ratio(**arguments)


# --- matrix games ---


def test_answers_are_read_by_their_first_byte():
    assert [SYMBOLS[read_symbol(letter)] for letter in "abcd"] == list("abcd")
    assert read_symbol("cz") == read_symbol("c")
    assert read_symbol("") is None
    assert {read_symbol(chr(code)) for code in range(256)} == {0, 1, 2, 3}


@pytest.mark.parametrize("num_agents", [2, 3])
def test_pairing_equilibria(num_agents):
    task = pairing(num_agents=num_agents, rows=8)
    for row in task.train_rows:
        scores = {joint: score_pairing(row, joint)[0] for joint in itertools.product("abcd", repeat=num_agents)}
        # One matching joint answer for each first symbol; two of them are best.
        assert sorted(scores.values(), reverse=True)[:5] == [1.0, 1.0, 0.5, 0.5, 0.0]
        assert len({joint[0] for joint, value in scores.items() if value}) == 4
        assert np.mean(list(scores.values())) == pytest.approx(task.trivial["uniform policy"])
        assert scores[tuple(task.reference(row))] == task.maximum
    assert task.trivial["the same letter from every agent"] == 0.0
    assert task.trivial["empty answers"] == 0.0


def test_trivial_scores_of_the_default_game():
    task = pairing()
    assert task.trivial["uniform policy"] == 0.1875
    blind = max(
        np.mean([score_pairing(row, joint)[0] for row in task.train_rows])
        for joint in itertools.product("abcd", repeat=2)
    )
    assert task.trivial["the best joint answer that ignores the prompt"] == blind < 1.0


def test_pairing_by_hand():
    row = {"prompt": "0>", "pairing": [1, 2, 3, 0], "best": [1, 2]}  # symbols d, a, b, c
    assert score_pairing(row, ["a", "b"]) == (1.0, {"match": 1.0, "best": 1.0, "valid": 1.0})
    assert score_pairing(row, ["d", "a"]) == (0.5, {"match": 1.0, "best": 0.0, "valid": 1.0})
    assert score_pairing(row, ["a", "a"]) == (0.0, {"match": 0.0, "best": 1.0, "valid": 1.0})
    assert score_pairing(row, ["a", ""]) == (0.0, {"match": 0.0, "best": 0.0, "valid": 0.0})
    assert score_pairing(row, ["a", "b", "c"])[0] == 1.0
    assert score_pairing(row, ["a", "b", "d"])[0] == 0.0
    assert score_pairing({**row, "answer_before": 3}, ["a", "a"])[0] == 1.0  # partner b, shifted by 3


def test_seeds_draw_different_games():
    assert pairing(seed=1).train_rows == pairing(seed=1).train_rows
    assert pairing(seed=1).train_rows != pairing(seed=2).train_rows


def test_second_turn_depends_on_the_first_answer():
    task = two_turn()
    row = task.train_rows[0]
    by_prompt = {}
    for said in "abcd":
        prompts = task.transition(prompt=row["prompt"], agent_completions=[said, "a"], num_agents=2, batch_item=row)
        assert prompts == [f"0>{said}>"] * 2
        joints = list(itertools.product("abcd", repeat=2))
        rewards = task.reward(
            [joint[0] for joint in joints],
            [joint[1] for joint in joints],
            batch_items=[row] * len(joints),
            prompts=[prompts[0]] * len(joints),
        )
        by_prompt[said] = frozenset(joint for joint, reward in zip(joints, rewards) if reward["reward"] == 1.0)
    assert len(set(by_prompt.values())) == 4  # another answer before, another pairing
    first_turn = task.reward(["d"], ["a"], batch_items=[row], prompts=[row["prompt"]])
    assert first_turn[0]["reward"] == total(pairing(), "d", "a", row=row)
    assert task.transition(prompt="0>", agent_completions=["", "a"], num_agents=2) == ["0>d>"] * 2


def test_two_turn_needs_to_know_the_turn():
    task = two_turn()
    row = task.train_rows[0]
    with pytest.raises(ValueError, match="reward needs prompts"):
        task.reward(["a"], ["b"], batch_items=[row])
    for prompt in ("1>", "0>e>", "0>a>b>", [{"role": "user", "content": "0>"}]):
        with pytest.raises(ValueError, match="belongs to no turn"):
            task.reward(["a"], ["b"], batch_items=[row], prompts=[prompt])


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(pairing, {"num_agents": 1}), (two_turn, {"rows": 0}), (pairing, {"rows": 11})],
)
def test_matrix_games_refuse(function, arguments):
    with pytest.raises(ValueError, match=f"{next(iter(arguments))}={next(iter(arguments.values()))}"):
        function(**arguments)


def test_a_table_of_logits_learns_the_pairing():
    """REINFORCE with a group-mean baseline from uniform policies: the reward has enough signal to begin."""
    task = pairing()
    generator = np.random.default_rng(0)
    logits = np.zeros((2, len(task.train_rows), 4))
    rows, samples = np.arange(len(task.train_rows)), 16
    for _ in range(150):
        probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        actions = np.array(
            [[generator.choice(4, samples, p=probabilities[agent, row]) for row in rows] for agent in range(2)]
        )
        for row in rows:
            letters = [[SYMBOLS[action] for action in actions[agent, row]] for agent in range(2)]
            rewards = task.reward(*letters, batch_items=[task.train_rows[row]] * samples)
            values = np.array([reward["reward"] for reward in rewards])
            for agent in range(2):
                scores = np.eye(4)[actions[agent, row]] - probabilities[agent, row]
                logits[agent, row] += ((values - values.mean())[:, None] * scores).mean(0) * 4
    greedy = [[SYMBOLS[logits[agent, row].argmax()] for agent in range(2)] for row in rows]
    learned = np.mean([total(task, *texts, row=task.train_rows[row]) for row, texts in enumerate(greedy)])
    assert learned >= 0.875
    assert learned > task.trivial["the best joint answer that ignores the prompt"]


# --- loading and showing ---


@pytest.mark.parametrize("num_agents", [2, 3])
@pytest.mark.parametrize("name", TASKS)
def test_every_task_keeps_its_promises(name, num_agents):
    if name in PAIRS and num_agents != 2:
        with pytest.raises(ValueError, match=f"num_agents={num_agents}: .* 2 agents"):
            load_task(name, num_agents, {})
        return
    task = load_task(name, num_agents, {})
    assert task.name == name
    for row in [*task.train_rows, *task.eval_rows]:
        prompts = [formatter(row) for formatter in task.formatters]
        texts = task.reference(row)
        assert len(prompts) == len(texts) == num_agents
        columns = [[answer] for answer in texts]
        reward = task.reward(*columns, batch_items=[row], prompts=prompts[:1])[0]["reward"]
        assert reward == pytest.approx(task.maximum, abs=1e-9)
    assert min(task.trivial.values()) < task.maximum
    copy = pickle.loads(pickle.dumps(task))  # a reward may run in a process of its own
    assert copy.train_rows == task.train_rows


def test_the_reference_follows_the_arguments():
    task = load_task("length_ratio", 3, {"min_chars": 50, "low": 1.2, "high": 1.4})
    assert all(total(task, *task.reference(row)) == 1.0 for row in task.eval_rows)


@pytest.mark.parametrize(
    ("spec", "arguments", "message"),
    [
        ("length_ratoi", {}, "^task='length_ratoi': unknown task; did you mean 'length_ratio'\\?$"),
        ("chess", {}, "one of length_ratio, pairing, two_turn, .*, or file.py:name"),
        (
            "length_ratio",
            {"min_char": 2},
            r"^unknown key task_args\.min_char: did you mean task_args\.min_chars\?$",
        ),
        ("pairing", {"zzz": 2}, r"^unknown key task_args\.zzz: pairing takes rows, seed$"),
        ("length_ratio", {"min_chars": "a"}, r"^task_args\.min_chars='a': expected int, got str$"),
        ("length_ratio", {"style": "prose"}, r"^task_args\.style='prose': expected 'chat' \| 'plain'"),
        ("length_ratio", {"num_agents": 3}, r"^task_args\.num_agents: set num_agents of the run instead$"),
        ("nowhere.py:task", {}, "no module or file 'nowhere.py'"),
    ],
)
def test_messages_of_load_task(spec, arguments, message):
    with pytest.raises(ValueError, match=message):
        load_task(spec, 2, arguments)


USER_TASK = """
from __future__ import annotations
from typing import TYPE_CHECKING
from comlrl.tasks import Task
if TYPE_CHECKING:
    from somewhere import Style

def prompt_of(row):
    return row["prompt"]

def score(row, texts):
    return float(len(set(texts)) == 1), {}

def same(num_agents, word, size=2, style: Style | None = None):
    rows = [{"prompt": word}] * size
    return Task("same", rows, rows, [prompt_of] * num_agents, score, maximum=1.0)

def anything(**options):
    return same(options["num_agents"], options["word"])

def few(num_agents):
    return same(1, "x")

def empty(num_agents):
    return same(num_agents, "x", size=0)

def no_task(num_agents):
    return {"rows": num_agents}

def no_agents(word="x"):
    return same(2, word)
"""


def test_tasks_of_a_user(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(USER_TASK)
    monkeypatch.chdir(tmp_path)
    task = load_task("mine.py:same", 3, {"word": "hi", "style": "x"})
    assert (len(task.formatters), len(task.train_rows)) == (3, 2)
    assert task.reward(["a", "a"], ["a", "b"], ["a", "a"], batch_items=[{}, {}]) == [
        {"reward": 1.0},
        {"reward": 0.0},
    ]
    assert load_task("mine.py:anything", 2, {"word": "hi"}).train_rows[0] == {"prompt": "hi"}
    for name, arguments, message in [
        ("same", {}, r"^task_args\.word: mine\.py:same needs a value for it$"),
        ("same", {"word": "x", "sise": 1}, r"^unknown key task_args\.sise: did you mean task_args\.size\?$"),
        ("few", {"x": 1}, r"mine\.py:few takes none"),
        ("few", {}, "1 formatters for num_agents=2"),
        ("empty", {}, "train_rows is empty"),
        ("no_task", {}, r"must return a comlrl\.tasks\.Task, got dict"),
        ("no_agents", {}, "the function needs a parameter num_agents"),
        ("sam", {}, "has no 'sam'; did you mean 'same'"),
    ]:
        with pytest.raises(ValueError, match=message):
            load_task(f"mine.py:{name}", 2, arguments)
    main(["mine.py:same", "word=hi", "--show", "1"])
    assert "agent 1 is asked    'hi'" in capsys.readouterr().out


def test_show(capsys):
    main(["length_ratio", "--show", "2", "min_chars=20", "--num-agents", "3"])
    shown = capsys.readouterr().out
    assert "length_ratio: 24 training rows, 8 evaluation rows" in shown
    assert "the same text from every agent: 0.3679" in shown
    assert shown.count("agent 2 is asked    system: Answer in a long paragraph. | user: ") == 2
    assert shown.count("score  reward 1, ratio 2.5") == 2
    assert "assistant: " in shown
    main(["two_turn", "--show", "1"])
    shown = capsys.readouterr().out
    assert "uniform policy: 0.1875" in shown
    assert "agent 1 is asked    '0>'" in shown
    assert "agent 1 is then asked  '0>" in shown


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["lenght_ratio"], "error: task='lenght_ratio': unknown task; did you mean 'length_ratio'?\n"),
        (
            ["pairing", "rows=99"],
            "error: task_args.rows=99: must be from 1 to 10, a row is asked for by its digit\n",
        ),
        (["pairing", "rows"], "error: override 'rows': write key=value or section.key=value\n"),
        (
            ["length_ratio", "--num-agents", "1"],
            "error: num_agents=1: length_ratio compares agents, so it needs",
        ),
    ],
)
def test_mistakes_at_the_command_are_one_line(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(argv)
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(message)
    assert printed.count("\n") == 1
