"""Train a team from preferences over joint answers: MADPO, MARLHF, and each in iterations.

    accelerate launch train_pbrl.py --config configs/pbrl_madpo.yaml
    accelerate launch train_pbrl.py --config configs/pbrl_marlhf.yaml args.rl_algorithm=maac
    accelerate launch train_pbrl.py --config configs/pbrl_madpo.yaml args.preference_file=runs/madpo/preferences.jsonl
    python train_pbrl.py --config configs/pbrl_madpo.yaml --dry-run
    accelerate launch train_pbrl.py --config configs/pbrl_madpo.yaml --resume auto

docs/preferences.md says what each does. The loops are in comlrl/trainers/: pairs.py makes the pairs, madpo.py and
marlhf.py learn from them, iterative.py goes round.
"""

from typing import Any

from comlrl.signals import end_with_parent

end_with_parent()  # before the imports below: they take seconds, in which the launcher may die

from accelerate.utils import set_seed

from comlrl.config import PreferenceRunConfig, exit_on_value_error, parse_command_line, to_dict
from comlrl.processes import run_script
from comlrl.tasks import load_rewards, load_task
from comlrl.trainers import PREFERENCE_ALGORITHMS, MADPOTrainer, MARLHFTrainer


def choose_config(raw: dict[str, Any]) -> dict[str, type]:
    """The class of `args` follows from `algorithm`."""
    algorithm = raw.get("algorithm", "madpo")
    if algorithm not in PREFERENCE_ALGORITHMS:
        raise ValueError(f"algorithm={algorithm!r}: must be one of {', '.join(PREFERENCE_ALGORITHMS)}")
    return {"args": PREFERENCE_ALGORITHMS[algorithm][0]}


def build_trainer(config: PreferenceRunConfig, dry_run: bool) -> MADPOTrainer | MARLHFTrainer:
    task = load_task(config.task, config.num_agents, config.task_args)
    functions, weights = load_rewards(config.reward, task)
    return PREFERENCE_ALGORITHMS[config.algorithm][1](
        agents=config.models or [config.model] * config.num_models,
        num_agents=config.num_agents,
        tokenizer=config.tokenizers,
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
    command = parse_command_line(PreferenceRunConfig, argv, __doc__, choose_config)
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
    run.note(f"records: {run.folder}    pairs: {trainer.pair_path()}    models: {save_dir}/agent_*")
    trainer.close()


if __name__ == "__main__":
    run_script(main)
