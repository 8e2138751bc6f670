"""LoRA (Hu et al. 2021): agents of one checkpoint share its weights, which stay as they are; each trains an adapter.

An agent's model is made of modules of its own around the base model's tensors. In it those tensors are no parameters
but buffers that belong to no file. So optimizers, checkpoints, hashes and DeepSpeed see the adapter only, any number
of models can hold the same tensors, and little else has to ask whether a model has an adapter.
"""

import copy
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel

from comlrl.config import option

NAME = "default"  # PEFT's, of the one adapter that a model has
ALL_LINEAR = "all-linear"
QUANTIZED_BYTES = {"4bit": 0.5 + 4 / 64, "8bit": 1.0}  # a parameter; NF4 has a float32 scale every 64


@dataclass
class LoraSettings:
    """What is trained of an agent: low-rank changes of some layers."""

    r: int = option(16, "rank")
    alpha: float = option(32.0, "a layer's change is B A x times alpha / r")
    dropout: float = option(0.0, "only 0: the log-probs of an answer must not depend on chance")
    target_modules: str | list[str] = option(
        ALL_LINEAR, "names of layers, or all-linear: all linear ones but the language-model head"
    )
    quantization: str | None = option(
        None, "4bit or 8bit: linear layers of the base (package bitsandbytes); none: whole"
    )

    def __post_init__(self) -> None:
        if self.r < 1:
            raise ValueError(f"r={self.r}: must be at least 1")
        if self.alpha <= 0:
            raise ValueError(f"alpha={self.alpha}: must be above 0")
        if self.dropout != 0:
            raise ValueError(
                f"dropout={self.dropout}: must be 0, since the same answer would have other log-probs each time that "
                "they are computed, and ratios of them would be noise"
            )
        if isinstance(self.target_modules, str) and self.target_modules != ALL_LINEAR:
            self.target_modules = [self.target_modules]
        if self.quantization not in (None, *QUANTIZED_BYTES):
            raise ValueError(f"quantization={self.quantization!r}: must be 4bit, 8bit or none")
        if not self.target_modules:
            raise ValueError(f"target_modules=[]: name at least one layer, for example q_proj, or use {ALL_LINEAR}")

    def peft_config(self, base_name: str | None) -> LoraConfig:
        return LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,  # type: ignore[arg-type]  # PEFT only divides it
            target_modules=self.target_modules,
            task_type="CAUSAL_LM",
            base_model_name_or_path=base_name,
        )


def check_quantization(settings: LoraSettings) -> None:
    if settings.quantization is not None and importlib.util.find_spec("bitsandbytes") is None:
        raise ValueError(
            f"lora.quantization={settings.quantization!r}: the package bitsandbytes is not installed; run: pip install "
            "bitsandbytes, or leave it out"
        )


