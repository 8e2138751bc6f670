"""Returns, credits, advantages and node weights against values worked out by hand and plain twins."""

import itertools
import random
import statistics

import pytest
import torch

from comlrl import credit
from comlrl.rollouts import Node, fill_returns, joint_actions, walk

RETURNS = [1.0, 2.0, 4.0, 9.0]
BASELINED = ("mean", "rloo", "max")


def advantages(credits, mode, normalize=False, greedy_return=None):
    return credit.advantages(torch.tensor(credits, dtype=torch.float64), mode, normalize, greedy_return).tolist()


def make_node(rewards, children=None, turn=0, actions=None):
    """A node with nothing but what the returns need."""
    return Node(
        row_id=0,
        row={},
        turn=turn,
        path=(),
        prompts=[],
        prompt_ids=[],
        role_prompts=[],
        prompt_history=[],
        response_history=[],
        reward_history=[],
        joint_actions=actions or joint_actions(len(rewards), 2, "aligned"),
        rewards=list(rewards),
        children=children or [],
    )


# ---- advantages ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "normalize", "expected"),
    [
        ("raw", False, [1, 2, 4, 9]),
        ("mean", True, [-0.973, -0.649, 0, 1.622]),
        ("mean", False, [-3, -2, 0, 5]),
        ("rloo", False, [-4, -2.667, 0, 6.667]),
        ("max", False, [-8, -7, -5, 0]),
    ],
)
def test_advantages_of_one_group(mode, normalize, expected):
    assert advantages(RETURNS, mode, normalize) == pytest.approx(expected, abs=5e-4)


def test_greedy_baseline_is_the_greedy_return():
    assert advantages(RETURNS, "greedy", greedy_return=3.0) == [-2, -1, 1, 6]


def test_rloo_baseline_is_the_mean_of_the_others():
    credits = [0.3, -1.5, 7.25, 2.0, 0.1]
    expected = [c - statistics.fmean(credits[:k] + credits[k + 1 :]) for k, c in enumerate(credits)]
    assert advantages(credits, "rloo") == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("mode", credit.ADVANTAGE_MODES)
def test_normalisation_divides_and_never_recentres(mode):
    plain = advantages(RETURNS, mode, greedy_return=3.0)
    scaled = advantages(RETURNS, mode, normalize=True, greedy_return=3.0)
    deviation = statistics.pstdev(RETURNS)
    assert scaled == pytest.approx([a / deviation for a in plain], abs=1e-12)


def test_normalised_modes_stay_different():
    results = [advantages(RETURNS, mode, normalize=True, greedy_return=3.5) for mode in credit.ADVANTAGE_MODES]
    for one, other in itertools.combinations(results, 2):
        assert max(abs(a - b) for a, b in zip(one, other)) > 0.1


@pytest.mark.parametrize("mode", BASELINED)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("credits", [[0.1] * 3, [1e8 + 0.1] * 7, [-1 / 3] * 6, [1e-300] * 5, [0.1 + 0.2] * 10, [5.0]])
def test_equal_credits_have_no_signal(mode, normalize, credits):
    assert advantages(credits, mode, normalize) == [0.0] * len(credits)


@pytest.mark.parametrize("mode", BASELINED)
def test_credits_that_differ_by_rounding_are_not_blown_up(mode):
    # 0.1 + 0.2 and 0.3 are different floats; a deviation of 3e-17 must not give advantages of size 1.
    assert max(map(abs, advantages([0.1 + 0.2, 0.3, 0.3], mode, normalize=True))) < 1e-9


def test_float32_credits_keep_float64_differences():
    result = credit.advantages(torch.tensor([1e6, 1e6 + 1], dtype=torch.float32), "mean", normalize=False)
    assert result.dtype == torch.float64
    assert result.tolist() == [-0.5, 0.5]


def test_no_credits():
    assert advantages([], "mean", normalize=True) == []


# ---- returns -------------------------------------------------------------------------------------


def test_discounted_returns_of_two_turns():
    root = make_node([1.0, 2.0], [make_node([3.0, 5.0], turn=1), make_node([2.0, 2.0], turn=1)])
    fill_returns(root, 0.5)
    assert root.returns == [3.0, 3.0]
    assert root.children[0].returns == [3.0, 5.0]


def test_an_unrewarded_joint_action_has_no_return_and_leaves_the_mean():
    root = make_node([1.0, None, 2.0], [make_node([None, 6.0], turn=1), None, make_node([None, None], turn=1)])
    fill_returns(root, 0.5)
    assert root.returns == [1.0 + 0.5 * 6.0, None, 2.0]
    assert root.known_returns() == [4.0, 2.0]


def test_returns_of_an_early_end_and_of_a_dropped_branch():
    ended, dropped = make_node([1.0, 2.0]), make_node([1.0, 2.0], [None, make_node([4.0, 4.0], turn=1)])
    fill_returns(ended, 0.9)
    fill_returns(dropped, 0.5)
    assert ended.returns == [1.0, 2.0]
    assert dropped.returns == [1.0, 4.0]


