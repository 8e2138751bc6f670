"""LoRA: one base model for all agents of a checkpoint, an adapter each; the same code path as without."""

import copy
import json
import re
from pathlib import Path

import ac_team
import preference_team
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from stopping import assert_same_run, interrupted, reward, rows
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from comlrl import checkpoint
from comlrl.adapters import LoraSettings, frozen_weights
from comlrl.agents import load_model, load_tokenizer
from comlrl.checkpoint import CheckpointError
from comlrl.config import RunConfig, load
from comlrl.decoder import LeanDecoding, start_decoding
from comlrl.export import export
from comlrl.logprobs import completion_logprobs
from comlrl.trainers import CentralizedMAGRPOTrainer, IACTrainer, MAACTrainer, MAGRPOConfig, MAGRPOTrainer
from comlrl.trainers.preference import MADPOIterTrainer, MADPOTrainer, MARLHFIterTrainer, MARLHFTrainer


def build(models=("tiny", "tiny"), kind=MAGRPOTrainer, options=None, **changes):
    settings = {
        "run_name": "run",
        "dtype": "float32",
        "num_generations": 3,
        "max_new_tokens": 4,
        "rollout_buffer_size": 2,
        "agent_learning_rate": 3e-2,
        "num_train_epochs": 2,
        "max_steps": 4,
        "eval_interval": 2,
        "lora": LoraSettings(r=4),
        **changes,
    }
    trainer = kind(
        agents=list(models),
        train_dataset=rows(4),
        eval_dataset=rows(2),
        reward_func=reward,
        args=kind.config_class(**settings),
        **(options or {}),
    )
    trainer.verbose = False
    return trainer


def logprobs(model):
    ids = torch.tensor([[65, 66, 67], [68, 69, 70]])
    ones = torch.ones_like(ids)
    with torch.no_grad():
        return completion_logprobs(model.eval(), ids, ones, ids, ones, torch.arange(2))[0]


def pointers(tensors):
    return {tensor.data_ptr() for tensor in tensors}


# ---- one base -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_agents_and_references_share_one_base_and_train_an_adapter_each(tiny, dtype):
    """The tensors of the base are there once, in the compute dtype, and do not move; all else is the adapters."""
    trainer = build(dtype=dtype, reference_kl_enabled=True)
    first, second = trainer.agents
    base = trainer.references[0].model
    held = pointers(base.parameters())
    assert trainer.references[1].model is base
    assert pointers(frozen_weights(first.model)) == pointers(frozen_weights(second.model)) == held
    assert {weight.dtype for weight in base.parameters()} == {getattr(torch, dtype)}
    assert {weight.dtype for agent in trainer.agents for weight in agent.model.parameters()} == {torch.float32}
    before = {name: weight.clone() for name, weight in base.named_parameters()}
    start = [checkpoint.model_tensors(copy.deepcopy(agent.model)) for agent in trainer.agents]
    assert all("lora_" in name for name in start[0])
    trainer.train()
    for agent in trainer.agents:
        assert pointers(frozen_weights(agent.sampler)) == held
    assert all(torch.equal(before[name], weight) for name, weight in base.named_parameters())
    for agent, old in zip(trainer.agents, start):
        moved = {name: float((old[name] - new).detach().norm()) for name, new in agent.model.named_parameters()}
        assert min(moved.values()) > 0
    one, other = (dict(agent.model.named_parameters()) for agent in trainer.agents)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    if dtype == "float32":  # bfloat16: the plain model rounds elsewhere
        assert torch.equal(logprobs(base), logprobs(load_model("tiny")))