def quantized_kwargs(quantization: str, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of from_pretrained for a base in 4 (NF4, Dettmers et al. 2023) or 8 bits; it computes in `dtype`."""
    four = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
    config = BitsAndBytesConfig(**(four if quantization == "4bit" else {"load_in_8bit": True}))
    return {"quantization_config": config, "device_map": {"": str(device)}}


@dataclass
class Adapter:
    """What an agent with an adapter knows of it and of the base model.

    config: PEFT's. base: the model without adapters, which is the agent's reference too; None in a process that does no
    work of the agent. base_hash: of its fp32 weights. reload: the base once more, on a device.
    """

    config: LoraConfig
    base: PreTrainedModel | None
    base_hash: str
    reload: Callable[[torch.device], PreTrainedModel]


# ---- models ---------------------------------------------------------------------------------------------------------


def freeze(model: nn.Module) -> None:
    """Make every weight that is not trained a buffer that belongs to no file; the tensor is the same object."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                delattr(module, name)
                module.register_buffer(name, parameter, persistent=False)


def frozen_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights that `freeze` has made buffers."""
    return [buffer for buffer in model.buffers() if isinstance(buffer, nn.Parameter)]


def sharing(weights: Iterable[Tensor]) -> dict[int, Any]:
    """For copy.deepcopy: a copy made with this memo holds the same tensors."""
    return {id(weight): weight for weight in weights}


def add_adapter(
    base: PreTrainedModel, config: LoraConfig, seed: int, weights: Mapping[str, Tensor] | None = None
) -> PreTrainedModel:
    """A model of the base's class around its tensors, with an adapter in fp32 as its only parameters.

    seed: of a fresh adapter, which changes nothing at first. weights: of another one, by PEFT's names.
    """
    model = copy.deepcopy(base, sharing(base.parameters()))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, NAME)
    config.target_modules = sorted(config.target_modules or ())  # PEFT's set would be written in any order
    freeze(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.float()
            if weights is not None:
                parameter.copy_(weights[peft_name(name)])
    return model.eval()


def without_adapter(model: PreTrainedModel) -> PreTrainedModel:
    """A model around the same frozen weights that has no adapter."""
    plain = copy.deepcopy(model, sharing(frozen_weights(model)))
    for name, module in list(plain.named_modules()):
        if isinstance(module, LoraLayer):
            plain.set_submodule(name, module.base_layer)
    return plain


def has_adapter(model: Any) -> bool:
    return isinstance(model, nn.Module) and any(isinstance(module, LoraLayer) for module in model.modules())


def unwrapped(model: Any, name: str) -> Any:
    """The transformers model inside a PeftModel, if it is one that can be trained; other objects as they are."""
    if isinstance(model, PeftModel):
        if not isinstance(model.active_peft_config, LoraConfig):
            raise ValueError(f"{name}: its adapter is {type(model.active_peft_config).__name__}; only LoRA is here")
        model = model.get_base_model()
    if has_adapter(model):
        adapter = [parameter for key, parameter in model.named_parameters() if "lora_" in key]
        frozen = sum(not parameter.requires_grad for parameter in adapter)
        if frozen:
            raise ValueError(
                f"{name}: its adapter is frozen ({frozen} of {len(adapter)} tensors would not be trained); load it "
                "with PeftModel.from_pretrained(..., is_trainable=True)"
            )
    return model


def check_target(model: PreTrainedModel, settings: LoraSettings, name: str) -> int:
    """Parameters of an adapter on this model, whose weights are on meta: it is changed. ValueError if there is no such
    layer."""
    linear = sorted({key.rpartition(".")[2] for key, module in model.named_modules() if isinstance(module, nn.Linear)})
    model.requires_grad_(False)
    try:
        inject_adapter_in_model(settings.peft_config(None), model, NAME)
    except ValueError as error:
        raise ValueError(
            f"lora.target_modules={settings.target_modules!r} does not fit {name}, whose linear layers are "
            f"{', '.join(linear)} ({str(error).splitlines()[0]:.200})"
        ) from error
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


# ---- files ----------------------------------------------------------------------------------------------------------


def peft_name(name: str) -> str:
    """Of a parameter, in PEFT's files."""
    return "base_model.model." + re.sub(rf"\.{NAME}(?=\.|$)", "", name)


def is_adapter(source: str) -> bool:
    """Whether a model's name is a folder with an adapter."""
    return Path(source, CONFIG_NAME).is_file()


def base_name(source: str) -> str:
    """The model that an adapter's folder is for; any other name as it is. ValueError for an adapter of another kind."""
    if not is_adapter(source):
        return source
    config = json.loads(Path(source, CONFIG_NAME).read_text(encoding="utf-8"))
    if config.get("peft_type") != "LORA":
        raise ValueError(f"model {source!r}: its adapter is of type {config.get('peft_type')}; only LoRA is here")
    return str(config["base_model_name_or_path"])


def read_adapter(folder: str) -> tuple[LoraConfig, dict[str, Tensor]]:
    """PEFT's config, as for training, and the weights by PEFT's names."""
    config = LoraConfig.from_pretrained(folder)
    config.inference_mode = False  # PEFT's files always say True
    return config, load_file(Path(folder, SAFETENSORS_WEIGHTS_NAME))


def merge(model: PreTrainedModel, config: LoraConfig, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """The model with the adapter's change added to its own weights: a plain model again."""
    merged = PeftModel(model, copy.deepcopy(config), NAME)
    with torch.no_grad():
        for name, parameter in merged.get_base_model().named_parameters():
            if peft_name(name) in weights:
                parameter.copy_(weights[peft_name(name)])
    return merged.merge_and_unload().requires_grad_(True)
