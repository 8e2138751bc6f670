"""The actor-critic family for teams: IAC (a critic an agent) and MAAC (one critic of the joint history).

Rollout trees, policy loss and loop are those of the REINFORCE family (`reinforce.py`). New here: `fill_values` asks the
critics about every node of a buffer and turns their values into targets and baselines, `learn_critic` is one critic's
gradient, and `apply` steps the critics beside the agents.
"""

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from comlrl import credit, losses
from comlrl.agents import Agent
from comlrl.batches import MicroBatch, Sample, share
from comlrl.checkpoint import tensor_shapes
from comlrl.critics import (
    RunningStatistics,
    ValueItem,
    check_critics,
    frozen_outputs,
    head_outputs,
    history_text,
    item_losses,
    load_critics,
    policy_and_values,
    value_item,
    value_metrics,
)
from comlrl.engine import Engine
from comlrl.loading import Member, load_team
from comlrl.placement import Placement
from comlrl.planning import Planned
from comlrl.rollouts import Node, walk
from comlrl.signals import StopSignal
from comlrl.summaries import Metrics, RolloutSample, ValueMeter, mean_metrics, rollout_samples
from comlrl.trained import TrainedModel
from comlrl.trainers.actor_critic_config import ActorCriticConfig, IACConfig, MAACConfig
from comlrl.trainers.reinforce import MAGRPOTrainer
from comlrl.trainers.resume import source_of
from comlrl.value_head import CausalLMWithValueHead

__all__ = [
    "ActorCriticConfig",
    "ActorCriticTrainerBase",
    "IACConfig",
    "IACTrainer",
    "MAACConfig",
    "MAACTrainer",
    "RolloutSample",
]

Gradients = tuple[Metrics, list[float], list[bool], str]


