"""Checkpoints: a folder that is complete or not there, in a layout that knows nothing of ranks.

    checkpoint-<sequence>/
        agent_0/weights.safetensors      fp32, by parameter name (tied weights once)
        agent_0/optimizer.safetensors    exp_avg.<name>, exp_avg_sq.<name>
        agent_0/config.json, ...         model and generation config, tokenizer: what `comlrl.export` needs
        state.json                       counters, data position, RNG, buffers, settings, fingerprints
        manifest.json                    the marker, written last: SHA-256 of every file

Written aside, synced, renamed. Nothing is unpickled: tensors are safetensors, the rest JSON.
"""

import base64
import errno
import hashlib
import json
import os
import random
import re
import shutil
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from comlrl.processes import World

VERSION = 2
MANIFEST = "manifest.json"
STATE = "state.json"
NAME = re.compile(r"^checkpoint-(\d+)$")
STAGED = ".staged-"
OLD = ".old-"


class CheckpointError(ValueError):
    """A checkpoint that is torn, corrupted, or of another run's shape."""


class DiskFullError(OSError):
    """No space for a checkpoint; what was there before is untouched."""


@dataclass
class Contents:
    """What a checkpoint holds: JSON state, and tensors and other files by relative name."""

    state: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]
    files: dict[str, bytes] = field(default_factory=dict)


# ---- writing --------------------------------------------------------------------------------------------------------


def write(target: Path, contents: Contents, limit: int | None = None, world: World | None = None) -> Path:
    """Write the folder `target`; with a limit, keep only the newest `limit` numbered checkpoints beside it.

    The new one is complete and synced before an old one goes, and an old one goes before the new one gets its name:
    there are never more than `limit` plus the one in progress, and never none. With several processes (all of them
    call) each writes the tensors that it has, and the main process does the rest; they share the file system.
    """
    world = world or World()
    root = target.parent
    staged = root / f"{STAGED}{target.name}"
    try:
        _in_step(world, target, contents, lambda: _prepare(staged), main_only=True)
        _in_step(world, target, contents, lambda: _write_tensors(staged, contents))
        _in_step(world, target, contents, lambda: _complete(staged, contents), main_only=True)
    except Exception:
        if world.is_main:
            shutil.rmtree(staged, ignore_errors=True)
        raise
    _in_step(world, target, contents, lambda: _give_name(staged, target, limit), main_only=True)
    return target


def _in_step(world: World, target: Path, contents: Contents, work: Callable[[], None], main_only: bool = False) -> None:
    """work(), then wait for every process. A disk that is full for one of them is a DiskFullError in all."""

    def unless_full() -> str | None:
        try:
            if world.is_main or not main_only:
                work()
        except Exception as error:
            if _disk_is_full(error):
                return f"{size_text(estimate_bytes(contents))} needed"
            raise
        return None

    for text in world.together(unless_full):
        if text is not None:
            raise DiskFullError(
                errno.ENOSPC,
                f"no space for checkpoint {target} ({text}); older ones are untouched. Free some, lower "
                "checkpoint_total_limit, or set checkpoint_full_disk: continue",
            )


def _prepare(staged: Path) -> None:
    staged.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir()


def _give_name(staged: Path, target: Path, limit: int | None) -> None:
    if limit is not None:
        older = complete(target.parent)
        for old in older[: max(len(older) - (limit - 1), 0)]:
            _remove(old)
    if target.exists():
        _remove(target)
    staged.rename(target)
    _sync_folder(target.parent)


def _disk_is_full(error: Exception) -> bool:
    """safetensors writes in Rust, whose error is only a text."""
    full = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, SafetensorError):
        return any(f"{word} {number}" in str(error) for word in ("code:", "os error") for number in full)
    return isinstance(error, OSError) and error.errno in full


def _write_tensors(folder: Path, contents: Contents) -> None:
    for name, tensors in contents.tensors.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, folder / name)


def _complete(folder: Path, contents: Contents) -> None:
    """All that is no tensor, and the marker with every file's hash."""
    for name, data in contents.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / STATE).write_text(json.dumps(contents.state), encoding="utf-8")
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    hashes = dict(zip([str(path.relative_to(folder)) for path in paths], file_hashes(paths)))
    for path in paths:
        _sync_file(path)
    marker = folder / MANIFEST
    marker.write_text(json.dumps({"version": VERSION, "files": hashes}, indent=1), encoding="utf-8")
    _sync_file(marker)
    for place in [*(p for p in folder.rglob("*") if p.is_dir()), folder]:
        _sync_folder(place)


def settle(root: Path) -> None:
    """After a kill: a whole checkpoint that has no name yet gets it, half ones go. For the owner of `root` only."""
    for staged in sorted(root.glob(f"{STAGED}*")):
        if (staged / MANIFEST).exists():
            target = root / staged.name.removeprefix(STAGED)
            if target.exists():
                _remove(target)
            staged.rename(target)
        else:
            shutil.rmtree(staged)
    for old in root.glob(f"{OLD}*"):
        shutil.rmtree(old)


