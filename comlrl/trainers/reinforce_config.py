"""Settings of the REINFORCE family. Every key is one field; `train_magrpo.py --help` prints them."""

import math
from dataclasses import dataclass, fields
from typing import Any

from comlrl.adapters import LoraSettings
from comlrl.config import option
from comlrl.credit import ADVANTAGE_MODES
from comlrl.losses import LOSS_AGGREGATIONS
from comlrl.optimizers import OPEN_SCHEDULES, OPTIMIZERS, PLANNED_SCHEDULES

JOINT_MODES = {"aligned": "aligned", "align": "aligned", "cross": "cross", "crossed": "cross"}
OPTIONAL_COUNTS = (
    "max_steps",
    "num_turns",
    "top_k",
    "max_prompt_length",
    "rows_per_rollout",
    "train_batch_size",
    "reward_batch_size",
    "checkpoint_interval",
    "checkpoint_steps",
    "checkpoint_total_limit",
)


@dataclass
class MAGRPOConfig:
    # Length of training
    num_train_epochs: int = option(20, "passes over the training rows (in total, resumed ones included)")
    max_steps: int | None = option(None, "stop after this many optimizer steps; none: at the end of the epochs")
    shuffle: bool = option(True, "shuffle the rows anew in each epoch")
    seed: int = option(0, "of data order and sampling")

    # Team
    num_agents: int = option(2, "agents of the team (roles, with a coordinator)")
    num_turns: int | None = option(None, "turns of a rollout; none: 2 with an external_transition, else 1")
    joint_mode: str = option("aligned", "aligned: K joint answers a node; cross: all K^n combinations")
    chat_template: str = option("messages", "messages: message lists go through it; always: strings too; never")
    external_prompt_passthrough: bool = option(False, "prompts of later turns are used as they are, without formatter")
    parallel_training: str = option("none", "none, or mp: agents on devices of their own")
    agent_devices: str | list[str] | None = option(None, "device(s) of the agents; none: cuda:0, or cpu without a GPU")
    placement: dict[str, list[list[int]]] | None = option(
        None, "ranks of each model, for example {agents: [[0, 1], [2, 3]]}; none: every model on all processes"
    )
    deepspeed_config: str | None = option(None, "DeepSpeed's JSON (ds_configs/); none: what accelerate launch was told")
    offload_idle: bool = option(False, "models with nothing to do wait on the CPU (without DeepSpeed)")
    collective_timeout: float | None = option(None, "seconds of a collective on tensors at most; none: torch's default")
    dtype: str = option("auto", "compute in float32 or bfloat16; auto: bfloat16 where the hardware is fast at it")

    # What is trained
    lora: LoraSettings | None = option(None, "train adapters around one base model (docs/lora.md); none: all weights")

    gradient_checkpointing: bool = option(False, "keep one activation a layer while learning, compute the others again")

    # Sampling
    num_generations: int = option(4, "K: sampled answers an agent and node")
    max_new_tokens: int = option(256, "tokens of an answer at most")
    temperature: float = option(1.0, "of sampling, and of the trained log-probs")
    top_p: float = option(1.0, "nucleus; below 1 the policy gradient is biased")
    top_k: int | None = option(None, "none: the whole vocabulary; a number makes the policy gradient biased")
    stop_strings: list[str] = option([], "texts that end an answer")
    max_prompt_length: int | None = option(None, "drop rows whose prompt has more tokens; none: what the context holds")
    max_tree_nodes: int = option(1024, "refuse rollout trees with more nodes than this, a row")
    generation_batch_rows: int = option(256, "samples decoded together at most")

    # Returns and advantages
    discount: float = option(1.0, "of the next turn's return")
    early_termination_threshold: float | None = option(None, "a node whose mean reward is above it has no children")
    advantage_mode: str = option("mean", "baseline: raw, mean, rloo, greedy or max")
    advantage_normalization: bool | None = option(None, "divide by the group's deviation; none: only for mean")
    node_weighting: str = option("tree", "tree: weights of the expected discounted return; equal: every node 1")
    mask_truncated: bool = option(False, "leave answers that were cut at max_new_tokens out of the loss")

    # Loss
    clip_range: float | None = option(0.2, "PPO clipping of the ratio; none: plain -A log pi")
    loss_aggregation: str = option("sequence_sum", "sequence_sum, token_mean or constant (sum / max_new_tokens)")
    entropy_coef: float = option(0.0, "bonus for the entropy of the sampled tokens' distributions")
    sampler_ratio_cap: float | None = option(None, "weigh tokens by min(learner / sampler probability, cap); none: off")
    reference_kl_enabled: bool = option(False, "penalise the KL to the frozen initial policy")
    reference_kl_coef: float = option(0.1, "coefficient of that KL")
    reference_kl_in: str = option("loss", "loss: per token, differentiable; return: subtracted from the return")
    reference_devices: str | list[str] | None = option(None, "device(s) of the references; none: the agents'")

    # Optimizer
    optimizer: str = option("adamw", "adamw, or adamw_8bit: moments in 8 bits (package torchao; not with DeepSpeed)")
    agent_learning_rate: float = option(5e-6, "AdamW's learning rate")
    lr_schedule: str = option("constant", f"{', '.join(OPEN_SCHEDULES + PLANNED_SCHEDULES)}")
    warmup_steps: int = option(0, "optimizer steps from 0 up to the learning rate")
    adam_betas: tuple[float, float] = option((0.9, 0.999), "AdamW's betas")
    adam_eps: float = option(1e-8, "AdamW's epsilon")
    weight_decay: float = option(0.01, "AdamW's decoupled weight decay")
    max_grad_norm: float | None = option(1.0, "clip the global gradient norm of each agent; none: never")
    nonfinite: str = option("raise", "a NaN or infinite loss or gradient: raise, or skip the step (counted)")

    # Buffers: a buffer counts one agent's nodes
    rollout_buffer_size: int = option(2, "nodes an agent collects before it learns")
    rows_per_rollout: int | None = option(None, "rows rolled out together; none: rollout_buffer_size")
    train_batch_size: int | None = option(None, "nodes of an optimizer step; none: rollout_buffer_size")
    epochs_per_rollout: int = option(1, "passes over a buffer")
    micro_batch_tokens: int = option(8192, "tokens of one forward and backward at most, pads included")

    # Rewards
    reward_batch_size: int | None = option(None, "joint answers of a reward call; none: a node's; 1: as published")
    reward_timeout: float | None = option(None, "seconds of a reward call at most; none: no limit")
    reward_on_error: str = option("raise", "an error, time-out or NaN: raise, or skip the samples (counted)")

    # Evaluation and records
    eval_interval: int = option(16, "optimizer steps between evaluations; 0: never")
    eval_num_samples: int | None = option(None, "rows evaluated; none: all")
    eval_batch_size: int = option(16, "rows evaluated together")
    eval_generations: int = option(0, "also sample this many answers a row: mean and best of k; 0: greedy only")
    checkpoint_interval: int | None = option(1, "epochs between checkpoints; none: not by epochs")
    checkpoint_steps: int | None = option(None, "optimizer steps between checkpoints; none: not by steps")
    checkpoint_minutes: float | None = option(None, "minutes between checkpoints; none: not by time")
    checkpoint_total_limit: int | None = option(None, "newest checkpoints that are kept; none: all")
    checkpoint_best_metric: str | None = option(None, "also keep the best by this, for example eval/reward_mean")
    checkpoint_full_disk: str = option("stop", "no space for a checkpoint: stop, or continue without it")
    logging_steps: int = option(50, "env steps between two logs to trackers (metrics.jsonl has every step)")
    output_dir: str = option("runs", "where run folders go")
    run_name: str | None = option(None, "folder of the run (a taken name gets a suffix); none: the algorithm's name")

    def __post_init__(self) -> None:
        self._choose("parallel_training", ("none", "mp"), {"null": "none"})
        self._choose("joint_mode", tuple(JOINT_MODES))
        self.joint_mode = JOINT_MODES[self.joint_mode]
        self._choose("chat_template", ("messages", "always", "never"))
        self._choose("dtype", ("auto", "float32", "bfloat16"))
        self._choose("advantage_mode", self.advantage_modes())
        self._choose("node_weighting", ("tree", "equal"))
        self._choose("loss_aggregation", LOSS_AGGREGATIONS)
        self._choose("reference_kl_in", ("loss", "return"))
        self._choose("lr_schedule", OPEN_SCHEDULES + PLANNED_SCHEDULES)
        self._choose("optimizer", OPTIMIZERS)
        self._choose("nonfinite", ("raise", "skip"))
        self._choose("reward_on_error", ("raise", "skip"))
        self._choose("checkpoint_full_disk", ("stop", "continue"))
        for item in fields(self):
            value = getattr(self, item.name)
            self._require(item.name, not isinstance(value, float) or math.isfinite(value), "a finite number")
        at_least_one = (
            "num_train_epochs num_agents num_generations max_new_tokens max_tree_nodes generation_batch_rows "
            "rollout_buffer_size epochs_per_rollout micro_batch_tokens eval_batch_size logging_steps"
        )
        for key in at_least_one.split():
            self._require(key, getattr(self, key) >= 1, "at least 1")
        for key in OPTIONAL_COUNTS:
            self._require(key, getattr(self, key) is None or getattr(self, key) >= 1, "at least 1, or none")
        for key in ["warmup_steps", "eval_interval", "eval_generations", "reference_kl_coef", "weight_decay"]:
            self._require(key, getattr(self, key) >= 0, "at least 0")
        for key in ("agent_learning_rate", "temperature", "adam_eps"):
            self._require(key, getattr(self, key) > 0, "above 0")
        for key in (
            "clip_range",
            "max_grad_norm",
            "reward_timeout",
            "sampler_ratio_cap",
            "checkpoint_minutes",
            "collective_timeout",
        ):
            self._require(key, getattr(self, key) is None or getattr(self, key) > 0, "above 0, or none")
        self._require("eval_num_samples", self.eval_num_samples is None or self.eval_num_samples >= 0, "at least 0")
        self._require("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        self._require("discount", 0 <= self.discount <= 1, "in [0, 1]")
        self.adam_betas = tuple(self.adam_betas)  # type: ignore[assignment]
        self._require("adam_betas", all(0 <= beta < 1 for beta in self.adam_betas), "two numbers in [0, 1)")
        self.check_generations()
        if self.lora is not None and self.offload_idle:
            raise ValueError(
                "offload_idle=True: with lora all agents share a base model, which is never idle; leave it out"
            )
        if self.checkpoint_best_metric is not None and not self.eval_interval:
            raise ValueError("checkpoint_best_metric needs evaluations; set eval_interval above 0")

    def advantage_modes(self) -> tuple[str, ...]:
        return ADVANTAGE_MODES

    def check_generations(self) -> None:
        if self.num_generations < 2 and self.advantage_mode in ("mean", "rloo", "max"):
            raise ValueError(
                f"num_generations=1: advantage_mode={self.advantage_mode!r} compares the samples of a group, so at "
                "least 2 are needed; raise num_generations, or use advantage_mode raw or greedy"
            )
        if self.advantage_normalization and self.num_generations < 2:
            raise ValueError("advantage_normalization needs num_generations of at least 2; set it to false")

    def _choose(self, key: str, allowed: tuple[str, ...], aliases: dict[str, str] | None = None) -> None:
        value = (aliases or {}).get(getattr(self, key), getattr(self, key))
        if value not in allowed:
            raise ValueError(f"{key}={value!r}: must be one of {', '.join(allowed)}")
        setattr(self, key, value)

    def _require(self, key: str, fine: bool, rule: str) -> None:
        if not fine:
            raise ValueError(f"{key}={getattr(self, key)!r}: must be {rule}")

    @property
    def model_options(self) -> tuple[Any, ...]:
        """What `comlrl.loading.check_team` asks of the agents beyond models and tokenizers, in its order."""
        return self.agent_devices, self.dtype, self.lora, self.seed, self.gradient_checkpointing

    @property
    def normalize(self) -> bool:
        """Resolved advantage_normalization."""
        return self.advantage_mode == "mean" if self.advantage_normalization is None else self.advantage_normalization


@dataclass
class MAREINFORCEConfig(MAGRPOConfig):
    """No baseline."""

    advantage_mode: str = option("raw", "baseline: raw, mean, rloo, greedy or max")


@dataclass
class MARLOOConfig(MAGRPOConfig):
    """The baseline of a sample is the mean of the others."""

    advantage_mode: str = option("rloo", "baseline: raw, mean, rloo, greedy or max")


@dataclass
class MAReMaxConfig(MAGRPOConfig):
    """The baseline is the greedy answer's return; advantage_mode max is the published one."""

    advantage_mode: str = option("greedy", "baseline: raw, mean, rloo, greedy or max")


@dataclass
class CentralizedMAGRPOConfig(MAGRPOConfig):
    """One coordinator writes every role's answer; num_agents counts the roles."""

    collaboration_mode: str = option("centralized", "only centralized")
    unparsable_reward: float | str | None = option(
        "empty", "reward of unparsable output: a number, empty (score '') or skip"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._choose("collaboration_mode", ("centralized",))
        if isinstance(self.unparsable_reward, str) and self.unparsable_reward not in ("empty", "skip"):
            raise ValueError(f"unparsable_reward={self.unparsable_reward!r}: must be a number, 'empty' or 'skip'")
