"""Shared by all tests: no network, one thread, a working directory of its own, and a few small models on disk."""

import os
import signal

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from comlrl import embedded
from comlrl.agents import Agent
from comlrl.rewards import Rewards

torch.set_num_threads(1)  # the models are so small that a second thread only costs


@pytest.fixture(autouse=True)
def signals_are_not_ignored():
    """`nohup` and `&` of a shell start programs with SIGHUP and SIGINT ignored, and children would inherit that."""
    wanted = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    """Each test runs in an empty folder, so that `runs/` and the like never land in the repository."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def make_rewards():
    """`Rewards`, closed after the test."""
    built = []

    def make(*args, **kwargs):
        built.append(Rewards(*args, **kwargs))
        return built[-1]

    yield make
    for rewards in built:
        rewards.close()


@pytest.fixture(scope="session")
def tiny():
    """Folder of the embedded model `tiny`: byte-level Qwen3, 258 tokens, hidden size 64, tied embeddings."""
    return embedded.folder("tiny")


@pytest.fixture(scope="session")
def tiny_other(tmp_path_factory):
    """Folder of another one: hidden size 32, 260 tokens, other weights."""
    path = tmp_path_factory.mktemp("models") / "tiny_other"
    embedded.build_tiny(path, seed=1, hidden_size=32, extra_tokens=("<x>", "<y>"))
    return str(path)


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory, tiny):
    """Folder of a GPT-2 with `tiny`'s tokenizer: learned positions (256 of them), dropout 0.5."""
    path = tmp_path_factory.mktemp("models") / "gpt2"
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=256,
        n_embd=32,
        n_layer=2,
        n_head=2,
        attn_pdrop=0.5,
        embd_pdrop=0.5,
        resid_pdrop=0.5,
        initializer_range=0.2,  # so that a wrong position moves the log-probs a lot
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        GPT2LMHeadModel(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def load_agent():
    """load_agent(folder, name="agent_0", compute_dtype=...) -> a fresh Agent, free to be changed."""

    def load(folder, name="agent_0", **options):
        model = AutoModelForCausalLM.from_pretrained(folder)
        return Agent(model, AutoTokenizer.from_pretrained(folder), name, **options)

    return load
