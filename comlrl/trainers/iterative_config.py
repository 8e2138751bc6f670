"""Settings of the iterative forms of MADPO and MARLHF."""

from dataclasses import dataclass
from typing import Any

from comlrl.api_comparator import API_FORMATS
from comlrl.comparators import COMPARATORS
from comlrl.config import option
from comlrl.preferences import PAIR_SELECTIONS
from comlrl.replay import REPLAY_MODES, check_replay
from comlrl.trainers.preference_config import MADPOConfig, MARLHFConfig, PairSettings
from comlrl.trainers.reinforce_config import MAGRPOConfig

GENERATION_MODES = {
    "decentralized": "decentralized",
    "centralized": "centralized",
    "single_agent": "centralized",
}
SCORING = {
    "task": "task",
    "oracle": "task",
    "environment": "task",
    "env": "task",
    "reward_model": "reward_model",
    "model": "reward_model",
    "learned": "reward_model",
}


@dataclass
class IterationSettings(PairSettings):
    """Iterations, replay and the comparator; part of both configs."""

    preference_num_candidates: int = option(20, "joint answers of the policy at each node")
    preference_pairs_per_sample: int | None = option(4, "pairs of a node at most; none: all")
    pair_selection: str = option("comparator_reward", "comparator_reward, reward_gap, all or random")

    num_iterations: int = option(6, "times that pairs are sampled and learned from")
    preference_replay_mode: str = option("current", "pairs to train on: current, nearest_k, all_history, lambda_decay")
    preference_replay_k: int | None = option(None, "nearest_k: iterations")
    preference_replay_lambda: float | None = option(
        None, "lambda_decay: an iteration counts this to the power of its age"
    )
    preference_replay_sample_size: int | None = option(None, "pairs drawn; none: as many as are new")
    preference_replay_dir: str | None = option(None, "where each iteration's pairs go; none: the run's folder")
    log_reward_distribution: bool = option(False, "write rewards and pictures of each iteration to the run's folder")
    policy_checkpoint_dir: str | None = option(None, "where policies of each iteration go; none: the run's folder")

    comparator_policy: str = option("current", "current, current_copy, model, history or api")
    comparator_generation_mode: str = option("decentralized", "or centralized: one model writes for all roles")
    comparator_centralized_agent_index: int = option(0, "centralized: which agent's model")
    comparator_num_candidates: int | None = option(
        None, "joint answers of the comparator; none: as many as the policy's"
    )
    comparator_model_name: str | None = option(None, "model: one name for all agents")
    comparator_agents: list[str] | None = option(None, "model: one name an agent")
    comparator_devices: str | list[str] | None = option(None, "device(s) of the comparator; none: the agents'")
    comparator_history_k: int | None = option(None, "history: the policy before the last k iterations; none: 1")
    comparator_api_url: str | None = option(None, "api: base URL, for example https://api.openai.com/v1")
    comparator_api_format: str = option("openai", "api: openai (chat completions) or anthropic (messages)")
    comparator_api_model: str | None = option(None, "api: the model's name there")
    comparator_api_key_env: str | None = option(None, "api: environment variable with the key; none: the library's own")
    comparator_api_key: str | None = option(None, "refused: a key in a config ends up in logs")
    comparator_api_key_header: str | None = option(None, "api: HTTP header of the key; none: the protocol's own")
    comparator_api_key_prefix: str = option("", "api: what stands before the key in that header, for example Bearer")
    comparator_api_max_n_per_request: int | None = option(None, "api: answers a request; none: all (Anthropic: 1)")
    comparator_api_timeout: float = option(120.0, "api: seconds of a request")
    comparator_api_retries: int = option(5, "api: further attempts after a time-out, 429 or 5xx, with growing pauses")
    comparator_api_concurrency: int = option(8, "api: requests at the same time")
    comparator_api_headers: dict[str, str] | None = option(None, "api: further HTTP headers")
    comparator_api_extra_body: dict[str, Any] | None = option(None, "api: further fields of each request")
    comparator_api_response_field: str | None = option(None, "refused: both formats say where the answer is")
    comparator_api_cache: str | None = option(None, "api: file of answers; none: api_cache.jsonl in the run's folder")
    comparator_max_failures: float = option(0.1, "api: share of an iteration's answers that may fail")

    def selections(self) -> tuple[str, ...]:
        return (*PAIR_SELECTIONS, "comparator_reward")

    def fewest(self) -> int:
        return 1  # the other answer is the comparator's

    def check_iterations(self, config: MAGRPOConfig) -> None:
        require, choose = config._require, config._choose
        choose("preference_replay_mode", tuple(REPLAY_MODES), REPLAY_MODES)
        choose("comparator_policy", tuple(COMPARATORS), COMPARATORS)
        choose("comparator_generation_mode", tuple(GENERATION_MODES), GENERATION_MODES)
        require("num_iterations", self.num_iterations >= 1, "at least 1")
        require("comparator_centralized_agent_index", self.comparator_centralized_agent_index >= 0, "at least 0")
        check_replay(
            self.preference_replay_mode,
            self.preference_replay_k,
            self.preference_replay_lambda,
            self.preference_replay_sample_size,
        )
        for key in ("comparator_num_candidates", "comparator_history_k", "comparator_api_max_n_per_request"):
            require(key, getattr(self, key) is None or getattr(self, key) >= 1, "at least 1, or none")
        require("comparator_api_timeout", self.comparator_api_timeout > 0, "above 0")
        require("comparator_api_retries", self.comparator_api_retries >= 0, "at least 0")
        require("comparator_api_concurrency", self.comparator_api_concurrency >= 1, "at least 1")
        require("comparator_max_failures", 0 <= self.comparator_max_failures < 1, "in [0, 1)")
        if self.preference_file is not None:
            raise ValueError("preference_file is not for iterations, which sample their own pairs; leave it out")
        if self.collaboration_mode == "centralized":
            if self.comparator_centralized_agent_index:
                raise ValueError(
                    "collaboration_mode='centralized' has one model: comparator_centralized_agent_index must be 0"
                )
            self.comparator_generation_mode = "centralized"
        self.check_comparator(config)

    def check_comparator(self, config: MAGRPOConfig) -> None:
        kind = self.comparator_policy
        names = [key for key in ("comparator_model_name", "comparator_agents") if getattr(self, key) is not None]
        if kind == "model" and len(names) != 1:
            raise ValueError(
                "comparator_policy='model' needs comparator_model_name or comparator_agents, one of the two"
            )
        if kind != "model" and names:
            raise ValueError(f"{names[0]} is for comparator_policy model, not {kind!r}; leave it out")
        if kind != "history" and self.comparator_history_k is not None:
            raise ValueError(f"comparator_history_k is for comparator_policy history, not {kind!r}; leave it out")
        if self.comparator_api_key is not None:
            raise ValueError(
                "comparator_api_key: a key in a config ends up in files and logs; put it into an environment variable "
                "and give that one's name as comparator_api_key_env"
            )
        if self.comparator_api_response_field is not None:
            raise ValueError(
                "comparator_api_response_field belonged to the generic format, which is not here; serve the model by "
                "the OpenAI chat protocol, and leave it out"
            )
        if kind != "api":
            given = [key for key in ("comparator_api_url", "comparator_api_model") if getattr(self, key) is not None]
            if given:
                raise ValueError(f"{given[0]} is for comparator_policy api, not {kind!r}; leave it out")
            return
        if self.comparator_api_format not in API_FORMATS:
            raise ValueError(
                f"comparator_api_format={self.comparator_api_format!r}: must be openai or anthropic (generic and "
                "responses are not here; most servers speak the OpenAI chat protocol)"
            )
        self.comparator_api_format = API_FORMATS[self.comparator_api_format]
        for key in ("comparator_api_url", "comparator_api_model"):
            if getattr(self, key) is None:
                raise ValueError(f"comparator_policy='api' needs {key}")


@dataclass
class MADPOIterConfig(IterationSettings, MADPOConfig):
    """MADPO in iterations. `num_train_epochs` are those of an iteration."""

    num_train_epochs: int = option(1, "passes over the chosen pairs, in each iteration")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_iterations(self)


@dataclass
class MARLHFIterConfig(IterationSettings, MARLHFConfig):
    """MARLHF in iterations: new pairs, a new reward model, then the policies go on."""

    num_train_epochs: int = option(2, "passes over the rows while the policies train, in each iteration")
    reward_num_train_epochs: int = option(2, "passes over the pairs")
    preference_scoring_reward: str = option(
        "task", "what scores pairs: task, or reward_model (the last iteration's, from the second iteration on)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_iterations(self)
        self._choose("preference_scoring_reward", tuple(SCORING), SCORING)
