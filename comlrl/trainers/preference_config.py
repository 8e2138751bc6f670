"""Settings of the preference family. Every key is one field; `train_pbrl.py --help` prints them."""

import warnings
from dataclasses import dataclass, fields

from comlrl.config import option
from comlrl.losses import PREFERENCE_LOSSES
from comlrl.preferences import PAIR_SELECTIONS
from comlrl.trainers.actor_critic_config import IACConfig
from comlrl.trainers.reinforce_config import MAGRPOConfig

# rl_algorithm: the advantage mode that it means; none: an actor-critic algorithm.
RL_ALGORITHMS: dict[str, str | None] = {
    "magrpo": "mean",
    "mareinforce": "raw",
    "maremax": "greedy",
    "marloo": "rloo",
    "iac": None,
    "maac": None,
}
# Settings of policy gradients, which have no place in MADPO.
NOT_IN_MADPO = (
    "advantage_normalization",
    "entropy_coef",
    "sampler_ratio_cap",
    "reference_kl_coef",
    "reference_kl_in",
    "epochs_per_rollout",
    "node_weighting",
    "loss_aggregation",
    "advantage_mode",
    "clip_range",
)

# Settings that only critics read.
OF_CRITICS = (
    "critic_model_name",
    "critic_learning_rate",
    "critic_devices",
    "critic_type",
    "critic_value_head_hidden_dim",
    "critic_warmup_steps",
    "gae_lambda",
    "value_loss_coef",
    "value_clip_range",
    "value_normalization",
    "use_separate_critic",
    "value_head_hidden_dim",
)


@dataclass
class PairSettings:
    """How preference pairs are made; part of both configs."""

    collaboration_mode: str = option("decentralized", "decentralized, or centralized: one coordinator plays all roles")
    unparsable_reward: float | str | None = option(
        "empty", "reward of a coordinator's unparsable output: a number, empty (score '') or skip"
    )
    preference_num_candidates: int = option(80, "joint answers sampled at each node, to make pairs of")
    preference_pairs_per_sample: int | None = option(16, "pairs of a node at most; none: all")
    pair_selection: str = option("reward_gap", "which pairs: reward_gap (largest first), all or random")
    preference_file: str | None = option(None, "take the pairs of this JSONL or Parquet file; none: sample them")
    preference_format: str = option("jsonl", "file of the pairs in the run's folder: jsonl or parquet")
    use_environment_step: bool = option(True, "env_step counts the pairs that were learned from; false: candidates")
    environment_steps_per_pair: int = option(2, "env steps of a pair, with use_environment_step")

    def selections(self) -> tuple[str, ...]:
        return PAIR_SELECTIONS

    def check_pairs(self, config: MAGRPOConfig) -> None:
        config._choose("collaboration_mode", ("decentralized", "centralized"))
        config._choose("pair_selection", self.selections())
        config._choose("preference_format", ("jsonl", "parquet"))
        config._require(
            "preference_num_candidates", self.preference_num_candidates >= self.fewest(), self.fewest_text()
        )
        limit = self.preference_pairs_per_sample
        config._require("preference_pairs_per_sample", limit is None or limit >= 1, "at least 1, or none")
        config._require("environment_steps_per_pair", self.environment_steps_per_pair >= 1, "at least 1")
        if self.pair_selection == "all" and limit is not None:
            raise ValueError(
                f"pair_selection='all' keeps every pair, so preference_pairs_per_sample={limit} must be none; "
                "set it to null, or use reward_gap or random"
            )
        if isinstance(self.unparsable_reward, str) and self.unparsable_reward not in ("empty", "skip"):
            raise ValueError(f"unparsable_reward={self.unparsable_reward!r}: must be a number, 'empty' or 'skip'")

    def fewest(self) -> int:
        return 2

    def fewest_text(self) -> str:
        return f"at least {self.fewest()}: a pair is made of two answers"


@dataclass
class MADPOConfig(PairSettings, MAGRPOConfig):
    """Joint DPO on preference pairs. `num_generations` is preference_num_candidates."""

    # Pairs count as a buffer's nodes do: train_batch_size none means this.
    rollout_buffer_size: int = option(2, "pairs of an optimizer step, unless train_batch_size says so")
    dpo_beta: float = option(0.1, "how much a log-ratio counts; small: far from the reference")
    dpo_loss: str = option("sigmoid", "sigmoid (DPO), ipo or hinge")
    label_smoothing: float = option(0.0, "probability that a preference is wrong, in [0, 0.5); sigmoid only")
    reference_free: bool = option(False, "log-probs in place of log-ratios to the initial policy, as published")

    def __post_init__(self) -> None:
        default = MAGRPOConfig.num_generations
        if self.num_generations not in (default, self.preference_num_candidates):
            raise ValueError(
                f"num_generations={self.num_generations}: MADPO samples preference_num_candidates="
                f"{self.preference_num_candidates} answers; leave num_generations out"
            )
        self.num_generations = max(self.preference_num_candidates, 2)
        super().__post_init__()
        self.check_pairs(self)
        self._require("dpo_beta", self.dpo_beta > 0, "above 0")
        self._choose("dpo_loss", PREFERENCE_LOSSES)
        self._require("label_smoothing", 0 <= self.label_smoothing < 0.5, "in [0, 0.5)")
        if self.label_smoothing and self.dpo_loss != "sigmoid":
            raise ValueError(f"label_smoothing={self.label_smoothing} is for dpo_loss sigmoid, not {self.dpo_loss!r}")
        defaults = {item.name: item.default for item in fields(type(self))}
        for key in NOT_IN_MADPO:
            if getattr(self, key) != defaults[key]:
                raise ValueError(
                    f"{key}={getattr(self, key)!r} is a setting of policy gradients, which MADPO does not have; "
                    "leave it out"
                )
        # A frozen copy of the initial policy is kept where the loss has a reference.
        self.reference_kl_enabled = not self.reference_free


