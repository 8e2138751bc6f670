"""The joint reward model: its text, its scores and gradients, and MARLHF around it."""

import copy
import warnings

import pytest
import torch
from preference_team import build as build_pairs
from stopping import assert_same_run, interrupted, lines_of
from tiny_team import flat_gradient

from comlrl import checkpoint, embedded
from comlrl.agents import Agent
from comlrl.engine import Frozen
from comlrl.export import export
from comlrl.generation import sample_seed
from comlrl.memory import Limit
from comlrl.processes import World
from comlrl.reward_model import (
    JointRewardModel,
    LearnedRewards,
    joint_ids,
    pair_items,
    pair_scores,
    shares,
    text_scores,
)
from comlrl.rewards import RewardCall
from comlrl.signals import StopSignal
from comlrl.trainers.preference import JointRewardModel as Published
from comlrl.trainers.preference import MARLHFConfig, MARLHFTrainer


def build(**changes):
    settings = {
        "reward_model_name": "tiny",
        "critic_model_name": "tiny",
        "reward_learning_rate": 1e-3,
        "reward_train_batch_size": 3,
        "num_generations": 3,
        "num_train_epochs": 2,
        "max_steps": 4,
        "train_batch_size": None,
        **changes,
    }
    return build_pairs(MARLHFTrainer, **settings)


def pairs_sampled(trainer):
    stop = StopSignal()
    trainer.evaluation_due = False
    while trainer.phase == "sampling":
        trainer.next_piece(trainer.sampling, stop)
    return trainer


# ---- text -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def reader(load_agent, tiny):
    agent = load_agent(tiny)
    agent.value_model = JointRewardModel(agent.model).eval()
    with torch.no_grad():  # a fresh head says 0
        agent.value_model.value_head.output.weight.normal_(generator=torch.Generator().manual_seed(1))
    return agent


def text_of(agent, ids):
    return agent.tokenizer.decode(ids)


def test_everything_is_read_where_it_fits(reader):
    ids, cut = joint_ids(reader, ["ask", "ask more"], ["yes", "no"], 1000)
    assert text_of(reader, ids) == "0< ask\n1< ask more\n0> yes\n1> no\n"
    assert not cut


@pytest.mark.parametrize("limit", [100, 60, 40, 24])
def test_too_long_texts_keep_every_answer_the_last_one_too(reader, limit):
    ids, cut = joint_ids(reader, ["p" * 200, "q" * 300], ["r" * 30, "END"], limit)
    assert cut
    assert len(ids) <= limit
    text = text_of(reader, ids)
    assert "1> END" in text
    assert "0> r" in text
    if limit >= 100:
        assert "r" * 30 in text  # prompts go first, from their beginnings
        assert "q\n" in text


def test_shares_add_up():
    assert shares([3, 10, 4], 100) == [3, 10, 4]
    assert shares([3, 10, 40], 23) == [3, 10, 10]
    assert shares([50, 50], 9) == [4, 5]


def test_training_and_use_read_the_same_ids():
    trainer = pairs_sampled(build())
    items, _ = pair_items(trainer.reward_agent, trainer.pairs, trainer.text_limit)
    seen = []
    learned = trainer.learned()
    learned.scores = lambda asked: seen.extend(asked) or [0.0] * len(asked)
    for pair in trainer.pairs:
        answers = [list(texts) for texts in zip(*pair.role_texts)]  # [role][chosen, rejected]
        learned([RewardCall({}, pair.role_prompts, answers, "n", ["a", "b"])])
    assert seen == [ids for item in items for ids in (item.chosen, item.rejected)]


# ---- scores ---------------------------------------------------------------------------------------------------------


def test_batch_and_single_scores_are_the_same(reader):
    texts = [[5], [7, 8, 9, 10, 11], [1, 2, 3]]
    with torch.no_grad():
        together = text_scores(reader.value_model, reader, texts, reader.device)
        alone = torch.cat([text_scores(reader.value_model, reader, [text], reader.device) for text in texts])
        plain = []
        for text in texts:
            states = reader.model(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states[-1]
            plain.append(reader.value_model.value_head(states[0, -1]))
    assert torch.allclose(together, alone, atol=1e-5)
    assert torch.allclose(together, torch.stack(plain), atol=1e-5)


def test_one_step_has_the_gradient_of_the_plain_loss_however_it_is_cut():
    found = []
    for budget in (10**5, 1):
        trainer = pairs_sampled(build(reward_train_batch_size=100, micro_batch_tokens=budget))
        with torch.no_grad():
            trainer.reward_agent.value_model.value_head.output.weight.normal_(
                generator=torch.Generator().manual_seed(1)
            )
        twin = copy.deepcopy(trainer.reward_agent.value_model)
        gradients = []
        trainer.reward_engine.step = lambda norm, t=trainer, g=gradients: g.append(
            flat_gradient(t.reward_agent.value_model)
        )
        stop = StopSignal()
        while not gradients:
            trainer.next_piece(trainer.sampling, stop)
        items, trained = trainer.reward_texts(), trainer.split()[0]
        loss = 0
        for i in trained:
            one, other = (
                twin.last_values(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.long))
                for ids in (items[i].chosen, items[i].rejected)
            )
            loss = loss - torch.log(1 / (1 + torch.exp(other - one))).sum() / len(trained)
        loss.backward()
        expected = flat_gradient(twin)
        assert expected.norm() > 1e-4
        assert (gradients[0] - expected).norm() < 2e-5 * expected.norm()
        found.append(gradients[0])
    assert (found[0] - found[1]).norm() < 1e-5 * found[0].norm()


