"""A trainer's state into a checkpoint and back: what goes on exactly, what may change, what may not."""

import copy
import hashlib
import json
import warnings
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from comlrl import checkpoint
from comlrl.batches import Sample
from comlrl.checkpoint import CheckpointError, Contents
from comlrl.config import to_dict, without_secrets
from comlrl.data import RowSource
from comlrl.encoding import decode, encode
from comlrl.generation import Completion
from comlrl.loading import Member
from comlrl.records import plain
from comlrl.rollouts import Node
from comlrl.trained import TrainedModel
from comlrl.version import __version__

if TYPE_CHECKING:
    from comlrl.trainers.checkpointing import Checkpointing

# Settings that decide what the run is. Every other one may change on resume, and the change is logged.
FIXED_SETTINGS = (
    "num_agents",
    "num_turns",
    "joint_mode",
    "seed",
    "shuffle",
    "advantage_mode",
    "reference_kl_enabled",
    "lora",
)
# Of a model's config, what may differ although the model is the same.
LOOSE_CONFIG = ("transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")
HASHED_ROWS = 20_000  # of a longer dataset, rows at even distances: a resume has to start in seconds
CALLBACKS = "callbacks.safetensors"


def gather(trainer: "Checkpointing", sequence: int) -> Contents:
    """Everything that the rest of the run depends on, as it is between two pieces of work."""
    assert trainer.run is not None
    tensors: dict[str, dict[str, Tensor]] = {}
    files: dict[str, bytes] = {}
    models = trainer.trained_models()
    for model in models:
        if model.engine is not None:
            weights, moments = model.engine.weights(), model.engine.state_tensors()
            if model.engine.group.leader:  # each model is written once
                tensors[f"{model.name}/weights.safetensors"] = weights
                tensors[f"{model.name}/optimizer.safetensors"] = moments
        files |= {f"{model.name}/{name}": data for name, data in trainer.model_files[model.name].items()}
    moment = trainer.moment or take_moment(trainer)
    kept: dict[str, Tensor] = {}
    callbacks = {name: encode(state, kept, name) for name, state in moment["callbacks"].items()}
    if kept:
        tensors[CALLBACKS] = kept
    state = {
        "version": checkpoint.VERSION,
        "comlrl": __version__,
        "trainer_class": type(trainer).__name__,
        "sequence": sequence,
        "run_id": trainer.run.id,
        "run_folder": str(trainer.run.folder.resolve()),
        "record_sizes": trainer.run.sizes(),
        "wandb": trainer.run.wandb_state(),
        "step": trainer.step,
        "counters": {**trainer.counters(), "reward_counters": moment["reward_counters"]},
        "limits": {limit.key: limit.value for limit in trainer.limits()},
        "engines": engine_counters(trainer),
        "evaluations": trainer.evaluations,
        "pending": trainer.pending,
        "buffer": [node_to_json(root) for root in trainer.buffer],
        "chunks": trainer.chunks,
        "samples": [[[sample_to_json(s) for s in group] for group in agent] for agent in trainer.prepared],
        "rng": moment["rng"],
        "callbacks": callbacks,
        "settings": to_dict(trainer.args),
        "config": plain(without_secrets(trainer.run_config)),
        "models": [
            {
                "name": model.name,
                "source": model.source,
                "tokenizer": tokenizer_hash(model.agent.tokenizer),
                "folder": model.folder,
                "base_hash": base_hash(model),
            }
            for model in models
        ],
        "references": [
            {"source": source_of(member), "hash": digest}
            for member, digest in zip(trainer.members, trainer.reference_hashes)
        ],
        "data": {"rows": len(trainer.rows), "fingerprint": trainer.rows_fingerprint},
    }
    return Contents(state, tensors, files)


def engine_counters(trainer: "Checkpointing") -> list[dict[str, int]]:
    """One a trained model, in every process."""
    engines = [model.engine for model in trainer.trained_models()]
    counters = trainer.world.union(lambda: {place: e.counters() for place, e in enumerate(engines) if e is not None})
    return [counters[place] for place in range(len(engines))]


