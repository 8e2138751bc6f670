"""Comparators whose models are here: which weights they sample with, and how often they are loaded."""

import copy
import json
import subprocess
from collections import Counter

import pytest
import torch
from processes import ENVIRONMENT, ROOT, torchrun
from safetensors.torch import save_file
from tiny_team import build_model, build_tokenizer

from comlrl.agents import Agent
from comlrl.centralized import Coordinator, TaggedCentralizedComparatorAdapter
from comlrl.checkpoint import model_tensors
from comlrl.comparators import (
    CopyComparator,
    CurrentComparator,
    ModelComparator,
    check_comparator_models,
    comparator_placement,
    failed_answers,
    foreign_candidates,
)
from comlrl.generation import Sampling
from comlrl.loading import check_team
from comlrl.placement import Group
from comlrl.processes import World
from comlrl.rewards import Rewards
from comlrl.rollouts import Rollouts, RolloutStats, Team, TreeShape, fill_returns

CPU = torch.device("cpu")
SAMPLING = Sampling(max_new_tokens=4)
SHAPE = TreeShape(num_generations=4)
ROWS = [(n, {"prompt": text}) for n, text in enumerate(("ab", "ba", "bb"))]


def count_a(first, second):
    return [float(x.count("a") - y.count("a")) for x, y in zip(first, second)]


def make_rollouts(agents, team=None, placement=None):
    return Rollouts(
        agents, Rewards([count_a], 2), [lambda row: row["prompt"]] * 2, None, team or Team(2),
        prompt_limits=[1000] * len(agents), placement=placement,
    )  # fmt: skip


def team(letters=("a", "b"), dtype=torch.float32):
    return [
        Agent(build_model(len(letters) + 1, seed), build_tokenizer(letters), f"agent_{i}", compute_dtype=dtype)
        for i, seed in enumerate((2, 9))
    ]


def said(rollouts, key=(0, "test")):
    roots, _ = rollouts.expand(ROWS, SHAPE, SAMPLING, key)
    return [[c.token_ids for one in root.completions for c in one] for root in roots]


def comparator_says(comparator, key=(0, "test")):
    roots, _ = comparator.expand(ROWS, SHAPE, SAMPLING, key)
    return [[c.token_ids for one in root.completions for c in one] for root in roots]