def test_an_untrained_team_is_the_base_model():
    """B is 0 at first, and the KL to the base is exactly 0, in bfloat16 too."""
    plain = build(lora=None, max_steps=1, eval_interval=0)
    plain.train()
    adapted = build(max_steps=1, eval_interval=0, reference_kl_enabled=True)
    adapted.train()
    texts = [
        [json.loads(line)["completion"] for line in (trainer.run.folder / "completions.jsonl").read_text().splitlines()]
        for trainer in (plain, adapted)
    ]
    assert texts[0] == texts[1]
    metrics = json.loads((adapted.run.folder / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics["agent_0/turn_1/reference_kl"] == 0.0
    assert metrics["agent_0/grad_norm"] > 0


def trained_peft(tiny, seed=0, **config):
    """A PeftModel whose adapter changes a lot."""
    model = get_peft_model(load_model(tiny), LoraConfig(r=4, target_modules="all-linear", lora_alpha=8, **config))
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2)
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampling_and_learning_use_the_adapter_as_peft_does(tiny, dtype):
    """Log-probs of sampler, learner and lean decoder are those of a PeftModel with these weights."""
    peft = trained_peft(tiny)
    peft.save_pretrained("start")
    AutoTokenizer.from_pretrained(tiny).save_pretrained("start")
    agent = build(["start", "tiny"], lora=LoraSettings(r=4, alpha=8.0), dtype=dtype).agents[0]
    expected = logprobs(peft.get_base_model())
    assert (expected - logprobs(load_model(tiny))).abs().max() > 0.3
    tolerance = 1e-5 if dtype == "float32" else 0.1
    with agent.autocast():
        assert torch.allclose(logprobs(agent.model), expected, atol=tolerance)
    assert torch.allclose(logprobs(agent.sampler).float(), expected, atol=tolerance)
    ids = torch.tensor([[65, 66, 67]])
    with torch.no_grad():
        decoding = start_decoding(agent.sampler, ids, torch.ones_like(ids), torch.tensor([0]))
        assert type(decoding) is LeanDecoding
        decoding.step(torch.tensor([68]))
        plain = peft(torch.tensor([[65, 66, 67, 68]])).logits[0, -1].log_softmax(-1)
    assert torch.allclose(decoding.logits[0].float().log_softmax(-1), plain, atol=4 * tolerance)


def test_gradients_are_those_of_a_plain_peft_model(tiny):
    peft = trained_peft(tiny)
    peft.save_pretrained("start")
    AutoTokenizer.from_pretrained(tiny).save_pretrained("start")
    agent = build(["start", "start"], lora=LoraSettings(r=4, alpha=8.0)).agents[1]
    ids = torch.tensor([[65, 66, 67], [68, 69, 70]])
    ones = torch.ones_like(ids)
    for model in (peft.get_base_model(), agent.model):
        completion_logprobs(model, ids, ones, ids, ones, torch.arange(2), finish=agent.finish)[0].sum().backward()
    expected = dict(peft.get_base_model().named_parameters())
    for name, parameter in agent.model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name].grad, atol=1e-4), name


def test_another_device_gets_one_base_of_its_own():
    trainer = build(agent_devices=["cpu", "cpu:0"], reference_devices="cpu:0", reference_kl_enabled=True)
    first, second = (pointers(frozen_weights(agent.model)) for agent in trainer.agents)
    assert not first & second
    assert trainer.references[0].model is not trainer.references[1].model
    trainer.train()


# ---- files ----------------------------------------------------------------------------------------------------------