def take_moment(trainer: "Checkpointing") -> dict[str, Any]:
    """What a piece of work changes before it is done: a rollout draws random numbers and calls rewards.

    Taken before each piece, so that the state before it can be saved when it is given up.
    """
    states = {}
    for name, callback in stateful_callbacks(trainer).items():
        state = callback.state_dict()
        # A module's weights are not copied each time: no rollout trains them.
        states[name] = state if isinstance(callback, torch.nn.Module) else copy.deepcopy(state)
    return {"rng": checkpoint.rng_state(), "callbacks": states, "reward_counters": dict(trainer.rewards.counters)}


def restore(trainer: "Checkpointing", contents: Contents, root: Path) -> list[str]:
    """Put the state back, but for the random numbers; returns lines about what has changed.

    Everything is checked and read before anything is touched. `root`: the folder of the checkpoint.
    """
    state = contents.state
    notes = check(trainer, contents)
    references = reference_tensors(trainer, state["references"], root)
    buffer = buffer_from_json(state, trainer.rows)
    kept = contents.tensors.get(CALLBACKS, {})
    callbacks = {name: decode(value, kept, name) for name, value in state["callbacks"].items()}
    # From here on nothing can be refused.
    for model, counters in zip(trainer.trained_models(), state["engines"], strict=True):
        if model.engine is not None:
            model.engine.load_weights(contents.tensors[f"{model.name}/weights.safetensors"], model.name)
            model.engine.load_state(contents.tensors[f"{model.name}/optimizer.safetensors"], counters)
            model.engine.refresh(model.agent)
    for index, tensors in references.items():
        if index in trainer.references:
            trainer.references[index].load_weights(tensors, f"reference of {trainer.agents[index].name}")
        trainer.reference_hashes[index] = state["references"][index]["hash"]
    trainer.set_counters(state["counters"])
    for limit in trainer.limits():
        if state["settings"].get(limit.key) == limit.value:  # what memory allows is remembered, unless it was set anew
            limit.value = state["limits"][limit.key]
    trainer.evaluations = [(step, metrics) for step, metrics in state["evaluations"]]
    trainer.pending = dict(state["pending"])
    trainer.buffer, trainer.chunks = buffer, state["chunks"]
    trainer.prepared = [[[sample_from_json(s) for s in group] for group in agent] for agent in state["samples"]]
    for name, callback in stateful_callbacks(trainer).items():
        if name in callbacks:
            callback.load_state_dict(callbacks[name])
    return notes


# ---- what may change, and what may not ------------------------------------------------------------------------------


def check(trainer: "Checkpointing", contents: Contents) -> list[str]:
    """Refuse, by name, what cannot go on; list the settings that differ."""
    state, saved = contents.state, contents.state["settings"]
    own = json.loads(json.dumps(to_dict(trainer.args)))
    if state["trainer_class"] != type(trainer).__name__:
        raise CheckpointError(f"the checkpoint is of {state['trainer_class']}, this is {type(trainer).__name__}")
    for key in (*FIXED_SETTINGS, *trainer.fixed_settings):
        if saved.get(key) != own[key]:  # not there: the checkpoint is of a time before this setting
            raise CheckpointError(f"{key} was {saved.get(key)!r} and is {own[key]!r}: it cannot change on resume")
    models = trainer.trained_models()
    if len(state["models"]) != len(models):
        raise CheckpointError(f"the checkpoint has {len(state['models'])} models, this run {len(models)}")
    for model, entry in zip(models, state["models"]):
        check_model(model, entry, trainer.model_files[model.name], contents)
    check_rows(trainer, state["data"])
    changed = [key for key in own if key in saved and saved[key] != own[key]]
    notes = [f"resumed with {key}={own[key]!r} (was {saved[key]!r})" for key in changed]
    stateful, states = stateful_callbacks(trainer), state["callbacks"]
    for name in sorted(states.keys() - stateful.keys()):
        raise CheckpointError(f"the checkpoint has a state of {name}, which has no load_state_dict here")
    notes += [f"{name} has a state_dict but the checkpoint no state of it" for name in stateful if name not in states]
    for model, entry in zip(models, state["models"]):
        if entry["source"] != model.source:
            notes.append(f"{model.name} was {entry['source'] or 'a loaded model'}; its weights are the checkpoint's")
    return notes


