"""Programs written for CoMLRL 1.4.3 run here: its tutorials, its import paths, its signatures, its settings."""

import dataclasses
import importlib
import inspect
import json
import math
import re

import pytest
import torch
import wandb
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

import comlrl.utils
from comlrl import embedded
from comlrl.trainers.reinforce import (
    CentralizedMAGRPOConfig,
    CentralizedMAGRPOTrainer,
    MAGRPOConfig,
    MAGRPOTrainer,
    MAREINFORCEConfig,
    MAREINFORCETrainer,
    MAReMaxConfig,
    MAReMaxTrainer,
    MARLOOConfig,
    MARLOOTrainer,
)
from comlrl.utils import read_checkpoint_metadata

# ---- the tutorials: unchanged but for the model ----------------------------------------------------

name = embedded.folder("tiny")
rows = Dataset.from_dict(
    {
        "prompt": [
            "Tell a story about a lantern.",
            "Tell a story about a bridge.",
            "Tell a story about a letter.",
            "Tell a story about a storm.",
        ]
    }
)


def ratio_reward(completions1, completions2):
    scores = []
    for one, two in zip(completions1, completions2):
        ratio = len(two) / max(len(one), 1)
        gap = 0.0 if 2 <= ratio <= 3 else min(abs(ratio - 2), abs(ratio - 3))
        scores.append(math.exp(-gap))
    return scores


def feedback(prompt, agent_completions, num_agents, prompt_history_per_agent=None, response_history_per_agent=None):
    lengths = ", ".join(str(len(text)) for text in agent_completions)
    return [f"{prompt}\nLengths so far: {lengths}. Try again:" for _ in range(num_agents)]


def records(folder, file):
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


def check_saved(trainer):
    """out/agent_i load as ordinary models and are the trained ones; each weight tensor has moved."""
    start = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).state_dict()
    for index, agent in enumerate(trainer.agents):
        saved = AutoModelForCausalLM.from_pretrained(f"out/agent_{index}").state_dict()
        assert AutoTokenizer.from_pretrained(f"out/agent_{index}").encode("a b") == [64, 220, 65]
        for key, value in agent.model.state_dict().items():
            assert torch.equal(saved[key], value)
            assert not torch.equal(saved[key], start[key])