class ActorCriticTrainerBase(MAGRPOTrainer):
    """What IAC and MAAC share.

    Args:
        critic_model: the critics' model, one name for all, or (for one critic) a loaded model.
        critics: instead of it, a list: a name, a language model or a CausalLMWithValueHead each.
        critic_tokenizer: one, or one a critic; none: its own, and for a loaded critic that of its (first) agent.
        metrics_callback: list of RolloutSample of one row -> numbers to log, in training and in evaluation.
        Others: see `TeamTrainer`.
    """

    args: ActorCriticConfig
    fixed_settings: tuple[str, ...] = ("critic_type", "value_normalization")

    def __init__(
        self,
        agent_model: Any = None,
        critic_model: Any = None,
        tokenizer: Any = None,
        reward_func: Callable | Sequence[Callable] | None = None,
        reward_processor: Callable[[float], float] | None = None,
        formatters: Callable | Sequence[Callable] | None = None,
        args: ActorCriticConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        model_config: dict[str, Any] | None = None,
        wandb_config: dict[str, Any] | None = None,
        metrics_callback: Callable[[list[RolloutSample]], Metrics] | None = None,
        external_transition: Callable | None = None,
        agents: Sequence[Any] | None = None,
        critics: Sequence[Any] | None = None,
        *,
        critic_tokenizer: Any = None,
        **others: Any,
    ):
        if isinstance(agent_model, PreTrainedModel) and agents is None:
            agent_model, agents = None, [agent_model]
        config = dict(model_config or {})
        self.critic_kwargs = config.pop("critic_model_kwargs", config.get("model_kwargs"))
        self.critic_width = config.pop("critic_value_head_hidden_dim", None)
        self.critic_sources, self.critic_tokenizer = (critic_model, critics), critic_tokenizer
        self.metrics_callback = metrics_callback
        self.critics: list[Agent] = []
        self.critic_members: list[Member] = []
        self.critic_heads: list[CausalLMWithValueHead | None] = []
        self.critic_shapes: list[dict[str, torch.Size]] = []
        self.critic_engines: dict[int, Engine] = {}
        self.value_items: list[list[list[ValueItem]]] = []  # [critic][node of the buffer]
        self.staged: tuple[list[list[list[ValueItem]]], list[RunningStatistics], Metrics] = ([], [], {})
        self.statistics: list[RunningStatistics] = []  # one a critic
        super().__init__(
            agent_model=agent_model,
            agents=agents,
            tokenizer=tokenizer,
            model_config=config,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            reward_func=reward_func,
            reward_processor=reward_processor,
            formatters=formatters,
            external_transition=external_transition,
            wandb_config=wandb_config,
            args=args,
            **others,
        )

    # ---- which critic values what -----------------------------------------------------------------------------------

    @abstractmethod
    def num_critics(self) -> int: ...

    @abstractmethod
    def readers(self, critic: int) -> list[int]:
        """The agents whose histories (and actions) a critic reads."""

    @abstractmethod
    def critic_of(self, agent: int) -> int: ...

    @abstractmethod
    def critic_name(self, critic: int) -> str:
        """Its folder in a checkpoint."""

    @abstractmethod
    def critic_place(self, critic: int) -> str:
        """Its folder in what save_model and export write."""

    @abstractmethod
    def critic_prefix(self, critic: int) -> str:
        """What its metrics begin with."""

    @property
    def separate(self) -> bool:
        """Whether critics are models of their own; else each is a head on its agent's model."""
        return True

    # ---- models -----------------------------------------------------------------------------------------------------

    def model_counts(self) -> dict[str, int]:
        return {**super().model_counts(), **({"critics": self.num_critics()} if self.separate else {})}

    def device_settings(self) -> dict[str, str | list[str] | None]:
        return {**super().device_settings(), "critic_devices": self.args.critic_devices}

    def check_other_models(self) -> None:
        model, critics = self.critic_sources
        if not self.separate:
            if model is not None or critics is not None:
                raise ValueError("use_separate_critic is false, so leave critic_model and critics out")
            return
        homes = [self.readers(critic)[0] for critic in range(self.num_critics())]
        self.critic_members, self.critic_heads = check_critics(
            model,
            critics,
            [self.critic_name(critic) for critic in range(self.num_critics())],
            self.critic_tokenizer,
            [self.members[home] for home in homes],
            self.critic_kwargs,
            self.args.critic_devices,
        )

    def load_agents(self) -> list[Agent]:
        agents = load_team(self.members)
        if not self.separate:
            assert isinstance(self.args, IACConfig)
            for agent in agents:
                self.attach_head(agent, self.args.value_head_hidden_dim)
        return agents

    def attach_head(self, agent: Agent, width: int | None) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.args.seed)  # of a hidden layer; the output layer starts at 0
            agent.attach_value_head(width)

    def load_other_models(self) -> None:
        self.statistics = [RunningStatistics() for _ in range(self.num_critics())]
        if not self.separate:
            return
        args, groups = self.args, self.placement.of("critics")
        self.critics = load_critics(self.critic_members, self.critic_heads)
        for critic in self.critics:
            if args.gradient_checkpointing:
                critic.model.gradient_checkpointing_enable()
            if critic.value_model is None:
                self.attach_head(critic, args.critic_value_head_hidden_dim or self.critic_width)
        self.critic_shapes = [tensor_shapes(critic.trained) for critic in self.critics]
        settings = replace(self.agent_settings(), learning_rate=args.critic_rate)
        for index, (critic, group) in enumerate(zip(self.critics, groups)):
            if group.member:
                self.critic_engines[index] = self.make_engine(critic, settings, group)
                if args.offload_idle:
                    self.critic_engines[index].leave_device()
            else:
                critic.unload()

    def valuers(self) -> tuple[Sequence[Agent], dict[int, Engine]]:
        """The models that value, and the engines that run them here, by number of the critic."""
        return (self.critics, self.critic_engines) if self.separate else (self.agents, self.engines)

    def trained_models(self) -> list[TrainedModel]:
        critics = [
            TrainedModel(critic, source_of(member), shapes, self.critic_engines.get(i), self.critic_place(i))
            for i, (critic, member, shapes) in enumerate(zip(self.critics, self.critic_members, self.critic_shapes))
        ]
        return super().trained_models() + critics

    def plan(self) -> str:
        return super().plan() + ("" if self.separate else "\ncritics\n  a value head on each agent's own model")

    def planned_models(self, placement: Placement) -> list[Planned]:
        critics = placement.of("critics") if self.separate else []
        return super().planned_models(placement) + [Planned(m, g) for m, g in zip(self.critic_members, critics)]

    # ---- values, targets and advantages of a buffer -----------------------------------------------------------------

    def prepare(self, stop: StopSignal) -> None:
        super().prepare(stop)
        items, self.statistics, metrics = self.staged
        self.staged = ([], [], {})
        if self.chunks:
            self.value_items = items
        self.pending |= metrics

    def fill_values(self, nodes: list[Node], samples: list[list[list[Sample]]]) -> None:
        """Targets for the critics, and for each sample its lambda-return and its baseline: set when this is done."""
        items = [[self.items(critic, node) for node in nodes] for critic in range(self.num_critics())]
        self.ask_critics(items)
        statistics, metrics = [], Metrics()
        for critic, groups in enumerate(items):
            before = self.statistics[critic]
            values = [[before.restore(item.output) for item in group] for group in groups]
            returns = self.node_returns(critic, nodes, values)
            known = [value for each in returns for value in each if value is not None]
            scale = before.add(known) if self.args.value_normalization else before
            statistics.append(scale)
            wanted = [self.item_returns(critic, node, each) for node, each in zip(nodes, returns)]
            for n, node in enumerate(nodes):
                for item, targets in zip(groups[n], wanted[n], strict=True):
                    item.targets = [scale.normalize(value) for value in targets]
                for agent in self.readers(critic):
                    self.set_baselines(agent, node, samples[agent][n], values[n], returns[n])
                    if not self.separate:
                        self.set_head_targets(samples[agent][n], groups[n], scale)
            metrics |= value_metrics(self.critic_prefix(critic), groups, values, wanted)
        self.staged = (items, statistics, metrics)

    def items(self, critic: int, node: Node) -> list[ValueItem]:
        """What a critic reads at a node: the history, or with critic_type q one text an action."""
        name = f"{node.row_id}:{'.'.join(map(str, node.path))}"
        readers, valuer = self.readers(critic), self.valuers()[0][critic]
        if self.args.critic_type == "v":
            if not self.separate:
                return [ValueItem(node.prompt_ids[critic], node.turn, name)]
            return [value_item(history_text(node, readers), valuer, node.turn, name)]
        found = []
        for number, action in enumerate(self.actions(critic, node)):
            said = [node.completions[agent][k] for agent, k in zip(readers, action)]
            if self.separate:
                text = history_text(node, readers, [completion.text for completion in said])
                found.append(value_item(text, valuer, node.turn, f"{name}:{number}"))
            else:
                ids = [*node.prompt_ids[critic], *said[0].token_ids]
                found.append(ValueItem(ids, node.turn, f"{name}:{number}"))
        return found

    def actions(self, critic: int, node: Node) -> list[tuple[int, ...]]:
        """What was done at a node in the eyes of a critic: joint actions, or for one agent its answers."""
        readers = self.readers(critic)
        if len(readers) == 1:
            return [(k,) for k in range(len(node.completions[readers[0]]))]
        return node.joint_actions

    def action_returns(self, critic: int, node: Node, returns: list[float | None]) -> list[float | None]:
        """Of each of these actions: for one agent's answer the mean over the joint actions with it."""
        readers = self.readers(critic)
        if len(readers) > 1:
            return returns
        return credit.completion_credits(node.joint_actions, returns, readers[0], len(node.completions[readers[0]]))

    def item_returns(self, critic: int, node: Node, returns: list[float | None]) -> list[list[float]]:
        """The lambda-returns that each of a node's items is to predict; none for what was not rewarded."""
        if self.args.critic_type == "v":
            return [[value for value in returns if value is not None]]
        return [[] if value is None else [value] for value in self.action_returns(critic, node, returns)]

    def state_value(self, critic: int, node: Node, values: list[float]) -> float | None:
        """What a parent bootstraps from: V, or the mean Q of the rewarded actions that were sampled."""
        if self.args.critic_type == "v":
            return values[0]
        rewards = self.action_returns(critic, node, node.rewards)
        known = [value for value, reward in zip(values, rewards, strict=True) if reward is not None]
        return credit.mean(known) if known else None

    def node_returns(self, critic: int, nodes: list[Node], values: list[list[float]]) -> list[list[float | None]]:
        """Lambda-returns of every node's joint actions; `nodes` level by level, so children come after parents."""
        place = {id(node): n for n, node in enumerate(nodes)}
        returns: list[list[float | None]] = [[] for _ in nodes]
        for n in reversed(range(len(nodes))):
            node = nodes[n]
            children = [None if c is None else place[id(c)] for c in node.children or [None] * len(node.rewards)]
            returns[n] = credit.lambda_returns(
                node.rewards,
                [None if c is None else self.state_value(critic, nodes[c], values[c]) for c in children],
                [None if c is None else returns[c] for c in children],
                self.args.discount,
                self.args.gae_lambda,
            )
        return returns

    def set_baselines(
        self, agent: int, node: Node, group: list[Sample], values: list[float], returns: list[float | None]
    ) -> None:
        """`group`: the agent's samples at the node, those without a reward left out."""
        critic, count = self.critic_of(agent), len(node.completions[agent])
        credits = credit.completion_credits(node.joint_actions, returns, agent, count)
        baselines: list[float | None] = [values[0]] * count if values else []
        if self.args.critic_type == "q":
            actions, rewarded = self.actions(critic, node), self.action_returns(critic, node, node.rewards)
            known = [value if reward is not None else None for value, reward in zip(values, rewarded, strict=True)]
            baselines = credit.sibling_baselines(actions, known, self.readers(critic).index(agent), count)
        pairs = [(value, base) for value, base in zip(credits, baselines, strict=True) if value is not None]
        for sample, (value, base) in zip(group, pairs, strict=True):
            sample.credit = value
            sample.value = value if base is None else base  # nothing to compare with: no advantage

    def set_head_targets(self, group: list[Sample], items: list[ValueItem], scale: RunningStatistics) -> None:
        """For a head on the agent's model, whose value loss is computed in the policy's own forward."""
        for sample in group:
            assert sample.credit is not None
            item = items[sample.number if self.args.critic_type == "q" else 0]
            sample.value_output, sample.value_target = item.output, scale.normalize(sample.credit)

    def ask_critics(self, items: list[list[list[ValueItem]]]) -> None:
        """Set every item's output: [critic][node][item]."""
        flat = [[item for group in groups for item in group] for groups in items]
        valuers, engines = self.valuers()

        def of_all(budget: int) -> dict[tuple[int, int], float]:
            found: dict[tuple[int, int], float] = {}
            for critic, engine in engines.items():
                outputs = frozen_outputs(flat[critic], valuers[critic], engine, budget)
                found |= {(critic, place): output for place, output in outputs.items()}
            return found

        for (critic, place), output in self.world.union(lambda: self.within_memory(of_all, items)).items():
            if not math.isfinite(output):
                raise FloatingPointError(f"{self.critic_name(critic)}: value {output} of {flat[critic][place].name}")
            flat[critic][place].output = output

    def advantages(self, node: Node, agent: int, group: list[Sample]) -> None:
        """Lambda-return minus baseline; the KL in the return is subtracted as in the REINFORCE family."""
        for sample in group:
            assert sample.credit is not None
            advantage = sample.credit - sample.value
            if self.args.reference_kl_enabled and self.args.reference_kl_in == "return":
                penalty = (sample.old_logprobs - sample.reference_logprobs).sum()  # type: ignore[operator]
                advantage -= self.args.reference_kl_coef * penalty.item()
            sample.advantage = advantage

    # ---- learning from a minibatch ----------------------------------------------------------------------------------

    def gradients(self, groups: list[list[list[Sample]]], scale: float) -> Gradients:
        """The agents' gradients, then the critics': norms and `useful` have the critics' after the agents'."""
        for agent_groups in groups:
            self.weigh(agent_groups)
        metrics, norms, useful, problem = super().gradients(groups, scale)
        if not self.separate:
            return metrics, norms, useful, problem
        started = time.perf_counter()
        items = [[each[i] for i in self.chunks[0]] for each in self.value_items]

        def work(budget: int) -> dict[tuple[int, int], tuple[ValueMeter, str]]:
            for engine in self.critic_engines.values():
                engine.clear()  # of an attempt that ran out of memory
            learned = {}
            for critic, engine in self.critic_engines.items():
                with engine.awake():
                    learned[critic, self.world.rank] = self.learn_critic(critic, items[critic], budget)
            return learned

        parts = self.world.union(lambda: self.within_memory(work, items))
        numbers = self.world.union(lambda: {c: self.reduced(engine) for c, engine in self.critic_engines.items()})
        for critic in range(self.num_critics()):
            meter, bad = ValueMeter(self.critic_prefix(critic)), ""
            for (owner, _), (part, said) in parts.items():
                if owner == critic:
                    meter.merge(part)
                    bad = bad or said
            norm, rate = numbers[critic]
            if not bad and not math.isfinite(norm):
                bad = f"gradient norm {norm}"
            if bad and not problem:
                problem = f"step {self.step + 1}, {self.critic_name(critic)}: {bad}; weights unchanged"
            metrics |= meter.metrics()
            metrics[f"{meter.prefix}/critic_grad_norm"] = norm
            metrics[f"{meter.prefix}/critic_learning_rate"] = rate
            norms.append(norm)
            useful.append(any(item.targets for group in items[critic] for item in group))
        self.seconds["time/learn"] += time.perf_counter() - started
        return metrics, norms, useful, problem

    def weigh(self, groups: list[list[Sample]]) -> None:
        """What depends on the minibatch: normalised advantages, and what a sample counts in a head's value loss."""
        for sample in (s for g in groups for s in g if s.raw_advantage is None):  # not normalised by an earlier epoch
            sample.raw_advantage = sample.advantage
        trained = [[sample for sample in group if sample.trained] for group in groups]
        flat = [sample for group in trained for sample in group]
        raw = torch.tensor([sample.raw_advantage for sample in flat], dtype=torch.float64)
        for sample, value in zip(flat, (credit.z_scores(raw) if self.args.normalize else raw).tolist()):
            sample.advantage = value
        for group in trained:
            for sample in group:
                sample.value_weight = self.args.value_loss_coef / (len(group) * sum(map(bool, trained)))

    def learn_critic(self, critic: int, groups: list[list[ValueItem]], budget: int) -> tuple[ValueMeter, str]:
        """Accumulate one critic's gradient over this process's share: the mean over nodes, one term a node."""
        valuer, engine = self.critics[critic], self.critic_engines[critic]
        meter = ValueMeter(self.critic_prefix(critic))
        learned = [[item for item in group if item.targets] for group in groups]
        nodes = sum(map(bool, learned))
        weights = {id(i): self.args.value_loss_coef / (nodes * len(group)) for group in learned for i in group}
        flat = [item for group in learned for item in group]
        parts = share(flat, engine.group, budget, engine.lockstep)
        problem = ""
        for number, each in enumerate(parts):
            part, counts = each.items, each.counts
            outputs = engine.run(head_outputs, valuer, part, valuer.device)
            errors = item_losses(outputs, part, self.args.value_clip_range)
            factors = [weights[id(item)] if counts else 0.0 for item in part]
            loss = (errors * torch.tensor(factors, device=errors.device)).sum()
            if not torch.isfinite(loss):
                problem = problem or f"value loss {loss.item()} over {', '.join(item.name for item in part[:8])}"
                if not engine.lockstep:
                    return meter, problem
            engine.backward(loss, last=number == len(parts) - 1)
            if counts:
                for item, error in zip(part, errors.detach()):
                    meter.add(item.turn, "value_loss", error)
        return meter, problem

    def apply(self, metrics: Metrics, norms: list[float], useful: list[bool], problem: str) -> None:
        """The critics' step, then the agents', who stand still while the critics warm up."""
        count = len(self.agents)
        for critic, engine in self.critic_engines.items():
            if problem or not useful[count + critic]:
                engine.skip()
            else:
                with engine.awake():
                    engine.step(norms[count + critic])
        warmup = self.step < self.args.critic_warmup_steps
        if self.args.critic_warmup_steps:
            metrics["critic_warmup"] = float(warmup)
        super().apply(metrics, norms[:count], [each and not warmup for each in useful[:count]], problem)

    # ---- a value head on the agent's own model ----------------------------------------------------------------------

    def forward(self, batch: MicroBatch, engine: Engine, agent: Agent, entropy: str) -> tuple[Tensor, Tensor]:
        if self.separate:
            return super().forward(batch, engine, agent, entropy)

        def both(model: CausalLMWithValueHead) -> tuple[Tensor, Tensor, Tensor]:
            with agent.autocast():
                return policy_and_values(
                    model, batch, agent.finish, self.temperature, entropy, self.args.critic_type == "q"
                )

        logprobs, entropies, batch.values = engine.run(both)
        return logprobs, entropies

    def sample_loss(self, batch: MicroBatch, counts: bool) -> Tensor | float:
        if batch.values is None:
            return 0.0
        numbers = [[s.value_target, s.value_output, s.value_weight if counts else 0.0] for s in batch.samples]
        target, old, weight = torch.tensor(numbers, device=batch.values.device).unbind(1)
        errors = losses.value_loss(batch.values, target, old, self.args.value_clip_range)
        batch.logged["value_loss"] = errors.detach()
        return (errors * weight).sum()

    def active(self, trained: list[Sample]) -> list[Sample]:
        """A head learns also from samples of advantage 0."""
        return trained if not self.separate and self.args.value_loss_coef else super().active(trained)

    # ---- records ----------------------------------------------------------------------------------------------------

    def advantage_metrics(self, index: int, groups: list[list[Sample]]) -> Metrics:
        """Mean and deviation before normalisation: after it they say nothing."""
        metrics = super().advantage_metrics(index, groups)
        for turn in sorted({group[0].turn for group in groups if group}):
            raw = torch.tensor([s.raw_advantage for g in groups for s in g if s.turn == turn], dtype=torch.float64)
            prefix = f"agent_{index}/turn_{turn + 1}"
            metrics[f"{prefix}/advantage_mean"] = raw.mean().item()
            metrics[f"{prefix}/advantage_std"] = raw.std(correction=0).item()
        return metrics

    def record_completions(self, roots: list[Node]) -> None:
        super().record_completions(roots)
        if self.metrics_callback is None:
            return
        nodes = list(walk(roots))
        groups = {id(node): [samples[n] for samples in self.prepared] for n, node in enumerate(nodes)}
        self.pending |= mean_metrics([self.metrics_callback(rollout_samples(root, groups)) for root in roots])

    def trajectory_metrics(self, roots: list[Node]) -> Metrics:
        callback = self.metrics_callback
        return {} if callback is None else mean_metrics([callback(rollout_samples(root)) for root in roots])

    def callbacks(self) -> dict[str, Any]:
        return {**super().callbacks(), "metrics_callback": self.metrics_callback}

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def forget_buffer(self) -> None:
        super().forget_buffer()
        self.value_items = []

    def counters(self) -> dict[str, Any]:
        return {
            **super().counters(),
            "value_items": [[[asdict(i) for i in group] for group in groups] for groups in self.value_items],
            "value_statistics": [asdict(statistics) for statistics in self.statistics],
        }

    def set_counters(self, values: Mapping[str, Any]) -> None:
        super().set_counters(values)
        self.value_items = [[[ValueItem(**i) for i in group] for group in groups] for groups in values["value_items"]]
        self.statistics = [RunningStatistics(**statistics) for statistics in values["value_statistics"]]


