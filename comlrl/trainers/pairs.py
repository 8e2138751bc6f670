"""What every preference trainer does first: sample joint answers and make pairs of them, or read a file of pairs."""

import random
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from comlrl.agents import Agent
from comlrl.centralized import CentralizedComparatorAdapter, Coordinator, TaggedCentralizedComparatorAdapter
from comlrl.checkpoint import tensors_hash
from comlrl.generation import Completion, Sampling, sample_seed
from comlrl.preferences import (
    Pair,
    candidates,
    check_lines,
    node_pairs,
    pair_from_json,
    pair_to_json,
    read_lines,
    read_pairs,
    write_pairs,
)
from comlrl.records import plain
from comlrl.rollouts import Node, RolloutStats, Team, TreeShape, walk
from comlrl.signals import StopSignal
from comlrl.summaries import Metrics, completion_records, rollout_metrics
from comlrl.trainers.base import prompt_limit
from comlrl.trainers.preference_config import PairSettings
from comlrl.trainers.reinforce import MAGRPOTrainer
from comlrl.trainers.resume import tokenizer_hash
from comlrl.version import __version__

# The published order of positional arguments.
POSITIONAL = (
    "agent_model",
    "agents",
    "num_agents",
    "tokenizer",
    "model_config",
    "train_dataset",
    "eval_dataset",
    "reward_func",
    "reward_processor",
    "formatters",
    "external_transition",
    "wandb_config",
    "eval_logger",
    "eval_aggregator",
    "args",
)
SAMPLING, POLICY, DONE = "sampling", "policy", "done"  # phases that all of them have