def _remove(folder: Path) -> None:
    """Takes the name away first, so that a kill in between leaves no half checkpoint that looks whole."""
    grave = folder.with_name(f"{OLD}{folder.name}")
    shutil.rmtree(grave, ignore_errors=True)
    folder.rename(grave)
    shutil.rmtree(grave)


def _sync_file(path: Path) -> None:
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- reading --------------------------------------------------------------------------------------------------------


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a whole checkpoint, or a CheckpointError that says what is wrong."""
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint {folder} does not exist")
    marker = folder / MANIFEST
    if not marker.exists():
        raise CheckpointError(f"checkpoint {folder} is torn: it has no {MANIFEST}, so its writing never ended")
    try:
        manifest = json.loads(marker.read_text(encoding="utf-8"))
        files, version = manifest["files"], manifest["version"]
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"checkpoint {folder} is corrupted: {MANIFEST} cannot be read ({error})") from error
    if version != VERSION:
        raise CheckpointError(f"checkpoint {folder} has version {version}; this program reads version {VERSION}")
    for name in files:
        if not (folder / name).is_file():
            raise CheckpointError(f"checkpoint {folder} is torn: {name} is missing")
    for name, found in zip(files, file_hashes([folder / name for name in files])):
        if found != files[name]:
            raise CheckpointError(f"checkpoint {folder} is corrupted: {name} is not what was written")
    return manifest


def read(folder: Path) -> Contents:
    """All of a checkpoint, verified; tensors are on the CPU, memory-mapped by safetensors."""
    names = verify(folder)["files"]
    tensors = {name: load_file(folder / name) for name in names if name.endswith(".safetensors")}
    files = {name: (folder / name).read_bytes() for name in names if name not in tensors and name != STATE}
    return Contents(read_state(folder), tensors, files)


def read_state(folder: Path) -> dict[str, Any]:
    return json.loads((folder / STATE).read_text(encoding="utf-8"))


def read_checkpoint_metadata(path: str | os.PathLike) -> dict[str, Any]:
    """version, trainer_class, sequence, run_id, wandb (id, project, entity; or None) and step of a checkpoint.

    Raises ValueError for a folder that is not a whole checkpoint. Reads no tensors, so it takes no time.
    """
    folder = Path(path)
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"{folder} is not a complete checkpoint (it has no {MANIFEST})")
    try:
        state = read_state(folder)
        return {key: state[key] for key in ("version", "trainer_class", "sequence", "run_id", "wandb", "step")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {folder} is corrupted: {STATE} cannot be read ({error})") from error


def run_of(folder: Path) -> str | None:
    """The id of the run that a checkpoint is of; None if it cannot be read."""
    try:
        return read_checkpoint_metadata(folder)["run_id"]
    except CheckpointError:
        return None


def complete(root: Path) -> list[Path]:
    """Numbered checkpoints that carry their marker, oldest first."""
    return [path for path in numbered(root) if (path / MANIFEST).exists()]


def numbered(root: Path) -> list[Path]:
    """Folders named `checkpoint-<number>`, oldest first, whole or not."""
    if not root.is_dir():
        return []
    return sorted((path for path in root.iterdir() if NAME.match(path.name)), key=sequence_of)


def sequence_of(path: Path) -> int:
    match = NAME.match(path.name)
    assert match is not None, path
    return int(match[1])


def newest_good(root: Path, up_to: int | None = None) -> Path | None:
    """The newest checkpoint that verifies; torn and corrupted ones are named in a warning and passed over.

    One without its name counts if it is whole: a kill may have come between making room for it and naming it. Nothing
    is changed, as another process may be writing here. `up_to`: the highest number that is wanted.
    """
    found = [(sequence_of(path), 1, path) for path in numbered(root)]
    for staged in root.glob(f"{STAGED}checkpoint-*"):
        if (match := NAME.match(staged.name.removeprefix(STAGED))) and (staged / MANIFEST).exists():
            found.append((int(match[1]), 0, staged))
    for number, _, path in sorted(found, reverse=True):
        if up_to is not None and number > up_to:
            continue
        try:
            verify(path)
        except CheckpointError as error:
            warnings.warn(f"{error}; looking for an older one", stacklevel=2)
            continue
        return path
    return None


def find(path: str | os.PathLike) -> Path:
    """The checkpoint that `path` means: itself, or the newest good one of a folder of checkpoints or of a run.

    One that is named but torn or corrupted is replaced by the newest good one before it, with a warning.
    Raises CheckpointError if there is none.
    """
    folder = Path(path)
    if folder.is_file():  # a file of the checkpoint
        folder = folder.parent
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint {folder} does not exist")
    if (match := NAME.match(folder.name)) or (folder / STATE).exists():
        try:
            verify(folder)
        except CheckpointError as error:
            older = newest_good(folder.parent, int(match[1]) - 1) if match else None
            if older is None:
                raise
            warnings.warn(f"{error}; taking {older} in its place", stacklevel=2)
            return older
        return folder
    for root in (folder, folder / "checkpoints"):
        if (good := newest_good(root)) is not None:
            return good
    raise CheckpointError(f"{folder} holds no good checkpoint")


def newest_run(output_dir: str | os.PathLike, run_name: str) -> Path | None:
    """The newest run folder of a name: `run_name`, or `run_name-<k>` with the highest k."""
    root = Path(output_dir)
    pattern = re.compile(rf"^{re.escape(run_name)}(?:-(\d+))?$")
    found = [(int(match[1] or 1), path) for path in root.glob("*") if (match := pattern.match(path.name))]
    runs = [(number, path) for number, path in found if (path / "run.json").is_file()]
    return max(runs)[1] if runs else None


def find_resume(wanted: str | None, output_dir: str | os.PathLike, run_name: str) -> tuple[Path | None, str]:
    """The checkpoint that `--resume` means (auto: of the newest run of that name); None, and why, to start anew."""
    if wanted is None:
        return None, ""
    if wanted != "auto":
        return find(wanted), ""
    run = newest_run(output_dir, run_name)
    if run is None:
        return None, f"--resume auto: {output_dir} has no run {run_name}, so this one starts anew"
    good = newest_good(run / "checkpoints")
    return good, "" if good is not None else f"--resume auto: {run} has no good checkpoint, so this run starts anew"


# ---- state ----------------------------------------------------------------------------------------------------------


def rng_state() -> dict[str, Any]:
    """Of python, numpy, torch and every device, as JSON."""
    numpy_state: Any = np.random.get_state(legacy=True)
    kind, keys, position, has_gauss, gauss = numpy_state
    version, internal, gauss_next = random.getstate()
    return {
        "python": [version, list(internal), gauss_next],
        "numpy": [kind, _encode(keys.tobytes()), position, has_gauss, gauss],
        "torch": _encode(torch.get_rng_state().numpy().tobytes()),
        "cuda": [_encode(state.numpy().tobytes()) for state in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_available()
        else [],
        "mps": _encode(torch.mps.get_rng_state().numpy().tobytes()) if torch.backends.mps.is_available() else None,
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.frombuffer(_decode(keys), dtype=np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(_bytes_tensor(state["torch"]))
    if torch.cuda.is_available():
        for device, encoded in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_bytes_tensor(encoded), device)
    if torch.backends.mps.is_available() and state["mps"] is not None:
        torch.mps.set_rng_state(_bytes_tensor(state["mps"]))


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text)


def _bytes_tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(_decode(text)), dtype=torch.uint8)


def model_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters by name, a tied one once, and the buffers that belong to the model's files."""
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    saved = model.state_dict()
    tensors |= {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return tensors


def load_model_tensors(model: torch.nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    check_tensors(model, tensors, where)
    with torch.no_grad():
        for name, tensor in model_tensors(model).items():
            tensor.copy_(tensors[name])


def tensor_shapes(model: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model_tensors(model).items()}


def check_tensors(model: torch.nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    check_shapes(tensor_shapes(model), tensors, where)


def check_shapes(own: Mapping[str, torch.Size], tensors: Mapping[str, Tensor], where: str) -> None:
    for name in sorted(own.keys() ^ tensors.keys()):
        raise CheckpointError(f"{where}: parameter {name} is only in the {'model' if name in own else 'checkpoint'}")
    for name, shape in own.items():
        if shape != tensors[name].shape:
            raise CheckpointError(
                f"{where}: {name} has shape {list(tensors[name].shape)} in the checkpoint, {list(shape)} in the model"
            )


def tensors_hash(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().flatten().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def file_hashes(paths: Sequence[Path]) -> list[str]:
    """SHA-256 of files, several at a time."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(file_hash, paths))


def file_hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def estimate_bytes(contents: Contents) -> int:
    tensors = [tensor for group in contents.tensors.values() for tensor in group.values()]
    return sum(t.numel() * t.element_size() for t in tensors) + sum(len(data) for data in contents.files.values())


def size_text(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


class Schedule:
    """When to save: every so many optimizer steps, minutes, or epochs; none: not by that."""

    def __init__(
        self,
        steps: int | None,
        minutes: float | None,
        epochs: int | None,
        start: tuple[int, int],
        clock: Callable[[], float] = time.monotonic,
    ):
        self.steps, self.minutes, self.epochs, self.clock = steps, minutes, epochs, clock
        self.step, self.epoch = start
        self.saved = clock()

    def due(self, step: int, epoch: int) -> bool:
        """Whether a boundary was crossed since the last call."""
        due = bool(self.steps and step // self.steps > self.step // self.steps)
        due |= bool(self.epochs and epoch // self.epochs > self.epoch // self.epochs)
        due |= self.minutes is not None and self.clock() - self.saved >= 60 * self.minutes
        self.step, self.epoch = step, epoch
        if due:
            self.saved = self.clock()
        return due
