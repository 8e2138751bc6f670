"""The joint reward model: it reads what all agents were asked and what they answered, and says one number.

Its text goes through one path, `joint_ids`, in training and in use. It is trained on pairs (Bradley and Terry 1952):
the score of the chosen joint answer is to be above that of the rejected one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comlrl.agents import Agent
from comlrl.batches import Loaded
from comlrl.critics import ValueItem, frozen_outputs
from comlrl.engine import Engine, Frozen
from comlrl.generation import right_pad
from comlrl.loading import Member, load_team
from comlrl.memory import Limit
from comlrl.preferences import Pair
from comlrl.processes import World
from comlrl.rewards import JointReward, RewardCall
from comlrl.value_head import CausalLMWithValueHead, without_language


class JointRewardModel(CausalLMWithValueHead):
    """A language model with a linear head on the hidden state of the last token; it starts at 0.

    Args:
        backbone: the language model. freeze_backbone: train only the head.
    """

    def __init__(self, backbone, value_head_hidden_dim=None, freeze_backbone: bool = False):
        super().__init__(backbone, value_head_hidden_dim)
        if freeze_backbone:
            backbone.requires_grad_(False)


@dataclass(eq=False)
class PairItem:
    """The two texts of a pair, as one piece of work."""

    chosen: list[int]
    rejected: list[int]
    name: str

    @property
    def prompt_ids(self) -> list[int]:
        return self.chosen

    @property
    def token_ids(self) -> list[int]:
        return self.rejected


# ---- text -----------------------------------------------------------------------------------------------------------


def joint_ids(agent: Agent, prompts: Sequence[str], answers: Sequence[str], limit: int) -> tuple[list[int], bool]:
    """Token ids of a joint answer, at most `limit`, and whether something had to be left out.

        0< what agent 0 was asked
        1< what agent 1 was asked
        0> what agent 0 answered
        1> what agent 1 answered

    BOS stands before it once, if the tokenizer writes BOS before a text. What is too long loses the beginnings of the
    prompts first, in equal shares; if the answers alone are too long, the ends of the longest of them. So every agent's
    answer is there, the last one too.
    """
    first = agent.tokenizer("0")["input_ids"][:1]
    start = first if first == [agent.tokenizer.bos_token_id] else []
    limit -= len(start)
    encode = lambda text: list(agent.tokenizer(text, add_special_tokens=False)["input_ids"])  # noqa: E731
    asked = [encode(f"{i}< {text}\n") for i, text in enumerate(prompts)]
    said = [encode(f"{i}> {text}\n") for i, text in enumerate(answers)]
    room = limit - sum(map(len, said))
    cut = room < sum(map(len, asked))
    for_prompts, for_answers = shares([len(ids) for ids in asked], max(room, 0)), shares([len(s) for s in said], limit)
    ids = [token for part, count in zip(asked, for_prompts) for token in part[len(part) - count :]]
    return start + ids + [token for part, count in zip(said, for_answers) for token in part[:count]], cut


def shares(lengths: Sequence[int], total: int) -> list[int]:
    """How much of each length fits into `total`: the short ones whole, the longer ones the same."""
    left, found = total, [0] * len(lengths)
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    for place, index in enumerate(order):
        found[index] = min(lengths[index], left // (len(lengths) - place))
        left -= found[index]
    return found


def pair_items(agent: Agent, pairs: Sequence[Pair], limit: int) -> tuple[list[PairItem], int]:
    """The pairs as the model reads them, and how many texts had to be cut."""
    items, cut_texts = [], 0
    for pair in pairs:
        (chosen, one), (rejected, other) = (
            joint_ids(agent, pair.role_prompts, texts, limit) for texts in pair.role_texts
        )
        items.append(PairItem(chosen, rejected, pair.name))
        cut_texts += one + other
    return items, cut_texts


# ---- scores ---------------------------------------------------------------------------------------------------------


def text_scores(model: CausalLMWithValueHead, agent: Agent, texts: Sequence[list[int]], device: torch.device) -> Tensor:
    """Of each text's last token, [N] in fp32."""
    ids, mask = right_pad(texts, agent.pad_id, device)
    with agent.autocast():
        return model.last_values(ids, mask)


