"""What is refused before a model is loaded: by name, with the value and what to do."""

import json
import math

import datasets
import pytest
from stopping import build, feedback, reward, rows

import comlrl.loading
from comlrl.trainers import MAGRPOConfig, MAGRPOTrainer


@pytest.fixture
def no_loading(monkeypatch):
    def load(*arguments):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(comlrl.loading, "load_model", load)
    with pytest.raises(AssertionError, match="a model was loaded"):
        from_names({}, {})


def from_names(options, settings):
    given = {"agent_model": "tiny", "train_dataset": rows(2), "reward_func": reward, **options}
    return MAGRPOTrainer(args=MAGRPOConfig(**settings), **given)


def stream():
    return datasets.IterableDataset.from_generator(lambda: iter(rows(5)))


MISTAKES = [
    ({}, {"max_new_tokens": 2048}, "max_new_tokens=2048: agent_0 reads at most 2048 tokens"),
    ({"num_agents": 3}, {"num_agents": 4}, "num_agents=3, args.num_agents=4"),
    ({"agents": ["tiny"] * 2, "num_agents": 3}, {}, r"num_agents=3, len\(agents\)=2"),
    ({"agents": ["tiny"] * 3}, {"num_agents": 4}, r"len\(agents\)=3, args.num_agents=4"),
    ({"reward_func": None}, {}, "reward_func is missing"),
    ({"reward_func": lambda a, b, c, d: 0}, {}, "does not fit num_agents=2"),
    ({"formatters": [str]}, {}, "formatters must be one function, or a list of 2"),
    ({"eval_logger": print}, {}, "eval_logger and eval_aggregator"),
    ({"trackers": ["no_such"]}, {}, "no_such"),
    ({"agent_model": "no_such_folder"}, {}, "no_such_folder"),
    ({"model_config": {"device_map": "auto"}}, {}, "device_map"),
    ({"train_dataset": {"train": []}}, {}, "train_dataset must be a sequence or an iterable"),
    ({"train_dataset": stream()}, {"lr_schedule": "cosine", "shuffle": False}, "lr_schedule='cosine' needs a known"),
    ({}, {"num_turns": 2}, "num_turns=2 needs an external_transition"),
    ({}, {"parallel_training": "mp"}, "parallel_training='mp' needs agent_devices"),
    ({}, {"agent_devices": "cuda:99"}, "agent_devices='cuda:99'"),
    ({}, {"reference_kl_enabled": True, "reference_devices": ["cuda:99"]}, "reference_devices=.*cuda:99"),
    (
        {"external_transition": feedback},
        {"num_turns": 3, "joint_mode": "cross", "max_tree_nodes": 272},
        "has 273 nodes a row, above max_tree_nodes=272",
    ),
]


@pytest.mark.parametrize(("options", "settings", "message"), MISTAKES, ids=[m[2][:40] for m in MISTAKES])
def test_a_mistake_is_refused_before_a_model_is_loaded(options, settings, message, no_loading):
    with pytest.raises(ValueError, match=message):
        from_names(options, settings)


def test_what_is_for_one_process_is_refused_in_several(no_loading, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="parallel_training='mp' is for one process, and 2 were started"):
        from_names({}, {"parallel_training": "mp", "agent_devices": "auto"})
    for key in ("agent_devices", "reference_devices"):
        with pytest.raises(ValueError, match=f"{key}='auto' is for one process without DeepSpeed"):
            from_names({}, {key: "auto"})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"agents": [[0], [2]]}, r"placement.agents\[1\]=\[2\]: ranks go from 0 to 1"),
        ({"agents": [[0], []]}, r"placement.agents\[1\]=\[\]: a model needs at least one rank"),
        ({"agents": [[0]]}, r"placement.agents=\[\[0\]\]: give a list of 2 lists of ranks"),
        ({"agents": [[0], [1, 1]]}, "a rank stands there twice"),
        ({"references": [[0], [1]]}, "placement.references: no such models here; one of agents"),
        ({"agent": [[0], [1]]}, "placement.agent: no such models here"),
    ],
)
def test_placements_that_cannot_be_are_refused(no_loading, monkeypatch, spec, message):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=message):
        from_names({}, {"placement": spec})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimization": {"stage": 4}}, "stage=4: must be 1, 2 or 3"),
        ({}, "stage=0: must be 1, 2 or 3"),
        ({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}, "'bf16' is set"),
        ({"zero_optimization": {"stage": 2}, "optimizer": {"type": "Adam"}}, "'optimizer' is set"),
        (None, "no such file"),
    ],
)
def test_deepspeed_configs_that_contradict_the_settings_are_refused(no_loading, tmp_path, config, message):
    path = tmp_path / "ds.json"
    if config is not None:
        path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        from_names({}, {"deepspeed_config": str(path)})


