"""Preference trainers in several processes: the same pairs, steps and weights as in one, wherever their models are."""

import json

import pytest
from processes import distance, lines, moved, sampled, train, weights

from comlrl.agents import load_model

PAIRS = ["task=pairing", "args.max_new_tokens=2", "args.preference_num_candidates=8", "args.max_steps=4"]
PAIRS += ["args.num_generations=4", "args.preference_pairs_per_sample=6", "args.eval_interval=2"]
REWARD_MODEL = ["args.reward_train_batch_size=4", "args.reward_learning_rate=1e-3", "args.reward_num_train_epochs=1"]
ITERATIONS = ["args.num_iterations=2", "args.preference_num_candidates=5", "args.num_train_epochs=1"]
TASKS = {
    "madpo": ["algorithm=madpo", *PAIRS],
    "marlhf": ["algorithm=marlhf", *PAIRS, *REWARD_MODEL],
    "madpo_iter": ["algorithm=madpo_iter", *PAIRS, *ITERATIONS, "args.comparator_policy=current_copy"],
    "marlhf_iter": [
        *("algorithm=marlhf_iter", *PAIRS, *REWARD_MODEL, *ITERATIONS),
        *("args.comparator_policy=history", "args.preference_scoring_reward=reward_model", "args.rl_algorithm=maac"),
    ],
}
ZERO = "args.deepspeed_config=ds_configs/zero{}.json"
MODES = [
    ("madpo", [ZERO.format(3)]),
    ("madpo", ["args.placement={agents: [[0], [1]], references: [[1], [0]]}"]),
    ("marlhf", [ZERO.format(2)]),
    ("marlhf", ["args.placement={agents: [[0], [1]], reward_model: [[1]]}"]),
    ("madpo_iter", ["args.placement={agents: [[0], [1]], comparators: [[1], [0]]}"]),
    ("marlhf_iter", [ZERO.format(3)]),
    ("marlhf_iter", [ZERO.format(1)]),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Runs of one process, each made once, by task."""
    runs = {}

    def get(task):
        if task not in runs:
            runs[task] = train(1, tmp_path_factory.mktemp("alone"), *TASKS[task])
        return runs[task]

    return get


def said_in_pairs(run):
    """Texts, token ids and rewards of all pairs."""
    files = sorted(run.glob("preferences.jsonl")) + sorted(run.glob("preferences/*.jsonl"))
    pairs = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [
        (p["name"], p["margin"], *((p[k]["texts"], p[k]["token_ids"]) for k in ("chosen", "rejected"))) for p in pairs
    ]


@pytest.mark.full
@pytest.mark.parametrize(
    ("task", "settings"), MODES, ids=lambda value: value if isinstance(value, str) else value[0][5:]
)
def test_same_result_in_two_processes(alone, task, settings, tmp_path):
    one, two = alone(task), train(2, tmp_path, *TASKS[task], *settings)
    assert [said[:-1] for said in sampled(one)] == [said[:-1] for said in sampled(two)]  # rewards can be a model's
    first, second = said_in_pairs(one), said_in_pairs(two)
    assert first
    assert [pair[0] for pair in first] == [pair[0] for pair in second]
    for mine, theirs in zip(first, second):
        assert mine[2:] == theirs[2:]
        assert mine[1] == pytest.approx(theirs[1], abs=1e-4)  # of a reward model: rounding
    here, there = lines(one, "metrics"), lines(two, "metrics")
    assert [line.keys() for line in here] == [line.keys() for line in there]
    for mine, theirs in zip(here, there):
        for key, value in mine.items():
            # The margins of the first step are exactly 0 in one process: there rounding decides what accuracy counts.
            if key == "dpo/accuracy" and mine["step"] == 1:
                continue
            if isinstance(value, float) and "time" not in key:
                assert theirs[key] == pytest.approx(value, rel=2e-3, abs=5e-3), (key, mine["step"])
    pristine = dict(load_model("tiny").named_parameters())
    agents = {key: tensor for key, tensor in weights(one).items() if key[0].startswith("agent")}
    other = {key: tensor for key, tensor in weights(two).items() if key[0].startswith("agent")}
    begun = {key: pristine[key[1]].detach() for key in agents}
    assert distance(agents, other) < 0.01 * distance(agents, begun)
    assert moved(one, {**weights(one), **begun}) > 0.1
