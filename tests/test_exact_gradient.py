"""The whole path from prompts to gradients against exact expectations.

Everything the team can say is enumerated, so the expected gradient of each estimator is a finite sum, and the
gradient of the expected discounted return is autograd through another one. They meet the trainer twice: on trees
that the real sampler drew (|z| < 4 in each weight), and on all trees there are, weighted by their probabilities
(to rounding).
"""

import dataclasses
import itertools
import math
from collections import Counter

import pytest
import torch
from tiny_team import Game, GradientTrainer

from comlrl.credit import ADVANTAGE_MODES, tree_size
from comlrl.generation import Completion
from comlrl.rollouts import Rollouts, joint_actions, walk

DISCOUNT = 0.5

# ---- the plain twin: sums over everything that can be said -----------------------------------------


def answer_logprobs(game, model, prompt_ids):
    """Log-prob of each answer, by one unpadded forward of prompt and answer, with gradient; [answers]."""
    rows = [[*prompt_ids, *ids, *[0] * (game.max_new_tokens - len(ids))] for ids in game.answers]
    logprobs = torch.log_softmax(model(torch.tensor(rows)).logits.double(), -1)
    start = len(prompt_ids) - 1
    return torch.stack(
        [sum(logprobs[n, start + t, token] for t, token in enumerate(ids)) for n, ids in enumerate(game.answers)]
    )


class Enumeration:
    """The team's policies as tables, and what follows from them by summation.

    `logprobs[agent][history]`: of the answers. `outcomes[history]`: all that can happen to the K samples an agent
    at a node of that history (probability [M], answer numbers [M, agent, K], credits [M, agent, K]).
    `presence[history]`: expected weight of such nodes in a tree.
    """

    def __init__(self, game, trainer, threshold=None):
        self.game, self.trainer, self.threshold = game, trainer, threshold
        self.turns, self.generations = trainer.shape.num_turns, trainer.shape.num_generations
        self.actions = joint_actions(self.generations, 2, trainer.shape.joint_mode)
        histories = list(game.rewards) if self.turns > 1 else [None]
        self.logprobs = [
            {h: answer_logprobs(game, agent.model, agent.encode(game.prompt(h, i))) for h in histories}
            for i, agent in enumerate(trainer.agents)
        ]
        self.probabilities = [{h: lp.detach().exp() for h, lp in table.items()} for table in self.logprobs]
        for table in self.probabilities:
            assert all(row.sum().item() == pytest.approx(1, abs=1e-6) for row in table.values())
        self.outcomes, self.presence = {}, Counter({None: 1.0})
        self.enumerate_outcomes()

    def groups(self, history):
        """Every outcome of the samples: probability, answers of both agents, answers of each joint action."""
        count = len(self.game.answers)
        first, second = (table[history].tolist() for table in self.probabilities)
        for x in itertools.product(range(count), repeat=self.generations):
            for y in itertools.product(range(count), repeat=self.generations):
                probability = math.prod(first[a] for a in x) * math.prod(second[a] for a in y)
                yield probability, (x, y), [(x[k], y[m]) for k, m in self.actions]

    def ended(self, rewards):
        if self.turns == 1:
            return True
        return self.threshold is not None and mean(rewards) > self.threshold

    def credits(self, returns):
        """[agent][k]: the mean return of the joint actions that contain the sample."""
        return [
            [mean([r for action, r in zip(self.actions, returns) if action[i] == k]) for k in range(self.generations)]
            for i in range(2)
        ]

    def enumerate_outcomes(self):
        means = {}  # of each child: the distribution of its mean return
        for history in self.logprobs[0]:
            if history is not None:
                rows, means[history] = [], Counter()
                for probability, answers, joints in self.groups(history):
                    rewards = [self.game.rewards[history][joint] for joint in joints]
                    means[history][round(mean(rewards), 12)] += probability
                    rows.append((probability, answers, self.credits(rewards)))
                self.outcomes[history] = as_tensors(rows)
        rows = []
        for probability, answers, joints in self.groups(None):
            rewards = [self.game.rewards[None][joint] for joint in joints]
            if self.ended(rewards):
                rows.append((probability, answers, self.credits(rewards)))
                continue
            for joint in joints:
                self.presence[joint] += probability * DISCOUNT / len(joints)
            for outcome in itertools.product(*[means[joint].items() for joint in joints]):
                returns = [r + DISCOUNT * value for r, (value, _) in zip(rewards, outcome)]
                chance = probability * math.prod(p for _, p in outcome)
                rows.append((chance, answers, self.credits(returns)))
        self.outcomes[None] = as_tensors(rows)

    def greedy(self, history):
        """The joint answer of most probable tokens."""
        said = []
        for agent in range(2):
            prefix: tuple = ()
            while prefix not in self.game.answers:
                weight: Counter = Counter()
                for ids, p in zip(self.game.answers, self.probabilities[agent][history].tolist()):
                    if ids[: len(prefix)] == prefix:
                        weight[ids[: len(prefix) + 1]] += p
                prefix = weight.most_common(1)[0][0]
            said.append(self.game.answers.index(prefix))
        return tuple(said)

    def greedy_return(self, history):
        joint = self.greedy(history)
        reward = self.game.rewards[history][joint]
        if history is not None or self.ended([reward]):
            return reward
        return reward + DISCOUNT * self.greedy_return(joint)

    def expected_gradient(self, mode):
        """Of the loss of one tree, one flat tensor an agent: -sum of E[weight * A / K] * grad log pi."""
        loss = 0.0
        for history, (probability, answers, credits) in self.outcomes.items():
            baseline = self.greedy_return(history) if mode == "greedy" else None
            for agent in range(2):
                values = plain_advantages(credits[:, agent], mode, mode == "mean", baseline)
                weight = self.presence[history] * probability[:, None] / self.generations
                sums = torch.zeros(len(self.game.answers), dtype=torch.float64)
                sums.index_add_(0, answers[:, agent].flatten(), (weight * values).flatten())
                loss = loss - (sums * self.logprobs[agent][history]).sum()
        return self.backward(loss)

    def exact_gradient(self):
        """Of minus the expected discounted return of one trajectory, by autograd."""
        assert self.threshold is None or self.generations == 1  # else the samples of a node end together
        expected = self.expectation(self.game.rewards[None], None)
        for joint, reward in self.game.rewards[None].items():
            if not self.ended([reward]):
                later = self.expectation(self.game.rewards[joint], joint)
                expected = expected + DISCOUNT * self.arrival(joint) * later
        return self.backward(-expected)

    def gradient_with_siblings_fixed(self):
        """Of minus the mean expected return of a node's samples, siblings held fixed where they end the node."""
        total = 0.0
        for _, _, joints in self.groups(None):
            rewards = [self.game.rewards[None][joint] for joint in joints]
            arrives = [self.arrival(joint) for joint in joints]
            for k, joint in enumerate(joints):
                value = rewards[k]
                if not self.ended(rewards):
                    value = value + DISCOUNT * self.expectation(self.game.rewards[joint], joint)
                siblings = math.prod(p.detach() for other, p in enumerate(arrives) if other != k)
                total = total + siblings * arrives[k] * value / len(joints)
        return self.backward(-total)

    def arrival(self, joint):
        """Probability of a joint answer in the first turn, with gradient."""
        return self.logprobs[0][None][joint[0]].exp() * self.logprobs[1][None][joint[1]].exp()

    def expectation(self, table, history):
        """Of one turn's reward, with gradient."""
        first, second = (logprobs[history].exp() for logprobs in self.logprobs)
        return sum(first[x] * second[y] * reward for (x, y), reward in table.items())

    def backward(self, loss):
        parameters = [list(agent.model.parameters()) for agent in self.trainer.agents]
        gradients = [torch.autograd.grad(loss, each, retain_graph=True, materialize_grads=True) for each in parameters]
        return [torch.cat([g.flatten() for g in each]).double() for each in gradients]


