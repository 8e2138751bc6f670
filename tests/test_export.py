"""A checkpoint as Hugging Face folders: the same log-probs, the tokenizer, tied weights tied and stored once."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from stopping import reward, rows
from transformers import AutoModelForCausalLM, AutoTokenizer

from comlrl import checkpoint
from comlrl.agents import Agent
from comlrl.export import export, main
from comlrl.logprobs import completion_logprobs
from comlrl.trainers import MAGRPOConfig, MAGRPOTrainer


def trained(*models, **options):
    args = MAGRPOConfig(
        max_new_tokens=4,
        num_train_epochs=1,
        max_steps=2,
        eval_interval=0,
        agent_learning_rate=1e-2,
        dtype="float32",
        num_generations=2,
    )
    trainer = MAGRPOTrainer(agents=list(models), train_dataset=rows(4), reward_func=reward, args=args, **options)
    trainer.train(checkpoint_dir="ck")
    return trainer


def logprobs(model):
    ids = torch.tensor([[65, 66, 67], [68, 69, 70]])
    ones = torch.ones_like(ids)
    with torch.no_grad():
        return completion_logprobs(model.eval(), ids, ones, ids, ones, torch.arange(2))[0]


def test_every_agent_loads_back_to_the_same_log_probs(tiny, tiny_other):
    trainer = trained(tiny, tiny_other)
    folders = export("ck", "out")
    assert folders == [Path("out/agent_0"), Path("out/agent_1")]
    for agent, folder in zip(trainer.agents, folders):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.dtype == torch.float32
        assert torch.equal(logprobs(model), logprobs(agent.model))
        assert not torch.equal(logprobs(model), logprobs(AutoModelForCausalLM.from_pretrained(tiny)))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        messages = [{"role": "user", "content": "é a <x>"}]
        assert tokenizer.get_vocab() == agent.tokenizer.get_vocab()
        assert Agent(model, tokenizer, "agent").encode(messages) == agent.encode(messages)
    # and it is a model for the next run
    MAGRPOTrainer(agents=[str(folder) for folder in folders], reward_func=reward, train_dataset=rows(2))


def test_tied_weights_stay_tied_and_are_stored_once(tiny):
    trainer = trained(tiny, tiny)
    weights = trainer.agents[0].model.get_input_embeddings().weight
    assert trainer.agents[0].model.get_output_embeddings().weight is weights
    saved = checkpoint.newest_good(Path("ck")) / "agent_0" / "weights.safetensors"
    (folder, _) = export("ck", "out")
    for path in (saved, folder / "model.safetensors"):
        with safe_open(path, "pt") as file:
            embeddings = [name for name in file.keys() if file.get_slice(name).get_shape() == list(weights.shape)]  # noqa: SIM118
        assert embeddings == ["model.embed_tokens.weight"]
        bytes_of_weights = 4 * sum(p.numel() for p in trainer.agents[0].model.parameters())
        assert bytes_of_weights < path.stat().st_size < bytes_of_weights + 4 * weights.numel() / 2
    back = AutoModelForCausalLM.from_pretrained(folder)
    assert back.get_output_embeddings().weight is back.get_input_embeddings().weight
    again = MAGRPOTrainer(agents=[tiny, tiny], train_dataset=rows(4), reward_func=reward, args=trainer.args)
    again.load_checkpoint("ck")
    assert again.agents[0].model.lm_head.weight is again.agents[0].model.model.embed_tokens.weight
    assert torch.equal(again.agents[0].model.lm_head.weight, weights)


def test_buffers_and_other_shapes_of_models(gpt2, tiny):
    """Learned positions, another class; and odd generation settings, which save_pretrained would refuse."""
    model = AutoModelForCausalLM.from_pretrained(gpt2)
    model.generation_config.temperature = 0.3
    trainer = trained(model, tiny, tokenizer=[AutoTokenizer.from_pretrained(gpt2), AutoTokenizer.from_pretrained(tiny)])
    folder = export("ck", "out")[0]
    back = AutoModelForCausalLM.from_pretrained(folder)
    assert type(back) is type(model)
    assert torch.equal(logprobs(back), logprobs(trainer.agents[0].model))
    assert back.generation_config.temperature == 0.3


def test_command_line(tiny, capsys):
    trained(tiny, tiny)
    newest = checkpoint.newest_good(Path("ck"))
    main([str(newest), "out"])
    assert capsys.readouterr().out.split()[-2:] == ["out/agent_0", "out/agent_1"]
    for arguments, message in (
        ([str(newest), "out"], "error: out/agent_0 is not empty"),
        (["nowhere", "new"], "error: checkpoint nowhere does not exist"),
        (["out", "new"], "error: out holds no good checkpoint"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err
    assert not Path("new").exists()
