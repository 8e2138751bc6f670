"""One job of benchmarks/speed.py with the published package, comlrl 1.4.3, in an environment of its own."""

import clock
from datasets import Dataset
from reward_text import feedback
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from comlrl.trainers.reinforce import MAGRPOConfig, MAGRPOTrainer


def main() -> None:
    job = clock.read_job()
    set_seed(job["seed"])
    reward = clock.RewardClock()
    trainer = MAGRPOTrainer(
        agents=[AutoModelForCausalLM.from_pretrained(job["model"]) for _ in range(job["agents"])],
        num_agents=job["agents"],
        tokenizer=AutoTokenizer.from_pretrained(job["model"]),
        train_dataset=Dataset.from_list(clock.rows(job)),
        reward_func=reward,
        external_transition=feedback if job["turns"] > 1 else None,
        args=MAGRPOConfig(
            num_agents=job["agents"],
            num_turns=job["turns"],
            num_generations=job["samples"],
            max_new_tokens=job["tokens"],
            joint_mode=job.get("joint_mode", "aligned"),
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            agent_learning_rate=job["learning_rate"],
            rollout_buffer_size=job["nodes"],
            num_train_epochs=1,
            early_termination_threshold=None,
            eval_interval=0,
        ),
    )
    trainer.verbose = False
    trainer.train()
    clock.write_result(reward, job)


if __name__ == "__main__":
    main()
