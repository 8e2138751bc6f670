"""Whole runs of the REINFORCE family against what they must not depend on, and teams of unlike models."""

import ast
import copy
import re
import sys
from pathlib import Path

import pytest
import torch
from stopping import build, lines_of, settings, state_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from comlrl.trainers import MAGRPOConfig, MAGRPOTrainer

ROOT = Path(__file__).parent.parent


def weights_of(trainer):
    return [torch.cat([p.detach().flatten() for p in agent.model.parameters()]) for agent in trainer.agents]


# ---- how the work is cut ---------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", ["sequence_sum", "token_mean"])
def test_a_run_does_not_depend_on_micro_batches(aggregation):
    """Answers of unlike lengths, one sample at a time or all at once: the same run."""
    results = []
    # With a large epsilon AdamW's steps are smooth in the gradient; else the sign of a rounding error is a step.
    choices = {"turns": 2, "loss_aggregation": aggregation, "max_steps": 3, "adam_eps": 1.0, "agent_learning_rate": 1.0}
    for budget in (1, 10**5):
        trainer = build(**choices, micro_batch_tokens=budget)
        before = weights_of(trainer)
        trainer.train()
        lengths = {line["tokens"] for line in lines_of(trainer.run.folder, "completions")}
        assert len(lengths) > 2
        results.append(trainer)
    for start, one, other in zip(before, *map(weights_of, results)):
        assert (one - start).abs().max() > 1e-2
        assert (one - other).abs().max() < 1e-5
    for one, other in zip(*(lines_of(trainer.run.folder, "metrics") for trainer in results)):
        assert one.keys() == other.keys()
        assert one.pop("kind") == other.pop("kind")
        for key, value in one.items():
            # A difference of two log-probs is rounding itself.
            assert value == pytest.approx(other[key], rel=1e-3, abs=1e-5), key


class Watching(MAGRPOTrainer):
    """Keeps each micro-batch with its log-probs."""

    def loss(self, batch, logprobs, entropies, old):
        self.seen.append((batch, logprobs.detach().clone()))
        return super().loss(batch, logprobs, entropies, old)


@pytest.mark.parametrize("override", [False, True], ids=["setting", "train(temperature=...)"])
def test_trained_logprobs_are_at_the_sampling_temperature(override):
    """Log_softmax(logits / 0.5) at the sampled ids, by a plain forward of each sequence."""
    trainer = build(Watching, max_steps=1, **({} if override else {"temperature": 0.5}))
    trainer.seen = []
    models = [copy.deepcopy(agent.model) for agent in trainer.agents]
    trainer.train(**({"temperature": 0.5} if override else {}))
    assert len(trainer.seen) == len(models)  # a micro-batch an agent
    for model, (batch, logprobs) in zip(models, trainer.seen):
        for sample, row in zip(batch.samples, logprobs):
            logits = model(torch.tensor([[*sample.prompt_ids, *sample.token_ids]])).logits[0]
            table = torch.log_softmax(logits[len(sample.prompt_ids) - 1 : -1] / 0.5, -1)
            expected = table.gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]
            assert torch.allclose(row[: len(expected)], expected, atol=1e-5)
            assert torch.allclose(sample.sampler_logprobs, expected, atol=1e-5)


# ---- unlike agents ---------------------------------------------------------------------------------

OTHER_TEMPLATE = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}{% if add_generation_prompt %}={% endif %}"


def unlike_team(tiny, tiny_other, gpt2, **changes):
    """Other sizes, vocabularies, positions and chat templates."""
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (tiny, tiny_other, gpt2)]
    tokenizers[1].chat_template = OTHER_TEMPLATE
    return MAGRPOTrainer(
        agents=[tiny, tiny_other, gpt2],
        tokenizer=tokenizers,
        train_dataset=[{"prompt": "one"}, {"prompt": "two!"}],
        eval_dataset=[{"prompt": "three"}],
        formatters=lambda row: [{"role": "user", "content": row["prompt"]}],
        reward_func=lambda a, b, c: [float(sum(map(ord, x + y + z)) % 7) for x, y, z in zip(a, b, c)],
        args=settings(num_agents=3, num_turns=1, max_new_tokens=6, max_steps=2, agent_learning_rate=1e-3, **changes),
    )


def test_unlike_agents_train_evaluate_save_and_resume(tiny, tiny_other, gpt2, working_directory):
    """Each agent with its own model, tokenizer and template, through the whole life of a run."""
    trainer = unlike_team(tiny, tiny_other, gpt2)
    assert [len(agent.tokenizer) for agent in trainer.agents] == [258, 260, 258]
    (root,), _ = trainer.rollouts.expand([(0, {"prompt": "one"})], trainer.shape, trainer.sampling, ("seed",))
    texts = [agent.tokenizer.decode(ids) for agent, ids in zip(trainer.agents, root.prompt_ids)]
    assert texts == ["u:one\na:", "[one]=", "u:one\na:"]

    before = weights_of(trainer)
    trainer.train(checkpoint_dir="checkpoints")
    for start, now in zip(before, weights_of(trainer)):
        assert (now - start).abs().max() > 1e-4
    assert trainer.evaluate()["eval/rows"] == 1
    trainer.save_model("out")
    for index, agent in enumerate(trainer.agents):
        model = AutoModelForCausalLM.from_pretrained(f"out/agent_{index}")
        tokenizer = AutoTokenizer.from_pretrained(f"out/agent_{index}")
        assert tokenizer.chat_template == agent.tokenizer.chat_template
        for name, value in agent.model.state_dict().items():
            assert torch.equal(model.state_dict()[name], value)

    half = unlike_team(tiny, tiny_other, gpt2, run_name="half", num_train_epochs=1)
    half.train(checkpoint_dir="half")
    assert half.step == 1
    resumed = unlike_team(tiny, tiny_other, gpt2, run_name="half")
    resumed.train(resume_from_checkpoint="half", checkpoint_dir="half")
    for name, tensor in state_of(resumed).items():
        assert torch.equal(tensor, state_of(trainer)[name]), name


# ---- the package -----------------------------------------------------------------------------------


def test_what_is_imported_is_required():
    """torch was missing from the requirements."""
    text = (ROOT / "requirements.txt").read_text()
    required = {match.lower() for match in re.findall(r"^([A-Za-z0-9_-]+)", text, re.M)}
    imported = set()
    for path in [*(ROOT / "comlrl").rglob("*.py"), *ROOT.glob("train_*.py"), *(ROOT / "launch").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(node.module.partition(".")[0])
    known = {*sys.stdlib_module_names, "comlrl"}
    foreign = {{"yaml": "pyyaml"}.get(name, name) for name in imported - known}
    assert {"torch", "transformers", "pyyaml"} <= foreign
    assert foreign - {"torchao"} <= required  # an option, refused with the command that installs it


def test_settings_do_not_change_under_the_trainer():
    """A config may be used for several trainers: none of them writes into it."""
    config = MAGRPOConfig(num_agents=2, max_steps=1, run_name="shared", dtype="float32", max_new_tokens=4)
    copied = copy.deepcopy(config)
    build(args=config).train(checkpoint_interval=3)
    assert config == copied
