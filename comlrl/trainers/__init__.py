"""The trainers: one file a family."""

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

# algorithm: (settings, trainer)
REINFORCE_ALGORITHMS: dict[str, tuple[type[MAGRPOConfig], type[MAGRPOTrainer]]] = {
    "magrpo": (MAGRPOConfig, MAGRPOTrainer),
    "mareinforce": (MAREINFORCEConfig, MAREINFORCETrainer),
    "marloo": (MARLOOConfig, MARLOOTrainer),
    "maremax": (MAReMaxConfig, MAReMaxTrainer),
    "centralized_magrpo": (CentralizedMAGRPOConfig, CentralizedMAGRPOTrainer),
}

__all__ = [
    "REINFORCE_ALGORITHMS",
    "CentralizedMAGRPOConfig",
    "CentralizedMAGRPOTrainer",
    "MAGRPOConfig",
    "MAGRPOTrainer",
    "MAREINFORCEConfig",
    "MAREINFORCETrainer",
    "MARLOOConfig",
    "MARLOOTrainer",
    "MAReMaxConfig",
    "MAReMaxTrainer",
]
