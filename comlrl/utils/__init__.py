"""Published names that users import from here; the code is elsewhere. Importing one that is gone says what to use."""

from typing import Any

from comlrl.checkpoint import read_checkpoint_metadata
from comlrl.loading import build_formatters
from comlrl.rewards import resolve_reward_range, set_reward_range
from comlrl.utils.reward_processor import RewardProcessors

__all__ = [
    "RewardProcessors",
    "build_formatters",
    "read_checkpoint_metadata",
    "resolve_reward_range",
    "set_reward_range",
]

REPLACED = {
    "DistributedContext": "use comlrl.processes.World",
    "apply_tokenizer_specials": "set model_config={'special_tokens': {...}}; comlrl.agents.add_special_tokens does it",
    "call_reward_function": "use comlrl.rewards.Rewards",
    "clone_reference_models": "set reference_kl_enabled=True; the trainer then holds trainer.references",
    "ensure_pad_token": "nothing is needed: padding is masked, whatever its id",
    "ensure_tokenizer": "use comlrl.agents.load_tokenizer",
    "infer_model_name": "use model.config.name_or_path",
    "load_reference_models_from_sources": "set reference_kl_enabled=True; references are the agents' first weights",
    "local_context": "use comlrl.processes.World",
    "normalize_reward_lengths": "nothing is needed: a reward of the wrong length is an error that names the function",
    "reference_kl_coef": "read args.reference_kl_coef",
    "reference_kl_enabled": "read args.reference_kl_enabled",
    "reference_kl_for_sequence": "use comlrl.losses.k3",
    "resolve_model_sources": "use comlrl.loading.check_team",
    "resolve_reference_devices": "use comlrl.loading.resolve_devices",
    "resolve_tokenizers": "use comlrl.loading.check_team",
    "unwrap_model": "nothing is needed: trainer.agents[i].model is the model itself",
    "validate_reference_kl_config": "nothing is needed: the config checks itself when it is made",
}


def __getattr__(name: str) -> Any:
    if name in REPLACED:
        raise ValueError(f"comlrl.utils.{name} is gone: {REPLACED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
