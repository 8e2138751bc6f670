"""Checkpoints: a folder that is complete or not there, in a layout that knows nothing of ranks.

    checkpoint-<sequence>/
        agent_0/weights.safetensors      fp32, by parameter name (tied weights once)
        agent_0/optimizer.safetensors    exp_avg.<name>, exp_avg_sq.<name>
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

VERSION = 2
MANIFEST = "manifest.json"
NAME = re.compile(r"^checkpoint-(\d+)$")
STAGED = re.compile(r"^\.staged-checkpoint-(\d+)$")


class CheckpointError(ValueError):
    """A checkpoint that is torn, corrupted, or of another run's shape."""


class DiskFullError(OSError):
    """No space for a checkpoint; what was there before is untouched."""


@dataclass
class Contents:
    """What a checkpoint holds: JSON state, and tensors by relative file name."""

    state: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]]


# ---- writing --------------------------------------------------------------------------------------------------------


def write(root: Path, sequence: int, contents: Contents, limit: int | None, name: str | None = None) -> Path:
    """Write `root/checkpoint-<sequence>` (or `root/<name>`), then keep the newest `limit` of the numbered ones.

    The new one is complete and synced before an old one goes, and an old one goes before the new one gets its name: there
    are never more than `limit` plus the one in progress, and never none.
    """
    root.mkdir(parents=True, exist_ok=True)
    target = root / (name or f"checkpoint-{sequence}")
    staged = root / f".staged-{target.name}"
    shutil.rmtree(staged, ignore_errors=True)
    try:
        _write_files(staged, contents)
    except OSError as error:
        shutil.rmtree(staged, ignore_errors=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(
                error.errno,
                f"no space for {target} ({gigabytes(estimate_bytes(contents))} needed); earlier checkpoints are untouched",
            ) from error
        raise
    if limit is not None and name is None:
        for old in complete(root)[: max(len(complete(root)) - (limit - 1), 0)]:
            _remove(old)
    if target.exists():
        _remove(target)
    staged.rename(target)
    _sync_folder(root)
    return target


def _write_files(folder: Path, contents: Contents) -> None:
    folder.mkdir()
    for name, tensors in contents.tensors.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()}, folder / name)
    (folder / "state.json").write_text(json.dumps(contents.state, allow_nan=True), encoding="utf-8")
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    hashes = {str(path.relative_to(folder)): file_hash(path) for path in files}
    for path in files:
        _sync_file(path)
    marker = folder / MANIFEST
    marker.write_text(json.dumps({"version": VERSION, "files": hashes}, indent=1), encoding="utf-8")
    _sync_file(marker)
    for place in [*(p for p in folder.rglob("*") if p.is_dir()), folder]:
        _sync_folder(place)


def _remove(folder: Path) -> None:
    """Takes the marker's name away first, so that a kill in between leaves no half checkpoint that looks whole."""
    grave = folder.with_name(f".old-{folder.name}")
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
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"checkpoint {folder} is torn: {name} is missing")
        if file_hash(path) != expected:
            raise CheckpointError(f"checkpoint {folder} is corrupted: {name} is not what was written")
    return manifest


def read(folder: Path) -> Contents:
    """Everything in a verified checkpoint; tensors on the CPU, memory-mapped by safetensors."""
    manifest = verify(folder)
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    names = [name for name in manifest["files"] if name.endswith(".safetensors")]
    return Contents(state, {name: load_file(folder / name) for name in names})


def read_checkpoint_metadata(path: str | os.PathLike) -> dict[str, Any]:
    """version, trainer_class, sequence, run_id, wandb (id, project, entity; or None) and step of a checkpoint.

    Raises ValueError for a folder that is not a whole checkpoint. Reads no tensors.
    """
    folder = Path(path)
    state = json.loads((folder / "state.json").read_text(encoding="utf-8")) if (folder / MANIFEST).exists() else None
    if state is None:
        raise CheckpointError(f"{folder} is not a complete checkpoint (no {MANIFEST})")
    return {key: state[key] for key in ("version", "trainer_class", "sequence", "run_id", "wandb", "step")}


def complete(root: Path) -> list[Path]:
    """Numbered checkpoints that carry their marker, oldest first."""
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := NAME.match(path.name))]
    return [path for _, path in sorted(found) if (path / MANIFEST).exists()]


def newest_good(root: Path) -> Path | None:
    """The newest checkpoint that verifies; torn and corrupted ones are named in a warning and passed over.

    A staged one counts if it is whole: a kill may have come between making room for it and giving it its name.
    """
    if not root.is_dir():
        return None
    found = []
    for path in root.iterdir():
        match = NAME.match(path.name) or STAGED.match(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    for _, path in sorted(found, key=lambda item: (item[0], NAME.match(item[1].name) is not None), reverse=True):
        try:
            verify(path)
        except CheckpointError as error:
            if NAME.match(path.name):
                warnings.warn(f"{error}; taking an older one", stacklevel=2)
            continue
        if STAGED.match(path.name):
            path = path.rename(root / path.name.removeprefix(".staged-"))
        return path
    return None


def newest_run(output_dir: str | os.PathLike, run_name: str) -> Path | None:
    """The newest folder `run_name` or `run_name-<k>` that has a good checkpoint in `checkpoints/`."""
    root = Path(output_dir)
    if not root.is_dir():
        return None
    pattern = re.compile(rf"^{re.escape(run_name)}(?:-(\d+))?$")
    runs = [(int(match[1] or 1), path) for path in root.iterdir() if (match := pattern.match(path.name))]
    for _, path in sorted(runs, reverse=True):
        if (path / "checkpoints").is_dir() and newest_good(path / "checkpoints") is not None:
            return path
    return None


# ---- state ----------------------------------------------------------------------------------------------------------


def rng_state() -> dict[str, Any]:
    """Of python, numpy, torch and every GPU, as JSON."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)  # type: ignore[misc]
    version, internal, gauss_next = random.getstate()
    return {
        "python": [version, list(internal), gauss_next],
        "numpy": [kind, _encode(keys.tobytes()), position, has_gauss, gauss],
        "torch": _encode(torch.get_rng_state().numpy().tobytes()),
        "cuda": [_encode(state.numpy().tobytes()) for state in torch.cuda.get_rng_state_all()]
        if torch.cuda.is_available()
        else [],
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


def check_tensors(model: torch.nn.Module, tensors: Mapping[str, Tensor], where: str) -> None:
    own = model_tensors(model)
    for name in sorted(own.keys() ^ tensors.keys()):
        raise CheckpointError(f"{where}: parameter {name} is only in the {'model' if name in own else 'checkpoint'}")
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            raise CheckpointError(
                f"{where}: {name} has shape {list(tensors[name].shape)} in the checkpoint and {list(tensor.shape)} in the model"
            )


def tensors_hash(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def file_hash(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _hash(stream)


def _hash(stream: Any) -> str:  # Python 3.10
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def estimate_bytes(contents: Contents) -> int:
    return sum(t.numel() * t.element_size() for tensors in contents.tensors.values() for t in tensors.values())


def gigabytes(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"


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
