"""The REINFORCE family for teams: MAREINFORCE, MAGRPO, MARLOO, MAReMax, and MAGRPO with one coordinator.

The whole algorithm, top to bottom: `loop` rolls out trees (`collect`) until the buffer is full, makes it ready
(`prepare`) and learns from it in minibatches (`take_step`); `learn` is one agent's gradient. A fork overrides
`advantages` or `loss`, or passes another task or reward.
"""

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from comlrl import credit, losses
from comlrl.agents import Agent
from comlrl.batches import MicroBatch, Sample, Tokens, collate, frozen_logprobs, share
from comlrl.centralized import CentralizedComparatorAdapter, Coordinator, TaggedCentralizedComparatorAdapter
from comlrl.engine import Engine
from comlrl.generation import Sampling, sample_seed
from comlrl.rollouts import Node, Team, walk
from comlrl.signals import Abandoned, StopSignal
from comlrl.summaries import Metrics, TokenMeter
from comlrl.trainers.base import TeamTrainer
from comlrl.trainers.reinforce_config import (
    CentralizedMAGRPOConfig,
    MAGRPOConfig,
    MAREINFORCEConfig,
    MAReMaxConfig,
    MARLOOConfig,
)
from comlrl.trainers.resume import take_moment

__all__ = [
    "CentralizedMAGRPOConfig",
    "CentralizedMAGRPOTrainer",
    "MAGRPOConfig",
    "MAGRPOTrainer",
    "MAREINFORCEConfig",
    "MAREINFORCETrainer",
    "MARLOOConfig",
    "MARLOOTrainer",
    "MAReMaxConfig",
    "MAReMaxTrainer",
]

Result = TypeVar("Result")


