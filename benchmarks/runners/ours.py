"""One job of benchmarks/speed.py with this repository's MAGRPO."""

import clock
from reward_text import feedback

from comlrl.trainers import MAGRPOConfig, MAGRPOTrainer


def main() -> None:
    job = clock.read_job()
    reward = clock.RewardClock()
    trainer = MAGRPOTrainer(
        agent_model=job["model"],
        num_agents=job["agents"],
        train_dataset=clock.rows(job),
        reward_func=reward,
        external_transition=feedback if job["turns"] > 1 else None,
        args=MAGRPOConfig(
            num_agents=job["agents"],
            num_turns=job["turns"],
            num_generations=job["samples"],
            max_new_tokens=job["tokens"],
            joint_mode=job.get("joint_mode", "aligned"),
            temperature=1.0,
            agent_learning_rate=job["learning_rate"],
            # One step for all nodes of the rows of one update.
            rollout_buffer_size=job["nodes"],
            rows_per_rollout=job["prompts"],
            max_steps=job["updates"] + 1,
            num_train_epochs=1,
            shuffle=False,
            early_termination_threshold=None,
            eval_interval=0,
            checkpoint_interval=None,
            seed=job["seed"],
            output_dir=job["folder"],
            run_name="ours",
            dtype=job["dtype"],
        ),
    )
    trainer.verbose = False
    trainer.train()
    parameters = sum(p.numel() for p in trainer.agents[0].model.parameters())
    trainer.close()
    clock.write_result(reward, job, parameters=parameters)


if __name__ == "__main__":
    main()
