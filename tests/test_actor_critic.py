"""Whole trainers of the actor-critic family: gradients, steps, checkpoints, settings."""

import copy
import json
import threading
from pathlib import Path

import pytest
import torch
from ac_team import GAME, play
from stopping import assert_same_run, interrupted, lines_of
from tiny_team import GradientTrainer, build_model, build_tokenizer, flat_gradient
from transformers import AutoModelForCausalLM, AutoTokenizer

import train_ac
from comlrl import checkpoint
from comlrl.evaluate import main as evaluate
from comlrl.export import export
from comlrl.models import CausalLMWithValueHead
from comlrl.signals import StopSignal
from comlrl.trainers import IACConfig, IACTrainer, MAACConfig, MAACTrainer, MAREINFORCEConfig

ROOT = Path(__file__).parent.parent
PLAIN = {"gae_lambda": 1.0, "advantage_normalization": False}
KINDS = {
    "maac": (MAACTrainer, {}),
    "iac": (IACTrainer, {}),
    "shared": (IACTrainer, {"use_separate_critic": False}),
}


def all_weights(trainer):
    return {
        f"{model.name}.{name}": tensor.detach().clone()
        for model in trainer.trained_models()
        for name, tensor in checkpoint.model_tensors(model.agent.trained).items()
    }


# ---- gradients ---------------------------------------------------------------------------------------


class Seen(GradientTrainer):
    """MAREINFORCE that keeps its gradients."""

    config_class = MAREINFORCEConfig


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("mode", ["aligned", "cross"])
def test_the_first_policy_gradient_is_that_of_mareinforce(name, mode):
    """The critic says 0 at first; with lambda 1, without normalisation and value loss only the returns are left."""
    kind, settings = KINDS[name]
    shape = {"num_generations": 3, "joint_mode": mode, "rollout_buffer_size": 10**6}
    if name == "shared":
        settings = {**settings, "value_loss_coef": 0.0}
    trainer = play(kind, **PLAIN, **shape, **settings)
    twin = Seen(
        agents=[build_model(GAME.vocabulary, seed) for seed in (2, 9)],
        tokenizer=build_tokenizer(GAME.letters),
        reward_func=GAME.reward,
        formatters=[GAME.formatter(agent) for agent in range(2)],
        external_transition=GAME.transition,
        train_dataset=[{"prompt": "x"}] * 4,
        args=MAREINFORCEConfig(num_turns=2, max_new_tokens=2, dtype="float32", **shape),
    )
    roots, _ = twin.rollouts.expand([(i, {"prompt": "x"}) for i in range(4)], twin.shape, twin.sampling, (0, "t", 0))
    expected = twin.gradient_of(copy.deepcopy(roots))[0]
    found = []

    def keep(metrics, norms, useful, problem):
        assert not problem
        found.extend(flat_gradient(agent.model) for agent in trainer.agents)

    trainer.apply = keep
    trainer.buffer = roots
    trainer.prepare(StopSignal())
    trainer.take_step(StopSignal())
    for mine, theirs in zip(found, expected, strict=True):
        assert theirs.norm() > 0.1
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_advantages_are_z_scores_over_the_minibatch():
    trainer = play(MAACTrainer, rollout_buffer_size=4, train_batch_size=2, num_generations=2)
    seen = []
    original = trainer.learn

    def learn(index, groups, scale, budget):
        seen.append([s for group in groups for s in group])
        return original(index, groups, scale, budget)

    trainer.learn = learn
    trainer.train()
    assert seen
    for samples in seen:
        raw = torch.tensor([s.credit - s.value for s in samples], dtype=torch.float64)
        expected = (raw - raw.mean()) / raw.std(correction=0).clamp(min=1e-6) if len(set(raw.tolist())) > 1 else 0 * raw
        assert [s.advantage for s in samples] == pytest.approx(expected.tolist())


