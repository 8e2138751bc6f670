"""Settings of the actor-critic family: those of the REINFORCE family, and what critics need."""

from dataclasses import dataclass

from comlrl.config import option
from comlrl.trainers.reinforce_config import MAGRPOConfig


@dataclass
class ActorCriticConfig(MAGRPOConfig):
    num_train_epochs: int = option(40, "passes over the training rows (in total, resumed ones included)")
    num_generations: int = option(1, "K: sampled answers an agent and node")
    rollout_buffer_size: int = option(8, "nodes an agent collects before it learns")
    logging_steps: int = option(1, "env steps between two logs to trackers (metrics.jsonl has every step)")
    advantage_mode: str = option("value", "only value: the critic is the baseline")
    advantage_normalization: bool | None = option(None, "z-scores over the minibatch; none: on")

    # Critics
    critic_learning_rate: float | None = option(None, "AdamW's, of the critics; none: ten times the actor's")
    critic_devices: str | list[str] | None = option(None, "device(s) of the critics; none: the agents'")
    critic_type: str = option("v", "v: values of histories; q: of histories and actions (needs num_generations >= 2)")
    critic_value_head_hidden_dim: int | None = option(None, "width of a Tanh layer in the critic's head; none: linear")
    critic_warmup_steps: int = option(0, "optimizer steps in which only the critics move")
    gae_lambda: float = option(0.95, "of GAE: 0 is the one-step target, 1 the whole return")
    value_loss_coef: float = option(0.6, "what the value loss is multiplied by")
    value_clip_range: float | None = option(None, "how far a value may move in a buffer's steps; none: freely")
    value_normalization: bool = option(False, "scale value targets by their running mean and deviation")

    def __post_init__(self) -> None:
        self.critic_type = self.critic_type.lower()
        super().__post_init__()
        self._choose("critic_type", ("v", "q"))
        if self.critic_learning_rate is not None:
            self._require("critic_learning_rate", self.critic_learning_rate > 0, "above 0, or none")
        self._require("gae_lambda", 0 <= self.gae_lambda <= 1, "in [0, 1]")
        self._require("critic_warmup_steps", self.critic_warmup_steps >= 0, "at least 0")
        self._require("value_loss_coef", self.value_loss_coef >= 0, "at least 0")
        self._require(
            "value_clip_range", self.value_clip_range is None or self.value_clip_range > 0, "above 0, or none"
        )
        width = self.critic_value_head_hidden_dim
        self._require("critic_value_head_hidden_dim", width is None or width >= 1, "at least 1, or none")

    def advantage_modes(self) -> tuple[str, ...]:
        return ("value",)

    def check_generations(self) -> None:
        if self.critic_type == "q" and self.num_generations < 2:
            raise ValueError(
                "critic_type='q' compares an answer with the values of its siblings, so num_generations must be at "
                f"least 2, not {self.num_generations}; raise it, or use critic_type v"
            )
        if self.normalize and self.num_generations * (self.train_batch_size or self.rollout_buffer_size) < 2:
            raise ValueError(
                "advantage_normalization of a single sample is 0: raise train_batch_size, rollout_buffer_size or "
                "num_generations, or set advantage_normalization to false"
            )

    @property
    def normalize(self) -> bool:
        return True if self.advantage_normalization is None else self.advantage_normalization

    @property
    def critic_rate(self) -> float:
        """Resolved critic_learning_rate."""
        return 10 * self.agent_learning_rate if self.critic_learning_rate is None else self.critic_learning_rate


@dataclass
class IACConfig(ActorCriticConfig):
    """One critic an agent, on its own history."""

    value_clip_range: float | None = option(0.2, "how far a value may move in a buffer's steps; none: freely")
    use_separate_critic: bool = option(True, "a critic model an agent; false: a value head on the agent's own model")
    value_head_hidden_dim: int | None = option(None, "critic_value_head_hidden_dim, of a head on the agent's own model")

    def __post_init__(self) -> None:
        super().__post_init__()
        width = self.value_head_hidden_dim
        self._require("value_head_hidden_dim", width is None or width >= 1, "at least 1, or none")
        if self.use_separate_critic:
            if width is not None:
                raise ValueError(
                    f"value_head_hidden_dim={width} is for use_separate_critic: false; "
                    "a separate critic has critic_value_head_hidden_dim"
                )
            return
        for key in ("critic_learning_rate", "critic_devices", "critic_value_head_hidden_dim"):
            value = getattr(self, key)
            if value is not None:
                raise ValueError(
                    f"{key}={value!r} is for critics of their own: with use_separate_critic: false the head belongs to "
                    "the agent's model, its device and optimizer; leave it out"
                )
        if self.critic_warmup_steps:
            raise ValueError(
                f"critic_warmup_steps={self.critic_warmup_steps} needs critics of their own: with use_separate_critic: "
                "false the actor's weights are the critic's, so they would move; set it to 0"
            )


@dataclass
class MAACConfig(ActorCriticConfig):
    """One critic of the whole team, on the joint history."""