def test_a_greedy_chain_has_its_own_returns():
    root = make_node([1.0, 0.0])
    root.baseline = make_node([0.5], [make_node([4.0], turn=1)])
    fill_returns(root, 0.5)
    assert root.baseline.returns == [2.5]
    assert root.returns == [1.0, 0.0]


def random_tree(generator, turns, branches, turn=0):
    rewards = [generator.choice([None, generator.uniform(-2, 2), 1.0]) for _ in range(branches)]
    children = [
        random_tree(generator, turns, branches, turn + 1)
        if reward is not None and turn + 1 < turns and generator.random() < 0.8
        else None
        for reward in rewards
    ]
    return make_node(rewards, children, turn)


def plain_return(node, j, discount):
    if node.rewards[j] is None:
        return None
    child = node.children[j]
    known = []
    if child is not None:
        known = [plain_return(child, i, discount) for i in range(len(child.rewards)) if child.rewards[i] is not None]
    return node.rewards[j] + (discount * statistics.fmean(known) if known else 0.0)


def test_returns_of_random_trees_equal_the_plain_recursion():
    generator = random.Random(0)
    roots = [random_tree(generator, turns=4, branches=3) for _ in range(20)]
    deepest = 0
    for root in roots:
        fill_returns(root, 0.7)
        for node in walk([root]):
            expected = [plain_return(node, j, 0.7) for j in range(3)]
            assert [value is None for value in node.returns] == [value is None for value in expected]
            assert node.known_returns() == pytest.approx([v for v in expected if v is not None], abs=1e-12)
            deepest = max(deepest, node.turn)
    assert deepest == 3


# ---- credits -------------------------------------------------------------------------------------


def test_aligned_credits_are_the_returns():
    actions = joint_actions(3, 2, "aligned")
    for agent in range(2):
        assert credit.completion_credits(actions, [1.0, None, 3.0], agent, 3) == [1.0, None, 3.0]


def test_cross_credit_is_the_mean_over_the_joint_actions_that_contain_the_completion():
    actions = joint_actions(2, 3, "cross")
    assert actions[:3] == [(0, 0, 0), (0, 0, 1), (0, 1, 0)]
    returns = [float(j**2) for j in range(8)]
    for agent in range(3):
        expected = [
            statistics.fmean(value for action, value in zip(actions, returns) if action[agent] == k) for k in range(2)
        ]
        assert credit.completion_credits(actions, returns, agent, 2) == pytest.approx(expected)


def test_cross_credits_without_some_rewards():
    actions = joint_actions(2, 2, "cross")  # (0,0) (0,1) (1,0) (1,1)
    returns = [1.0, None, None, None]
    assert credit.completion_credits(actions, returns, 0, 2) == [1.0, None]
    assert credit.completion_credits(actions, [1.0, 3.0, None, 5.0], 1, 2) == [1.0, 4.0]


def test_cross_credits_have_the_scale_of_the_returns():
    # All joint answers earn the same, so a completion is worth that, however many answers it was joined with.
    actions = joint_actions(3, 2, "cross")
    assert credit.completion_credits(actions, [2.5] * 9, 1, 3) == [2.5] * 3


@pytest.mark.parametrize("mode", BASELINED)
def test_equal_returns_in_cross_mode_have_no_signal(mode):
    # Means of two and of three equal floats, and of one set in another order, must be the same float.
    actions = joint_actions(3, 2, "cross")
    unrewarded = [None if action == (2, 2) else 0.1 for action in actions]
    latin = [(0.1, 0.2, 0.3)[(a + b) % 3] for a, b in actions]
    for returns in (unrewarded, latin):
        assert advantages(credit.completion_credits(actions, returns, 0, 3), mode) == [0.0] * 3


# ---- node weights and tree sizes -----------------------------------------------------------------


@pytest.mark.parametrize(("agents", "mode"), [(2, "aligned"), (2, "cross"), (3, "cross")])
def test_tree_weights_of_a_level_sum_to_the_discount(agents, mode):
    branches = len(joint_actions(2, agents, mode))
    level, discount = [1.0], 0.6
    for turn in range(1, 4):
        level = [credit.child_weight(weight, branches, discount, "tree") for weight in level for _ in range(branches)]
        assert sum(level) == pytest.approx(discount**turn)
        assert credit.child_weight(0.25, branches, discount, "equal") == 1.0


def counted_tree(branches, turns, greedy, turn=0):
    """Counts by walking: each sampled node starts a greedy chain that goes on to the last turn."""

    def chain(turn):
        return 1 + (chain(turn + 1) if turn + 1 < turns else 0)

    children = branches * counted_tree(branches, turns, greedy, turn + 1) if turn + 1 < turns else 0
    return 1 + (chain(turn) if greedy else 0) + children


@pytest.mark.parametrize("branches", [1, 2, 4])
@pytest.mark.parametrize("turns", [1, 2, 3, 4])
@pytest.mark.parametrize("greedy", [False, True])
def test_tree_size(branches, turns, greedy):
    assert credit.tree_size(branches, turns, greedy) == counted_tree(branches, turns, greedy)
