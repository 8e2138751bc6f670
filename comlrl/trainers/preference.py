"""The preference family for teams, under its published names.

pairs.py: joint answers to pairs. madpo.py: joint DPO on them. marlhf.py: a reward model, then policy
gradients. iterative.py: both in iterations, against a comparator.
"""

from comlrl.centralized import (
    CentralizedComparatorAdapter,
    CentralizedComparatorParseError,
    TaggedCentralizedComparatorAdapter,
)
from comlrl.reward_model import JointRewardModel
from comlrl.trainers.iterative import MADPOIterTrainer, MARLHFIterTrainer
from comlrl.trainers.iterative_config import MADPOIterConfig, MARLHFIterConfig
from comlrl.trainers.madpo import MADPOTrainer
from comlrl.trainers.marlhf import MARLHFTrainer
from comlrl.trainers.preference_config import MADPOConfig, MARLHFConfig

__all__ = [
    "CentralizedComparatorAdapter",
    "CentralizedComparatorParseError",
    "JointRewardModel",
    "MADPOConfig",
    "MADPOIterConfig",
    "MADPOIterTrainer",
    "MADPOTrainer",
    "MARLHFConfig",
    "MARLHFIterConfig",
    "MARLHFIterTrainer",
    "MARLHFTrainer",
    "TaggedCentralizedComparatorAdapter",
]
