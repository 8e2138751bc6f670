"""The forward passes of generation: prompts once, then one token a row and step.

`Decoding` runs any model. `LeanDecoding` is the same arithmetic for models shaped like Llama, written out for a single
token: of a decoding step of a small model, transformers' masks, cache and wrappers take more time than the numbers do.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

LEAN = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # whose angles do not depend on how long the text is
BLOCK = 64  # tokens by which the cache grows at least


def start_decoding(model: PreTrainedModel, ids: Tensor, mask: Tensor, index: Tensor) -> "Decoding":
    """Read R prompts (ids and mask [R, P], left-padded) and make ready to continue row index[n] of them at row n."""
    return (LeanDecoding if is_lean(model) else Decoding)(model, ids, mask, index)


def is_lean(model: PreTrainedModel) -> bool:
    """Whether `LeanDecoding` does what the model does. Exact types: a subclass may do anything."""
    config = model.config.to_dict()
    layers = config.get("layer_types") or ["full_attention"]
    rope = (config.get("rope_parameters") or {}).get("rope_type")
    windowed = config.get("sliding_window") is not None and type(model) is MistralForCausalLM
    return type(model) in LEAN and set(layers) == {"full_attention"} and rope in STATIC_ROPE and not windowed


class Decoding:
    """N rows that a model continues. `logits` [N, V]: of each row's next token."""

    def __init__(self, model: PreTrainedModel, ids: Tensor, mask: Tensor, index: Tensor):
        self.model = model
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        output = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, logits_to_keep=1)
        self.cache = output.past_key_values
        self.logits: Tensor = output.logits[index, -1]
        self.mask = mask[index]
        self.position = self.mask.sum(1)
        self.take(index)

    def take(self, index: Tensor) -> None:
        self.cache.reorder_cache(index)  # not batch_select_indices, which layers of linear attention lack

    def select(self, rows: Tensor) -> None:
        """Go on with these rows only."""
        self.take(rows)
        self.mask, self.position = self.mask[rows], self.position[rows]

    def step(self, token: Tensor) -> None:
        """Append a token [N] to each row."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(token), 1)], dim=1)
        output = self.model(
            input_ids=token[:, None],
            attention_mask=self.mask,
            position_ids=self.position[:, None],
            past_key_values=self.cache,
            use_cache=True,
        )
        self.logits, self.position = output.logits[:, -1], self.position + 1


class LeanDecoding(Decoding):
    """Keys and values [N, heads, capacity, D] a layer, written in place; `length` of the capacity is in use."""

    def take(self, index: Tensor) -> None:
        layers = self.cache.layers
        self.keys: list[Tensor] = [layer.keys[index] for layer in layers]
        self.values: list[Tensor] = [layer.values[index] for layer in layers]
        self.length = self.keys[0].shape[2]
        # What is added to the scores: minus infinity on the pads.
        scores = torch.zeros(self.mask.shape, dtype=self.keys[0].dtype, device=self.mask.device)
        self.bias = scores.masked_fill(self.mask == 0, -torch.inf)[:, None, None]
        self.cosine = self.sine = torch.empty(0)
        self.norms = [attention_norm(layer.self_attn) for layer in self.model.base_model.layers]  # type: ignore
        self.grow()

    def select(self, rows: Tensor) -> None:
        self.keys = [keys[rows] for keys in self.keys]
        self.values = [values[rows] for values in self.values]
        self.bias, self.position = self.bias[rows], self.position[rows]

    def grow(self) -> None:
        """Room for more tokens, and the angles of their positions."""
        more = max(BLOCK, self.length // 2)
        self.keys = [nn.functional.pad(keys, (0, 0, 0, more)) for keys in self.keys]
        self.values = [nn.functional.pad(values, (0, 0, 0, more)) for values in self.values]
        self.bias = nn.functional.pad(self.bias, (0, more))
        places = torch.arange(self.length + more, device=self.bias.device)[None]
        cosine, sine = self.model.base_model.rotary_emb(self.bias, places)  # type: ignore[operator]
        half = sine.shape[-1] // 2
        # Rotating [a, b] to [-b, a] and multiplying by the sine is rolling and multiplying by a sine of changed sign.
        self.cosine, self.sine = cosine[0, :, None], torch.cat([-sine[0, :, :half], sine[0, :, half:]], -1)[:, None]

    def step(self, token: Tensor) -> None:
        if self.length == self.keys[0].shape[2]:
            self.grow()
        base = self.model.base_model
        cosine, sine = self.cosine[self.position], self.sine[self.position]  # [N, 1, D]
        bias = self.bias[..., : self.length + 1]
        states = base.embed_tokens(token)  # type: ignore[operator]
        for number, layer in enumerate(base.layers):  # type: ignore[arg-type]
            attention = layer.self_attn
            inner = rms_norm(states, layer.input_layernorm.weight, layer.input_layernorm.variance_epsilon)
            states = states + attention.o_proj(self.attend(number, attention, inner, cosine, sine, bias))
            inner = rms_norm(
                states, layer.post_attention_layernorm.weight, layer.post_attention_layernorm.variance_epsilon
            )
            states = states + layer.mlp(inner)
        states = rms_norm(states, base.norm.weight, base.norm.variance_epsilon)  # type: ignore[arg-type, union-attr]
        self.logits = self.model.lm_head(states)
        self.length, self.position = self.length + 1, self.position + 1

    def attend(
        self, number: int, attention: nn.Module, inner: Tensor, cosine: Tensor, sine: Tensor, bias: Tensor
    ) -> Tensor:
        """Attention of one new token a row to all of its row: [N, H] -> [N, heads * D]."""
        size: int = attention.head_dim  # type: ignore[assignment]
        keys, values = self.keys[number], self.values[number]
        new = torch.cat([attention.q_proj(inner), attention.k_proj(inner)], -1)  # type: ignore[operator]
        new = self.norms[number](new.view(len(inner), -1, size))
        new = torch.addcmul(new * cosine, new.roll(size // 2, -1), sine)
        heads = new.shape[1] - keys.shape[1]
        keys[:, :, self.length] = new[:, heads:]
        values[:, :, self.length] = attention.v_proj(inner).view(len(inner), -1, size)  # type: ignore[operator]
        answer = nn.functional.scaled_dot_product_attention(
            new[:, :heads, None],
            keys[:, :, : self.length + 1],
            values[:, :, : self.length + 1],
            attn_mask=bias,
            scale=attention.scaling,  # type: ignore[arg-type]
            enable_gqa=True,
        )
        return answer.reshape(len(inner), -1)


def attention_norm(attention: nn.Module) -> Callable[[Tensor], Tensor]:
    """Qwen3 normalises each head's query and key, [N, heads, D]; the others leave them as they are."""
    if "q_norm" not in dict(attention.named_children()):
        return lambda heads: heads
    config = attention.config
    query, key = attention.q_norm, attention.k_norm
    counts = torch.tensor([config.num_attention_heads, config.num_key_value_heads])  # type: ignore[union-attr]
    both = torch.stack([query.weight, key.weight])  # type: ignore[list-item, union-attr]
    weight = both.repeat_interleave(counts.to(both.device), dim=0)
    return lambda heads: rms_norm(heads, weight, query.variance_epsilon)  # type: ignore[union-attr, arg-type]


def rms_norm(states: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As these models do it: in fp32, then back, then the weight."""
    wide = states.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(states.dtype)
