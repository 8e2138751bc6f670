"""Settings: dataclasses <- a YAML file <- ``key=value`` overrides of the command line.

A dataclass says which keys exist, their types, defaults and one line of help. OmegaConf reads and merges the
YAML and the overrides; ``build`` gives the result its types. Whatever does not fit is a ``ValueError`` that
names key, value and fix.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

Choose = Callable[[dict[str, Any]], Mapping[str, type]]


def option(default: Any, help: str) -> Any:
    """A dataclass field with a line of help. A list or dict is copied an instance; a dataclass: a section."""
    metadata = {"help": help}
    if isinstance(default, type) and dataclasses.is_dataclass(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass
class RunConfig:
    """The settings of one run of a training script. ``args`` holds the trainer's own config."""

    algorithm: str = option("magrpo", "magrpo, mareinforce, marloo, maremax or centralized_magrpo")
    model: str = option("smollm2-135m", "every agent's model: an embedded name, a path or a hub id")
    models: list[str] | None = option(None, "one model an agent (heterogeneous team); overrides model")
    tokenizers: list[str] | None = option(None, "one tokenizer an agent; null: each model's own")
    num_agents: int = option(2, "agents of the team (roles, if one coordinator writes all answers)")
    model_config: dict[str, Any] = option({}, "dtype, attn_implementation, model_kwargs, special_tokens")
    task: str = option("length_ratio", "a name of comlrl.tasks, or file.py:name of a function making a Task")
    task_args: dict[str, Any] = option({}, "arguments of the task's function")
    reward: Any = option(None, "null: the task's; file.py:name; or a list of {use: file.py:name, weight: 1.0}")
    save_dir: str | None = option(None, "where the trained models go; null: model/ in the run's folder")
    wandb: dict[str, Any] | None = option(None, "project, entity, name, ...: switches Weights & Biases on")
    trackers: list[str] = option([], "names of Accelerate's trackers: tensorboard, wandb, ...")
    args: Any = option(None, "settings of the trainer")
    # More sections can come here: `name: Section = option(Section, "...")`, Section a dataclass of options.

    def __post_init__(self) -> None:
        if self.num_agents < 1:
            raise ValueError(f"num_agents={self.num_agents}: must be at least 1")
        expected = self.num_models
        for key, names in (("models", self.models), ("tokenizers", self.tokenizers)):
            if names is not None and len(names) != expected:
                raise ValueError(f"{key}={names}: {expected} expected for num_agents={self.num_agents}, or null")

    @property
    def num_models(self) -> int:
        """A coordinator is one model that plays all roles, whatever num_agents is."""
        return 1 if self.algorithm.startswith("centralized") else self.num_agents


@dataclasses.dataclass
class ActorCriticRunConfig(RunConfig):
    """The settings of one run of train_ac.py."""

    algorithm: str = option("maac", "maac or iac")
    critic_model: str | None = option(None, "every critic's model; null: that of its agent (MAAC: of agent 0)")
    critics: list[str] | None = option(None, "one model a critic (iac: num_agents, maac: 1); overrides critic_model")
    critic_tokenizers: list[str] | None = option(None, "one tokenizer a critic; null: each model's own")


@dataclasses.dataclass
class PreferenceRunConfig(RunConfig):
    """The settings of one run of train_pbrl.py."""

    algorithm: str = option("madpo", "madpo, marlhf, madpo_iter or marlhf_iter")

    @property
    def num_models(self) -> int:
        return 1 if self.args.collaboration_mode == "centralized" else self.num_agents


# --- a dataclass from a nested dict ---


def build(
    cls: type,
    values: Mapping[str, Any],
    path: str = "",
    sections: Mapping[str, type] | None = None,
    known: Sequence[str] | None = None,
) -> Any:
    """An instance of the dataclass ``cls`` from a nested dict, each value checked against its field's type.

    ``path`` is the dotted place of ``values`` and ``known`` every valid dotted key, for messages.
    ``sections`` are dataclasses that replace the types of fields of ``cls``. Raises ValueError for an unknown
    key, a wrong type, a missing value, and for what ``__post_init__`` refuses.
    """
    sections = sections or {}
    known = [key.path for key in _keys(cls, sections, path)] if known is None else known
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    hints = {**typing.get_type_hints(cls), **sections}
    for key in values:
        if key not in fields:
            raise ValueError(_unknown_key(key, path, fields, known))
    arguments = {}
    for name, field in fields.items():
        if name in values:
            arguments[name] = convert(values[name], hints[name], _join(path, name), known)
        elif name in sections:
            arguments[name] = build(sections[name], {}, _join(path, name), None, known)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{_join(path, name)}: a value is required ({_type_name(hints[name])})")
    try:
        return cls(**arguments)
    except ValueError as error:
        raise ValueError(f"{path}: {error}" if path else str(error)) from error


