"""A policy: a causal language model and its tokenizer."""

import copy
import importlib.util
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
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

from comlrl import embedded
from comlrl.adapters import (
    SAFETENSORS_WEIGHTS_NAME,
    Adapter,
    base_name,
    frozen_weights,
    is_adapter,
    merge,
    peft_name,
    read_adapter,
    sharing,
)
from comlrl.checkpoint import model_tensors, tensors_hash
from comlrl.logprobs import head_finish
from comlrl.offload import on_device
from comlrl.profile import Work, model_operations, model_sizes, peak_rate
from comlrl.value_head import CausalLMWithValueHead, save_head, split_head

Prompt = str | list[dict[str, str]]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MODEL_CONFIG_KEYS = ("dtype", "torch_dtype", "attn_implementation", "model_kwargs", "special_tokens")


class Agent:
    """One policy of the team.

    `model` holds the weights that are trained, always in fp32: bf16 weights with AdamW mostly do not move at the
    learning rates of this field, since an update is smaller than their rounding. `compute_dtype` is what
    forwards run in: with bfloat16 the learner uses autocast, and sampling a bf16 copy, refreshed after each step.
    Dropout is off in every log-prob, so the model stays in eval mode for good. With an `adapter` only that is trained;
    the frozen weights around it are in the compute dtype.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        device: torch.device | str = "cpu",
        compute_dtype: torch.dtype = torch.float32,
        adapter: Adapter | None = None,
    ):
        self.name = name
        self.adapter = adapter
        self.device = torch.device(device)
        self.compute_dtype = compute_dtype
        masters: Any = model if adapter is not None else model.float()
        self.model: PreTrainedModel = masters.to(self.device).eval()
        self.tokenizer = tokenizer
        self.eos_ids = eos_token_ids(model, tokenizer)
        num_embeddings: int = model.get_input_embeddings().num_embeddings  # type: ignore[assignment]
        self.pad_id = pad_token_id(tokenizer, self.eos_ids, num_embeddings)
        self.context_length = context_length(model, tokenizer)
        self.value_model: CausalLMWithValueHead | None = None
        self._sampler: PreTrainedModel | None = None
        with self.autocast():
            self.finish = head_finish(self.model)
        self.sizes = model_sizes(self.model)
        self.work = Work()  # since it was taken last
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

    def reference_hash(self) -> str:
        """Of what the agent's reference is, now: of fp32 weights, so that it does not depend on what computes."""
        return self.adapter.base_hash if self.adapter is not None else tensors_hash(model_tensors(self.model))

    def frozen_twin(self, model: PreTrainedModel, device: torch.device) -> "Agent":
        """Another agent with this one's tokenizer that only samples: from `model`, as it is, on `device`."""
        twin = copy.copy(self)
        twin.model = twin._sampler = model.to(device=device).requires_grad_(False)  # type: ignore[call-arg]
        twin.device, twin.value_model, twin.idle = device, None, False
        return twin

    def awake(self) -> AbstractContextManager:
        """Inside, the sampler is on the device."""
        return on_device(self.sampler, self.device, self.idle)

    def worked(self, kind: str, started: float, tokens: int, device: torch.device | None = None) -> None:
        """Count work on `tokens` tokens (see `comlrl.profile.Work`) that began at `started` and ends now.

        `device`: where a reference is; it may be in a process that holds no weights of the agent.
        """
        device = device or self.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - started
        operations = model_operations(*self.sizes, tokens, learning=kind == "learn")
        self.work.add(kind, seconds, tokens, operations)
        self.work.peak += peak_rate(device, self.compute_dtype) * seconds

    def take_work(self) -> Work:
        """What was counted since the last call."""
        work, self.work = self.work, Work()
        return work

    def unload(self) -> None:
        """Keep the shapes and the tokenizer only: this process does no work of this agent."""
        self.model = self.model.to(device="meta")  # type: ignore[call-arg]
        if self.value_model is not None:
            self.value_model.to(device="meta")
        if self.adapter is None:
            self.model.tie_weights()  # moving to meta parts what was tied
        else:
            self.adapter = replace(self.adapter, base=None)
        self.device = torch.device("meta")

    def autocast(self, device: torch.device | None = None) -> torch.autocast:
        """device: where it is computed, if not on the agent's (a reference may be in another process)."""
        kind = (device or self.device).type
        return torch.autocast(kind, dtype=self.compute_dtype, enabled=self.compute_dtype != torch.float32)

    def save(self, folder: str, weights: dict[str, Tensor] | None = None) -> None:
        """An ordinary Hugging Face folder: fp32 weights, tokenizer, generation config. Of an adapter, a folder of PEFT.

        `weights`: whole weights by name, where the model holds a part of them, or another process than the main one
        writes (save_pretrained then writes nothing).
        """
        if weights is None and self.adapter is None:
            (self.value_model or self.model).save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)
            return
        for name, data in self.files().items():
            if name == "config.json" and self.adapter is not None:
                continue  # with it, transformers would take the folder for a whole model
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        save_weights(folder, weights or model_tensors(self.trained), adapter=self.adapter is not None)

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
            if self.adapter is not None:
                self.adapter.config.save_pretrained(str(folder))
            return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def save_weights(folder: str | Path, weights: dict[str, Tensor], adapter: bool) -> None:
    """Whole weights by name, or those of an adapter; a value head among them gets a file of its own."""
    weights, head = split_head(weights)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    if adapter:
        tensors = {peft_name(name): tensor for name, tensor in tensors.items()}
    save_file(tensors, Path(folder, SAFETENSORS_WEIGHTS_NAME if adapter else "model.safetensors"), {"format": "pt"})
    if head:
        save_head(folder, head)


def frozen_copy(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A copy with weights in `dtype` that is not trained. The base model of an adapter is shared, not copied.

    Buffers stay as they are, as after from_pretrained(dtype=...): rotary frequencies in bf16 are off by a radian within
    a thousand tokens.
    """
    twin = copy.deepcopy(model, sharing(frozen_weights(model))).eval().requires_grad_(False)
    for parameter in twin.parameters():
        parameter.data = parameter.data.to(dtype)
    return twin


def copy_on(model: PreTrainedModel, device: torch.device, held: dict[Any, Tensor]) -> PreTrainedModel:
    """A copy that is made on the device, and not first beside the original. Base models of adapters are shared.

    held: what is there of such base models, to be shared by further copies.
    """
    memo: dict[int, Any] = {}  # deepcopy takes what it has
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to(device, copy=True), False)
    frozen = {id(weight) for weight in frozen_weights(model)}
    for buffer in model.buffers():
        if id(buffer) not in frozen:
            memo[id(buffer)] = buffer.to(device, copy=True)
            continue
        if (id(buffer), device) not in held:
            held[id(buffer), device] = buffer.to(device)
        memo[id(buffer)] = held[id(buffer), device]
    return copy.deepcopy(model, memo)


def context_length(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens that prompt and answer may have together; models without learned positions say it in their tokenizer."""
    positions = model.config.get_text_config().to_dict().get("max_position_embeddings")
    return int(positions if positions is not None else tokenizer.model_max_length)


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
    """A causal LM by embedded name, path or hub id. Load-time options: `model_config` (see MODEL_CONFIG_KEYS).

    An adapter's folder gives its base model with the adapter merged into it.
    """
    if is_adapter(source):
        return merge(load_model(base_name(source), model_config), *read_adapter(source))
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
        AutoConfig.from_pretrained(embedded.resolve(base_name(source)), **hub_options(model_config))
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
