"""A trainer's state into a checkpoint and back: what goes on exactly, what may change, what may not."""

import hashlib
import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from comlrl import checkpoint
from comlrl.checkpoint import CheckpointError, Contents
from comlrl.data import RowSource
from comlrl.generation import Completion
from comlrl.rollouts import Node
from comlrl.version import __version__

if TYPE_CHECKING:
    from comlrl.trainers.base import TeamTrainer

# Settings that decide what the run is. Every other one may change on resume, and the change is logged.
FIXED_SETTINGS = (
    "num_agents",
    "num_turns",
    "joint_mode",
    "seed",
    "shuffle",
    "advantage_mode",
    "reference_kl_enabled",
)
HASHED_ROWS = 20_000  # of a longer dataset, rows at even distances: a resume has to start in seconds


def gather(trainer: "TeamTrainer", sequence: int) -> Contents:
    """Everything that the rest of the run depends on."""
    assert trainer.run is not None
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for agent, engine in zip(trainer.agents, trainer.engines):
        tensors[f"{agent.name}/weights.safetensors"] = checkpoint.model_tensors(agent.model)
        tensors[f"{agent.name}/optimizer.safetensors"] = engine.state_tensors()
    state = {
        "version": checkpoint.VERSION,
        "comlrl": __version__,
        "trainer_class": type(trainer).__name__,
        "sequence": sequence,
        "run_id": trainer.run.id,
        "run_folder": str(trainer.run.folder.resolve()),
        "wandb": trainer.run.wandb_state(),
        "step": trainer.step,
        "counters": trainer.counters(),
        "engines": [engine.counters() for engine in trainer.engines],
        "evaluations": trainer.evaluations,
        "pending": trainer.pending,
        "buffer": [node_to_json(root, trainer.rows.sized) for root in trainer.buffer],
        "rng": checkpoint.rng_state(),
        "callbacks": {name: callback.state_dict() for name, callback in stateful_callbacks(trainer).items()},
        "settings": asdict(trainer.args),
        "models": [
            {
                "name": agent.name,
                "source": member.source if isinstance(member.source, str) else None,
                "tokenizer": tokenizer_hash(agent.tokenizer),
                "config": agent.model.config.to_dict(),
                "generation": generation_config(agent.model),
            }
            for agent, member in zip(trainer.agents, trainer.members)
        ],
        "references": [
            {"source": m["source"], "hash": value}
            for m, value in zip([_source(member) for member in trainer.members], trainer.reference_hashes)
        ],
        "data": {"rows": len(trainer.rows), "fingerprint": rows_hash(trainer.rows)},
    }
    return Contents(json.loads(json.dumps(state, default=_refuse)), tensors)


def restore(trainer: "TeamTrainer", contents: Contents, root: Path) -> list[str]:
    """Put the state back; returns lines about what has changed. Checks everything before anything is touched."""
    state = contents.state
    notes = check(trainer, contents)
    for index, (agent, engine) in enumerate(zip(trainer.agents, trainer.engines)):
        checkpoint.load_model_tensors(agent.model, contents.tensors[f"{agent.name}/weights.safetensors"], agent.name)
        agent.weights_changed()
        engine.load_state(contents.tensors[f"{agent.name}/optimizer.safetensors"], state["engines"][index])
    load_references(trainer, state["references"], root)
    trainer.set_counters(state["counters"])
    trainer.evaluations = [(step, metrics) for step, metrics in state["evaluations"]]
    trainer.pending = dict(state["pending"])
    trainer.buffer = [node_from_json(data, trainer.rows) for data in state["buffer"]]
    for name, callback in stateful_callbacks(trainer).items():
        if name in state["callbacks"]:
            callback.load_state_dict(state["callbacks"][name])
    checkpoint.set_rng_state(state["rng"])
    return notes


def check(trainer: "TeamTrainer", contents: Contents) -> list[str]:
    """Refuse, by name, what cannot go on; list the settings that differ."""
    state, saved = contents.state, contents.state["settings"]
    own = json.loads(json.dumps(asdict(trainer.args)))
    if state["trainer_class"] != type(trainer).__name__:
        raise CheckpointError(f"the checkpoint is of {state['trainer_class']}, this is {type(trainer).__name__}")
    for key in FIXED_SETTINGS:
        if saved.get(key) != own[key]:
            raise CheckpointError(f"{key} was {saved.get(key)!r} and is {own[key]!r}: it cannot change on resume")
    if len(state["models"]) != len(trainer.agents):
        raise CheckpointError(f"the checkpoint has {len(state['models'])} models, this team {len(trainer.agents)}")
    for model, agent in zip(state["models"], trainer.agents):
        if model["tokenizer"] != tokenizer_hash(agent.tokenizer):
            raise CheckpointError(
                f"{agent.name}: the tokenizer is not the checkpoint's; token ids would change meaning"
            )
        where = f"{agent.name} (model shape)"
        checkpoint.check_tensors(agent.model, contents.tensors[f"{agent.name}/weights.safetensors"], where)
    data = state["data"]
    fingerprint = rows_hash(trainer.rows)
    if data["rows"] != len(trainer.rows):
        raise CheckpointError(
            f"train_dataset had {data['rows']} rows and has {len(trainer.rows)}: rows cannot change on resume"
        )
    if fingerprint is None or data["fingerprint"] is None:
        warnings.warn(
            "the rows of train_dataset cannot be compared with the checkpoint's; make sure they are the same",
            stacklevel=2,
        )
    elif fingerprint != data["fingerprint"]:
        raise CheckpointError("train_dataset has other rows than the checkpoint's: rows cannot change on resume")
    known = [f.name for f in fields(trainer.args)]
    return [
        f"resumed with {key}={own[key]!r} (was {saved[key]!r})"
        for key in known
        if key in saved and saved[key] != own[key]
    ]


