"""Experiment trackers (W&B, TensorBoard and the rest), through Accelerate's tracker classes."""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from accelerate.utils import LoggerType

from comlrl.config import without_secrets
from comlrl.records import plain

WANDB_KEYS = (
    *("project", "entity", "name", "run_name", "dir", "tags", "id", "resume", "mode"),
    *("config_sections", "output_dir"),
)
WANDB_MODES = ("online", "offline", "disabled")
DEFAULT_PROJECT = "comlrl"
SECONDS_TO_CONNECT = 5.0


def check_trackers(trackers: Iterable[str] = (), wandb: Mapping[str, Any] | None = None) -> list[str]:
    """Names of the trackers to open, W&B included. Raises ValueError if one is unknown or not installed, or
    if a W&B setting is wrong. Costs nothing: call it before any model is loaded."""
    if isinstance(trackers, str):
        raise ValueError(f"trackers={trackers!r} must be a list, for example [{trackers}]")
    names = list(dict.fromkeys(trackers))
    if wandb is not None and "wandb" not in names:
        names.append("wandb")
    built_in = [name for name in LoggerType.list() if name != "all"]
    installed = [str(kind) for kind in get_available_trackers()]
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise ValueError(f"trackers: {name!r} is unknown; choose from {', '.join(built_in)}")
        if name in built_in and name not in installed:
            package = name.replace("_", "-")
            raise ValueError(f"trackers: {name!r} is not installed; run `pip install {package}` or remove it")
    if wandb is not None:
        check_wandb(wandb)
    return names


def check_wandb(settings: Mapping[str, Any]) -> None:
    for key in settings:
        if key not in WANDB_KEYS:
            raise ValueError(f"wandb.{key} is unknown; choose from {', '.join(sorted(WANDB_KEYS))}")
    mode, tags, sections = (settings.get(key) for key in ("mode", "tags", "config_sections"))
    if mode is not None and mode not in WANDB_MODES:
        raise ValueError(f"wandb.mode={mode!r} must be one of {', '.join(WANDB_MODES)}")
    if tags is not None and (isinstance(tags, str) or not all(isinstance(tag, str) for tag in tags)):
        raise ValueError(f"wandb.tags={tags!r} must be a list of strings, for example [baseline]")
    if sections is not None and not isinstance(sections, Mapping):
        raise ValueError(f"wandb.config_sections={sections!r} must be a mapping of section names to sections")


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str | int | float | bool]:
    """Dotted keys and scalars: all that most trackers take as a configuration."""
    items: dict[str, str | int | float | bool] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            items.update(flat(value, f"{prefix}{key}."))
        else:
            items[f"{prefix}{key}"] = value if isinstance(value, str | int | float | bool) else str(value)
    return items


def open_tracker(name: str, folder: Path, config: dict[str, Any], last_env_step: int) -> GeneralTracker:
    """Start any of Accelerate's trackers but W&B, with the configuration stored in it.

    `last_env_step` is that of the last line kept by a resume, else 0.
    """
    tracker_class = LOGGER_TYPE_TO_CLASS[name]
    if name == "tensorboard":
        # Purging hides what a killed run wrote after its checkpoint. The configuration goes in as text: the
        # hyper-parameter store would show up as a second run.
        tracker = tracker_class("tensorboard", folder, purge_step=last_env_step + 1 if last_env_step else None)
        tracker.start()
        tracker.log({"config": f"```\n{yaml.safe_dump(config, sort_keys=False)}```"}, step=last_env_step)
        return tracker
    tracker = (
        tracker_class(name, folder) if tracker_class.requires_logging_directory else tracker_class(DEFAULT_PROJECT)
    )
    tracker.start()
    tracker.store_init_configuration(flat(config))
    return tracker


