"""Published names that users import from here; the code is elsewhere."""

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