def convert(value: Any, expected: Any, path: str, known: Sequence[str] | None = None) -> Any:
    """``value`` as the type hint ``expected``, or a ValueError that names ``path``, value and type."""
    origin, items = get_origin(expected) or expected, get_args(expected)
    if expected is Any:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(value, expected, path, known)
    if origin is Literal:
        valid = any(value == choice and type(value) is type(choice) for choice in items)
    elif dataclasses.is_dataclass(origin) and (value is None or isinstance(value, Mapping)):
        return build(typing.cast(type, origin), value or {}, path, None, known)  # None: an empty YAML section
    elif origin is dict and value is None:
        return {}
    elif origin is float and _is_number(value):
        return float(value)
    elif origin is tuple and isinstance(value, (list, tuple)):
        kinds = items[:1] * len(value) if items[-1:] == (Ellipsis,) else items or (Any,) * len(value)
        if len(kinds) == len(value):
            return tuple(convert(value[i], kind, f"{path}[{i}]", known) for i, kind in enumerate(kinds))
        valid = False
    else:
        valid = isinstance(value, origin) and not (origin is int and isinstance(value, bool))
    if not valid:
        raise _wrong_type(value, expected, path)
    if origin is list and items:
        return [convert(item, items[0], f"{path}[{i}]", known) for i, item in enumerate(value)]
    if origin is dict and items:
        keys = [convert(key, items[0], f"a key of {path}", known) for key in value]
        return {key: convert(value[key], items[1], _join(path, key), known) for key in keys}
    return value


def _convert_union(value: Any, expected: Any, path: str, known: Sequence[str] | None) -> Any:
    members = [member for member in get_args(expected) if member is not types.NoneType]
    nullable = len(members) < len(get_args(expected))
    if nullable and (value is None or (isinstance(value, str) and value.lower() == "none")):
        return None
    # The value's own type goes first: 3 stays an int in `float | int`.
    members.sort(key=lambda member: type(value) is not (get_origin(member) or member))
    first = get_origin(members[0]) or members[0]
    if type(value) is first or (dataclasses.is_dataclass(first) and isinstance(value, Mapping)):
        return convert(value, members[0], path, known)  # its message is the exact one: which item, which key
    for member in members:
        with contextlib.suppress(ValueError):
            return convert(value, member, path, known)
    raise _wrong_type(value, expected, path)


def _is_number(value: Any) -> bool:
    if isinstance(value, str):  # YAML 1.1 reads 1e-5 (no point) as a string
        return re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", value) is not None
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _wrong_type(value: Any, expected: Any, path: str) -> ValueError:
    hint = ""
    if expected is str and isinstance(value, (bool, int, float)):
        hint = "; put it in quotes"
    shown = without_secrets(value, secret=any(is_secret(part) for part in path.split(".")))
    return ValueError(f"{path}={shown!r}: expected {_type_name(expected)}, got {_type_name(type(value))}{hint}")


def _type_name(expected: Any) -> str:
    origin, items = get_origin(expected), get_args(expected)
    if expected is types.NoneType:
        return "null"
    if origin in (Union, types.UnionType):
        return " | ".join(_type_name(item) for item in items)
    if origin is Literal:
        return " | ".join(repr(item) for item in items)
    if isinstance(origin, type):
        inside = ", ".join("..." if item is Ellipsis else _type_name(item) for item in items)
        return f"{origin.__name__}[{inside}]"
    return expected.__name__ if isinstance(expected, type) else str(expected).removeprefix("typing.")


def nearest(key: str, keys: Iterable[str]) -> str | None:
    """The entry of ``keys`` that ``key`` is most likely a misspelling of, or None."""
    by_lower = {candidate.lower(): candidate for candidate in keys}
    close = difflib.get_close_matches(key.lower(), by_lower, n=1, cutoff=0.7)
    return by_lower[close[0]] if close else None


def _unknown_key(key: Any, path: str, own: Iterable[str], known: Sequence[str]) -> str:
    """The message for a key that is none of ``own``, the keys at ``path``."""
    places = {place.rpartition(".")[2]: place for place in reversed(known)}  # last part -> first place
    here, anywhere = nearest(str(key), own), nearest(str(key), places)
    if "." in str(key) and key in known:
        fix = "in a YAML file, write section and key on two lines"
    elif key in places:
        fix = f"did you mean {places[key]}?"
    elif here is not None:
        fix = f"did you mean {_join(path, here)}?"
    else:
        fix = f"did you mean {places[anywhere]}?" if anywhere else "--help lists the keys"
    return f"unknown key {_join(path, key)}: {fix}"


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)


