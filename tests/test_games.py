"""Each algorithm learns the cooperative games on the tiny model, and without training they are not solved.

Solved: the greedy joint answers earn at least 0.9 of the optimum. With these sizes that is every row and turn
right: one answer that matches but is not the best costs a quarter.
"""

import pytest

from comlrl.tasks import load_task
from comlrl.trainers import REINFORCE_ALGORITHMS

# Few rows and many samples: a group has to hold some matching pair of letters, which is one in four at first.
GAMES = {
    "pairing": {"rows": 2, "optimum": 1.0, "num_generations": 32, "max_steps": 70, "learning_rate": 3e-3},
    "two_turn": {"rows": 1, "optimum": 2.0, "num_generations": 10, "max_steps": 75, "learning_rate": 5e-3},
}
# The greedy answer is the baseline itself, so while it is right, only the others move the weights.
STEPS = {("pairing", "maremax"): 100, ("two_turn", "maremax"): 110}
ALGORITHMS = ["mareinforce", "magrpo", "marloo", "maremax"]


def build(game, algorithm, seed=0):
    choices = GAMES[game]
    task = load_task(game, 2, {"rows": choices["rows"]})
    config, trainer = REINFORCE_ALGORITHMS[algorithm]
    args = config(
        seed=seed,
        dtype="float32",
        num_generations=choices["num_generations"],
        max_new_tokens=1,
        rollout_buffer_size=choices["rows"],
        train_batch_size=1000,  # whole trees, one step a rollout
        agent_learning_rate=choices["learning_rate"],
        entropy_coef=0.01,
        num_train_epochs=1000,
        max_steps=STEPS.get((game, algorithm), choices["max_steps"]),
        eval_interval=0,
        eval_generations=32,
    )
    built = trainer(
        agent_model="tiny",
        reward_func=task.reward,
        formatters=task.formatters,
        external_transition=task.transition,
        train_dataset=task.train_rows,
        eval_dataset=task.eval_rows,
        args=args,
    )
    built.verbose = False
    return built


def check_learned(game, algorithm, seed=0):
    trainer = build(game, algorithm, seed)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    optimum = GAMES[game]["optimum"]
    assert after["eval/return_mean"] >= 0.9 * optimum
    assert after["eval/sampled/return_mean"] >= 0.7 * optimum  # the policy itself, with what the entropy bonus leaves
    # The control: the same team without training, greedy and sampled.
    assert before["eval/return_mean"] <= 0.5 * optimum
    assert before["eval/sampled/return_mean"] <= 0.3 * optimum


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_pairing_is_learned(algorithm):
    check_learned("pairing", algorithm)


def test_two_turns_are_learned():
    check_learned("two_turn", "magrpo")


@pytest.mark.full
@pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a != "magrpo"])
def test_two_turns_are_learned_by_every_algorithm(algorithm):
    check_learned("two_turn", algorithm)
