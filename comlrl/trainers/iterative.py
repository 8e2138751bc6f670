"""MADPO and MARLHF in iterations: sample pairs of the policy against a comparator, learn from them, again.

An iteration is `sampling` and then the phases of MADPO or MARLHF. What is trained on is drawn from the pairs of all
iterations so far (`comlrl.replay`). The reference stays the initial policy, and env_step goes on.
"""

import copy
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from comlrl.agents import Agent
from comlrl.api_comparator import API_KEYS, ApiComparator, ApiRollouts, ApiSettings, api_key
from comlrl.centralized import Coordinator
from comlrl.comparators import (
    Comparator,
    CopyComparator,
    CurrentComparator,
    ModelComparator,
    check_comparator_models,
    check_failures,
    comparator_placement,
    failed_answers,
    foreign_candidates,
)
from comlrl.drift import write_drift
from comlrl.generation import Sampling, sample_seed
from comlrl.loading import Member, check_team, resolve_devices
from comlrl.placement import AgentPool, Group, Placement
from comlrl.planning import Planned
from comlrl.preferences import Candidate, Pair, candidates, node_pairs, pair_from_json, pair_to_json, write_pairs
from comlrl.replay import select_pairs
from comlrl.rewards import resolve_reward_range
from comlrl.rollouts import Node, Rollouts, RolloutStats, Team, TreeShape, walk
from comlrl.signals import StopSignal
from comlrl.trainers.base import prompt_limit
from comlrl.trainers.iterative_config import IterationSettings, MADPOIterConfig, MARLHFIterConfig
from comlrl.trainers.madpo import MADPOTrainer
from comlrl.trainers.marlhf import MARLHFIACTrainer, MARLHFMAACTrainer, MARLHFTrainer
from comlrl.trainers.pairs import DONE, SAMPLING, PairTrainer, own_ids
from comlrl.trainers.resume import tokenizer_hash
from comlrl.value_head import split_head

NO_LIMIT = 10**9  # tokens of a prompt that an API reads


