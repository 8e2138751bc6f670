"""The rollout tree: turn by turn, joint actions, rewards, returns.

A turn is expanded for all live branches of all rows at once: one generation call an agent and turn, one reward pass.
"""

import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from comlrl import credit
from comlrl.agents import Agent, Prompt
from comlrl.generation import Completion, Request, Sampling, generate, sample_seed
from comlrl.memory import Limit
from comlrl.placement import AgentPool, Placement
from comlrl.processes import World
from comlrl.rewards import JointReward, RewardCall, RewardSource

Row = dict[str, Any]
Answers = dict[tuple[int, int, int], Completion]  # by agent, node of the level, sample

# What an external transition may ask for by name: the published five, and three more.
FEEDBACK = (
    "prompt",
    "agent_completions",
    "num_agents",
    "prompt_history_per_agent",
    "response_history_per_agent",
    "batch_item",
    "rewards",
    "turn",
)


@dataclass
class Node:
    """One row and turn of one branch: what every agent was asked, what it answered, and what the team earned."""

    row_id: int
    row: Row
    turn: int
    path: tuple[int, ...]  # the joint actions that lead here
    prompts: list[Prompt]  # one an agent, as given to the tokenizer
    prompt_ids: list[list[int]]
    role_prompts: list[Prompt]  # one a role: differs from `prompts` only with a coordinator
    prompt_history: list[list[Prompt]]  # [role][turn], this turn included
    response_history: list[list[str]]  # [role][earlier turn]
    reward_history: list[float | None]  # of the branch, earlier turns
    greedy: bool = False  # part of a greedy baseline chain: not trained on
    weight: float = 1.0
    completions: list[list[Completion]] = field(default_factory=list)  # [agent][k]
    joint_actions: list[tuple[int, ...]] = field(default_factory=list)
    responses: list[list[str]] = field(default_factory=list)  # [joint action][role]
    rewards: list[float | None] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    children: list["Node | None"] = field(default_factory=list)  # one a joint action
    returns: list[float | None] = field(default_factory=list)
    baseline: "Node | None" = None  # the greedy answer to the same prompts

    @property
    def name(self) -> str:
        branch = "/".join(map(str, self.path)) or "root"
        return f"row {self.row_id}, turn {self.turn + 1}, node {branch}{' (greedy)' if self.greedy else ''}"

    def sample_id(self, joint_action: int) -> str:
        """Names one joint answer: row, branch and joint action."""
        return ".".join(map(str, (self.row_id, *self.path, joint_action)))

    def known_rewards(self) -> list[float]:
        return [reward for reward in self.rewards if reward is not None]

    def known_returns(self) -> list[float]:
        return [value for value in self.returns if value is not None]


@dataclass
class RolloutStats:
    """Seconds and counts of one `Rollouts.expand`."""

    generate_seconds: float = 0.0
    reward_seconds: float = 0.0
    env_steps: int = 0
    dropped_rows: int = 0
    dropped_branches: int = 0
    unparsable: int = 0


@dataclass(frozen=True)
class TreeShape:
    num_turns: int = 1
    num_generations: int = 4
    branch_once: bool = False  # one sample a node after the first turn: K separate trajectories
    joint_mode: str = "aligned"
    discount: float = 1.0
    early_termination_threshold: float | None = None
    node_weighting: str = "tree"
    greedy_baseline: bool = False

    def generations(self, turn: int) -> int:
        return 1 if self.branch_once and turn else self.num_generations


class Team:
    """Turns role prompts into what the agents read, and their answers into what the roles said.

    Here an agent is a role. A coordinator that writes every role's answer overrides both methods.
    """

    def __init__(self, num_roles: int):
        self.num_roles = num_roles
        self.unparsable = 0  # answers of a coordinator that held no role's section, so far

    def prompts(self, row: Row, role_prompts: list[Prompt]) -> list[Prompt]:
        """One prompt an agent."""
        return role_prompts

    def responses(self, row: Row, texts: list[str]) -> tuple[list[str], JointReward | None]:
        """One text an agent -> one text a role; a JointReward, if given, stands in place of scoring them."""
        return texts, None


