"""What every family's trainer shares: construction, evaluation, records, saving, and the checks of settings."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from comlrl import credit
from comlrl.agents import Agent
from comlrl.checkpoint import tensor_shapes
from comlrl.config import escape, to_dict, without_secrets
from comlrl.data import RowSource
from comlrl.engine import Engine, Frozen
from comlrl.evaluation import Evaluation, evaluate_team
from comlrl.generation import Sampling
from comlrl.loading import build_formatters, check_context, check_team, load_references, load_team, resolve_devices
from comlrl.memory import Limit
from comlrl.optimizers import OptimizerSettings, check_optimizer
from comlrl.placement import AgentPool, Group, Placement, check_parallel_training, check_placement
from comlrl.planning import Planned, plan_team, plan_text
from comlrl.processes import World, by_deepspeed, process_count
from comlrl.profile import agent_metrics, shares
from comlrl.rewards import Rewards
from comlrl.rollouts import Node, Rollouts, RolloutStats, Team, TreeShape, walk
from comlrl.summaries import Metrics, completion_records, rollout_metrics
from comlrl.trackers import check_trackers
from comlrl.tracking import Run
from comlrl.trainers.checkpointing import Checkpointing
from comlrl.trainers.reinforce_config import MAGRPOConfig
from comlrl.zero import ZeroEngine, ZeroFrozen, read_config

SAMPLING_OVERRIDES = ("max_new_tokens", "temperature", "top_p", "top_k")


class TeamTrainer(Checkpointing):
    """A team of agents, its task and its records.

    Args:
        agent_model: every agent's model: an embedded name, a path or a hub id.
        agents: instead of it, one an agent: names or loaded models (separate objects).
        num_agents: agents of the team; none: what `agents` or `args` say.
        tokenizer: one, or one an agent; none: each model's own. Needed for loaded models.
        model_config: dtype, attn_implementation, model_kwargs, special_tokens.
        train_dataset, eval_dataset: rows (mappings); a `datasets.Dataset`, an `IterableDataset` or a list.
        reward_func: see `comlrl.rewards`; a list of functions is summed with `reward_weights`.
        reward_processor: float -> float, applied to each reward.
        formatters: row -> prompt, one or one an agent; none: row["prompt"].
        external_transition: feedback between turns (keywords prompt, agent_completions, num_agents,
            prompt_history_per_agent, response_history_per_agent; on request batch_item, rewards, turn) -> one prompt
            an agent.
        wandb_config: switches W&B on. trackers: names of Accelerate's other trackers.
        eval_logger, eval_aggregator: the task's own metrics, see `comlrl.evaluation.user_metrics`.
        run_config: what else the run's config.yaml should say (the script's settings).
        dry_run: check everything and load no model; `plan()` then says what would run.
    """

    config_class: type[MAGRPOConfig] = MAGRPOConfig

    def __init__(
        self,
        agent_model: str | None = None,
        agents: Sequence[Any] | None = None,
        num_agents: int | None = None,
        tokenizer: Any = None,
        model_config: dict[str, Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        reward_func: Callable | Sequence[Callable] | None = None,
        reward_processor: Callable[[float], float] | None = None,
        formatters: Callable | Sequence[Callable] | None = None,
        external_transition: Callable | None = None,
        wandb_config: dict[str, Any] | None = None,
        eval_logger: Callable | None = None,
        eval_aggregator: Callable | None = None,
        args: MAGRPOConfig | None = None,
        *,
        reward_weights: Sequence[float] | None = None,
        trackers: Sequence[str] = (),
        run_config: dict[str, Any] | None = None,
        dry_run: bool = False,
    ):
        # Everything that can be refused is refused before a model is loaded.
        self.args = self.resolve_args(args or self.config_class(), agents, num_agents, external_transition)
        args = self.args
        check_parallel_training(
            args.parallel_training, self.device_settings(), args.deepspeed_config is not None or by_deepspeed()
        )
        check_placement(args.placement, self.model_counts(), process_count())
        if args.deepspeed_config is not None:
            read_config(args.deepspeed_config)
        if args.offload_idle and (args.deepspeed_config is not None or by_deepspeed()):
            raise ValueError(
                "offload_idle=True: DeepSpeed has its own offload; use ds_configs/zero*_offload.json instead"
            )
        if reward_func is None:
            raise ValueError("reward_func is missing: give a function f(completions_1, ..., completions_n) -> rewards")
        if (eval_logger is None) != (eval_aggregator is None):
            raise ValueError("eval_logger and eval_aggregator work together: give both or neither")
        self.team = self.build_team()
        self.shape = TreeShape(
            num_turns=args.num_turns or 1,
            num_generations=args.num_generations,
            joint_mode=args.joint_mode,
            discount=args.discount,
            early_termination_threshold=args.early_termination_threshold,
            node_weighting=args.node_weighting,
            greedy_baseline=args.advantage_mode == "greedy",
        )
        self.check_tree()
        self.sampling = Sampling(
            args.max_new_tokens, args.temperature, args.top_p, args.top_k, tuple(args.stop_strings)
        )
        if self.sampling.truncated:
            warnings.warn(
                f"top_p={args.top_p}, top_k={args.top_k}: truncated sampling biases the policy gradient "
                "(the trained log-probs are those of the whole distribution); the kept mass is logged",
                stacklevel=2,
            )
        self.temperature = args.temperature  # of the trained log-probs: that of sampling
        self.trackers, self.wandb_config = list(trackers), wandb_config
        check_trackers(self.trackers, wandb_config)
        self.formatters = build_formatters(formatters, self.team.num_roles)
        self.external_transition = external_transition
        self.eval_logger, self.eval_aggregator = eval_logger, eval_aggregator
        self.rows = RowSource(train_dataset, "train_dataset", args.seed, args.shuffle)
        self.eval_rows = RowSource(eval_dataset, "eval_dataset", args.seed, shuffle=False)
        self.total_steps = self.planned_steps()
        self.members = check_team(agent_model, agents, self.num_models(), tokenizer, model_config, *args.model_options)
        check_context(self.members, args.max_new_tokens)
        resolve_devices(args.reference_devices, self.num_models(), "reference_devices")
        self.check_other_models()
        self.run: Run | None = None
        self.run_config = run_config or {}
        output = ((wandb_config or {}).get("config_sections") or {}).get("output") or {}
        self.verbose: bool = bool(output.get("verbose", True))
        names = ("reference", "learn", "sync", "save", "evaluate")
        self.seconds: Metrics = dict.fromkeys((f"time/{name}" for name in names), 0.0)  # since the last step
        self.logged_at = time.perf_counter()
        functions: list[Any] = list(reward_func) if isinstance(reward_func, (list, tuple)) else [reward_func]
        self.reward_functions, self.reward_processor = functions, reward_processor
        # Reward workers are forked here: before any model, so that they stay small and no thread is running yet.
        self.rewards = Rewards(
            functions,
            self.team.num_roles,
            weights=reward_weights,
            processor=reward_processor,
            batch_size=args.reward_batch_size,
            timeout=args.reward_timeout,
            on_error=args.reward_on_error,
        )
        # After the reward workers: from here on there are threads.
        self.world = World(args.collective_timeout, args.deepspeed_config is not None)
        config = args.deepspeed_config if args.deepspeed_config is not None else self.world.deepspeed_config
        self.zero = read_config(config) if config is not None else None
        check_optimizer(args.optimizer, self.zero)
        if args.offload_idle and self.zero is not None:
            raise ValueError(
                "offload_idle=True: DeepSpeed has its own offload; use ds_configs/zero*_offload.json instead"
            )
        super().__init__()
        self.pool = AgentPool("none", [])
        if not dry_run:
            self.load_models()

    def load_models(self) -> None:
        args = self.args
        self.placement = Placement(self.world, args.placement, self.model_counts())
        homes = self.placement.of("agents")
        self.agents: list[Agent] = self.load_agents()
        self.reference_hashes = [agent.reference_hash() for agent in self.agents if args.reference_kl_enabled]
        self.shapes = [tensor_shapes(agent.trained) for agent in self.agents]
        self.references: dict[int, Frozen] = self.load_references() if args.reference_kl_enabled else {}
        for agent, group in zip(self.agents, homes):
            if not group.member:
                agent.unload()
        self.pool = AgentPool(args.parallel_training, [agent.device for agent in self.agents])
        self.token_limit = Limit("micro_batch_tokens", args.micro_batch_tokens, self.world.any)
        settings = self.agent_settings()
        if self.zero is not None and self.zero["zero_optimization"]["stage"] == 3:
            for agent, group in zip(self.agents, homes):
                if group.member:
                    agent.make_sampler()
        self.engines: dict[int, Engine] = {
            index: self.make_engine(agent, settings, homes[index])
            for index, agent in enumerate(self.agents)
            if homes[index].member
        }
        self.rollouts = build_rollouts(
            self.agents,
            self.rewards,
            self.formatters,
            self.external_transition,
            self.team,
            args,
            self.pool,
            self.placement,
        )
        self.load_other_models()
        if args.offload_idle:
            for engine in self.engines.values():
                engine.leave_device()
            for reference in self.references.values():
                reference.leave_device()
            for agent in self.agents:
                agent.idle = True

    def model_counts(self) -> dict[str, int]:
        """Kinds of models that `placement` may name, and how many there are."""
        count = self.num_models()
        return {"agents": count, **({"references": count} if self.args.reference_kl_enabled else {})}

    # What a family with more models (critics) overrides.

    def device_settings(self) -> dict[str, str | list[str] | None]:
        return {"agent_devices": self.args.agent_devices, "reference_devices": self.args.reference_devices}

    def check_other_models(self) -> None:
        """Refuse other models than the agents that cannot work; loads nothing."""

    def load_agents(self) -> list[Agent]:
        return load_team(self.members)

    def trajectory_metrics(self, roots: list[Node]) -> Metrics:
        """Further numbers of an evaluation's greedy trajectories, for families that have them."""
        return {}

    def load_other_models(self) -> None:
        """Called last."""

    def agent_settings(self) -> OptimizerSettings:
        args = self.args
        return OptimizerSettings(
            args.agent_learning_rate,
            args.adam_betas,
            args.adam_eps,
            args.weight_decay,
            args.max_grad_norm,
            args.lr_schedule,
            args.warmup_steps,
            args.optimizer,
        )

    def make_engine(self, agent: Agent, settings: OptimizerSettings, group: Group) -> Engine:
        if self.zero is None:
            return Engine(agent.trained, settings, self.total_steps, group)
        return ZeroEngine(agent.trained, settings, self.total_steps, group, self.zero)

    def load_references(self) -> dict[int, Frozen]:
        """A frozen copy of each agent's weights as they are now, where its group is."""
        args, groups = self.args, self.placement.of("references")
        models = load_references(self.agents, args.reference_devices, [group.member for group in groups])
        found = {i: Frozen(model, groups[i]) for i, model in models.items()}
        if self.zero is not None and self.zero["zero_optimization"]["stage"] == 3:
            for i, frozen in found.items():
                if self.agents[i].adapter is None:  # an adapter's base is whole everywhere: sampling needs it
                    found[i] = ZeroFrozen(frozen.model, groups[i], self.zero, self.agents[i].device)
        return found

    # ---- evaluation and records -------------------------------------------------------------------------------------

    def evaluate(self, num_eval_samples: int | None = None) -> Metrics:
        """Greedy (and with eval_generations sampled) trajectories on the eval rows; keys start with `eval/`."""
        return self.evaluate_team(num_eval_samples).metrics

    def evaluate_team(self, num_eval_samples: int | None = None) -> Evaluation:
        limit = self.args.eval_num_samples if num_eval_samples is None else num_eval_samples
        rows = self.eval_rows.first(limit)
        if not rows:
            return Evaluation({}, [])
        started = time.perf_counter()
        evaluation = evaluate_team(
            self.rollouts,
            rows,
            self.shape,
            self.sampling,
            num_agents=len(self.agents),
            generations=self.args.eval_generations,
            batch_size=self.args.eval_batch_size,
            seed_key=(self.args.seed, "eval"),
            rollout=self.rollout,
            eval_logger=self.eval_logger,
            eval_aggregator=self.eval_aggregator,
            trajectory_metrics=self.trajectory_metrics,
        )
        metrics = {f"eval/{key}": value for key, value in evaluation.metrics.items()}
        metrics["eval/time/evaluate"] = time.perf_counter() - started
        return Evaluation(metrics, evaluation.records)

    def plan_evaluation(self) -> None:
        """Due when `eval_interval` optimizer steps have passed, and after the last step."""
        interval = self.args.eval_interval
        last = self.evaluations[-1][0] if self.evaluations else 0
        crossed = bool(interval) and self.step // interval > last // interval
        self.evaluation_due = bool(interval) and (crossed or (self.finished and last != self.step))

    def record_evaluation(self, evaluation: Evaluation) -> None:
        self.evaluation_due = False
        run = self.open_run()
        if evaluation.metrics:
            self.evaluations.append((self.step, evaluation.metrics))
            run.log(
                evaluation.metrics,
                step=self.step,
                env_step=self.env_step,
                epoch=self.fractional_epoch,
                kind="eval",
            )
            run.log_completions([{"step": self.step, **record} for record in evaluation.records])
            self.compare_with_best(evaluation.metrics)

    def record_rollout(self, roots: list[Node], stats: RolloutStats) -> None:
        self.rollout += 1
        self.env_step += stats.env_steps
        if roots:
            for key, value in rollout_metrics(roots, stats, len(self.agents)).items():
                summed = key.startswith(("time/", "rollout/")) and key in self.pending
                self.pending[key] = self.pending[key] + value if summed else value

    def record_completions(self, roots: list[Node]) -> None:
        """Written when a buffer is learned from, with that step: a resumed run has each sample once."""
        records = completion_records(roots, "train", self.rollout)
        self.open_run().log_completions([{"step": self.step + 1, **record} for record in records])

    def log_step(self, metrics: Metrics) -> None:
        counts = {f"reward_calls/{key}": float(value) for key, value in self.rewards.counters.items()}
        line = {**self.pending, **metrics, **counts, **self.seconds}
        line |= self.profile(line)
        self.pending = {}
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self.open_run().log(line, step=self.step, env_step=self.env_step, epoch=self.fractional_epoch, kind="train")

    def profile(self, line: Metrics) -> Metrics:
        """Where the time since the last line went; see `comlrl.profile`. All processes have to call."""
        wall, self.logged_at = time.perf_counter() - self.logged_at, time.perf_counter()
        parts = self.world.exchange({index: agent.take_work() for index, agent in enumerate(self.agents)})
        return {"time/step": wall, **shares(line, wall), **agent_metrics(parts, len(self.agents), wall)}

    def summary(self) -> list[dict[str, Any]]:
        """First and last evaluation as rows of a table: rewards, then lengths and truncated shares of each agent."""
        rows = []
        for step, metrics in [self.evaluations[0], self.evaluations[-1]] if self.evaluations else []:
            row: dict[str, Any] = {"step": step}
            k = self.args.eval_generations
            for key, title in (
                ("reward_mean", "reward greedy"),
                ("sampled/reward_mean", "reward sampled"),
                ("sampled/best_of_k", f"best of {k}"),
            ):
                if f"eval/{key}" in metrics:
                    row[title] = metrics[f"eval/{key}"]
            kind = "eval/sampled" if "eval/sampled/reward_mean" in metrics else "eval"
            for agent in range(len(self.agents)):
                for name in ("characters", "truncated_share"):
                    value = metrics.get(
                        f"{kind}/agent_{agent}/turn_1/{name}", float("nan")
                    )  # nan: every row was dropped
                    row[f"agent_{agent} {name.replace('_share', '')}"] = value
            rows.append(row)
        return rows

    def note(self, text: str) -> None:
        if self.run is not None:
            self.run.note(text)

    def drain_incidents(self) -> None:
        for incidents in (self.rewards.incidents, *(limit.incidents for limit in self.limits())):
            for incident in incidents:
                self.note(f"step {self.step + 1}: {incident}")
            incidents.clear()

    @property
    def fractional_epoch(self) -> float:
        return self.epoch + (self.position / len(self.rows) if len(self.rows) else 0.0)

    @property
    def run_name(self) -> str:
        return self.args.run_name or type(self).__name__.removesuffix("Trainer").lower()

    def limits(self) -> list[Limit]:
        return [self.rollouts.limit, self.token_limit]

    def callbacks(self) -> dict[str, Any]:
        return {
            **{f"reward_{i}": function for i, function in enumerate(self.reward_functions)},
            "reward_processor": self.reward_processor,
            **{f"formatter_{i}": formatter for i, formatter in enumerate(self.formatters)},
            "external_transition": self.external_transition,
            "eval_logger": self.eval_logger,
            "eval_aggregator": self.eval_aggregator,
        }

    def open_run(self) -> Run:
        """The run's records; its folder is made now, or that of the loaded checkpoint is opened again."""
        if self.run is None:
            self.world.together(self.make_run)
            assert self.run is not None
            self.run.follow(self.world.from_main(self.run.identity()))
        self.run.verbose = self.verbose
        return self.run

    def make_run(self) -> None:
        self.run = Run(
            self.args.output_dir,
            self.run_name,
            # A script's settings are written so that `--config` and `python -m comlrl.evaluate` read them back.
            escape(
                {**without_secrets(self.run_config or {"trainer": type(self).__name__}), "args": to_dict(self.args)}
            ),
            seed=self.args.seed,
            trackers=self.trackers,
            wandb=self.wandb_config,
            logging_steps=self.args.logging_steps,
            verbose=self.verbose,
            total_steps=self.total_steps,
            is_main=self.world.is_main,
            **self.run_to_resume(),
        )

    def close(self) -> None:
        """End the run: trackers are flushed and closed, reward workers and agents' threads ended."""
        self.rewards.close()
        self.pool.close()
        if self.run is not None:
            self.run.close()

    # ---- saving -----------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str) -> None:
        """`agent_i/` each: an ordinary Hugging Face folder with its tokenizer. The run stays open."""
        for model in self.trained_models():
            if model.engine is not None:
                engine = model.engine
                weights = engine.weights() if engine.lockstep or not self.world.is_main else None
                if engine.group.leader:
                    model.agent.save(f"{output_dir}/{model.folder}", weights)
        self.world.exchange(None)  # all are there when this returns

    def finish(self) -> None:
        self.open_run().note(f"finished at step {self.step}, env_step {self.env_step}")

    # ---- settings ---------------------------------------------------------------------------------------------------

    def resolve_args(
        self,
        args: MAGRPOConfig,
        agents: Sequence[Any] | None,
        num_agents: int | None,
        transition: Callable | None,
    ) -> MAGRPOConfig:
        """A copy of `args` with num_agents and num_turns settled; contradictions are refused."""
        default = type(args)().num_agents
        given = {"num_agents": num_agents, "len(agents)": len(agents) if agents is not None else None}
        given["args.num_agents"] = args.num_agents if args.num_agents != default else None
        said = {name: value for name, value in given.items() if value is not None}
        if len(set(said.values())) > 1:
            raise ValueError(
                "the number of agents is said twice and differs: "
                + ", ".join(f"{name}={value}" for name, value in said.items())
                + "; say it once"
            )
        turns = args.num_turns or (2 if transition is not None else 1)
        if turns > 1 and transition is None:
            raise ValueError(f"num_turns={turns} needs an external_transition that writes the prompts of later turns")
        return replace(args, num_agents=next(iter(said.values()), default), num_turns=turns)

    def build_team(self) -> Team:
        return Team(self.args.num_agents)

    def num_models(self) -> int:
        return self.args.num_agents

    def branches(self) -> int:
        """Joint actions of a node."""
        return self.shape.num_generations ** (self.num_models() if self.shape.joint_mode == "cross" else 1)

    def plan(self) -> str:
        """What would run: models, devices, bytes, tree size, samples and steps."""
        nodes = credit.tree_size(self.branches(), self.shape.num_turns, self.shape.greedy_baseline)
        placement = Placement(self.world, self.args.placement, self.model_counts())
        return plan_text(
            self.planned_models(placement),
            self.args,
            self.shape,
            nodes,
            self.branches(),
            len(self.rows),
            self.total_steps,
            self.world,
            self.zero,
        )

    def planned_models(self, placement: Placement) -> list[Planned]:
        """All models that a process may hold at the same time; a family with others adds them."""
        return plan_team(self.members, self.args, placement)

    def check_tree(self) -> None:
        shape, args = self.shape, self.args
        branches = self.branches()
        size = credit.tree_size(branches, shape.num_turns, shape.greedy_baseline)
        if size > args.max_tree_nodes:
            raise ValueError(
                f"a rollout tree of {shape.num_turns} turns with {branches} joint answers a node "
                f"(num_generations={args.num_generations}, joint_mode={args.joint_mode}) has {size} nodes a row, above "
                f"max_tree_nodes={args.max_tree_nodes}; lower num_generations or num_turns, use joint_mode aligned, or "
                "raise max_tree_nodes"
            )

    def sampling_with(self, overrides: dict[str, Any]) -> Sampling:
        unknown = sorted(set(overrides) - set(SAMPLING_OVERRIDES))
        if unknown:
            raise ValueError(
                f"train({unknown[0]}=...): only sampling settings can be given here ({', '.join(SAMPLING_OVERRIDES)})"
            )
        if overrides.get("max_new_tokens", 0) > self.args.max_new_tokens:
            raise ValueError(
                f"train(max_new_tokens={overrides['max_new_tokens']}): above args.max_new_tokens="
                f"{self.args.max_new_tokens}, which prompts were admitted for; raise the setting"
            )
        replace(self.args, **overrides)  # refuses values out of range
        return replace(self.sampling, **overrides)

    def planned_steps(self) -> int | None:
        """Optimizer steps of a full run if no tree ends early; none for a stream of unknown length."""
        args, rows = self.args, len(self.rows)
        if not rows:
            if args.max_steps is None and args.lr_schedule not in ("constant", "constant_with_warmup"):
                raise ValueError(
                    f"lr_schedule={args.lr_schedule!r} needs a known number of steps and the dataset has no length; "
                    "set max_steps, or use constant"
                )
            return args.max_steps
        tree = credit.tree_size(self.branches(), self.shape.num_turns, greedy_baseline=False)
        batch = args.train_batch_size or args.rollout_buffer_size
        at_once = args.rows_per_rollout or args.rollout_buffer_size
        steps = buffered = 0
        for start in range(0, rows, at_once):
            buffered += tree * min(at_once, rows - start)
            if buffered >= args.rollout_buffer_size or start + at_once >= rows:
                steps += math.ceil(buffered / batch) * args.epochs_per_rollout
                buffered = 0
        total = steps * args.num_train_epochs
        return total if args.max_steps is None else min(total, args.max_steps)

    def buffered_nodes(self) -> int:
        return sum(1 for _ in walk(self.buffer))

    # ---- published accessors ----------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Iterator[list[Any]]:
        """Rows of the first epoch in training order, in lists of one."""
        position = 0
        while pairs := self.rows.take(0, position, 1):
            yield [pairs[0][1]]
            position += 1

    def get_eval_dataloader(self) -> Iterator[list[Any]]:
        rows = [row for _, row in self.eval_rows.first(None)]
        size = self.args.eval_batch_size
        return (rows[start : start + size] for start in range(0, len(rows), size))


def build_rollouts(
    agents: Sequence[Agent],
    rewards: Rewards,
    formatters: Sequence[Callable],
    transition: Callable | None,
    team: Team,
    args: MAGRPOConfig,
    pool: AgentPool | None = None,
    placement: Placement | None = None,
) -> Rollouts:
    return Rollouts(
        agents,
        rewards,
        formatters,
        transition,
        team,
        chat_template=args.chat_template,
        prompt_limits=[prompt_limit(agent, args) for agent in agents],
        passthrough=args.external_prompt_passthrough,
        max_rows=args.generation_batch_rows,
        pool=pool,
        placement=placement,
    )


def prompt_limit(agent: Agent, args: MAGRPOConfig) -> int:
    """Tokens that a prompt of this agent may have, so that a whole answer still fits into its context."""
    room = agent.context_length - args.max_new_tokens
    if room < 1:
        raise ValueError(
            f"max_new_tokens={args.max_new_tokens}: {agent.name}'s context holds {agent.context_length} tokens, "
            "so no room is left for a prompt"
        )
    return room if args.max_prompt_length is None else min(room, args.max_prompt_length)