def test_saved_adapters_load_back_to_the_same_log_probs(tiny):
    """By transformers, by PEFT, merged by the export, and as models of the next run."""
    trainer = build()
    trainer.train(checkpoint_dir="ck")
    trainer.save_model("saved")
    export("ck", "adapters")
    export("ck", "whole", merged=True)
    files = [load_file(f"saved/agent_{i}/adapter_model.safetensors") for i in range(2)]
    assert not any(torch.equal(files[0][name], files[1][name]) for name in files[0])  # pairwise different
    for i, agent in enumerate(trainer.agents):
        expected = logprobs(agent.model)
        assert not torch.allclose(expected, logprobs(load_model(tiny)), atol=1e-3)
        for folder in (f"saved/agent_{i}", f"adapters/agent_{i}"):
            assert not Path(folder, "model.safetensors").exists()
            assert torch.equal(logprobs(AutoModelForCausalLM.from_pretrained(folder)), expected)
            back = PeftModel.from_pretrained(load_model(tiny), folder)
            assert torch.equal(logprobs(back.get_base_model()), expected)
            assert AutoTokenizer.from_pretrained(folder).get_vocab() == agent.tokenizer.get_vocab()
            assert torch.allclose(logprobs(load_model(folder)), expected, atol=1e-5)  # merged
        assert not Path(f"whole/agent_{i}/adapter_config.json").exists()
        assert torch.allclose(logprobs(AutoModelForCausalLM.from_pretrained(f"whole/agent_{i}")), expected, atol=1e-5)
    again = build(["saved/agent_0", "saved/agent_1"], reference_kl_enabled=True)
    assert pointers(frozen_weights(again.agents[0].model)) == pointers(frozen_weights(again.agents[1].model))
    for agent, other in zip(again.agents, trainer.agents):
        assert torch.equal(logprobs(agent.model), logprobs(other.model))
    assert torch.equal(logprobs(again.references[0].model), logprobs(load_model(tiny)))
    build(["saved/agent_0", "whole/agent_1"], lora=None).train()  # merged, and all weights trained


def test_a_merged_export_needs_the_base_that_was_trained_on(tiny_other):
    trainer = build([tiny_other, tiny_other])
    trainer.train(checkpoint_dir="ck")
    path = Path(tiny_other) / "model.safetensors"
    data = path.read_bytes()
    model = load_model(tiny_other)
    with torch.no_grad():
        model.model.norm.weight.add_(1.0)
    try:
        model.save_pretrained(tiny_other)
        with pytest.raises(ValueError, match=r"agent_0: .* is not the model that the adapter was trained on"):
            export("ck", "whole", merged=True)
        with pytest.raises(CheckpointError, match=r"agent_0: the checkpoint holds an adapter of .* hash"):
            build([tiny_other, tiny_other]).load_checkpoint("ck")
    finally:
        path.write_bytes(data)


def test_checkpoints_hold_adapters_only(tiny):
    trainer = build(reference_kl_enabled=True)
    trainer.train(checkpoint_dir="ck")
    folder = checkpoint.newest_good(Path("ck"))
    weights = load_file(folder / "agent_0" / "weights.safetensors")
    adapter = sum(parameter.numel() for parameter in trainer.agents[0].model.parameters())
    assert sum(tensor.numel() for tensor in weights.values()) == adapter
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    state = checkpoint.read_state(folder)
    assert [(m["source"], m["base_hash"]) for m in state["models"]] == [("tiny", trainer.reference_hashes[0])] * 2
    assert not Path("ck/references").exists()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stopped_and_resumed_is_as_never_stopped(dtype):
    changes = {"dtype": dtype, "reference_kl_enabled": True, "epochs_per_rollout": 2, "train_batch_size": 1}
    whole = build(output_dir="a", **changes)
    whole.train()
    interrupted(build(output_dir="b", **changes), "gradients", 3, "b/ck")
    again = build(output_dir="b", **changes)
    again.train(resume_from_checkpoint="b/ck", checkpoint_dir="b/ck")
    assert again.step == 4
    assert_same_run(whole, again)


def test_what_is_trained_cannot_change_on_resume():
    build().train(checkpoint_dir="ck")
    with pytest.raises(CheckpointError, match=r"lora was .* and is None: it cannot change on resume"):
        build(lora=None).load_checkpoint("ck")
    with pytest.raises(CheckpointError, match=r"lora was .*'r': 4.* and is .*'r': 8"):
        build(lora=LoraSettings(r=8)).load_checkpoint("ck")


# ---- loaded models --------------------------------------------------------------------------------------------------


