"""Ready-made reward processors: functions from one reward to one reward, for `reward_processor`."""

from collections.abc import Callable


class RewardProcessors:
    """`reward_processor=RewardProcessors.shift(-6)` subtracts 6 from every reward."""

    @staticmethod
    def scale(factor: float = 1.0) -> Callable[[float], float]:
        """reward -> reward * factor"""
        return lambda reward: reward * factor

    @staticmethod
    def shift(value: float = 0.0) -> Callable[[float], float]:
        """reward -> reward + value"""
        return lambda reward: reward + value