def mean(values):
    return sum(values) / len(values)


def as_tensors(rows):
    probability, answers, credits = zip(*rows)
    return (
        torch.tensor(probability, dtype=torch.float64),
        torch.tensor(answers),
        torch.tensor(credits, dtype=torch.float64),
    )


def plain_advantages(credits, mode, normalize, greedy_return):
    """[M, K]: M groups of K credits."""
    columns = [credits[:, k] for k in range(credits.shape[1])]
    average = mean(columns)
    baseline = {
        "raw": lambda k: 0.0,
        "mean": lambda k: average,
        "greedy": lambda k: greedy_return,
        "max": lambda k: torch.stack(columns).amax(0),
        "rloo": lambda k: mean(columns[:k] + columns[k + 1 :]),
    }[mode]
    values = torch.stack([column - baseline(k) for k, column in enumerate(columns)], 1)
    if normalize:
        deviation = mean([(column - average) ** 2 for column in columns]) ** 0.5
        values = values / deviation.clamp(min=1e-6)[:, None]
    return values


def assert_close(gradients, expected, relative=2e-5):
    for gradient, other in zip(gradients, expected, strict=True):
        scale = other.abs().max()
        assert scale > 1e-2
        assert (gradient - other).abs().max() < relative * scale


# ---- sampled trees ---------------------------------------------------------------------------------


# Agents need each other's answer, and the second turn needs the first one's.
def first_reward(x, y):
    return [0.0, 0.3, 1.0][(x + 2 * y) % 3]