def test_a_peft_model_is_trained_as_it_is(tiny):
    models = [trained_peft(tiny, seed) for seed in range(2)]
    expected = [logprobs(model.get_base_model()) for model in models]
    options = {"tokenizer": AutoTokenizer.from_pretrained(tiny)}
    trainer = build(models, lora=None, options=options, reference_kl_enabled=True)
    for agent, wanted in zip(trainer.agents, expected):
        assert torch.equal(logprobs(agent.model), wanted)
        assert all("lora_" in name for name, _ in agent.model.named_parameters())
    assert torch.equal(logprobs(trainer.references[0].model), logprobs(load_model(tiny)))
    trainer.train(checkpoint_dir="ck")
    assert not torch.equal(logprobs(models[0].get_base_model()), expected[0])
    export("ck", "out")
    back = AutoModelForCausalLM.from_pretrained("out/agent_0")
    assert torch.equal(logprobs(back), logprobs(trainer.agents[0].model))


def test_a_frozen_adapter_is_refused_by_name(tiny):
    trained_peft(tiny).save_pretrained("adapter")
    frozen = PeftModel.from_pretrained(load_model(tiny), "adapter")
    options = {"tokenizer": AutoTokenizer.from_pretrained(tiny)}
    with pytest.raises(ValueError, match=r"agents\[1\]: its adapter is frozen \(28 of 28 tensors"):
        build([load_model(tiny), frozen], lora=None, options=options)
    half = PeftModel.from_pretrained(load_model(tiny), "adapter", is_trainable=True)
    next(p for name, p in half.named_parameters() if "lora_" in name).requires_grad_(False)
    with pytest.raises(ValueError, match=r"agents\[0\]: its adapter is frozen \(1 of 28 tensors"):
        build([half, frozen], lora=None, options=options)
    injected = AutoModelForCausalLM.from_pretrained("adapter")
    with pytest.raises(ValueError, match=r"agents\[0\]: its adapter is frozen"):
        build([injected, frozen], lora=None, options=options)
    with pytest.raises(ValueError, match="agent_0 is a model that has an adapter already; leave lora out"):
        build([trained_peft(tiny), load_model(tiny)], options=options)


# ---- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("args.lora.r=0", "args.lora: r=0: must be at least 1"),
        ("args.lora.alpha=-1", r"args.lora: alpha=-1.0: must be above 0"),
        ("args.lora.dropout=0.1", r"args.lora: dropout=0.1: must be 0"),
        ("args.lora.rank=8", "unknown key args.lora.rank"),
        ("args.lora.r=x", r"args.lora.r='x': expected int"),
        ("args.lora.target_modules=[]", r"target_modules=\[\]: name at least one layer"),
    ],
)
def test_settings_are_checked(override, message):
    with pytest.raises(ValueError, match=message):
        load(RunConfig, None, [override], lambda raw: {"args": MAGRPOConfig})


def test_what_cannot_work_is_refused_before_a_model_is_loaded(monkeypatch, tiny):
    trained_peft(tiny).save_pretrained("adapter")
    AutoTokenizer.from_pretrained(tiny).save_pretrained("adapter")
    monkeypatch.setattr("comlrl.loading.load_model", None)
    expected = (
        "lora.target_modules=['query'] does not fit agent_0, whose linear layers are down_proj, gate_proj, k_proj"
    )
    with pytest.raises(ValueError, match=re.escape(expected)):
        build(lora=LoraSettings(target_modules=["query"]))
    with pytest.raises(ValueError, match=r"lora.alpha=32.0: agent_1 goes on with 'adapter', which has 8"):
        build(["tiny", "adapter"])
    with pytest.raises(ValueError, match=r"model_config.special_tokens: LoRA does not train"):
        build(options={"model_config": {"special_tokens": {"additional_special_tokens": ["<a>"]}}})


