"""The lean decoder says what the model itself says."""

import copy

import pytest
import torch
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from comlrl.agents import Agent
from comlrl.decoder import BLOCK, Decoding, LeanDecoding, is_lean, start_decoding
from comlrl.generation import Request, Sampling, generate, left_pad

SIZES = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": 257,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
KINDS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama 3": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, rope_parameters=LLAMA3, attention_bias=True, mlp_bias=True)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "qwen 2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen 3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16)),
}
PROMPTS = [list(range(30, 47)), [5], list(range(100, 106))]


def build(kind):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = KINDS[kind]().eval()
        for name, weight in model.named_parameters():
            if "norm" in name or "bias" in name:
                torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.2)
        return model


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_has_the_logits_of_the_model_s_own_forward(kind, dtype):
    """Prompts of unequal length, samples that share one, rows that leave, and more tokens than a block of the cache."""
    model = build(kind).to(dtype)
    assert is_lean(model)
    ids, mask = left_pad(PROMPTS, 257, torch.device("cpu"))
    index = torch.tensor([0, 0, 1, 2, 2])
    lean, plain = (kind_(model, ids, mask, index) for kind_ in (LeanDecoding, Decoding))
    assert isinstance(start_decoding(model, ids, mask, index), LeanDecoding)
    exact = Decoding(copy.deepcopy(model).float(), ids, mask, index)
    generator = torch.Generator().manual_seed(1)
    errors = []
    for step in range(BLOCK + 20):
        assert exact.logits.std() > 0.5
        if dtype == torch.float32:
            torch.testing.assert_close(lean.logits, plain.logits, rtol=1e-4, atol=1e-4)
        errors.append([(each.logits.float() - exact.logits).norm().item() for each in (lean, plain)])
        if step in (3, 70):
            for each in (lean, plain, exact):
                each.select(torch.tensor([3, 0, 1] if step == 3 else [2]))
        token = torch.randint(256, (len(plain.position),), generator=generator)
        for each in (lean, plain, exact):
            each.step(token)
    ours, usual = torch.tensor(errors).mean(0)
    assert ours <= 1.3 * usual + 1e-4  # in bf16 both round, each in its way


def test_other_models_and_layers_are_left_to_transformers():
    class Changed(LlamaForCausalLM):
        """May do anything."""

    assert not is_lean(Changed(LlamaConfig(**SIZES)))
    assert not is_lean(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)))
    assert not is_lean(Qwen2ForCausalLM(Qwen2Config(**SIZES, use_sliding_window=True, max_window_layers=1)))
    dynamic = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    assert not is_lean(LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=dynamic)))


@pytest.mark.parametrize("kind", KINDS)
def test_samples_and_log_probs_are_the_same_by_both_decoders(kind, tiny, monkeypatch):
    agent = Agent(build(kind), AutoTokenizer.from_pretrained(tiny), "agent_0")
    agent.eos_ids = tuple(range(0, 256, 20))
    requests = [Request(prompt, [1, 2, None]) for prompt in PROMPTS]
    lean = generate(agent, requests, Sampling(max_new_tokens=30))
    monkeypatch.setattr("comlrl.decoder.LEAN", ())
    plain = generate(agent, requests, Sampling(max_new_tokens=30))
    for one, other in zip(lean, plain, strict=True):
        assert [c.token_ids for c in one] == [c.token_ids for c in other]
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a.logprobs, b.logprobs, rtol=1e-4, atol=1e-4)
