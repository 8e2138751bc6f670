"""The log-probs that everything is trained on: equal to a plain twin, in value and gradient, and never large."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from comlrl import logprobs as logprobs_module
from comlrl.agents import Agent
from comlrl.batches import Sample, collate, cut, frozen_logprobs
from comlrl.critics import policy_and_values
from comlrl.engine import Frozen
from comlrl.generation import Request, Sampling, generate, left_pad, right_pad
from comlrl.logprobs import completion_logprobs, head_finish, token_logprobs

CPU = torch.device("cpu")
EOS, PAD = 256, 257
PROMPTS = [list(b"a long prompt: "), list(b"hi"), list(b"middle")]
COMPLETIONS = [list(b"one"), [EOS], [*b"a longer answer", EOS], [*b"two", EOS], [7]]
PROMPT_INDEX = [0, 0, 1, 2, 2]


def plain_logprobs(model, prompt, completion, temperature=1.0):
    """The slow twin: one sequence, one forward, no cache, no pads, one token after the other."""
    logits = model(torch.tensor([prompt + completion])).logits[0]
    picked = [
        torch.log_softmax(logits[len(prompt) + t - 1] / temperature, dim=-1)[token]
        for t, token in enumerate(completion)
    ]
    return torch.stack(picked)


def small_chunks(monkeypatch, size):
    """And none of them kept."""
    monkeypatch.setattr(logprobs_module, "CHUNK", size)
    monkeypatch.setattr(logprobs_module, "KEPT", 0)


def batched(prompts, completions, pad_id=PAD):
    prompt_ids, prompt_mask = left_pad(prompts, pad_id, CPU)
    completion_ids, completion_mask = right_pad(completions, pad_id, CPU)
    return prompt_ids, prompt_mask, completion_ids, completion_mask


def gradient(model, value):
    model.zero_grad()
    value.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def assert_equals_plain_twin(agent, prompts, completions, index, temperature=1.0, finish=None):
    model = agent.model
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(len(completions), max(map(len, completions)), generator=generator)
    logprobs, _ = completion_logprobs(
        model, *batched(prompts, completions), torch.tensor(index), temperature, finish=finish
    )
    shared = gradient(model, (logprobs * weights).sum())
    plain = [plain_logprobs(model, prompts[i], c, temperature) for i, c in zip(index, completions)]
    for row, expected in zip(logprobs, plain):
        torch.testing.assert_close(row[: len(expected)], expected, rtol=1e-5, atol=1e-5)
        assert (row[len(expected) :] == 0).all()
    twin = gradient(model, sum((p * w[: len(p)]).sum() for p, w in zip(plain, weights)))
    assert (shared - twin).norm() <= 1e-5 * twin.norm()


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("name", ["tiny", "gpt2"])
@pytest.mark.parametrize("chunk", [None, 2**24, 258 * 3])  # none: the model's own forward
def test_logprobs_and_gradient_equal_the_plain_twin(request, load_agent, name, temperature, chunk, monkeypatch):
    small_chunks(monkeypatch, chunk)
    agent = load_agent(request.getfixturevalue(name))
    finish = None if chunk is None else agent.finish
    assert_equals_plain_twin(agent, PROMPTS, COMPLETIONS, PROMPT_INDEX, temperature, finish)
    assert_equals_plain_twin(agent, PROMPTS[:1], [[EOS]], [0], temperature, finish)  # no second forward


def _base_config():
    return {
        "vocab_size": 258,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }


def sliding_window_model():
    return MistralForCausalLM(MistralConfig(**_base_config(), sliding_window=6))


def short_convolution_model():
    return Lfm2ForCausalLM(Lfm2Config(**_base_config(), full_attn_idxs=[1, 3]))


def linear_attention_model():
    linear = {
        "head_dim": 8,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**_base_config(), **linear))


def built(build):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


@pytest.mark.parametrize("build", [sliding_window_model, short_convolution_model, linear_attention_model])
def test_other_kinds_of_cache_are_shared_as_well(tiny, build):
    """A window shorter than the prompt; layers whose state has no sequence dimension."""
    agent = Agent(built(build), AutoTokenizer.from_pretrained(tiny), "agent_0")
    assert agent.finish is not None
    assert_equals_plain_twin(agent, PROMPTS, COMPLETIONS, PROMPT_INDEX, finish=agent.finish)
    requests = [Request(prompt, [None, 1, 2]) for prompt in PROMPTS]
    for prompt, completions in zip(PROMPTS, generate(agent, requests, Sampling(max_new_tokens=12))):
        for completion in completions:
            expected = plain_logprobs(agent.model, prompt, completion.token_ids)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=1e-5, atol=1e-5)


def test_the_final_eos_is_learned(load_agent, tiny):
    """Answer [EOS], advantage 1: the gradient of the loss on the EOS logit is -(1 - p)."""
    model = load_agent(tiny).model
    seen = []

    def keep(module, inputs, output):
        output.retain_grad()
        seen.append(output)

    model.lm_head.register_forward_hook(keep)
    logprobs, _ = completion_logprobs(model, *batched(PROMPTS[:1], [[EOS]]), torch.tensor([0]))
    (-1.0 * logprobs.sum()).backward()
    (logits,) = seen
    p = torch.softmax(logits[0, -1], dim=-1)[EOS].item()
    assert 0 < p < 0.1
    assert logits.grad[0, -1, EOS].item() == pytest.approx(-(1 - p), rel=1e-5)


def test_only_sampled_positions_go_through_the_language_model_head(load_agent, tiny):
    """The model's own forward: also pads. Chunks: exactly the sampled tokens."""
    agent = load_agent(tiny)
    rows = []
    agent.model.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(output[..., 0].numel()))
    inputs = (*batched(PROMPTS, COMPLETIONS), torch.tensor(PROMPT_INDEX))
    completion_logprobs(agent.model, *inputs)
    longest = max(map(len, COMPLETIONS))
    assert sum(rows) == len(PROMPTS) + len(COMPLETIONS) * (longest - 1)
    rows.clear()
    completion_logprobs(agent.model, *inputs, finish=agent.finish)
    assert sum(rows) == sum(map(len, COMPLETIONS))
    rows.clear()
    generate(agent, [Request(prompt, [0, 1]) for prompt in PROMPTS], Sampling(max_new_tokens=1))
    assert sum(rows) == len(PROMPTS)  # of prompts only the last position, once for all samples


