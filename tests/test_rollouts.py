"""The rollout tree: its shape, what every agent was fed, who is rewarded for what."""

import itertools
import operator

import pytest
import torch

import comlrl.rollouts
from comlrl import credit
from comlrl.generation import Completion, Sampling, generate, left_pad, right_pad, sample_seed
from comlrl.loading import build_formatters
from comlrl.logprobs import completion_logprobs
from comlrl.rewards import Rewards
from comlrl.rollouts import Rollouts, Team, TreeShape, joint_actions, walk
from comlrl.trainers import MAGRPOConfig, MAGRPOTrainer

ROWS = [(0, {"prompt": "first row: "}), (1, {"prompt": "second"}), (2, {"prompt": "the third row"})]
SAMPLING = Sampling(max_new_tokens=4)
KEY = (0, "train", 0)


def score(texts):
    """A reward that depends on every character of every agent, and on who said it."""
    return (
        sum((agent + 1) * ord(c) * (i + 1) for agent, text in enumerate(texts) for i, c in enumerate(text)) % 1000 / 8
    )


def reward(*completions):
    return [score(texts) for texts in zip(*completions)]


def transition(prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent):
    return [f"{prompt} | {agent}: {agent_completions[agent]}" for agent in range(num_agents)]


def build(agents, reward=reward, formatters=None, transition=transition, roles=None, limit=500, **options):
    roles = roles or len(agents)
    return Rollouts(
        agents,
        Rewards(reward, roles),
        build_formatters(formatters, roles),
        transition,
        Team(roles),
        prompt_limits=[limit] * len(agents),
        **options,
    )


@pytest.fixture
def team(load_agent, tiny):
    """team(n): n agents on `tiny`."""
    return lambda count: [load_agent(tiny, f"agent_{i}") for i in range(count)]


def answers(node):
    return [[(c.token_ids, c.text) for c in completions] for completions in node.completions]


def every_node(roots):
    """The sampled nodes and the nodes of greedy chains."""
    for node in walk(roots):
        yield node
        while node.baseline is not None or node.greedy:
            node = node.baseline or next((child for child in node.children if child), None)
            if node is None:
                break
            yield node


# --- shape ---