def test_tutorial_of_the_length_ratio(working_directory):
    trainer = MAGRPOTrainer(
        agent_model=name,
        num_agents=2,
        tokenizer=AutoTokenizer.from_pretrained(name),
        reward_func=ratio_reward,
        train_dataset=rows,
        args=MAGRPOConfig(num_turns=1, num_train_epochs=2, num_generations=4, max_new_tokens=64),
    )
    trainer.train()
    trainer.save_model("out")
    check_saved(trainer)
    lines = records(working_directory / "runs" / "magrpo", "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]  # two epochs of two buffers
    assert lines[-1]["env_step"] == trainer.env_step == 2 * 4 * 4
    assert lines[-1]["epoch"] == 2
    answers = records(working_directory / "runs" / "magrpo", "completions.jsonl")
    assert len(answers) == 2 * 4 * 4 * 2  # epochs, rows, generations, agents
    assert {answer["prompt"] for answer in answers} == set(rows["prompt"])
    for one, two in zip(answers[::2], answers[1::2]):
        assert (one["agent"], two["agent"], one["sample"]) == (0, 1, two["sample"])
        assert one["reward"] == ratio_reward([one["completion"]], [two["completion"]])[0]


def test_tutorial_of_feedback_between_two_turns(working_directory):
    trainer = MAGRPOTrainer(
        agent_model=name,
        num_agents=2,
        tokenizer=AutoTokenizer.from_pretrained(name),
        reward_func=ratio_reward,
        train_dataset=rows,
        external_transition=feedback,
        args=MAGRPOConfig(num_turns=2, num_train_epochs=1, num_generations=4, max_new_tokens=64),
    )
    trainer.train()
    trainer.save_model("out")
    check_saved(trainer)
    assert trainer.env_step == 4 * (4 + 16)
    answers = records(working_directory / "runs" / "magrpo", "completions.jsonl")
    said = {(answer["sample"], answer["agent"]): answer for answer in answers}
    later = [answer for answer in answers if answer["turn"] == 2]
    assert len(later) == 4 * 16 * 2
    for answer in later:
        before = answer["sample"].rpartition(".")[0]
        lengths = ", ".join(str(len(said[before, agent]["completion"])) for agent in range(2))
        text = rows[answer["row"]]["prompt"]
        assert answer["prompt"] == f"{text}\nLengths so far: {lengths}. Try again:"


def build(num_train_epochs, wandb_config):
    return MAGRPOTrainer(
        agent_model=name,
        num_agents=2,
        tokenizer=AutoTokenizer.from_pretrained(name),
        reward_func=ratio_reward,
        train_dataset=rows,
        wandb_config=wandb_config,
        args=MAGRPOConfig(num_turns=1, num_train_epochs=num_train_epochs, num_generations=4, max_new_tokens=8),
    )


@pytest.mark.full
def test_tutorial_of_a_resumed_run(working_directory):
    """Two epochs, then two more from the checkpoint, one W&B run (offline here)."""
    first = build(num_train_epochs=2, wandb_config={"project": "p", "name": "n"})
    first.train(checkpoint_dir="ckpt")
    first.save_model("out")
    assert wandb.run.id == first.run.wandb_state()["id"]  # saving once ended the W&B run
    first.close()
    assert wandb.run is None
    meta = read_checkpoint_metadata("ckpt/checkpoint-2")
    assert meta.keys() >= {"version", "trainer_class", "sequence", "run_id", "wandb"}
    assert (meta["trainer_class"], meta["sequence"]) == ("MAGRPOTrainer", 2)
    settings = {"project": "p", "name": "n", "id": meta["wandb"]["id"], "resume": "allow"}
    again = build(num_train_epochs=4, wandb_config=settings)
    again.train(resume_from_checkpoint="ckpt/checkpoint-2", checkpoint_dir="ckpt")
    again.close()
    assert [line["step"] for line in records(again.run.folder, "metrics.jsonl")] == list(range(1, 9))
    assert again.run.wandb_state()["id"] == meta["wandb"]["id"]
    whole = build(num_train_epochs=4, wandb_config=None)
    whole.train()
    for one, other in zip(again.agents, whole.agents):
        for key, value in one.model.state_dict().items():
            assert torch.equal(value, other.model.state_dict()[key])


# ---- names -----------------------------------------------------------------------------------------


def pairs(*algorithms):
    return {f"{algorithm}{kind}" for algorithm in algorithms for kind in ("Config", "Trainer")}


REINFORCE = pairs("MAGRPO", "MAREINFORCE", "MAReMax", "MARLOO")
CRITICS = {*pairs("IAC", "MAAC"), "ActorCriticTrainerBase"}
PREFERENCES = {*pairs("MADPO", "MARLHF"), "JointRewardModel"}
NAMES = {
    "comlrl": {"__version__"},
    "comlrl.trainers": REINFORCE | CRITICS | PREFERENCES,
    "comlrl.trainers.reinforce": REINFORCE | pairs("CentralizedMAGRPO"),
    "comlrl.trainers.actor_critic": CRITICS | {"RolloutSample"},
    "comlrl.trainers.preference": PREFERENCES
    | pairs("MADPOIter", "MARLHFIter")
    | {"CentralizedComparatorAdapter", "CentralizedComparatorParseError", "TaggedCentralizedComparatorAdapter"},
    "comlrl.models": {"CausalLMWithValueHead", "ValueHead", "ActorCriticOutput"},
    "comlrl.utils": {"RewardProcessors", "build_formatters", "read_checkpoint_metadata"}
    | {"resolve_reward_range", "set_reward_range"},
    "comlrl.utils.reward_processor": {"RewardProcessors"},
}


@pytest.mark.parametrize("path", NAMES)
def test_published_import_paths(path):
    module = importlib.import_module(path)
    assert set(dir(module)) >= NAMES[path]


def test_reward_processors_are_closures_on_one_reward():
    processors = importlib.import_module("comlrl.utils.reward_processor").RewardProcessors
    assert processors.scale(factor=2.0)(1.5) == 3.0
    assert processors.shift(value=-6)(1.5) == -4.5
    assert processors.scale()(0.7) == processors.shift()(0.7) == 0.7


POSITIONAL = (
    "agent_model agents num_agents tokenizer model_config train_dataset eval_dataset reward_func reward_processor "
    "formatters external_transition wandb_config eval_logger eval_aggregator args"
)


@pytest.mark.parametrize("kind", [MAGRPOTrainer, MAREINFORCETrainer, MARLOOTrainer, MAReMaxTrainer])
def test_constructors_take_the_published_arguments_in_their_order(kind):
    parameters = list(inspect.signature(kind).parameters.values())
    published = parameters[: len(POSITIONAL.split())]
    assert [p.name for p in published] == POSITIONAL.split()
    for parameter in parameters:
        assert parameter.default in (None, (), False)
        expected = parameter.POSITIONAL_OR_KEYWORD if parameter in published else parameter.KEYWORD_ONLY
        assert parameter.kind is expected
    # All by position, none of it loaded.
    arguments = [name, None, 2, None, {}, rows, rows, ratio_reward, float, None, None, None, None, None]
    trainer = kind(*arguments, kind.config_class(num_turns=1), dry_run=True)
    assert trainer.args.num_agents == 2
    assert "4 rows, 40 optimizer steps" in trainer.plan()


def test_the_coordinator_takes_keywords_only():
    parameters = inspect.signature(CentralizedMAGRPOTrainer).parameters
    published = {"centralized_adapter", "num_agents", "agents", "tokenizer", "reward_func", "formatters", "args"}
    assert published <= {*parameters, "reward_func", "formatters"}  # these two go through **kwargs
    assert {p.kind.name for p in parameters.values()} == {"KEYWORD_ONLY", "VAR_KEYWORD"}
    trainer = CentralizedMAGRPOTrainer(
        num_agents=3,
        agents=[name],
        tokenizer=[AutoTokenizer.from_pretrained(name)],
        reward_func=lambda a, b, c: [0.0] * len(a),
        formatters=[lambda row: row["prompt"]] * 3,
        train_dataset=rows,
        args=CentralizedMAGRPOConfig(num_agents=3),
        dry_run=True,
    )
    assert len(trainer.members) == 1


def test_trainers_without_settings_have_the_defaults_of_their_class():
    for kind, mode in ((MAGRPOTrainer, "mean"), (MAREINFORCETrainer, "raw"), (MARLOOTrainer, "rloo")):
        trainer = kind(name, reward_func=ratio_reward, train_dataset=rows, dry_run=True)
        assert type(trainer.args) is kind.config_class
        assert trainer.args.advantage_mode == mode


def test_public_methods_have_the_published_signatures():
    trains = inspect.signature(MAGRPOTrainer.train).parameters
    published = ["resume_from_checkpoint", "checkpoint_dir", "checkpoint_interval", "checkpoint_total_limit"]
    assert list(trains)[1:5] == published
    for method, names in {
        "evaluate": ["num_eval_samples"],
        "save_model": ["output_dir"],
        "get_train_dataloader": [],
        "get_eval_dataloader": [],
    }.items():
        assert list(inspect.signature(getattr(MAGRPOTrainer, method)).parameters)[1:] == names
    for method in ("save_checkpoint", "load_checkpoint"):
        assert len(inspect.signature(getattr(MAGRPOTrainer, method)).parameters) == 2


# ---- settings --------------------------------------------------------------------------------------

KEPT = {
    "num_train_epochs": 20,
    "agent_learning_rate": 5e-6,
    "logging_steps": 50,
    "num_agents": 2,
    "parallel_training": "none",
    "agent_devices": None,
    "num_generations": 4,
    "max_new_tokens": 256,
    "discount": 1.0,
    "joint_mode": "aligned",
    "external_prompt_passthrough": False,
    "eval_interval": 16,
    "rollout_buffer_size": 2,
    "train_batch_size": None,
    "reference_kl_enabled": False,
    "reference_kl_coef": 0.1,
    "reference_devices": None,
}
# name: (published, here)
CHANGED = {
    "temperature": (0.6, 1.0),
    "top_p": (0.6, 1.0),
    "top_k": (50, None),
    "num_turns": (2, None),
    "early_termination_threshold": (-0.2, None),
    "eval_num_samples": (4, None),
    "eval_batch_size": (1, 16),
    "advantage_normalization": (True, None),
}
MODES = {MAGRPOConfig: "mean", MAREINFORCEConfig: "raw", MARLOOConfig: "rloo", MAReMaxConfig: "greedy"}


@pytest.mark.parametrize("kind", MODES)
def test_published_settings_exist_with_their_defaults(kind):
    config = dataclasses.asdict(kind())
    assert {key: config[key] for key in KEPT} == KEPT
    assert {key: config[key] for key in CHANGED} == {key: here for key, (_, here) in CHANGED.items()}
    assert config["advantage_mode"] == MODES[kind]
    as_published = {key: published for key, (published, _) in CHANGED.items()}
    again = kind(**KEPT, **as_published, advantage_mode="max")  # every published value is still allowed
    assert {key: getattr(again, key) for key in as_published} == as_published


def test_normalization_is_on_for_the_group_mean_only():
    assert [kind().normalize for kind in MODES] == [True, False, False, False]
    assert MAREINFORCEConfig(advantage_normalization=True).normalize
    assert not MAGRPOConfig(advantage_normalization=False).normalize


def test_settings_of_the_coordinator():
    config = CentralizedMAGRPOConfig()
    assert config.collaboration_mode == "centralized"
    with pytest.raises(ValueError, match="collaboration_mode='decentralized': must be one of centralized"):
        CentralizedMAGRPOConfig(collaboration_mode="decentralized")


@pytest.mark.parametrize(
    ("given", "turns"),
    [({}, 1), ({"external_transition": feedback}, 2), ({"args": MAGRPOConfig(num_turns=1)}, 1)],
)
def test_turns_follow_the_transition(given, turns):
    trainer = MAGRPOTrainer(name, reward_func=ratio_reward, train_dataset=rows, **given, dry_run=True)
    assert trainer.args.num_turns == turns


# ---- what is gone says what to use -----------------------------------------------------------------


def test_one_module_for_two_agents_is_refused():
    model = AutoModelForCausalLM.from_pretrained(name)
    tokenizer = AutoTokenizer.from_pretrained(name)
    with pytest.raises(ValueError, match=r"same model object is given for two agents; give copies \(copy.deepcopy\)"):
        MAGRPOTrainer(agents=[model, model], tokenizer=tokenizer, reward_func=ratio_reward, train_dataset=rows)


def test_the_device_scheduler_is_gone():
    with pytest.raises(ValueError, match="DeviceScheduler is gone: set agent_devices"):
        from comlrl.schedulers import DeviceScheduler  # noqa: F401
    with pytest.raises(ValueError, match=r"comlrl\.utils\.unwrap_model is gone: nothing is needed"):
        from comlrl.utils import unwrap_model  # noqa: F401
    with pytest.raises(ImportError):
        from comlrl.utils import nothing_like_this  # noqa: F401


def test_what_replaces_a_published_name_exists():
    for advice in comlrl.utils.REPLACED.values():
        for module, name in re.findall(r"comlrl\.(\w+)\.(\w+)", advice):
            assert name in vars(importlib.import_module(f"comlrl.{module}"))
    with pytest.raises(ImportError):
        from comlrl.schedulers import Other  # noqa: F401


def test_other_settings_of_generate_are_refused_by_train():
    trainer = MAGRPOTrainer(name, reward_func=ratio_reward, train_dataset=rows, dry_run=True)
    with pytest.raises(ValueError, match=r"train\(repetition_penalty=...\): only sampling settings .*max_new_tokens"):
        trainer.train(repetition_penalty=1.1)