def test_the_critics_gradient_is_that_of_the_mean_over_nodes():
    """By hand: one forward a history, squared distances to the lambda-returns, the mean of a node, of the nodes."""
    trainer = play(MAACTrainer, joint_mode="cross", rollout_buffer_size=10**6, micro_batch_tokens=40)
    grabbed = {}

    def keep(metrics, norms, useful, problem):
        grabbed["gradient"] = flat_gradient(trainer.critics[0].trained)

    kept = {}
    original = trainer.gradients

    def gradients(groups, scale):
        kept["items"] = trainer.value_items[0]
        return original(groups, scale)

    trainer.gradients, trainer.apply = gradients, keep
    model = copy.deepcopy(trainer.critics[0].trained)
    trainer.evaluation_due = False
    trainer.open_run()
    trainer.collect(trainer.sampling, StopSignal())
    trainer.prepare(StopSignal())
    trainer.take_step(StopSignal())
    items = kept["items"]
    nodes = [group for group in items if any(item.targets for item in group)]
    loss = 0.0
    for (item,) in nodes:
        states = model.backbone(torch.tensor([item.prompt_ids]), output_hidden_states=True).hidden_states[-1][0, -1]
        value = model.value_head(states)
        loss = loss + 0.6 * sum((value - target) ** 2 for target in item.targets) / len(item.targets) / len(nodes)
    loss.backward()
    assert len({len(item.targets) for group in nodes for item in group}) == 1
    assert len(nodes) == 4 * (1 + 4)
    assert torch.allclose(grabbed["gradient"], flat_gradient(model), atol=1e-5)


# ---- steps -------------------------------------------------------------------------------------------


def test_maac_takes_one_critic_step_a_minibatch_and_reads_each_history_once():
    trainer = play(MAACTrainer, rollout_buffer_size=6, train_batch_size=3, num_generations=2)
    rows = []
    learn = trainer.learn_critic

    def counted(critic, groups, budget):
        rows.append([len(group) for group in groups])
        return learn(critic, groups, budget)

    trainer.learn_critic = counted
    trainer.train()
    assert trainer.step == len(rows) == 4
    assert trainer.critic_engines[0].counters()["optimizer_steps"] == trainer.step
    assert [engine.counters()["optimizer_steps"] for engine in trainer.engines.values()] == [trainer.step] * 2
    assert all(each == [1, 1, 1] for each in rows)


def test_a_shared_backbone_is_run_once_for_policy_and_value():
    trainer = play(IACTrainer, use_separate_critic=False, micro_batch_tokens=10**5)
    calls = []
    trainer.agents[0].model.base_model.register_forward_hook(lambda m, i, o: calls.append(torch.is_grad_enabled()))
    trainer.train()
    assert calls.count(True) == 2 * trainer.step  # prompts, and answers on their cache


@pytest.mark.parametrize("name", KINDS)
def test_the_actors_log_probs_are_computed_once(name):
    """One step a rollout: the old log-prob is the new one, so the actor runs only to sample and to learn."""
    kind, settings = KINDS[name]
    trainer = play(kind, micro_batch_tokens=10**5, rollout_buffer_size=12, **settings)
    sampling, calls = [False], []
    expand = trainer.rollouts.expand

    def watched(*args, **kwargs):
        sampling[0] = True
        result = expand(*args, **kwargs)
        sampling[0] = False
        return result

    trainer.rollouts.expand = watched
    backbone = trainer.agents[0].model.base_model
    backbone.register_forward_hook(lambda m, i, o: None if sampling[0] else calls.append(torch.is_grad_enabled()))
    trainer.train()
    assert trainer.step > 0
    assert calls.count(True) == 2 * trainer.step  # prompts, and answers on their cache
    # A head on the actor says the baseline before the step, from the prompts alone.
    assert calls.count(False) == (trainer.step if name == "shared" else 0)


