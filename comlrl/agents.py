"""A policy: a causal language model, its tokenizer, and the log-probs of what it wrote."""

import copy
import importlib.util
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from comlrl import embedded
from comlrl.offload import on_device
from comlrl.value_head import CausalLMWithValueHead, save_head, split_head

Prompt = str | list[dict[str, str]]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODEL_CONFIG_KEYS = ("dtype", "torch_dtype", "attn_implementation", "model_kwargs", "special_tokens")


class Agent:
    """One policy of the team.

    `model` holds the weights that are trained, always in fp32: bf16 weights with AdamW mostly do not move at the
    learning rates of this field, since an update is smaller than their rounding. `compute_dtype` is what
    forwards run in: with bfloat16 the learner uses autocast, and sampling a bf16 copy, refreshed after each step.
    Dropout is off in every log-prob, so the model stays in eval mode for good.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        device: torch.device | str = "cpu",
        compute_dtype: torch.dtype = torch.float32,
    ):
        self.name = name
        self.device = torch.device(device)
        self.compute_dtype = compute_dtype
        self.model: PreTrainedModel = model.float().to(self.device).eval()
        self.tokenizer = tokenizer
        self.eos_ids = eos_token_ids(model, tokenizer)
        num_embeddings: int = model.get_input_embeddings().num_embeddings  # type: ignore[assignment]
        self.pad_id = pad_token_id(tokenizer, self.eos_ids, num_embeddings)
        self.context_length = context_length(model, tokenizer)
        self.value_model: CausalLMWithValueHead | None = None
        self._sampler: PreTrainedModel | None = None
        self.idle = False  # whether the sampler is on the CPU while it has nothing to do

    def attach_value_head(self, hidden_dim: int | None = None) -> CausalLMWithValueHead:
        """From now on the model also has values; the language model inside is the same object."""
        self.value_model = CausalLMWithValueHead(self.model, hidden_dim).eval()
        return self.value_model

    @property
    def trained(self) -> nn.Module:
        """All weights that are trained: the model, with its value head if it has one."""
        return self.model if self.value_model is None else self.value_model

    def encode(self, prompt: Prompt, chat_template: str = "messages") -> list[int]:
        """Token ids of a prompt. A string is verbatim; a message list goes through the chat template.

        `chat_template`: "messages" as said; "always": a string becomes one user message; "never": a message list is
        refused. A template that writes BOS itself gets no second one from the tokenizer.
        """
        if isinstance(prompt, str) and chat_template == "always":
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, str):
            ids = list(self.tokenizer(prompt)["input_ids"])
            # A formatter may have applied a template that starts with BOS; the tokenizer then adds another.
            bos = self.tokenizer.bos_token_id
            if len(ids) > 1 and bos is not None and ids[0] == ids[1] == bos:
                ids = ids[1:]
        else:
            messages = isinstance(prompt, (list, tuple)) and all(isinstance(m, Mapping) for m in prompt)
            if not messages or not prompt:
                raise ValueError(
                    f"{self.name}: a prompt must be a string or a list of messages such as "
                    f"{{'role': 'user', 'content': ...}}, not {prompt!r:.200}"
                )
            if chat_template == "never":
                raise ValueError(
                    f"{self.name}: a formatter returned a message list but chat_template is 'never'; "
                    "return a string, or set chat_template: messages"
                )
            if self.tokenizer.chat_template is None:
                raise ValueError(
                    f"{self.name}: a formatter returned a message list but the tokenizer has no chat template; "
                    "return a string, or give a tokenizer with a chat_template"
                )
            text = self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
            ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if not ids:
            raise ValueError(
                f"{self.name}: a prompt of zero tokens cannot be answered; make the formatter return some text"
            )
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a completion: special tokens (the final EOS among them) are left out."""
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    @property
    def sampler(self) -> PreTrainedModel:
        """The model that generation runs: the trained one in fp32, else a copy in the compute dtype."""
        if self._sampler is None and self.compute_dtype == torch.float32:
            return self.model
        return self.make_sampler()

    def make_sampler(self) -> PreTrainedModel:
        """A copy for sampling. Under ZeRO-3 there always is one: each process then samples at its own pace."""
        if self._sampler is None:
            self._sampler = frozen_copy(self.model, self.compute_dtype)
        return self._sampler

    def weights_changed(self, gathered: Callable[..., AbstractContextManager] | None = None) -> None:
        """Call after every optimizer step: brings the sampling copy up to date.

        gathered: a context in which the given parameters are whole, where they are divided over processes.
        """
        if self._sampler is None:
            return
        copies: list[Tensor] = list(self._sampler.parameters())
        trained: list[Tensor] = list(self.model.parameters())
        with torch.no_grad():
            if gathered is None:
                torch._foreach_copy_(copies, trained)
            else:
                for mine, parameter in zip(copies, trained):
                    with gathered([parameter]):
                        mine.copy_(parameter)

    def awake(self) -> AbstractContextManager:
        """Inside, the sampler is on the device."""
        return on_device(self.sampler, self.device, self.idle)

    def unload(self) -> None:
        """Keep the shapes and the tokenizer only: this process does no work of this agent."""
        self.model = self.model.to(device="meta")  # type: ignore[call-arg]
        self.model.tie_weights()  # moving to meta parts what was tied
        if self.value_model is not None:
            self.value_model.to(device="meta")
            self.model.tie_weights()
        self.device = torch.device("meta")

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, dtype=self.compute_dtype, enabled=self.compute_dtype != torch.float32)

    def save(self, folder: str, weights: dict[str, Tensor] | None = None) -> None:
        """An ordinary Hugging Face folder: fp32 weights, tokenizer, generation config.

        `weights`: whole weights by name, where the model holds a part of them, or another process than the main one
        writes (save_pretrained then writes nothing).
        """
        if weights is None:
            (self.value_model or self.model).save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
            return
        weights, head = split_head(weights)
        for name, data in self.files().items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        save_file(tensors, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        if head:
            save_head(folder, head)

    def files(self) -> dict[str, bytes]:
        """Config, generation config and tokenizer as the files of a Hugging Face folder."""
        config = copy.deepcopy(self.model.config)
        config.architectures = [type(self.model).__name__]
        config.dtype = torch.float32
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            config.save_pretrained(folder)
            if self.model.generation_config is not None:
                # Not save_pretrained, which refuses what many published models have.
                (folder / "generation_config.json").write_text(self.model.generation_config.to_json_string(), "utf-8")
            self.tokenizer.save_pretrained(folder)
            return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def completion_logprobs(
    model: Callable[..., Any],
    prompt_ids: Tensor,
    prompt_mask: Tensor,
    completion_ids: Tensor,
    completion_mask: Tensor,
    prompt_index: Tensor,
    temperature: float = 1.0,
    entropy: str = "value",
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the sampled tokens, the final EOS included.

    Args:
        prompt_ids, prompt_mask: [R, P], left-padded.
        completion_ids, completion_mask: [N, C], right-padded.
        prompt_index: [N], which of the R prompts each completion answers.
        temperature: of the sampling distribution; the log-prob is log_softmax(logits / temperature)[id].

    Returns:
        log-probs and entropies (nats), both [N, C] in fp32, exactly 0 on pads; for `entropy` see `token_logprobs`.

    A prompt is read once and its keys and values are shared by its completions, gradients included: K answers of a
    prompt as long as themselves cost half. Only sampled positions go through the language-model head.
    """
    positions = (prompt_mask.cumsum(1) - 1).clamp(min=0)
    prefix = model(
        input_ids=prompt_ids,
        attention_mask=prompt_mask,
        position_ids=positions,
        use_cache=True,
        logits_to_keep=1,
    )
    logits = prefix.logits[:, -1:][prompt_index]
    if completion_ids.shape[1] > 1:
        cache = prefix.past_key_values
        select_rows(cache, prompt_index)
        length = prompt_mask.sum(1)[prompt_index]
        steps = torch.arange(completion_ids.shape[1] - 1, device=completion_ids.device)
        rest = model(
            input_ids=completion_ids[:, :-1],
            attention_mask=torch.cat([prompt_mask[prompt_index], completion_mask[:, :-1]], dim=1),
            position_ids=length[:, None] + steps,
            past_key_values=cache,
            use_cache=True,
        )
        logits = torch.cat([logits, rest.logits], dim=1)
    return token_logprobs(logits, completion_ids, completion_mask, temperature, entropy)


def select_rows(cache: Cache, index: Tensor) -> None:
    """Make the cache hold row index[n] at row n, for a forward whose gradient is wanted."""
    cache.reorder_cache(index)  # type: ignore[arg-type]
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            # Models such as Qwen3.5: the next forward would overwrite this state in place, but backward needs it.
            # Marked as new, it gets another tensor.
            layer.is_recurrent_states_initialized = dict.fromkeys(layer.is_recurrent_states_initialized, False)


def frozen_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy with weights in `dtype` that is not trained.

    Buffers stay as they are, as after from_pretrained(dtype=...): rotary frequencies in bf16 are off by a radian within
    a thousand tokens.
    """
    twin = copy.deepcopy(model).eval().requires_grad_(False)
    for parameter in twin.parameters():
        parameter.data = parameter.data.to(dtype)
    return twin


def token_logprobs(
    logits: Tensor, ids: Tensor, mask: Tensor, temperature: float = 1.0, entropy: str = "value"
) -> tuple[Tensor, Tensor]:
    """log_softmax(logits / temperature) at `ids`, and the entropy; [N, C, V], [N, C] -> two [N, C] in fp32.

    `entropy`: "value" has no gradient (to log), "gradient" has one (for a bonus; costs another [N, C, V]), "none" is 0.
    """
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    normalizer = logits.logsumexp(-1)
    logprobs = logits.gather(-1, ids[..., None])[..., 0] - normalizer
    entropies = torch.zeros_like(normalizer)
    if entropy != "none":
        with torch.set_grad_enabled(entropy == "gradient" and torch.is_grad_enabled()):
            # Row by row: without gradient the peak then holds no second [N, C, V].
            entropies = torch.stack([row_entropy(logits[n] - normalizer[n, :, None]) for n in range(len(logits))])
    keep = mask.bool()
    return torch.where(keep, logprobs, 0.0), torch.where(keep, entropies, 0.0)


def context_length(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens that prompt and answer may have together; models without learned positions say it in their tokenizer."""
    positions = model.config.get_text_config().to_dict().get("max_position_embeddings")
    return int(positions if positions is not None else tokenizer.model_max_length)


def row_entropy(logprobs: Tensor) -> Tensor:
    """Entropy in nats of each distribution: [C, V] -> [C]."""
    return -(logprobs.exp() * logprobs).sum(-1)


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends an answer: the tokenizer's, the model's, and the generation config's, often several."""
    found: set[int] = set()
    generation_eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    for ids in (tokenizer.eos_token_id, model.config.get_text_config().eos_token_id, generation_eos):
        if ids is not None:  # 0 is a valid id
            found.update([ids] if isinstance(ids, int) else ids)
    return tuple(sorted(found))


def pad_token_id(tokenizer: PreTrainedTokenizerBase, eos_ids: Sequence[int], num_embeddings: int) -> int:
    """Only fills masked places, so any id that the model embeds will do (an added <pad> may be beyond them)."""
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id < num_embeddings:
        return tokenizer.pad_token_id
    return eos_ids[0] if eos_ids else 0


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 where the hardware multiplies it fast, else float32."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return torch.bfloat16 if torch.cpu.get_capabilities().get("avx512_bf16", False) else torch.float32


def check_model_config(model_config: dict[str, Any]) -> None:
    unknown = sorted(set(model_config) - set(MODEL_CONFIG_KEYS))
    if unknown:
        raise ValueError(
            f"model_config: unknown key {unknown[0]!r}; known are {', '.join(MODEL_CONFIG_KEYS)} "
            "(what from_pretrained takes beside them goes into model_kwargs)"
        )
    nested = model_config.get("model_kwargs") or {}
    name = str(model_config.get("attn_implementation", nested.get("attn_implementation")))
    if name.startswith("flash_attention"):
        if importlib.util.find_spec("flash_attn") is None:
            raise ValueError(
                f"model_config.attn_implementation={name!r}: the package flash-attn is not installed; "
                "run: pip install -r requirements-gpu.txt, or use sdpa"
            )
        if not torch.cuda.is_available():
            raise ValueError(f"model_config.attn_implementation={name!r} needs a CUDA GPU and there is none; use sdpa")


def load_model(source: str, model_config: dict[str, Any] | None = None) -> PreTrainedModel:
    """A causal LM by embedded name, path or hub id. Load-time options: `model_config` (see MODEL_CONFIG_KEYS)."""
    options = dict(model_config or {})
    check_model_config(options)
    kwargs = dict(options.get("model_kwargs") or {})
    kwargs.setdefault("attn_implementation", options.get("attn_implementation", "sdpa"))
    # Weights are trained in fp32 whatever dtype is asked for: that one is the compute dtype (see Agent).
    kwargs["dtype"] = torch.float32
    kwargs.pop("torch_dtype", None)
    return AutoModelForCausalLM.from_pretrained(embedded.resolve(source), **kwargs)


def load_tokenizer(source: str, model_config: dict[str, Any] | None = None) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(embedded.resolve(source), **hub_options(model_config))


def hub_options(model_config: dict[str, Any] | None) -> dict[str, Any]:
    """What says where files come from: for a model's config and tokenizer as for its weights."""
    kwargs = (model_config or {}).get("model_kwargs") or {}
    return {key: kwargs[key] for key in ("trust_remote_code", "revision", "token", "subfolder") if key in kwargs}


def add_special_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, special_tokens: dict[str, Any]
) -> None:
    """Add tokens and widen the embeddings to hold them; never shrinks (checkpoints are often padded wider)."""
    tokenizer.add_special_tokens(special_tokens)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:  # type: ignore[operator]
        model.resize_token_embeddings(len(tokenizer))


def check_loadable(source: str, model_config: dict[str, Any] | None = None) -> None:
    """Refuse a model name that is nowhere, before anything large is loaded."""
    if source in embedded.EMBEDDED:
        return
    try:
        AutoConfig.from_pretrained(source, **hub_options(model_config))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model {source!r} cannot be found: no embedded model ({', '.join(embedded.EMBEDDED)}), no folder "
            f"with a config.json, and no hub id that can be reached ({str(error).splitlines()[0]})"
        ) from error


def check_tokenizer(source: str, model_config: dict[str, Any] | None = None) -> None:
    """Refuse a tokenizer name that is nowhere; a folder that holds only a tokenizer will do."""
    if source in embedded.EMBEDDED:
        return
    try:
        load_tokenizer(source, model_config)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"tokenizer {source!r} cannot be found: no embedded model ({', '.join(embedded.EMBEDDED)}), no folder "
            f"with a tokenizer, and no hub id that can be reached ({str(error).splitlines()[0]})"
        ) from error
