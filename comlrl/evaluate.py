"""Score a run's saved team beside the untrained one, and each trained agent alone with untrained partners.

    python -m comlrl.evaluate runs/quickstart
    python -m comlrl.evaluate runs/quickstart --rows 8 --samples 8 --show 3 args.agent_devices=cpu
    python -m comlrl.evaluate runs/quickstart --chat --sampled

RUN is the folder of a training script's run: its config.yaml says models, task, reward and sampling, and
`key=value` changes such a setting. The table also goes to RUN/evaluation.json; its row `agent_0 alone` is the
trained agent 0 with untrained partners. What one agent gains alone is a habit of its own, what only the whole
trained team gains was learned together; the partner-swap table below it says so agent by agent.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from comlrl.adapters import is_adapter
from comlrl.agents import Agent
from comlrl.centralized import Coordinator, TaggedCentralizedComparatorAdapter
from comlrl.config import ActorCriticRunConfig, PreferenceRunConfig, RunConfig, exit_on_value_error, load, read_settings
from comlrl.data import Row, RowSource
from comlrl.evaluation import Evaluation, evaluate_team
from comlrl.generation import Sampling
from comlrl.loading import Member, check_team, load_team
from comlrl.records import plain, write_text
from comlrl.rewards import Rewards
from comlrl.rollouts import Node, Rollouts, Team, TreeShape, walk
from comlrl.summaries import mean
from comlrl.tasks import Task, load_rewards, load_task
from comlrl.tasks.__main__ import prompt_text
from comlrl.tracking import say, table_text
from comlrl.trainers import (
    ACTOR_CRITIC_ALGORITHMS,
    PREFERENCE_ALGORITHMS,
    REINFORCE_ALGORITHMS,
    CentralizedMAGRPOConfig,
    MAGRPOConfig,
)
from comlrl.trainers.base import build_rollouts
from comlrl.trainers.preference_config import PairSettings


@dataclass
class SavedRun:
    """What a run's folder names, checked, and no model loaded. `trained`, `untrained`: one member a model."""

    config: RunConfig
    args: MAGRPOConfig
    task: Task
    trained: list[Member]
    untrained: list[Member]

    def __post_init__(self) -> None:
        args = self.args
        self.shape = TreeShape(num_turns=args.num_turns or 1, num_generations=1, discount=args.discount)
        stops = tuple(args.stop_strings)
        self.sampling = Sampling(args.max_new_tokens, args.temperature, args.top_p, args.top_k, stops)
        if self.shape.num_turns > 1 and self.task.transition is None:
            raise ValueError(f"args.num_turns={args.num_turns}: task {self.task.name} has no transition")

    def rewards(self) -> Rewards:
        functions, weights = load_rewards(self.config.reward, self.task)
        return Rewards(
            functions,
            self.config.num_agents,
            weights=weights,
            batch_size=self.args.reward_batch_size,
            timeout=self.args.reward_timeout,
            on_error=self.args.reward_on_error,
        )

    def rollouts(self, agents: Sequence[Agent], rewards: Rewards) -> Rollouts:
        args, task, team = self.args, self.task, Team(self.config.num_agents)
        if isinstance(args, (CentralizedMAGRPOConfig, PairSettings)) and args.collaboration_mode == "centralized":
            adapter = TaggedCentralizedComparatorAdapter()
            team = Coordinator(adapter, self.config.num_agents, args.unparsable_reward)
        return build_rollouts(agents, rewards, task.formatters, task.transition, team, args)


def read_run(folder: Path, model_dir: str | None, overrides: Sequence[str]) -> SavedRun:
    """Raises ValueError: no run's folder, no saved models, or settings that do not fit."""
    if not (folder / "config.yaml").is_file():
        what = "is no run's folder, it has no config.yaml" if folder.is_dir() else "does not exist"
        raise ValueError(f"RUN={folder} {what} (working directory: {Path.cwd()})")
    path = str(folder / "config.yaml")
    algorithm = read_settings(path, []).get("algorithm")
    kind: type[RunConfig] = RunConfig
    if algorithm in ACTOR_CRITIC_ALGORITHMS:
        kind = ActorCriticRunConfig
    elif algorithm in PREFERENCE_ALGORITHMS:
        kind = PreferenceRunConfig
    config = load(kind, path, overrides, choose_config)
    args: MAGRPOConfig = config.args
    task = load_task(config.task, config.num_agents, config.task_args)
    count = config.num_models
    models = Path(model_dir or config.save_dir or folder / "model")
    saved = [str(models / f"agent_{i}") for i in range(count)]
    for path in saved:
        if not Path(path, "config.json").is_file() and not is_adapter(path):
            raise ValueError(
                f"no saved model in {path}: a training script saves its models when it ends, and "
                "trainer.save_model(folder) at any time; --model-dir says where they are"
            )
    options = (config.model_config, *args.model_options)
    trained = check_team(None, saved, count, None, *options)
    untrained = check_team(None, config.models or [config.model] * count, count, config.tokenizers, *options)
    untrained = [replace(member, name=f"untrained {member.name}") for member in untrained]
    return SavedRun(config, args, task, trained, untrained)