def test_one_override_switches_it_on():
    config = load(RunConfig, None, ["args.lora={}"], lambda raw: {"args": MAGRPOConfig})
    assert config.args.lora == LoraSettings(r=16, alpha=32.0, target_modules="all-linear")
    config = load(RunConfig, None, ["args.lora.target_modules=q_proj"], lambda raw: {"args": MAGRPOConfig})
    assert config.args.lora.target_modules == ["q_proj"]
    assert load(RunConfig, None, [], lambda raw: {"args": MAGRPOConfig}).args.lora is None


def test_a_quantised_base_needs_its_package_and_is_asked_for(monkeypatch, tiny):
    quantised = LoraSettings(r=4, quantization="4bit")
    with pytest.raises(ValueError, match=r"quantization='3bit': must be 4bit, 8bit or none"):
        LoraSettings(quantization="3bit")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"lora.quantization='4bit': the package bitsandbytes is not installed; run: pip"
    ):
        build(lora=quantised)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.50.2")
    with pytest.raises(ValueError, match="agent_0 is a loaded model; give a name"):
        build(
            [load_model(tiny)] * 1,
            CentralizedMAGRPOTrainer,
            lora=quantised,
            options={"tokenizer": load_tokenizer(tiny)},
        )
    asked = []

    def loading(source, options):
        asked.append(options["model_kwargs"])
        return load_model(source)

    monkeypatch.setattr("comlrl.loading.load_model", loading)
    trainer = build(lora=quantised, dtype="bfloat16", options={"model_config": {"model_kwargs": {"revision": "main"}}})
    (kwargs,) = asked  # one base for both
    assert (kwargs["revision"], kwargs["device_map"]) == ("main", {"": "cpu"})
    config = kwargs["quantization_config"].to_dict()
    assert (config["load_in_4bit"], config["bnb_4bit_quant_type"]) == (True, "nf4")
    assert config["bnb_4bit_compute_dtype"] == "bfloat16"
    assert {weight.dtype for weight in trainer.agents[0].model.parameters()} == {torch.float32}


def test_a_shared_base_is_never_idle():
    with pytest.raises(ValueError, match="offload_idle=True: with lora all agents share a base model"):
        build(offload_idle=True)


# ---- families -------------------------------------------------------------------------------------------------------

SMALL = {"lora": LoraSettings(r=2), "agent_learning_rate": 3e-2}


def families():
    """name -> a fresh trainer; agents are loaded models, each of its own base."""
    critics = {"num_train_epochs": 2, "run_name": "run", **SMALL}
    pairs = {"max_steps": 4, **SMALL}
    learned = {"num_generations": 2, "reward_model_name": "tiny", "reward_learning_rate": 1e-3, **pairs}
    again = {"num_iterations": 2, "preference_num_candidates": 4}
    return {
        "maac": lambda **more: ac_team.play(MAACTrainer, **critics, **more),
        "iac, heads": lambda **more: ac_team.play(IACTrainer, use_separate_critic=False, **critics, **more),
        "madpo": lambda **more: preference_team.build(MADPOTrainer, **pairs, **more),
        "marlhf": lambda **more: preference_team.build(MARLHFTrainer, **learned, **more),
        "madpo_iter": lambda **more: preference_team.build(
            MADPOIterTrainer, comparator_policy="history", **again, **pairs, **more
        ),
        "marlhf_iter": lambda **more: preference_team.build(
            MARLHFIterTrainer, comparator_policy="current_copy", comparator_devices="cpu:0", **again, **learned, **more
        ),
        "centralized": lambda **more: build(
            ["tiny"], CentralizedMAGRPOTrainer, advantage_mode="raw", unparsable_reward=1.0, **more
        ),
    }