@pytest.mark.parametrize("mode", ["aligned", "cross"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_sizes_and_paths_of_trees(team, count, mode):
    shape = TreeShape(num_turns=2, num_generations=2, joint_mode=mode)
    (root,), stats = build(team(count)).expand(ROWS[:1], shape, Sampling(max_new_tokens=2), KEY)
    expected = [(0,) * count, (1,) * count] if mode == "aligned" else list(itertools.product((0, 1), repeat=count))
    branches = len(expected)
    assert branches == (2 if mode == "aligned" else 2**count)
    nodes = list(walk([root]))
    assert [node.path for node in nodes] == [(), *((j,) for j in range(branches))]
    assert [node.turn for node in nodes] == [0] + [1] * branches
    for node in nodes:
        assert node.joint_actions == expected
        assert [len(completions) for completions in node.completions] == [2] * count
        assert len(node.responses) == len(node.rewards) == len(node.returns) == branches
        for action, said, value in zip(node.joint_actions, node.responses, node.rewards):
            assert said == [node.completions[agent][k].text for agent, k in enumerate(action)]
            assert value == score(said)
    assert stats.env_steps == branches + branches**2


def test_joint_actions():
    assert joint_actions(3, 2, "aligned") == [(0, 0), (1, 1), (2, 2)]
    assert joint_actions(2, 2, "cross") == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert joint_actions(1, 3, "cross") == [(0, 0, 0)]


def test_cross_credit_is_the_mean_over_the_joint_actions_that_hold_a_completion(team):
    """`cross` once credited the first K of the K^n returns."""
    shape = TreeShape(num_generations=3, joint_mode="cross")
    (root,), _ = build(team(2)).expand(ROWS[:1], shape, SAMPLING, KEY)
    table = torch.tensor(root.returns, dtype=torch.float64).view(3, 3)
    for agent in range(2):
        credits = credit.completion_credits(root.joint_actions, root.returns, agent, 3)
        assert credits == pytest.approx(table.mean(dim=1 - agent).tolist())


@pytest.mark.parametrize("greedy_baseline", [False, True])
def test_one_generation_call_an_agent_and_turn(team, monkeypatch, greedy_baseline):
    """Also the greedy baselines of all turns ride along, and token ids stay as they are."""
    calls = []

    def counted(agent, requests, sampling, max_rows):
        calls.append((agent.name, requests))
        return generate(agent, requests, sampling, max_rows)

    monkeypatch.setattr(comlrl.rollouts, "generate", counted)
    shape = TreeShape(num_turns=3, num_generations=2, greedy_baseline=greedy_baseline)
    roots, _ = build(team(2)).expand(ROWS, shape, SAMPLING, KEY)
    assert [name for name, _ in calls] == ["agent_0", "agent_1"] * 3
    given = {tuple(request.prompt_ids) for _, requests in calls for request in requests}
    nodes = list(every_node(roots))
    assert len(nodes) == 3 * (7 + (1 * 3 + 2 * 2 + 4 * 1 if greedy_baseline else 0))
    assert {tuple(ids) for node in nodes for ids in node.prompt_ids} == given


def test_token_ids_reach_training_as_they_were_generated(team, monkeypatch):
    """Five bytes that spell "<eos>"; their text would be encoded as the one end token."""
    spelled = list(map(team(1)[0].tokenizer.convert_tokens_to_ids, "<eos>"))
    given = []

    def spell(agent, requests, sampling, max_rows):
        given.extend((agent.name, request.prompt_ids) for request in requests)
        answer = Completion(spelled, agent.decode(spelled), [-1.0] * 5, "length")
        return [[answer for _ in request.seeds] for request in requests]

    agents = team(2)
    trainer = MAGRPOTrainer(
        agents=[agent.model for agent in agents],
        tokenizer=[agent.tokenizer for agent in agents],
        reward_func=reward,
        train_dataset=[row for _, row in ROWS],
        external_transition=transition,
        args=MAGRPOConfig(num_turns=2, num_generations=2, max_new_tokens=8),
    )
    monkeypatch.setattr(comlrl.rollouts, "generate", spell)
    (root,), _ = trainer.rollouts.expand(ROWS[:1], trainer.shape, trainer.sampling, KEY)
    assert agents[0].encode(root.responses[0][0]) == [agents[0].tokenizer.eos_token_id]
    rows = [
        (agent.name, sample.prompt_ids, sample.token_ids)
        for node in walk([root])
        for i, agent in enumerate(agents)
        for sample in trainer.samples(node, i)
    ]
    assert len(rows) == 3 * 2 * 2
    assert all(token_ids == spelled for _, _, token_ids in rows)
    assert {(name, *ids) for name, ids, _ in rows} == {(name, *ids) for name, ids in given}


def test_after_branch_once_every_path_is_one_trajectory(team):
    shape = TreeShape(num_turns=3, num_generations=3, branch_once=True)
    (root,), _ = build(team(2)).expand(ROWS[:1], shape, SAMPLING, KEY)
    assert [len(node.joint_actions) for node in walk([root])] == [3] + [1] * 6


def test_agents_of_other_sizes_vocabularies_and_tokenizers(load_agent, tiny, tiny_other, gpt2):
    """Each agent's ids come from its own tokenizer and go to its own model."""
    agents = [load_agent(folder, f"agent_{i}") for i, folder in enumerate((tiny, tiny_other, gpt2))]
    shape = TreeShape(num_turns=2, num_generations=2)
    rows = [(0, {"prompt": "a<x>b"})]
    (root,), _ = build(agents).expand(rows, shape, Sampling(max_new_tokens=30), KEY)
    assert [len(ids) for ids in root.prompt_ids] == [5, 3, 5]
    assert max(root.prompt_ids[1]) >= 258
    for node in walk([root]):
        for agent, prompt, ids, completions in zip(agents, node.prompts, node.prompt_ids, node.completions):
            assert ids == agent.tokenizer(prompt)["input_ids"]
            assert completions[0].text == agent.decode(completions[0].token_ids)
            for completion in completions:
                batch = left_pad([ids], agent.pad_id, agent.device)
                answer = right_pad([completion.token_ids], agent.pad_id, agent.device)
                expected, _ = completion_logprobs(agent.model, *batch, *answer, torch.tensor([0]))
                assert completion.logprobs == pytest.approx(expected[0].tolist(), abs=1e-5)


# --- what is fed, and what is remembered ---


def test_histories_equal_what_was_fed(team):
    """Per role and branch, the formatted prompts and the answers of that branch only."""
    agents = team(2)
    seen = []

    def formatter_a(row):
        return f"A<{row['prompt']}>"

    def formatter_b(row, external_prompts=None):
        return f"B<{row['prompt']}|{external_prompts}>"

    def recording(**given):
        seen.append(given)
        return [f"next {i} of {given['agent_completions']}" for i in range(2)]

    rollouts = build(agents, formatters=[formatter_a, formatter_b], transition=recording)
    shape = TreeShape(num_turns=3, num_generations=2)
    roots, _ = rollouts.expand(ROWS[:2], shape, SAMPLING, KEY)
    parents = {(node.row_id, node.path): node for node in walk(roots)}
    assert len(seen) == 2 * (2 + 4)
    for node in walk(roots):
        lineage = [parents[node.row_id, node.path[:t]] for t in range(node.turn + 1)]
        for role in range(2):
            assert node.prompt_history[role] == [ancestor.prompts[role] for ancestor in lineage]
            assert node.response_history[role] == [
                ancestor.responses[j][role] for ancestor, j in zip(lineage, node.path)
            ]
            assert agents[role].encode(node.prompts[role]) == node.prompt_ids[role]
        assert node.reward_history == [ancestor.rewards[j] for ancestor, j in zip(lineage, node.path)]
        if node.turn:
            parent = lineage[-2]
            asked = f"next 0 of {parent.responses[node.path[-1]]}"
            assert node.prompts[0] == f"A<{asked}>"
            other = asked.replace("next 0", "next 1")
            assert node.prompts[1] == f"B<{other}|{other}>"
    assert roots[0].prompts == ["A<first row: >", "B<first row: |None>"]
    for given, (parent, j) in zip(seen, ((p, j) for p in walk(roots) if p.turn < 2 for j in range(2))):
        assert given["prompt"] == parent.row["prompt"]  # the row's own, in every turn
        assert given["agent_completions"] == parent.responses[j]
        assert given["num_agents"] == 2
        assert given["prompt_history_per_agent"] == parent.prompt_history
        assert [past[-1] for past in given["response_history_per_agent"]] == parent.responses[j]
        assert [past[:-1] for past in given["response_history_per_agent"]] == parent.response_history
        assert given["batch_item"] is parent.row
        assert given["rewards"] == [*parent.reward_history, parent.rewards[j]]
        assert given["turn"] == parent.turn + 1


def test_a_formatter_of_a_later_turn_sees_both_prompts(team):
    views = []

    def formatter(row):
        views.append(row)
        return row["prompt"]

    build(team(1), formatters=formatter).expand(
        [(0, {"prompt": "hello", "answer": 42})], TreeShape(num_turns=2, num_generations=1), SAMPLING, KEY
    )
    first, second = views
    assert first == {"prompt": "hello", "answer": 42}
    assert second["_original_prompt"] == "hello"
    assert second["answer"] == 42
    assert second["prompt"].startswith("hello | 0: ")


def test_what_a_transition_does_to_its_lists_stays_with_it(team):
    def careless(prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent):
        agent_completions.clear()
        prompt_history_per_agent[0].append("x")
        response_history_per_agent[0].append("x")
        return ["next"] * num_agents

    rollouts = build(team(1), transition=careless)
    (root,), _ = rollouts.expand(ROWS[:1], TreeShape(num_turns=2, num_generations=2), SAMPLING, KEY)
    for node in walk([root]):
        assert len(node.prompt_history[0]) == node.turn + 1
        assert len(node.response_history[0]) == node.turn
        assert all(node.responses)


@pytest.mark.parametrize("form", ["published", "by name", "keywords"])
def test_forms_of_external_transitions(team, form):
    seen = []

    def published(prompt, agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent):
        seen.append(None)
        return ["p"] * num_agents

    def by_name(*, turn, rewards, batch_item, agent_completions):
        seen.append((turn, rewards, batch_item["prompt"]))
        return ["p"] * len(agent_completions)

    def keywords(**kwargs):
        seen.append((kwargs["turn"], kwargs["rewards"], kwargs["batch_item"]["prompt"]))
        return ("p",) * kwargs["num_agents"]

    function = {"published": published, "by name": by_name, "keywords": keywords}[form]
    rollouts = build(team(2), transition=function)
    (root,), _ = rollouts.expand(ROWS[:1], TreeShape(num_turns=2, num_generations=2), SAMPLING, KEY)
    expected = [None, None] if form == "published" else [(1, [r], "first row: ") for r in root.rewards]
    assert seen == expected


@pytest.mark.parametrize("returned", [["one"], ["a", "b", "c"], "ab", None, ["a", None], {"a": 1, "b": 2}])
def test_a_transition_that_returns_something_else_is_told_so(team, returned):
    rollouts = build(team(2), transition=lambda **given: returned)
    with pytest.raises(ValueError, match=r"must return a list of 2 prompts, one an agent.*row 0, turn 1, node root"):
        rollouts.expand(ROWS[:1], TreeShape(num_turns=2, num_generations=1), SAMPLING, KEY)


def test_passthrough_leaves_the_formatter_out_of_later_turns(team):
    def formatter(row):
        return f"<{row['prompt']}>"

    for passthrough, expected in ((True, "next"), (False, "<next>")):
        rollouts = build(team(1), formatters=formatter, transition=lambda **given: ["next"], passthrough=passthrough)
        (root,), _ = rollouts.expand(ROWS[:1], TreeShape(num_turns=2, num_generations=1), SAMPLING, KEY)
        assert root.prompts == ["<first row: >"]
        assert root.children[0].prompts == [expected]


def test_message_lists_from_formatters_and_transitions(team):
    agents = team(2)

    def chat(prompt, agent_completions, prompt_history_per_agent, **rest):
        return [
            [*past[-1], {"role": "assistant", "content": said}, {"role": "user", "content": "again"}]
            for past, said in zip(prompt_history_per_agent, agent_completions)
        ]

    seen = []

    def with_prompts(c1, c2, prompts):
        seen.append(prompts)
        return [0.0] * len(c1)

    rollouts = build(
        agents,
        reward=with_prompts,
        formatters=lambda row: [{"role": "user", "content": row["prompt"]}],
        transition=chat,
    )
    (root,), _ = rollouts.expand(ROWS[:1], TreeShape(num_turns=2, num_generations=2), SAMPLING, KEY)
    assert agents[0].decode(root.prompt_ids[0]) == "u:first row: \na:"
    for j, child in enumerate(root.children):
        for role in range(2):
            text = f"u:first row: \na:{root.responses[j][role]}\nu:again\na:"
            assert child.prompt_ids[role] == agents[role].tokenizer(text)["input_ids"]
    assert seen == [["first row: "] * 2, ["again"] * 2, ["again"] * 2]  # the last message's text


def test_chat_template_always_wraps_strings_of_every_turn(team):
    agents = team(1)
    rollouts = build(agents, transition=lambda **given: ["next"], chat_template="always")
    (root,), _ = rollouts.expand(ROWS[1:2], TreeShape(num_turns=2, num_generations=1), SAMPLING, KEY)
    assert agents[0].decode(root.prompt_ids[0]) == "u:second\na:"
    assert agents[0].decode(root.children[0].prompt_ids[0]) == "u:next\na:"


def test_a_builtin_without_signature_is_a_formatter(team):
    rollouts = build(team(1), formatters=operator.itemgetter("prompt"), transition=lambda **given: ["next"])
    (root,), _ = rollouts.expand(ROWS[:1], TreeShape(num_turns=2, num_generations=1), SAMPLING, KEY)
    assert [root.prompts, root.children[0].prompts] == [["first row: "], ["next"]]


# --- prompts over the limit ---


def test_a_row_of_ten_times_the_limit_is_left_out_and_counted(team):
    """In the middle of a batch; the others go on as if it were not there."""
    agents = team(2)
    rows = [ROWS[0], (7, {"prompt": "x" * 500}), ROWS[1]]
    shape = TreeShape(num_turns=2, num_generations=2)
    roots, stats = build(agents, limit=50).expand(rows, shape, SAMPLING, KEY)
    assert [root.row_id for root in roots] == [0, 1]
    assert (stats.dropped_rows, stats.dropped_branches) == (1, 0)
    without, _ = build(agents, limit=50).expand([rows[0], rows[2]], shape, SAMPLING, KEY)
    assert [answers(node) for node in walk(roots)] == [answers(node) for node in walk(without)]
    exact, stats = build(agents, limit=11).expand(ROWS[:1], TreeShape(num_generations=1), SAMPLING, KEY)
    assert (len(exact), stats.dropped_rows) == (1, 0)
    none, stats = build(agents, limit=10).expand(ROWS[:1], TreeShape(num_generations=1), SAMPLING, KEY)
    assert (none, stats.dropped_rows, stats.env_steps) == ([], 1, 0)


def test_a_branch_over_the_limit_ends_and_is_counted(team):
    agents = team(1)

    def explode(agent_completions, turn, rewards, **rest):
        explode.calls += 1
        return ["x" * (500 if explode.calls == 1 else 5)]

    explode.calls = 0
    shape = TreeShape(num_turns=2, num_generations=2, discount=0.5)
    (root,), stats = build(agents, transition=explode, limit=50).expand(ROWS[:1], shape, SAMPLING, KEY)
    assert (stats.dropped_rows, stats.dropped_branches) == (0, 1)
    assert root.children[0] is None
    assert root.returns[0] == root.rewards[0]
    child = root.children[1]
    assert root.returns[1] == pytest.approx(root.rewards[1] + 0.5 * sum(child.rewards) / 2)


# --- rewards and returns ---


def test_returns_are_discounted_means_of_the_child(team):
    """R = r + discount * mean of the child's returns, over three turns."""
    shape = TreeShape(num_turns=3, num_generations=2, discount=0.5)
    (root,), _ = build(team(2)).expand(ROWS[:1], shape, SAMPLING, KEY)

    def expected(node, j):
        child = node.children[j] if node.children else None
        later = [expected(child, i) for i in range(2)] if child else [0.0]
        return node.rewards[j] + 0.5 * sum(later) / len(later)

    for node in walk([root]):
        assert node.returns == pytest.approx([expected(node, 0), expected(node, 1)])
    assert [node.weight for node in walk([root])] == [1.0, 0.25, 0.25] + [0.0625] * 4
    (equal,), _ = build(team(2)).expand(
        ROWS[:1], TreeShape(num_turns=2, num_generations=2, node_weighting="equal"), SAMPLING, KEY
    )
    assert [node.weight for node in walk([equal])] == [1.0] * 3


def test_a_joint_answer_without_reward_has_no_child_and_no_credit(team):
    def sometimes(c1, c2):
        values = reward(c1, c2)
        return [None, *values[1:]] if len(values) == 3 else values

    shape = TreeShape(num_turns=2, num_generations=3)
    (root,), stats = build(team(2), reward=sometimes).expand(ROWS[:1], shape, SAMPLING, KEY)
    assert root.rewards[0] is None
    assert root.returns[0] is None
    assert root.children[0] is None
    assert all(child is not None for child in root.children[1:])
    assert [child.weight for child in root.children[1:]] == [0.5, 0.5]  # over the rewarded ones
    assert stats.env_steps == 2 + 2 * 2
    for agent in range(2):
        credits = credit.completion_credits(root.joint_actions, root.returns, agent, 3)
        assert credits[0] is None
        assert None not in credits[1:]


def test_a_node_without_any_reward_is_a_leaf(team):
    shape = TreeShape(num_turns=2, num_generations=2, early_termination_threshold=-1e9)
    (root,), stats = build(team(1), reward=lambda c1: [None] * len(c1)).expand(ROWS[:1], shape, SAMPLING, KEY)
    assert root.children == [None, None]
    assert root.returns == [None, None]
    assert stats.env_steps == 0


def test_early_termination_needs_a_mean_above_the_threshold(team):
    rewards = {0: [1.0, 3.0], 1: [1.0, 3.5], 2: [None, 2.5]}

    def fixed(c1, batch_items):
        return rewards[batch_items[0]["id"]] if batch_items[0]["id"] is not None else [0.0] * len(c1)

    rows = [(i, {"prompt": f"row {i}", "id": i}) for i in range(3)]
    shape = TreeShape(num_turns=2, num_generations=2, early_termination_threshold=2.0)
    roots, _ = build(team(1), reward=fixed).expand(rows, shape, SAMPLING, KEY)
    grown = [[child is not None for child in root.children] for root in roots]
    assert grown == [[True, True], [False, False], [False, False]]
    assert roots[1].returns == [1.0, 3.5]


def test_high_rewards_end_nothing_without_a_threshold(team):
    """Rewards of 0 and above once ended every run after its first turn."""
    rollouts = build(team(1), reward=lambda c1: [1e6] * len(c1))
    (root,), _ = rollouts.expand(ROWS[:1], TreeShape(num_turns=3, num_generations=1), SAMPLING, KEY)
    assert len(list(walk([root]))) == 3


# --- greedy baselines ---


def test_greedy_baselines_are_the_greedy_trajectories_and_cost_no_env_steps(team):
    agents = team(2)
    shape = TreeShape(num_turns=3, num_generations=2, discount=0.9)
    with_baseline = TreeShape(num_turns=3, num_generations=2, discount=0.9, greedy_baseline=True)
    roots, stats = build(agents).expand(ROWS, with_baseline, SAMPLING, KEY)
    plain, plain_stats = build(agents).expand(ROWS, shape, SAMPLING, KEY)
    greedy, greedy_stats = build(agents).expand(ROWS, shape, SAMPLING, KEY, greedy=True)
    assert stats.env_steps == plain_stats.env_steps == 3 * (2 + 4 + 8)
    assert greedy_stats.env_steps == 0
    assert [answers(node) for node in walk(roots)] == [answers(node) for node in walk(plain)]
    assert [node.returns for node in walk(roots)] == [node.returns for node in walk(plain)]
    for root, alone in zip(roots, greedy):
        chain = root.baseline
        for turn in range(3):
            assert chain.greedy
            assert chain.baseline is None
            assert answers(chain) == answers(alone)
            assert chain.rewards == alone.rewards == [score(chain.responses[0])]
            assert chain.returns == pytest.approx(alone.returns)
            assert chain.prompt_history == alone.prompt_history
            assert "(greedy)" in chain.name
            assert chain.turn == turn
            chain, alone = (chain.children or [None])[0], (alone.children or [None])[0]
        assert chain is None
        assert alone is None
    for node in walk(roots):
        assert not node.greedy
        assert node.baseline.prompt_ids == node.prompt_ids
        depth, last = 1, node.baseline
        while last.children and last.children[0] is not None:
            depth, last = depth + 1, last.children[0]
        assert node.turn + depth == 3  # followed to the last turn


def test_greedy_expansion_of_a_branching_shape_is_one_path(team):
    shape = TreeShape(num_turns=2, num_generations=3, joint_mode="cross", greedy_baseline=True)
    (root,), _ = build(team(2)).expand(ROWS[:1], shape, SAMPLING, KEY, greedy=True)
    nodes = list(walk([root]))
    assert [len(node.joint_actions) for node in nodes] == [1, 1]
    assert all(node.greedy and node.baseline is None for node in nodes)


# --- seeds ---


def test_samples_depend_on_seed_rollout_row_and_branch_only(team):
    agents = team(2)
    shape = TreeShape(num_turns=2, num_generations=2)
    rollouts = build(agents)
    together, _ = rollouts.expand(ROWS, shape, SAMPLING, KEY)
    for i in (2, 0, 1):
        alone, _ = rollouts.expand([ROWS[i]], shape, SAMPLING, KEY)
        assert [answers(n) for n in walk(alone)] == [answers(n) for n in walk([together[i]])]
    narrow = build(agents, max_rows=3)
    assert [answers(n) for n in walk(narrow.expand(ROWS[::-1], shape, SAMPLING, KEY)[0][::-1])] == [
        answers(n) for n in walk(together)
    ]
    for other in ((1, "train", 0), (0, "train", 1), (0, "eval", 0)):
        again, _ = rollouts.expand(ROWS[:1], shape, SAMPLING, other)
        assert answers(again[0]) != answers(together[0])


def test_rows_with_one_text_agents_with_one_model_and_branches_have_streams_of_their_own(team):
    rows = [(0, {"prompt": "same"}), (1, {"prompt": "same"})]
    shape = TreeShape(num_turns=2, num_generations=2)
    rollouts = build(team(2), transition=lambda **given: ["same", "same"])
    roots, _ = rollouts.expand(rows, shape, Sampling(max_new_tokens=8), KEY)
    texts = [c.text for node in walk(roots) for completions in node.completions for c in completions]
    assert len(texts) == 2 * 3 * 2 * 2
    assert len(set(texts)) == len(texts)
    assert len({sample_seed(*KEY, row, path, 0, 0) for row in (0, 1, 10) for path in ((), (0,), (0, 0))}) == 9


def test_no_rows(team):
    roots, stats = build(team(1)).expand([], TreeShape(num_turns=2), SAMPLING, KEY)
    assert roots == []
    assert stats.env_steps == 0
