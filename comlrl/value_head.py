"""A value head on a causal language model: a critic, or an actor and its critic in one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from comlrl.logprobs import recomputing

HEAD_FILE = "value_head.safetensors"
BACKBONE, HEAD = "backbone.", "value_head."  # what parameter names begin with


def without_language(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, fix: str) -> None:
    """Prepare a backbone that only says numbers: no gradient is asked for its language-model head.

    Raises ValueError, with `name` and `fix`, if it cannot embed all ids of its tokenizer.
    """
    embeddings: int = model.get_input_embeddings().num_embeddings  # type: ignore[assignment]
    highest = max(tokenizer.get_vocab().values())
    if highest >= embeddings:
        raise ValueError(f"{name}: its tokenizer has ids up to {highest}, its model embeds {embeddings}; {fix}")
    head = model.get_output_embeddings().weight
    if head is not model.get_input_embeddings().weight:
        head.requires_grad_(False)


@dataclass
class ActorCriticOutput:
    """logits [B, L, V]; values [B, L] in fp32, or None; past_key_values: the cache."""

    logits: Tensor
    values: Tensor | None
    past_key_values: Any


class ValueHead(nn.Module):
    """Hidden states [..., H] -> values [...], always in fp32: bf16 has three digits.

    Args:
        input_dim: H. hidden_dim: width of a Tanh layer before the output; none: linear.

    The output layer starts at 0, so that a fresh critic says 0 and the first advantages are the returns.
    """

    def __init__(self, input_dim: int, hidden_dim: int | None = None):
        super().__init__()
        self.hidden: nn.Module = nn.Identity()
        if hidden_dim is not None:
            layer = nn.Linear(input_dim, hidden_dim)
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
            self.hidden = nn.Sequential(layer, nn.Tanh())
        self.output = nn.Linear(hidden_dim or input_dim, 1)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    @property
    def hidden_dim(self) -> int | None:
        return None if isinstance(self.hidden, nn.Identity) else self.output.in_features

    def forward(self, states: Tensor) -> Tensor:
        with torch.autocast(states.device.type, enabled=False):
            return self.output(self.hidden(states.float()))[..., 0]


class CausalLMWithValueHead(nn.Module):
    """A causal language model and, if attached, a value head on its last hidden state.

    Args:
        base_model: the language model; stays a module of its own, so `generate` and saving work as before.
        value_head_hidden_dim: see ValueHead. attach_value_head: False: no values.
    """

    def __init__(
        self, base_model: PreTrainedModel, value_head_hidden_dim: int | None = None, attach_value_head: bool = True
    ):
        super().__init__()
        self.backbone = base_model
        self.value_head: ValueHead | None = None
        if attach_value_head:
            size = base_model.get_output_embeddings().weight.shape[-1]
            self.value_head = ValueHead(int(size), value_head_hidden_dim)
            self.value_head.to(next(base_model.parameters()).device)

    @property
    def config(self) -> Any:
        return self.backbone.config

    def forward(self, *args: Any, output_values: bool = True, **kwargs: Any) -> ActorCriticOutput:
        """One forward for logits and values, at the positions of the logits (`logits_to_keep`).

        The value head reads what the language-model head reads, so no other hidden state is kept.
        """
        read: list[Tensor] = []
        hook = self.backbone.get_output_embeddings().register_forward_pre_hook(
            lambda module, inputs: read.append(inputs[0])
        )
        try:
            output = self.backbone(*args, **kwargs)
        finally:
            hook.remove()
        values = self.value_head(read[-1]) if output_values and self.value_head is not None else None
        return ActorCriticOutput(output.logits, values, output.past_key_values)

    def last_values(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Value at the last token of each right-padded row: [N, L], [N, L] -> [N] in fp32.

        The language-model head is not run, and pads cannot act: they come after every token that is read.
        """
        assert self.value_head is not None
        with recomputing(self.backbone):
            output = self.backbone.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
        rows = torch.arange(len(input_ids), device=input_ids.device)
        return self.value_head(output.last_hidden_state[rows, attention_mask.sum(1) - 1])

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.backbone.generate(*args, **kwargs)  # type: ignore[operator]

    def save_pretrained(self, folder: str) -> None:
        """A Hugging Face folder of the language model, and the head beside it."""
        self.backbone.save_pretrained(folder)
        if self.value_head is not None:
            save_head(folder, self.value_head.state_dict())

    @classmethod
    def from_pretrained(cls, folder: str, **kwargs: Any) -> "CausalLMWithValueHead":
        """The twin of `save_pretrained`, and of `save_model` and `comlrl.export`.

        Raises ValueError if the folder has no value head.
        """
        path = Path(folder, HEAD_FILE)
        if not path.is_file():
            raise ValueError(f"{folder} has no {HEAD_FILE}: it was not saved with a value head")
        tensors = load_file(path)
        hidden = tensors["hidden.0.weight"].shape[0] if "hidden.0.weight" in tensors else None
        model = cls(AutoModelForCausalLM.from_pretrained(folder, **kwargs), hidden)
        assert model.value_head is not None
        model.value_head.load_state_dict(tensors)
        return model


def save_head(folder: str | Path, tensors: dict[str, Tensor]) -> None:
    """`tensors`: of the head, by its own names."""
    save_file({name: t.detach().float().cpu().contiguous() for name, t in tensors.items()}, Path(folder, HEAD_FILE))


def split_head(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights by name, with or without a head, as those of the language model and those of the head."""
    if not any(name.startswith(BACKBONE) for name in tensors):
        return tensors, {}
    body = {name.removeprefix(BACKBONE): t for name, t in tensors.items() if name.startswith(BACKBONE)}
    head = {name.removeprefix(HEAD): t for name, t in tensors.items() if name.startswith(HEAD)}
    return body, head
