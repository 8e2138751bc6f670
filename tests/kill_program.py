"""Run by test_preference_kill.py: preference runs that are killed with signal 9, and others that go on.

    python tests/kill_program.py FORM FOLDER

Each run is a process of its own, forked from this one before torch has computed a gradient. Writes FOLDER/<run>.json:
hashes of all models, and the records.
"""

import json
import os
import signal
import sys
import traceback
from pathlib import Path

import torch
from preference_team import build
from stopping import lines_of

from comlrl.checkpoint import model_tensors, tensors_hash
from comlrl.trainers.preference import MADPOIterTrainer, MADPOTrainer, MARLHFIterTrainer, MARLHFTrainer

LEARNED = {
    **{"reward_model_name": "tiny", "reward_learning_rate": 1e-3, "reward_train_batch_size": 4},
    **{"rl_algorithm": "maac", "critic_model_name": "tiny", "num_generations": 3, "train_batch_size": None},
    "max_steps": 4,
}
ROUND = {"num_iterations": 2, "num_train_epochs": 1, "comparator_policy": "history"}
FORMS = {
    "madpo": (MADPOTrainer, {"max_steps": 4}),
    "marlhf": (MARLHFTrainer, LEARNED),
    "madpo_iter": (MADPOIterTrainer, ROUND),
    "marlhf_iter": (MARLHFIterTrainer, {**LEARNED, **ROUND, "max_steps": None}),
}
# The method in whose n-th call a run dies: one in each phase, and of iterations in the second one.
KILLS = {
    "madpo": [("propose", 2), ("fill_references", 1), ("take_step", 3)],
    "marlhf": [("propose", 2), ("take_reward_step", 2), ("finish_reward_model", 1), ("take_step", 2)],
    "madpo_iter": [("propose", 4), ("fill_references", 2), ("end_iteration", 1)],
    "marlhf_iter": [("propose", 3), ("take_reward_step", 4), ("finish_reward_model", 2)],
}


def team(form: str, folder: str):
    kind, settings = FORMS[form]
    return build(kind, output_dir=folder, checkpoint_steps=1, **settings)


def undisturbed(form: str, folder: str) -> None:
    trainer = team(form, folder)
    trainer.train(checkpoint_dir=str(trainer.open_run().folder / "checkpoints"))
    report(trainer, folder)


def killed(form: str, folder: str, method: str, at: int) -> None:
    trainer = team(form, folder)
    original, calls = getattr(trainer, method), []

    def deadly(*args):
        calls.append(None)
        result = original(*args)
        if len(calls) == at:  # when the work is done, and not yet saved
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(trainer, method, deadly)
    trainer.train(checkpoint_dir=str(trainer.open_run().folder / "checkpoints"))


def resumed(form: str, folder: str) -> None:
    trainer = team(form, folder)
    checkpoint, why_not = trainer.find_resume("auto")
    assert checkpoint is not None, why_not
    trainer.load_checkpoint(checkpoint)
    trainer.train(checkpoint_dir=str(checkpoint.parent))
    report(trainer, folder)


def report(trainer, folder: str) -> None:
    models = {m.folder: tensors_hash(model_tensors(m.agent.trained)) for m in trainer.trained_models()}
    records = {name: lines_of(trainer.run.folder, name) for name in ("metrics", "completions")}
    Path(f"{folder}.json").write_text(json.dumps({"models": models, **records}))


def in_a_process(work, *args) -> int:
    """Its exit code, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            work(*args)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    torch.set_num_threads(1)
    form = sys.argv[1]
    os.chdir(sys.argv[2])
    assert in_a_process(undisturbed, form, "undisturbed") == 0
    for method, at in KILLS[form]:
        assert in_a_process(killed, form, f"{method}-{at}", method, at) == -signal.SIGKILL, (method, at)
        assert in_a_process(resumed, form, f"{method}-{at}") == 0, (method, at)


if __name__ == "__main__":
    main()