@dataclass
class MARLHFConfig(PairSettings, IACConfig):
    """A reward model on preference pairs, then any policy trainer on that reward."""

    # As published for this trainer, not for actor-critic.
    num_train_epochs: int = option(20, "passes over the training rows while the policies train")
    num_generations: int = option(4, "K: sampled answers an agent and node while the policies train")
    rollout_buffer_size: int = option(2, "nodes an agent collects before it learns")
    logging_steps: int = option(50, "env steps between two logs to trackers (metrics.jsonl has every step)")
    advantage_mode: str = option("", "baseline; empty: that of rl_algorithm")

    rl_algorithm: str = option("magrpo", "magrpo, mareinforce, maremax, marloo, iac or maac")
    critic_model_name: str | None = option(None, "critics of iac and maac; none: the model of its (first) agent")
    reward_model_name: str | None = option(None, "none: the model of agent 0")
    reward_model_device: str | None = option(None, "none: where the agents are")
    reward_learning_rate: float = option(1e-5, "AdamW's, of the reward model")
    reward_num_train_epochs: int = option(1, "passes over the pairs")
    reward_train_batch_size: int = option(1, "pairs of an optimizer step of the reward model")
    reward_max_length: int | None = option(None, "tokens that the reward model reads at most; none: its context")
    reward_freeze_backbone: bool = option(False, "train only the reward model's head")
    reward_eval_fraction: float = option(0.1, "share of the pairs that is held out to measure the reward model")
    reward_standardize: bool = option(True, "scores minus their mean over the pairs' answers, over their deviation")

    def __post_init__(self) -> None:
        self.rl_algorithm = {"mareforce": "mareinforce"}.get(self.rl_algorithm, self.rl_algorithm)
        self._choose("rl_algorithm", tuple(RL_ALGORITHMS))
        mode = RL_ALGORITHMS[self.rl_algorithm]
        if not self.advantage_mode:
            self.advantage_mode = mode or "value"
        super().__post_init__()
        self.check_pairs(self)
        for key in ("reward_num_train_epochs", "reward_train_batch_size"):
            self._require(key, getattr(self, key) >= 1, "at least 1")
        self._require("reward_learning_rate", self.reward_learning_rate > 0, "above 0")
        limit = self.reward_max_length
        self._require("reward_max_length", limit is None or limit >= 8, "at least 8, or none")
        self._require("reward_eval_fraction", 0 <= self.reward_eval_fraction < 1, "in [0, 1)")
        if self.actor_critic and self.collaboration_mode == "centralized":
            raise ValueError(
                f"collaboration_mode='centralized' with rl_algorithm={self.rl_algorithm!r}: a coordinator is trained "
                "by magrpo, mareinforce, maremax or marloo"
            )
        self.check_critics()

    def check_critics(self) -> None:
        if self.rl_algorithm == "maac" and not self.use_separate_critic:
            raise ValueError(
                "use_separate_critic=False is for rl_algorithm iac: MAAC's critic reads the histories of all agents, "
                "so it is a model of its own; set it to true"
            )
        if self.actor_critic:
            return
        defaults = {item.name: item.default for item in fields(self)}
        given = [key for key in OF_CRITICS if getattr(self, key) != defaults[key]]
        if given:
            warnings.warn(
                f"{', '.join(given)}: without effect, since rl_algorithm={self.rl_algorithm!r} has no critic",
                stacklevel=4,
            )

    @property
    def actor_critic(self) -> bool:
        return RL_ALGORITHMS[self.rl_algorithm] is None

    def advantage_modes(self) -> tuple[str, ...]:
        if self.actor_critic:
            return ("value",)
        mode = RL_ALGORITHMS[self.rl_algorithm]
        return ("greedy", "max") if mode == "greedy" else (str(mode),)

    def check_generations(self) -> None:
        if self.actor_critic:
            super().check_generations()
        else:
            MAGRPOConfig.check_generations(self)

    @property
    def normalize(self) -> bool:
        if self.advantage_normalization is None:
            return self.actor_critic or self.advantage_mode == "mean"
        return self.advantage_normalization