# --- YAML files and overrides ---


def load(cls: type, config_file: str | None, overrides: Sequence[str], choose: Choose | None = None) -> Any:
    """An instance of ``cls`` from its defaults, then the YAML file, then ``section.key=value`` overrides.

    ``choose(raw)`` gets the merged plain values (keys may be missing) and returns the dataclasses of those
    fields of ``cls`` whose type depends on values: the class of ``args`` depends on ``algorithm``.
    """
    raw = read_settings(config_file, overrides)
    return build(cls, raw, sections=choose(raw) if choose else None)


def read_settings(config_file: str | None, overrides: Sequence[str]) -> dict[str, Any]:
    """The YAML file with ``section.key=value`` overrides merged in, as a plain dict."""
    config = OmegaConf.create({}) if config_file is None else _read_yaml(config_file)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not all(part.strip() for part in key.split(".")):
            raise ValueError(f"override {override!r}: write key=value or section.key=value")
        try:
            parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False)
            OmegaConf.update(config, key.strip(), typing.cast(dict, parsed)["value"], merge=True)
        except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
            raise ValueError(f"override {override!r}: {_one_line(error)}") from error
    try:
        return typing.cast(dict, OmegaConf.to_container(config, resolve=True, throw_on_missing=True))
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key}: {_one_line(error)}") from error


