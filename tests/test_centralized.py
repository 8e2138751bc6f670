"""One coordinator writes every role's answer: what it reads, how its text is cut, and what garbage costs."""

import pytest

import comlrl.rollouts
from comlrl.centralized import (
    CentralizedComparatorParseError,
    Coordinator,
    TaggedCentralizedComparatorAdapter,
)
from comlrl.generation import Completion, Sampling
from comlrl.loading import build_formatters
from comlrl.rewards import Rewards
from comlrl.rollouts import Rollouts, TreeShape, walk

ADAPTER = TaggedCentralizedComparatorAdapter()


def parse(text, count=2):
    return ADAPTER.parse_completion(text, {}, count)


# --- the tags ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<agent_0>a</agent_0><agent_1>b</agent_1>", ["a", "b"]),
        ("<agent_1>b</agent_1> then <agent_0>a</agent_0>", ["a", "b"]),  # any order
        ("Sure!\n<agent_0>\n a \n</agent_0>\nand <agent_1>b</agent_1>. Bye", ["a", "b"]),  # text around
        ("<AGENT_0>a</Agent_0><agent_1>b</AGENT_1>", ["a", "b"]),  # case
        ("<agent_0>two\n\nlines</agent_0><agent_1>b</agent_1>", ["two\n\nlines", "b"]),
        ("<agent_1>b</agent_1>", ["", "b"]),  # missing
        ("<agent_0>a</agent_0><agent_0>again</agent_0><agent_1>b</agent_1>", ["a", "b"]),  # duplicate
        ("<agent_0>a</agent_0><agent_1>cut of", ["a", "cut of"]),  # unclosed last
        ("<agent_0>a<agent_1>b</agent_1>", ["a", "b"]),  # unclosed first
        ("<agent_0>a</agent_1><agent_1>b</agent_1>", ["a</agent_1>", "b"]),  # closed by another's tag
        ("<agent_0></agent_0><agent_1> </agent_1>", ["", ""]),  # empty is an answer
        ("<agent_0>1 < 2 & <b>x</b></agent_0><agent_1>b</agent_1>", ["1 < 2 & <b>x</b>", "b"]),
        ("<agent_0>a</agent_0><agent_7>?</agent_7><agent_1>b</agent_1>", ["a", "b"]),  # a role that is not
        ("<agent_0>a</agent_0><agent_10>?</agent_10>", ["a", ""]),  # 10 is not 1
    ],
)
def test_tagged_sections(text, expected):
    assert parse(text) == expected


@pytest.mark.parametrize("text", ["", "no tags", "</agent_0>", "<agent_2>x</agent_2>", "<agent_>x", "agent_0: x"])
def test_no_section_at_all_is_a_parse_error(text):
    with pytest.raises(CentralizedComparatorParseError, match="no <agent_i> section"):
        parse(text)


def test_a_long_unclosed_answer_is_parsed_in_no_time():
    assert parse("<agent_0>" + "<" * 20_000) == ["<" * 20_000, ""]


def test_the_prompt_holds_every_role_s_task_and_the_form():
    prompt = ADAPTER.build_prompt({}, ["write X", "test X"])
    assert "Task of agent 0:\nwrite X" in prompt
    assert "Task of agent 1:\ntest X" in prompt
    assert "<agent_0>" in prompt
    assert "</agent_1>" in prompt
    chat = ADAPTER.build_prompt(
        {}, [[{"role": "system", "content": "be short"}, {"role": "user", "content": "X"}], "Y"]
    )
    assert [message["role"] for message in chat] == ["user"]
    assert "be short\nX" in chat[0]["content"]
    assert "Task of agent 1:\nY" in chat[0]["content"]


# --- adapters of users ---


class Halves:
    """An adapter without base class: the first half of the text is role 0's."""

    def __init__(self, returned=None, prompt="p"):
        self.returned, self.prompt = returned, prompt

    def build_prompt(self, batch_item, agent_prompts):
        return self.prompt

    def parse_completion(self, completion, batch_item, num_agents):
        return self.returned


class NoParser:
    def build_prompt(self, batch_item, agent_prompts):
        return "p"


class NoBuilder:
    build_prompt = "p"

    def parse_completion(self, completion, batch_item, num_agents):
        return []


