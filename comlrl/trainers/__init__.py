"""The trainers: one file a family."""

from comlrl.trainers.actor_critic import (
    ActorCriticConfig,
    ActorCriticTrainerBase,
    IACConfig,
    IACTrainer,
    MAACConfig,
    MAACTrainer,
)
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

ACTOR_CRITIC_ALGORITHMS: dict[str, tuple[type[ActorCriticConfig], type[ActorCriticTrainerBase]]] = {
    "iac": (IACConfig, IACTrainer),
    "maac": (MAACConfig, MAACTrainer),
}

__all__ = [
    "ACTOR_CRITIC_ALGORITHMS",
    "REINFORCE_ALGORITHMS",
    "ActorCriticConfig",
    "ActorCriticTrainerBase",
    "CentralizedMAGRPOConfig",
    "CentralizedMAGRPOTrainer",
    "IACConfig",
    "IACTrainer",
    "MAACConfig",
    "MAACTrainer",
    "MAGRPOConfig",
    "MAGRPOTrainer",
    "MAREINFORCEConfig",
    "MAREINFORCETrainer",
    "MARLOOConfig",
    "MARLOOTrainer",
    "MAReMaxConfig",
    "MAReMaxTrainer",
]