def _read_yaml(config_file: str) -> Any:
    path = Path(config_file).expanduser()
    if not path.is_file():
        raise ValueError(f"config {config_file}: no such file (working directory: {Path.cwd()})")
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(root, (yaml.MappingNode, types.NoneType)):
            raise ValueError("must hold `key: value` lines, not a list or a single value")
        return OmegaConf.create(text) if root else OmegaConf.create({})  # refuses duplicate keys
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ValueError(f"config {config_file}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{error.problem} (line {mark.line + 1}, column {mark.column + 1})"
    return str(error).partition("\n")[0]


# --- the command line ---


@dataclasses.dataclass
class CommandLine:
    """The settings; whether only to check them; what to continue from (``auto``, a checkpoint, or None)."""

    config: Any
    dry_run: bool
    resume: str | None


def parse_command_line(
    cls: type, argv: Sequence[str] | None, description: str, choose: Choose | None = None
) -> CommandLine:
    """Read ``[--config FILE] [key=value ...] [--dry-run] [--resume WHERE]``; ``argv`` None: of this process.

    A user's mistake is printed as one line, without traceback, and ends the program with exit code 2.
    """
    with exit_on_value_error():
        parser = argparse.ArgumentParser(
            usage="%(prog)s [--config FILE] [key=value ...] [--dry-run] [--resume auto|CHECKPOINT]",
            description=description,
            epilog=describe(cls, choose({}) if choose else None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        parser.add_argument("--config", metavar="FILE", help="YAML file of settings")
        parser.add_argument("--dry-run", action="store_true", help="check the settings, then stop")
        parser.add_argument("--resume", metavar="WHERE", help="auto (the newest checkpoint) or a checkpoint")
        known, overrides = parser.parse_known_args(argv)
        for word in overrides:
            if word.startswith("-"):
                raise ValueError(f"unknown option {word!r}: settings are written key=value, without dashes")
        return CommandLine(load(cls, known.config, overrides, choose), known.dry_run, known.resume)


@contextlib.contextmanager
def exit_on_value_error() -> Iterator[None]:
    """Print a ValueError as one line, exit with code 2. For set-up only: in training it would hide faults."""
    try:
        yield
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


@dataclasses.dataclass
class _Key:
    path: str
    type: Any
    default: Any
    help: str
    section: Any  # the dataclass of its own keys, or None


def _keys(cls: type, sections: Mapping[str, type], path: str = "") -> list[_Key]:
    """Every key of ``cls``, those of a section right after it."""
    hints = {**typing.get_type_hints(cls), **sections}
    keys = []
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        expected, place = hints[field.name], _join(path, field.name)
        section = next((kind for kind in (expected, *get_args(expected)) if dataclasses.is_dataclass(kind)), None)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        keys.append(_Key(place, expected, default, field.metadata.get("help", ""), section))
        if section is not None:
            keys.extend(_keys(typing.cast(type, section), {}, place))
    return keys


def describe(cls: type, sections: Mapping[str, type] | None = None, width: int = 100) -> str:
    """Every key with its default, help and type, in lines of ``width`` columns."""
    lines = ["settings (key=default, meaning, type):"]
    for key in _keys(cls, sections or {}):
        if key.section is not None:
            lines += ["", f"{key.path} ({key.section.__name__}): {key.help}"]
            continue
        head = f"  {key.path}={_default_text(key.default)}"
        if len(head) > 42:
            lines.append(head)
            head = ""
        text = f"{key.help} ({_type_name(key.type)})"
        lines += textwrap.wrap(text, width, initial_indent=f"{head:<44}", subsequent_indent=" " * 44)
    return "\n".join(lines)


def _default_text(default: Any) -> str:
    if default is dataclasses.MISSING:
        return "(required)"
    if isinstance(default, str):
        return default or "''"
    return yaml.safe_dump(without_secrets(default), default_flow_style=True, width=1000).partition("\n")[0]


# --- back to plain values, without secrets ---

_TEXT_TOKEN = re.compile(r"(^|_)(pad|eos|bos|unk|sep|cls|mask|image|per)_token$")
_SECRET = re.compile(
    r"(api_?key|(access|secret|private)_key|secret|passw(or)?d|credential|authorization|header|cookie)s?$|token$"
)


def is_secret(key: Any) -> bool:
    """Whether a key names a secret: ``api_key``, ``hf_token``, ``password``, ``headers``, ...

    Not ``max_new_tokens``, ``tokenizer``, ``pad_token`` or ``api_key_env`` (a variable's name, no value).
    """
    name = re.sub(r"(?<=[a-z])(?=[A-Z])|[-\s]", "_", str(key)).lower()
    if _TEXT_TOKEN.search(name) or name.endswith("key_header"):  # the latter: the name of an HTTP header
        return False
    return _SECRET.search(name) is not None


def to_dict(config: Any) -> dict[str, Any]:
    """A config as a dict of plain values, for logs and files; a secret is replaced by ``***``."""
    return without_secrets({field.name: getattr(config, field.name) for field in dataclasses.fields(config)})


def without_secrets(value: Any, secret: bool = False) -> Any:
    """Plain values; what stands under a secret's key, and a password in an address, is replaced by ``***``."""
    if value is None or isinstance(value, bool):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {key: without_secrets(item, secret or is_secret(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [without_secrets(item, secret) for item in value]
    if secret:
        return "***"
    if isinstance(value, str):
        return without_password(value)
    if isinstance(value, (types.FunctionType, types.MethodType, type)):
        return f"{value.__module__}:{value.__qualname__}"
    return value if isinstance(value, (int, float)) else str(value)


def without_password(text: str) -> str:
    """An address without user:password@."""
    return re.sub(r"://[^/@\s]+@", "://***@", text)


def save_yaml(config: Any, path: str | Path) -> None:
    """Write ``to_dict(config)`` so that ``--config`` reads the same settings back, secrets excepted."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(OmegaConf.to_yaml(OmegaConf.create(escape(to_dict(config)))), encoding="utf-8")


def escape(value: Any) -> Any:
    """``value`` with every ``${`` of its strings marked as text, not as one of OmegaConf's references."""
    if isinstance(value, dict):
        return {key: escape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escape(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", value)
    return value


# --- the user's own functions ---


def load_object(spec: str, what: str) -> Callable[..., Any]:
    """The callable that ``file.py:name`` or ``package.module:name`` names; ``what`` is the setting's name.

    The file's folder is put at the end of ``sys.path``, so that it can import its neighbours, and the file is
    run once however often it is named. Errors that it raises while it runs pass through.
    """
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise ValueError(f"{what}={spec!r}: write file.py:name or package.module:name")
    try:
        names = vars(_import_file(where) if where.endswith(".py") else importlib.import_module(where))
    except ModuleNotFoundError as error:
        if error.name is None or not f"{where}.".startswith(f"{error.name}."):
            raise  # the module is there, something that it imports is not
        raise ValueError(f"{what}={spec!r}: no module or file {error.name!r} (from {Path.cwd()})") from error
    if name not in names:
        close = nearest(name, [other for other, item in names.items() if callable(item)])
        hint = f"; did you mean {close!r}?" if close else ""
        raise ValueError(f"{what}={spec!r}: {where} has no {name!r}{hint}")
    if not callable(names[name]):
        raise ValueError(f"{what}={spec!r}: is of type {type(names[name]).__name__}, not a function")
    return names[name]


def _import_file(where: str) -> types.ModuleType:
    path = Path(where).expanduser().resolve()
    if not path.is_file():
        raise ModuleNotFoundError(name=where)
    # A name of its own: a user's math.py must not hide Python's.
    name = f"comlrl_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        module_spec = importlib.util.spec_from_file_location(name, path)
        assert module_spec is not None
        assert module_spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(module_spec)  # before it runs: dataclasses look it up
        try:
            module_spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
