"""From names and models to a team: what is refused before anything is loaded, and what loading does."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from comlrl import loading
from comlrl.agents import load_model, load_tokenizer, resolve_dtype
from comlrl.generation import Request, Sampling, generate
from comlrl.loading import build_formatters, check_team, load_references, load_team, resolve_devices


def check(agent_model=None, agents=None, count=2, tokenizer=None, model_config=None, devices=None, dtype="auto"):
    return check_team(agent_model, agents, count, tokenizer, model_config, devices, dtype)


@pytest.fixture
def model(tiny):
    return AutoModelForCausalLM.from_pretrained(tiny)


@pytest.fixture
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny)


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(loading, "load_model", refuse)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", refuse)


# --- refused before anything is loaded ---


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "give agent_model .* or agents"),
        ({"agents": "tiny"}, "agents must be a list, one an agent, not str"),
        ({"agents": {"a": "tiny"}}, "agents must be a list, one an agent, not dict"),
        ({"agents": ["tiny"]}, "agents has 1 entries for 2 models"),
        ({"agents": ["tiny", 3]}, r"agents\[1\] must be a name or a transformers model, not int"),
        ({"agents": ["tiny", torch.nn.Linear(1, 1)]}, r"agents\[1\] must be .* not Linear"),
        ({"agent_model": torch.nn.Linear(1, 1)}, "agent_model must be a name or a path, not Linear"),
        ({"agent_model": "tiny", "agents": ["tiny", "smollm2-135m"]}, r"agent_model='tiny' and agents\[1\]"),
        ({"agent_model": "no/such-model-anywhere"}, "model 'no/such-model-anywhere' cannot be found"),
        ({"agents": ["tiny", "./missing"]}, r"model './missing' cannot be found: .*tiny, smollm2-135m"),
        ({"agent_model": "tiny", "tokenizer": "./missing"}, "tokenizer './missing' cannot be found"),
        ({"agent_model": "tiny", "tokenizer": ["tiny"]}, "tokenizer has 1 entries for 2 models"),
        ({"agent_model": "tiny", "model_config": {"dtyp": "bfloat16"}}, "unknown key 'dtyp'; known are dtype"),
        ({"agent_model": "tiny", "model_config": {"trust_remote_code": True}}, "goes into model_kwargs"),
        ({"agent_model": "tiny", "model_config": {"dtype": "bf16"}}, "dtype='bf16': must be one of auto, float32"),
        ({"agent_model": "tiny", "devices": ["cpu"] * 3}, "give one device, or 2"),
        ({"agent_model": "tiny", "devices": "gpu"}, "agent_devices='gpu': 'gpu' is no device"),
        ({"agent_model": "tiny", "devices": "cuda:77"}, "cuda:77 does not exist"),
    ],
)
def test_a_mistake_is_a_value_error_that_says_what_to_do(given, match):
    with pytest.raises(ValueError, match=match):
        check(**given)


@pytest.mark.usefixtures("nothing_is_loaded")
def test_flash_attention_is_refused_where_it_cannot_run():
    asked = {"attn_implementation": "flash_attention_2"}
    with pytest.raises(ValueError, match=r"flash_attention_2'.*(requirements-gpu\.txt|needs a CUDA GPU).*sdpa"):
        check("tiny", model_config=asked)


def test_the_same_model_object_twice_is_refused(model, tokenizer):
    """Two optimizers silently fought over one set of weights."""
    with pytest.raises(ValueError, match=r"the same model object is given for two agents.*copy\.deepcopy"):
        check(agents=[model, model], tokenizer=tokenizer)


def test_models_that_share_storage_are_refused(model, tokenizer):
    other = copy.deepcopy(model)
    other.model.layers[1] = model.model.layers[1]
    with pytest.raises(ValueError, match="agents 0 and 1 share weights in memory"):
        load_team(check(agents=[model, other], tokenizer=tokenizer))
    third = copy.deepcopy(model)
    third.model.norm.weight.data = model.model.norm.weight.data
    with pytest.raises(ValueError, match="agents 0 and 2 share weights"):
        load_team(check(agents=[model, copy.deepcopy(model), third], count=3, tokenizer=tokenizer))


def test_loaded_models_need_their_tokenizers(model, tokenizer):
    with pytest.raises(ValueError, match=r"agents\[1\] is a loaded model: give its tokenizer too"):
        check(agents=["tiny", model])
    with pytest.raises(ValueError, match=r"agents\[1\] is a loaded model"):
        check(agents=["tiny", model], tokenizer=[tokenizer, None])
    members = check(agents=["tiny", model], tokenizer=[None, tokenizer])
    assert [member.tokenizer for member in members] == ["tiny", tokenizer]


# --- loaded ---


def test_one_name_makes_separate_models(tiny):
    team = load_team(check("tiny", count=3))
    assert [agent.name for agent in team] == ["agent_0", "agent_1", "agent_2"]
    with torch.no_grad():
        team[0].model.lm_head.weight.zero_()
    assert team[1].model.lm_head.weight.abs().sum() > 0
    assert len({id(agent.model) for agent in team}) == 3


def test_names_paths_and_objects_mix(tiny, tiny_other, model, tokenizer):
    team = load_team(check(agents=["tiny", tiny_other, model], count=3, tokenizer=[None, None, tokenizer]))
    assert [agent.model.config.hidden_size for agent in team] == [64, 32, 64]
    assert [len(agent.tokenizer) for agent in team] == [258, 260, 258]
    assert team[2].model is model


def test_a_folder_that_holds_only_a_tokenizer_will_do(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "words")
    (agent,) = load_team(check("tiny", count=1, tokenizer=str(tmp_path / "words")))
    assert agent.encode("ab") == [64, 65]


def test_agent_model_may_repeat_what_agents_say(tiny, model, tokenizer):
    assert len(check(tiny, agents=[tiny, tiny])) == 2
    assert len(check(tiny, agents=[model], count=1, tokenizer=tokenizer)) == 1  # its name_or_path


def test_special_tokens_widen_the_embeddings(tiny, model, tokenizer):
    """Token ids were out of range at first use."""
    special = {"special_tokens": {"additional_special_tokens": ["<start>", "<stop>"]}}
    team = load_team(check(agents=[tiny, model], tokenizer=[None, tokenizer], model_config=special))
    for agent in team:
        assert agent.model.get_input_embeddings().num_embeddings == len(agent.tokenizer) == 260
        assert agent.model.lm_head.weight.data_ptr() == agent.model.get_input_embeddings().weight.data_ptr()
        prompt = agent.encode("<start>go<stop>")
        assert prompt[0] == 258
        assert len(prompt) == 4
        generate(agent, [Request(prompt, [None])], Sampling(max_new_tokens=2))
    (again,) = load_team(check(tiny, count=1, model_config={"special_tokens": {"pad_token": "<pad>"}}))
    assert again.model.get_input_embeddings().num_embeddings == 258  # nothing new, nothing widened


def test_model_config_reaches_from_pretrained(tiny):
    assert load_model(tiny).config._attn_implementation == "sdpa"
    eager = load_model(tiny, {"attn_implementation": "eager"})
    assert eager.config._attn_implementation == "eager"
    inside = load_model(tiny, {"model_kwargs": {"attn_implementation": "eager", "max_position_embeddings": 99}})
    assert inside.config._attn_implementation == "eager"
    assert inside.config.max_position_embeddings == 99
    assert load_tokenizer("tiny", {"model_kwargs": {"max_position_embeddings": 99}}).eos_token == "<eos>"
    with pytest.raises(ValueError, match="unknown key 'device_map'"):
        load_model(tiny, {"device_map": "auto"})


@pytest.mark.parametrize(
    "config",
    [
        {"dtype": "bfloat16"},
        {"torch_dtype": "bfloat16"},
        {"dtype": torch.bfloat16},
        {"torch_dtype": torch.bfloat16},
        {"model_kwargs": {"torch_dtype": "bfloat16"}},
        {"model_kwargs": {"dtype": torch.bfloat16}},
    ],
)
def test_a_dtype_is_what_is_computed_in_and_weights_stay_fp32(config):
    """Wherever it stands."""
    (agent,) = load_team(check("tiny", count=1, model_config=config))
    assert agent.compute_dtype == torch.bfloat16
    assert {p.dtype for p in agent.model.parameters()} == {torch.float32}
    with pytest.raises(ValueError, match=r"args\.dtype='float32' differ"):
        check("tiny", count=1, model_config=config, dtype="float32")


def test_resolve_dtype():
    cpu = torch.device("cpu")
    assert resolve_dtype("float16", cpu) == torch.float16
    assert resolve_dtype("auto", cpu) in (torch.float32, torch.bfloat16)


def test_references_are_frozen_copies_in_the_compute_dtype(load_agent, tiny):
    agents = [load_agent(tiny), load_agent(tiny, compute_dtype=torch.bfloat16)]
    references = list(load_references(agents, None).values())
    for agent, reference, dtype in zip(agents, references, (torch.float32, torch.bfloat16)):
        assert {p.dtype for p in reference.parameters()} == {dtype}
        assert not any(p.requires_grad for p in reference.parameters())
        assert not reference.training
        before = reference.lm_head.weight.clone()
        with torch.no_grad():
            agent.model.lm_head.weight.add_(1.0)
        assert torch.equal(reference.lm_head.weight, before)
        assert all(p.requires_grad for p in agent.model.parameters())


def test_resolve_devices():
    default = "cuda:0" if torch.cuda.is_available() else "cpu"
    assert resolve_devices(None, 2) == resolve_devices("auto", 2) == [default] * 2
    assert resolve_devices("cpu", 2) == resolve_devices(["cpu"], 2) == resolve_devices(("cpu", "cpu"), 2) == ["cpu"] * 2


# --- formatters ---


def test_formatters_are_one_or_one_an_agent():
    def shout(row):
        return row["prompt"].upper()

    row = {"prompt": "x"}
    assert [f(row) for f in build_formatters(None, 2)] == ["x", "x"]
    assert [f(row) for f in build_formatters(shout, 2)] == ["X", "X"]
    assert [f(row) for f in build_formatters([None, shout], 2)] == ["x", "X"]
    assert [f(row) for f in build_formatters((shout, shout), 2)] == ["X", "X"]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ([str], "must be one function, or a list of 2"),
        ("text", "must be one function, or a list of 2"),
        ([str, "text"], r"formatters\[1\] is not callable: 'text'"),
    ],
)
def test_other_formatters_are_refused(given, match):
    with pytest.raises(ValueError, match=match):
        build_formatters(given, 2)


def test_a_row_without_prompt_needs_a_formatter():
    with pytest.raises(ValueError, match=r"no column 'prompt' .it has question, answer.; give formatters"):
        build_formatters(None, 1)[0]({"question": "?", "answer": "!"})
