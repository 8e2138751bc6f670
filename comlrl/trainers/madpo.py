"""MADPO: joint DPO for teams.

The loss of a pair is a function of one number: the sum over all agents of (log-ratio of the chosen answer - log-ratio
of the rejected one). So a step has three parts: every agent says its log-probs (`take_step`), the team's loss and its
derivative at that sum are computed (`weigh_pairs`), and each agent follows the derivative through its own log-probs
(`learn` of the REINFORCE family). Agents exchange numbers, never gradients.
"""

import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from comlrl import losses
from comlrl.agents import Agent
from comlrl.batches import Loaded, MicroBatch, Sample, frozen_logprobs
from comlrl.engine import Engine
from comlrl.generation import Sampling
from comlrl.preferences import Pair
from comlrl.signals import StopSignal
from comlrl.summaries import Metrics, mean
from comlrl.trainers.pairs import DONE, POLICY, PairTrainer
from comlrl.trainers.preference_config import MADPOConfig

REFERENCES = "references"  # phase: log-probs of the pairs under the initial policy
PAIRS_AT_ONCE = 256
Groups = list[list[list[Sample]]]  # [agent][pair][chosen, rejected]


class MADPOTrainer(PairTrainer):
    """Multi-agent DPO: the team's log-ratio of the chosen joint answer is to be above that of the rejected one.

    Phases: sampling (or reading a file), references (log-probs of all pairs under the initial policy, once), policy.
    Arguments: see `PairTrainer`.
    """

    args: MADPOConfig
    config_class = MADPOConfig
    fixed_settings: tuple[str, ...] = ("reference_free", "collaboration_mode")

    def pairs_complete(self) -> None:
        self.epoch = 0
        self.phase = POLICY if self.args.reference_free else REFERENCES

    def learn_from_pairs(self, sampling: Sampling, stop: StopSignal) -> None:
        if self.phase == REFERENCES:
            self.fill_references(sampling, stop)
        elif self.chunks:
            self.take_step(stop)
        else:
            count = len(self.training_pairs)
            self.chunks = self.shuffled_pairs(count, self.batch_pairs, "pair order", *self.order_key())

    @property
    def batch_pairs(self) -> int:
        return self.args.train_batch_size or self.args.rollout_buffer_size

    @property
    def fractional_epoch(self) -> float:
        if self.phase != POLICY or not self.chunks:
            return super().fractional_epoch
        return self.epoch + 1 - len(self.chunks) / math.ceil(len(self.training_pairs) / self.batch_pairs)

    def order_key(self) -> tuple[int, ...]:
        return (self.epoch,)

    @property
    def training_pairs(self) -> list[Pair]:
        return self.pairs

    # ---- log-probs of pairs -----------------------------------------------------------------------------------------

    def pair_samples(self, pairs: Sequence[Pair]) -> Groups:
        """The two answers of each pair as training examples of each agent."""
        return [
            [
                [
                    Sample(
                        prompt_ids=pair.prompt_ids[agent],
                        token_ids=answer.token_ids[agent],
                        turn=pair.turn,
                        name=f"{pair.name} ({what})",
                        credit=None,
                        weight=2.0,  # `learn` divides by the two of a group; the loss is already a mean over pairs
                        trained=True,
                        truncated=answer.truncated,
                        sampler_logprobs=torch.zeros(len(answer.token_ids[agent])),
                    )
                    for what, answer in (("chosen", pair.chosen), ("rejected", pair.rejected))
                ]
                for pair in pairs
            ]
            for agent in range(len(self.agents))
        ]

    def answer_logprobs(self, groups: Groups, models: Mapping[int, Loaded]) -> dict[tuple[int, int], Tensor]:
        """Log-probs of every answer, without gradient, at temperature 1: (agent, place) -> [tokens].

        `place`: twice the number of the pair, plus 1 for the rejected answer.
        """
        flat = [[sample for pair in agent for sample in pair] for agent in groups]

        def of_agent(index: int, budget: int) -> dict[tuple[int, int], Tensor]:
            if index not in models:
                return {}
            found = frozen_logprobs(flat[index], self.agents[index], models[index], 1.0, budget)
            return {(index, place): values for place, values in found.items()}

        def of_all(budget: int) -> dict[tuple[int, int], Tensor]:
            parts = self.pool.map(lambda index: of_agent(index, budget), len(self.agents))
            return {key: values for part in parts for key, values in part.items()}

        started = time.perf_counter()
        found = self.world.union(lambda: self.within_memory(of_all, groups))
        self.seconds["time/reference"] += time.perf_counter() - started
        return found

    def reference_key(self) -> str:
        """Changes with the reference's weights and with the precision that it computes in."""
        kinds = [str(agent.compute_dtype).removeprefix("torch.") for agent in self.agents]
        return " ".join(f"{digest[:16]}:{kind}" for digest, kind in zip(self.reference_hashes, kinds, strict=True))

    def fill_references(self, sampling: Sampling, stop: StopSignal) -> None:
        """Reference log-probs of the next pairs that have none, or those of another reference."""
        key = self.reference_key()
        missing = [pair for pair in self.training_pairs if pair.reference_key != key][:PAIRS_AT_ONCE]
        with self.revocable(stop):
            found = self.answer_logprobs(self.pair_samples(missing), self.references) if missing else {}
        for n, pair in enumerate(missing):
            pair.reference = [
                [total(found[agent, 2 * n]), total(found[agent, 2 * n + 1])] for agent in range(len(self.agents))
            ]
            pair.reference_key = key
        self.pieces += 1
        if len(missing) < PAIRS_AT_ONCE:
            self.phase = POLICY
            self.write_pair_file(sampling)  # again, now with the reference's log-probs

    # ---- one step ---------------------------------------------------------------------------------------------------

    def take_step(self, stop: StopSignal) -> None:
        args = self.args
        pairs = [self.training_pairs[i] for i in self.chunks[0]]
        with self.revocable(stop):
            groups = self.pair_samples(pairs)
            logprobs = self.answer_logprobs(groups, self.engines)
            metrics = self.weigh_pairs(pairs, groups, logprobs)
            found, norms, useful, problem = self.gradients(groups, 1.0)
            if problem and args.nonfinite == "raise":
                raise FloatingPointError(f"{problem} (nonfinite: skip goes on without such steps)")
        self.chunks = self.chunks[1:]
        if args.use_environment_step:
            self.env_step += args.environment_steps_per_pair * len(pairs)
        if not self.chunks:
            self.epoch += 1
            if self.epoch >= args.num_train_epochs:
                self.end_policy()
        self.apply({**found, **metrics}, norms, useful, problem)
        self.plan_evaluation()

    def end_policy(self) -> None:
        self.phase = DONE

    def weigh_pairs(self, pairs: Sequence[Pair], groups: Groups, logprobs: dict[tuple[int, int], Tensor]) -> Metrics:
        """Give every sample the team's derivative: minus d loss / d log-prob of the answer (a mean over pairs)."""
        agents = range(len(self.agents))
        sums = torch.tensor(
            [[[total(logprobs[i, 2 * n + k]) for k in range(2)] for i in agents] for n in range(len(pairs))],
            dtype=torch.float64,
        )  # [pair, agent, chosen/rejected]
        ratios = sums
        if not self.args.reference_free:
            ratios = sums - torch.tensor([pair.reference for pair in pairs], dtype=torch.float64)
        margins = (ratios[:, :, 0] - ratios[:, :, 1]).sum(1).requires_grad_()
        loss = losses.preference_loss(margins, self.args.dpo_loss, self.args.dpo_beta, self.args.label_smoothing)
        (slopes,) = torch.autograd.grad(loss.mean(), margins)
        for i in agents:
            for n, (chosen, rejected) in enumerate(groups[i]):
                chosen.advantage, rejected.advantage = -slopes[n].item(), slopes[n].item()
                chosen.old_logprobs, rejected.old_logprobs = logprobs[i, 2 * n], logprobs[i, 2 * n + 1]
                chosen.sampler_logprobs, rejected.sampler_logprobs = chosen.old_logprobs, rejected.old_logprobs
        detached = margins.detach()
        metrics: Metrics = {
            "dpo/loss": loss.mean().item(),
            "dpo/margin": detached.mean().item(),
            "dpo/accuracy": (detached > 0).double().mean().item(),
            "dpo/pairs": float(len(pairs)),
        }
        gaps = [pair.margin for pair in pairs if pair.margin is not None]
        if gaps:
            metrics["dpo/reward_gap"] = mean(gaps)
        for i in agents:
            for k, what in enumerate(("chosen", "rejected")):
                metrics[f"agent_{i}/{what}_logprob"] = sums[:, i, k].mean().item()
                if not self.args.reference_free:
                    metrics[f"agent_{i}/{what}_log_ratio"] = ratios[:, i, k].mean().item()
        return metrics

    def loss(
        self, batch: MicroBatch, logprobs: Tensor, entropies: Tensor, old: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """A linear function of the log-probs whose gradient is that of the team's loss: see the file's head."""
        advantages = torch.tensor([s.advantage for s in batch.samples], device=logprobs.device)
        return -advantages[:, None] * logprobs, {"entropy": entropies.detach()}

    def forward(self, batch: MicroBatch, engine: Engine, agent: Agent, entropy: str) -> tuple[Tensor, Tensor]:
        return batch.logprobs(engine.run, agent, 1.0, entropy)

    def advantage_metrics(self, index: int, groups: list[list[Sample]]) -> Metrics:
        return {}

    def log_step(self, metrics: Metrics) -> None:
        """Without what only policy gradients have."""
        inner = ("/loss", "/sampler_gap", "/sampler_gap_max")
        super().log_step({k: v for k, v in metrics.items() if not (k.startswith("agent_") and k.endswith(inner))})


def total(logprobs: Tensor) -> float:
    """Of an answer's tokens, summed in float64."""
    return logprobs.double().sum().item()


__all__ = ["MADPOConfig", "MADPOTrainer"]