class IACTrainer(ActorCriticTrainerBase):
    """Independent actor-critic: each agent has a critic that reads the agent's own history."""

    config_class = IACConfig
    fixed_settings = (*ActorCriticTrainerBase.fixed_settings, "use_separate_critic")

    def num_critics(self) -> int:
        return self.args.num_agents

    def readers(self, critic: int) -> list[int]:
        return [critic]

    def critic_of(self, agent: int) -> int:
        return agent

    def critic_name(self, critic: int) -> str:
        return f"critic_{critic}"

    def critic_place(self, critic: int) -> str:
        return f"agent_{critic}/critic"

    def critic_prefix(self, critic: int) -> str:
        return f"agent_{critic}"

    @property
    def separate(self) -> bool:
        assert isinstance(self.args, IACConfig)
        return self.args.use_separate_critic


class MAACTrainer(ActorCriticTrainerBase):
    """Multi-agent actor-critic: one critic reads what all agents have read and said."""

    config_class = MAACConfig

    def num_critics(self) -> int:
        return 1

    def readers(self, critic: int) -> list[int]:
        return list(range(self.args.num_agents))

    def critic_of(self, agent: int) -> int:
        return 0

    def critic_name(self, critic: int) -> str:
        return "critic"

    def critic_place(self, critic: int) -> str:
        return "critic"

    def critic_prefix(self, critic: int) -> str:
        return "critic"
