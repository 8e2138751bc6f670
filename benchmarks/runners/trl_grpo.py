"""One job of benchmarks/speed.py with TRL's GRPO, one agent, in an environment of its own."""

import clock
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    job = clock.read_job()
    reward = clock.RewardClock()

    def scored(completions, **_):
        return reward(completions)

    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=scored,
        train_dataset=Dataset.from_list(clock.rows(job)),
        args=GRPOConfig(
            output_dir=job["folder"],
            per_device_train_batch_size=job["prompts"] * job["samples"],
            num_generations=job["samples"],
            max_completion_length=job["tokens"],
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            beta=0.0,
            learning_rate=job["learning_rate"],
            max_steps=job["updates"] + 1,
            use_cpu=job["cpu"],
            bf16=job["dtype"] == "bfloat16",
            gradient_checkpointing=False,
            shuffle_dataset=False,
            save_strategy="no",
            report_to="none",
            seed=job["seed"],
        ),
    )
    trainer.train()
    clock.write_result(reward, job)


if __name__ == "__main__":
    main()