def named(positional: Sequence[Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """Positional arguments by name, as published."""
    if len(positional) > len(POSITIONAL):
        raise TypeError(f"{len(positional)} positional arguments; at most {len(POSITIONAL)} can be given")
    given = dict(zip(POSITIONAL, positional))
    for name in given.keys() & keywords.keys():
        raise TypeError(f"argument {name!r} is given twice")
    return {**given, **keywords}


class PairTrainer(MAGRPOTrainer):
    """Phase `sampling`: row by row, joint answers to pairs. What follows is the subclass's.

    Args:
        centralized_comparator_adapter: of a coordinator; none: tagged sections.
        Others: see `TeamTrainer`.
    """

    use_return = True  # whether pairs compare returns, or the turn's own rewards

    def __init__(
        self,
        *positional: Any,
        centralized_comparator_adapter: CentralizedComparatorAdapter | None = None,
        **others: Any,
    ):
        self.adapter = centralized_comparator_adapter or TaggedCentralizedComparatorAdapter()
        self.phase = SAMPLING
        self.pieces = 0  # of work that are no optimizer steps of the policies
        self.pairs: list[Pair] = []
        self.pair_counts: Counter[str] = Counter()
        self.sampled_by: list[str] = []  # hash of each agent's weights when the pairs were sampled
        self.file_lines: list[dict[str, Any]] = []
        super().__init__(**named(positional, others))

    # ---- settings ---------------------------------------------------------------------------------------------------

    @property
    def pair_args(self) -> PairSettings:
        assert isinstance(self.args, PairSettings)
        return self.args

    @property
    def centralized(self) -> bool:
        return self.pair_args.collaboration_mode == "centralized"

    def resolve_args(self, args, agents, num_agents, transition):
        # A coordinator is one model, and num_agents counts its roles.
        one = isinstance(args, PairSettings) and args.collaboration_mode == "centralized"
        return super().resolve_args(args, None if one else agents, num_agents, transition)

    def build_team(self) -> Team:
        if not self.centralized:
            return super().build_team()
        return Coordinator(self.adapter, self.args.num_agents, self.pair_args.unparsable_reward)

    def num_models(self) -> int:
        return 1 if self.centralized else super().num_models()

    @property
    def pair_shape(self) -> TreeShape:
        """Of the trees whose nodes give pairs."""
        count = self.pair_args.preference_num_candidates
        return replace(self.shape, num_generations=count, greedy_baseline=False)

    def check_tree(self) -> None:
        super().check_tree()
        learned = self.shape
        self.shape = self.pair_shape
        try:
            super().check_tree()
        except ValueError as error:
            raise ValueError(f"{error} (preference_num_candidates={self.shape.num_generations})") from error
        finally:
            self.shape = learned

    def planned_steps(self) -> int | None:
        """Pairs are not known before they are sampled."""
        if self.args.max_steps is None and self.args.lr_schedule not in ("constant", "constant_with_warmup"):
            raise ValueError(
                f"lr_schedule={self.args.lr_schedule!r} needs a known number of steps, and pairs are counted only once "
                "they are sampled; set max_steps, or use constant"
            )
        return self.args.max_steps

    def check_other_models(self) -> None:
        super().check_other_models()
        path = self.pair_args.preference_file
        if path is not None:
            self.file_lines = read_lines(path)
            check_lines(self.file_lines, self.num_models(), path)

    @property
    def needs_rows(self) -> bool:
        return self.pair_args.preference_file is None

    def callbacks(self) -> dict[str, Any]:
        return {**super().callbacks(), "centralized_comparator_adapter": self.adapter}

    # ---- the phases -------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        limit = self.args.max_steps
        return self.phase == DONE or (limit is not None and self.step >= limit)

    def next_piece(self, sampling: Sampling, stop: StopSignal) -> None:
        if self.phase == SAMPLING:
            self.sample_pairs(sampling, stop)
        else:
            self.learn_from_pairs(sampling, stop)

    def shuffled_pairs(self, count: int, size: int, *key: object) -> list[list[int]]:
        """Minibatches of `size` of `count` pairs, in an order that depends on the run's seed and `key` only."""
        order = list(range(count))
        random.Random(sample_seed(self.args.seed, *key)).shuffle(order)
        return [order[start : start + size] for start in range(0, count, size)]

    def policy_gradient_piece(self, sampling: Sampling, stop: StopSignal) -> None:
        """The next piece of the policy trainer that this one stands on."""
        super().next_piece(sampling, stop)

    @abstractmethod
    def learn_from_pairs(self, sampling: Sampling, stop: StopSignal) -> None:
        """The next piece of work of any phase after sampling."""

    @abstractmethod
    def pairs_complete(self) -> None:
        """All pairs are there: go to the next phase."""

    def sample_pairs(self, sampling: Sampling, stop: StopSignal) -> None:
        """Joint answers to some rows, and the pairs that they make."""
        if self.file_lines:
            self.read_pair_file(stop)
            return
        size = self.args.rows_per_rollout or self.args.rollout_buffer_size
        counts = Counter(self.pair_counts)
        hashes = self.sampled_by or self.model_hashes()
        with self.revocable(stop):
            rows = self.rows.take(self.row_epoch(), self.position, size)
            made = self.propose(rows, sampling, counts) if rows else ([], [], RolloutStats())
        pairs, roots, stats = made
        self.pieces += 1
        self.position += len(rows)
        self.sampled_by = hashes
        if rows:
            self.rollout += 1
            self.pairs += pairs
            self.pair_counts = counts
            self.keep_proposal()
            if not self.pair_args.use_environment_step:
                self.env_step += stats.env_steps
            self.record_candidates(roots, stats)
        if self.rows.exhausted(self.position, len(rows), size):
            self.position = 0
            self.end_sampling(sampling)

    def propose(
        self, rows: Sequence[tuple[int, dict[str, Any]]], sampling: Sampling, counts: Counter[str]
    ) -> tuple[list[Pair], list[Node], RolloutStats]:
        """Pairs of the rows' trees, the trees, and what they took. Changes nothing but `counts`."""
        roots, stats = self.rollouts.expand(rows, self.pair_shape, sampling, (self.args.seed, "pairs", self.rollout))
        counts["joint_answers"] += stats.env_steps
        counts["dropped_rows"] += stats.dropped_rows
        counts["unparsable"] += stats.unparsable
        return [pair for node in walk(roots) for pair in self.pairs_of(node, counts)], roots, stats

    def row_epoch(self) -> int:
        """Which order of the rows is sampled in."""
        return 0

    def keep_proposal(self) -> None:
        """Called when the pairs of a proposal were put down."""

    def pairs_of(self, node: Node, counts: Counter[str]) -> list[Pair]:
        args = self.pair_args
        keep = not self.args.mask_truncated
        return node_pairs(
            node,
            candidates(node, own_ids, self.use_return, keep),
            None,
            selection="reward_gap" if args.pair_selection == "comparator_reward" else args.pair_selection,
            limit=args.preference_pairs_per_sample,
            seed=sample_seed(self.args.seed, "selection", self.rollout, node.row_id, node.path),
            counts=counts,
        )

    def read_pair_file(self, stop: StopSignal) -> None:
        counts: Counter[str] = Counter()
        with self.revocable(stop):
            limits = [prompt_limit(agent, self.args) for agent in self.agents]
            longest = self.args.max_new_tokens
            keys = self.tokenizer_keys()
            pairs = read_pairs(self.file_lines, self.agents, self.args.chat_template, limits, longest, keys, counts)
        self.pieces += 1
        self.pairs, self.pair_counts = pairs, counts
        self.end_sampling(self.sampling)

    def end_sampling(self, sampling: Sampling) -> None:
        counts = ", ".join(f"{key.replace('_', ' ')} {count}" for key, count in sorted(self.pair_counts.items()))
        self.note(f"preference pairs: {counts}")
        if not self.pairs:
            raise ValueError(
                f"no preference pairs: {counts or 'no answer was rewarded'}. All joint answers to a row earned the "
                "same or said the same; raise preference_num_candidates or temperature, or use a finer reward"
            )
        self.pairs_complete()
        self.write_pair_file(sampling)

    # ---- records ----------------------------------------------------------------------------------------------------

    def record_candidates(self, roots: list[Node], stats: RolloutStats) -> None:
        """Once, when they are sampled: a resumed run has each of them once."""
        run = self.open_run()
        run.log_completions(
            [{"step": self.step, **record} for record in completion_records(roots, "preference", self.rollout)]
        )
        metrics: Metrics = {f"preference/{key}": float(count) for key, count in self.pair_counts.items()}
        if roots:
            sampled = rollout_metrics(roots, stats, len(self.agents))
            metrics |= {key if key.startswith("time/") else f"preference/{key}": v for key, v in sampled.items()}
        run.log(metrics, step=self.step, env_step=self.env_step, epoch=self.fractional_epoch, kind="train")

    def tokenizer_keys(self) -> list[str]:
        return [tokenizer_hash(agent.tokenizer) for agent in self.agents]

    def model_hashes(self) -> list[str]:
        """Of each agent's weights as they are now; all processes have to call."""
        found = self.world.union(lambda: {i: tensors_hash(engine.weights()) for i, engine in self.engines.items()})
        return [found[index] for index in range(len(self.agents))]

    def about_pairs(self, sampling: Sampling) -> dict[str, Any]:
        args = self.pair_args
        return plain(
            {
                "comlrl": __version__,
                "run": self.open_run().id,
                "models": self.sampled_by,
                "tokenizers": self.tokenizer_keys(),
                "sampling": asdict(sampling),
                "seed": self.args.seed,
                "candidates": args.preference_num_candidates,
                "selection": args.pair_selection,
                "compared": "returns" if self.use_return else "rewards",
            }
        )

    def pair_path(self) -> Path:
        return self.open_run().folder / f"preferences.{self.pair_args.preference_format}"

    def write_pair_file(self, sampling: Sampling) -> None:
        """The pairs, in the run's folder: to look at, and for `preference_file` of another run."""
        about = self.about_pairs(sampling)
        if self.world.is_main:
            write_pairs(self.pair_path(), self.pairs, about)

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def clock(self) -> int:
        return self.step + self.pieces

    @property
    def progress(self) -> tuple[int, ...]:
        return (*super().progress, self.pieces)

    def counters(self) -> dict[str, Any]:
        return {
            **super().counters(),
            "phase": self.phase,
            "pieces": self.pieces,
            "pairs": [pair_to_json(pair) for pair in self.pairs],
            "pair_counts": dict(self.pair_counts),
            "sampled_by": self.sampled_by,
        }

    def set_counters(self, values: Mapping[str, Any]) -> None:
        super().set_counters(values)
        self.phase, self.pieces = values["phase"], values["pieces"]
        self.pairs = [pair_from_json(data) for data in values["pairs"]]
        self.pair_counts = Counter(values["pair_counts"])
        self.sampled_by = list(values["sampled_by"])


def own_ids(agent: int, completion: Completion) -> list[int]:
    """Token ids as they were sampled."""
    return list(completion.token_ids)


Ids = Callable[[int, Completion], list[int]]
__all__ = ["DONE", "POLICY", "SAMPLING", "Agent", "Ids", "PairTrainer", "named", "own_ids"]