@pytest.mark.parametrize(
    ("adapter", "missing"),
    [(NoParser(), "parse_completion"), (NoBuilder(), "build_prompt"), (object(), "build_prompt")],
)
def test_an_adapter_without_a_method_is_refused_at_once(adapter, missing):
    with pytest.raises(TypeError, match=f"has no method {missing}"):
        Coordinator(adapter, 2, None)


@pytest.mark.parametrize("prompt", ["", [], None])
def test_an_adapter_must_build_a_prompt(prompt):
    with pytest.raises(ValueError, match="build_prompt must return a non-empty prompt"):
        Coordinator(Halves(prompt=prompt), 2, None).prompts({}, ["a", "b"])


@pytest.mark.parametrize(
    ("returned", "error", "match"),
    [
        (["a"], ValueError, "returned 1 answers for 2 roles"),
        (["a", "b", "c"], ValueError, "returned 3 answers for 2 roles"),
        (["a", None], TypeError, "must return strings, not NoneType"),
        (["a", 3], TypeError, "must return strings, not int"),
        ("ab", TypeError, "must return a list of strings, not str"),  # not the roles' letters
        (None, TypeError, "must return a list of strings, not NoneType"),
        ({"a": "x", "b": "y"}, TypeError, "must return a list of strings, not dict"),
    ],
)
def test_what_an_adapter_may_return(returned, error, match):
    with pytest.raises(error, match=match):
        Coordinator(Halves(returned), 2, None).responses({}, ["text"])


def test_tuples_are_fine_and_bugs_of_an_adapter_are_not_parse_errors():
    assert Coordinator(Halves(("a", "b")), 2, None).responses({}, ["text"]) == (["a", "b"], None)

    class Buggy(Halves):
        def parse_completion(self, completion, batch_item, num_agents):
            raise KeyError("bug")

    coordinator = Coordinator(Buggy(), 2, None)
    with pytest.raises(KeyError, match="bug"):
        coordinator.responses({}, ["text"])
    assert coordinator.unparsable == 0


# --- in the rollout tree ---


def script(monkeypatch, texts):
    """The coordinator says these texts, sample after sample."""
    queue = iter(texts)

    def say(agent, requests, sampling, max_rows):
        said = [[next(queue) for _ in request.seeds] for request in requests]
        return [
            [Completion(agent.encode(text), text, [-1.0] * len(text), "length") for text in texts] for texts in said
        ]

    monkeypatch.setattr(comlrl.rollouts, "generate", say)


def build(agent, unparsable_reward=None, roles=2, formatters=None, transition=None, adapter=ADAPTER):
    calls = []

    def lengths(*completions, prompts=None):
        calls.append((prompts, completions))
        return [float(sum(map(len, texts))) for texts in zip(*completions)]

    team = Coordinator(adapter, roles, unparsable_reward)
    rollouts = Rollouts(
        [agent],
        Rewards(lengths, roles),
        build_formatters(formatters, roles),
        transition,
        team,
        prompt_limits=[1000],
    )
    return rollouts, calls


GOOD = "<agent_0>ab</agent_0><agent_1>xyz</agent_1>"


@pytest.mark.parametrize(
    ("policy", "value", "scored"),
    [(None, None, 1), ("skip", None, 1), (-2.5, -2.5, 1), (0.0, 0.0, 1), ("empty", 0.0, 2)],
)
def test_policies_for_what_cannot_be_parsed(load_agent, tiny, monkeypatch, policy, value, scored):
    script(monkeypatch, [GOOD, "garbage"])
    rollouts, calls = build(load_agent(tiny), policy)
    (root,), stats = rollouts.expand([(0, {"prompt": "p"})], TreeShape(num_generations=2), Sampling(), (0,))
    assert root.rewards == [5.0, value]
    assert root.responses == [["ab", "xyz"], ["", ""]]
    assert stats.unparsable == 1
    assert sum(len(completions[0]) for _, completions in calls) == scored
    assert stats.env_steps == (1 if value is None else 2)


