"""Value targets, baselines and value heads against slow plain twins."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from ac_team import play
from tiny_team import build_model, build_tokenizer

from comlrl import credit, losses
from comlrl.agents import Agent
from comlrl.batches import Sample, collate
from comlrl.critics import (
    RunningStatistics,
    ValueItem,
    frozen_outputs,
    head_outputs,
    history_text,
    item_losses,
    policy_and_values,
    value_item,
)
from comlrl.engine import Engine
from comlrl.logprobs import completion_logprobs
from comlrl.models import CausalLMWithValueHead, ValueHead
from comlrl.optimizers import OptimizerSettings
from comlrl.rollouts import Node, joint_actions, walk
from comlrl.trainers import IACTrainer, MAACTrainer

# ---- value targets -----------------------------------------------------------------------------------


def random_tree(draw, agents, generations, turns, mode, turn=0, path=()):
    """A tree with some rewards None and some branches that end early."""
    actions = joint_actions(generations, agents, mode)
    rewards = [None if draw.random() < 0.2 else draw.uniform(-1, 1) for _ in actions]
    children = []
    if turn < turns - 1 and draw.random() < 0.8:
        for j, reward in enumerate(rewards):
            goes_on = reward is not None and draw.random() < 0.8
            child = random_tree(draw, agents, generations, turns, mode, turn + 1, (*path, j)) if goes_on else None
            children.append(child)
    blank = [[SimpleNamespace(text="a", token_ids=[0])] * generations for _ in range(agents)]
    return Node(0, {}, turn, path, [], [], [], [], [], [], completions=blank, joint_actions=actions, rewards=rewards,
                children=children)  # fmt: skip


def plain_target(node, j, value, discount, lam):
    """G_j by plain recursion; value(node) is V, or the mean Q of its rewarded actions."""
    if node.rewards[j] is None:
        return None
    child = node.children[j] if node.children else None
    if child is None or all(reward is None for reward in child.rewards):
        return node.rewards[j]
    below = [plain_target(child, k, value, discount, lam) for k in range(len(child.rewards))]
    below = [target for target in below if target is not None]
    return node.rewards[j] + discount * ((1 - lam) * value(child) + lam * sum(below) / len(below))


@pytest.mark.parametrize("kind", [MAACTrainer, IACTrainer])
@pytest.mark.parametrize("critic_type", ["v", "q"])
@pytest.mark.parametrize("mode", ["aligned", "cross"])
def test_targets_baselines_and_bootstraps_equal_the_recursive_twin(kind, critic_type, mode):
    draw = random.Random(f"{kind.__name__} {critic_type} {mode}")
    seen = 0
    for _ in range(25):
        agents, generations, turns = draw.choice([2, 3]), draw.choice([2, 3]), draw.choice([1, 2, 3])
        lam, discount = draw.choice([0.0, 0.3, 0.95, 1.0]), draw.choice([0.5, 1.0])
        trainer = SimpleNamespace(
            args=SimpleNamespace(critic_type=critic_type, discount=discount, gae_lambda=lam, num_agents=agents)
        )
        for name in ("actions", "action_returns", "item_returns", "state_value", "node_returns", "set_baselines",
                     "readers", "critic_of"):  # fmt: skip
            setattr(trainer, name, getattr(kind, name).__get__(trainer))
        roots = [random_tree(draw, agents, generations, turns, mode) for _ in range(2)]
        nodes = list(walk(roots))
        for critic in range(1 if kind is MAACTrainer else agents):
            of = {}  # value of (node, action) or of the node
            values = []
            for node in nodes:
                if critic_type == "v":
                    values.append([draw.uniform(-1, 1)])
                else:
                    values.append([draw.uniform(-1, 1) for _ in trainer.actions(critic, node)])
                of[id(node)] = values[-1]

            def rewarded(node, action, critic=critic):
                """Whether an action, in this critic's eyes, is in a rewarded joint action."""
                if kind is MAACTrainer:
                    return node.rewards[node.joint_actions.index(action)] is not None
                return any(
                    r is not None for r, joint in zip(node.rewards, node.joint_actions) if joint[critic] == action[0]
                )

            def state(node, of=of, critic=critic, trainer=trainer, rewarded=rewarded):
                if critic_type == "v":
                    return of[id(node)][0]
                pairs = zip(trainer.actions(critic, node), of[id(node)])
                known = [q for action, q in pairs if rewarded(node, action)]
                return sum(known) / len(known)

            returns = trainer.node_returns(critic, nodes, values)
            for node, found in zip(nodes, returns):
                expected = [plain_target(node, j, state, discount, lam) for j in range(len(node.rewards))]
                assert found == pytest.approx(expected)
                seen += len([value for value in expected if value is not None])
                for agent in trainer.readers(critic):
                    group = []
                    for k in range(generations):
                        mine = [g for g, a in zip(expected, node.joint_actions) if a[agent] == k and g is not None]
                        if mine:
                            others = [
                                q
                                for action, q in zip(trainer.actions(critic, node), of[id(node)])
                                if critic_type == "q"
                                and rewarded(node, action)
                                and action[trainer.readers(critic).index(agent)] != k
                            ]
                            target = sum(mine) / len(mine)
                            baseline = of[id(node)][0] if critic_type == "v" else None
                            if critic_type == "q":
                                baseline = sum(others) / len(others) if others else target
                            group.append((target, baseline))
                    samples = [SimpleNamespace(credit=None, value=None) for _ in group]
                    trainer.set_baselines(agent, node, samples, of[id(node)], found)
                    assert [s.credit for s in samples] == pytest.approx([target for target, _ in group])
                    assert [s.value for s in samples] == pytest.approx([baseline for _, baseline in group])
    assert seen > 100


