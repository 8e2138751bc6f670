"""MARLHF: a joint reward model on preference pairs, then a policy trainer on its scores.

Phases: sampling (pairs.py), reward_model, policy. The policy phase is the loop of the REINFORCE or the actor-critic
family as it is; only what rewards the rollouts is another: `collect` puts the reward model in the place of the task's
reward. Evaluation reports both.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from comlrl import losses
from comlrl.agents import Agent
from comlrl.batches import share
from comlrl.checkpoint import load_model_tensors, tensor_shapes
from comlrl.engine import Engine, Frozen
from comlrl.generation import Sampling, sample_seed
from comlrl.loading import Member, check_team, resolve_devices
from comlrl.placement import Placement
from comlrl.planning import Planned
from comlrl.preferences import Pair
from comlrl.reward_model import (
    LearnedRewards,
    PairItem,
    TrainedScorer,
    load_reward_model,
    pair_items,
    pair_scores,
)
from comlrl.rewards import RewardCall
from comlrl.rollouts import Node, Rollouts, prompt_text
from comlrl.signals import StopSignal
from comlrl.summaries import Metrics, mean
from comlrl.trained import TrainedModel
from comlrl.trainers.actor_critic import ActorCriticTrainerBase, IACTrainer, MAACTrainer
from comlrl.trainers.pairs import DONE, POLICY, PairTrainer, named
from comlrl.trainers.preference_config import MARLHFConfig
from comlrl.trainers.resume import source_of
from comlrl.zero import ZeroEngine, ZeroFrozen

REWARD_MODEL = "reward_model"  # the phase, and the model's folder


class MARLHFTrainer(PairTrainer):
    """Reinforcement learning from preferences over joint answers.

    Args:
        metrics_callback, critic_model, critics: of iac and maac, see `ActorCriticTrainerBase`; critics default to
            args.critic_model_name, else to the agents' models.
        Others: see `PairTrainer`.

    Of the algorithms iac and maac, MARLHFTrainer(...) makes a subclass that stands on their trainers.
    """

    args: MARLHFConfig
    config_class = MARLHFConfig
    fixed_settings: tuple[str, ...] = ("rl_algorithm", "collaboration_mode")
    use_return = False  # a reward is learned, so the turn's own rewards are compared
    on_actor_critic: ClassVar[dict[str, type["MARLHFTrainer"]]] = {}  # by rl_algorithm

    def __new__(cls, *positional: Any, **others: Any) -> "MARLHFTrainer":
        args: Any = named(positional, others).get("args")
        kind = cls.on_actor_critic.get(args.rl_algorithm, cls) if isinstance(args, MARLHFConfig) else cls
        if not issubclass(kind, cls):
            raise ValueError(
                f"rl_algorithm={args.rl_algorithm!r}: a subclass of yours has to stand on {kind.__name__}, not on "
                "MARLHFTrainer"
            )
        return super().__new__(kind)

    def __init__(
        self,
        *positional: Any,
        metrics_callback: Callable | None = None,
        critic_model: Any = None,
        critics: Sequence[Any] | None = None,
        **others: Any,
    ):
        given = named(positional, others)
        args = given.get("args") or self.config_class()
        if args.actor_critic:
            if critic_model is None and critics is None and args.use_separate_critic:
                critics = default_critics(args, given)
            given |= {"metrics_callback": metrics_callback, "critic_model": critic_model, "critics": critics}
        else:
            for key, value in (
                ("metrics_callback", metrics_callback),
                ("critic_model", critic_model),
                ("critics", critics),
            ):
                if value is not None:
                    raise ValueError(f"{key} is for rl_algorithm iac or maac, not {args.rl_algorithm!r}; leave it out")
        self.reward_steps = 0
        self.center, self.scale = 0.0, 1.0  # of the scores
        self.reward_agent: Agent
        self.reward_engine: Engine | None = None  # none in a process outside its group
        self.scorer_is_trained = False  # so that it is only read
        self.reward_items: list[PairItem] = []  # of self.pairs, made when they are needed
        super().__init__(**given)

    @property
    def run_name(self) -> str:
        return self.args.run_name or "marlhf"

    @property
    def needs_rows(self) -> bool:
        return True  # the policies train on them

    def planned_steps(self) -> int | None:
        return super(PairTrainer, self).planned_steps()

    # ---- the reward model -------------------------------------------------------------------------------------------

    def device_settings(self) -> dict[str, str | list[str] | None]:
        return {**super().device_settings(), "reward_model_device": self.args.reward_model_device}

    def check_other_models(self) -> None:
        super().check_other_models()
        name, home = self.args.reward_model_name, self.members[0]
        source = name or source_of(home)
        if source is None:
            raise ValueError("reward_model_name is missing: the agents are loaded models, so they have no name to take")
        place = self.args.reward_model_device or str(home.device)
        resolve_devices(place, 1, "reward_model_device")
        tokenizer = home.tokenizer if name is None or name == home.source else None
        member = check_team(None, [source], 1, tokenizer, home_kwargs(home), [place], "float32")[0]
        self.reward_member = replace(
            member, name=REWARD_MODEL, compute_dtype=home.compute_dtype, recompute=self.args.gradient_checkpointing
        )

    def model_counts(self) -> dict[str, int]:
        return {**super().model_counts(), "reward_model": 1}

    def load_other_models(self) -> None:
        super().load_other_models()
        self.load_scorer()

    def load_scorer(self) -> None:
        """The reward model as it is before training, with an optimizer, in the processes of its group."""
        args, (group,) = self.args, self.placement.of("reward_model")
        settings = replace(
            self.agent_settings(), learning_rate=args.reward_learning_rate, schedule="constant", warmup_steps=0
        )
        self.reward_engine, self.scorer_is_trained = None, False  # before another one is loaded
        self.reward_agent = load_reward_model(self.reward_member, args.reward_freeze_backbone)
        self.reward_shapes = tensor_shapes(self.reward_agent.trained)
        if not group.member:
            self.reward_agent.unload()
        elif self.zero is None:
            self.reward_engine = Engine(self.reward_agent.trained, settings, None, group)
            if args.offload_idle:
                self.reward_engine.leave_device()
        else:
            self.reward_engine = ZeroEngine(self.reward_agent.trained, settings, None, group, self.zero)

    def settle_scorer(self) -> None:
        """From now on the reward model is only read: no gradients and no optimizer are left of it."""
        engine = self.reward_engine
        self.reward_items, self.scorer_is_trained = [], True
        if engine is None or isinstance(engine, TrainedScorer):
            return
        weights = engine.weights() if self.zero is not None else {}
        group, self.reward_engine = engine.group, None
        if self.zero is None:
            engine.clear()
        else:  # what DeepSpeed wrapped stays in its hands, so the model is built anew
            del engine
            self.reward_agent = load_reward_model(self.reward_member, freeze_backbone=False)
            load_model_tensors(self.reward_agent.trained, weights, "the reward model")
        model = self.reward_agent.trained.requires_grad_(False)
        if self.zero is not None and self.zero["zero_optimization"]["stage"] == 3:
            self.reward_engine = TrainedScorer(ZeroFrozen(model, group, self.zero, self.reward_agent.device))
        else:
            frozen = Frozen(model, group)
            frozen.device, frozen.idle = self.reward_agent.device, self.args.offload_idle
            self.reward_engine = TrainedScorer(frozen)

    @property
    def text_limit(self) -> int:
        longest = self.reward_agent.context_length
        return min(longest, self.args.reward_max_length or longest)

    def learned(self, center: float = 0.0, scale: float = 1.0) -> LearnedRewards:
        return LearnedRewards(
            self.reward_agent, self.reward_engine, self.world, self.text_limit, self.token_limit, center, scale
        )

    def trained_models(self) -> list[TrainedModel]:
        source = source_of(self.reward_member)
        model = TrainedModel(self.reward_agent, source, self.reward_shapes, self.reward_engine)
        return [*super().trained_models(), model]

    def planned_models(self, placement: Placement) -> list[Planned]:
        (group,) = placement.of("reward_model")
        model = Planned(self.reward_member, group, frozen_body=self.args.reward_freeze_backbone)
        return [*super().planned_models(placement), model]

    # ---- phases -----------------------------------------------------------------------------------------------------

    def pairs_complete(self) -> None:
        self.phase, self.epoch, self.position = REWARD_MODEL, 0, 0
        self.reward_items = []

    @property
    def reward_pairs(self) -> list[Pair]:
        """What the reward model is trained and measured on."""
        return self.pairs

    def learn_from_pairs(self, sampling: Sampling, stop: StopSignal) -> None:
        if self.phase == POLICY:
            self.policy_gradient_piece(sampling, stop)
            if self.epoch >= self.args.num_train_epochs:
                self.end_policy()
                self.plan_evaluation()
        elif self.chunks:
            self.take_reward_step(stop)
        elif self.epoch < self.args.reward_num_train_epochs:
            batch = self.args.reward_train_batch_size
            order = self.shuffled_pairs(len(self.split()[0]), batch, "reward order", *self.order_key())
            self.chunks = [[self.split()[0][i] for i in chunk] for chunk in order]
        else:
            self.finish_reward_model(stop)

    def order_key(self) -> tuple[int, ...]:
        return (self.epoch,)

    def split(self) -> tuple[list[int], list[int]]:
        """Pairs to train on, and pairs that are held out, as numbers."""
        count = len(self.reward_pairs)
        held = min(math.ceil(self.args.reward_eval_fraction * count), count - 1)
        order = list(range(count))
        random.Random(sample_seed(self.args.seed, "held out", count)).shuffle(order)
        return sorted(order[held:]), sorted(order[:held])

    def reward_texts(self) -> list[PairItem]:
        if not self.reward_items:
            self.reward_items, cut = pair_items(self.reward_agent, self.reward_pairs, self.text_limit)
            if cut:
                self.note(f"reward model: {cut} of {2 * len(self.reward_items)} texts were too long and lost a part")
        return self.reward_items

    def take_reward_step(self, stop: StopSignal) -> None:
        """One optimizer step of the reward model."""
        engine, items = self.reward_engine, self.reward_texts()
        chosen = [items[i] for i in self.chunks[0]]
        with self.revocable(stop):

            def work(budget: int) -> dict[int, tuple[Metrics, str]]:
                if engine is None:
                    return {}
                engine.clear()  # of an attempt that ran out of memory
                with engine.awake():
                    return {self.world.rank: self.learn_reward(engine, chosen, budget)}

            parts = self.world.union(lambda: self.within_memory(work, [[chosen]]))
            norm, rate = self.world.union(lambda: {} if engine is None else {0: self.reduced(engine)})[0]
            problem = next((said for _, said in parts.values() if said), "")
            if not problem and not math.isfinite(norm):
                problem = f"gradient norm {norm} over pairs {', '.join(item.name for item in chosen[:8])}"
            problem = problem and f"reward model, step {self.reward_steps + 1}: {problem}; weights unchanged"
            if problem and self.args.nonfinite == "raise":
                raise FloatingPointError(f"{problem} (nonfinite: skip goes on without such steps)")
        if engine is not None and problem:
            engine.skip()
        elif engine is not None:
            with engine.awake():
                engine.step(norm)
        if problem:
            self.note(problem)
        self.reward_steps += 1
        self.pieces += 1
        self.chunks = self.chunks[1:]
        metrics = {key: sum(part[key] for part, _ in parts.values()) for key in ("loss", "accuracy", "margin")}
        metrics |= {"grad_norm": norm, "learning_rate": rate, "step": float(self.reward_steps)}
        self.log_reward_model(metrics)
        if not self.chunks:
            self.epoch += 1

    def learn_reward(self, engine: Engine, items: Sequence[PairItem], budget: int) -> tuple[Metrics, str]:
        """Accumulate the gradient of the mean loss over this process's share; its part of the means."""
        agent = self.reward_agent
        sums = {"loss": 0.0, "accuracy": 0.0, "margin": 0.0}
        problem = ""
        parts = share(items, engine.group, budget, engine.lockstep)
        for number, each in enumerate(parts):
            part, counts = each.items, each.counts
            better, worse = engine.run(pair_scores, agent, part, engine.device)
            loss = (losses.bradley_terry_loss(better, worse) / len(items) * float(counts)).sum()
            if not torch.isfinite(loss):
                problem = problem or f"loss {loss.item()} over pairs {', '.join(item.name for item in part[:8])}"
                if not engine.lockstep:
                    return sums, problem
            engine.backward(loss, last=number == len(parts) - 1)
            if counts:
                gaps = (better - worse).detach().double()
                sums["loss"] += loss.item()
                sums["accuracy"] += (gaps > 0).double().sum().item() / len(items)
                sums["margin"] += gaps.sum().item() / len(items)
        return sums, problem

    def finish_reward_model(self, stop: StopSignal) -> None:
        """Measure it on the pairs that were held out, settle the scale of its scores, and let go of its optimizer."""
        items = self.reward_texts()
        trained, held = self.split()
        with self.revocable(stop):
            every = self.learned().scores([ids for item in items for ids in (item.chosen, item.rejected)])
        scores = list(zip(every[::2], every[1::2]))
        metrics = {
            **{f"train_{key}": value for key, value in pair_quality([scores[i] for i in trained]).items()},
            **{f"held_out_{key}": value for key, value in pair_quality([scores[i] for i in held]).items()},
            "held_out_pairs": float(len(held)),
        }
        if self.args.reward_standardize:
            values = torch.tensor(every, dtype=torch.float64)
            self.center, self.scale = values.mean().item(), max(values.std(correction=0).item(), 1e-6)
        self.log_reward_model({**metrics, "score_center": self.center, "score_scale": self.scale})
        self.note(f"reward model: {', '.join(f'{key} {value:.4g}' for key, value in metrics.items())}")
        self.settle_scorer()
        self.phase, self.epoch, self.position, self.epoch_ended = POLICY, 0, 0, False
        self.pieces += 1

    def log_reward_model(self, metrics: Metrics) -> None:
        line = {f"reward_model/{key}": value for key, value in metrics.items()}
        self.open_run().log(line, step=self.step, env_step=self.env_step, epoch=self.fractional_epoch, kind="train")

    def end_policy(self) -> None:
        self.phase = DONE

    # ---- the learned reward -----------------------------------------------------------------------------------------

    @contextmanager
    def rewarded_by_the_model(self, *rollouts: Rollouts) -> Iterator[None]:
        """Inside, these rollouts get the learned reward."""
        learned = self.learned(self.center, self.scale)
        for each in rollouts:
            each.rewards = learned
        try:
            yield
        finally:
            for each in rollouts:
                each.rewards = self.rewards

    def collect(self, sampling: Sampling, stop: StopSignal) -> None:
        with self.rewarded_by_the_model(self.rollouts):
            super().collect(sampling, stop)

    def trajectory_metrics(self, roots: list[Node]) -> Metrics:
        """In evaluation, where the task's reward is the reward, also the mean learned return."""
        metrics = super().trajectory_metrics(roots)
        if self.scorer_is_trained:
            calls = [call for root in roots for call in trajectory_calls(root)]
            rewards = self.learned(self.center, self.scale)(calls)
            metrics["learned_reward"] = sum(reward.value or 0.0 for (reward,) in rewards) / len(roots)
        return metrics

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def counters(self) -> dict[str, Any]:
        return {
            **super().counters(),
            "reward_steps": self.reward_steps,
            "score_center": self.center,
            "score_scale": self.scale,
            "scorer_is_trained": self.scorer_is_trained,
        }

    def set_counters(self, values: Mapping[str, Any]) -> None:
        super().set_counters(values)
        self.reward_steps = values["reward_steps"]
        self.center, self.scale = values["score_center"], values["score_scale"]
        self.reward_items = []
        if values["scorer_is_trained"]:
            self.settle_scorer()

    def load_checkpoint(self, path: str | Path) -> None:
        if self.scorer_is_trained:
            self.load_scorer()  # the checkpoint may be of the time when it was trained
        super().load_checkpoint(path)