@pytest.mark.parametrize("family", families())
def test_every_family_trains_adapters_and_resumes_bit_for_bit(family):
    make = families()[family]
    whole = make(output_dir="a")
    held = [{id(w): w.clone() for w in frozen_weights(agent.model)} for agent in whole.agents]
    whole.train(checkpoint_dir="a/ck")
    assert whole.step >= 2
    for agent, before in zip(whole.agents, held):
        weights = {id(w): w for w in frozen_weights(agent.model)}
        assert all(torch.equal(weights[key], value) for key, value in before.items())
        parameters = dict(agent.trained.named_parameters())
        assert all("lora_" in name or "value_head" in name for name in parameters)
        assert all(float(p.detach().norm()) > 0 for name, p in parameters.items() if "lora_B" in name)
    interrupted(make(output_dir="b"), "gradients", 2, "b/ck")
    again = make(output_dir="b")
    again.train(resume_from_checkpoint="b/ck", checkpoint_dir="b/ck")
    assert_same_run(whole, again)
    export("a/ck", "out")
    saved = load_file("out/agent_0/adapter_model.safetensors")
    assert len(saved) == sum("lora_" in name for name, _ in whole.agents[0].model.named_parameters())
    assert Path("out/agent_0/value_head.safetensors").exists() == (family == "iac, heads")


# ---- the plan -------------------------------------------------------------------------------------------------------


def write_config_of_1_5b(tiny):
    """Qwen2.5-1.5B's shape with tiny's tokenizer: no weights are needed."""
    AutoTokenizer.from_pretrained(tiny).save_pretrained("large")
    Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ).save_pretrained("large")


def planned_gib(**changes):
    plan = build(["large", "large"], options={"dry_run": True}, dtype="bfloat16", **changes).plan()
    return plan, float(re.search(r"\n  cpu: ([\d.]+) GiB", plan)[1])


def test_two_agents_of_1_5b_fit_one_gpu_of_24_gb_by_the_plan(tiny, monkeypatch):
    monkeypatch.setattr("comlrl.planning.check_memory", lambda needed: None)  # of this machine
    write_config_of_1_5b(tiny)
    parameters, adapter = 1_543_714_304, 18_464_768  # r=16 on every linear layer
    sizes = {"max_new_tokens": 256, "num_generations": 8, "reference_kl_enabled": True}
    plan, needed = planned_gib(lora=LoraSettings(), **sizes)
    assert (
        plan.count(f"{parameters / 1e6:.1f} M parameters + {adapter / 1e6:.1f} M of an adapter") == 4
    )  # and its reference
    cache = 28 * 2 * 128 * 2 * 2 * 16 * 512
    assert needed == pytest.approx((2 * parameters + 2 * (18 * adapter + cache)) / 2**30, abs=0.01)
    assert needed < 5  # the rest of 24 is for activations
    monkeypatch.setattr("comlrl.loading.check_quantization", lambda settings: None)
    _, quantised = planned_gib(lora=LoraSettings(quantization="4bit"), **sizes)
    linear = 28 * (2 * 1536 * 1536 + 2 * 1536 * 256 + 3 * 1536 * 8960)
    assert quantised == pytest.approx(needed - linear * (2 - 0.5625) / 2**30, abs=0.01)
    _, whole = planned_gib(lora=None, **sizes)
    assert whole == pytest.approx((2 * 20 * parameters + 2 * cache) / 2**30, abs=0.01)


def test_the_plan_counts_a_base_on_each_device_that_holds_it(tiny):
    write_config_of_1_5b(tiny)
    args = {"lora": LoraSettings(r=1), "reference_kl_enabled": True, "max_new_tokens": 4}
    _, one = planned_gib(**args)
    assert 2.88 < one < 3
    plan, same = planned_gib(reference_devices="cpu:0", **args)
    assert same == one
    assert "\n  cpu:0: 2.88 GiB and activations" in plan
    plan, alone = planned_gib(agent_devices=["cpu", "cpu:0"], **args)
    assert alone < one
    assert f"\n  cpu:0: {alone:.2f} GiB and activations" in plan
