"""Adapters in several processes: the same samples and weights as in one, whatever divides the work."""

import pytest
from processes import distance, lines, sampled, train, weights

LORA = ["args.lora.r=4", "args.agent_learning_rate=1e-2"]
TWO_TURNS = ["task=two_turn", *LORA]
TASKS = {
    "two turns": [*TWO_TURNS, "args.reference_kl_enabled=true", "args.epochs_per_rollout=2"],
    "heads": ["algorithm=iac", "args.use_separate_critic=false", "args.num_generations=2", *TWO_TURNS],
    "maac": ["algorithm=maac", "args.num_generations=2", "args.critic_learning_rate=1e-3", *TWO_TURNS],
    "iterations": [
        *("algorithm=madpo_iter", "task=pairing", "args.num_iterations=2", "args.preference_num_candidates=3"),
        *("args.comparator_policy=history", "args.num_train_epochs=1", "args.dpo_beta=1.0", *LORA),
    ],
}
ZERO = "args.deepspeed_config=ds_configs/zero{}.json".format
GROUPS = "args.placement={agents: [[0], [1]]}"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Runs of one process, each made once, by task."""
    runs = {}

    def get(task):
        if task not in runs:
            runs[task] = train(1, tmp_path_factory.mktemp("alone"), *TASKS[task])
        return runs[task]

    return get


def assert_same(run, other):
    """Samples are the same, metrics within 1e-4, adapters within 1 % of how far they went (B starts at 0)."""
    assert sampled(run) == sampled(other)
    for one, two in zip(lines(run, "metrics"), lines(other, "metrics"), strict=True):
        for key, value in one.items():
            if isinstance(value, float) and "time" not in key:
                assert two[key] == pytest.approx(value, rel=1e-4, abs=1e-4), (key, one["step"])
    mine = {key: tensor for key, tensor in weights(run).items() if key[0].startswith("agent_")}
    assert all("lora_" in name for _, name in mine)
    moved = {key: tensor for key, tensor in mine.items() if "lora_B" in key[1]}
    far = distance(moved, {key: 0 * tensor for key, tensor in moved.items()})
    assert far > 0.1
    assert distance(mine, weights(other)) < 0.01 * far


@pytest.mark.full
@pytest.mark.parametrize(
    ("task", "processes", "settings"),
    [
        ("two turns", 2, [GROUPS]),
        ("two turns", 2, [ZERO(1)]),
        ("two turns", 4, [ZERO(3), "args.placement={agents: [[0, 1], [2, 3]]}"]),
        ("heads", 2, [ZERO(2)]),
        ("maac", 2, [ZERO(3)]),
        ("iterations", 2, ["args.placement={agents: [[0], [1]], comparators: [[1], [0]]}"]),
    ],
)
def test_same_result_in_several_processes(alone, task, processes, settings, tmp_path):
    assert_same(alone(task), train(processes, tmp_path, *TASKS[task], *settings))


@pytest.mark.full
def test_a_checkpoint_goes_on_with_other_numbers_of_processes_and_stages(tmp_path):
    settings = [*TASKS["two turns"], "args.eval_interval=0", "args.checkpoint_steps=2", "args.max_steps=4"]
    whole = train(1, tmp_path / "whole", *settings)
    train(2, tmp_path / "parts", *settings, ZERO(3), "args.max_steps=2")
    assert_same(whole, train(1, tmp_path / "parts", *settings, "--resume", "auto"))