def trajectory_calls(root: Node) -> list[RewardCall]:
    """The turns of a greedy trajectory, each as one call."""
    calls, node = [], root
    while True:
        prompts = [prompt_text(prompt) for prompt in node.role_prompts]
        answers = [[text] for text in node.responses[0]]
        calls.append(RewardCall(node.row, prompts, answers, node.name, [node.sample_id(0)]))
        following = node.children[0] if node.children else None
        if following is None:
            return calls
        node = following


class MARLHFIACTrainer(MARLHFTrainer, IACTrainer):  # type: ignore[misc]  # the settings of both are one class
    fixed_settings = (*MARLHFTrainer.fixed_settings, *IACTrainer.fixed_settings)


class MARLHFMAACTrainer(MARLHFTrainer, MAACTrainer):  # type: ignore[misc]  # as above
    fixed_settings = (*MARLHFTrainer.fixed_settings, *ActorCriticTrainerBase.fixed_settings)


MARLHFTrainer.on_actor_critic = {"iac": MARLHFIACTrainer, "maac": MARLHFMAACTrainer}


def default_critics(args: MARLHFConfig, given: Mapping[str, Any]) -> list[Any]:
    """critic_model_name, else the name of each critic's (first) agent."""
    count = given.get("num_agents") or args.num_agents
    agents = given.get("agents") or [given.get("agent_model")] * count
    names = [args.critic_model_name or agent for agent in agents]
    for name in names:
        if not isinstance(name, str):
            raise ValueError(
                f"rl_algorithm={args.rl_algorithm!r} needs critics, and the agents are loaded models without a name; "
                "set critic_model_name, or give critic_model or critics"
            )
    return names if args.rl_algorithm == "iac" else names[:1]


def home_kwargs(home: Member) -> dict[str, Any]:
    """What says where files come from and how attention is computed, as for the agent."""
    return {key: home.model_config[key] for key in ("attn_implementation", "model_kwargs") if key in home.model_config}


def pair_quality(scores: Sequence[tuple[float, float]]) -> Metrics:
    """Loss, accuracy and margin of (chosen, rejected) scores; nothing of none."""
    if not scores:
        return {}
    chosen, rejected = torch.tensor(scores, dtype=torch.float64).unbind(1)
    return {
        "loss": losses.bradley_terry_loss(chosen, rejected).mean().item(),
        "accuracy": (chosen > rejected).double().mean().item(),
        "margin": mean((chosen - rejected).tolist()),
    }


__all__ = ["MARLHFConfig", "MARLHFIACTrainer", "MARLHFMAACTrainer", "MARLHFTrainer"]