def test_lambda_0_is_the_one_step_target_and_lambda_1_the_return():
    arguments = ([1.0, None, 0.5], [0.7, 0.2, None], [[2.0, 4.0], None, None], 0.5)
    assert credit.lambda_returns(*arguments, lam=0.0) == pytest.approx([1.35, None, 0.5])
    assert credit.lambda_returns(*arguments, lam=1.0) == pytest.approx([2.5, None, 0.5])
    assert credit.lambda_returns(*arguments, lam=0.4) == pytest.approx([1 + 0.5 * (0.6 * 0.7 + 0.4 * 3), None, 0.5])


def test_z_scores_and_explained_variance():
    values = torch.tensor([1.0, 2.0, 4.0])
    assert credit.z_scores(values).tolist() == pytest.approx([-1.0690, -0.2673, 1.3363], abs=1e-4)
    assert credit.z_scores(torch.full((3,), 0.1)).tolist() == [0.0] * 3
    assert credit.explained_variance([1.0, 2.0], [1.0, 2.0]) == 1.0
    assert credit.explained_variance([0.3, 0.3], [1.0, 2.0]) == pytest.approx(0.0)
    assert credit.explained_variance([2.0, 1.0], [1.0, 2.0]) == pytest.approx(-3.0)
    assert math.isnan(credit.explained_variance([2.0, 1.0], [1.0, 1.0]))


def test_value_loss_is_clipped_as_written():
    generator = torch.Generator().manual_seed(0)
    output, target, old = torch.randn(3, 200, generator=generator)
    for limit in (None, 0.2):
        for found, v, g, o in zip(losses.value_loss(output, target, old, limit), output, target, old):
            plain = (v - g) ** 2
            if limit is not None:
                plain = max(plain, (min(max(v, o - limit), o + limit) - g) ** 2)
            assert found == pytest.approx(plain.item(), rel=1e-5)
    at_old = torch.tensor([0.5], requires_grad=True)
    losses.value_loss(at_old, torch.tensor([1.0]), torch.tensor([0.5]), 0.2).sum().backward()
    assert at_old.grad.item() == -1.0  # before the first step clipping changes nothing


