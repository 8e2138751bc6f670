"""Arguments and settings of the actor-critic and preference families: the published names, and defaults where kept."""

import dataclasses
import inspect

import pytest

from comlrl.trainers.actor_critic import IACConfig, IACTrainer, MAACConfig, MAACTrainer
from comlrl.trainers.preference import MADPOConfig, MADPOIterConfig, MARLHFConfig, MARLHFIterConfig

COMMON = {
    **{"agent_learning_rate": 5e-6, "num_agents": 2, "parallel_training": "none", "agent_devices": None},
    **{"max_new_tokens": 256, "discount": 1.0, "external_prompt_passthrough": False, "eval_interval": 16},
    **{"train_batch_size": None, "reference_kl_enabled": False, "reference_kl_coef": 0.1, "reference_devices": None},
}
CRITICS = {
    **{"critic_devices": None, "critic_type": "v", "value_loss_coef": 0.6},
    **{"use_separate_critic": True, "critic_value_head_hidden_dim": None, "value_head_hidden_dim": None},
    "value_clip_range": 0.2,
}
MAAC = {
    **COMMON,
    **{"num_train_epochs": 40, "rollout_buffer_size": 8, "num_generations": 1, "logging_steps": 1, "top_k": None},
    **{"critic_devices": None, "critic_type": "v", "value_loss_coef": 0.6},
}
MADPO = {
    **{key: value for key, value in COMMON.items() if key != "reference_kl_enabled"},  # DPO has a reference
    **{"num_train_epochs": 20, "rollout_buffer_size": 2, "logging_steps": 50, "collaboration_mode": "decentralized"},
    **{"preference_num_candidates": 80, "preference_pairs_per_sample": 16, "pair_selection": "reward_gap"},
    **{"dpo_beta": 0.1, "use_environment_step": True, "environment_steps_per_pair": 2},
}
MARLHF = {
    **{key: value for key, value in MADPO.items() if key != "dpo_beta"},
    **CRITICS,
    **{"rl_algorithm": "magrpo", "num_generations": 4, "reward_model_name": None, "reward_learning_rate": 1e-5},
    **{"reward_num_train_epochs": 1, "reward_train_batch_size": 1, "reward_max_length": None},
    **{"reward_freeze_backbone": False, "critic_model_name": None, "critic_learning_rate": None},
}
ITERATIONS = {
    **{"num_iterations": 6, "preference_replay_mode": "current", "preference_replay_k": None},
    **{"preference_replay_lambda": None, "preference_replay_sample_size": None, "preference_replay_dir": None},
    **{"log_reward_distribution": False, "policy_checkpoint_dir": None, "comparator_policy": "current"},
    **{"comparator_generation_mode": "decentralized", "comparator_centralized_agent_index": 0},
    **{"comparator_model_name": None, "comparator_agents": None, "comparator_devices": None},
    **{"comparator_num_candidates": None, "comparator_history_k": None, "comparator_api_url": None},
    **{"comparator_api_model": None, "comparator_api_max_n_per_request": None, "comparator_api_timeout": 120.0},
    **{"comparator_api_headers": None, "comparator_api_key_env": None, "comparator_api_extra_body": None},
    **{"preference_num_candidates": 20, "preference_pairs_per_sample": 4, "pair_selection": "comparator_reward"},
}
PUBLISHED = {
    IACConfig: {**MAAC, **CRITICS},
    MAACConfig: MAAC,
    MADPOConfig: MADPO,
    MARLHFConfig: MARLHF,
    MADPOIterConfig: {**MADPO, **ITERATIONS, "num_train_epochs": 1},
    MARLHFIterConfig: {
        **{**MARLHF, **ITERATIONS},
        **{"num_train_epochs": 2, "reward_num_train_epochs": 2, "preference_scoring_reward": "task"},
    },
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_settings_exist_with_their_defaults(kind):
    config = dataclasses.asdict(kind())
    assert {key: config[key] for key in PUBLISHED[kind]} == PUBLISHED[kind]


@pytest.mark.parametrize("kind", [IACTrainer, MAACTrainer])
def test_actor_critic_trainers_take_the_published_arguments_in_their_order(kind):
    names = [
        "agent_model",
        "critic_model",
        "tokenizer",
        "reward_func",
        "reward_processor",
        "formatters",
        "args",
        "train_dataset",
        "eval_dataset",
        "model_config",
        "wandb_config",
        "metrics_callback",
        "external_transition",
        "agents",
        "critics",
    ]
    parameters = list(inspect.signature(kind).parameters.values())[: len(names)]
    assert [p.name for p in parameters] == names
    assert all(p.default is None and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
