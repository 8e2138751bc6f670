"""Turn a checkpoint into Hugging Face folders, one an agent.

    python -m comlrl.export runs/quickstart/checkpoints/checkpoint-3 out
    python -m comlrl.export runs/quickstart out          # the newest good checkpoint of a run

`out/agent_i/` then has weights (fp32), config, generation config and tokenizer, for `from_pretrained` and for `model:`
of the training scripts. Nothing but the checkpoint is needed, except for models whose code is on the hub: give
--trust-remote-code for them.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from comlrl import checkpoint
from comlrl.checkpoint import Contents
from comlrl.config import exit_on_value_error
from comlrl.value_head import save_head, split_head


def export(source: str | Path, out: str | Path, trust_remote_code: bool = False) -> list[Path]:
    """Write a folder a trained model (`agent_i/`, critics) from the checkpoint `source`, or the newest good one in it.

    Returns these folders; a value head stands beside its model (see CausalLMWithValueHead.from_pretrained).
    Raises ValueError if there is no good checkpoint or a folder is taken.
    """
    contents = checkpoint.read(checkpoint.find(source))
    names = [model["name"] for model in contents.state["models"]]
    folders = [Path(out) / model.get("folder", model["name"]) for model in contents.state["models"]]
    for folder in folders:
        if folder.exists() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty; give another folder")
    for name, folder in zip(names, folders):
        load_agent(contents, name, trust_remote_code).save_pretrained(folder)
        _, head = split_head(contents.tensors[f"{name}/weights.safetensors"])
        if head:
            save_head(folder, head)
        for path, data in agent_files(contents, name).items():
            if path != "config.json":
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(data)
    return folders


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
    command = parser.parse_args(argv)
    with exit_on_value_error():
        for folder in export(command.checkpoint, command.out, command.trust_remote_code):
            print(folder)


if __name__ == "__main__":
    main()