class IterationTrainer(PairTrainer):
    """What the iterative forms add: the comparator, replay, and going round."""

    def __init__(self, *positional: Any, **others: Any):
        self.iteration = 0
        self.shards: list[list[Pair]] = []  # the pairs of each iteration so far
        self.selected: list[tuple[int, int]] = []  # what this iteration trains on: (iteration, number)
        self.rewards_seen: dict[str, list[float]] = {"target": [], "comparator": []}  # of this iteration's candidates
        self.staged_rewards: dict[str, list[float]] = {"target": [], "comparator": []}  # of a proposal
        self.policy_folders: list[str] = []  # of each iteration, see save_policy
        self.comparator: Comparator
        self.same_tokens = False
        super().__init__(*positional, **others)

    @property
    def iteration_args(self) -> IterationSettings:
        assert isinstance(self.args, IterationSettings)
        return self.args

    # ---- the comparator ---------------------------------------------------------------------------------------------

    @property
    def writes_for_all(self) -> bool:
        """Whether the comparator is one model that writes for all roles."""
        return self.iteration_args.comparator_generation_mode == "centralized"

    def device_settings(self) -> dict[str, str | list[str] | None]:
        return {**super().device_settings(), "comparator_devices": self.iteration_args.comparator_devices}

    @property
    def copied_agents(self) -> slice:
        """The agents whose models a comparator is like, one each."""
        first = self.iteration_args.comparator_centralized_agent_index
        return slice(first, first + 1) if self.by_role else slice(None)

    @property
    def comparator_count(self) -> int:
        return 1 if self.writes_for_all else self.args.num_agents

    def model_counts(self) -> dict[str, int]:
        counts = super().model_counts()
        own = self.iteration_args.comparator_policy in ("current_copy", "history", "model")
        return {**counts, **({"comparators": self.comparator_count} if own else {})}

    def check_other_models(self) -> None:
        super().check_other_models()
        args, count = self.iteration_args, self.comparator_count
        if args.comparator_centralized_agent_index >= self.args.num_agents:
            raise ValueError(
                f"comparator_centralized_agent_index={args.comparator_centralized_agent_index}: must be from 0 to "
                f"{self.args.num_agents - 1}"
            )
        resolve_devices(args.comparator_devices, count, "comparator_devices")
        self.comparator_members: list[Member] = []
        if args.comparator_policy == "model":
            names = args.comparator_agents or [str(args.comparator_model_name)] * count
            if len(names) != count:
                raise ValueError(f"comparator_agents has {len(names)} names for {count} models")
            home = self.members[0]
            found = check_team(None, names, count, None, {}, args.comparator_devices or str(home.device), "float32")
            self.comparator_members = [
                replace(m, name=f"comparator_{i}", compute_dtype=home.compute_dtype) for i, m in enumerate(found)
            ]
            for _, row in self.rows.first(1):
                prompts = self.comparator_team().prompts(row, [formatter(row) for formatter in self.formatters])
                check_comparator_models(
                    self.comparator_members, prompts, self.args.chat_template, self.args.max_new_tokens
                )
        if args.comparator_policy == "api":
            self.api_key = api_key(self.api_settings())

    def api_settings(self) -> ApiSettings:
        args = self.iteration_args
        return ApiSettings(
            url=args.comparator_api_url,
            form=args.comparator_api_format,
            model=str(args.comparator_api_model),
            key_env=args.comparator_api_key_env or API_KEYS[args.comparator_api_format],
            max_n=args.comparator_api_max_n_per_request,
            timeout=args.comparator_api_timeout,
            retries=args.comparator_api_retries,
            concurrency=args.comparator_api_concurrency,
            headers=args.comparator_api_headers or {},
            extra_body=args.comparator_api_extra_body or {},
            max_failures=args.comparator_max_failures,
            key_header=args.comparator_api_key_header,
            key_prefix=args.comparator_api_key_prefix,
        )

    def load_other_models(self) -> None:
        super().load_other_models()
        self.comparator = self.build_comparator()

    def planned_models(self, placement: Placement) -> list[Planned]:
        """With the comparator's, which are in memory only while an iteration samples."""
        planned = super().planned_models(placement)
        args, kind, spec = self.iteration_args, self.iteration_args.comparator_policy, self.args.placement
        if kind not in ("current_copy", "history", "model"):
            return planned
        moved = "comparators" in (spec or {})
        groups = placement.of("comparators") if moved else placement.of("agents")[self.copied_agents]
        members = self.comparator_members
        if kind != "model":
            policy = self.members[self.copied_agents]
            devices = [member.device for member in policy]
            if moved or args.comparator_devices is not None:
                devices = [torch.device(name) for name in resolve_devices(args.comparator_devices, len(policy))]
            if kind == "current_copy" and not moved and devices == [member.device for member in policy]:
                return planned
            members = [replace(m, name=f"comparator_{i}", device=d) for i, (m, d) in enumerate(zip(policy, devices))]
        holders: dict[tuple[Any, str], tuple[Member, set[int]]] = {}
        for member, group in zip(members, groups, strict=True):
            # One name for several agents is loaded once.
            key = (member.source if kind == "model" else member.name, str(member.device))
            holders.setdefault(key, (member, set()))[1].update(group.ranks)
        own = [(member, Group(sorted(ranks))) for member, ranks in holders.values()]
        return planned + [Planned(m, group, trained=False, samples=True, divided=False) for m, group in own]

    def build_comparator(self) -> Comparator:
        """Loads nothing: that is `Comparator.open`."""
        args, kind, spec = self.iteration_args, self.iteration_args.comparator_policy, self.args.placement
        policy: Sequence[Agent] = self.agents[self.copied_agents]
        homes = self.placement.of("agents")[self.copied_agents]
        self.comparator_placement = comparator_placement(self.world, spec, [home.ranks for home in homes])
        groups = self.comparator_placement.of("agents")
        moved = "comparators" in (spec or {})
        own = [agent.device for agent in policy]
        places = [torch.device(name) for name in resolve_devices(args.comparator_devices, len(policy))]
        if args.comparator_devices is None and not moved:
            places = own
        idle = self.args.offload_idle
        if kind == "current" or (kind == "current_copy" and places == own and not moved):
            return CurrentComparator(self.comparator_rollouts, policy)
        if kind == "current_copy":
            # Other processes than the agent's have no weights to copy, so that they read files.
            files = self.current_files if moved else None
            return CopyComparator(
                self.comparator_rollouts, policy, places, files, groups=groups, idle=idle, name="current_copy"
            )
        if kind == "history":
            return CopyComparator(
                self.comparator_rollouts, policy, places, self.history_files, groups=groups, idle=idle
            )
        if kind == "model":
            return ModelComparator(self.comparator_rollouts, self.comparator_members, groups=groups, idle=idle)
        return ApiComparator(self.api_rollouts, policy, self.api_settings(), self.api_key)

    def comparator_team(self) -> Team:
        if not self.writes_for_all:
            return Team(self.args.num_agents)
        # Output without any role's section gives no answer, and so no pair; it is counted.
        return Coordinator(self.adapter, self.args.num_agents, "skip")

    def comparator_rollouts(self, agents: Sequence[Agent]) -> Rollouts:
        own = all(agent is mine for agent, mine in zip(agents, self.agents)) and len(agents) == len(self.agents)
        return Rollouts(
            agents,
            self.rewards,
            self.formatters,
            self.external_transition,
            self.comparator_team(),
            chat_template=self.args.chat_template,
            prompt_limits=[prompt_limit(agent, self.args) for agent in agents],
            passthrough=self.args.external_prompt_passthrough,
            max_rows=self.rollouts.limit.value,
            pool=self.pool if own else AgentPool("none", [agent.device for agent in agents]),
            placement=self.placement if own else self.comparator_placement,
        )

    def api_rollouts(self, agents: Sequence[Agent]) -> Rollouts:
        return ApiRollouts(
            agents,
            self.rewards,
            self.formatters,
            self.external_transition,
            self.comparator_team(),
            chat_template=self.args.chat_template,
            prompt_limits=[NO_LIMIT] * len(agents),
            passthrough=self.args.external_prompt_passthrough,
            placement=Placement(self.world, None, {"agents": len(agents)}),
        )

    # ---- policies of earlier iterations -----------------------------------------------------------------------------

    @property
    def keeps_policies(self) -> bool:
        args = self.iteration_args
        copied = args.comparator_policy == "current_copy" and "comparators" in (self.args.placement or {})
        return copied or args.comparator_policy == "history" or args.policy_checkpoint_dir is not None

    def own_folder(self, setting: str | None, name: str) -> Path:
        """In the run's folder, or in the one of the setting a folder of this run: two runs never share one."""
        run = self.open_run()
        return run.folder / name if setting is None else Path(setting) / f"{run.folder.name}-{run.id[:8]}"

    def save_policy(self) -> None:
        """The policy as this iteration finds it: what `history` reads later."""
        folder = (
            self.own_folder(self.iteration_args.policy_checkpoint_dir, "policies") / f"iteration_{self.iteration:04d}"
        )
        for index, engine in self.engines.items():
            weights, _ = split_head(engine.weights())
            if engine.group.leader:
                folder.mkdir(parents=True, exist_ok=True)
                path = folder / f"{self.agents[index].name}.safetensors"
                partial = path.with_suffix(".partial")
                save_file({name: t.detach().cpu().contiguous() for name, t in weights.items()}, partial)
                os.replace(partial, path)
        self.world.exchange(None)
        self.policy_folders = [*self.policy_folders[: self.iteration], str(folder.resolve())]

    def history_files(self, iteration: int) -> list[Path]:
        """The policy before the last k iterations: k = 1 is that which the running one did not yet learn from."""
        return self.policy_files(max(iteration - (self.iteration_args.comparator_history_k or 1), 0))

    def current_files(self, iteration: int) -> list[Path]:
        return self.policy_files(iteration)

    def policy_files(self, wanted: int) -> list[Path]:
        """One a comparator's model."""
        args = self.iteration_args
        folder = Path(self.policy_folders[wanted])
        if not folder.is_dir():  # the run's folder was moved
            folder = self.own_folder(args.policy_checkpoint_dir, "policies") / folder.name
        files = [folder / f"{agent.name}.safetensors" for agent in self.agents[self.copied_agents]]
        for file in files:
            if not file.is_file():
                raise ValueError(f"the policy of iteration {wanted} is gone: {file} does not exist")
        return files

    # ---- sampling ---------------------------------------------------------------------------------------------------

    @property
    def comparator_shape(self) -> TreeShape:
        count = self.iteration_args.comparator_num_candidates or self.iteration_args.preference_num_candidates
        return replace(self.pair_shape, num_generations=count)

    def sample_pairs(self, sampling: Sampling, stop: StopSignal) -> None:
        if self.position == 0 and self.keeps_policies and len(self.policy_folders) <= self.iteration:
            self.save_policy()
        if isinstance(self.comparator, ApiComparator) and self.comparator.cache_path is None:
            given = self.iteration_args.comparator_api_cache
            self.comparator.cache_path = Path(given) if given else self.open_run().folder / "api_cache.jsonl"
        if self.comparator.rollouts is None:
            self.comparator.open(self.iteration)
            self.same_tokens = self.has_same_tokens()
        super().sample_pairs(sampling, stop)
        for incident in self.comparator.incidents:
            self.note(f"iteration {self.iteration}: {incident}")
        self.comparator.incidents.clear()

    def row_epoch(self) -> int:
        return self.iteration

    def propose(
        self, rows: Sequence[tuple[int, dict[str, Any]]], sampling: Sampling, counts: Counter[str]
    ) -> tuple[list[Pair], list[Node], RolloutStats]:
        """Pairs of the policy's first turn against the comparator's; of later turns, whose histories are the policy's
        own, of its answers among each other."""
        args, seed = self.iteration_args, self.args.seed
        roots, stats = self.rollouts.expand(rows, self.pair_shape, sampling, (seed, "pairs", self.rollout))
        others, more = self.comparator.expand(rows, self.comparator_shape, sampling, (seed, "comparator", self.rollout))
        self.count_failures(others, more, counts)
        counts["joint_answers"] += stats.env_steps + more.env_steps
        counts["dropped_rows"] += stats.dropped_rows
        counts["unparsable"] += stats.unparsable + more.unparsable
        by_row = {root.row_id: root for root in others}
        self.staged_rewards = {"target": [], "comparator": []}
        keep = not self.args.mask_truncated
        pairs = []
        for root in roots:
            own = candidates(root, own_ids, self.use_return, keep)
            other = by_row.get(root.row_id)
            theirs = self.foreign(other, counts) if other is not None else []
            self.staged_rewards["target"] += [c.answer.value for c in own if c.answer.value is not None]
            self.staged_rewards["comparator"] += [c.answer.value for c in theirs if c.answer.value is not None]
            pairs += node_pairs(
                root,
                own,
                theirs,
                selection=args.pair_selection,
                limit=args.preference_pairs_per_sample,
                seed=sample_seed(seed, "selection", self.rollout, root.row_id),
                counts=counts,
            )
            pairs += [pair for node in walk([root]) if node is not root for pair in self.pairs_of(node, counts)]
        stats.env_steps += more.env_steps
        return pairs, roots, stats

    def keep_proposal(self) -> None:
        for who, values in self.staged_rewards.items():
            self.rewards_seen[who] += values

    @property
    def by_role(self) -> bool:
        """Whether the comparator's one model writes for several agents."""
        return self.writes_for_all and not self.centralized

    def has_same_tokens(self) -> bool:
        """Whether the comparator's token ids are those of the policy's agents."""
        assert self.comparator.rollouts is not None
        if self.by_role or self.comparator.name == "api":
            return False
        pairs = zip(self.comparator.rollouts.agents, self.agents, strict=True)
        return all(
            one.tokenizer is other.tokenizer or tokenizer_hash(one.tokenizer) == tokenizer_hash(other.tokenizer)
            for one, other in pairs
        )

    def foreign(self, root: Node, counts: Counter[str]) -> list[Candidate]:
        return foreign_candidates(
            root,
            self.agents,
            same_tokens=self.same_tokens,
            by_role=self.by_role,
            use_return=self.use_return,
            keep_truncated=not self.args.mask_truncated,
            source=self.comparator.name,
            longest=self.args.max_new_tokens,
            counts=counts,
        )

    def count_failures(self, roots: Sequence[Node], stats: RolloutStats, counts: Counter[str]) -> None:
        """As many failed answers as were declared are borne, then the run ends."""
        failed, asked = failed_answers(roots, stats)
        counts["failed"] += failed
        counts["comparator_answers"] += asked
        every = counts["comparator_answers"]
        if self.rows.sized:
            every = max(every, len(self.rows) * self.comparator_shape.num_generations * self.comparator_count)
        check_failures(counts["failed"], every, self.iteration_args.comparator_max_failures, self.comparator.incidents)

    def end_sampling(self, sampling: Sampling) -> None:
        counts = ", ".join(f"{key.replace('_', ' ')} {count}" for key, count in sorted(self.pair_counts.items()))
        self.note(f"iteration {self.iteration}, preference pairs: {counts}")
        self.comparator.close()
        self.shards.append(self.pairs)
        self.pairs = []
        args = self.iteration_args
        self.selected = select_pairs(
            [len(shard) for shard in self.shards],
            args.preference_replay_mode,
            args.preference_replay_k,
            args.preference_replay_lambda,
            args.preference_replay_sample_size,
            sample_seed(self.args.seed, "replay", self.iteration),
        )
        self.write_pair_file(sampling)
        self.write_rewards()
        if self.selected:
            self.pairs_complete()
        elif self.iteration + 1 < args.num_iterations or any(self.shards):
            self.note(f"iteration {self.iteration} has no pairs to learn from ({counts}); going on with the next one")
            self.end_iteration()
            self.plan_evaluation()
        else:
            raise ValueError(
                f"no preference pairs in any iteration: {counts}. Policy and comparator always earned the same; raise "
                "preference_num_candidates or temperature, or use another comparator or a finer reward"
            )

    def write_rewards(self) -> None:
        args = self.iteration_args
        chosen = [pair for shard, place in self.selected for pair in [self.shards[shard][place]]]
        selected: dict[str, list[float]] = {"target": [], "comparator": []}
        for pair in chosen:
            for answer in (pair.chosen, pair.rejected):
                if answer.value is not None:
                    selected["target" if answer.source == "policy" else "comparator"].append(answer.value)
        by_model = self.scored_by_model()
        if args.log_reward_distribution and self.world.is_main:
            declared = None if by_model else resolve_reward_range(self.reward_functions[0])
            write_drift(
                self.open_run().folder / "reward_distributions",
                self.iteration,
                {"candidates": self.rewards_seen, "selected": selected},
                "reward_model" if by_model else "task",
                declared,
            )
        metrics = {
            f"preference/{who}_reward_mean": sum(values) / len(values)
            for who, values in self.rewards_seen.items()
            if values
        }
        metrics |= {"preference/iteration": float(self.iteration), "preference/selected": float(len(chosen))}
        self.open_run().log(metrics, step=self.step, env_step=self.env_step, epoch=self.fractional_epoch, kind="train")

    def scored_by_model(self) -> bool:
        """Whether a learned reward scored this iteration's candidates."""
        return False

    @property
    def training_pairs(self) -> list[Pair]:
        return [self.shards[shard][place] for shard, place in self.selected]

    def pair_path(self) -> Path:
        folder = self.own_folder(self.iteration_args.preference_replay_dir, "preferences")
        return folder / f"iteration_{max(len(self.shards) - 1, 0):04d}.{self.pair_args.preference_format}"

    def write_pair_file(self, sampling: Sampling) -> None:
        about = self.about_pairs(sampling) | {"iteration": self.iteration, "comparator": self.comparator.name}
        if self.world.is_main and self.shards[-1]:
            write_pairs(self.pair_path(), self.shards[-1], about)

    # ---- going round ------------------------------------------------------------------------------------------------

    def order_key(self) -> tuple[int, ...]:
        return self.iteration, self.epoch

    def end_policy(self) -> None:
        self.end_iteration()

    def end_iteration(self) -> None:
        self.iteration += 1
        self.epoch = self.position = 0
        self.epoch_ended = False
        self.pairs, self.selected, self.sampled_by = [], [], []
        self.pair_counts = Counter()
        self.rewards_seen = {"target": [], "comparator": []}
        self.phase = SAMPLING if self.iteration < self.iteration_args.num_iterations else DONE

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def finished_epochs(self) -> int:
        return self.iteration * self.args.num_train_epochs + self.epoch

    @property
    def progress(self) -> tuple[int, ...]:
        return (*super().progress, self.iteration)

    def counters(self) -> dict[str, Any]:
        return {
            **super().counters(),
            "iteration": self.iteration,
            "shards": [[pair_to_json(pair) for pair in shard] for shard in self.shards],
            "selected": self.selected,
            "rewards_seen": self.rewards_seen,
            "policy_folders": self.policy_folders,
        }

    def set_counters(self, values: Mapping[str, Any]) -> None:
        self.iteration = values["iteration"]
        super().set_counters(values)
        self.shards = [[pair_from_json(data) for data in shard] for shard in values["shards"]]
        self.selected = [(shard, place) for shard, place in values["selected"]]
        self.rewards_seen = copy.deepcopy(values["rewards_seen"])
        self.policy_folders = list(values["policy_folders"])
        self.comparator.close()


