"""Preference data: joint answers that were rewarded -> pairs -> files, and back.

A pair is two joint answers of the team to the same prompts, of which one earned more. `node_pairs` makes them from a
node of a rollout tree, `write_pairs` and `read_pairs` are the file; a user's own file needs only texts.
"""

import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from comlrl.agents import Agent, Prompt
from comlrl.generation import Completion
from comlrl.records import write_text
from comlrl.rollouts import Node, prompt_text

PAIR_SELECTIONS = ("reward_gap", "all", "random")
# Columns of Parquet that hold JSON.
PACKED = ("prompts", "prompt_ids", "chosen", "rejected", "role_prompts", "role_texts", "reference", "about")
Ids = Callable[[int, Completion], list[int]]  # agent and its answer -> token ids, as that agent's model reads them


@dataclass
class JointAnswer:
    """What every agent said: token ids with the final EOS, and text without it. `reward`: of this turn, `value`: what
    was compared (the return), None in a file that says only which one is better. `truncated`: an agent's was cut off.
    """

    token_ids: list[list[int]]
    texts: list[str]
    reward: float | None = None
    value: float | None = None
    source: str = "policy"  # or the comparator that wrote it
    truncated: bool = False


@dataclass
class Pair:
    """Two joint answers to the same prompts. `roles`: what a reward model reads as prompts and answers where a
    coordinator writes for several roles; else the agents' own."""

    row_id: int
    turn: int
    name: str
    prompts: list[Prompt]  # one an agent
    prompt_ids: list[list[int]]
    chosen: JointAnswer
    rejected: JointAnswer
    role_prompts: list[str] = field(default_factory=list)
    role_texts: list[list[str]] = field(default_factory=list)  # of the chosen and of the rejected answer
    # Log-probs under the reference, [agent][chosen, rejected], of the reference called `reference_key`.
    reference: list[list[float]] | None = None
    reference_key: str | None = None

    @property
    def margin(self) -> float | None:
        chosen, rejected = self.chosen.value, self.rejected.value
        return None if chosen is None or rejected is None else chosen - rejected


# ---- from joint answers to pairs ------------------------------------------------------------------------------------


@dataclass
class Candidate:
    """A joint answer that may stand in a pair, with what the roles said."""

    answer: JointAnswer
    role_texts: list[str]


def rewarded_answers(
    node: Node, use_return: bool, keep_truncated: bool
) -> Iterator[tuple[int, list[Completion], float, bool]]:
    """Number, completions, value and whether one was cut off, of each joint answer that may stand in a pair."""
    values = node.returns if use_return else node.rewards
    for number, (action, value) in enumerate(zip(node.joint_actions, values, strict=True)):
        said = [node.completions[agent][k] for agent, k in enumerate(action)]
        truncated = any(completion.truncated for completion in said)
        if value is not None and (keep_truncated or not truncated):
            yield number, said, value, truncated


def candidates(node: Node, ids: Ids, use_return: bool, keep_truncated: bool, source: str = "policy") -> list[Candidate]:
    """The rewarded joint answers of a node. `use_return`: compare returns, not the turn's own rewards."""
    found = []
    for number, said, value, truncated in rewarded_answers(node, use_return, keep_truncated):
        answer = JointAnswer(
            token_ids=[ids(agent, completion) for agent, completion in enumerate(said)],
            texts=[completion.text for completion in said],
            reward=node.rewards[number],
            value=value,
            source=source,
            truncated=truncated,
        )
        found.append(Candidate(answer, list(node.responses[number])))
    return found