def choose_config(raw: dict[str, Any]) -> dict[str, type]:
    """The class of `args` follows from `algorithm`."""
    algorithm = raw.get("algorithm")
    known: dict[str, tuple[type, type]] = {**REINFORCE_ALGORITHMS, **ACTOR_CRITIC_ALGORITHMS, **PREFERENCE_ALGORITHMS}
    if algorithm not in known:
        raise ValueError(
            f"config.yaml: algorithm={algorithm!r} must be one of {', '.join(known)} "
            "(None: no training script wrote it; use trainer.evaluate() then)"
        )
    return {"args": known[algorithm][0]}


def load_agents(members: Sequence[Member]) -> list[Agent]:
    """One agent a member; nothing trains here, so members of the same weights are one agent, loaded once."""
    keys = [(member.source, member.tokenizer, member.device) for member in members]
    distinct = dict(zip(keys, members))
    loaded = dict(zip(distinct, load_team(list(distinct.values()))))
    return [loaded[key] for key in keys]


def score_teams(
    run: SavedRun, rewards: Rewards, agents: list[Agent], rows: list[tuple[int, Row]], samples: int
) -> dict[str, Evaluation]:
    """An evaluation a team, seeded as in `trainer.evaluate()`. `agents`: the trained, then the untrained."""
    count = len(run.trained)
    trained, untrained = agents[:count], agents[count:]
    teams = {"untrained": untrained, "trained": trained}
    for i in range(count if count > 1 else 0):
        teams[f"agent_{i} alone"] = [*untrained[:i], trained[i], *untrained[i + 1 :]]
    for i in range(count if count > 2 else 0):  # of two agents, all but one are the other one alone
        teams[f"all but agent_{i}"] = [*trained[:i], untrained[i], *trained[i + 1 :]]
    evaluations = {}
    for name, team in teams.items():
        print(f"scoring: {name}", file=sys.stderr)
        evaluations[name] = evaluate_team(
            run.rollouts(team, rewards),
            rows,
            run.shape,
            run.sampling,
            num_agents=count,
            generations=samples,
            batch_size=run.args.eval_batch_size,
            seed_key=(run.args.seed, "eval"),
        )
        if not evaluations[name].records:
            raise ValueError(f"{name}: every row's prompt is too long; see args.max_prompt_length")
    return evaluations


def table_row(name: str, evaluation: Evaluation, run: SavedRun, samples: int) -> dict[str, Any]:
    """Rewards (of several turns: returns), and lengths of each agent's answers (the sampled ones, if any)."""
    metrics, score = evaluation.metrics, "reward" if run.shape.num_turns == 1 else "return"
    row: dict[str, Any] = {"team": name, f"{score} greedy": metrics[f"{score}_mean"]}
    if samples:
        row[f"{score} sampled"] = metrics[f"sampled/{score}_mean"]
        row[f"best of {samples}"] = metrics["sampled/best_of_k"]
    records = [r for r in evaluation.records if r["kind"] == ("eval_sampled" if samples else "eval")]
    for agent in range(len(run.trained)):
        answers = [record for record in records if record["agent"] == agent]
        row[f"agent_{agent} chars"] = mean(len(answer["completion"]) for answer in answers)
        row[f"agent_{agent} truncated"] = mean(answer["finish_reason"] == "length" for answer in answers)
    return row


