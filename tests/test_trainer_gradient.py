"""The trainer's gradient of a hand-made buffer against a plain twin: one sample at a time, no padding, no cache."""

import copy
import dataclasses
import itertools

import pytest
import torch
from tiny_team import GradientTrainer, build_model, build_tokenizer, flat_gradient

from comlrl.generation import Completion
from comlrl.losses import LOSS_AGGREGATIONS
from comlrl.rollouts import Node, fill_returns, joint_actions, walk
from comlrl.trainers import MAGRPOConfig

LETTERS = "abcdefghijk"
EOS = len(LETTERS)
MAX_NEW_TOKENS = 5


class Drifting(GradientTrainer):
    """Where the real trainer steps, the weights move by noise: the ratios of later minibatches are not 1."""

    def apply(self, *arguments):
        super().apply(*arguments)
        self.drift(len(self.gradients_seen))

    def drift(self, seed, size=0.05):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for agent in self.agents:
                for parameter in agent.model.parameters():
                    parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def build_trainer(**settings):
    """Two agents of two layers; their references are other weights than theirs."""
    settings = {"num_generations": 3, "discount": 0.5, "rollout_buffer_size": 100, **settings}
    trainer = Drifting(
        agents=[build_model(EOS + 1, seed, layers=2) for seed in (2, 9)],
        tokenizer=build_tokenizer(LETTERS),
        reward_func=lambda first, second: [0.0] * len(first),
        args=MAGRPOConfig(dtype="float32", max_new_tokens=MAX_NEW_TOKENS, **settings),
    )
    trainer.drift(seed=100)
    return trainer


# ---- the buffer ------------------------------------------------------------------------------------


def say(*texts):
    """`.` is the end of an answer; without it the answer was cut at max_new_tokens."""
    completions = []
    for text in texts:
        ids = [EOS if letter == "." else LETTERS.index(letter) for letter in text]
        reason = "eos" if text.endswith(".") else "length"
        completions.append(Completion(ids, text.rstrip("."), [-2.2 - 0.3 * i for i in range(len(ids))], reason))
    return completions


def make_node(row, prompts, completions, rewards, children=(), weight=1.0, turn=0, joint_mode="aligned"):
    return Node(
        row_id=row,
        row={},
        turn=turn,
        path=(0,) * turn,
        prompts=prompts,
        prompt_ids=[[LETTERS.index(letter) for letter in prompt] for prompt in prompts],
        role_prompts=prompts,
        prompt_history=[],
        response_history=[],
        reward_history=[],
        weight=weight,
        completions=[say(*texts) for texts in completions],
        joint_actions=joint_actions(len(completions[0]), 2, joint_mode),
        rewards=list(rewards),
        children=list(children),
    )


def make_roots():
    """Two rows and four nodes: answers of one token, of only EOS, cut ones, one without reward, an equal group."""
    words = [["a.", "bcd.", "efghi"], [".", "k", "jjjjj"]]
    child = make_node(0, ["ab", "cde"], [["cab.", ".", "d."], ["b.", "hhhhh", "g."]], [3, None, 1], (), 1 / 6, 1)
    equal = make_node(0, ["abc", "c"], [["c.", "d.", "ef."], ["b.", "b.", "g."]], [2, 2, 2], (), 1 / 6, 1)
    roots = [
        make_node(0, ["ab", "fgh"], words, [1.0, -0.5, 0.25], [child, None, equal]),
        make_node(1, ["abcdef", "f"], [["kkkk.", "a.", "kb."], ["e.", "fghij", "ab."]], [0.0, 2.0, 1.0]),
    ]
    for root in roots:
        fill_returns(root, 0.5)
    return roots


# ---- the plain twin --------------------------------------------------------------------------------


def token_logprobs(model, prompt, answer, temperature):
    """One sequence, whole logits: the log-prob of each answer token, and each distribution's log-probs."""
    logits = model(torch.tensor([[*prompt, *answer]])).logits[0]
    tables = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, -1)
    return torch.stack([table[token] for table, token in zip(tables, answer)]), tables