def node_pairs(
    node: Node,
    first: Sequence[Candidate],
    second: Sequence[Candidate] | None,
    *,
    selection: str,
    limit: int | None,
    seed: int,
    counts: Counter[str],
) -> list[Pair]:
    """Pairs of a node, the better answer chosen, best pairs first by `selection`, at most `limit`.

    Compares all of `first` with each other or, if `second` is given (a comparator's answers), each of `first` with each
    of `second`. Ties, identical texts and pairs that are there already give none; `counts` says how many, and how many
    fell to the limit.

    selection: reward_gap, largest margin first; all, in order of the answers; random; comparator_reward, best answer of
    the comparator first, then the largest margin.
    """
    if second is None:
        meetings = [(one, other) for i, one in enumerate(first) for other in first[i + 1 :]]
    else:
        meetings = [(one, other) for one in first for other in second]
    pairs: list[tuple[Pair, float]] = []
    seen: set[tuple] = set()
    for one, other in meetings:
        a, b = one.answer, other.answer
        assert a.value is not None
        assert b.value is not None
        # One text can come as other tokens, and tokens can differ only in special ones: no preference either way.
        if a.texts == b.texts or a.token_ids == b.token_ids:
            counts["identical"] += 1
            continue
        if a.value == b.value:
            counts["ties"] += 1
            continue
        chosen, rejected = (one, other) if a.value > b.value else (other, one)
        key = (tuple(chosen.answer.texts), tuple(rejected.answer.texts))
        if key in seen:
            counts["duplicates"] += 1
            continue
        seen.add(key)
        pair = Pair(
            row_id=node.row_id,
            turn=node.turn,
            name=f"{node.row_id}:{'.'.join(map(str, node.path))}:{len(pairs)}",
            prompts=list(node.prompts),
            prompt_ids=[list(ids) for ids in node.prompt_ids],
            chosen=chosen.answer,
            rejected=rejected.answer,
            role_prompts=[prompt_text(prompt) for prompt in node.role_prompts],
            role_texts=[chosen.role_texts, rejected.role_texts],
        )
        pairs.append((pair, b.value))
    ranked = [pair for pair, _ in rank_pairs(pairs, selection, seed)]
    kept = ranked if limit is None else ranked[:limit]
    counts["pairs"] += len(kept)
    counts["over_limit"] += len(ranked) - len(kept)
    return kept


def rank_pairs(pairs: Sequence[tuple[Pair, float]], selection: str, seed: int) -> list[tuple[Pair, float]]:
    """`pairs`: with the reward of each one's second answer, the comparator's. Sorting keeps the order of equals."""
    if selection == "all":
        return list(pairs)
    if selection == "random":
        return random.Random(seed).sample(list(pairs), len(pairs))
    if selection == "reward_gap":
        return sorted(pairs, key=lambda entry: -margin_of(entry[0]))
    assert selection == "comparator_reward", selection
    return sorted(pairs, key=lambda entry: (-entry[1], -margin_of(entry[0])))


def margin_of(pair: Pair) -> float:
    assert pair.margin is not None
    return pair.margin


# ---- JSON -----------------------------------------------------------------------------------------------------------


def pair_to_json(pair: Pair) -> dict[str, Any]:
    return asdict(pair) | {"margin": pair.margin}


def pair_from_json(data: Mapping[str, Any]) -> Pair:
    values = {key: value for key, value in data.items() if key in Pair.__dataclass_fields__}
    return Pair(**{**values, "chosen": JointAnswer(**data["chosen"]), "rejected": JointAnswer(**data["rejected"])})


# ---- files ----------------------------------------------------------------------------------------------------------


def write_pairs(path: Path, pairs: Sequence[Pair], about: Mapping[str, Any]) -> None:
    """One line or row a pair: JSONL, or Parquet for a name that ends in .parquet.

    `about`: what all of them share (generation settings, hashes of the models that wrote them); stands in each line, so
    that lines of several files can be put together.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [pair_to_json(pair) | {"about": dict(about)} for pair in pairs]
    if path.suffix == ".parquet":
        # Nested parts as JSON: a column of Parquet has one type, and a prompt is a string or a list of messages.
        columns = {key: [json.dumps(line[key]) if key in PACKED else line[key] for line in lines] for key in lines[0]}
        partial = path.with_name(path.name + ".tmp")
        pyarrow.parquet.write_table(pyarrow.table(columns), partial)
        os.replace(partial, path)
    else:
        write_text(path, "".join(json.dumps(line) + "\n" for line in lines))


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a preference file; ValueError says which one cannot be used and why. Reads no model."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"preference_file={str(path)!r}: no such file (working directory: {Path.cwd()})")
    lines = list(_raw_lines(file))
    if not lines:
        raise ValueError(f"preference_file={str(path)!r} has no pairs")
    return lines


def _raw_lines(file: Path) -> Iterator[dict[str, Any]]:
    if file.suffix == ".parquet":
        for row in pyarrow.parquet.read_table(file).to_pylist():
            yield {key: _unpacked(key, value) for key, value in row.items()}
        return
    with file.open(encoding="utf-8") as stream:
        for number, text in enumerate(stream, 1):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
            except ValueError as error:
                raise ValueError(f"preference_file={str(file)!r}, line {number}: no JSON ({error})") from error
            if not isinstance(line, dict):
                raise ValueError(f"preference_file={str(file)!r}, line {number}: must be a mapping")
            yield line


def _unpacked(key: str, value: Any) -> Any:
    """A user's own file may have real lists."""
    return json.loads(value) if key in PACKED and isinstance(value, str) else value