def test_no_language_model_head_is_run(reader):
    calls = []
    reader.model.get_output_embeddings().register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        text_scores(reader.value_model, reader, [[1, 2], [3]], reader.device)
    assert not calls


def test_scores_that_are_not_finite_are_loud(reader):
    with torch.no_grad():
        reader.value_model.value_head.output.bias.fill_(float("nan"))
    rewards = LearnedRewards(reader, Frozen(reader.value_model), World(), 100, Limit("x", 1000))
    with pytest.raises(FloatingPointError, match="score is not finite"):
        rewards([RewardCall({}, ["a"], [["b"]], "n", ["s"])])


# ---- MARLHF ---------------------------------------------------------------------------------------------------------

ALGORITHMS = ["magrpo", "mareinforce", "maremax", "marloo", "iac", "maac"]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_policy_trainer_runs_on_it(algorithm):
    trainer = build(rl_algorithm=algorithm)
    trainer.train()
    assert trainer.step == 4
    assert trainer.rewards.counters["samples"] < 4 * 4 + 3 * 2 + 1  # candidates and evaluation, no training rollout
    lines = lines_of(trainer.run.folder, "metrics")
    evaluations = [line for line in lines if line["kind"] == "eval"]
    assert "eval/learned_reward" not in evaluations[0]  # before there is a reward model
    assert "eval/learned_reward" in evaluations[-1]
    assert "eval/reward_mean" in evaluations[-1]
    steps = [line["env_step"] for line in lines]
    assert steps == sorted(steps)
    keys = {key for line in lines for key in line}
    wanted = ("loss", "accuracy", "margin", "held_out_loss", "held_out_accuracy", "held_out_margin")
    assert {f"reward_model/{key}" for key in wanted} <= keys
    trainer.save_model("out")
    again = Published.from_pretrained("out/reward_model")
    ids, mask = torch.tensor([[1, 2, 3]]), torch.ones(1, 3, dtype=torch.long)
    with torch.no_grad():
        assert torch.equal(again.last_values(ids, mask), trainer.reward_agent.value_model.last_values(ids, mask))


def test_the_reward_models_optimizer_is_gone_while_the_policies_train():
    trainer = build()
    seen = []
    original = trainer.collect

    def collect(*args):
        parameters = list(trainer.reward_agent.value_model.parameters())
        engine = trainer.reward_engine
        seen.append(("optimizer" in vars(engine), any(p.grad is not None or p.requires_grad for p in parameters)))
        original(*args)

    trainer.collect = collect
    weights = []
    finish = trainer.finish_reward_model
    trainer.finish_reward_model = lambda stop: (finish(stop), weights.append(copy.deepcopy(trainer.reward_agent.model)))
    trainer.train()
    assert seen
    assert set(seen) == {(False, False)}
    for one, other in zip(weights[0].parameters(), trainer.reward_agent.model.parameters()):
        assert torch.equal(one, other)


@pytest.mark.parametrize("algorithm", ["magrpo", "maac"])
@pytest.mark.parametrize(
    ("method", "at"),
    [("propose", 2), ("learn_reward", 2), ("finish_reward_model", 1), ("gradients", 1), ("gradients", 3)],
)
def test_stopped_in_any_phase_it_goes_on_bit_for_bit(method, at, algorithm):
    changes = {"rl_algorithm": algorithm}
    whole = build(output_dir="a", **changes)
    whole.train()
    interrupted(build(output_dir="b", **changes), method, at, "b/ck")
    again = build(output_dir="b", **changes)
    again.train(resume_from_checkpoint="b/ck", checkpoint_dir="b/ck")
    assert_same_run(whole, again)
    for one, other in zip(whole.reward_agent.trained.parameters(), again.reward_agent.trained.parameters()):
        assert torch.equal(one, other)