def test_no_more_than_a_chunk_of_logits_is_made_at_once(load_agent, tiny, monkeypatch):
    """Nor kept for backward, which makes each chunk again."""
    small_chunks(monkeypatch, 258 * 4)
    agent, rows, saved = load_agent(tiny), [], []
    agent.model.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(output[..., 0].numel()))

    def pack(tensor):
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        logprobs, entropies = completion_logprobs(
            agent.model, *batched(PROMPTS, COMPLETIONS), torch.tensor(PROMPT_INDEX), 1.0, "gradient", agent.finish
        )
    count = -(-sum(map(len, COMPLETIONS)) // 4)
    assert len(rows) == count
    assert max(saved) <= max(p.numel() for p in agent.model.parameters())
    assert not any(size % 258 == 0 and size < 258 * 64 for size in saved)
    (logprobs + entropies).sum().backward()
    assert len(rows) == 2 * count
    assert max(rows) <= 4


@pytest.mark.parametrize("entropy", ["value", "gradient", "none"])
def test_chunked_entropies_are_those_of_whole_logits(load_agent, tiny, entropy, monkeypatch):
    agent = load_agent(tiny)
    inputs = (*batched(PROMPTS, COMPLETIONS), torch.tensor(PROMPT_INDEX), 0.7, entropy)
    whole = completion_logprobs(agent.model, *inputs)
    expected = gradient(agent.model, sum(whole).sum())
    small_chunks(monkeypatch, 258 * 3)
    found = completion_logprobs(agent.model, *inputs, agent.finish)
    torch.testing.assert_close(found, whole)
    torch.testing.assert_close(gradient(agent.model, sum(found).sum()), expected, rtol=1e-4, atol=1e-5)
    assert found[1].requires_grad == (entropy == "gradient")


def test_processes_that_keep_step_make_equally_many_chunks(load_agent, tiny, monkeypatch):
    """Under ZeRO-3 each use of the head is a collective: who has fewer tokens makes emptier chunks."""
    agent, rows = load_agent(tiny), []
    small_chunks(monkeypatch, 258)
    agent.model.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(output[..., 0].numel()))
    inputs = (*batched(PROMPTS[:1], [[65, 66]]), torch.tensor([0]), 1.0, "value", agent.finish)
    plain = completion_logprobs(agent.model, *inputs)
    expected = gradient(agent.model, plain[0].sum())
    rows.clear()
    padded = completion_logprobs(agent.model, *inputs, most_tokens=5)
    assert rows == [1, 1, 0, 0, 0]
    torch.testing.assert_close(padded, plain)
    torch.testing.assert_close(gradient(agent.model, padded[0].sum()), expected)
    assert len(rows) == 10