def second_reward(past, now):
    return float((past[0] + 2 * past[1] + now[0] + 3 * now[1] + now[0] * now[1]) % 3 == 0)


WORDS = Game("a", 2, first_reward, second_reward)  # "", "a", "aa": up to two tokens, with and without EOS
LETTERS = Game("ab", 1, first_reward, second_reward)  # "", "a", "b": one token


@dataclasses.dataclass
class Case:
    game: Game
    generations: int
    joint_mode: str = "aligned"
    threshold: float | None = None
    turns: int = 2
    settings: dict = dataclasses.field(default_factory=dict)

    def trainer(self):
        return self.game.trainer(
            GradientTrainer,
            turns=self.turns,
            num_generations=self.generations,
            joint_mode=self.joint_mode,
            early_termination_threshold=self.threshold,
            discount=DISCOUNT,
            advantage_mode="greedy",  # for its chains; the trees serve every mode
            **self.settings,
        )


SAMPLED = {
    "aligned": Case(WORDS, 2),
    "three": Case(LETTERS, 3),
    "cross": Case(LETTERS, 2, "cross"),
    "ending early": Case(WORDS, 2, threshold=0.55),
}


def check_sampled(case, groups, trees, modes=ADVANTAGE_MODES, seed=0):
    """Each weight's mean over independent groups of trees is within 4 standard errors of its expectation."""
    trainer = case.trainer()
    enumeration = Enumeration(case.game, trainer, case.threshold)
    rows = [(number, {}) for number in range(groups * trees)]
    roots, _ = trainer.rollouts.expand(rows, trainer.shape, trainer.sampling, (seed, "train", 0))
    if case.threshold is None:
        chains = [node.baseline for node in walk(roots)]
        nodes = len(list(walk(roots))) + len(list(walk(chains)))
        assert nodes == len(roots) * tree_size(trainer.branches(), 2, greedy_baseline=True)
    for mode in modes:
        trainer.args = dataclasses.replace(trainer.args, advantage_mode=mode)
        expected = enumeration.expected_gradient(mode)
        drawn = [trainer.gradient_of(roots[g * trees : (g + 1) * trees])[0] for g in range(groups)]
        for agent in range(2):
            gradients = torch.stack([flat[agent] for flat in drawn])
            error = gradients.std(0) / groups**0.5 + 1e-6 * gradients.abs().max()  # sampling, and rounding
            distance = (gradients.mean(0) - expected[agent]).abs()
            assert (distance / error).max() < 4, (mode, agent)
            assert (expected[agent].abs() / error).max() > 4, (mode, agent)  # enough trees to tell from 0


def test_sampled_trees_of_cross_joint_actions_have_the_expected_gradient():
    check_sampled(SAMPLED["cross"], groups=25, trees=20, modes=("mean", "rloo", "greedy"))


def test_sampled_trees_that_end_early_have_the_expected_gradient():
    check_sampled(SAMPLED["ending early"], groups=40, trees=24, modes=("mean", "greedy"))


@pytest.mark.full
@pytest.mark.parametrize("name", SAMPLED)
def test_many_sampled_trees_have_the_expected_gradient(name):
    check_sampled(SAMPLED[name], groups=60, trees=40, seed=2)


# ---- all trees -------------------------------------------------------------------------------------


class AllTrees(Rollouts):
    """Says what the row's plan says instead of sampling: {path: answer numbers, [agent][k]}. All else is real."""

    def __init__(self, case):
        self.case, self.team_trainer = case, case.trainer()
        real = self.team_trainer.rollouts
        super().__init__(real.agents, real.rewards, real.formatters, real.transition, real.team, prompt_limits=[30, 30])
        self.enumeration = Enumeration(case.game, self.team_trainer, case.threshold)

    def _generate(self, level, shape, sampling, seed_key):
        for node in level:
            history = self.case.game.history_of[node.prompts[0]]
            greedy = [[answer] for answer in self.enumeration.greedy(history)]
            self.say(node, greedy if node.greedy else node.row["plan"][node.path], shape.joint_mode)
            if node.baseline is not None:
                self.say(node.baseline, greedy, "aligned")

    def say(self, node, answers, joint_mode):
        game = self.case.game
        node.completions = [
            [Completion(list(game.answers[a]), game.texts[a], [0.0] * len(game.answers[a]), "eos") for a in said]
            for said in answers
        ]
        node.joint_actions = joint_actions(len(answers[0]), 2, joint_mode)

    def rows(self):
        """Every tree there is, as (probability, plan)."""
        for probability, answers, joints in self.distinct_groups(None):
            rewards = [self.case.game.rewards[None][joint] for joint in joints]
            if self.enumeration.ended(rewards):
                yield probability, {(): answers}
                continue
            for children in itertools.product(*[self.distinct_groups(joint) for joint in joints]):
                chance = probability * math.prod(p for p, _, _ in children)
                yield chance, {(): answers, **{(j,): said for j, (_, said, _) in enumerate(children)}}

    def distinct_groups(self, history):
        """The enumeration's groups, up to the order of the samples: a quarter of the trees."""
        found = {}
        for probability, answers, joints in self.enumeration.groups(history):
            key = tuple(sorted(joints))
            found[key] = (probability + found[key][0] if key in found else probability, answers, joints)
        return list(found.values())

    def roots(self):
        """All trees, each node's weight multiplied so that the buffer's mean is the expectation."""
        rows = list(self.rows())
        assert sum(probability for probability, _ in rows) == pytest.approx(1)
        trainer = self.team_trainer
        planned = [(number, {"plan": plan}) for number, (_, plan) in enumerate(rows)]
        roots, _ = self.expand(planned, trainer.shape, trainer.sampling, (0,))
        for root, (probability, _) in zip(roots, rows, strict=True):
            for node in walk([root]):
                node.weight *= probability * len(rows)
        return roots

    def gradient(self, roots, mode, **settings):
        trainer = self.team_trainer
        trainer.args = dataclasses.replace(trainer.args, advantage_mode=mode, **settings)
        (gradient,) = trainer.gradient_of(roots)
        return gradient