class MADPOIterTrainer(IterationTrainer, MADPOTrainer):
    """MADPO in iterations. AdamW's state and the reference go on through all of them."""

    args: MADPOIterConfig
    config_class = MADPOIterConfig


class MARLHFIterTrainer(IterationTrainer, MARLHFTrainer):
    """MARLHF in iterations: each trains a new reward model from the base model; the policies go on, and with them their
    critics, AdamW's states and the KL's reference."""

    args: MARLHFIterConfig
    config_class = MARLHFIterConfig

    @property
    def run_name(self) -> str:
        return self.args.run_name or "marlhfiter"

    def planned_steps(self) -> int | None:
        steps = super().planned_steps()
        if steps is None:
            return None
        total = steps * self.args.num_iterations
        return total if self.args.max_steps is None else min(total, self.args.max_steps)

    def scored_by_model(self) -> bool:
        return self.scorer_is_trained and self.args.preference_scoring_reward == "reward_model"

    def propose(
        self, rows: Sequence[tuple[int, dict[str, Any]]], sampling: Sampling, counts: Counter[str]
    ) -> tuple[list[Pair], list[Node], RolloutStats]:
        if not self.scored_by_model():
            return super().propose(rows, sampling, counts)
        assert self.comparator.rollouts is not None
        with self.rewarded_by_the_model(self.rollouts, self.comparator.rollouts):
            return super().propose(rows, sampling, counts)

    @property
    def reward_pairs(self) -> list[Pair]:
        return self.training_pairs

    def pairs_complete(self) -> None:
        if self.scorer_is_trained:
            self.load_scorer()
        super().pairs_complete()


class MARLHFIterIACTrainer(MARLHFIterTrainer, MARLHFIACTrainer):  # type: ignore[misc]  # the settings are one class
    pass


class MARLHFIterMAACTrainer(MARLHFIterTrainer, MARLHFMAACTrainer):  # type: ignore[misc]  # as above
    pass


MARLHFIterTrainer.on_actor_critic = {"iac": MARLHFIterIACTrainer, "maac": MARLHFIterMAACTrainer}

__all__ = ["MADPOIterConfig", "MADPOIterTrainer", "MARLHFIterConfig", "MARLHFIterTrainer"]