# --- models that do something to their logits ---


def capped_model():
    config = _base_config() | {"head_dim": 8, "eos_token_id": EOS}
    model = Gemma2ForCausalLM(Gemma2Config(**config, final_logit_softcapping=0.5, attn_implementation="sdpa"))
    with torch.no_grad():
        model.lm_head.weight.mul_(20.0)  # so that the cap acts
    return model


def scaled_model():
    return CohereForCausalLM(CohereConfig(**_base_config(), logit_scale=7.5))


def divided_model():
    return GraniteForCausalLM(GraniteConfig(**_base_config(), logits_scaling=0.25))


def biased_model():
    model = LlamaForCausalLM(LlamaConfig(**_base_config()))
    model.lm_head = torch.nn.Linear(32, 258, bias=True)
    return model


class Squared(LlamaForCausalLM):
    """Does what no other model does."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + 3.0 * output.logits**2
        return output


def unknown_model():
    return Squared(LlamaConfig(**_base_config()))


@pytest.mark.parametrize("build", [capped_model, scaled_model, divided_model, biased_model, unknown_model])
def test_what_a_model_does_to_its_logits_is_done_in_chunks_too(tiny, build, monkeypatch):
    """Capped, scaled, divided, biased; what is not known goes through the model's own forward."""
    small_chunks(monkeypatch, 258 * 3)
    agent = Agent(built(build), AutoTokenizer.from_pretrained(tiny), "agent_0")
    assert (agent.finish is None) == (build is unknown_model)
    assert_equals_plain_twin(agent, PROMPTS, COMPLETIONS, PROMPT_INDEX, 0.5, agent.finish)
    samples = [
        Sample(PROMPTS[i], ids, 0, str(n), 0.0, 1.0, True, False, torch.zeros(len(ids)))
        for n, (i, ids) in enumerate(zip(PROMPT_INDEX, COMPLETIONS))
    ]
    found = frozen_logprobs(samples, agent, Frozen(agent.model), 0.5, 10**4)
    values = agent.attach_value_head()
    batch = collate(samples, agent)
    shared, _, _ = policy_and_values(values, batch, agent.finish, 0.5, "value", False)
    for n, (i, ids) in enumerate(zip(PROMPT_INDEX, COMPLETIONS)):
        expected = plain_logprobs(agent.model, PROMPTS[i], ids, 0.5)
        torch.testing.assert_close(found[n], expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(shared[n, : len(ids)], expected, rtol=1e-5, atol=1e-5)


def test_a_cap_that_does_not_act_yet_is_found(tiny):
    """On tiny logits soft-capping changes next to nothing; it must be seen before training makes them large."""
    model = built(capped_model)
    with torch.no_grad():
        model.lm_head.weight.mul_(1e-6)
    finish = head_finish(model.eval())
    assert finish(torch.tensor(100.0)).item() == 0.5


def test_left_padding_moves_nothing_with_learned_positions(load_agent, gpt2):
    """The naive forward, which numbers pads as positions, is far off: so the test can fail."""
    model = load_agent(gpt2).model
    prompt, completion = PROMPTS[1], COMPLETIONS[2]
    longer = [*b"1234567", *prompt]  # makes the batch 7 wider
    alone, _ = completion_logprobs(model, *batched([prompt], [completion]), torch.tensor([0]))
    batch = batched([longer, prompt], [completion, completion])
    padded, _ = completion_logprobs(model, *batch, torch.tensor([0, 1]))
    torch.testing.assert_close(padded[1], alone[0], rtol=1e-5, atol=1e-5)
    ids = torch.tensor([[PAD] * 7 + prompt + completion])
    mask = (torch.arange(ids.shape[1]) >= 7).long()[None]
    positions = torch.arange(ids.shape[1])[None]
    naive = model(ids, attention_mask=mask, position_ids=positions).logits[0].log_softmax(-1)
    start = 7 + len(prompt) - 1
    naive = naive[start : start + len(completion)].gather(1, torch.tensor(completion)[:, None])[:, 0]
    assert (naive - alone[0]).abs().max() > 0.3


@pytest.mark.parametrize("name", ["tiny", "gpt2"])
def test_what_stands_on_pads_changes_nothing(request, load_agent, name):
    model = load_agent(request.getfixturevalue(name)).model
    results = []
    for pad_id in (PAD, 65):
        logprobs, entropies = completion_logprobs(
            model, *batched(PROMPTS, COMPLETIONS, pad_id), torch.tensor(PROMPT_INDEX)
        )
        results.append((logprobs, entropies, gradient(model, logprobs.sum())))
    mask = right_pad(COMPLETIONS, PAD, CPU)[1].bool()
    for logprobs, entropies, _ in results:
        assert (logprobs[~mask] == 0).all()
        assert (entropies[~mask] == 0).all()
        assert (logprobs[mask] < 0).all()
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-6)


