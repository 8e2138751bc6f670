"""Writing tasks: the published levels by hand, what the sound profile adds, and answers that try to cheat."""

import json

import pytest

from comlrl.tasks.writing import LEVELS, Ramp, arxiv, source_factor, tldr, transition_kinds, words_of
from comlrl.tasks.writing_rows import ABSTRACTS, POSTS, STOPWORDS, TRANSITIONS


def score(task, first, second, source="x"):
    return task.score({"prompt": source}, [first, second])


def numbered(count, start=0, letters=3):
    """`count` different words of `letters` characters."""
    return " ".join(f"{'a' * (letters - 3)}{i:03d}" for i in range(start, start + count))


# --- published levels by hand ---


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1.1, 0), (1.35, 0.5), (1.6, 1), (2, 1), (3.2, 1), (4.1, 0.5), (5, 0), (9, 0), (0, 0)],
)
def test_length_ramp_of_tldr(value, expected):
    assert LEVELS["tldr"].length_ratio(value) == pytest.approx(expected)


@pytest.mark.parametrize(("value", "expected"), [(0.5, 0), (0.6, 0.5), (0.7, 1), (1.3, 1), (1.5, 0.5), (1.7, 0)])
def test_unique_ramp_of_arxiv(value, expected):
    assert LEVELS["arxiv"].unique_ratio(value) == pytest.approx(expected)


def test_open_ramp():
    assert Ramp(1.3, 2.0, float("inf"), float("inf"))(100.0) == 1.0


def test_levels_gate_each_other():
    task = tldr(profile="published")
    ten = numbered(10)  # 39 characters, 10 distinct words
    assert score(task, numbered(7), numbered(20))[0] == 0.0  # too short: everything is lost
    assert score(task, ten, numbered(300))[0] == 0.0  # too long
    assert score(task, ten, ten)[0] == 0.5  # not longer
    assert score(task, ten, ("000 " * 25).strip())[0] == 1.5  # longer, but no more distinct words
    # 25 words, ten of them in common: J = 10 / 25 is above 0.03; no transitions.
    assert score(task, ten, numbered(25))[0] == pytest.approx(0.5 + 1 + 0.5 + 0.6)
    assert score(task, ten, numbered(25, start=50))[0] == pytest.approx(2.0)  # nothing in common
    # 16 distinct words to 10: (1.6 - 1.3) / 0.7 of the third level; 71 characters to 39.
    total, parts = score(task, ten, numbered(16) + " 000 001")
    assert parts["unique"] == pytest.approx(3 / 7)
    assert total == pytest.approx(0.5 + 1 + 0.5 * 3 / 7 + 0.6)


def test_transitions_count_kinds_as_whole_words():
    task = tldr(profile="published")
    ten = numbered(10)
    second = f"{numbered(20)} however therefore"
    total, parts = score(task, ten, second)
    assert parts["transition_kinds"] == 2
    assert total == pytest.approx(0.5 + 1 + 0.5 + 0.4 * 0.45 + 0.6)
    assert score(task, f"{ten} however", numbered(25))[1]["transition_kinds"] == 0  # tldr looks at text 2 only
    assert arxiv().score({"prompt": "x"}, ["however", "x"])[1]["transition_kinds"] == 1  # arxiv at both
    assert transition_kinds("nextdoor thusly indeedx whence") == 0
    assert transition_kinds("In  addition,\nfor\texample") == 2
    assert transition_kinds(" ".join(group[0] for group in TRANSITIONS.values())) == 12
    assert transition_kinds(numbered(50)) == 0


def test_texts_are_not_joined_into_a_phrase():
    task = arxiv(profile="published")
    assert score(task, "on the other", "handy")[1]["transition_kinds"] == 0
    assert score(task, "howe", "ver")[1]["transition_kinds"] == 0


def test_empty_word_sets_are_the_same():
    assert score(tldr(profile="published"), "the a of", "the a of")[1]["common"] == 1.0


# --- the sound profile ---


def test_source_factor_by_hand():
    source = "Three otters crossed a frozen river at dawn while the village slept under heavy snow."
    good = "Some otters were on the river in the snow, and the village slept."
    assert source_factor(good, source) == 1.0
    assert source_factor("", source) == 0.0
    assert source_factor("the of and in", source) == 0.0  # no content words
    assert source_factor(source, source) == 0.0  # a copy
    assert source_factor("the unicorns and the teapots were in a spaceship", source) == 0.0  # nothing of the source
    assert source_factor("otters river snow village dawn slept frozen heavy", source) == 0.0  # a bare list
    assert source_factor("the otters " * 40, source) == 0.0  # the same words again and again
    # Three of ten content words are known: (0.3 - 0.1) / 0.4; the other factors are 1.
    mixed = "the otters and the river in the snow with the b of the c and d e f g h"
    assert source_factor(mixed, source) == pytest.approx(0.5)