def plain_gradient(args, agent, nodes, chunk, num_roots, now, old, reference):
    """One agent's gradient on the nodes `chunk`: loops over samples and tokens, in the order of the definitions."""
    model = copy.deepcopy(now)
    model.zero_grad()
    if args.node_weighting == "tree":
        scale = len(nodes) / len(chunk) / num_roots
    else:
        scale = 1 / len(chunk)
    samples = []  # (completion, prompt, advantage, weight)
    for node in (nodes[i] for i in chunk):
        known = []
        for k, completion in enumerate(node.completions[agent]):
            returns = [r for a, r in zip(node.joint_actions, node.returns) if a[agent] == k and r is not None]
            if returns:
                value = sum(returns) / len(returns)
                if args.reference_kl_enabled and args.reference_kl_in == "return":
                    prompt, ids = node.prompt_ids[agent], completion.token_ids
                    with torch.no_grad():
                        ours, _ = token_logprobs(old, prompt, ids, args.temperature)
                        theirs, _ = token_logprobs(reference, prompt, ids, args.temperature)
                    value -= args.reference_kl_coef * (ours - theirs).sum().item()
                known.append((completion, value))
        credits = [value for _, value in known]
        mean = sum(credits) / len(credits)
        deviation = (sum((value - mean) ** 2 for value in credits) / len(credits)) ** 0.5
        for completion, value in known:
            advantage = value if args.advantage_mode == "raw" else (value - mean) / max(deviation, 1e-6)
            samples.append((completion, node.prompt_ids[agent], advantage, scale * node.weight / len(known)))

    def counts(completion):
        return not (args.mask_truncated and completion.finish_reason == "length")

    tokens = sum(len(completion.token_ids) for completion, *_ in samples if counts(completion))
    for completion, prompt, advantage, weight in samples:
        if not counts(completion):
            continue
        ids = completion.token_ids
        new, tables = token_logprobs(model, prompt, ids, args.temperature)
        with torch.no_grad():
            before, _ = token_logprobs(old, prompt, ids, args.temperature)
            theirs, _ = token_logprobs(reference, prompt, ids, args.temperature)
        loss = 0.0
        for t in range(len(ids)):
            ratio = torch.exp(new[t] - before[t])
            if args.clip_range is None:
                term = -advantage * new[t]
            else:
                bounded = ratio.clamp(1 - args.clip_range, 1 + args.clip_range)
                term = -torch.min(ratio * advantage, bounded * advantage)
            if args.sampler_ratio_cap is not None:
                correction = torch.exp(before[t] - completion.logprobs[t]).clamp(max=args.sampler_ratio_cap)
                term = term * correction
            if args.entropy_coef:
                term = term + args.entropy_coef * (tables[t].exp() * tables[t]).sum()
            if args.reference_kl_enabled and args.reference_kl_in == "loss":
                gap = theirs[t] - new[t]
                term = term + args.reference_kl_coef * ratio * (torch.exp(gap) - gap - 1)
            loss = loss + term
        factor = {
            "sequence_sum": 1.0,
            "token_mean": len(samples) / tokens,
            "constant": 1 / MAX_NEW_TOKENS,
        }[args.loss_aggregation]
        (loss * weight * factor).backward()
    return flat_gradient(model)


def plain_gradients(trainer, roots, steps):
    """[minibatch][agent] for weights `steps[minibatch][agent]`; the first ones are the old weights."""
    args, nodes = trainer.args, list(walk(roots))
    size = args.train_batch_size or args.rollout_buffer_size
    chunks = [c for e in range(args.epochs_per_rollout) for c in trainer.minibatches(len(nodes), size, e)]
    references = [trainer.references[i].model if trainer.references else trainer.agents[i].model for i in range(2)]
    return [
        [plain_gradient(args, i, nodes, chunk, len(roots), models[i], steps[0][i], references[i]) for i in range(2)]
        for chunk, models in zip(chunks, steps, strict=True)
    ]


def learn(trainer, roots):
    """The trainer's gradients [minibatch][agent], and the weights it had at each."""
    steps = []
    real = trainer.gradients

    def gradients(*arguments):
        steps.append([copy.deepcopy(agent.model) for agent in trainer.agents])
        return real(*arguments)

    trainer.gradients = gradients
    return trainer.gradient_of(roots), steps


def assert_same(ours, others):
    ours, others = list(itertools.chain(*ours)), list(itertools.chain(*others))
    assert max(other.abs().max() for other in others) > 1e-2
    for one, other in zip(ours, others, strict=True):
        assert (one - other).abs().max() < 1e-5 * max(1.0, other.abs().max())


# ---- tests -----------------------------------------------------------------------------------------