def swap_rows(table: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The partner-swap table: each agent before and after training, beside untrained and beside trained partners.

    Of the mean of the samples, or of the greedy answers if there are none. `partners matter`: how much more the
    agent's training is worth beside trained partners; 0 where each agent learned a habit of its own.
    """
    score = next(
        key for key in ("return sampled", "reward sampled", "return greedy", "reward greedy") if key in table[0]
    )
    value = {row["team"]: row[score] for row in table}
    rows = []
    for i in range(count if count > 1 else 0):
        without = value[f"agent_{1 - i} alone" if count == 2 else f"all but agent_{i}"]
        alone, nobody, everybody = value[f"agent_{i} alone"], value["untrained"], value["trained"]
        rows.append(
            {
                "agent": f"agent_{i}",
                "untrained, partners untrained": nobody,
                "trained, partners untrained": alone,
                "untrained, partners trained": without,
                "trained, partners trained": everybody,
                "partners matter": (everybody - without) - (alone - nobody),
            }
        )
    return rows


def transcript(root: Node, full: bool) -> str:
    """One trajectory: what each role answers in each turn; `full`: also what it is asked, and the reward."""
    lines = [f"\nrow {root.row_id}"] if full else []
    for node in walk([root]):
        lines += [f"turn {node.turn + 1}"] if root.children else []
        for role, (prompt, answer) in enumerate(zip(node.role_prompts, node.responses[0], strict=True)):
            lines += [f"agent_{role} is asked: {prompt_text(prompt)}"] if full else []
            lines.append(f"agent_{role}: {answer}")
        if len(node.completions) < len(node.responses[0]) and not any(node.responses[0]):
            lines.append(f"the coordinator wrote no agent's section: {node.completions[0][0].text}")
        lines += [f"reward: {node.rewards[0]}"] if full else []
    return "\n".join(lines)


def chat_rewards(task: Task) -> Rewards:
    """Always 0: a typed prompt has no solution to score by, but without a reward no next turn follows."""
    try:
        for formatter in task.formatters:
            formatter({"prompt": "Hello"})
    except KeyError as error:
        raise ValueError(f"--chat: task {task.name} needs a row's {error} beside its prompt") from error
    return Rewards(lambda *completions: [0.0] * len(completions[0]), len(task.formatters))


def chat(run: SavedRun, rollouts: Rollouts, sampled: bool) -> None:
    """Answer each line of stdin as the prompt of a row, up to an empty line."""
    say("One prompt a line; an empty line ends.")
    number, key = 0, (run.args.seed, "chat")
    while text := sys.stdin.readline().strip():
        row = (number, {"prompt": text})
        roots, _ = rollouts.expand([row], run.shape, run.sampling, key, greedy=not sampled)
        too_long = f"left out: this prompt has more than {min(rollouts.prompt_limits)} tokens"
        say(transcript(roots[0], full=False) if roots else too_long)
        number += 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m comlrl.evaluate", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("run", metavar="RUN", type=Path, help="a run's folder, such as runs/quickstart")
    add("overrides", nargs="*", metavar="key=value", help="changes of the run's settings")
    add("--rows", type=int, metavar="N", help="evaluation rows; default: as in the run's own evaluations")
    add("--samples", type=int, default=4, metavar="K", help="sampled answers a row (4); 0: only greedy ones")
    add("--show", type=int, default=0, metavar="N", help="rows to print with the trained team's answers")
    add("--model-dir", metavar="DIR", help="folder of agent_0, agent_1, ...; default: where the run saved")
    add("--chat", action="store_true", help="score nothing, answer prompts typed on stdin")
    add("--sampled", action="store_true", help="with --chat: sampled answers instead of greedy ones")
    command = parser.parse_intermixed_args(argv)
    if min(command.rows or 0, command.samples, command.show) < 0:
        raise ValueError("--rows, --samples and --show must not be negative")
    if command.sampled and not command.chat:
        raise ValueError("--sampled goes with --chat; --samples K adds sampled answers to the table")
    return command


def main(argv: Sequence[str] | None = None) -> None:
    with exit_on_value_error():
        command = parse(argv)
        run = read_run(command.run, command.model_dir, command.overrides)
        limit = run.args.eval_num_samples if command.rows is None else command.rows
        rows = RowSource(run.task.eval_rows, "eval_rows", run.args.seed, shuffle=False).first(limit)
        if not rows and not command.chat:
            raise ValueError(f"task {run.task.name}: no evaluation rows (args.eval_num_samples={limit})")
        rewards = chat_rewards(run.task) if command.chat else run.rewards()
        agents = load_agents(run.trained if command.chat else run.trained + run.untrained)
        rollouts = run.rollouts(agents[: len(run.trained)], rewards)
    with closing(rewards):
        if command.chat:
            chat(run, rollouts, command.sampled)
            return
        evaluations = score_teams(run, rewards, agents, rows, command.samples)
        shown, _ = rollouts.expand(rows[: command.show], run.shape, run.sampling, (), greedy=True)
    table = [table_row(name, evaluation, run, command.samples) for name, evaluation in evaluations.items()]
    kind = "sampled" if command.samples else "greedy"
    scored = f"{run.task.name}: {evaluations['trained'].metrics['rows']} of {len(rows)} rows"
    say("\n".join([*rewards.incidents, *(transcript(root, full=True) for root in shown), ""]))
    say(table_text(table, f"{scored}; characters and truncated share of the {kind} answers"))
    swaps = swap_rows(table, len(run.trained))
    if swaps:
        say(table_text(swaps, f"partner swap: {'sampled' if command.samples else 'greedy'} scores"))
    metrics = {name: evaluation.metrics for name, evaluation in evaluations.items()}
    report = {"rows": len(rows), "samples": command.samples, "table": table, "partner_swap": swaps, "metrics": metrics}
    write_text(command.run / "evaluation.json", json.dumps(plain(report, nonfinite=[]), indent=2) + "\n")
    say(f"written: {command.run / 'evaluation.json'}")


if __name__ == "__main__":
    main()