COINS = Game("a", 1, first_reward, second_reward)  # "", "a"
ENUMERATED = {
    "aligned": Case(COINS, 2),
    "ending early": Case(COINS, 2, threshold=0.55),
    "one sample, ending early": Case(COINS, 1, threshold=0.55),
    "one turn, cross": Case(WORDS, 2, "cross", turns=1),
    "one turn, three": Case(COINS, 3, turns=1),
    "one turn, three, cross": Case(COINS, 3, "cross", turns=1),
}


@pytest.mark.parametrize("name", ENUMERATED)
def test_all_trees_together_have_the_expected_gradient(name):
    case = ENUMERATED[name]
    trees = AllTrees(case)
    roots = trees.roots()
    modes = {"one sample, ending early": ("raw", "greedy"), "ending early": ("rloo", "greedy")}
    for mode in modes.get(name, ADVANTAGE_MODES):
        gradient = trees.gradient(roots, mode)
        assert_close(gradient, trees.enumeration.expected_gradient(mode))
        if mode in ("raw", "rloo", "greedy") and (case.threshold is None or case.generations == 1):
            assert_close(gradient, trees.enumeration.exact_gradient())
    if case.turns == 1:  # at ratio 1 the clipped loss and the plain one have one gradient
        assert_close(trees.gradient(roots, mode, clip_range=None), gradient)


@pytest.mark.parametrize("name", ["cross", "aligned", "three"])
def test_unbiased_modes_have_the_gradient_of_the_expected_return(name):
    case = SAMPLED[name]
    enumeration = Enumeration(case.game, case.trainer())
    exact = enumeration.exact_gradient()
    for mode in ("raw", "rloo", "greedy"):
        assert_close(enumeration.expected_gradient(mode), exact, relative=1e-5)


@pytest.mark.parametrize("game", [COINS, WORDS])
def test_what_ending_early_estimates(game):
    """A node ends for all its samples, by their mean reward. What an answer does to its siblings that way is not
    credited to it: raw and greedy have the gradient that leaves this out."""
    enumeration = Enumeration(game, Case(game, 2, threshold=0.55).trainer(), 0.55)
    expected = enumeration.gradient_with_siblings_fixed()
    for mode in ("raw", "greedy"):
        assert_close(enumeration.expected_gradient(mode), expected, relative=1e-5)


@pytest.mark.parametrize("mode", ["raw", "rloo", "greedy"])
def test_kl_in_the_return_has_the_gradient_of_the_exact_kl(mode):
    """Each agent ascends the expected reward minus its own KL to its reference, over whole answers."""
    kl = {"reference_kl_enabled": True, "reference_kl_in": "return", "reference_kl_coef": 0.7}
    trees = AllTrees(Case(WORDS, 2, turns=1, settings=kl))
    trainer, enumeration = trees.team_trainer, trees.enumeration
    for seed, reference in enumerate(frozen.model for frozen in trainer.references.values()):
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    penalty = 0.0
    for i, (agent, reference) in enumerate(
        zip(trainer.agents, [frozen.model for frozen in trainer.references.values()])
    ):
        logprobs = enumeration.logprobs[i][None]
        other = answer_logprobs(WORDS, reference, agent.encode(WORDS.prompt(None, i)))
        penalty = penalty + 0.7 * (logprobs.exp() * (logprobs - other)).sum()
    assert penalty > 0.05
    expected = enumeration.backward(penalty - enumeration.expectation(WORDS.rewards[None], None))
    assert_close(trees.gradient(trees.roots(), mode), expected)