def offline_reason(base_url: str, api_key: str | None) -> str | None:
    """Why a W&B run cannot be online: found out beforehand, since `wandb.init` would prompt, or wait long.

    The key may also be in the environment or in the netrc file.
    """
    import requests  # comes with wandb

    api_key = api_key or os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")
    if not api_key and not any(map(requests.utils.get_netrc_auth, (base_url, "https://api.wandb.ai"))):
        return "no API key is configured (`wandb login`, or WANDB_API_KEY)"
    try:
        requests.head(base_url, timeout=SECONDS_TO_CONNECT)
    except requests.RequestException as error:
        return f"{base_url} cannot be reached ({type(error).__name__})"
    return None


def wandb_config(config: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration shown in W&B: the resolved one, the sections, the dataset's name and type on top."""
    sections = without_secrets(plain(settings.get("config_sections") or {}))
    dataset = sections.get("dataset")
    promoted = {}
    if isinstance(dataset, Mapping):
        promoted = {f"dataset_{key}": dataset[key] for key in ("name", "type") if key in dataset}
    if "output_dir" in settings:
        promoted["output_dir"] = plain(settings["output_dir"])
    return {**config, **sections, **promoted}


def open_wandb(
    settings: Mapping[str, Any],
    config: dict[str, Any],
    folder: Path,
    *,
    resumed: Mapping[str, Any] | None,
    silent: bool,
    note: Callable[[str], None],
) -> tuple[GeneralTracker, dict[str, Any] | None]:
    """Open a W&B run, offline (with one note) where online cannot work.

    `resumed` is the state (id, project, entity) of the run to go on with, if any. Returns the tracker and its
    state, None for mode `disabled`.
    """
    import wandb

    stored = resumed or {}
    directory = Path(settings.get("dir") or os.environ.get("WANDB_DIR") or folder)
    directory.mkdir(parents=True, exist_ok=True)
    project = settings.get("project") or stored.get("project")
    project = project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT
    name = settings.get("name") or settings.get("run_name") or os.environ.get("WANDB_NAME") or folder.name
    options: dict[str, Any] = {
        "entity": settings.get("entity") or stored.get("entity"),
        "name": name,
        "dir": str(directory),
        "tags": list(settings["tags"]) if settings.get("tags") else None,
        "id": settings.get("id") or stored.get("id"),  # None: W&B makes one, or takes a sweep's
        "resume": settings.get("resume") or ("allow" if stored else None),
        "config": wandb_config(config, settings),
        # A run that is already open, of another trainer for instance, is left alone.
        "reinit": "create_new" if wandb.run is not None else None,
        # Without its own record of the machine and the command line, which may hold a secret.
        "settings": wandb.Settings(silent=silent, x_disable_meta=True),
    }
    mode = settings.get("mode")
    known = wandb.setup().settings
    decided = mode is not None or "WANDB_MODE" in os.environ or known.mode != "online"
    if not decided and (reason := offline_reason(known.base_url, known.api_key)):
        mode = "offline"
        note(f"the W&B run is offline, since {reason}; `wandb sync` sends it later")
    tracker = LOGGER_TYPE_TO_CLASS["wandb"](project, mode=mode, **options)
    try:
        tracker.start()
    except wandb.Error as error:
        note(f"the W&B run is offline, since it could not be opened: {error}; `wandb sync` sends it later")
        options["id"] = None  # wandb holds on to the id of the failed attempt
        tracker = LOGGER_TYPE_TO_CLASS["wandb"](project, mode="offline", **options)
        tracker.start()
    run = tracker.tracker
    if run.disabled:
        return tracker, None
    return tracker, {"id": run.id, "project": run.project or project, "entity": run.entity or None}


def send(tracker: GeneralTracker, values: dict[str, Any], step: int) -> bool:
    """Log `values` at x axis position `step`; False if the tracker's run was finished by somebody else."""
    if tracker.name != "wandb":
        tracker.log(values, step=step)
        return True
    import wandb

    try:
        tracker.log(values, step=step)
    except wandb.errors.UsageError:  # "Run is finished"
        return False
    return True