def test_pads_have_exactly_no_gradient_and_token_logprobs_equal_the_definition():
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(3, 4, 11, generator=generator)).requires_grad_()
    ids = torch.randint(11, (3, 4), generator=generator)
    mask = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0]])
    logprobs, entropies = token_logprobs(logits, ids, mask, temperature=0.5)
    logprobs.sum().backward()
    assert (logits.grad[mask == 0] == 0).all()
    assert (logits.grad[mask == 1].abs().sum(-1) > 0).all()
    for row in range(3):
        for t in range(4):
            distribution = torch.distributions.Categorical(logits=logits[row, t].detach() / 0.5)
            expected = distribution.log_prob(ids[row, t]) if mask[row, t] else torch.tensor(0.0)
            entropy = distribution.entropy() if mask[row, t] else torch.tensor(0.0)
            torch.testing.assert_close(logprobs[row, t].detach(), expected)
            torch.testing.assert_close(entropies[row, t], entropy)
    assert not entropies.requires_grad


def test_entropy_has_a_gradient_on_request_only():
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0), requires_grad=True)
    ids, mask = torch.zeros(2, 3, dtype=torch.long), torch.tensor([[1, 1, 1], [1, 0, 0]])
    logprobs, entropies = token_logprobs(logits, ids, mask, 0.7, entropy="gradient")
    entropies.sum().backward()
    found, logits.grad = logits.grad, None
    expected = torch.distributions.Categorical(logits=logits / 0.7).entropy() * mask
    expected.sum().backward()
    torch.testing.assert_close(entropies, expected)
    torch.testing.assert_close(found, logits.grad)
    assert (found[mask == 0] == 0).all()
    without, none = token_logprobs(logits, ids, mask, 0.7, entropy="none")
    assert torch.equal(without, logprobs)
    assert (none == 0).all()
    with torch.no_grad():
        assert not token_logprobs(logits, ids, mask, 0.7, entropy="gradient")[1].requires_grad