def test_a_checkpoints_reward_model_can_be_exported():
    trainer = build()
    trainer.train(checkpoint_dir="ck")
    export("ck", "out")
    again = JointRewardModel.from_pretrained("out/reward_model")
    for name, tensor in checkpoint.model_tensors(again).items():
        assert torch.equal(tensor, checkpoint.model_tensors(trainer.reward_agent.trained)[name])


def test_several_turns():
    trainer = build(turns=2, max_tree_nodes=100, preference_num_candidates=3)
    trainer.train()
    assert {pair.turn for pair in trainer.pairs} == {0, 1}
    assert all(pair.margin == pair.chosen.reward - pair.rejected.reward for pair in trainer.pairs)
    assert trainer.step == 4


# ---- settings -------------------------------------------------------------------------------------------------------

REFUSED = {
    "device": ({"reward_model_device": "cuda:7"}, "reward_model_device='cuda:7'"),
    "name": ({"reward_model_name": "nowhere/at-all"}, "model 'nowhere/at-all' cannot be found"),
    "no_name": ({"reward_model_name": None}, "reward_model_name is missing"),
    "critic": ({"rl_algorithm": "iac", "critic_model_name": None}, "set critic_model_name"),
    "critic_device": ({"rl_algorithm": "maac", "critic_devices": "cuda:7"}, "cuda:7"),
    "generations": ({"num_generations": 1}, "num_generations=1"),
    "algorithm": ({"rl_algorithm": "ppo"}, "rl_algorithm='ppo'"),
    "rate": ({"reward_learning_rate": 0.0}, "reward_learning_rate=0.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_sampled(case):
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        build(**changes)


def test_settings_of_critics_are_not_silently_without_effect():
    with pytest.warns(UserWarning, match=r"critic_type, gae_lambda: without effect, .*'marloo'"):
        MARLHFConfig(rl_algorithm="marloo", gae_lambda=0.5, critic_type="q")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MARLHFConfig()
        MARLHFConfig(rl_algorithm="maac", gae_lambda=0.5)
    with pytest.raises(ValueError, match="use_separate_critic=False is for rl_algorithm iac"):
        MARLHFConfig(rl_algorithm="maac", use_separate_critic=False)


def test_critics_belong_to_actor_critic():
    with pytest.raises(ValueError, match="critics is for rl_algorithm iac or maac"):
        MARLHFTrainer("tiny", critics=["tiny"], args=MARLHFConfig(max_new_tokens=4), reward_func=lambda a, b: a)


# ---- learning a planted preference ----------------------------------------------------------------------------------


def planted(seed, trained):
    """Accuracy on held-out pairs: of two joint answers, that with more letters `x` in both texts together is better."""
    generator = torch.Generator().manual_seed(seed)
    model, tokenizer = embedded.folder("tiny"), None
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    agent = Agent(AutoModelForCausalLM.from_pretrained(model), tokenizer, "reward_model")
    agent.value_model = JointRewardModel(agent.model).eval()
    if not trained:
        with torch.no_grad():
            agent.value_model.value_head.output.weight.normal_(generator=generator)

    def draw():
        return ["".join("xyz"[int(i)] for i in torch.randint(3, (6,), generator=generator)) for _ in range(2)]

    def count(texts):
        return sum(text.count("x") for text in texts)

    pairs = []
    while len(pairs) < 500:
        one, other = draw(), draw()
        if abs(count(one) - count(other)) >= 2:
            better, worse = (one, other) if count(one) > count(other) else (other, one)
            pairs.append([joint_ids(agent, ["q", "r"], texts, 100)[0] for texts in (better, worse)])
    held, rest = pairs[:100], pairs[100:]

    class Item:
        def __init__(self, pair):
            self.chosen, self.rejected = pair

    optimizer = torch.optim.AdamW(agent.value_model.parameters(), lr=1e-3)
    for step in range(150 if trained else 0):
        picked = [rest[(sample_seed(seed, step, i)) % len(rest)] for i in range(16)]
        better, worse = pair_scores(agent.value_model, agent, [Item(pair) for pair in picked], agent.device)
        loss = -torch.nn.functional.logsigmoid(better - worse).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        better, worse = pair_scores(agent.value_model, agent, [Item(pair) for pair in held], agent.device)
    return (better > worse).double().mean().item()


@pytest.mark.parametrize("seed", [pytest.param(0), *(pytest.param(s, marks=pytest.mark.full) for s in (1, 2))])
def test_planted_preferences_are_learned(seed):
    assert planted(seed, trained=True) > 0.9
    assert planted(seed, trained=False) < 0.8