class MAGRPOTrainer(TeamTrainer):
    """Multi-agent GRPO: each agent's advantage is its return minus the group's mean, over the group's deviation.

    Arguments: see `TeamTrainer`.
    """

    # ---- the loop ---------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | None = None,
        checkpoint_dir: str | None = None,
        checkpoint_interval: int | None = None,
        checkpoint_total_limit: int | None = None,
        **overrides: Any,
    ) -> None:
        """Roll out, fill the buffer, learn; evaluate before the first and after the last step.

        Args:
            resume_from_checkpoint: a checkpoint folder to go on from; the number of epochs is absolute.
            checkpoint_dir: where to save (none: nowhere), at the times that the settings `checkpoint_*` say.
            checkpoint_interval, checkpoint_total_limit: in place of the settings of these names.
            overrides: sampling settings while training: max_new_tokens, temperature, top_p, top_k.
        """
        sampling = self.sampling_with(overrides)
        self.temperature = sampling.temperature
        self.start(resume_from_checkpoint, checkpoint_dir, checkpoint_interval, checkpoint_total_limit)
        with StopSignal(alone=self.world.alone) as stop, self.saved_at_the_end(stop):
            self.world.stop = stop
            self.logged_at = time.perf_counter()
            self.loop(sampling, stop)
        self.finish()

    def loop(self, sampling: Sampling, stop: StopSignal) -> None:
        """One piece of work at a time; between two of them the run can be saved, stopped and resumed."""
        while True:
            self.moment = take_moment(self)
            self.world.exchange(None)  # a signal that reached one process is now known to all
            if not self.evaluation_due:
                self.save_if_due()
            if stop.requested is not None:
                raise Abandoned
            if self.evaluation_due:
                self.evaluate_now(stop)
            elif self.finished:
                return
            else:
                self.next_piece(sampling, stop)

    def next_piece(self, sampling: Sampling, stop: StopSignal) -> None:
        """The next piece of work; a family with other phases overrides it."""
        if self.chunks:
            self.take_step(stop)
        elif self.epoch_ended or self.buffered_nodes() >= self.args.rollout_buffer_size:
            self.prepare(stop)
        else:
            self.collect(sampling, stop)
        if self.epoch_ended and not self.buffer:
            self.epoch, self.position, self.epoch_ended = self.epoch + 1, 0, False
            self.plan_evaluation()

    @property
    def finished(self) -> bool:
        limit = self.args.max_steps
        return self.epoch >= self.args.num_train_epochs or (limit is not None and self.step >= limit)

    def evaluate_now(self, stop: StopSignal) -> None:
        with self.revocable(stop):
            evaluation = self.evaluate_team()
        self.record_evaluation(evaluation)

    def collect(self, sampling: Sampling, stop: StopSignal) -> None:
        """One rollout of some rows into the buffer, whole trees."""
        size = self.args.rows_per_rollout or self.args.rollout_buffer_size
        with self.revocable(stop):
            rows = self.rows.take(self.epoch, self.position, size)
            if rows:
                roots, stats = self.rollouts.expand(rows, self.shape, sampling, (self.args.seed, "train", self.rollout))
        self.position += len(rows)
        self.epoch_ended = self.rows.exhausted(self.position, len(rows), size)
        if rows:
            self.buffer += roots
            self.record_rollout(roots, stats)

    def prepare(self, stop: StopSignal) -> None:
        """Make the whole buffer ready for learning: minibatches of its nodes, one optimizer step each."""
        args, nodes = self.args, list(walk(self.buffer))
        size = args.train_batch_size or args.rollout_buffer_size
        chunks = [c for epoch in range(args.epochs_per_rollout) for c in self.minibatches(len(nodes), size, epoch)]
        with self.revocable(stop):
            started = time.perf_counter()
            agents = range(len(self.agents))
            samples = [[self.samples(node, agent) for node in nodes] for agent in agents]
            self.fill_logprobs(samples, several_steps=len(chunks) > 1)
            self.fill_values(nodes, samples)
            for agent in agents:
                for node, group in zip(nodes, samples[agent], strict=True):
                    self.advantages(node, agent, group)
        self.seconds["time/learn"] += time.perf_counter() - started
        self.prepared, self.chunks = samples, chunks
        self.record_completions(self.buffer)
        if not chunks:
            self.forget_buffer()

    def take_step(self, stop: StopSignal) -> None:
        """Learn from the next minibatch; after the last one the buffer is empty."""
        args, chunk = self.args, self.chunks[0]
        nodes = len(self.prepared[0])
        # Unbiased for the sum over the nodes of a tree, averaged over trees, whatever the minibatch holds.
        tree = args.node_weighting == "tree"
        scale = nodes / (len(chunk) * len(self.buffer)) if tree else 1 / len(chunk)
        groups = [[samples[i] for i in chunk] for samples in self.prepared]
        with self.revocable(stop):
            gradients = self.gradients(groups, scale)
            if gradients[3] and args.nonfinite == "raise":
                raise FloatingPointError(f"{gradients[3]} (nonfinite: skip goes on without such steps)")
        self.chunks = self.chunks[1:]
        if not self.chunks:
            self.forget_buffer()
        self.apply(*gradients)
        self.plan_evaluation()

    def forget_buffer(self) -> None:
        self.buffer, self.prepared = [], []

    def within_memory(self, work: Callable[[int], Result], samples: Sequence[Sequence[Sequence[Tokens]]]) -> Result:
        """work(tokens of a micro-batch), with fewer tokens if memory runs out. samples: [agent][node]."""
        sizes = [[len(s.prompt_ids) + len(s.token_ids) for group in groups for s in group] for groups in samples]
        longest = max((size for each in sizes for size in each), default=1)
        return self.token_limit.run(work, most=max(map(sum, sizes)), least=longest)

    def gradients(self, groups: list[list[list[Sample]]], scale: float) -> tuple[Metrics, list[float], list[bool], str]:
        """Every agent's gradient on one minibatch: groups[agent][node] are samples. No weight moves.

        Returns metrics, gradient norms, which agents have something to learn, and what is not finite ("" if all is).
        """
        started = time.perf_counter()
        agents = range(len(self.agents))

        def learn(index: int, budget: int) -> tuple[TokenMeter, str]:
            if index not in self.engines:
                return TokenMeter(index), ""
            with self.engines[index].awake():
                return self.learn(index, groups[index], scale, budget)

        def work(budget: int) -> dict[tuple[int, int], tuple[TokenMeter, str]]:
            for engine in self.engines.values():
                engine.clear()  # of an attempt that ran out of memory
            learned = self.pool.map(lambda index: learn(index, budget), len(agents))
            return {(index, self.world.rank): learned[index] for index in self.engines}

        parts = self.world.union(lambda: self.within_memory(work, groups))
        useful = [any(s.trained for group in groups[i] for s in group) for i in agents]
        reducing = time.perf_counter()
        numbers = self.world.union(lambda: {i: self.reduced(engine) for i, engine in self.engines.items()})
        self.not_learning("time/sync", reducing)
        metrics: Metrics = {}
        problem = ""
        for index, agent in enumerate(self.agents):
            meter = TokenMeter(index)
            bad = ""
            for (owner, _), (part, said) in parts.items():
                if owner == index:
                    meter.merge(part)
                    bad = bad or said
            norm, rate = numbers[index]
            if not bad and not math.isfinite(norm):
                bad = f"gradient norm {norm} over samples {self.names(groups[index])}"
            if bad and not problem:
                problem = f"step {self.step + 1}, {agent.name}: {bad}; weights unchanged"
            metrics |= meter.metrics() | self.advantage_metrics(index, groups[index])
            metrics |= {f"agent_{index}/grad_norm": norm, f"agent_{index}/learning_rate": rate}
        self.seconds["time/learn"] += time.perf_counter() - started
        return metrics, [numbers[i][0] for i in agents], useful, problem

    def not_learning(self, name: str, started: float) -> None:
        """Count the seconds since `started` there, and not as learning, whose clock is running."""
        spent = time.perf_counter() - started
        self.seconds[name] += spent
        self.seconds["time/learn"] -= spent

    @staticmethod
    def reduced(engine: Engine) -> tuple[float, float]:
        """Gradient norm, once the gradients of all processes are in it, and learning rate."""
        with engine.awake():
            engine.reduce()
            return engine.grad_norm(), engine.learning_rate

    def apply(self, metrics: Metrics, norms: list[float], useful: list[bool], problem: str) -> None:
        """One optimizer step of every agent, after all gradients are known to be finite."""
        started = time.perf_counter()
        for index, engine in self.engines.items():
            if problem or not useful[index]:
                engine.skip()
            else:
                with engine.awake():
                    engine.step(norms[index])
                    refreshing = time.perf_counter()
                    engine.refresh(self.agents[index])
                    self.not_learning("time/sync", refreshing)
        self.step += 1
        metrics["skipped_step"] = float(bool(problem) or not any(useful))
        self.seconds["time/learn"] += time.perf_counter() - started
        if problem:
            self.note(problem)
        self.log_step(metrics)

    # ---- one agent's gradient ---------------------------------------------------------------------------------------

    def samples(self, node: Node, agent: int) -> list[Sample]:
        """The node's completions of one agent that have a credit, as training examples."""
        completions = node.completions[agent]
        credits = credit.completion_credits(node.joint_actions, node.returns, agent, len(completions))
        return [
            Sample(
                prompt_ids=node.prompt_ids[agent],
                token_ids=completion.token_ids,
                turn=node.turn,
                name=f"{node.row_id}:{'.'.join(map(str, node.path))}:{k}",
                credit=value,
                weight=node.weight,
                trained=not (self.args.mask_truncated and completion.truncated),
                truncated=completion.truncated,
                sampler_logprobs=torch.tensor(completion.logprobs),
                number=k,
            )
            for k, (completion, value) in enumerate(zip(completions, credits))
            if value is not None
        ]

    def fill_logprobs(self, samples: list[list[list[Sample]]], several_steps: bool) -> None:
        """Old and reference log-probs of samples[agent][node], where something needs them before the first step."""
        args = self.args
        flat = [[sample for group in groups for sample in group] for groups in samples]
        in_return = args.reference_kl_enabled and args.reference_kl_in == "return"
        needs_old = several_steps or in_return or args.sampler_ratio_cap is not None

        def of_agent(index: int, budget: int) -> dict[tuple[str, int, int], Tensor]:
            agent = self.agents[index]
            found: dict[tuple[str, int, int], Tensor] = {}
            if needs_old and index in self.engines:
                old = frozen_logprobs(flat[index], agent, self.engines[index], self.temperature, budget)
                found |= {("old_logprobs", index, place): values for place, values in old.items()}
            if index in self.references:
                frozen = frozen_logprobs(flat[index], agent, self.references[index], self.temperature, budget)
                found |= {("reference_logprobs", index, place): values for place, values in frozen.items()}
            return found

        def of_all(budget: int) -> dict[tuple[str, int, int], Tensor]:
            parts = self.pool.map(lambda index: of_agent(index, budget), len(self.agents))
            return {key: values for part in parts for key, values in part.items()}

        if needs_old or args.reference_kl_enabled:
            started = time.perf_counter()
            results = self.world.union(lambda: self.within_memory(of_all, samples))
            for (name, index, place), values in results.items():
                setattr(flat[index][place], name, values)
            self.not_learning("time/reference", started)

    def fill_values(self, nodes: list[Node], samples: list[list[list[Sample]]]) -> None:
        """What a critic says, for families that have one; samples[agent][node]."""

    def advantages(self, node: Node, agent: int, group: list[Sample]) -> None:
        """Set each sample's advantage from the credits of its group: one agent's samples at one node."""
        if not group:
            return
        credits = torch.tensor([sample.credit for sample in group], dtype=torch.float64)
        if self.args.reference_kl_enabled and self.args.reference_kl_in == "return":
            # log pi - log reference: as a return, its policy gradient is the gradient of the KL. That of k3 is
            # the gradient of KL(pi || reference) minus that of KL(reference || pi): nearly nothing.
            penalties = [(s.old_logprobs - s.reference_logprobs).sum() for s in group]  # type: ignore[operator]
            credits = credits - self.args.reference_kl_coef * torch.stack(penalties)
        greedy_return = None
        if node.baseline is not None:
            # A greedy answer without reward is no baseline: the samples then stand against their own mean.
            greedy_return = node.baseline.returns[0] if node.baseline.returns[0] is not None else float(credits.mean())
        values = credit.advantages(credits, self.args.advantage_mode, self.args.normalize, greedy_return)
        for sample, value in zip(group, values.tolist(), strict=True):
            sample.advantage = value

    def loss(
        self, batch: MicroBatch, logprobs: Tensor, entropies: Tensor, old: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of every token, [N, C], and tensors of that shape to log."""
        args = self.args
        advantages = torch.tensor([s.advantage for s in batch.samples], device=logprobs.device)
        token_loss, clipped = losses.policy_loss(logprobs, old, advantages, args.clip_range)
        logged = {"clip_fraction": clipped, "entropy": entropies.detach()}
        if args.sampler_ratio_cap is not None:
            sampler = batch.pad([s.sampler_logprobs for s in batch.samples])
            token_loss = token_loss * losses.sampler_correction(old, sampler, args.sampler_ratio_cap)
        if args.entropy_coef:
            token_loss = token_loss - args.entropy_coef * entropies
        if args.reference_kl_enabled:
            reference = batch.pad([s.reference_logprobs for s in batch.samples])  # type: ignore[misc]
            logged["reference_kl"] = losses.k3(logprobs, reference).detach()
            if args.reference_kl_in == "loss":
                token_loss = token_loss + args.reference_kl_coef * losses.kl_loss(logprobs, old, reference)
        return token_loss, logged

    def learn(self, index: int, groups: list[list[Sample]], scale: float, budget: int) -> tuple[TokenMeter, str]:
        """Accumulate one agent's gradient over this process's share of a minibatch.

        Returns what is to be logged, and what was not finite, if any.
        """
        args, agent, engine = self.args, self.agents[index], self.engines[index]
        meter = TokenMeter(index)
        started, read = time.perf_counter(), 0
        trained = [sample for group in groups for sample in group if sample.trained]
        weights = {id(s): scale * s.weight / len(group) for group in groups for s in group}
        tokens = sum(len(sample.token_ids) for sample in trained)
        active = self.active(trained)
        parts = share(active, engine.group, budget, engine.lockstep)
        problem = ""
        for number, each in enumerate(parts):
            part, counts = each.items, each.counts
            batch = collate(part, agent, most_tokens=each.most_tokens)
            entropy = "gradient" if args.entropy_coef else "value"
            logprobs, entropies = self.forward(batch, engine, agent, entropy)
            if part[0].old_logprobs is None:
                old = logprobs.detach()
            else:
                old = batch.pad([s.old_logprobs for s in part])  # type: ignore[misc]
            token_loss, logged = self.loss(batch, logprobs, entropies, old)
            factors = losses.aggregation_weights(
                torch.tensor([weights[id(s)] if counts else 0.0 for s in part], device=logprobs.device),
                batch.completion_mask,
                args.loss_aggregation,
                max_new_tokens=args.max_new_tokens,
                samples=sum(map(len, groups)),
                tokens=tokens,
            )
            loss = (token_loss * factors).sum() + self.sample_loss(batch, counts)
            if not torch.isfinite(loss):
                problem = problem or f"loss {loss.item()} over samples {self.names([part])}"
                if not engine.lockstep:
                    return meter, problem
            engine.backward(loss, last=number == len(parts) - 1)
            read += batch.tokens
            if counts:
                sampler = batch.pad([s.sampler_logprobs for s in part])
                logged["sampler_gap"] = (old - sampler).abs() * batch.completion_mask
                meter.add(batch, logged, token_loss.detach() * factors)
        if read:
            agent.worked("learn", started, read)
        return meter, problem

    def forward(self, batch: MicroBatch, engine: Engine, agent: Agent, entropy: str) -> tuple[Tensor, Tensor]:
        return batch.logprobs(engine.run, agent, self.temperature, entropy)

    def sample_loss(self, batch: MicroBatch, counts: bool) -> Tensor | float:
        """A loss of samples, not tokens, to add; 0 if the batch does not count."""
        return 0.0

    def active(self, trained: list[Sample]) -> list[Sample]:
        """Without those of advantage exactly 0, whose gradient is exactly 0 unless a KL or entropy term acts on it."""
        args = self.args
        others = bool(args.entropy_coef) or (args.reference_kl_enabled and args.reference_kl_in == "loss")
        return [s for s in trained if s.advantage != 0 or others]

    def advantage_metrics(self, index: int, groups: list[list[Sample]]) -> Metrics:
        trained = [s for group in groups for s in group if s.trained]
        metrics: Metrics = {f"agent_{index}/skipped_samples": float(len(trained) - len(self.active(trained)))}
        for turn in sorted({group[0].turn for group in groups if group}):
            mine = [group for group in groups if group and group[0].turn == turn]
            values = torch.tensor([s.advantage for group in mine for s in group], dtype=torch.float64)
            prefix = f"agent_{index}/turn_{turn + 1}"
            metrics[f"{prefix}/advantage_mean"] = values.mean().item()
            metrics[f"{prefix}/advantage_std"] = values.std(correction=0).item()
            silent = [all(s.advantage == 0 or not s.trained for s in group) for group in mine]
            metrics[f"{prefix}/zero_signal_share"] = sum(silent) / len(silent)
            metrics[f"{prefix}/masked_share"] = 1 - sum(s.trained for g in mine for s in g) / values.numel()
        return metrics

    def minibatches(self, count: int, size: int, epoch: int) -> list[list[int]]:
        order = list(range(count))
        random.Random(sample_seed(self.args.seed, "minibatches", self.rollout, epoch)).shuffle(order)
        return [order[start : start + size] for start in range(0, count, size)]

    @staticmethod
    def names(groups: list[list[Sample]]) -> str:
        names = [sample.name for group in groups for sample in group]
        return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


class MAREINFORCETrainer(MAGRPOTrainer):
    """REINFORCE for teams: no baseline."""

    config_class = MAREINFORCEConfig


class MARLOOTrainer(MAGRPOTrainer):
    """RLOO for teams: the baseline of a sample is the mean return of the others in its group."""

    config_class = MARLOOConfig


class MAReMaxTrainer(MAGRPOTrainer):
    """ReMax for teams: the baseline is the return of the greedy joint answer."""

    config_class = MAReMaxConfig


class CentralizedMAGRPOTrainer(MAGRPOTrainer):
    """MAGRPO with one coordinator that writes every role's answer.

    Args:
        centralized_adapter: how role prompts become one prompt, and one text role answers; none: tagged sections.
        num_agents: roles. agents: a list of the one coordinator.
    """

    config_class = CentralizedMAGRPOConfig

    def __init__(
        self,
        *,
        centralized_adapter: CentralizedComparatorAdapter | None = None,
        num_agents: int | None = None,
        args: CentralizedMAGRPOConfig | None = None,
        agents: Sequence[Any] | None = None,
        tokenizer: Any = None,
        **kwargs: Any,
    ):
        self.adapter = centralized_adapter or TaggedCentralizedComparatorAdapter()
        for name, value in (("agents", agents), ("tokenizer", tokenizer)):
            if isinstance(value, (list, tuple)) and len(value) != 1:
                raise ValueError(f"{name}: a coordinator is one model, so give a list of one, not of {len(value)}")
        super().__init__(num_agents=num_agents, args=args, agents=agents, tokenizer=tokenizer, **kwargs)

    def resolve_args(self, args, agents, num_agents, transition):
        return super().resolve_args(args, None, num_agents, transition)  # num_agents counts roles, not models

    def build_team(self) -> Team:
        assert isinstance(self.args, CentralizedMAGRPOConfig)
        return Coordinator(self.adapter, self.args.num_agents, self.args.unparsable_reward)

    def num_models(self) -> int:
        return 1

    def callbacks(self) -> dict[str, Any]:
        return {**super().callbacks(), "centralized_adapter": self.adapter}