def learn(agents, seed):
    """Other weights, as a training step leaves them."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for agent in agents:
            for parameter in agent.model.parameters():
                parameter += torch.randn_like(parameter)
            agent.weights_changed()


def test_current_is_the_policy_itself():
    agents = team()
    comparator = CurrentComparator(make_rollouts, agents)
    comparator.open(0)
    before = said(make_rollouts(agents))
    assert comparator_says(comparator) == before
    assert comparator_says(comparator, (0, "other samples")) != before
    learn(agents, 0)
    assert comparator_says(comparator) == said(make_rollouts(agents)) != before
    comparator.close()
    assert comparator.rollouts is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_current_copy_is_the_policy_as_the_iteration_began(dtype):
    agents = team(dtype=dtype)
    comparator = CopyComparator(make_rollouts, agents, [CPU] * 2)
    comparator.open(0)
    before = said(make_rollouts(agents))
    learn(agents, 0)
    comparator.open(0)  # again, as for every piece of an iteration: nothing is loaded
    assert comparator_says(comparator) == before != said(make_rollouts(agents))
    assert comparator.loads == 2
    comparator.close()
    comparator.open(1)
    assert comparator_says(comparator) == said(make_rollouts(agents))
    assert comparator.loads == 4
    for twin, agent in zip(comparator.rollouts.agents, agents):
        assert {p.dtype for p in twin.model.parameters()} == {dtype}
        assert not any(p.requires_grad for p in twin.model.parameters())
        assert twin.sampler is twin.model  # one set of weights, not a second one to sample with
        mine = {p.data_ptr() for p in agent.model.parameters()} | {p.data_ptr() for p in agent.sampler.parameters()}
        assert mine.isdisjoint(p.data_ptr() for p in twin.model.parameters())
        assert all(p.requires_grad for p in agent.model.parameters())


def test_a_copy_keeps_tied_weights_tied(tiny, load_agent):
    agent = load_agent(tiny)
    comparator = CopyComparator(lambda agents: make_rollouts(agents * 2), [agent], [CPU])
    comparator.open(0)
    twin = comparator.rollouts.agents[0].model
    assert twin.get_input_embeddings().weight is twin.get_output_embeddings().weight
    assert len(list(twin.parameters())) == len(list(agent.model.parameters()))


def write_policy(folder, agents):
    folder.mkdir()
    files = [folder / f"{agent.name}.safetensors" for agent in agents]
    for agent, file in zip(agents, files):
        save_file({name: t.clone() for name, t in model_tensors(agent.model).items()}, file)
    return files


@pytest.mark.parametrize("unloaded", [False, True])
def test_history_is_the_policy_of_that_iteration(tmp_path, unloaded):
    """k = 1 is the policy before the last iteration, not the current one; each model is loaded once an iteration.

    unloaded: this process holds no weights of the agents, as with placements of their own.
    """
    agents, files, policies = team(), [], []
    for iteration in range(3):
        files.append(write_policy(tmp_path / str(iteration), agents))
        policies.append(said(make_rollouts(agents)))
        learn(agents, iteration)
    assert policies[0] != policies[1] != policies[2] != policies[0]
    if unloaded:
        for agent in agents:
            agent.unload()
    asked = []

    def before_the_last(iteration):
        asked.append(iteration)
        return files[max(iteration - 1, 0)]

    comparator = CopyComparator(make_rollouts, agents, [CPU] * 2, before_the_last)
    assert comparator.name == "history"
    for iteration, expected in enumerate([0, 0, 1]):
        for _ in range(4):  # the pieces of an iteration
            comparator.open(iteration)
            assert comparator_says(comparator) == policies[expected]
        comparator.close()
    assert asked == [0, 1, 2]
    assert comparator.loads == 3 * 2


def test_history_of_another_shape_is_refused(tmp_path):
    files = write_policy(tmp_path / "0", team(("a", "b", "c")))
    comparator = CopyComparator(make_rollouts, team(), [CPU] * 2, lambda iteration: files)
    with pytest.raises(ValueError, match="has shape"):
        comparator.open(0)


def members_of(names, tokenizer=None, dtype="float32"):
    return check_team(None, names, len(names), tokenizer, None, None, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_models_are_loaded_once_each(tiny, tiny_other, load_agent, dtype):
    comparator = ModelComparator(make_rollouts, members_of([tiny, tiny], dtype=dtype))
    comparator.open(0)
    assert comparator.loads == 1
    precision = torch.float32 if dtype == "float32" else torch.bfloat16
    plain = [load_agent(tiny, compute_dtype=precision) for _ in range(2)]
    assert comparator_says(comparator) == said(make_rollouts(plain))
    assert {p.dtype for p in comparator.rollouts.agents[0].model.parameters()} == {precision}
    two = ModelComparator(make_rollouts, members_of([tiny, tiny_other]))
    two.open(0)
    assert two.loads == 2
    assert comparator_says(two) == said(make_rollouts([load_agent(tiny), load_agent(tiny_other)]))


def test_only_processes_of_its_group_hold_a_model(tiny, tiny_other):
    """Here this process is rank 1 of 2, and only the second model's group has it."""
    groups = [Group([0], 1, "group"), Group([0, 1], 1, "group")]
    model = ModelComparator(make_rollouts, members_of([tiny, tiny_other]), groups=groups)
    first, second = model.agents(0)
    assert model.loads == 1
    assert next(first.model.parameters()).device.type == "meta"
    assert next(second.model.parameters()).device.type == "cpu"
    assert first.encode("ab") == second.encode("ab")
    # One name for two agents, of which one is here.
    shared = ModelComparator(make_rollouts, members_of([tiny, tiny]), groups=groups)
    assert [next(agent.model.parameters()).device.type for agent in shared.agents(0)] == ["cpu", "cpu"]
    policy = team()
    policy[0].unload()
    copies = CopyComparator(make_rollouts, policy, [CPU] * 2, groups=groups).agents(0)
    assert [agent.device.type for agent in copies] == ["meta", "cpu"]
    assert copies[1].model is not policy[1].model