def test_running_statistics_are_those_of_all_values():
    values = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 5
    scale = RunningStatistics().add(values[:20].tolist()).add(values[20:].tolist())
    assert scale.mean == pytest.approx(values.mean().item())
    assert scale.deviation == pytest.approx(values.std(correction=0).item())
    assert scale.restore(scale.normalize(7.5)) == pytest.approx(7.5)
    assert RunningStatistics().normalize(3.0) == 3.0
    assert RunningStatistics().add([2.0, 2.0]).deviation == 1.0


# ---- what critics read -------------------------------------------------------------------------------


def test_history_text_is_as_documented_and_loses_its_oldest_part():
    message = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "now?"}]
    node = Node(0, {}, 1, (0,), [], [], [], [["one", "two"], ["uno", message]], [["A"], ["B"]], [])
    text = history_text(node, [0, 1])
    assert text == "0< one\n1< uno\n0> A\n1> B\n0< two\n1< system: be brief\nuser: now?"
    assert history_text(node, [1], ["C"]) == "1< uno\n1> B\n1< system: be brief\nuser: now?\n1> C"
    critic = Agent(build_model(258, 1), play().critics[0].tokenizer, "critic")
    assert critic.context_length == 32
    item = value_item(text, critic, 1, "x")
    assert item.cut
    assert len(item.prompt_ids) == 32
    assert critic.decode(item.prompt_ids) == text[-32:]
    assert not value_item("short", critic, 1, "x").cut


# ---- value heads -------------------------------------------------------------------------------------


def random_head(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model.value_head.output.weight.normal_(generator=generator)
    return model


@pytest.fixture
def valuer():
    """Pad equals EOS (token 2) in this tokenizer."""
    agent = Agent(build_model(3, 5, layers=2), build_tokenizer("ab"), "critic")
    random_head(agent.attach_value_head())
    return agent


def test_a_value_in_a_batch_is_the_value_alone(valuer):
    """Pad equal to EOS, EOS inside the text and at its end: always the last real token is read."""
    texts = [[0, 2, 1, 2, 2], [1], [2], [0, 1, 2], [0, 1], [2, 2, 0, 2]]
    items = [ValueItem(ids, 0, str(i)) for i, ids in enumerate(texts)]
    together = head_outputs(valuer.value_model, valuer, items, valuer.device)
    for item, value in zip(items, together):
        alone = head_outputs(valuer.value_model, valuer, [item], valuer.device)
        states = valuer.model(torch.tensor([item.prompt_ids]), output_hidden_states=True).hidden_states[-1][0, -1]
        plain = states @ valuer.value_model.value_head.output.weight[0]
        assert value.item() == pytest.approx(alone.item(), abs=1e-5) == pytest.approx(plain.item(), abs=1e-5)
    assert len({round(value, 4) for value in together.tolist()}) == len(texts)
    engine = Engine(valuer.trained, OptimizerSettings(1e-3), None)
    for budget in (1, 7, 10**4):
        found = frozen_outputs(items, valuer, engine, budget)
        assert [found[i] for i in range(len(items))] == pytest.approx(together.tolist(), abs=1e-5)


def test_values_and_log_probs_are_without_dropout(load_agent, gpt2):
    agent = load_agent(gpt2)
    model = random_head(agent.attach_value_head())
    items = [ValueItem([1, 2, 3], 0, "x")]
    first = head_outputs(model, agent, items, agent.device)
    assert torch.equal(first, head_outputs(model, agent, items, agent.device))
    batch = collate([sample([1, 2], [3, 4])], agent)
    one, other = (policy_and_values(model, batch, agent.finish, 1.0, "value", False) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other))


def sample(prompt, answer):
    return Sample(prompt, answer, 0, "x", 0.0, 1.0, True, False, torch.zeros(len(answer)))


