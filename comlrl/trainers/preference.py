"""The preference family for teams, under its published names.

pairs.py: joint answers to pairs. madpo.py: joint DPO on them.
"""

from comlrl.centralized import (
    CentralizedComparatorAdapter,
    CentralizedComparatorParseError,
    TaggedCentralizedComparatorAdapter,
)
from comlrl.trainers.madpo import MADPOTrainer
from comlrl.trainers.preference_config import MADPOConfig

__all__ = [
    "CentralizedComparatorAdapter",
    "CentralizedComparatorParseError",
    "MADPOConfig",
    "MADPOTrainer",
    "TaggedCentralizedComparatorAdapter",
]