def test_half_copied_texts():
    source = " ".join(f"w{i}" for i in range(40))
    words = source.split()
    # Of 17 words ten are a copied run of ten: 3 of 10 runs of eight are in the source, so fresh is 1.
    text = " ".join(words[:10] + ["the", "w20", "and", "w22", "of", "w24", "the"])
    assert source_factor(text, source) == 1.0
    # 14 copied words: 7 of 8 runs, fresh = (1 - 7/8) / 0.5; a stopword in 15 words: (1/15 - 0.05) / 0.15.
    text = " ".join([*words[:14], "the"])
    assert source_factor(text, source) == pytest.approx(0.25 * (1 / 15 - 0.05) / 0.15)


def test_invisible_and_wide_characters_are_no_way_out():
    assert words_of("ｈｏｗ​ever Caf\u00e9") == ["however", "café"]
    source = POSTS[0]
    hidden = "​".join(source)  # a zero-width space between all letters
    assert source_factor(hidden, source) == 0.0


@pytest.mark.parametrize(("make", "rows"), [(tldr, POSTS), (arxiv, ABSTRACTS)])
def test_what_trivial_answers_score(make, rows):
    sound, published = make().trivial, make(profile="published").trivial
    assert set(sound.values()) == {0.0}
    assert published["empty answers"] == 0.0
    assert published["invented words and transitions"] > 2.3  # the published formula never reads the source
    assert published["the source, copied to fitting lengths"] > 2.5
    for text in ("", " ", "\x00", "🦦" * 500, "a" * 10**6, "word " * 10**5, rows[0] * 100):
        assert make().score({"prompt": rows[0]}, [text, text])[0] == 0.0


@pytest.mark.parametrize("make", [tldr, arxiv])
@pytest.mark.parametrize("profile", ["sound", "published"])
def test_references_earn_the_maximum(make, profile):
    task = make(profile=profile)
    for row in [*task.train_rows, *task.eval_rows]:
        assert task.score(row, task.reference(row))[0] == pytest.approx(task.maximum)
        assert task.score(row, task.reference(row)[::-1])[0] < task.maximum - 1


def test_texts_that_repeat_each_other_lose():
    task = arxiv()
    row = task.train_rows[0]
    first, second = task.reference(row)
    assert task.score(row, [second, second])[1]["distinct"] == 0.0
    mixed = task.score(row, [first, f"{second} {first}"[:1400]])[1]
    assert mixed["distinct"] < 1.0


# --- rows and prompts ---


def test_builtin_rows():
    for texts, low in ((POSTS, 60), (ABSTRACTS, 95)):
        assert len(set(texts)) == len(texts) == 8
        assert all(low < len(text.split()) < 200 for text in texts)
    assert len(tldr().train_rows) == 6
    assert len(arxiv().eval_rows) == 2
    assert "the" in STOPWORDS


def test_prompts_hold_role_and_source():
    task = arxiv()
    row = task.train_rows[0]
    prompts = [formatter(row)[0]["content"] for formatter in task.formatters]
    assert "background and motivation" in prompts[0]
    assert "method and the implications" in prompts[1]
    assert all(prompt.endswith(row["abstract_text"]) for prompt in prompts)
    assert tldr(style="plain").formatters[0](row).endswith("\n\n")


def test_rows_of_files(tmp_path):
    train, evaluation = tmp_path / "train.jsonl", tmp_path / "eval.json"
    train.write_text("".join(json.dumps({"prompt": post}) + "\n" for post in POSTS[:5]))
    evaluation.write_text(json.dumps([{"prompt": post} for post in POSTS[5:]]))
    task = tldr(dataset=str(train), eval_dataset=str(evaluation), eval_rows=2)
    assert (len(task.train_rows), len(task.eval_rows)) == (5, 2)
    assert len(tldr(dataset=str(train)).eval_rows) == 1
    with pytest.raises(ValueError, match="row 0 lacks abstract_text"):
        arxiv(dataset=str(train))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_agents": 3}, "num_agents=3: tldr is written by 2 agents"),
        ({"profile": "x"}, r"task_args\.profile='x'"),
        ({"train_rows": 0}, r"task_args\.train_rows=0"),
        ({"dataset": "./nowhere"}, r"task_args\.dataset='\./nowhere': no such file"),
        ({"dataset": "hub"}, r"task_args\.dataset='trl-lib/tldr': neither a file nor a data set that could be read"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises(ValueError, match=message):
        tldr(**arguments)
