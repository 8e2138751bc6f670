"""Preference data: which pairs a node gives, and the files."""

import itertools
import json
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from preference_team import build
from stopping import reward

from comlrl.generation import Completion
from comlrl.preferences import candidates, encode_answer, node_pairs, read_lines
from comlrl.rollouts import Node
from comlrl.signals import StopSignal
from comlrl.trainers.preference import MADPOTrainer


def node_of(texts, rewards, truncated=()):
    """A node of two agents that both said texts[k] in joint answer k."""
    said = [
        Completion([*text.encode(), 0], text, [], "length" if k in truncated else "eos") for k, text in enumerate(texts)
    ]
    return Node(
        row_id=7,
        row={"prompt": "q"},
        turn=0,
        path=(),
        prompts=["q", "r"],
        prompt_ids=[[1], [2]],
        role_prompts=["q", "r"],
        prompt_history=[["q"], ["r"]],
        response_history=[[], []],
        reward_history=[],
        completions=[said, said],
        joint_actions=[(k, k) for k in range(len(texts))],
        responses=[[text, text] for text in texts],
        rewards=list(rewards),
        returns=[None if r is None else 2 * r for r in rewards],
    )


def pairs_of(node, selection="reward_gap", limit=None, seed=0, use_return=True, keep_truncated=True):
    counts = Counter()
    found = candidates(node, lambda agent, c: list(c.token_ids), use_return, keep_truncated)
    return (
        node_pairs(node, found, None, selection=selection, limit=limit, seed=seed, counts=counts),
        counts,
    )


def names(pairs):
    return [(pair.chosen.texts[0], pair.rejected.texts[0]) for pair in pairs]


def test_pairs_are_all_strictly_better_answers_against_a_plain_loop():
    texts, rewards = ["a", "b", "c", "b", "d", "e"], [0.5, 2.0, None, 2.0, 0.5, -1.0]
    pairs, counts = pairs_of(node_of(texts, rewards), "all")
    expected = []
    for i, j in itertools.combinations(range(6), 2):
        if rewards[i] is None or rewards[j] is None or rewards[i] == rewards[j]:
            continue
        better, worse = (i, j) if rewards[i] > rewards[j] else (j, i)
        if (texts[better], texts[worse]) not in expected:
            expected.append((texts[better], texts[worse]))
    assert names(pairs) == expected
    # b-b identical, a-d a tie, each of b's three pairs there twice
    assert counts == {"pairs": 5, "identical": 1, "ties": 1, "duplicates": 3, "over_limit": 0}
    assert all(pair.margin == 2 * (pair.chosen.reward - pair.rejected.reward) for pair in pairs)


def test_equal_rewards_and_equal_texts_give_no_pair():
    assert pairs_of(node_of("abc", [1.0, 1.0, 1.0])) == ([], {"ties": 3, "pairs": 0, "over_limit": 0})
    assert pairs_of(node_of(["a", "a"], [0.0, 1.0])) == ([], {"identical": 1, "pairs": 0, "over_limit": 0})


def test_selections():
    node = node_of("abcd", [0.0, 1.0, 3.0, 7.0])
    assert names(pairs_of(node, "reward_gap", 2)[0]) == [("d", "a"), ("d", "b")]
    assert pairs_of(node, "reward_gap", 2)[1]["over_limit"] == 4
    every = names(pairs_of(node, "all")[0])
    drawn = {tuple(names(pairs_of(node, "random", 2, seed)[0])) for seed in range(20)}
    assert len(drawn) > 5
    assert all(set(each) <= set(every) for each in drawn)
    assert names(pairs_of(node, "random", 2, 3)[0]) == names(pairs_of(node, "random", 2, 3)[0])


def test_every_answer_of_the_policy_meets_every_one_of_the_comparator():
    """3 and 2 answers are 6 meetings; best answer of the comparator first, then the largest margin."""
    ours, theirs = node_of("ab", [0.0, 5.0]), node_of("cde", [1.0, 2.0, 5.0])
    first, second = (candidates(node, lambda agent, c: list(c.token_ids), True, True) for node in (ours, theirs))

    def against(selection, limit=None):
        counts = Counter()
        found = node_pairs(ours, first, second, selection=selection, limit=limit, seed=0, counts=counts)
        return names(found), counts

    found, counts = against("comparator_reward")
    assert found == [("e", "a"), ("b", "d"), ("d", "a"), ("b", "c"), ("c", "a")]
    assert counts == {"pairs": 5, "ties": 1, "over_limit": 0}
    assert against("comparator_reward", 2)[0] == found[:2]
    assert against("reward_gap", 2)[0] == [("e", "a"), ("b", "c")]
    assert set(against("all")[0]) == set(found)


def test_rewards_or_returns_are_compared_and_truncated_answers_can_be_left_out():
    node = node_of("ab", [0.0, 1.0])
    node.returns = [5.0, 1.0]
    assert names(pairs_of(node)[0]) == [("a", "b")]
    assert names(pairs_of(node, use_return=False)[0]) == [("b", "a")]
    assert pairs_of(node_of("ab", [0.0, 1.0], truncated=[1]), keep_truncated=False)[0] == []