def test_all_unparsable_makes_no_call(load_agent, tiny, monkeypatch):
    script(monkeypatch, ["x", "y"])
    rollouts, calls = build(load_agent(tiny), -1.0)
    (root,), stats = rollouts.expand([(0, {"prompt": "p"})], TreeShape(num_generations=2), Sampling(), (0,))
    assert root.rewards == root.returns == [-1.0, -1.0]
    assert calls == []
    assert stats.unparsable == 2


def test_two_turns_of_three_roles(load_agent, tiny, monkeypatch):
    """Roles have histories and prompts of their own; the coordinator reads one prompt a turn."""
    agent = load_agent(tiny)
    said = [f"<agent_0>a{i}</agent_0><agent_1>b{i}</agent_1><agent_2>c{i}</agent_2>" for i in range(6)]
    script(monkeypatch, said)
    seen = []

    def transition(prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent):
        seen.append((agent_completions, response_history_per_agent, prompt_history_per_agent))
        return [f"role {i}, you said {text}" for i, text in enumerate(agent_completions)]

    rollouts, calls = build(
        agent, roles=3, formatters=[lambda row, i=i: f"{i}: {row['prompt']}" for i in range(3)], transition=transition
    )
    shape = TreeShape(num_turns=2, num_generations=2, discount=0.5)
    (root,), stats = rollouts.expand([(0, {"prompt": "task"})], shape, Sampling(), (0,))
    assert root.role_prompts == ["0: task", "1: task", "2: task"]
    assert root.prompts == [ADAPTER.build_prompt({}, root.role_prompts)]
    assert root.prompt_ids == [agent.encode(root.prompts[0])]
    assert root.responses == [["a0", "b0", "c0"], ["a1", "b1", "c1"]]
    assert root.joint_actions == [(0,), (1,)]
    assert [past for _, past, _ in seen] == [[["a0"], ["b0"], ["c0"]], [["a1"], ["b1"], ["c1"]]]
    assert all(past == [["0: task"], ["1: task"], ["2: task"]] for _, _, past in seen)
    child = root.children[1]
    assert child.role_prompts[2] == "2: role 2, you said c1"
    assert "2: role 2, you said c1" in child.prompts[0]
    assert child.response_history == [["a1"], ["b1"], ["c1"]]
    assert child.responses == [["a4", "b4", "c4"], ["a5", "b5", "c5"]]
    assert root.returns == [6.0 + 0.5 * 6.0] * 2
    assert [len(completions) for _, completions in calls] == [3, 3, 3]
    assert calls[0][0] == ["0: task"] * 2
    assert stats.env_steps == 2 + 4


def test_an_unparsable_first_turn_without_reward_has_no_second(load_agent, tiny, monkeypatch):
    script(monkeypatch, ["garbage", GOOD, GOOD, GOOD])
    rollouts, _ = build(load_agent(tiny), transition=lambda **given: ["next"] * 2)
    shape = TreeShape(num_turns=2, num_generations=2)
    (root,), stats = rollouts.expand([(0, {"prompt": "p"})], shape, Sampling(), (0,))
    assert root.children[0] is None
    assert len(list(walk([root]))) == 2
    assert stats.unparsable == 1


def test_message_lists_become_one_chat_prompt(load_agent, tiny, monkeypatch):
    agent = load_agent(tiny)
    script(monkeypatch, [GOOD])
    rollouts, calls = build(agent, formatters=lambda row: [{"role": "user", "content": row["prompt"]}])
    (root,), _ = rollouts.expand([(0, {"prompt": "task"})], TreeShape(num_generations=1), Sampling(), (0,))
    text = agent.decode(root.prompt_ids[0])
    assert text.startswith("u:Task of agent 0:\ntask\n\nTask of agent 1:\ntask\n\n")
    assert text.endswith("\na:")
    assert calls[0][0] == ["task"]


def test_the_real_coordinator_samples_and_learns_from_its_own_text(load_agent, tiny):
    agent = load_agent(tiny)
    rollouts, _ = build(agent, "empty")
    shape = TreeShape(num_generations=3)
    (root,), stats = rollouts.expand([(0, {"prompt": "p"})], shape, Sampling(max_new_tokens=6), (0,))
    assert [len(completions) for completions in root.completions] == [3]
    assert root.rewards == [0.0] * 3
    assert stats.unparsable == 3