@pytest.mark.parametrize("name", KINDS)
def test_agents_on_devices_of_their_own_learn_the_same_with_lasting_threads(name):
    kind, settings = KINDS[name]
    settings = {"num_train_epochs": 2, "run_name": "run", "reference_kl_enabled": True, **settings}
    serial = play(kind, **settings)
    devices = {"agent_devices": ["cpu", "cpu:0"]} | ({} if name == "shared" else {"critic_devices": "cpu"})
    parallel = play(kind, **settings, parallel_training="mp", **devices)
    before = {thread for thread in threading.enumerate() if thread.name.startswith("agent")}
    threads = []
    learn = parallel.learn

    def watched(*args):
        threads.append(threading.current_thread())
        return learn(*args)

    parallel.learn = watched
    for trainer in (serial, parallel):
        trainer.train()
    assert_same_run(serial, parallel)
    assert all(torch.equal(value, all_weights(parallel)[name]) for name, value in all_weights(serial).items())
    assert len(threads) == 2 * parallel.step
    assert len({thread.name for thread in threads}) <= 2  # a pool for each call would not name them so
    parallel.close()
    assert {thread for thread in threading.enumerate() if thread.name.startswith("agent")} <= before


@pytest.mark.parametrize("kind", [IACTrainer, MAACTrainer])
def test_while_critics_warm_up_the_actors_stand_still(kind):
    trainer = play(kind, critic_warmup_steps=2, max_steps=2, weight_decay=0.1, rollout_buffer_size=3)
    before = all_weights(trainer)
    trainer.train()
    after = all_weights(trainer)
    assert all(torch.equal(after[n], before[n]) for n in after if n.startswith("agent_"))
    assert any(not torch.equal(after[n], before[n]) for n in after if n.startswith("critic"))


@pytest.mark.full
@pytest.mark.parametrize("name", KINDS)
def test_critics_learn_what_can_be_known(name):
    """The explained variance rises on a game whose reward its history decides."""
    kind, settings = KINDS[name]
    trainer = play(
        kind, turns=1, num_generations=4, rollout_buffer_size=4, num_train_epochs=60, agent_learning_rate=1e-4,
        **({"critic_learning_rate": 2e-2} if name != "shared" else {}), value_normalization=True, **settings,
    )  # fmt: skip
    if name == "shared":
        trainer.engines[0].optimizer.param_groups[0]["lr"] = 1e-2
        trainer.engines[0].scheduler.base_lrs = [1e-2]
    trainer.train()
    losses = [line for line in lines_of(trainer.run.folder, "metrics") if line["kind"] == "train"]
    prefix = "critic" if name == "maac" else "agent_0"
    first, last = losses[0], losses[-1]
    assert {f"{prefix}/turn_1/{key}" for key in ("value_loss", "explained_variance", "value_mean")} <= first.keys()
    assert abs(last[f"{prefix}/turn_1/value_mean"] - last[f"{prefix}/turn_1/value_target_mean"]) < 0.6


# ---- dropout, rewards, unlike models -------------------------------------------------------------------