class Rollouts:
    """Expands rows into rollout trees with the team's current weights."""

    def __init__(
        self,
        agents: Sequence[Agent],
        rewards: RewardSource,
        formatters: Sequence[Callable[..., Prompt]],
        transition: Callable[..., Sequence[Prompt]] | None,
        team: Team,
        *,
        chat_template: str = "messages",
        prompt_limits: Sequence[int],
        passthrough: bool = False,
        max_rows: int = 256,
        pool: AgentPool | None = None,
        placement: Placement | None = None,
    ):
        self.agents = list(agents)
        self.rewards = rewards
        self.formatters = list(formatters)
        self.formatter_takes_external = [_accepts(formatter, "external_prompts") for formatter in formatters]
        self.transition = transition
        self.transition_takes = [name for name in FEEDBACK if _accepts(transition, name)] if transition else []
        self.team = team
        self.chat_template = chat_template
        self.prompt_limits = list(prompt_limits)  # tokens, one an agent
        self.passthrough = passthrough
        self.placement = placement or Placement(World(), None, {"agents": len(self.agents)})
        self.world = self.placement.world
        self.limit = Limit("generation_batch_rows", max_rows, self.world.any)
        self.pool = pool or AgentPool("none", [agent.device for agent in self.agents])

    def expand(
        self,
        rows: Sequence[tuple[int, Row]],
        shape: TreeShape,
        sampling: Sampling,
        seed_key: tuple,
        greedy: bool = False,
    ) -> tuple[list[Node], RolloutStats]:
        """Roots of the finished trees, one a row (rows with a prompt over the limit are left out and counted).

        `rows`: (row id, row). `seed_key`: run seed and rollout number; with row, branch, agent and sample it seeds each
        sample. `greedy`: one greedy answer a node instead of samples.
        """
        stats = RolloutStats()
        unparsable_before = self.team.unparsable
        roots = []
        for row_id, row in rows:
            root = self._make_node(row_id, row, None, 0, None)
            if root is None:
                stats.dropped_rows += 1
            else:
                root.greedy = greedy
                roots.append(root)
        level = roots
        for turn in range(shape.num_turns):
            if shape.greedy_baseline:
                for node in level:
                    if not node.greedy:
                        node.baseline = self._copy_prompts(node)
            chains = [node.baseline for node in level if node.baseline is not None]
            started = time.perf_counter()
            self._generate(level, shape, sampling, seed_key)
            stats.generate_seconds += time.perf_counter() - started
            started = time.perf_counter()
            scored = level + chains
            self._score(scored, stats)
            stats.reward_seconds += time.perf_counter() - started
            stats.env_steps += sum(len(node.known_rewards()) for node in level if not node.greedy)
            level = [] if turn == shape.num_turns - 1 else self._children(scored, shape, stats)
        for root in roots:
            fill_returns(root, shape.discount)
        stats.unparsable = self.team.unparsable - unparsable_before
        return roots, stats

    # -- prompts ------------------------------------------------------------------------------------------------------

    def _make_node(
        self, row_id: int, row: Row, parent: Node | None, action: int, external: Sequence[Prompt] | None
    ) -> Node | None:
        """The node's prompts, formatted and encoded; None if one of them is over the limit."""
        role_prompts = [
            self._format(role, row, external[role] if external else None) for role in range(self.team.num_roles)
        ]
        prompts = self.team.prompts(row, role_prompts)
        prompt_ids = [
            agent.encode(prompt, self.chat_template) for agent, prompt in zip(self.agents, prompts, strict=True)
        ]
        if any(len(ids) > limit for ids, limit in zip(prompt_ids, self.prompt_limits, strict=True)):
            return None
        history: list[list[Prompt]] = parent.prompt_history if parent else [[] for _ in role_prompts]
        said = parent.responses[action] if parent else []
        earlier: list[list[str]] = parent.response_history if parent else [[] for _ in role_prompts]
        return Node(
            row_id=row_id,
            row=row,
            turn=parent.turn + 1 if parent else 0,
            path=(*parent.path, action) if parent else (),
            prompts=prompts,
            prompt_ids=prompt_ids,
            role_prompts=role_prompts,
            prompt_history=[[*past, now] for past, now in zip(history, role_prompts)],
            response_history=[[*past, said[role]] for role, past in enumerate(earlier)] if parent else earlier,
            reward_history=[*parent.reward_history, parent.rewards[action]] if parent else [],
            greedy=parent.greedy if parent else False,
        )

    def _format(self, role: int, row: Row, external: Prompt | None) -> Prompt:
        """Turn 1: formatter(row). Later: the formatter sees the external prompt in place of row["prompt"]; with
        passthrough, and for a message list (which is already a whole prompt), the external prompt is used as it is."""
        formatter = self.formatters[role]
        if external is None:
            return formatter(row)
        if self.passthrough or not isinstance(external, str):
            return external
        view = {**row, "prompt": external, "_original_prompt": row.get("prompt")}
        return formatter(view, external_prompts=external) if self.formatter_takes_external[role] else formatter(view)

    @staticmethod
    def _copy_prompts(node: Node) -> Node:
        """The start of a greedy chain at `node`: same prompts, no answers yet."""
        return Node(
            row_id=node.row_id,
            row=node.row,
            turn=node.turn,
            path=node.path,
            prompts=node.prompts,
            prompt_ids=node.prompt_ids,
            role_prompts=node.role_prompts,
            prompt_history=node.prompt_history,
            response_history=node.response_history,
            reward_history=node.reward_history,
            greedy=True,
        )

    # -- one turn -----------------------------------------------------------------------------------------------------

    def _generate(self, level: list[Node], shape: TreeShape, sampling: Sampling, seed_key: tuple) -> None:
        """One call an agent: the K samples of every node, and the greedy answers beside them."""
        groups = self.placement.of("agents")

        def seeds(node: Node, agent: int) -> list[int | None]:
            if node.greedy:
                return [None]
            count = shape.generations(node.turn)
            drawn: list[int | None] = [sample_seed(*seed_key, node.row_id, node.path, agent, k) for k in range(count)]
            return drawn if node.baseline is None else [*drawn, None]

        # (node, sample, seed) of every answer that is wanted from an agent.
        wanted = [
            [(n, k, seed) for n, node in enumerate(level) for k, seed in enumerate(seeds(node, agent))]
            for agent in range(len(self.agents))
        ]

        def answers(agent: int, max_rows: int) -> Answers:
            """This process's share of one agent's answers."""
            jobs: dict[int, list[tuple[int, int | None]]] = {}
            for n, k, seed in groups[agent].share(wanted[agent]):
                jobs.setdefault(n, []).append((k, seed))
            requests = [Request(level[n].prompt_ids[agent], [seed for _, seed in job]) for n, job in jobs.items()]
            results: list[list[Completion]] = []
            if requests:
                started = time.perf_counter()
                with self.agents[agent].awake():
                    results = generate(self.agents[agent], requests, sampling, max_rows)
                written = sum(len(completion.token_ids) for each in results for completion in each)
                read = sum(len(request.prompt_ids) for request in requests)
                self.agents[agent].worked("generate", started, read + written)
            return {
                (agent, n, k): completion
                for (n, job), completions in zip(jobs.items(), results, strict=True)
                for (k, _), completion in zip(job, completions, strict=True)
            }

        def all_answers(max_rows: int) -> Answers:
            parts = self.pool.map(lambda agent: answers(agent, max_rows), len(self.agents))
            return {key: completion for part in parts for key, completion in part.items()}

        most = max(map(len, wanted))
        results = self.world.union(lambda: self.limit.run(all_answers, most))
        self._check_same_tree(level)
        for agent in range(len(self.agents)):
            for node in level:
                node.completions.append([])
            for n, k, _ in wanted[agent]:
                level[n].completions[agent].append(results[agent, n, k])
            for node in level:
                if node.baseline is not None:
                    node.baseline.completions.append([node.completions[agent].pop()])
        for node in level:
            node.joint_actions = joint_actions(len(node.completions[0]), len(self.agents), shape.joint_mode)
            if node.baseline is not None:
                node.baseline.joint_actions = joint_actions(1, len(self.agents), "aligned")

    def _check_same_tree(self, level: list[Node]) -> None:
        """Every process builds the tree by itself, so its formatters must say the same everywhere."""
        mine = hash(tuple(tuple(ids) for node in level for ids in node.prompt_ids))
        if len(set(self.world.exchange(mine))) > 1:
            raise ValueError(
                "the processes made different prompts of the same rows: formatters must not draw random numbers or "
                "depend on the process"
            )

    def _score(self, nodes: list[Node], stats: RolloutStats) -> None:
        """One reward a joint action; answers that a coordinator garbled get its declared reward instead."""
        jobs: list[tuple[Node, list[int]]] = []
        calls: list[RewardCall] = []
        for node in nodes:
            picked = []
            for j, action in enumerate(node.joint_actions):
                texts = [node.completions[agent][k].text for agent, k in enumerate(action)]
                responses, fixed = self.team.responses(node.row, texts)
                node.responses.append(responses)
                node.rewards.append(fixed.value if fixed else None)
                node.parts.append(fixed.parts if fixed else {})
                if fixed is None:
                    picked.append(j)
            if picked:
                jobs.append((node, picked))
                calls.append(
                    RewardCall(
                        row=node.row,
                        prompts=[prompt_text(prompt) for prompt in node.role_prompts],
                        completions=[[node.responses[j][role] for j in picked] for role in range(self.team.num_roles)],
                        name=node.name,
                        sample_ids=[node.sample_id(j) for j in picked],
                    )
                )
        for (node, picked), results in zip(jobs, self._rewards_of(calls), strict=True):
            for j, result in zip(picked, results, strict=True):
                node.rewards[j], node.parts[j] = result.value, result.parts

    def _rewards_of(self, calls: list[RewardCall]) -> list[list[JointReward]]:
        """Each joint answer is scored once, in one of the processes."""
        if self.world.alone or self.rewards.collective:
            return self.rewards(calls)
        mine = range(self.world.rank, len(calls), self.world.size)
        before, told = dict(self.rewards.counters), self.rewards.incidents
        self.rewards.incidents = []

        def score() -> tuple[dict[int, list[JointReward]], dict[str, int], list[str]]:
            results = dict(zip(mine, self.rewards([calls[place] for place in mine]), strict=True))
            counts = {key: value - before[key] for key, value in self.rewards.counters.items()}
            return results, counts, self.rewards.incidents

        merged: dict[int, list[JointReward]] = {}
        parts = self.world.together(score)
        self.rewards.counters = before
        for results, counts, lines in parts:
            merged |= results
            told += lines
            for key, count in counts.items():
                before[key] += count
        self.rewards.incidents = told
        return [merged[place] for place in range(len(calls))]

    def _children(self, nodes: list[Node], shape: TreeShape, stats: RolloutStats) -> list[Node]:
        """One child a rewarded joint action, unless the node ended early."""
        going_on: list[tuple[Node, int]] = []
        for node in nodes:
            known = node.known_rewards()
            node.children = [None] * len(node.joint_actions)
            threshold = shape.early_termination_threshold
            if known and (threshold is None or credit.mean(known) <= threshold):
                going_on += [(node, j) for j, reward in enumerate(node.rewards) if reward is not None]
        level = []
        prompts = self.world.divide(going_on, lambda pair: self._feedback(*pair))
        for (node, j), external in zip(going_on, prompts, strict=True):
            child = self._make_node(node.row_id, node.row, node, j, external)
            if child is None:
                stats.dropped_branches += 1
                continue
            known = node.known_rewards()
            child.weight = credit.child_weight(node.weight, len(known), shape.discount, shape.node_weighting)
            node.children[j] = child
            level.append(child)
        return level

    def _feedback(self, node: Node, action: int) -> Sequence[Prompt]:
        """Ask the external transition for the next turn's prompts, one a role."""
        assert self.transition is not None
        offered = {
            "prompt": node.row.get("prompt", ""),
            "agent_completions": list(node.responses[action]),
            "num_agents": self.team.num_roles,
            "prompt_history_per_agent": [list(past) for past in node.prompt_history],
            "response_history_per_agent": [
                [*past, said] for past, said in zip(node.response_history, node.responses[action])
            ],
            "batch_item": node.row,
            "rewards": [*node.reward_history, node.rewards[action]],
            "turn": node.turn + 1,
        }
        prompts = self.transition(**{name: offered[name] for name in self.transition_takes})
        if not isinstance(prompts, (list, tuple)) or len(prompts) != self.team.num_roles or None in prompts:
            raise ValueError(
                f"external_transition must return a list of {self.team.num_roles} prompts, one an agent; "
                f"it returned {prompts!r:.200} at {node.name}"
            )
        return prompts


def joint_actions(num_generations: int, num_agents: int, joint_mode: str) -> list[tuple[int, ...]]:
    """`aligned`: K tuples (k, k, ...). `cross`: all K^n, in lexicographic order."""
    if joint_mode == "cross":
        return list(itertools.product(range(num_generations), repeat=num_agents))
    return [(k,) * num_agents for k in range(num_generations)]


def fill_returns(node: Node, discount: float) -> None:
    """Returns of a finished tree, leaves first, greedy chains included."""
    for child in node.children:
        if child is not None:
            fill_returns(child, discount)
    if node.baseline is not None:
        fill_returns(node.baseline, discount)
    children = node.children or [None] * len(node.joint_actions)
    node.returns = credit.joint_returns(
        node.rewards, [child.returns if child is not None else None for child in children], discount
    )


def walk(roots: Sequence[Node]) -> Iterator[Node]:
    """Every sampled node, level by level; greedy chains are left out."""
    level = list(roots)
    while level:
        yield from level
        level = [child for node in level for child in node.children if child is not None]


def prompt_text(prompt: Prompt) -> str:
    """A prompt as rewards and records see it: a message list becomes its last message's text."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def _accepts(function: Callable, name: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some builtins have no signature, operator.itemgetter("question") for one
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
