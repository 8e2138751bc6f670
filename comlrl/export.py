"""Turn a checkpoint into Hugging Face folders, one an agent.

    python -m comlrl.export runs/quickstart/checkpoints/checkpoint-3 out
    python -m comlrl.export runs/quickstart out          # the newest good checkpoint of a run

`out/agent_i/` then has weights (fp32), config, generation config and tokenizer, for `from_pretrained` and for `model:`
of the training scripts. Nothing but the checkpoint is needed, except for models whose code is on the hub: give
--trust-remote-code for them. An adapter (`args.lora`) becomes a folder of PEFT, or with --merge a whole model, for
which its base model has to be there.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from comlrl import checkpoint
from comlrl.adapters import CONFIG_NAME, merge, read_adapter
from comlrl.agents import load_model, save_weights
from comlrl.checkpoint import Contents, tensors_hash
from comlrl.config import exit_on_value_error
from comlrl.value_head import save_head, split_head


def export(source: str | Path, out: str | Path, trust_remote_code: bool = False, merged: bool = False) -> list[Path]:
    """Write a folder a trained model (`agent_i/`, critics) from the checkpoint `source`, or the newest good one in it.

    merged: adapters as whole models. Returns these folders; a value head stands beside its model (see
    CausalLMWithValueHead.from_pretrained). Raises ValueError if there is no good checkpoint, a folder is taken, or an
    adapter's base model is not the one that it was trained on.
    """
    contents = checkpoint.read(checkpoint.find(source))
    models = contents.state["models"]
    folders = [Path(out) / model.get("folder", model["name"]) for model in models]
    for folder in folders:
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty; give another folder")
    for model, folder in zip(models, folders):
        name, weights = model["name"], contents.tensors[f"{model['name']}/weights.safetensors"]
        as_adapter = model.get("base_hash") is not None and not merged
        folder.mkdir(parents=True, exist_ok=True)
        if as_adapter:
            save_weights(folder, weights, adapter=True)
        elif model.get("base_hash") is not None:
            merged_agent(contents, name, model["base_hash"], trust_remote_code).save_pretrained(folder)
        else:
            load_agent(contents, name, trust_remote_code).save_pretrained(folder)
        _, head = split_head(weights)
        if head:
            save_head(folder, head)
        left_out = {"config.json"} if as_adapter else {"config.json", CONFIG_NAME}
        for path, data in agent_files(contents, name).items():
            if path not in left_out:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(data)
    return folders


def merged_agent(contents: Contents, name: str, base_hash: str, trust_remote_code: bool) -> PreTrainedModel:
    """The base model with the adapter of one agent in it."""
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / CONFIG_NAME).write_bytes(contents.files[f"{name}/{CONFIG_NAME}"])
        save_weights(scratch, contents.tensors[f"{name}/weights.safetensors"], adapter=True)
        config, weights = read_adapter(scratch)
    source, lora = config.base_model_name_or_path, contents.state["settings"].get("lora") or {}
    if lora.get("quantization") is not None:
        raise ValueError(
            f"{name} was trained around a quantised base: whole weights would say other things; no --merge"
        )
    if source is None:
        raise ValueError(f"{name} was given as a loaded model, which has no name: export without --merge")
    base = load_model(source, {"model_kwargs": {"trust_remote_code": trust_remote_code}})
    if tensors_hash(dict(base.named_parameters())) != base_hash:
        raise ValueError(f"{name}: {source!r} is not the model that the adapter was trained on: it has other weights")
    return merge(base, config, weights)


def load_agent(contents: Contents, name: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of one agent of a checkpoint: its class and shape from the config, every weight from the file."""
    with tempfile.TemporaryDirectory() as scratch:
        for path, data in agent_files(contents, name).items():
            if path.endswith(".json") and "/" not in path:
                (Path(scratch) / path).write_bytes(data)
        config = AutoConfig.from_pretrained(scratch, trust_remote_code=trust_remote_code)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    weights, _ = split_head(contents.tensors[f"{name}/weights.safetensors"])
    checkpoint.load_model_tensors(model, weights, name)
    return model.eval()


def agent_files(contents: Contents, name: str) -> dict[str, bytes]:
    prefix = f"{name}/"
    return {path.removeprefix(prefix): data for path, data in contents.files.items() if path.startswith(prefix)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m comlrl.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", help="a checkpoint, or a folder of checkpoints or of a run")
    parser.add_argument("out", help="where agent_0/, agent_1/, ... go")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the model's own code from the hub")
    parser.add_argument("--merge", action="store_true", help="write adapters as whole models")
    command = parser.parse_args(argv)
    with exit_on_value_error():
        for folder in export(command.checkpoint, command.out, command.trust_remote_code, command.merge):
            print(folder)


if __name__ == "__main__":
    main()