def gpt2_team(folder, kind, **settings):
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def reward(first, second):
        return [len(a) - 0.5 * len(b) + 0.01 * sum(map(ord, a)) for a, b in zip(first, second)]

    separate = settings.get("use_separate_critic", True)
    count = 2 if kind is IACTrainer else 1
    models = [AutoModelForCausalLM.from_pretrained(folder) for _ in range(2)]
    return kind(
        agents=models,
        tokenizer=tokenizer,
        critics=[AutoModelForCausalLM.from_pretrained(folder) for _ in range(count)] if separate else None,
        reward_func=reward,
        train_dataset=[{"prompt": "ab"}, {"prompt": "c"}],
        args=kind.config_class(
            num_generations=2, max_new_tokens=3, rollout_buffer_size=2, num_train_epochs=1, eval_interval=0,
            dtype="float32", epochs_per_rollout=2, reference_kl_enabled=True, **settings,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_dropout_is_off_in_every_log_prob_and_value(gpt2, name):
    """Dropout 0.5 in the config: the first ratio is 1, the KL to the identical reference 0, values are repeatable."""
    kind, settings = KINDS[name]
    trainer = gpt2_team(gpt2, kind, **settings)
    ratios, kls = [], []
    loss = trainer.loss

    def watched(batch, logprobs, entropies, old):
        result = loss(batch, logprobs, entropies, old)
        if trainer.step == 0:
            ratios.append((logprobs.detach() - old).abs().max().item())
            kls.append(result[1]["reference_kl"].max().item())
        return result

    trainer.loss = watched
    trainer.train()
    assert trainer.step == 2
    assert ratios
    assert max(ratios) < 1e-5
    assert max(kls) < 1e-6
    assert not any(module.training for model in trainer.trained_models() for module in model.agent.trained.modules())


def test_rewards_are_one_a_joint_answer_also_when_there_are_as_many_as_agents():
    """Two agents, two generations: [a, b] are the rewards of the first and second joint answer, never of the agents."""
    trainer = play(MAACTrainer, turns=1, num_generations=2, **PLAIN)
    roots, _ = trainer.rollouts.expand([(0, {"prompt": "x"})], trainer.shape, trainer.sampling, (0, "t", 0))
    node = roots[0]
    for j, reward in enumerate(node.rewards):
        texts = [node.completions[agent][j].text for agent in range(2)]
        assert [reward] == GAME.reward([node.prompts[0]], [texts[0]], [texts[1]])
    trainer.buffer = roots
    trainer.prepare(StopSignal())
    for agent in range(2):
        assert [s.credit for s in trainer.prepared[agent][0]] == node.rewards


def test_critics_and_agents_of_unlike_vocabularies(tiny, tiny_other, gpt2, tmp_path):
    """A tokenizer list is honoured beside a name, and every critic reads text with its own tokenizer."""
    common = {
        "train_dataset": [{"prompt": "hello"}] * 2,
        "reward_func": lambda first, second: [float(len(a) - len(b)) for a, b in zip(first, second)],
    }
    settings = {"num_generations": 2, "max_new_tokens": 3, "num_train_epochs": 1, "eval_interval": 0,
                "rollout_buffer_size": 2, "dtype": "float32"}  # fmt: skip
    trainer = IACTrainer(agents=[tiny, tiny_other], critics=[gpt2, tiny_other], args=IACConfig(**settings), **common)
    trainer.train()
    trainer.save_model(str(tmp_path / "out"))
    assert isinstance(trainer.critics[0].model, type(AutoModelForCausalLM.from_pretrained(gpt2)))
    for place in ("agent_0/critic", "agent_1/critic"):
        loaded = CausalLMWithValueHead.from_pretrained(str(tmp_path / "out" / place))
        index = int(place[6])
        ids = torch.tensor([[65, 66, 67]])
        mine = trainer.critics[index].value_model.last_values(ids, torch.ones_like(ids))
        assert loaded.last_values(ids, torch.ones_like(ids)).item() == pytest.approx(mine.item(), abs=1e-6)
    other = AutoTokenizer.from_pretrained(tiny_other)
    one = MAACTrainer(agent_model=tiny_other, tokenizer=[other, other], critic_model=tiny, args=MAACConfig(**settings),
                      **common)  # fmt: skip
    assert [agent.tokenizer is other for agent in one.agents] == [True, True]
    assert len(one.critics[0].tokenizer) == 258
    with pytest.raises(ValueError, match="give the critic its own tokenizer"):
        IACTrainer(agents=[tiny, tiny], critics=[build_model(3, 1), build_model(3, 1)], args=IACConfig(**settings),
                   **common)  # fmt: skip


# ---- checkpoints -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "method", "at", "settings"),
    [
        ("maac", "gradients", 3, {"train_batch_size": 2, "value_normalization": True}),
        ("iac", "prepare", 2, {"critic_type": "q"}),
        ("iac", "apply", 2, {"train_batch_size": 1, "critic_value_head_hidden_dim": 3}),
        ("shared", "gradients", 3, {"train_batch_size": 2, "value_normalization": True}),
        ("maac", "collect", 2, {"critic_warmup_steps": 1}),
    ],
)
def test_stopped_and_resumed_is_as_never_stopped(name, method, at, settings):
    kind, own = KINDS[name]
    changes = {**own, **settings, "rollout_buffer_size": 3}
    whole = play(kind, output_dir="a", **changes)
    whole.train()
    interrupted(play(kind, output_dir="b", **changes), method, at, "b/ck")
    again = play(kind, output_dir="b", **changes)
    again.train(resume_from_checkpoint="b/ck", checkpoint_dir="b/ck")
    assert_same_run(whole, again)
    first, second = all_weights(whole), all_weights(again)
    assert any("value_head" in key for key in first)
    for key, tensor in first.items():
        assert torch.equal(tensor, second[key]), key
    assert whole.statistics == again.statistics
    assert [e.counters() for e in whole.critic_engines.values()] == [
        e.counters() for e in again.critic_engines.values()
    ]


@pytest.mark.parametrize("name", KINDS)
def test_checkpoints_hold_critics_and_export_writes_them(name):
    kind, own = KINDS[name]
    trainer = play(kind, **own)
    trainer.train(checkpoint_dir="ck")
    folders = export("ck", "out")
    assert [str(folder) for folder in folders] == [f"out/{model.folder}" for model in trainer.trained_models()]
    place = {"maac": "critic", "iac": "agent_1/critic", "shared": "agent_1"}[name]
    loaded = CausalLMWithValueHead.from_pretrained(f"out/{place}")
    valuer = {"maac": 0, "iac": 1, "shared": 1}[name]
    mine = trainer.valuers()[0][valuer].value_model
    ids = torch.tensor([[0, 1, 0]])
    value = mine.last_values(ids, torch.ones_like(ids))
    assert value.abs().item() > 1e-4
    assert torch.equal(loaded.last_values(ids, torch.ones_like(ids)), value)
    again = AutoModelForCausalLM.from_pretrained("out/agent_0")
    assert torch.equal(again(ids).logits, trainer.agents[0].model(ids).logits)
    trainer.save_model("saved")
    assert torch.equal(
        CausalLMWithValueHead.from_pretrained(f"saved/{place}").last_values(ids, torch.ones_like(ids)), value
    )


def test_what_the_critics_are_cannot_change_on_resume():
    play(IACTrainer, max_steps=1).train(checkpoint_dir="ck")
    for changes, words in (
        ({"critic_type": "q"}, "critic_type was 'v'"),
        ({"use_separate_critic": False}, "use_separate_critic was True"),
        ({"critic_value_head_hidden_dim": 3}, "critic_0"),
    ):
        with pytest.raises(ValueError, match=words):
            play(IACTrainer, **changes).load_checkpoint("ck")


def test_a_critic_given_with_its_head_keeps_it():
    given = CausalLMWithValueHead(build_model(258, 20))
    torch.nn.init.constant_(given.value_head.output.bias, 1.5)
    trainer = play(MAACTrainer, critics=[given])
    assert trainer.critics[0].value_model is given
    ids = torch.tensor([[1]])
    assert trainer.critics[0].value_model.last_values(ids, torch.ones_like(ids)).item() == pytest.approx(1.5)


# ---- settings and callbacks ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "settings", "words"),
    [
        (IACConfig, {"critic_type": "z"}, "critic_type='z'"),
        (IACConfig, {"critic_type": "q"}, "num_generations must be at least 2"),
        (MAACConfig, {"gae_lambda": 1.5}, r"gae_lambda=1.5: must be in \[0, 1\]"),
        (MAACConfig, {"value_clip_range": -1.0}, "value_clip_range=-1.0"),
        (MAACConfig, {"num_train_epochs": 0}, "num_train_epochs=0"),
        (MAACConfig, {"advantage_mode": "mean"}, "advantage_mode='mean': must be one of value"),
        (IACConfig, {"use_separate_critic": False, "critic_learning_rate": 1e-3}, "critic_learning_rate=0.001 is for"),
        (IACConfig, {"use_separate_critic": False, "critic_warmup_steps": 3}, "critic_warmup_steps=3 needs critics"),
        (IACConfig, {"value_head_hidden_dim": 3}, "value_head_hidden_dim=3 is for use_separate_critic"),
        (IACConfig, {"rollout_buffer_size": 1}, "advantage_normalization of a single sample"),
    ],
)
def test_mistakes_in_settings_are_refused(config, settings, words):
    with pytest.raises(ValueError, match=words):
        config(**settings)