def checkpoint_bytes(model: torch.nn.Module) -> int:
    """Weights, and two moments a trained parameter, in fp32."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return 4 * (sum(t.numel() for t in checkpoint.model_tensors(model).values()) + 2 * trained)


# ---- references -----------------------------------------------------------------------------------------------------


def reference_hashes(trainer: "TeamTrainer") -> list[str]:
    """Computed once, when training starts: the references are frozen."""
    return [checkpoint.tensors_hash(checkpoint.model_tensors(model)) for model in trainer.references]


def save_references(trainer: "TeamTrainer", root: Path) -> None:
    """References of agents given as loaded modules have no name to load them from: kept once a run, beside the checkpoints."""
    for member, model, digest in zip(trainer.members, trainer.references, trainer.reference_hashes):
        path = root / "references" / f"{member.name}-{digest[:16]}.safetensors"
        if not isinstance(member.source, str) and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            save_file(
                {k: v.detach().cpu().contiguous() for k, v in checkpoint.model_tensors(model).items()},
                partial,
            )
            partial.rename(path)


def load_references(trainer: "TeamTrainer", saved: list[dict[str, Any]], root: Path) -> None:
    for index, (model, entry) in enumerate(zip(trainer.references, saved)):
        name = trainer.members[index].name
        if trainer.reference_hashes[index] == entry["hash"]:
            continue
        path = root / "references" / f"{name}-{entry['hash'][:16]}.safetensors"
        if not path.exists():
            raise CheckpointError(
                f"the reference of {name} ({entry['source'] or 'a loaded model'}) is not the one that the checkpoint was "
                "trained against: its weights have another hash; give the model that the run started from"
            )
        checkpoint.load_model_tensors(model, load_file(path), f"reference of {name}")
        trainer.reference_hashes[index] = entry["hash"]


def _source(member: Any) -> dict[str, Any]:
    return {"source": member.source if isinstance(member.source, str) else None}


# ---- fingerprints ---------------------------------------------------------------------------------------------------


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    vocabulary = tokenizer.get_vocab()
    parts = [
        json.dumps(vocabulary, sort_keys=True),
        json.dumps({key: str(value) for key, value in tokenizer.special_tokens_map.items()}, sort_keys=True),
        str(tokenizer.chat_template),
    ]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "backslashreplace")).hexdigest()


def generation_config(model: Any) -> dict[str, Any] | None:
    return model.generation_config.to_dict() if model.generation_config is not None else None


def rows_hash(rows: RowSource) -> str | None:
    """Of the rows' contents; None for a stream, or rows that JSON cannot write."""
    if not rows.sized:
        return None
    digest = hashlib.sha256(str(len(rows)).encode())
    step = max(len(rows) // HASHED_ROWS, 1)
    try:
        for index in range(0, len(rows), step):
            digest.update(json.dumps(rows.data[index], sort_keys=True).encode("utf-8", "backslashreplace"))
    except TypeError:
        return None
    return digest.hexdigest()


def stateful_callbacks(trainer: "TeamTrainer") -> dict[str, Any]:
    """The user's callbacks that have state_dict and load_state_dict, by name."""
    named: dict[str, Callable | None] = {
        **{f"reward_{i}": function for i, function in enumerate(trainer.reward_functions)},
        **{f"formatter_{i}": formatter for i, formatter in enumerate(trainer.formatters)},
        "external_transition": trainer.external_transition,
        "eval_logger": trainer.eval_logger,
        "eval_aggregator": trainer.eval_aggregator,
    }
    found = {}
    for name, callback in named.items():
        has_state = hasattr(callback, "state_dict")
        if has_state != hasattr(callback, "load_state_dict"):
            raise ValueError(f"{name} has one of state_dict and load_state_dict; a resumable callback needs both")
        if has_state:
            if name.startswith("reward_") and trainer.args.reward_timeout is not None:
                raise ValueError(
                    f"{name} has a state_dict, but with reward_timeout={trainer.args.reward_timeout} it runs in a worker "
                    "process whose state is lost; set reward_timeout to none, or keep no state in the reward"
                )
            found[name] = callback
    return found


# ---- trees ----------------------------------------------------------------------------------------------------------


def node_to_json(node: Node, rows_by_id: bool) -> dict[str, Any]:
    data = {f.name: getattr(node, f.name) for f in fields(Node)}
    data["row"] = None if rows_by_id else node.row
    data["completions"] = [[asdict(c) for c in group] for group in node.completions]
    data["children"] = [child and node_to_json(child, rows_by_id) for child in node.children]
    data["baseline"] = node.baseline and node_to_json(node.baseline, rows_by_id)
    return data


def node_from_json(data: dict[str, Any], rows: RowSource) -> Node:
    data = dict(data)
    data["row"] = dict(rows.data[data["row_id"]]) if data["row"] is None else data["row"]
    data["path"] = tuple(data["path"])
    data["joint_actions"] = [tuple(action) for action in data["joint_actions"]]
    data["completions"] = [[Completion(**c) for c in group] for group in data["completions"]]
    data["children"] = [child and node_from_json(child, rows) for child in data["children"]]
    data["baseline"] = data["baseline"] and node_from_json(data["baseline"], rows)
    return Node(**data)


def _refuse(value: Any) -> Any:
    raise ValueError(
        f"a checkpoint cannot hold {type(value).__name__} ({value!r:.80}): rows of a stream and states of callbacks have to be "
        "numbers, strings, lists and mappings"
    )