def test_comparators_have_a_placement_of_their_own():
    class Two(World):
        def __init__(self):
            super().__init__()
            self.size = 2

    def ranks(placement):
        return [group.ranks for group in placement.of("agents")]

    world = Two()
    homes = [(0, 1), (0, 1)]
    assert ranks(comparator_placement(world, None, homes)) == homes
    assert ranks(comparator_placement(world, {"comparators": [[0, 1], [1, 0]], "agents": [[0], [1]]}, homes)) == homes


def test_idle_models_leave_their_device(tiny):
    comparator = ModelComparator(make_rollouts, members_of([tiny, tiny]), idle=True)
    comparator.open(0)
    assert all(agent.idle for agent in comparator.rollouts.agents)
    assert comparator_says(comparator)


# ---- their answers --------------------------------------------------------------------------------------------------


def test_answers_of_the_same_tokens_are_kept_as_sampled():
    agents = team()
    roots, _ = make_rollouts(agents).expand(ROWS, SHAPE, SAMPLING, (0, "test"))
    options = {"by_role": False, "use_return": True, "source": "history"}
    ids = {tuple(map(tuple, c.answer.token_ids)) for root in roots for c in foreign_candidates(
        root, agents, same_tokens=True, keep_truncated=True, **options)}  # fmt: skip
    assert ids == {
        tuple(tuple(root.completions[i][k].token_ids) for i, k in enumerate(action))
        for root in roots
        for action in root.joint_actions
    }
    # Re-encoded they are the same here, and end as they ended: with EOS, or cut off without.
    again = {tuple(map(tuple, c.answer.token_ids)) for root in roots for c in foreign_candidates(
        root, agents, same_tokens=False, keep_truncated=True, **options)}  # fmt: skip
    assert again == ids
    whole = [c.answer for root in roots for c in foreign_candidates(
        root, agents, same_tokens=True, keep_truncated=False, **options)]  # fmt: skip
    assert 0 < len(whole) < 12
    assert all(ids[-1] == agents[0].tokenizer.eos_token_id for answer in whole for ids in answer.token_ids)


def test_answers_of_another_vocabulary_become_the_policys_tokens(tiny):
    """`tiny` has bytes; the policy has the letters a and b. What it cannot say as briefly is left out and counted."""
    agents = team(("a", "b", "c", "d"))
    comparator = ModelComparator(make_rollouts, members_of([tiny, tiny]))
    comparator.open(0)
    root = comparator.expand(ROWS[:1], SHAPE, SAMPLING, (0, "test"))[0][0]
    for k, completion in enumerate(root.completions[0]):
        completion.text, completion.finish_reason = "abcd"[: k + 1], "eos"
    for completion in root.completions[1]:
        completion.text, completion.finish_reason = "", "eos"
    counts = Counter()
    kept = foreign_candidates(
        root, agents, same_tokens=False, by_role=False, use_return=True, keep_truncated=True, source="model",
        longest=4, counts=counts,
    )  # fmt: skip
    eos = agents[0].tokenizer.eos_token_id
    assert [c.answer.token_ids for c in kept] == [[[0, eos], [eos]], [[0, 1, eos], [eos]], [[0, 1, 2, eos], [eos]]]
    assert counts == {"too_long": 1}


