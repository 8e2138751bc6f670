"""When and where a trainer saves, and how it goes on from what it saved."""

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from comlrl import checkpoint
from comlrl.agents import Agent
from comlrl.batches import Sample
from comlrl.data import RowSource
from comlrl.encoding import encode
from comlrl.engine import Engine, Frozen
from comlrl.loading import Member
from comlrl.memory import Limit
from comlrl.processes import LostProcess, OutOfStep, World
from comlrl.records import run_id
from comlrl.rewards import Rewards
from comlrl.rollouts import Node
from comlrl.signals import Abandoned, StopSignal
from comlrl.summaries import Metrics
from comlrl.tracking import Run
from comlrl.trained import TrainedModel
from comlrl.trainers import resume
from comlrl.trainers.reinforce_config import MAGRPOConfig

COUNTERS = ("step", "env_step", "rollout", "epoch", "position", "epoch_ended", "evaluation_due", "best")


class Checkpointing(ABC):
    """Saving and resuming, for any trainer whose loop does one piece of work at a time.

    Between two pieces everything is in order. A piece is first worked out within `revocable`, where nothing of the
    trainer changes, and then put down; so a signal or an error loses at most the piece that was running.
    """

    args: MAGRPOConfig
    fixed_settings: tuple[str, ...] = ()  # that cannot change on resume, beside those of every family
    agents: list[Agent]
    members: list[Member]
    world: World
    engines: dict[int, Engine]  # of the agents that this process works on
    references: dict[int, Frozen]
    shapes: list[dict[str, torch.Size]]  # of each agent's whole weights
    reference_hashes: list[str]
    rows: RowSource
    rewards: Rewards
    reward_functions: list[Callable]
    run: Run | None
    run_config: dict[str, Any]
    seconds: Metrics

    def __init__(self) -> None:
        # Optimizer steps, rewarded joint actions, rollouts; epochs finished, and rows used of this one.
        self.step = self.env_step = self.rollout = self.epoch = self.position = 0
        self.epoch_ended = False  # all rows of this epoch are used, but not yet learned from
        self.buffer: list[Node] = []  # roots of finished trees that were not learned from, or not completely
        self.prepared: list[list[list[Sample]]] = []  # [agent][node of the buffer]: samples ready for learning
        self.chunks: list[list[int]] = []  # minibatches that are still to come, as numbers of nodes
        self.evaluation_due = self.args.eval_interval > 0
        self.evaluations: list[tuple[int, Metrics]] = []  # (step, metrics)
        self.pending: Metrics = {}  # numbers of rollouts since the last step
        self.best: float | None = None  # value of checkpoint_best_metric so far
        self.best_is_new = False
        self.sequence = 0  # of the last checkpoint
        self.moment: dict[str, Any] | None = None  # see resume.take_moment; none while a piece is put down
        self.saved_at: tuple[int, ...] = self.progress
        self.checkpoint_dir: Path | None = None
        self.resumed: dict[str, Any] | None = None  # state of the checkpoint that was loaded
        self.resume_notes: list[str] = []  # what has changed since, for the log
        resume.stateful_callbacks(self)

    # ---- the published methods --------------------------------------------------------------------------------------

    def save_checkpoint(self, directory: str | Path) -> str:
        """Save everything as the folder `directory`; returns it. An older checkpoint there is replaced.

        Raises ValueError if the folder holds anything else, and OSError if there is no space.
        """
        target = Path(directory)
        if target.exists() and not (target / checkpoint.MANIFEST).exists() and any(target.iterdir()):
            raise ValueError(f"{target} holds other files than a checkpoint; give another folder")
        self.open_run()
        resume.save_references(self, target.parent)
        self.sequence += 1
        return str(checkpoint.write(target, resume.gather(self, self.sequence), world=self.world))

    def load_checkpoint(self, path: str | Path) -> None:
        """Put the state of a checkpoint back: the next `train` goes on from it.

        `path`: a checkpoint; or a folder of checkpoints or of a run, whose newest good one is taken. What has changed
        since is logged when training starts. Raises ValueError, before anything is touched, for what cannot go on.
        """
        folder = checkpoint.find(path)
        contents = checkpoint.read(folder)
        notes = resume.restore(self, contents, folder.parent)
        self.resumed = {**contents.state, "found_in": folder.parent}
        self.sequence = contents.state["sequence"]
        self.moment, self.saved_at = None, self.progress
        for model in self.trained_models():
            if model.engine is not None:
                model.engine.clear()
        self.resume_notes = [f"resumed from {folder} at step {self.step}", *notes]

    def find_resume(self, wanted: str | None) -> tuple[Path | None, str]:
        """The checkpoint that `--resume` means, and otherwise why there is none; see `checkpoint.find_resume`."""
        # The main process looks, and all wait: a moment later a new run's folder may be there.
        return self.world.from_main(checkpoint.find_resume(wanted, self.args.output_dir, self.run_name))

    # ---- the frame of `train` ---------------------------------------------------------------------------------------

    def start(self, resume_from: str | None, folder: str | None, interval: int | None, limit: int | None) -> None:
        """Settle where and when to save, go on from a checkpoint if one is given, open the run's records."""
        changes: dict[str, Any] = {"checkpoint_interval": interval, "checkpoint_total_limit": limit}
        for key, value in changes.items():
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{key}={value!r}: must be a whole number of at least 1, or None")
        self.args = replace(self.args, **{key: value for key, value in changes.items() if value is not None})
        args = self.args
        if self.needs_rows and self.rows.sized and not len(self.rows):
            raise ValueError("train_dataset is empty or missing: give at least one row")
        self.checkpoint_dir = Path(folder) if folder is not None else None
        if resume_from is not None:
            self.load_checkpoint(resume_from)
        if self.checkpoint_dir is not None:
            self.claim(self.checkpoint_dir)
        run = self.open_run()
        for line in self.resume_notes:
            run.note(line)
        self.resume_notes = []
        if self.resumed is not None and self.finished and not self.evaluation_due:
            run.note(f"nothing is left to do: num_train_epochs={args.num_train_epochs}, max_steps={args.max_steps}")
        self.save_schedule = checkpoint.Schedule(
            args.checkpoint_steps, args.checkpoint_minutes, args.checkpoint_interval, (self.clock, self.finished_epochs)
        )
        if self.checkpoint_dir is not None:
            self.announce_size(self.checkpoint_dir, run)
            for name, state in resume.take_moment(self)["callbacks"].items():
                encode(state, {}, name)  # refuse now what cannot be saved
        if self.resumed is not None and "rng" in self.resumed:
            checkpoint.set_rng_state(self.resumed.pop("rng"))  # last: what came before may have drawn

    def claim(self, root: Path) -> None:
        """Refuse a folder with another run's checkpoints; clean up what a kill left in one's own."""
        own = [self.resumed and self.resumed["run_id"], self.run and self.run.id]
        for path in checkpoint.complete(root)[-1:]:
            if checkpoint.run_of(path) not in own:
                raise ValueError(
                    f"checkpoint_dir={str(root)!r} holds the checkpoints of another run; go on from one of them "
                    "(resume_from_checkpoint), or give another folder"
                )

        def settle() -> None:
            if self.world.is_main:
                root.mkdir(parents=True, exist_ok=True)
                checkpoint.settle(root)

        self.world.together(settle)
        # Newer ones than that which was loaded stay until the limit takes them: torn ones, or another branch.
        self.sequence = max([self.sequence, *map(checkpoint.sequence_of, checkpoint.numbered(root))])
        self.world.exchange(None)  # before anybody writes a new one
        resume.save_references(self, root)

    def announce_size(self, root: Path, run: Run) -> None:
        size = sum(resume.checkpoint_bytes(model.agent.trained, model.shapes) for model in self.trained_models())
        size += sum(len(data) for files in self.model_files.values() for data in files.values())
        limit = self.args.checkpoint_total_limit
        run.note(
            f"a checkpoint takes about {checkpoint.size_text(size)} and its buffers; "
            f"{f'{limit} are kept' if limit else 'all are kept'} in {root}"
        )
        free = shutil.disk_usage(root).free
        if free < size * ((limit or 1) + 1):
            run.note(f"warning: {checkpoint.size_text(free)} are free there, which will not do for long")

    @contextmanager
    def saved_at_the_end(self, stop: StopSignal) -> Iterator[None]:
        """Around the loop: a signal or an error loses at most the piece of work that was running."""
        try:
            yield
        except Abandoned:
            self.save_last()
            self.note(f"stopped by signal {stop.requested} after step {self.step}, {self.where_saved()}")
            self.close()
            stop.exit()
        except (LostProcess, OutOfStep):
            raise  # nothing can be saved without the others
        except checkpoint.DiskFullError as error:
            self.note(f"stopped after step {self.step}: {error}")
            raise
        except Exception as error:
            self.note(f"stopped in step {self.step + 1}: {type(error).__name__}: {error}")
            self.save_last()
            raise
        finally:
            self.drain_incidents()

    @contextmanager
    def revocable(self, stop: StopSignal) -> Iterator[None]:
        """Inside, nothing of the trainer changes: a signal may end it at any time, and then it has not been."""
        with stop.abandonable():
            yield
        self.drain_incidents()
        self.moment = None

    def save_if_due(self) -> None:
        if self.checkpoint_dir is None:
            return
        if self.best_is_new:
            self.best_is_new = False
            self.write(self.checkpoint_dir / "checkpoint-best", None)
        due = self.world.from_main(self.save_schedule.due(self.clock, self.finished_epochs))  # clocks differ
        if due or (self.finished and self.saved_at != self.progress):
            self.save_numbered()

    def save_last(self) -> None:
        """After a signal or an error, if something would be lost; the piece that was running has not been."""
        for model in self.trained_models():
            if model.engine is not None:
                model.engine.clear()
        if self.checkpoint_dir is not None and self.moment is not None and self.saved_at != self.progress:
            self.save_numbered()

    def where_saved(self) -> str:
        if self.checkpoint_dir is None or self.saved_at != self.progress:
            return "not saved"
        return f"saved in {self.checkpoint_dir / f'checkpoint-{self.sequence}'}" if self.sequence else "nothing to save"

    def save_numbered(self) -> None:
        assert self.checkpoint_dir is not None
        self.sequence += 1
        if self.write(self.checkpoint_dir / f"checkpoint-{self.sequence}", self.args.checkpoint_total_limit):
            self.saved_at = self.progress

    def write(self, target: Path, limit: int | None) -> bool:
        """On a full disk the last good checkpoint stays; whether training goes on is a setting."""
        started = time.perf_counter()
        try:
            checkpoint.write(target, resume.gather(self, self.sequence), limit, self.world)
        except checkpoint.DiskFullError as error:
            if self.args.checkpoint_full_disk == "stop":
                raise
            self.note(f"checkpoint not saved: {error}")
            return False
        finally:
            self.seconds["time/save"] += time.perf_counter() - started
        return True

    def compare_with_best(self, metrics: Metrics) -> None:
        """Note an evaluation that is the best so far: `checkpoint-best` is then kept beside the numbered ones."""
        key = self.args.checkpoint_best_metric
        if key is None:
            return
        if key not in metrics:
            raise ValueError(f"checkpoint_best_metric={key!r}: no such metric; there are {', '.join(sorted(metrics))}")
        if metrics[key] > (self.best if self.best is not None else float("-inf")):
            self.best, self.best_is_new = metrics[key], True

    # ---- state ------------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> tuple[int, ...]:
        """Differs if there is anything to lose since then."""
        return self.step, self.rollout, self.epoch, len(self.chunks)

    @property
    def clock(self) -> int:
        """What `checkpoint_steps` counts."""
        return self.step

    @property
    def finished_epochs(self) -> int:
        """What `checkpoint_interval` counts."""
        return self.epoch

    @property
    def needs_rows(self) -> bool:
        return True

    def counters(self) -> dict[str, Any]:
        """Where the run is, as JSON; the twin of `set_counters`."""
        return {key: getattr(self, key) for key in COUNTERS}

    def set_counters(self, values: Mapping[str, Any]) -> None:
        for key in COUNTERS:
            setattr(self, key, values[key])
        self.rewards.counters.update(values["reward_counters"])

    def run_to_resume(self) -> dict[str, Any]:
        """Arguments of `Run` that make it go on with the records of the loaded checkpoint."""
        if self.resumed is None:
            return {}
        state = self.resumed
        for place in (Path(state["run_folder"]), state["found_in"].parent):  # it may have been moved
            if run_id(place) == state["run_id"]:
                return {"resume_folder": place, "resume_step": self.step, "resume_sizes": state["record_sizes"]}
        return {"previous": {"id": state["run_id"], "wandb": state["wandb"]}}

    @cached_property
    def rows_fingerprint(self) -> str | None:
        return resume.rows_hash(self.rows)

    @cached_property
    def model_files(self) -> dict[str, dict[str, bytes]]:
        """Config and tokenizer of each trained model, as files."""
        return {model.name: model.agent.files() for model in self.trained_models()}

    def trained_models(self) -> list[TrainedModel]:
        """Every model whose weights and optimizer are saved, the agents first; a family adds its own."""
        return [
            TrainedModel(agent, resume.source_of(member), shapes, self.engines.get(index))
            for index, (agent, member, shapes) in enumerate(zip(self.agents, self.members, self.shapes))
        ]

    # What the trainer has to offer.

    @property
    @abstractmethod
    def run_name(self) -> str: ...

    @property
    @abstractmethod
    def finished(self) -> bool: ...

    @abstractmethod
    def open_run(self) -> Run: ...

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def note(self, text: str) -> None: ...

    @abstractmethod
    def drain_incidents(self) -> None: ...

    @abstractmethod
    def limits(self) -> Sequence[Limit]:
        """What is halved when memory runs out."""

    @abstractmethod
    def callbacks(self) -> dict[str, Any]:
        """The user's functions by name (None: not given); those with a state_dict are saved."""