def check_model(
    model: TrainedModel, saved: Mapping[str, Any], own_files: Mapping[str, bytes], contents: Contents
) -> None:
    name = model.name
    if saved["name"] != name:
        raise CheckpointError(f"the checkpoint has {saved['name']} where this run has {name}")
    if saved["tokenizer"] != tokenizer_hash(model.agent.tokenizer):
        raise CheckpointError(f"{name}: the tokenizer is not the checkpoint's; token ids would change meaning")
    was, now = saved.get("base_hash"), base_hash(model)
    if was != now:
        raise CheckpointError(
            f"{name}: the checkpoint holds {what_is_held(was, saved['source'])}, this run trains "
            f"{what_is_held(now, model.source)}"
        )
    where = f"{name} (model shape)"
    checkpoint.check_shapes(model.shapes, contents.tensors[f"{name}/weights.safetensors"], where)
    # The same shapes can mean another model: another number of heads, for one.
    was, now = json.loads(contents.files[f"{name}/config.json"]), json.loads(own_files["config.json"])
    for key in sorted(was.keys() & now.keys() - set(LOOSE_CONFIG)):
        if was[key] != now[key] and not key.startswith("_"):
            raise CheckpointError(f"{where}: {key} of the model's config was {was[key]!r} and is {now[key]!r}")
    trained = {f"exp_avg.{key}" for key, p in model.agent.trained.named_parameters() if p.requires_grad}
    tensors = contents.tensors[f"{name}/optimizer.safetensors"]
    moments = {key for key in tensors if key.startswith("exp_avg.")}
    for key in sorted(trained ^ moments if moments else []):
        place = "here" if key in trained else "in the checkpoint"
        raise CheckpointError(f"{name}: {key.removeprefix('exp_avg.')} is trained only {place}")


def base_hash(model: TrainedModel) -> str | None:
    """Of what a model's adapter stands on; None: it has none, and the checkpoint holds all weights."""
    return None if model.agent.adapter is None else model.agent.adapter.base_hash


def what_is_held(digest: str | None, source: str | None) -> str:
    if digest is None:
        return "all weights"
    return f"an adapter of {source or 'a loaded model'}, whose weights have the hash {digest[:16]}"


def check_rows(trainer: "Checkpointing", saved: Mapping[str, Any]) -> None:
    if saved["rows"] != len(trainer.rows):
        raise CheckpointError(
            f"train_dataset had {saved['rows']} rows and has {len(trainer.rows)}: rows cannot change on resume"
        )
    if saved["fingerprint"] is None or trainer.rows_fingerprint is None:
        warnings.warn(
            "the rows of train_dataset cannot be compared with the checkpoint's; make sure they are the same",
            stacklevel=2,
        )
    elif saved["fingerprint"] != trainer.rows_fingerprint:
        raise CheckpointError("train_dataset has other rows than the checkpoint's: rows cannot change on resume")


# ---- agents and references ------------------------------------------------------------------------------------------


def source_of(member: Member) -> str | None:
    return member.source if isinstance(member.source, str) else None


def checkpoint_bytes(model: torch.nn.Module, shapes: Mapping[str, torch.Size]) -> int:
    """Weights, and two moments a trained parameter, in fp32. `shapes`: of the whole model, see tensor_shapes."""
    trained = sum(shapes[name].numel() for name, p in model.named_parameters() if p.requires_grad)
    return 4 * (sum(shape.numel() for shape in shapes.values()) + 2 * trained)


def reference_path(root: Path, name: str, digest: str) -> Path:
    return root / "references" / f"{name}-{digest[:16]}.safetensors"


def save_references(trainer: "Checkpointing", root: Path) -> None:
    """References of agents given as loaded modules have no name to load them from: kept once a run."""
    for index, reference in trainer.references.items():
        member = trainer.members[index]
        path = reference_path(root, member.name, trainer.reference_hashes[index])
        if source_of(member) is not None or trainer.agents[index].adapter is not None or path.exists():
            continue
        tensors = reference.weights()
        if reference.group.leader:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(".partial")
            save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, partial)
            partial.rename(path)


