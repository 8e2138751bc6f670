"""Records of a run: a folder of plain files, a progress line, and any tracker that Accelerate knows.

    runs/<name>/run.json            id, creation time, W&B run
                config.yaml         the resolved configuration
                versions.json       packages, hardware, git commit, command line, seed
                metrics.jsonl       one line a step: kind, step, env_step, epoch, time, metrics
                completions.jsonl   one line a completion
                log.txt             incidents and tables

The files need no service and hold every step. Trackers (W&B, TensorBoard, ...) get means over the steps since
their last log, against `env_step`.
"""

import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import yaml
from accelerate import PartialState
from accelerate.tracking import GeneralTracker
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from comlrl.records import (
    as_number,
    create_folder,
    environment_versions,
    json_line,
    plain,
    printable,
    read_metrics,
    truncate_lines,
    write_keeping_old,
    write_text,
)
from comlrl.trackers import check_trackers, open_tracker, open_wandb, send

__all__ = ["Run", "check_trackers", "environment_versions", "read_metrics"]

RESERVED_KEYS = {"kind", "step", "env_step", "epoch", "time", "nonfinite"}
SECONDS_BETWEEN_LINES = 10.0
TABLE_WIDTH = 140


def say(text: str) -> None:
    """Print without breaking a progress bar, whatever characters the terminal knows."""
    encoding = sys.stdout.encoding or "utf-8"
    with tqdm.external_write_mode(file=sys.stdout):
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)


class Progress:
    """A bar in a terminal, else a line every ten seconds, so that the log of a batch job stays short."""

    def __init__(self, total: int | None, done: int, start: float):
        """`start`: when the first of the steps after `done` began, by time.monotonic()."""
        self.total, self.done, self.start = total, done, start
        self.step, self.shown = done, ""
        self.last_line: float | None = None
        self.printed_step: int | None = None
        self.bar: tqdm | None = None
        if sys.stderr.isatty():
            size = shutil.get_terminal_size()  # not 0 x 0, as some containers have: tqdm would draw nothing
            self.bar = tqdm(total=total, initial=done, unit="step", ncols=size.columns, nrows=size.lines)

    def update(self, step: int, shown: str) -> None:
        """Show `step` (of `total`) and a short text such as the reward."""
        self.step, self.shown = step, shown
        if self.bar is not None:
            self.bar.set_postfix_str(shown, refresh=False)
            self.bar.update(step - self.bar.n)
            return
        now = time.monotonic()
        if self.last_line is None or now - self.last_line >= SECONDS_BETWEEN_LINES or step == self.total:
            self.print_line()
            self.last_line = now

    def print_line(self) -> None:
        line = tqdm.format_meter(
            n=self.step,
            total=self.total,  # type: ignore[arg-type]  # None: unknown
            elapsed=time.monotonic() - self.start,
            unit="step",
            postfix=self.shown,
            initial=self.done,
            bar_format="step {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]",
        )
        self.printed_step = self.step
        say(line)

    def close(self, *, verbose: bool) -> None:
        if self.bar is not None:
            self.bar.close()
        elif verbose and self.printed_step != self.step:
            self.print_line()


