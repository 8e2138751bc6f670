"""One coordinator writes every role's answer: adapters between roles and the coordinator's one text."""

import re
from collections.abc import Sequence
from typing import Any, Protocol

from comlrl.agents import Prompt
from comlrl.rewards import JointReward
from comlrl.rollouts import Row, Team


class CentralizedComparatorParseError(ValueError):
    """The coordinator's text holds no role's answer."""


class CentralizedComparatorAdapter(Protocol):
    """How role prompts become the coordinator's, and its text becomes role answers."""

    def build_prompt(self, batch_item: dict[str, Any], agent_prompts: Sequence[Prompt]) -> Prompt: ...

    def parse_completion(self, completion: str, batch_item: dict[str, Any], num_agents: int) -> Sequence[str]: ...


class TaggedCentralizedComparatorAdapter:
    """Asks for `<agent_0>...</agent_0>` sections, one a role.

    Case does not matter; of several sections of one role the first counts; a missing one is an empty answer; none at
    all is a CentralizedComparatorParseError. A last section that was cut off before its closing tag still counts.
    """

    def build_prompt(self, batch_item: dict[str, Any], agent_prompts: Sequence[Prompt]) -> Prompt:
        tags = " ".join(f"<agent_{i}>answer {i}</agent_{i}>" for i in range(len(agent_prompts)))
        parts = [f"Task of agent {i}:\n{_flatten(prompt)}" for i, prompt in enumerate(agent_prompts)]
        text = "\n\n".join([*parts, f"Write every agent's answer in this form: {tags}\n"])
        # Chat in, chat out: the coordinator gets a message list exactly if the roles would have.
        return text if all(isinstance(prompt, str) for prompt in agent_prompts) else [{"role": "user", "content": text}]

    def parse_completion(self, completion: str, batch_item: dict[str, Any], num_agents: int) -> list[str]:
        answers: dict[int, str] = {}
        for match in re.finditer(r"<agent_(\d+)>(.*?)(?:</agent_\1>|(?=<agent_\d+>)|\Z)", completion, re.S | re.I):
            answers.setdefault(int(match[1]), match[2].strip())
        if not any(i in answers for i in range(num_agents)):
            raise CentralizedComparatorParseError(f"no <agent_i> section in {completion!r:.200}")
        return [answers.get(i, "") for i in range(num_agents)]


class Coordinator(Team):
    """The team of one agent that plays every role."""

    def __init__(self, adapter: CentralizedComparatorAdapter, num_roles: int, unparsable_reward: float | str | None):
        super().__init__(num_roles)
        for method in ("build_prompt", "parse_completion"):
            if not callable(getattr(adapter, method, None)):
                raise TypeError(f"centralized_adapter {adapter!r} has no method {method}")
        self.adapter = adapter
        self.unparsable_reward = unparsable_reward

    def prompts(self, row: Row, role_prompts: list[Prompt]) -> list[Prompt]:
        prompt = self.adapter.build_prompt(row, role_prompts)
        if not prompt:
            raise ValueError(f"centralized_adapter.build_prompt must return a non-empty prompt, not {prompt!r}")
        return [prompt]

    def responses(self, row: Row, texts: list[str]) -> tuple[list[str], JointReward | None]:
        empty = [""] * self.num_roles
        try:
            answers = self.adapter.parse_completion(texts[0], row, self.num_roles)
        except CentralizedComparatorParseError:
            self.unparsable += 1
            if self.unparsable_reward == "empty":
                return empty, None
            value = None if isinstance(self.unparsable_reward, str) else self.unparsable_reward
            return empty, JointReward(value, {})
        if not isinstance(answers, (list, tuple)):
            raise TypeError(
                f"centralized_adapter.parse_completion must return a list of strings, not {type(answers).__name__}"
            )
        if len(answers) != self.num_roles:
            raise ValueError(
                f"centralized_adapter.parse_completion returned {len(answers)} answers for {self.num_roles} roles"
            )
        for answer in answers:
            if not isinstance(answer, str):
                raise TypeError(
                    f"centralized_adapter.parse_completion must return strings, not {type(answer).__name__}"
                )
        return list(answers), None


def _flatten(prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


__all__ = [
    "CentralizedComparatorAdapter",
    "CentralizedComparatorParseError",
    "Coordinator",
    "TaggedCentralizedComparatorAdapter",
]