def test_defaults():
    config = MAACConfig()
    assert config.critic_rate == pytest.approx(10 * config.agent_learning_rate)
    assert (config.num_generations, config.num_train_epochs, config.value_loss_coef) == (1, 40, 0.6)
    assert IACConfig(critic_type="Q", num_generations=2).critic_type == "q"


def test_mistakes_in_models_are_refused_before_anything_is_loaded(tiny):
    common = {"reward_func": lambda a, b: [0.0], "train_dataset": [{"prompt": "x"}]}
    for kind, arguments, words in (
        (MAACTrainer, {"agent_model": tiny}, "give critic_model"),
        (MAACTrainer, {"agent_model": tiny, "critics": [tiny, tiny]}, "must be a list of 1"),
        (IACTrainer, {"agent_model": tiny, "critics": [tiny]}, "must be a list of 2"),
        (IACTrainer, {"agent_model": tiny, "critic_model": build_model(3, 1)}, "one loaded model for 2 critics"),
        (IACTrainer, {"agent_model": tiny, "critic_model": "no/such"}, "cannot be found"),
        (IACTrainer, {"agent_model": tiny, "critic_model": tiny, "critic_tokenizer": [tiny]}, "critic_tokenizer has 1"),
        (
            IACTrainer,
            {"agent_model": tiny, "critic_model": tiny, "args": IACConfig(use_separate_critic=False)},
            "leave critic_model and critics out",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            kind(**arguments, **common, dry_run=True)


def test_the_metrics_callback_gets_the_samples_of_a_row():
    seen = []

    def callback(samples):
        seen.append(samples)
        return {"answers": float(len(samples)), "best": max(s.reward for s in samples)}

    trainer = play(MAACTrainer, callback=callback)
    trainer.train()
    train = [line for line in lines_of(trainer.run.folder, "metrics") if line["kind"] == "train"]
    assert train[0]["answers"] == 2 * (2 + 4)  # agents; answers of the root and of its two children
    sample = seen[0][0]
    assert sample.full_input_ids.tolist()[: sample.prompt_len] == trainer.agents[0].encode(sample.prompt)
    assert sample.advantage == pytest.approx(sample.metadata["value_target"] - sample.old_value)
    assert {s.metadata["turn_idx"] for s in seen[0]} == {0, 1}
    seen.clear()
    trainer.eval_rows = trainer.rows
    metrics = trainer.evaluate()
    assert metrics["eval/answers"] == 2 * 2  # agents; one greedy answer a turn
    assert len(seen) == 4


def test_nan_values_are_loud_and_change_nothing():
    trainer = play(MAACTrainer)
    torch.nn.init.constant_(trainer.critics[0].value_model.value_head.output.bias, float("nan"))
    before = all_weights(trainer)
    with pytest.raises(FloatingPointError, match="critic: value nan of 0:"):
        trainer.train()
    after = all_weights(trainer)
    assert all(torch.equal(after[name], before[name]) for name in before if "bias" not in name)


# ---- the script --------------------------------------------------------------------------------------

SHORT = ["task_args.copies=2", "args.rows_per_rollout=4", "args.rollout_buffer_size=8", "args.max_steps=2",
         "args.eval_interval=1", "args.eval_generations=1"]  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [[], ["algorithm=iac"], ["algorithm=iac", "args.use_separate_critic=false", "args.critic_learning_rate=null"]],
)
def test_the_script_trains_saves_and_its_run_can_be_evaluated(words, capsys):
    config = ROOT / "configs/relay_maac.yaml"
    train_ac.main(["--config", str(config), *SHORT, *words])
    run = Path("runs/relay-maac")
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [0, 1, 1, 2, 2]
    assert (run / "model/agent_1/config.json").is_file()
    place = "critic" if not words else "agent_1/critic" if len(words) == 1 else "agent_1"
    CausalLMWithValueHead.from_pretrained(str(run / "model" / place))
    evaluate([str(run), "--rows", "2", "--samples", "1"])
    assert "trained" in capsys.readouterr().out


def test_the_plan_names_critics(capsys):
    train_ac.main(["--config", str(ROOT / "configs/relay_maac.yaml"), "--dry-run", "critic_model=tiny"])
    plan = capsys.readouterr().out
    assert "critic: tiny" in plan
    with pytest.raises(SystemExit):
        train_ac.main(["--config", str(ROOT / "configs/relay_maac.yaml"), "algorithm=magrpo"])
    assert "must be one of iac, maac" in capsys.readouterr().err