def pair_scores(
    model: CausalLMWithValueHead, agent: Agent, items: Sequence[PairItem], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Scores of the chosen and of the rejected texts, both [N] in fp32, in one forward."""
    texts = [item.chosen for item in items] + [item.rejected for item in items]
    scores = text_scores(model, agent, texts, device)
    return scores[: len(items)], scores[len(items) :]


class LearnedRewards:
    """The reward model in place of the task's reward: the same call as `comlrl.rewards.Rewards`.

    model: None in a process outside its group. limit: tokens of a text; tokens: of a forward. center, scale: a score
    counts as (score - center) / scale. counters: `cut` texts of `samples`.
    """

    collective = True

    def __init__(
        self,
        agent: Agent,
        model: Loaded | None,
        world: World,
        limit: int,
        tokens: Limit,
        center: float = 0.0,
        scale: float = 1.0,
    ):
        self.agent, self.model, self.world, self.limit, self.tokens = agent, model, world, limit, tokens
        self.center, self.scale = center, scale
        self.counters = {"samples": 0, "cut": 0}
        self.incidents: list[str] = []

    def __call__(self, calls: Sequence[RewardCall]) -> list[list[JointReward]]:
        texts = [list(zip(*call.completions)) for call in calls]  # [call][joint answer][role]
        read = [
            joint_ids(self.agent, call.prompts, answers, self.limit)
            for call, each in zip(calls, texts)
            for answers in each
        ]
        self.counters["samples"] += len(read)
        self.counters["cut"] += sum(was_cut for _, was_cut in read)
        scores = iter(self.scores([ids for ids, _ in read]))
        return [[JointReward((next(scores) - self.center) / self.scale, {}) for _ in each] for each in texts]

    def scores(self, texts: Sequence[list[int]]) -> list[float]:
        """Raw scores of token ids, in order. All processes have to call. Raises FloatingPointError for NaN."""
        items = [ValueItem(ids, 0, "") for ids in texts]
        if not items:
            return []

        def work(budget: int) -> dict[int, float]:
            return {} if self.model is None else frozen_outputs(items, self.agent, self.model, budget)

        sizes = [len(ids) for ids in texts]
        found = self.world.union(lambda: self.tokens.run(work, most=sum(sizes), least=max(sizes)))
        result = [found[place] for place in range(len(items))]
        if not all(map(math.isfinite, result)):
            raise FloatingPointError("the reward model's score is not finite")
        return result


# ---- loading --------------------------------------------------------------------------------------------------------


def load_reward_model(member: Member, freeze_backbone: bool) -> Agent:
    """Its language model with a fresh head. Raises ValueError if it cannot embed all ids of its tokenizer."""
    agent = load_team([member])[0]
    agent.name = "reward_model"
    without_language(agent.model, agent.tokenizer, "reward_model_name", "name a model with a tokenizer of its own")
    agent.value_model = JointRewardModel(agent.model, freeze_backbone=freeze_backbone).eval()
    return agent


class TrainedScorer(Engine):
    """A reward model that is trained no more: its weights are saved, and there is no optimizer in memory.

    Stands where an engine stood, so that a checkpoint has one layout in all phases.
    """

    def __init__(self, frozen: Frozen):
        self.frozen, self.model, self.group, self.device = frozen, frozen.model, frozen.group, frozen.device
        self.lockstep, self.stage, self.parameters = frozen.lockstep, 0, []

    def awake(self) -> AbstractContextManager:
        return self.frozen.awake()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.frozen.run(function, *args, **kwargs)

    def clear(self) -> None:
        """There is no gradient."""

    def refresh(self, agent: Agent) -> None:
        """Nothing is sampled from it."""

    def weights(self) -> dict[str, Tensor]:
        return self.frozen.weights()

    def load_weights(self, tensors: Mapping[str, Tensor], where: str) -> None:
        self.frozen.load_weights(tensors, where)

    def state_tensors(self) -> dict[str, Tensor]:
        return {}

    def counters(self) -> dict[str, int]:
        return {"optimizer_steps": 0, "schedule_steps": 0}

    def load_state(self, tensors: Mapping[str, Tensor], counters: Mapping[str, int]) -> None:
        """There is none."""