def check_lines(lines: Sequence[Mapping[str, Any]], num_agents: int, where: str) -> None:
    """Refuse what no model is needed to refuse: missing parts, and a wrong number of agents."""
    for number, line in enumerate(lines, 1):
        place = f"preference_file={where!r}, pair {number}"
        for key in ("chosen", "rejected"):
            if key not in line:
                raise ValueError(
                    f"{place}: {key!r} is missing; a line needs prompt (or prompts, one an agent), chosen and rejected "
                    "(lists of one text an agent)"
                )
            texts = line[key]["texts"] if isinstance(line[key], Mapping) else line[key]
            if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
                raise ValueError(f"{place}: {key} must be a list of texts, one an agent")
            if len(texts) != num_agents:
                raise ValueError(f"{place}: {key} has {len(texts)} texts for num_agents={num_agents}")
        if "prompts" not in line and "prompt" not in line:
            raise ValueError(f"{place}: prompt (one for all) or prompts (one an agent) is missing")
        if "prompts" in line and len(line["prompts"]) != num_agents:
            raise ValueError(f"{place}: {len(line['prompts'])} prompts for num_agents={num_agents}")


def read_pairs(
    lines: Sequence[Mapping[str, Any]],
    agents: Sequence[Agent],
    chat_template: str,
    limits: Sequence[int],
    longest: int,
    keys: Sequence[str],
    counts: Counter[str],
) -> list[Pair]:
    """Pairs of a file for these agents.

    Token ids are taken where the file has them and was written by agents of the same tokenizers (`keys`, one an agent);
    else texts are encoded and EOS follows, unless the answer was cut off. Pairs of identical texts, with a prompt over
    the limit (tokens, one an agent), or an answer longer than `longest` tokens are left out and counted.
    """
    pairs = []
    for number, line in enumerate(lines):
        prompts = list(line.get("prompts") or [line["prompt"]] * len(agents))
        prompt_ids = [agent.encode(prompt, chat_template) for agent, prompt in zip(agents, prompts, strict=True)]
        own = (line.get("about") or {}).get("tokenizers") == list(keys)
        chosen, rejected = (_read_answer(line[key], agents, own) for key in ("chosen", "rejected"))
        if chosen.texts == rejected.texts:
            counts["identical"] += 1
            continue
        over = any(len(ids) > limit for ids, limit in zip(prompt_ids, limits))
        if over or any(len(ids) > longest for answer in (chosen, rejected) for ids in answer.token_ids):
            counts["too_long"] += 1
            continue
        pair = Pair(
            row_id=int(line.get("row_id", number)),
            turn=int(line.get("turn", 0)),
            name=str(line.get("name", number)),
            prompts=prompts,
            prompt_ids=prompt_ids,
            chosen=chosen,
            rejected=rejected,
            role_prompts=list(line.get("role_prompts") or [prompt_text(prompt) for prompt in prompts]),
            role_texts=[list(texts) for texts in line.get("role_texts") or [chosen.texts, rejected.texts]],
            reference=line.get("reference") if own else None,
            reference_key=line.get("reference_key") if own else None,
        )
        pairs.append(pair)
    counts["pairs"] += len(pairs)
    return pairs


def _read_answer(data: Any, agents: Sequence[Agent], own: bool) -> JointAnswer:
    if not isinstance(data, Mapping):
        return JointAnswer([encode_answer(agent, text) for agent, text in zip(agents, data)], list(data))
    answer = JointAnswer(**{key: value for key, value in data.items() if key in JointAnswer.__dataclass_fields__})
    if not own:
        answer.token_ids = [
            encode_answer(agent, text, not answer.truncated) for agent, text in zip(agents, answer.texts)
        ]
    return answer


def encode_answer(agent: Agent, text: str, ended: bool = True) -> list[int]:
    """A text that others wrote as an answer of this agent: its tokens, and EOS if it ended. Never empty, so that it has
    a log-prob: to say nothing is to end at once."""
    ids = list(agent.tokenizer(text, add_special_tokens=False)["input_ids"])
    if not agent.eos_ids and (ended or not ids):
        raise ValueError(f"{agent.name}: the model has no EOS token, so a given text cannot end")
    eos = agent.tokenizer.eos_token_id if agent.tokenizer.eos_token_id is not None else agent.eos_ids[0]
    return [*ids, eos] if ended or not ids else ids