NUMBERS = [
    *(("num_train_epochs", value) for value in (0, -1)),
    *((key, 0) for key in ("num_agents", "num_generations", "max_new_tokens", "max_tree_nodes", "max_steps")),
    *((key, 0) for key in ("num_turns", "top_k", "max_prompt_length", "rows_per_rollout", "train_batch_size")),
    *((key, 0) for key in ("rollout_buffer_size", "epochs_per_rollout", "micro_batch_tokens", "eval_batch_size")),
    *((key, 0) for key in ("generation_batch_rows", "logging_steps", "reward_batch_size", "checkpoint_steps")),
    *((key, 0) for key in ("checkpoint_interval", "checkpoint_total_limit", "checkpoint_minutes", "clip_range")),
    *((key, 0) for key in ("agent_learning_rate", "temperature", "top_p", "adam_eps", "reward_timeout")),
    *((key, -1) for key in ("warmup_steps", "weight_decay", "reference_kl_coef", "eval_interval", "eval_num_samples")),
    *((key, -0.5) for key in ("temperature", "clip_range", "discount", "max_grad_norm", "sampler_ratio_cap")),
    *(("eval_generations", -1), ("discount", 7), ("top_p", 1.5), ("adam_betas", (0.9, 1.0))),
    *((key, math.nan) for key in ("agent_learning_rate", "temperature", "discount", "top_p", "weight_decay")),
    *((key, math.nan) for key in ("entropy_coef", "early_termination_threshold")),
    *((key, math.inf) for key in ("agent_learning_rate", "temperature", "reference_kl_coef")),
    *((key, "zzz") for key in ("joint_mode", "advantage_mode", "chat_template", "dtype", "node_weighting")),
    *((key, "zzz") for key in ("loss_aggregation", "reference_kl_in", "lr_schedule", "nonfinite", "reward_on_error")),
    *((key, "zzz") for key in ("parallel_training", "checkpoint_full_disk")),
]


@pytest.mark.parametrize(("key", "value"), NUMBERS)
def test_values_out_of_range_are_refused_by_name(key, value):
    """A negative learning rate passed."""
    with pytest.raises(ValueError, match=rf"^{key}="):
        MAGRPOConfig(**{key: value})


@pytest.mark.parametrize("mode", ["mean", "rloo", "max", "raw", "greedy"])
def test_one_sample_is_refused_where_samples_are_compared(mode):
    settings = {"num_generations": 1, "advantage_mode": mode}
    if mode in ("raw", "greedy"):
        assert MAGRPOConfig(**settings).num_generations == 1
        return
    with pytest.raises(ValueError, match=f"num_generations=1: advantage_mode='{mode}' compares the samples"):
        MAGRPOConfig(**settings)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ({"num_generations": 8}, r"train\(num_generations=\.\.\.\): only sampling settings"),
        ({"max_new_tokens": 5}, r"train\(max_new_tokens=5\): above args.max_new_tokens=4"),
        ({"temperature": 0.0}, "temperature=0.0: must be above 0"),
        ({"top_p": 2.0}, "top_p=2.0: must be in"),
    ],
)
def test_other_overrides_of_train_are_refused(override, message, working_directory):
    """Before anything is written."""
    with pytest.raises(ValueError, match=message):
        build().train(**override)
    assert not list(working_directory.iterdir())
