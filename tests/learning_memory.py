"""Run by test_logprobs.py in a process of its own: memory of one learning step with a vocabulary of 151,936."""

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from comlrl import embedded
from comlrl.batches import Sample
from comlrl.trainers import MAGRPOConfig, MAGRPOTrainer

VOCABULARY, SAMPLES, LENGTH = 151_936, 4, 2048


def resident(key: str) -> int:
    """Bytes: VmRSS is what is resident now, VmHWM the most so far."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def make_trainer(folder: str) -> MAGRPOTrainer:
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    args = MAGRPOConfig(
        num_generations=SAMPLES,
        max_new_tokens=LENGTH,
        dtype="float32",
        micro_batch_tokens=2 * SAMPLES * LENGTH,  # all samples at once
        reference_kl_enabled=True,
        entropy_coef=0.01,
        output_dir=folder,
    )
    return MAGRPOTrainer(
        agents=[Qwen2ForCausalLM(config)],
        num_agents=1,
        tokenizer=AutoTokenizer.from_pretrained(embedded.folder("tiny")),
        reward_func=lambda answers: [0.0] * len(answers),
        args=args,
    )


def learn(trainer: MAGRPOTrainer, length: int) -> None:
    ids = torch.randint(VOCABULARY, (SAMPLES, length), generator=torch.Generator().manual_seed(0)).tolist()
    samples = [
        Sample(list(range(32)), row, 0, str(n), 0.0, 1.0, True, False, torch.zeros(length), advantage=n - 1.5)
        for n, row in enumerate(ids)
    ]
    trainer.fill_logprobs([[samples]], several_steps=True)
    trainer.apply(*trainer.gradients([[samples]], 1.0))


def main() -> None:
    torch.set_num_threads(1)
    trainer = make_trainer(sys.argv[1])
    learn(trainer, 2)  # from here on the optimizer's moments are there
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    learn(trainer, LENGTH)
    print(resident("VmHWM") - before)


if __name__ == "__main__":
    main()