def test_candidates_are_sampled_in_micro_batches_and_are_the_same():
    seen, pairs = [], []
    for rows in (3, 1000):
        trainer = build(generation_batch_rows=rows, preference_num_candidates=7, eval_interval=0, max_steps=1)
        sizes = []
        embeddings = trainer.agents[0].sampler.get_input_embeddings()
        hook = embeddings.register_forward_hook(lambda module, inputs, output, sizes=sizes: sizes.append(len(output)))
        while trainer.phase == "sampling":
            trainer.next_piece(trainer.sampling, StopSignal())
        hook.remove()
        seen.append(max(sizes))
        pairs.append(trainer.pairs)
    assert seen[0] <= 3 < seen[1]
    assert pairs[0] == pairs[1] != []


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_runs_own_file_gives_the_same_training(form):
    first = build(preference_format=form, output_dir="a")
    first.train()
    path = first.pair_path()
    lines = read_lines(path)
    for key in ("row_id", "turn", "prompts", "prompt_ids", "chosen", "rejected", "margin", "reference", "about"):
        assert key in lines[0]
    assert set(lines[0]["about"]) >= {"models", "tokenizers", "sampling", "seed", "run"}
    assert lines[0]["chosen"]["token_ids"] == first.pairs[0].chosen.token_ids
    again = build(preference_file=str(path), output_dir="b", data=[])
    again.train()
    assert again.pairs == first.pairs
    for one, other in zip(first.agents, again.agents):
        assert all((a == b).all() for a, b in zip(one.model.parameters(), other.model.parameters()))
    assert again.rewards.counters["samples"] < first.rewards.counters["samples"]  # evaluation only


def test_reference_log_probs_of_a_file_are_taken_only_from_the_same_reference(monkeypatch):
    first = build(output_dir="a")
    first.train()
    asked = []
    original = MADPOTrainer.answer_logprobs

    def count(self, groups, models):
        asked.append((models is self.references, len(groups[0])))
        return original(self, groups, models)

    monkeypatch.setattr(MADPOTrainer, "answer_logprobs", count)
    build(preference_file=str(first.pair_path()), output_dir="b", max_steps=1).train()
    assert not any(reference for reference, _ in asked)
    build(preference_file=str(first.pair_path()), output_dir="c", max_steps=1, seeds=(2, 10)).train()
    assert (True, len(first.pairs)) in asked


def test_a_users_file_needs_only_texts():
    lines = [
        {"prompt": "ab", "chosen": ["c", ""], "rejected": ["d", "e"]},
        {"prompts": ["a", "b"], "chosen": ["cc", "d"], "rejected": ["cc", "d"]},
        {"prompts": ["a", "b"], "chosen": ["ccccc", "d"], "rejected": ["c", "d"]},
    ]
    Path("mine.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    trainer = build(preference_file="mine.jsonl", data=[])
    trainer.train()
    assert trainer.pair_counts == {"pairs": 1, "identical": 1, "too_long": 1}
    pair = trainer.pairs[0]
    eos = trainer.agents[0].eos_ids[0]
    assert pair.chosen.token_ids == [[2, eos], [eos]]  # to say nothing is to end at once
    assert pair.rejected.token_ids == [[3, eos], [4, eos]]
    assert pair.prompt_ids == [[0, 1], [0, 1]]
    assert trainer.step > 0


def test_a_users_parquet_file_needs_only_texts_too():
    columns = {"prompt": ["ab", "c"], "chosen": [["c", ""], ["a", "b"]], "rejected": [["d", "e"], ["b", "b"]]}
    pyarrow.parquet.write_table(pyarrow.table(columns), "mine.parquet")
    trainer = build(preference_file="mine.parquet", data=[], max_steps=1)
    trainer.train()
    assert [(pair.chosen.texts, pair.rejected.texts) for pair in trainer.pairs] == list(
        zip(columns["chosen"], columns["rejected"])
    )


MISTAKES = {
    "missing": ({"prompt": "a", "chosen": ["b", "c"]}, "pair 1: 'rejected' is missing"),
    "agents": ({"prompt": "a", "chosen": ["b"], "rejected": ["c", "d"]}, "chosen has 1 texts for num_agents=2"),
    "text": ({"prompt": "a", "chosen": "b", "rejected": ["c", "d"]}, "chosen must be a list of texts"),
    "prompt": ({"chosen": ["b", "c"], "rejected": ["c", "d"]}, "prompt .* is missing"),
    "prompts": ({"prompts": ["a"], "chosen": ["b", "c"], "rejected": ["c", "d"]}, "1 prompts for num_agents=2"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_in_a_file_are_named_before_a_model_is_loaded(case):
    line, message = MISTAKES[case]
    Path("mine.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=message):
        MADPOTrainer(
            agent_model="tiny",
            reward_func=reward,
            args=MADPOTrainer.config_class(preference_file="mine.jsonl", max_new_tokens=4),
            dry_run=True,
        )


def test_no_file_and_no_json():
    with pytest.raises(ValueError, match="no such file"):
        build(preference_file="none.jsonl")
    Path("mine.jsonl").write_text("{}\n{oops\n")
    with pytest.raises(ValueError, match="line 2: no JSON"):
        build(preference_file="mine.jsonl")


def test_an_answer_of_others_ends_with_eos_unless_it_was_cut(load_agent, tiny):
    agent = load_agent(tiny)
    eos = agent.tokenizer.eos_token_id
    assert encode_answer(agent, "hi") == [*agent.tokenizer("hi", add_special_tokens=False)["input_ids"], eos]
    assert encode_answer(agent, "hi", ended=False)[-1] != eos
    assert encode_answer(agent, "") == [eos]