@pytest.mark.parametrize("of_actions", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
def test_gradients_of_one_shared_forward_are_those_of_two_separate_ones(valuer, of_actions, chunked, monkeypatch):
    monkeypatch.setattr("comlrl.logprobs.CHUNK", 6)
    monkeypatch.setattr("comlrl.logprobs.KEPT", 0)
    batch = collate([sample([0, 2, 1], [0, 1, 2]), sample([0, 2, 1], [1, 2]), sample([1], [2])], valuer)
    model = valuer.value_model
    parameters = [p for p in model.parameters() if p.requires_grad]
    calls = []
    hook = model.backbone.base_model.register_forward_hook(lambda *_: calls.append(1))
    finish = valuer.finish if chunked else None
    logprobs, entropies, values = policy_and_values(model, batch, finish, 0.7, "gradient", of_actions)
    hook.remove()
    assert len(calls) == 2  # prompts, and answers on the prompts' cache: as the policy alone
    shared = torch.autograd.grad(logprobs.sum() - 0.3 * entropies.sum() + (values**2).sum(), parameters)
    tensors = (batch.prompt_ids, batch.prompt_mask, batch.completion_ids, batch.completion_mask, batch.prompt_index)
    again, spread = completion_logprobs(valuer.model, *tensors, 0.7, "gradient")
    assert torch.allclose(logprobs, again, atol=1e-6)
    texts = [[*s.prompt_ids, *(s.token_ids if of_actions else [])] for s in batch.samples]
    apart = head_outputs(model, valuer, [ValueItem(ids, 0, "x") for ids in texts], valuer.device)
    assert torch.allclose(values, apart, atol=1e-5)
    policy = torch.autograd.grad(again.sum() - 0.3 * spread.sum(), parameters, allow_unused=True)
    value = torch.autograd.grad((apart**2).sum(), parameters, allow_unused=True)
    for found, one, other in zip(shared, policy, value):
        expected = sum(torch.zeros_like(found) if part is None else part for part in (one, other))
        assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4)


def test_item_losses_are_means_over_targets():
    items = [ValueItem([1], 0, "x", targets=[1.0, 3.0], output=0.5), ValueItem([1], 0, "y", targets=[2.0], output=2.0)]
    found = item_losses(torch.tensor([0.5, 2.5]), items, None)
    assert found.tolist() == pytest.approx([(0.25 + 6.25) / 2, 0.25])


@pytest.mark.parametrize("width", [None, 4])
def test_a_value_head_loads_back_to_the_same_values(valuer, tmp_path, width):
    model = random_head(CausalLMWithValueHead(valuer.model, width))
    model.save_pretrained(str(tmp_path / "m"))
    again = CausalLMWithValueHead.from_pretrained(str(tmp_path / "m"))
    ids, mask = torch.tensor([[0, 2, 1]]), torch.ones(1, 3, dtype=torch.long)
    assert torch.equal(model.last_values(ids, mask), again.last_values(ids, mask))
    assert model.last_values(ids, mask).abs().item() > 1e-3
    output = again(input_ids=ids)
    assert output.logits.shape == (1, 3, 3)
    assert output.values.shape == (1, 3)
    assert again(input_ids=ids, output_values=False).values is None
    valuer.model.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"has no value_head\.safetensors"):
        CausalLMWithValueHead.from_pretrained(str(tmp_path / "plain"))


def test_values_are_fp32_under_a_bf16_backbone(load_agent, tiny):
    agent = load_agent(tiny, compute_dtype=torch.bfloat16)
    model = random_head(agent.attach_value_head())
    value = head_outputs(model, agent, [ValueItem([70, 71], 0, "x")], agent.device)
    assert value.dtype == torch.float32
    assert model.value_head.output.weight.dtype == torch.float32
    assert ValueHead(4)(torch.randn(2, 3, 4)).shape == (2, 3)


def test_the_language_model_head_is_not_run_for_values(load_agent, tiny):
    agent = load_agent(tiny)
    model = agent.attach_value_head()
    agent.model.get_output_embeddings().register_forward_hook(lambda *_: pytest.fail("the head was run"))
    head_outputs(model, agent, [ValueItem([70, 71], 0, "x")], agent.device)