def reference_tensors(
    trainer: "Checkpointing", saved: list[dict[str, Any]], root: Path
) -> dict[int, dict[str, Tensor]]:
    """What has to be loaded into which reference: nothing where the agent came with the weights of then."""
    found = {}
    for index, entry in enumerate(saved):
        name = trainer.members[index].name
        if trainer.reference_hashes[index] == entry["hash"]:
            continue
        path = reference_path(root, name, entry["hash"])
        if not path.exists():
            raise CheckpointError(
                f"the reference of {name} ({entry['source'] or 'a loaded model'}) is not what the checkpoint was "
                "trained against: its weights have another hash; give the model that the run started from"
            )
        found[index] = load_file(path)
        checkpoint.check_shapes(trainer.shapes[index], found[index], f"reference of {name}")
    return found


# ---- fingerprints ---------------------------------------------------------------------------------------------------


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    parts = [
        json.dumps(tokenizer.get_vocab(), sort_keys=True),
        json.dumps({key: str(value) for key, value in tokenizer.special_tokens_map.items()}, sort_keys=True),
        str(tokenizer.chat_template),
    ]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "backslashreplace")).hexdigest()


def rows_hash(rows: RowSource) -> str | None:
    """Of the rows' contents; None for a stream, or rows that JSON cannot write."""
    if not rows.sized:
        return None
    digest = hashlib.sha256(str(len(rows)).encode())
    step = max(len(rows) // HASHED_ROWS, 1)
    try:
        for index in range(0, len(rows), step):
            digest.update(json.dumps(rows.data[index], sort_keys=True).encode("utf-8", "backslashreplace"))
    except (TypeError, ValueError, RecursionError):
        return None
    return digest.hexdigest()


def stateful_callbacks(trainer: "Checkpointing") -> dict[str, Any]:
    """The user's callbacks that have state_dict and load_state_dict, by name."""
    found = {}
    for name, callback in trainer.callbacks().items():
        has_state = hasattr(callback, "state_dict")  # optional by contract
        if has_state != hasattr(callback, "load_state_dict"):
            raise ValueError(f"{name} has one of state_dict and load_state_dict; a resumable callback needs both")
        if has_state:
            if callback in trainer.reward_functions and trainer.args.reward_timeout is not None:
                raise ValueError(
                    f"{name} has a state_dict, but with reward_timeout={trainer.args.reward_timeout} it is in a worker "
                    "process whose state is lost; set reward_timeout to none, or keep no state in the reward"
                )
            found[name] = callback
    return found


# ---- trees and samples ----------------------------------------------------------------------------------------------


def node_to_json(node: Node) -> dict[str, Any]:
    """Without its row, which is read again."""
    data = {f.name: getattr(node, f.name) for f in fields(Node) if f.name != "row"}
    data["completions"] = [[asdict(c) for c in group] for group in node.completions]
    data["children"] = [child and node_to_json(child) for child in node.children]
    data["baseline"] = node.baseline and node_to_json(node.baseline)
    return data


def node_from_json(data: Mapping[str, Any], row: dict[str, Any]) -> Node:
    data = {**data, "row": row}
    data["path"] = tuple(data["path"])
    data["joint_actions"] = [tuple(action) for action in data["joint_actions"]]
    data["completions"] = [[Completion(**c) for c in group] for group in data["completions"]]
    data["children"] = [child and node_from_json(child, row) for child in data["children"]]
    data["baseline"] = data["baseline"] and node_from_json(data["baseline"], row)
    return Node(**data)


def buffer_from_json(state: Mapping[str, Any], rows: RowSource) -> list[Node]:
    """Rows of the buffer are all of the running epoch: it is empty when an epoch ends."""
    wanted = [data["row_id"] for data in state["buffer"]]
    found = rows.fetch(state["counters"]["epoch"], wanted)
    for row_id in wanted:
        if row_id not in found:
            raise CheckpointError(f"train_dataset has no row {row_id} any more: rows cannot change on resume")
    return [node_from_json(data, found[data["row_id"]]) for data in state["buffer"]]


def sample_to_json(sample: Sample) -> dict[str, Any]:
    """Log-probs as lists: fp32 goes through JSON unchanged."""
    values = {f.name: getattr(sample, f.name) for f in fields(sample)}
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in values.items()}


def sample_from_json(data: Mapping[str, Any]) -> Sample:
    values = dict(data)
    for name in ("sampler_logprobs", "old_logprobs", "reference_logprobs"):
        if values[name] is not None:
            values[name] = torch.tensor(values[name], dtype=torch.float32)
    return Sample(**values)