KL = {"reference_kl_enabled": True, "reference_kl_coef": 0.3}
SETTINGS = {
    "defaults": {},
    "plain": {"clip_range": None},
    "raw": {"advantage_mode": "raw"},
    "temperature": {"temperature": 0.5},
    **{aggregation: {"loss_aggregation": aggregation} for aggregation in LOSS_AGGREGATIONS},
    "equal nodes": {"node_weighting": "equal"},
    "masked": {"mask_truncated": True},
    **{f"masked, {name}": {"mask_truncated": True, "loss_aggregation": name} for name in LOSS_AGGREGATIONS},
    "KL in the loss": {**KL, "temperature": 0.7},
    "KL in the return": {**KL, "reference_kl_in": "return", "temperature": 0.7},
    "entropy": {"entropy_coef": 0.2, "temperature": 0.7},
    "sampler ratio": {"sampler_ratio_cap": 0.9},
}
SEVERAL = {"epochs_per_rollout": 2, "train_batch_size": 3}


@pytest.mark.parametrize("name", SETTINGS)
def test_gradient_equals_the_plain_twin(name):
    trainer = build_trainer(**{"micro_batch_tokens": 30, **SETTINGS[name]})
    roots = make_roots()
    gradients, steps = learn(trainer, roots)
    assert len(gradients) == 1
    assert_same(gradients, plain_gradients(trainer, roots, steps))


@pytest.mark.parametrize("name", ["defaults", "plain", "KL in the loss", "KL in the return", "sampler ratio"])
def test_gradients_of_several_steps_equal_the_plain_twin(name):
    trainer = build_trainer(**{"micro_batch_tokens": 30, **SETTINGS[name], **SEVERAL})
    roots = make_roots()
    gradients, steps = learn(trainer, roots)
    assert len(gradients) == 4
    assert_same(gradients, plain_gradients(trainer, roots, steps))


def test_gradient_of_cross_joint_actions_equals_the_plain_twin():
    trainer = build_trainer(joint_mode="cross", num_generations=2)
    rewards = [1.0, None, 0.5, -1.0]
    root = make_node(0, ["ab", "c"], [["a.", "bcd."], [".", "kkkkk"]], rewards, joint_mode="cross")
    fill_returns(root, 0.5)
    gradients, steps = learn(trainer, [root])
    assert_same(gradients, plain_gradients(trainer, [root], steps))


def gradient(settings=None, roots=None, change=None):
    """The one minibatch's gradients of a new trainer, with every term of the loss."""
    every_term = {**KL, "entropy_coef": 0.1, "loss_aggregation": "token_mean"}
    trainer = build_trainer(**every_term, **(settings or {}))
    if change:
        change(trainer)
    return trainer.gradient_of(roots or make_roots())


@pytest.mark.parametrize("budget", [1, 13, 40, 10**5])
def test_gradient_does_not_depend_on_micro_batches(budget):
    assert_same(gradient({"micro_batch_tokens": budget}), gradient())


def test_gradient_does_not_depend_on_the_pad_token():
    def other_pad(trainer):
        for agent in trainer.agents:
            agent.pad_id = 3

    for one, other in zip(gradient(change=other_pad)[0], gradient()[0]):
        assert torch.equal(one, other)


def test_gradient_does_not_depend_on_the_order_of_rows_and_samples():
    roots = make_roots()[::-1]
    for node in walk(roots):
        order = [2, 0, 1]
        node.completions = [[completions[k] for k in order] for completions in node.completions]
        node.returns = [node.returns[k] for k in order]
    assert_same(gradient(roots=roots), gradient())


@pytest.mark.parametrize("weighting", ["tree", "equal"])
def test_minibatches_average_to_the_whole(weighting):
    """Each minibatch estimates the gradient of the whole buffer; weighted by their nodes they give it."""
    settings = {"node_weighting": weighting, "num_generations": 3, "advantage_mode": "rloo"}
    whole = build_trainer(**settings).gradient_of(make_roots())
    trainer = build_trainer(**settings, train_batch_size=3)
    trainer.drift = lambda seed: None
    parts = trainer.gradient_of(make_roots())
    assert len(parts) == 2
    assert_same([[(3 * first + other) / 4 for first, other in zip(*parts)]], whole)


def test_samples_without_advantage_are_left_out_without_a_trace():
    equal = make_roots()[0].children[2]
    trainer = build_trainer(**KL)
    assert all(g.abs().max() > 0 for g in trainer.gradient_of([equal])[0])
    trainer.args = dataclasses.replace(trainer.args, reference_kl_enabled=False)
    assert all(g.abs().max() == 0 for g in trainer.gradient_of([equal])[0])
