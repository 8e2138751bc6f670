"""Settings: typing, merging, messages, help, secrets, and loading of the user's own functions."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from comlrl.config import (
    RunConfig,
    build,
    convert,
    describe,
    is_secret,
    load,
    load_object,
    nearest,
    option,
    parse_command_line,
    save_yaml,
    to_dict,
)

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclasses.dataclass
class Optimizer:
    learning_rate: float = option(1e-3, "step size")
    betas: tuple[float, float] = option((0.9, 0.95), "of Adam")


@dataclasses.dataclass
class Trainer:
    num_turns: int | None = option(None, "turns of a rollout")
    mode: Literal["mean", "raw"] = option("mean", "baseline")
    devices: str | list[str] | None = option(None, "of the agents")
    rate: float | list[float] = option(1.0, "one or one an agent")
    shuffle: bool = option(True, "the rows")
    stop: list[str] = option([], "texts")
    api_headers: dict[str, str] = option({}, "sent with each request")
    optimizer: Optimizer = option(Optimizer, "of each agent")

    def __post_init__(self) -> None:
        if self.num_turns is not None and self.num_turns < 1:
            raise ValueError(f"num_turns={self.num_turns}: must be at least 1")


@dataclasses.dataclass
class OtherTrainer:
    beta: float = option(0.1, "of the other algorithm")


@dataclasses.dataclass
class Required:
    path: str
    derived: int = dataclasses.field(init=False, default=0)


def choose(raw: dict[str, Any]) -> dict[str, type]:
    return {"args": OtherTrainer if raw.get("algorithm") == "other" else Trainer}


def run_config(*overrides: str, file: Path | None = None) -> Any:
    return load(RunConfig, None if file is None else str(file), overrides, choose)


def error_of(*overrides: str, file: Path | None = None) -> str:
    with pytest.raises(ValueError, match=r"^[a-z]") as caught:
        run_config(*overrides, file=file)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("value", "expected", "result"),
    [
        (3, float, 3.0),
        ("1e-5", float, 1e-5),
        ("-.5E+2", float, -50.0),
        (3, float | int, 3),
        (None, int | None, None),
        ("none", int | None, None),
        ("None", str | None, None),
        ("none", str, "none"),
        (2, float | list[float], 2.0),
        ([1, 2.5], float | list[float], [1.0, 2.5]),
        ("cuda:0", str | list[str] | None, "cuda:0"),
        (["a", "b"], str | list[str] | None, ["a", "b"]),
        ([0.9, 1], tuple[float, float], (0.9, 1.0)),
        ([1, 2, 3], tuple[int, ...], (1, 2, 3)),
        ({"a": 1}, dict[str, float], {"a": 1.0}),
        (None, dict[str, Any], {}),
        ("raw", Literal["mean", "raw"], "raw"),
        ({"x": [1, "2"]}, Any, {"x": [1, "2"]}),
    ],
)
def test_convert_accepts(value, expected, result):
    converted = convert(value, expected, "key")
    assert converted == result
    assert type(converted) is type(result)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, int),
        (True, float),
        (1, bool),
        ("true", bool),
        (2.0, int),
        (2.0, int | None),
        ("2", int),
        ("nan", float),
        ("fast", float),
        (None, int),
        (None, list[str]),
        (3, str),
        ("a", list[str]),
        ({"a": 1}, list[str]),
        ([1, 2, 3], tuple[float, float]),
        ("x", Literal["mean", "raw"]),
        (True, Literal[1, 2]),
        (3, dict[str, Any]),
    ],
)
def test_convert_refuses(value, expected):
    with pytest.raises(ValueError, match=r"^key=.*: expected .*, got "):
        convert(value, expected, "key")


def test_message_of_a_wrong_type_names_the_item():
    with pytest.raises(ValueError, match=r"^key\[1\]='x': expected float, got str$"):
        convert([1, "x"], float | list[float], "key")
    with pytest.raises(ValueError, match=r"^key\.a='x': expected int"):
        convert({"a": "x"}, dict[str, int], "key")


def test_defaults_are_not_shared():
    one, two = run_config(), run_config()
    one.task_args["x"] = 1
    one.args.optimizer.learning_rate = 7.0
    assert two.task_args == {}
    assert two.args.optimizer == Optimizer()


def test_file_then_overrides(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: tiny\nargs:\n  num_turns: 2\n  rate: 1e-5\n  optimizer:\nreward: [{use: a.py:f, weight: 0.5}]\n"
    )
    config = run_config(
        "args.num_turns=null",
        "args.optimizer.betas=[0.8,0.99]",
        "model_config.dtype=bfloat16",
        "model_config.model_kwargs={a: 1}",
        "reward[0].weight=2",
        "task=my.py:f=g",
        file=file,
    )
    assert (config.model, config.task) == ("tiny", "my.py:f=g")
    assert config.args.num_turns is None
    assert config.args.rate == 1e-5
    assert config.args.optimizer == Optimizer(1e-3, (0.8, 0.99))
    assert config.model_config == {"dtype": "bfloat16", "model_kwargs": {"a": 1}}
    assert config.reward == [{"use": "a.py:f", "weight": 2}]


def test_override_of_an_absent_section_and_references(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_FOLDER", "/data")
    file = tmp_path / "run.yaml"
    file.write_text("wandb:\nsave_dir: ${oc.env:MY_FOLDER}/${model}\n")
    config = run_config("wandb.project=p", "model=tiny", file=file)
    assert config.wandb == {"project": "p"}
    assert config.save_dir == "/data/tiny"
    message = error_of("model=${oc.env:NOT_SET}")
    assert message.startswith("model: ")
    assert "'NOT_SET' not found" in message


def test_the_class_of_a_section_depends_on_values():
    assert run_config().args == Trainer()
    assert run_config("algorithm=other", "args.beta=1").args == OtherTrainer(1.0)
    assert error_of("algorithm=other", "args.num_turns=2") == "unknown key args.num_turns: --help lists the keys"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("args.num_turn=2", "unknown key args.num_turn: did you mean args.num_turns?"),
        ("num_turns=2", "unknown key num_turns: did you mean args.num_turns?"),
        ("num_turn=2", "unknown key num_turn: did you mean args.num_turns?"),
        ("args.model=x", "unknown key args.model: did you mean model?"),
        ("args.optimizer.beta=1", "unknown key args.optimizer.beta: did you mean args.optimizer.betas?"),
        ("arg.num_turns=2", "unknown key arg: did you mean args?"),
        ("zzz=2", "unknown key zzz: --help lists the keys"),
        ("args=3", "args=3: expected Trainer, got int"),
        ("args.num_turns=two", "args.num_turns='two': expected int | null, got str"),
        ("args.num_turns=0", "args: num_turns=0: must be at least 1"),
        ("model=3", "model=3: expected str, got int; put it in quotes"),
        ("num_agents=0", "num_agents=0: must be at least 1"),
        ("models=[a]", "models=['a']: 2 expected for num_agents=2, or null"),
        ("model", "override 'model': write key=value or section.key=value"),
        ("=3", "override '=3': write key=value or section.key=value"),
        ("a..b=3", "override 'a..b=3': write key=value or section.key=value"),
        ("args.stop=[a", "override 'args.stop=[a': did not find expected ',' or ']' (line 2, column 1)"),
    ],
)
def test_messages_of_overrides(override, message):
    assert error_of(override) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "must hold `key: value` lines"),
        ("hello\n", "must hold `key: value` lines"),
        ("model: a\nmodel: b\n", "found duplicate key model (line 2, column 1)"),
        ("args:\n  shuffle: true\n  shuffle: false\n", "found duplicate key shuffle (line 3, column 3)"),
        ("model: [a\n", "(line 2, column 1)"),
        ("model: ${\n", "no viable alternative"),
        ("args.num_turns: 2\n", "in a YAML file, write section and key on two lines"),
        ("on: 2\n", "unknown key True"),
    ],
)
def test_messages_of_files(tmp_path, text, message):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    assert message in error_of(file=file)


def test_empty_and_missing_files(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("# nothing\n")
    assert run_config(file=file) == run_config()
    assert "no such file" in error_of(file=tmp_path / "none.yaml")
    assert "no such file" in error_of(file=tmp_path)


def test_models_of_a_coordinator():
    assert run_config("algorithm=centralized_magrpo", "models=[a]", "num_agents=3").models == ["a"]
    assert run_config("models=[a,b]", "tokenizers=[c,d]").tokenizers == ["c", "d"]


def test_required_fields_and_paths_of_build():
    assert build(Required, {"path": "x"}) == Required("x")
    with pytest.raises(ValueError, match=r"^data\.path: a value is required \(str\)$"):
        build(Required, {}, "data")
    with pytest.raises(ValueError, match=r"^unknown key data\.derived"):
        build(Required, {"path": "x", "derived": 1}, "data")
    with pytest.raises(ValueError, match=r"^unknown key data\.pth: did you mean data\.path\?$"):
        build(Required, {"pth": "x"}, "data")


def test_nearest():
    assert nearest("Num_Turn", ["num_turns", "num_agents"]) == "num_turns"
    assert nearest("zzz", ["num_turns"]) is None


# --- the command line ---


def test_command_line(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: tiny\n")
    argv = ["args.num_turns=2", "--config", str(file), "--dry-run", "args.rate=-0.5", "--resume", "auto"]
    command = parse_command_line(RunConfig, argv, "Train.", choose)
    assert (command.dry_run, command.resume) == (True, "auto")
    assert (command.config.model, command.config.args.num_turns, command.config.args.rate) == (
        "tiny",
        2,
        -0.5,
    )
    command = parse_command_line(RunConfig, [], "Train.", choose)
    assert (command.dry_run, command.resume, command.config) == (False, None, run_config())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["num_turns=2"], "error: unknown key num_turns: did you mean args.num_turns?\n"),
        (
            ["--args.num_turns=2"],
            "error: unknown option '--args.num_turns=2': settings are written key=value",
        ),
        (["--dry"], "error: unknown option '--dry'"),
        (["--config", "none.yaml"], "error: config none.yaml: no such file"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_command_line(RunConfig, argv, "Train.", choose)
    printed = capsys.readouterr()
    assert caught.value.code == 2
    assert printed.err.startswith(message)
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_no_traceback_in_a_script():
    script = "from comlrl.config import *; parse_command_line(RunConfig, None, 'Train.')"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(
        [sys.executable, "-c", script, "modle=x"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr == "error: unknown key modle: did you mean model?\n"


def test_help_lists_every_key(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as caught:
        parse_command_line(RunConfig, ["--help"], "Train a team.\n\n  an example", choose)
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert "Train a team.\n\n  an example\n" in text
    for name in [field.name for field in dataclasses.fields(RunConfig) if field.name != "args"]:
        assert f"  {name}=" in text
    for name in [field.name for field in dataclasses.fields(Trainer) if field.name != "optimizer"]:
        assert f"  args.{name}=" in text
    assert "args.optimizer (Optimizer): of each agent\n" in text
    assert max(len(line) for line in text.splitlines()) <= 100
    line = next(line for line in text.splitlines() if "args.num_turns" in line)
    assert " ".join(line.split()) == "args.num_turns=null turns of a rollout (int | null)"


def test_describe_marks_required_keys_and_long_defaults():
    assert "  path=(required)" in describe(Required)
    assert "derived" not in describe(Required)
    assert "args.optimizer.betas=[0.9, 0.95]" in describe(RunConfig, {"args": Trainer})


# --- secrets and files ---


@pytest.mark.parametrize(
    "key",
    [
        "api_key",
        "comparator_api_key",
        "apiKey",
        "OPENAI_API_KEY",
        "api_headers",
        "headers",
        "password",
        "db-passwd",
        "hf_token",
        "token",
        "access_token",
        "client_secret",
        "credentials",
        "Authorization",
        "aws_secret_access_key",
    ],
)
def test_secret_keys(key):
    assert is_secret(key)


@pytest.mark.parametrize(
    "key",
    [
        "max_new_tokens",
        "tokenizer",
        "tokenizers",
        "special_tokens",
        "pad_token",
        "eos_token",
        "token_mean",
        "api_key_env",
        "key",
        "comparator_api_key_header",
        "comparator_api_key_prefix",
        "loss_per_token",
        "keyword",
        "secretary",
    ],
)
def test_keys_that_are_no_secrets(key):
    assert not is_secret(key)


def test_no_secret_is_shown_or_saved(tmp_path):
    config = run_config(
        "wandb={project: p, api_key: SECRET1, nested: {password: 5511}}",
        "args.api_headers.x-key=SECRET2",
        "model=https://user:SECRET3@host/model",
        "model_config.special_tokens.pad_token=<pad>",
        "model_config.model_kwargs.token=SECRET4",
    )
    plain = to_dict(config)
    assert plain["wandb"] == {"project": "p", "api_key": "***", "nested": {"password": "***"}}
    assert plain["args"]["api_headers"] == {"x-key": "***"}
    assert plain["model_config"]["special_tokens"] == {"pad_token": "<pad>"}
    save_yaml(config, tmp_path / "new" / "config.yaml")
    text = (tmp_path / "new" / "config.yaml").read_text()
    assert "SECRET" not in text
    assert "5511" not in text
    assert config.wandb["api_key"] == "SECRET1"  # the config itself keeps it
    assert "SECRET" not in error_of("args.api_headers=SECRET")
    with pytest.raises(ValueError, match=r"^headers\.x='\*\*\*': expected int, got str$"):
        convert({"x": "SECRET"}, dict[str, int], "headers")


def test_saved_settings_are_read_back(tmp_path):
    config = run_config(
        "save_dir='1e-5'",
        "task_args={pattern: 'cost \\${x} on', empty: null, number: 1e-05, date: '2024-01-01'}",
        "task_args.deep=[[1], {a: b}]",
        "args.optimizer.betas=[0.5,0.75]",
        "args.stop=['\\${', \"a\\nb\"]",
    )
    assert config.task_args["pattern"] == "cost ${x} on"
    save_yaml(config, tmp_path / "config.yaml")
    assert run_config(file=tmp_path / "config.yaml") == config


def test_to_dict_holds_plain_values_only():
    config = RunConfig(reward=error_of, args=Trainer(devices=["a"]), task_args={"path": Path("x"), "kind": Trainer})
    plain = to_dict(config)
    assert plain["reward"] == f"{__name__}:error_of"
    assert plain["task_args"] == {"path": "x", "kind": f"{__name__}:Trainer"}
    assert plain["args"]["optimizer"] == {"learning_rate": 0.001, "betas": [0.9, 0.95]}
    yaml.safe_dump(plain)  # refuses other objects


# --- the user's own functions ---


def test_load_object_from_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_of_math.py").write_text("FACTOR = 3\n")
    file = tmp_path / "math.py"  # named like a module of Python
    file.write_text(
        "from dataclasses import dataclass\nfrom neighbour_of_math import FACTOR\n"
        "@dataclass\nclass Box:\n    size: int = 1\n"
        "def score(x):\n    return FACTOR * x\nnumber = 3\n"
    )
    score = load_object(f"{file}:score", "reward")
    assert score(2) == 6
    assert load_object(f"{file}:Box", "reward")(2).size == 2
    monkeypatch.chdir(tmp_path)
    assert load_object("math.py:score", "reward") is score  # the file ran once
    import math

    assert math.__name__ == "math"
    assert not hasattr(math, "score")
    for spec, message in [
        ("math.py:scor", "has no 'scor'; did you mean 'score'?"),
        ("math.py:number", "is of type int, not a function"),
        ("maths.py:score", "no module or file 'maths.py'"),
        ("math.py", "write file.py:name or package.module:name"),
        ("math.py:", "write file.py:name or package.module:name"),
        (":score", "write file.py:name or package.module:name"),
    ]:
        with pytest.raises(ValueError, match=r"^reward=") as caught:
            load_object(spec, "reward")
        assert message in str(caught.value)


def test_load_object_from_a_module():
    assert load_object("json:dumps", "reward")([1]) == "[1]"
    assert load_object("comlrl.config:nearest", "reward") is nearest
    with pytest.raises(ValueError, match=r"no module or file 'comlrl\.nothing'"):
        load_object("comlrl.nothing:f", "reward")
    with pytest.raises(ValueError, match="no module or file 'nothing_at_all'"):
        load_object("nothing_at_all.sub:f", "reward")


def test_faults_inside_the_users_file_pass_through(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "broken.py"
    file.write_text("import a_package_that_is_missing\n")
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_missing"):
        load_object(f"{file}:f", "reward")
    file.write_text("def f():\n    return 1\n")  # repaired: the failed import left nothing behind
    assert load_object(f"{file}:f", "reward")() == 1