def test_dropout_never_acts(load_agent, gpt2):
    """A model that comes in train mode with dropout 0.5 gives one log-prob, also in bf16 and after a step."""
    model = AutoModelForCausalLM.from_pretrained(gpt2).train()
    agent = Agent(model, AutoTokenizer.from_pretrained(gpt2), "agent_0", compute_dtype=torch.bfloat16)
    inputs = (*batched(PROMPTS, COMPLETIONS), torch.tensor(PROMPT_INDEX))
    first, _ = completion_logprobs(agent.model, *inputs)
    first.sum().backward()
    agent.weights_changed()
    second, _ = completion_logprobs(agent.model, *inputs)
    assert torch.equal(first, second)
    sampler, _ = completion_logprobs(agent.sampler, *inputs)
    again, _ = completion_logprobs(agent.sampler, *inputs)
    assert torch.equal(sampler, again)


# --- micro-batches ---


def make_samples():
    return [
        Sample(PROMPTS[i], ids, 0, str(n), 0.0, 1.0, True, False, torch.zeros(len(ids)))
        for n, (i, ids) in enumerate(zip(PROMPT_INDEX, COMPLETIONS))
    ]


@pytest.mark.parametrize("budget", [1, 40, 70, 10_000])
def test_logprobs_do_not_depend_on_how_samples_are_cut(load_agent, tiny, budget):
    agent, samples = load_agent(tiny), make_samples()
    batches = [collate(part, agent) for part in cut(samples, budget)]
    assert sorted(s.name for b in batches for s in b.samples) == [s.name for s in samples]
    for batch in batches:
        tokens = batch.prompt_ids.numel() + batch.completion_ids.numel()
        assert tokens <= budget or len(batch.samples) == 1
    found = frozen_logprobs(samples, agent, Frozen(agent.model), 0.5, budget)
    for place, sample in enumerate(samples):
        expected = plain_logprobs(agent.model, sample.prompt_ids, sample.token_ids, 0.5)
        torch.testing.assert_close(found[place], expected, rtol=1e-5, atol=1e-5)


def test_with_pad_equal_eos_exactly_the_sampled_tokens_are_trained(load_agent, tiny):
    """[t, t, eos] beside an answer of five tokens: three trained tokens, the last of them EOS."""
    agent = load_agent(tiny)
    agent.pad_id = EOS
    answers = [[65, 66, EOS], [65, 66, 67, 68, EOS]]
    samples = [Sample(PROMPTS[0], a, 0, "", 0.0, 1.0, True, False, torch.zeros(len(a))) for a in answers]
    batch = collate(samples, agent)
    assert batch.completion_ids[0].tolist() == [65, 66, EOS, EOS, EOS]
    assert batch.completion_mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    logprobs, _ = batch.logprobs(Frozen(agent.model).run, agent, 1.0, entropy="value")
    assert (logprobs[0, :3] < 0).all()
    assert (logprobs[0, 3:] == 0).all()


@pytest.mark.full
def test_a_learning_step_does_not_hold_batch_times_length_times_vocabulary(tmp_path):
    """4 samples of 2,048 tokens, 151,936 ids: the logits alone would be 5 GB. With KL and entropy terms."""
    script = Path(__file__).parent / "learning_memory.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(script.parent.parent)},
    )
    assert done.returncode == 0, done.stderr[-5000:]
    assert int(done.stdout.split()[-1]) < 2**30
