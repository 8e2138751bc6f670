"""Published names that users import from here; the code is elsewhere."""

from comlrl.loading import build_formatters
from comlrl.rewards import resolve_reward_range, set_reward_range
from comlrl.utils.reward_processor import RewardProcessors

__all__ = ["RewardProcessors", "build_formatters", "resolve_reward_range", "set_reward_range"]
