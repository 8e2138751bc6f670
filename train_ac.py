"""Train a team with the actor-critic family: MAAC (one critic of the joint history) or IAC (a critic an agent).

    accelerate launch train_ac.py --config configs/relay_maac.yaml
    accelerate launch train_ac.py --config configs/relay_maac.yaml algorithm=iac args.gae_lambda=1
    accelerate launch train_ac.py --config configs/relay_maac.yaml algorithm=iac args.use_separate_critic=false \\
        args.critic_learning_rate=null
    python train_ac.py --config configs/relay_maac.yaml --dry-run

To make an experiment of your own, copy this file and change one thing: the task, the reward, or a method of the trainer
(`advantages`, `loss`). The critics are in comlrl/trainers/actor_critic.py, the loop in comlrl/trainers/reinforce.py.
"""

from typing import Any

from comlrl.signals import end_with_parent

end_with_parent()  # before the imports below: they take seconds, in which the launcher may die

from accelerate.utils import set_seed

from comlrl.config import ActorCriticRunConfig, exit_on_value_error, parse_command_line, to_dict
from comlrl.processes import run_script
from comlrl.tasks import load_rewards, load_task
from comlrl.trainers import ACTOR_CRITIC_ALGORITHMS, ActorCriticTrainerBase


def choose_config(raw: dict[str, Any]) -> dict[str, type]:
    """The class of `args` follows from `algorithm`."""
    algorithm = raw.get("algorithm", "maac")
    if algorithm not in ACTOR_CRITIC_ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r}: must be one of {', '.join(ACTOR_CRITIC_ALGORITHMS)}")
    return {"args": ACTOR_CRITIC_ALGORITHMS[algorithm][0]}


def build_trainer(config: ActorCriticRunConfig, dry_run: bool) -> ActorCriticTrainerBase:
    task = load_task(config.task, config.num_agents, config.task_args)
    functions, weights = load_rewards(config.reward, task)
    agents = config.models or [config.model] * config.num_agents
    critics = config.critics
    if critics is None and (config.algorithm == "maac" or config.args.use_separate_critic):
        default = agents if config.algorithm == "iac" else agents[:1]
        critics = [config.critic_model] * len(default) if config.critic_model else default
    return ACTOR_CRITIC_ALGORITHMS[config.algorithm][1](
        agents=agents,
        critics=critics,
        num_agents=config.num_agents,
        tokenizer=config.tokenizers,
        critic_tokenizer=config.critic_tokenizers,
        model_config=config.model_config,
        train_dataset=task.train_rows,
        eval_dataset=task.eval_rows,
        reward_func=functions,
        reward_weights=weights,
        formatters=task.formatters,
        external_transition=task.transition,
        wandb_config=config.wandb,
        trackers=config.trackers,
        args=config.args,
        run_config=to_dict(config),
        dry_run=dry_run,
    )


def main(argv: list[str] | None = None) -> None:
    assert __doc__ is not None
    command = parse_command_line(ActorCriticRunConfig, argv, __doc__, choose_config)
    with exit_on_value_error():
        set_seed(command.config.args.seed)  # for a reward that draws random numbers
        trainer = build_trainer(command.config, command.dry_run)
        if command.dry_run:
            plan = trainer.plan()
            if trainer.world.is_main:
                print(plan)
            return
        resume, why_not = trainer.find_resume(command.resume)
        if resume is not None:
            trainer.load_checkpoint(resume)
    run = trainer.open_run()
    if why_not:
        run.note(why_not)
    trainer.train(checkpoint_dir=str(resume.parent if resume is not None else run.folder / "checkpoints"))
    save_dir = command.config.save_dir or str(run.folder / "model")
    trainer.save_model(save_dir)
    run.summary_table(trainer.summary(), "evaluation")
    run.note(f"records: {run.folder}    models: {save_dir}/agent_*")
    trainer.close()


if __name__ == "__main__":
    run_script(main)
