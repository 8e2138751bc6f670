"""The trainers: one file a family."""

from comlrl.trainers.actor_critic import (
    ActorCriticConfig,
    ActorCriticTrainerBase,
    IACConfig,
    IACTrainer,
    MAACConfig,
    MAACTrainer,
)
from comlrl.trainers.preference import (
    JointRewardModel,
    MADPOConfig,
    MADPOIterConfig,
    MADPOIterTrainer,
    MADPOTrainer,
    MARLHFConfig,
    MARLHFIterConfig,
    MARLHFIterTrainer,
    MARLHFTrainer,
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

PREFERENCE_ALGORITHMS: dict[str, tuple[type[MAGRPOConfig], type[MADPOTrainer | MARLHFTrainer]]] = {
    "madpo": (MADPOConfig, MADPOTrainer),
    "marlhf": (MARLHFConfig, MARLHFTrainer),
    "madpo_iter": (MADPOIterConfig, MADPOIterTrainer),
    "marlhf_iter": (MARLHFIterConfig, MARLHFIterTrainer),
}

__all__ = [
    "ACTOR_CRITIC_ALGORITHMS",
    "PREFERENCE_ALGORITHMS",
    "REINFORCE_ALGORITHMS",
    "ActorCriticConfig",
    "ActorCriticTrainerBase",
    "CentralizedMAGRPOConfig",
    "CentralizedMAGRPOTrainer",
    "IACConfig",
    "IACTrainer",
    "JointRewardModel",
    "MAACConfig",
    "MAACTrainer",
    "MADPOConfig",
    "MADPOTrainer",
    "MAGRPOConfig",
    "MAGRPOTrainer",
    "MAREINFORCEConfig",
    "MAREINFORCETrainer",
    "MARLHFConfig",
    "MARLHFTrainer",
    "MARLOOConfig",
    "MARLOOTrainer",
    "MAReMaxConfig",
    "MAReMaxTrainer",
]