class Run:
    """One run's records. Only the main process writes; elsewhere every method does nothing.

    Args:
        root, name: the folder is `root/name`, with a suffix -2, -3, ... if it exists.
        config: the resolved configuration, secrets already masked.
        trackers: names of Accelerate trackers, for example `["tensorboard"]`.
        wandb: W&B settings (`project`, `entity`, `name`, `dir`, `tags`, `id`, `resume`, `mode`,
            `config_sections`, `output_dir`); None for no W&B.
        logging_steps: smallest distance, in environment steps, between two train logs of a tracker.
        verbose: console output; None takes `wandb["config_sections"]["output"]["verbose"]`, or True.
        total_steps: optimizer steps of the whole run, for the time left; None if unknown.
        resume_folder: an existing run's folder to go on in; lines of steps after `resume_step` are dropped, or what
            is beyond `resume_sizes` (see `sizes`).
        previous: `id` and `wandb` of the run to go on with where its folder is gone.
        is_main: whether this process writes: rank 0. With trackers and several processes, make the
            `Accelerator` or `PartialState` first.

    Raises:
        ValueError: a tracker is unknown or not installed, a W&B setting is wrong, `name` is not a folder
            name, or `resume_folder` is not a run's folder.
    """

    def __init__(
        self,
        root: str | os.PathLike,
        name: str,
        config: Mapping[str, Any],
        *,
        seed: int = 0,
        trackers: Sequence[str] = (),
        wandb: Mapping[str, Any] | None = None,
        logging_steps: int = 1,
        verbose: bool | None = None,
        total_steps: int | None = None,
        resume_folder: str | os.PathLike | None = None,
        resume_step: int | None = None,
        resume_sizes: Mapping[str, int] | None = None,
        previous: Mapping[str, Any] | None = None,
        is_main: bool = True,
    ):
        tracker_names = check_trackers(trackers, wandb)
        if logging_steps < 1:
            raise ValueError(f"logging_steps={logging_steps} must be at least 1")
        if verbose is None:
            output = ((wandb or {}).get("config_sections") or {}).get("output") or {}
            verbose = bool(output.get("verbose", True))
        if tracker_names:
            # Accelerate's trackers make the process state if there is none, as that of a single process.
            processes = int(os.environ.get("WORLD_SIZE", "1"))
            assert processes == 1 or torch.distributed.is_initialized(), "make the Accelerator before the run"
            PartialState()
        self.is_main = is_main
        self.verbose = verbose
        self.total_steps = total_steps
        self._closed = False
        self._folder: Path | None = None
        self._state: dict[str, Any] = {}
        if not is_main:
            return

        self._logging_steps = logging_steps
        self._resume_step = resume_step or 0
        self._progress: Progress | None = None
        self._opened = time.monotonic()
        # Since the trackers' last train log: each key's sum and number of steps.
        self._sums: dict[str, tuple[float, int]] = {}
        self._last_sent: int | None = None  # env_step of that log
        self._last: tuple[int, int, float] | None = None  # step, env_step, epoch of the last train line
        self._tracker_step = 0  # the trackers' x axis, which never goes back
        self._trackers: list[GeneralTracker] = []

        if resume_folder is None:
            self._folder = create_folder(root, name)
            self._state = {
                "id": uuid.uuid4().hex,
                "name": self._folder.name,
                "created": timestamp(),
                "wandb": None,
                **(previous or {}),
            }
        else:
            self._folder = Path(resume_folder)
            self._reopen(resume_step, resume_sizes or {})
        settings = plain(config)
        write_keeping_old(self.folder / "config.yaml", yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
        versions = {**environment_versions(), "seed": seed}
        write_keeping_old(self.folder / "versions.json", json.dumps(versions, indent=2) + "\n")
        self._write_state()
        self._metrics = (self.folder / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
        self._completions = (self.folder / "completions.jsonl").open("a", encoding="utf-8", buffering=1)

        for tracker_name in tracker_names:
            if tracker_name == "wandb":
                tracker, self._state["wandb"] = open_wandb(
                    wandb or {},
                    settings,
                    self._folder,
                    resumed=self._state["wandb"],
                    silent=not verbose,
                    note=self.note,
                )
                self._write_state()
            else:
                tracker = open_tracker(tracker_name, self._folder, settings, self._tracker_step)
            self._trackers.append(tracker)

    @property
    def folder(self) -> Path:
        """The run's folder. Another process than the main one knows it after `follow`."""
        assert self._folder is not None, "only the main process has the run's folder; give it to the others by follow"
        return self._folder

    @property
    def id(self) -> str:
        """32 hexadecimal digits, kept when the run is resumed."""
        return self._state["id"]

    def identity(self) -> tuple[Path, str] | None:
        """What the main process tells the others."""
        return (self.folder, self.id) if self.is_main else None

    def follow(self, identity: tuple[Path, str] | None) -> None:
        if not self.is_main:
            assert identity is not None
            self._folder, self._state = identity[0], {"id": identity[1]}

    def log(self, metrics: Mapping[str, Any], *, step: int, env_step: int, epoch: float, kind: str = "train") -> None:
        """Record the metrics of one optimizer step (`kind="train"`) or of one evaluation (`kind="eval"`).

        Values are numbers, or tensors and arrays of one element; None means "not defined at this step". Keys
        of an evaluation that do not start with `eval/` get it. Raises ValueError for other values and for
        reserved keys.
        """
        if not self.is_main:
            return
        self._require_open()
        if kind not in ("train", "eval"):
            raise ValueError(f"kind={kind!r} must be 'train' or 'eval'")
        if reserved := RESERVED_KEYS.intersection(metrics):
            raise ValueError(f"metric {min(reserved)!r} is a name that every line has already; rename it")
        prefix = "eval/" if kind == "eval" else ""
        values = {
            key if key.startswith(prefix) else prefix + key: as_number(key, value) for key, value in metrics.items()
        }
        head = {
            "kind": kind,
            "step": step,
            "env_step": env_step,
            "epoch": epoch,
            "time": round(time.time(), 3),
        }
        self._metrics.write(json_line({**head, **values}))

        if kind == "eval":
            self._send(values, step, env_step, epoch)
        else:
            for key, value in values.items():
                if value is not None:
                    total, count = self._sums.get(key, (0.0, 0))
                    self._sums[key] = (total + value, count + 1)
            self._last = (step, env_step, epoch)
            if self._last_sent is None or env_step - self._last_sent >= self._logging_steps:
                self._send_means()
        if self.verbose:
            self._show(kind, step, values)

    def log_completions(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append one line a record. A resume drops records whose `step` is after the checkpoint's."""
        if not self.is_main:
            return
        self._require_open()
        self._completions.write("".join(json_line(record) for record in records))
        self._completions.flush()

    def note(self, text: str) -> None:
        """Tell the user of an incident, on the console and in `log.txt`."""
        if not self.is_main:
            return
        with (self.folder / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"{timestamp()} {printable(text)}\n")
        if self.verbose:
            say(text)

    def summary_table(self, rows: Sequence[Mapping[str, Any]], title: str) -> None:
        """Print a table with one line a row, its columns the rows' keys, and keep it in `log.txt`."""
        if self.is_main:
            self.note("\n" + table_text(rows, title))

    def sizes(self) -> dict[str, int]:
        """Bytes of the record files so far, all on the disk: where a resume from this moment goes on."""
        sizes: dict[str, int] = {}
        if not self.is_main:
            return sizes
        for stream in (self._metrics, self._completions):
            if not stream.closed:
                stream.flush()
                os.fsync(stream.fileno())
            sizes[Path(stream.name).stem] = Path(stream.name).stat().st_size
        return sizes

    def wandb_state(self) -> dict[str, Any] | None:
        """`id`, `project` and `entity` of the W&B run, for a checkpoint; None if the run has none."""
        return self._state["wandb"] if self.is_main else None

    def close(self) -> None:
        """Send what the trackers have not seen, end them and close the files. Nothing else ends a W&B run."""
        if not self.is_main or self._closed:
            return
        if self._sums:
            self._send_means()
        for tracker in self._trackers:
            tracker.finish()
        if self._progress is not None:
            self._progress.close(verbose=self.verbose)
        self._metrics.close()
        self._completions.close()
        self._closed = True

    def __enter__(self) -> "Run":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside --

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the run in {str(self.folder)!r} is closed; log before close()")

    def _reopen(self, resume_step: int | None, sizes: Mapping[str, int]) -> None:
        """Take over an existing folder: its id, and its lines up to `sizes`, or `resume_step`."""
        path = self.folder / "run.json"
        if not path.is_file():
            raise ValueError(f"resume_folder={str(self.folder)!r} is not a run's folder: it has no run.json")
        self._state = json.loads(path.read_text(encoding="utf-8"))
        names = ("metrics", "completions")
        for name in names:
            file = self.folder / f"{name}.jsonl"
            if (file.stat().st_size if file.exists() else 0) < sizes.get(name, 0):
                self.note(f"{file.name} is shorter than it was at the checkpoint: lines are missing")
        dropped = [truncate_lines(self.folder / f"{name}.jsonl", resume_step, sizes.get(name)) for name in names]
        if (self.folder / "metrics.jsonl").exists():
            self._tracker_step = max((line["env_step"] for line in read_metrics(self.folder)), default=0)
        where = "" if resume_step is None else f" from step {resume_step}"
        self.note(f"resumed{where}; dropped {dropped[0]} metrics lines and {dropped[1]} completions after it")

    def _write_state(self) -> None:
        write_text(self.folder / "run.json", json.dumps(self._state, indent=2) + "\n")

    def _send_means(self) -> None:
        """Give the trackers each metric's mean over the steps, since their last train log, that have it."""
        assert self._last is not None
        step, env_step, epoch = self._last
        means = {key: total / count for key, (total, count) in self._sums.items()}
        self._send(means, step, env_step, epoch)
        self._sums = {}
        self._last_sent = env_step

    def _send(self, values: Mapping[str, float | int | None], step: int, env_step: int, epoch: float) -> None:
        self._tracker_step = max(self._tracker_step, env_step)
        sent = {key: value for key, value in values.items() if value is not None}
        for tracker in list(self._trackers):
            if not send(tracker, {**sent, "step": step, "epoch": epoch}, self._tracker_step):
                self.note("the W&B run was finished elsewhere; the records go on without it")
                self._trackers.remove(tracker)

    def _show(self, kind: str, step: int, values: Mapping[str, float | int | None]) -> None:
        if kind == "eval":
            means = [f"{key} {cell_text(value)}" for key, value in values.items() if key.endswith("/reward_mean")]
            say(f"evaluation at step {step}: " + (", ".join(means) or f"{len(values)} metrics"))
            return
        if self._progress is None:
            self._progress = Progress(self.total_steps, self._resume_step, self._opened)
        reward = values.get("reward_mean")
        self._progress.update(step, "" if reward is None else f"reward={reward:.4g}")


def timestamp() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def table_text(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """A table with one line a row, its columns the rows' keys."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(title=Text(printable(title)), title_justify="left")
    for column in columns:
        numeric = all(isinstance(row.get(column, 0), int | float) for row in rows)
        table.add_column(Text(printable(column)), justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(Text(cell_text(row.get(column))) for column in columns))
    text = StringIO()
    Console(file=text, width=TABLE_WIDTH).print(table)
    return text.getvalue().rstrip()


def cell_text(value: Any) -> str:
    if value is None:
        return "-"
    value = plain(value)
    return f"{value:.4g}" if isinstance(value, float) else printable(str(value))