def test_a_coordinator_writes_for_all_roles(tiny, tiny_other, load_agent):
    """The roles' parts become answers of the policy's agents; only the last part can have been cut off."""
    coordinator = Coordinator(TaggedCentralizedComparatorAdapter(), 2, "skip")
    rollouts = make_rollouts([load_agent(tiny)], coordinator)
    policy = [load_agent(tiny), load_agent(tiny_other)]
    (root,), stats = rollouts.expand(ROWS[:1], SHAPE, SAMPLING, (0, "test"))
    assert "Task of agent 1" in root.prompts[0]
    assert root.rewards == [None] * 4  # the tiny model wrote no sections
    assert stats.unparsable == 4
    assert failed_answers([root], stats) == (0, 4)  # it may learn to
    texts = ["<agent_0>aa</agent_0><agent_1>b", "<agent_1>b</agent_1><agent_0>a</agent_0>"]
    again = copy.copy(root)
    again.joint_actions, again.responses, again.rewards, again.parts = [(0,), (1,)], [], [], []
    for text, reason, completion in zip(texts, ("length", "eos"), again.completions[0]):
        completion.text, completion.finish_reason = text, reason
    rollouts._score([again], RolloutStats())
    fill_returns(again, 1.0)
    kept = foreign_candidates(
        again, policy, same_tokens=True, by_role=True, use_return=True, keep_truncated=True, source="current"
    )
    assert [c.answer.texts for c in kept] == [["aa", "b"], ["a", "b"]]
    ends = [[ids[-1] == agent.tokenizer.eos_token_id for agent, ids in zip(policy, c.answer.token_ids)] for c in kept]
    assert ends == [[True, False], [True, True]]
    assert [c.answer.truncated for c in kept] == [True, False]


# ---- checks ---------------------------------------------------------------------------------------------------------


def test_models_that_cannot_read_the_prompts_are_refused(tiny, tmp_path):
    check_comparator_models(members_of([tiny]), [[{"role": "user", "content": "a"}]], "messages", 16)
    agent = team()[0]
    agent.save(str(tmp_path / "plain"))
    plain = members_of([str(tmp_path / "plain")])
    check_comparator_models(plain, ["ab"], "messages", 16)
    for prompt, template in (([{"role": "user", "content": "a"}], "messages"), ("a", "always")):
        with pytest.raises(ValueError, match=r"plain.*no chat template"):
            check_comparator_models(plain, [prompt], template, 16)
    with pytest.raises(ValueError, match=r"holds 32 tokens.*max_new_tokens=32"):
        check_comparator_models(plain, ["ab"], "messages", 32)
    with pytest.raises(ValueError, match="cannot be found"):
        members_of([str(tmp_path / "nowhere")])


# ---- several processes ----------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(("mode", "loads"), [("own groups", 1), ("zero3", 2)])
def test_copies_in_two_processes(tmp_path, mode, loads):
    """own groups: agent 0 is in process 0 and its copy in process 1, and the other way round. zero3: both are divided
    over both processes, and each has a whole copy to sample from."""
    command = [*torchrun(2), str(ROOT / "tests" / "comparator_program.py"), mode, str(tmp_path)]
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    one, other = (json.loads((tmp_path / f"report_{rank}.json").read_text()) for rank in range(2))
    assert one["loads"] == other["loads"] == loads
    assert one["rewards"] == other["rewards"] == one["policy"] == other["policy"]
    assert len(one["judged"]) + len(other["judged"]) == 5 * 3
    alone = CopyComparator(make_rollouts, team(), [CPU] * 2)
    alone.open(0)
    rows = [(n, {"prompt": text}) for n, text in enumerate(("ab", "ba", "bb", "aa", "b"))]
    roots, _ = alone.expand(rows, TreeShape(num_generations=3), SAMPLING, (0, "comparator", 0))
    assert one["texts"] == [[[c.text for c in texts] for texts in root.completions] for root in roots]
