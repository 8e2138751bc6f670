import http.server
import io
import json
import math
import os
import pty
import select
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from comlrl.records import create_folder, git_commit, json_line, masked_command, truncate_lines
from comlrl.trackers import check_trackers, offline_reason, wandb_config
from comlrl.tracking import Run, environment_versions, read_metrics


def start(root, name="run", config=None, **options):
    options.setdefault("verbose", False)
    return Run(root, name, config or {"seed": 3}, **options)


def strict_lines(path):
    """Parse JSON lines as a strict reader does: UTF-8 only, no NaN, no lone surrogate."""

    def refuse(constant):
        raise ValueError(constant)

    lines = path.read_bytes().decode("utf-8").split("\n")
    assert lines.pop() == ""
    records = [json.loads(line, parse_constant=refuse) for line in lines]
    json.dumps(records, ensure_ascii=False).encode("utf-8")
    return records


def tensorboard_points(folder, key):
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(event.step, pytest.approx(event.value)) for event in events.Scalars(key)]


# --- the folder ---


def test_folder_holds_config_versions_and_metrics(tmp_path):
    config = {
        "lr": 1e-5,
        "agents": ["a", "b"],
        "text": "é ${x}",
        "limit": math.inf,
        "where": Path("data"),
        "none": None,
    }
    run = start(tmp_path / "runs", "first", config, seed=7)
    run.log({"reward_mean": 0.5, "turn_1/agent_0/loss": 2}, step=1, env_step=8, epoch=0.25)

    # Before close(): a killed process has its lines on disk.
    (line,) = strict_lines(run.folder / "metrics.jsonl")
    assert {key: line[key] for key in ("kind", "step", "env_step", "epoch")} == {
        "kind": "train", "step": 1, "env_step": 8, "epoch": 0.25
    }  # fmt: skip
    assert line["reward_mean"] == 0.5
    assert line["turn_1/agent_0/loss"] == 2
    run.close()

    assert run.folder == tmp_path / "runs" / "first"
    assert yaml.safe_load((run.folder / "config.yaml").read_text()) == {**config, "where": "data"}
    versions = json.loads((run.folder / "versions.json").read_text())
    assert versions["seed"] == 7
    assert versions["torch"] == torch.__version__
    state = json.loads((run.folder / "run.json").read_text())
    assert state["id"] == run.id
    assert len(bytes.fromhex(run.id)) == 16
    assert state["wandb"] is None
    assert run.wandb_state() is None


def test_taken_names_get_a_suffix_and_are_never_shared(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: create_folder(tmp_path, "run"), range(24)))
    assert {folder.name for folder in folders} == {"run", *(f"run-{i}" for i in range(2, 25))}


def test_two_runs_of_one_name_do_not_touch_each_other(tmp_path):
    first, second = start(tmp_path, "same"), start(tmp_path, "same")
    first.log({"reward_mean": 1.0}, step=1, env_step=1, epoch=0)
    second.log({"reward_mean": 2.0}, step=1, env_step=1, epoch=0)
    first.log({"reward_mean": 3.0}, step=2, env_step=2, epoch=0)
    assert first.id != second.id
    assert [line["reward_mean"] for line in read_metrics(first.folder)] == [1.0, 3.0]
    assert [line["reward_mean"] for line in read_metrics(second.folder)] == [2.0]


@pytest.mark.parametrize("name", ["", "..", "a/b", "a/"])
def test_name_must_be_a_folder_name(tmp_path, name):
    with pytest.raises(ValueError, match="run name"):
        start(tmp_path, name)


def test_other_processes_touch_no_file(tmp_path, capsys):
    run = start(tmp_path / "runs", is_main=False, verbose=True)
    run.log({"reward_mean": 1.0}, step=1, env_step=1, epoch=0)
    run.log_completions([{"step": 1}])
    run.note("hello")
    run.summary_table([{"a": 1}], "title")
    assert run.wandb_state() is None
    run.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")
    with pytest.raises(AssertionError, match="main process"):
        _ = run.folder
    run.follow((tmp_path / "runs" / "run", "abc"))
    assert (run.folder.name, run.id) == ("run", "abc")


def test_logging_after_close_is_refused(tmp_path):
    run = start(tmp_path)
    run.close()
    run.close()
    with pytest.raises(RuntimeError, match="closed"):
        run.log({"reward_mean": 1.0}, step=1, env_step=1, epoch=0)


# --- values ---


def test_scalars_of_all_kinds_and_nonfinite_values(tmp_path):
    run = start(tmp_path)
    metrics = {
        "bf16": torch.tensor(0.5, dtype=torch.bfloat16, requires_grad=True),
        "one": torch.tensor([3]),
        "np": np.float32(0.25),
        "array": np.array([[2.0]]),
        "flag": True,
        "undefined": None,
        "loss": float("nan"),
        "norm": torch.tensor(-math.inf),
    }
    run.log(metrics, step=1, env_step=1, epoch=0)
    (line,) = strict_lines(run.folder / "metrics.jsonl")
    assert [line[key] for key in metrics] == [0.5, 3, 0.25, 2.0, 1, None, None, None]
    assert line["nonfinite"] == ["loss", "norm"]


@pytest.mark.parametrize("value", ["0.5", torch.ones(2), [1.0], 1j])
def test_metric_that_is_no_number_is_named(tmp_path, value):
    with pytest.raises(ValueError, match="'turn_1/reward'"):
        start(tmp_path).log({"turn_1/reward": value}, step=1, env_step=1, epoch=0)


def test_reserved_names_and_unknown_kinds_are_refused(tmp_path):
    run = start(tmp_path)
    with pytest.raises(ValueError, match="'env_step'"):
        run.log({"env_step": 1.0}, step=1, env_step=1, epoch=0)
    with pytest.raises(ValueError, match="kind='valid'"):
        run.log({}, step=1, env_step=1, epoch=0, kind="valid")
    assert read_metrics(run.folder) == []


def test_evaluation_keys_start_with_eval(tmp_path):
    run = start(tmp_path)
    run.log({"reward_mean": 1.0, "eval/sampled/reward_mean": 0.5}, step=0, env_step=0, epoch=0, kind="eval")
    (line,) = read_metrics(run.folder)
    assert line["kind"] == "eval"
    assert line["eval/reward_mean"] == 1.0
    assert line["eval/sampled/reward_mean"] == 0.5


def test_completions_of_a_byte_level_model_are_valid_json_lines(tmp_path):
    texts = ["\udcff\ud800 lone", "nul\x00\x1b[31m", "line\nbreak\r\u2028\x85", "日本 🎉 \ufffd", '"\\']
    run = start(tmp_path)
    records = [
        {"step": 1, "agent": i, "completion": text, "reward": torch.tensor(0.5), "ids": np.array([1, 2])}
        for i, text in enumerate(texts)
    ]
    run.log_completions(iter(records))
    run.log_completions([{"step": 2, "reward": math.nan, "parts": {"format": [1.0, math.inf]}, "\udcff": 1}])
    *lines, last = strict_lines(run.folder / "completions.jsonl")
    assert [line["completion"] for line in lines] == ["\\udcff\\ud800 lone", *texts[1:]]
    assert lines[0]["reward"] == 0.5
    assert lines[0]["ids"] == [1, 2]
    assert last["reward"] is None
    assert last["parts"] == {"format": [1.0, None]}
    assert last["nonfinite"] == ["reward", "parts.format[1]"]


# --- trackers ---


def test_trackers_get_means_since_their_last_log_and_all_keys(tmp_path):
    run = start(tmp_path, trackers=["tensorboard"], logging_steps=4)
    run.log({"reward_mean": 9.0}, step=0, env_step=0, epoch=0, kind="eval")
    for step in range(1, 7):  # two environment steps each; turn 2 is reached in even steps only
        turn_2 = {"turn_2/agent_1/reward": float(step)} if step % 2 == 0 else {"turn_2/agent_1/reward": None}
        turn_1 = {"turn_1/agent_0/reward": torch.tensor(float(step))}
        run.log(turn_1 | turn_2, step=step, env_step=2 * step, epoch=0.1 * step)
    run.log({"reward_mean": 7.0}, step=6, env_step=12, epoch=0.6, kind="eval")
    run.close()

    assert tensorboard_points(run.folder, "turn_1/agent_0/reward") == [
        (2, 1.0),
        (6, 2.5),
        (10, 4.5),
        (12, 6.0),
    ]
    assert tensorboard_points(run.folder, "turn_2/agent_1/reward") == [(6, 2.0), (10, 4.0), (12, 6.0)]
    assert tensorboard_points(run.folder, "eval/reward_mean") == [(0, 9.0), (12, 7.0)]
    assert tensorboard_points(run.folder, "step") == [(0, 0), (2, 1), (6, 3), (10, 5), (12, 6), (12, 6)]
    assert len(read_metrics(run.folder)) == 8  # the file has every step


def test_trackers_see_a_nan_and_an_axis_that_never_goes_back(tmp_path):
    run = start(tmp_path, trackers=["tensorboard"])
    run.log({"reward_mean": 1.0}, step=3, env_step=30, epoch=1, kind="eval")
    run.log({"reward_mean": math.nan}, step=3, env_step=24, epoch=1)
    run.close()
    ((step, value),) = tensorboard_points(run.folder, "reward_mean")
    assert step == 30
    assert math.isnan(value.expected)


def test_a_tracker_that_is_missing_is_named_before_anything_starts(tmp_path):
    installed = [str(kind) for kind in get_available_trackers()]
    missing = [name for name in LoggerType.list() if name not in ("all", *installed)]
    if not missing:
        pytest.skip("every tracker is installed here")
    with pytest.raises(ValueError, match=f"'{missing[0]}' is not installed"):
        start(tmp_path / "runs", trackers=["tensorboard", missing[0]])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("trackers", "wandb", "message"),
    [
        (["tensorbord"], None, "'tensorbord' is unknown"),
        ("tensorboard", None, "must be a list"),
        ([], {"projekt": "p"}, "wandb.projekt is unknown"),
        ([], {"mode": "of"}, "wandb.mode='of'"),
        ([], {"tags": "one"}, "wandb.tags='one'"),
        ([], {"config_sections": "x"}, "wandb.config_sections='x'"),
    ],
)
def test_wrong_tracker_settings_are_named(trackers, wandb, message):
    with pytest.raises(ValueError, match=message):
        check_trackers(trackers, wandb)


# --- resume ---


def test_resume_drops_what_came_after_the_checkpoint(tmp_path):
    first = start(tmp_path, "run", {"num_train_epochs": 2})
    for step in range(1, 5):
        first.log({"reward_mean": float(step)}, step=step, env_step=10 * step, epoch=0)
        first.log_completions([{"step": step, "completion": "é"}, {"note": "of no step"}])
    for name in ("metrics", "completions"):  # killed in the middle of a line, and of a character
        with (first.folder / f"{name}.jsonl").open("ab") as file:
            file.write('{"kind": "train", "step": 5, "completion": "é'.encode()[:-1])

    second = start(tmp_path, "other", {"num_train_epochs": 4}, resume_folder=first.folder, resume_step=2)
    assert second.folder == first.folder
    assert second.id == first.id
    second.log({"reward_mean": 33.0}, step=3, env_step=30, epoch=0)
    second.close()

    rewards = [(line["step"], line["reward_mean"]) for line in strict_lines(first.folder / "metrics.jsonl")]
    assert rewards == [(1, 1.0), (2, 2.0), (3, 33.0)]
    completions = strict_lines(first.folder / "completions.jsonl")
    assert [line["step"] for line in completions if "step" in line] == [1, 2]
    assert len([line for line in completions if "note" in line]) == 4
    assert yaml.safe_load((first.folder / "config.yaml").read_text()) == {"num_train_epochs": 4}
    assert yaml.safe_load((first.folder / "config.1.yaml").read_text()) == {"num_train_epochs": 2}
    assert not (tmp_path / "other").exists()
    assert "dropped 3 metrics lines and 3 completions" in (first.folder / "log.txt").read_text()


def test_resume_without_a_step_only_repairs_the_last_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = json_line({"step": 1}) + json_line({"step": 2})
    path.write_text(whole + '{"step": 3, "re')
    assert truncate_lines(path, None) == 1
    assert path.read_text() == whole
    path.write_text(whole[:-1])  # only the line break was lost
    assert truncate_lines(path, None) == 0
    assert path.read_text() == whole


def test_resumed_tensorboard_curve_hides_the_lost_steps(tmp_path):
    first = start(tmp_path, trackers=["tensorboard"])
    for step in (1, 2, 3):
        first.log({"reward_mean": float(step)}, step=step, env_step=10 * step, epoch=0)
    second = start(tmp_path, trackers=["tensorboard"], resume_folder=first.folder, resume_step=2)
    for step in (3, 4):
        second.log({"reward_mean": 10.0 * step}, step=step, env_step=10 * step, epoch=0)
    second.close()
    assert tensorboard_points(first.folder, "reward_mean") == [(10, 1.0), (20, 2.0), (30, 30.0), (40, 40.0)]


def test_resume_folder_must_be_a_run(tmp_path):
    with pytest.raises(ValueError, match=r"no run\.json"):
        start(tmp_path, resume_folder=tmp_path / "nothing", resume_step=1)


# --- W&B ---


@pytest.fixture
def no_wandb_account(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "no-netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    wandb.teardown()  # what an earlier test of this process made it remember


def test_wandb_without_an_account_is_offline_resumable_and_not_closed_by_us(tmp_path, no_wandb_account, capsys):
    import wandb

    settings = {
        "project": "teams",
        "run_name": "baseline",
        "tags": ["a", "b"],
        "dir": str(tmp_path / "new" / "dir"),
        "config_sections": {"dataset": {"name": "count"}, "output": {"verbose": True}},
    }
    first = Run(tmp_path / "runs", "run", {"lr": 0.1}, wandb=settings, logging_steps=2)
    assert first.verbose
    assert capsys.readouterr().out.count("the W&B run is offline, since no API key") == 1
    assert wandb.run is not None
    assert (wandb.run.name, wandb.run.project, wandb.run.tags) == ("baseline", "teams", ("a", "b"))
    assert wandb.run.config["lr"] == 0.1
    assert wandb.run.config["dataset_name"] == "count"
    state = first.wandb_state()
    assert state == {"id": wandb.run.id, "project": "teams", "entity": None}
    assert json.loads((first.folder / "run.json").read_text())["wandb"] == state
    assert list((tmp_path / "new" / "dir" / "wandb").glob(f"offline-run-*{state['id']}"))

    for step in (1, 2, 3):
        first.log({"reward_mean": float(step)}, step=step, env_step=step, epoch=0)
    first.log({"reward_mean": 1.0}, step=3, env_step=4, epoch=0, kind="eval")  # makes W&B keep the row before
    assert wandb.run.summary["reward_mean"] == 2.5

    # A second run in the process has a W&B run of its own, and goes on with that of the killed one.
    second = start(tmp_path / "runs", wandb={"tags": ["c"]}, verbose=False)
    assert second.wandb_state()["id"] != state["id"]
    assert wandb.run.id == state["id"]
    second.close()

    wandb.finish()
    for step in (4, 5, 6, 7):
        first.log({"reward_mean": 4.0}, step=step, env_step=step, epoch=0)
    first.close()
    assert (first.folder / "log.txt").read_text().count("finished elsewhere") == 1
    assert len(read_metrics(first.folder)) == 8

    third = start(tmp_path, wandb={"project": "teams"}, resume_folder=first.folder, resume_step=3)
    assert third.wandb_state() == state
    third.close()


def test_wandb_is_online_only_with_a_key_and_a_server(tmp_path, no_wandb_account, monkeypatch):
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    assert "no API key" in offline_reason(url, None)
    assert offline_reason(url, "key") is None
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login user password key\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    assert offline_reason(url, None) is None
    monkeypatch.delenv("NETRC")
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert offline_reason(url, None) is None
    server.shutdown()
    server.server_close()
    thread.join()
    assert "cannot be reached" in offline_reason(url, None)


def test_wandb_config_has_sections_without_secrets():
    sections = {"dataset": {"name": "n", "type": "t", "hf_token": "hf_1"}, "list": [{"api_key": "sk-1"}]}
    shown = wandb_config({"lr": 1}, {"config_sections": sections, "output_dir": Path("out")})
    assert shown == {
        "lr": 1,
        "dataset": {"name": "n", "type": "t", "hf_token": "***"},
        "list": [{"api_key": "***"}],
        "dataset_name": "n",
        "dataset_type": "t",
        "output_dir": "out",
    }


# --- console ---


def test_progress_in_a_plain_log_is_a_few_lines(tmp_path, capsys):
    run = start(tmp_path, verbose=True, total_steps=300)
    for step in range(1, 301):
        run.log({"reward_mean": step / 300}, step=step, env_step=step, epoch=0)
    run.close()
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert len(lines) <= 4
    assert lines[0].startswith("step 1/300 [")
    assert lines[-1].startswith("step 300/300 [")
    assert lines[-1].endswith("reward=1]")
    assert "\r" not in out + err


def test_progress_of_unknown_length_shows_the_last_step(tmp_path, capsys):
    run = start(tmp_path, verbose=True)
    for step in range(1, 6):
        run.log({"loss": 1.0}, step=step, env_step=step, epoch=0)
    run.close()
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["1/?", "5/?"]


def test_progress_in_a_terminal_is_a_bar_that_notes_do_not_break(tmp_path, monkeypatch, capsys):
    terminal, stderr = pty.openpty()
    with os.fdopen(stderr, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        run = start(tmp_path, verbose=True, total_steps=4)
        run.log({"reward_mean": 0.25}, step=1, env_step=1, epoch=0)
        run.note("sample 3 failed: \udcff")
        run.log({"reward_mean": 0.75}, step=4, env_step=4, epoch=0)
        run.close()
        drawn = b""
        while select.select([terminal], [], [], 0.5)[0]:  # a terminal hands out what it has in several pieces
            drawn += os.read(terminal, 65536)
        drawn = drawn.decode()
    os.close(terminal)
    assert "4/4" in drawn
    assert "reward=0.75" in drawn
    assert "sample" not in drawn
    assert capsys.readouterr().out == "sample 3 failed: \\udcff\n"
    assert "sample 3 failed: \\udcff" in (run.folder / "log.txt").read_text()


def test_notes_are_printed_on_a_console_that_knows_ascii_only(tmp_path, monkeypatch):
    console = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", console)
    run = start(tmp_path, verbose=True)
    run.note("reward é")
    run.summary_table([{"agent": "日"}], "evaluation")
    printed = console.buffer.getvalue()
    assert printed.startswith(b"reward \\xe9\n")
    assert b"\\u65e5" in printed


def test_verbose_can_be_set_later(tmp_path, capsys):
    run = start(tmp_path, verbose=False, total_steps=9)
    run.log({"reward_mean": 1.0}, step=1, env_step=1, epoch=0)
    run.note("quiet")
    run.log({"reward_mean": 1.0}, step=1, env_step=1, epoch=0, kind="eval")
    assert capsys.readouterr() == ("", "")
    run.verbose = True
    run.log({"reward_mean": 1.0}, step=2, env_step=2, epoch=0)
    run.log({"reward_mean": 0.125}, step=2, env_step=2, epoch=0, kind="eval")
    out = capsys.readouterr().out
    assert "step 2/9" in out
    assert "evaluation at step 2: eval/reward_mean 0.125" in out
    run.verbose = False
    run.log({"reward_mean": 1.0}, step=3, env_step=3, epoch=0)
    run.close()
    assert capsys.readouterr() == ("", "")


def test_verbose_comes_from_the_output_section_if_not_given(tmp_path):
    sections = {"config_sections": {"output": {"verbose": False}}, "mode": "disabled"}
    with Run(tmp_path, "run", {}, wandb=sections) as run:
        assert run.verbose is False
        assert run.wandb_state() is None


def test_summary_table_shows_all_columns_and_any_text(tmp_path, capsys):
    run = start(tmp_path, verbose=True)
    rows = [
        {"when": "before", "reward": 0.123456, "note": "[/red] [bold]"},
        {"when": "after", "reward": torch.tensor(1.0), "extra": 3},
    ]
    run.summary_table(rows, "Evaluation [x]")
    out = capsys.readouterr().out
    for text in ("Evaluation [x]", "when", "0.1235", "[/red] [bold]", "after", "1", "extra"):
        assert text in out
    assert out.strip() in (run.folder / "log.txt").read_text()


# --- versions ---


def test_environment_versions_are_those_of_this_machine():
    versions = environment_versions()
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert versions["torch"] == torch.__version__
    assert versions["cpu"].startswith(f"{os.cpu_count()} x ")
    assert len(versions["gpus"]) == torch.cuda.device_count()
    assert versions["command"].startswith(sys.orig_argv[0])
    assert json.loads(json.dumps(versions)) == versions


def test_command_line_is_masked():
    arguments = [
        "train.py",
        "--comparator.api_key=sk-1",
        "hf_token=hf_1",
        "--password",
        "p",
        "--max_new_tokens",
        "8",
        "task_args={api_key: sk-1}",
        "task_args.judge_headers.x=sk-2",
        "url=https://me:pw@host/v1",
    ]
    assert masked_command(arguments) == [
        *(
            "train.py",
            "--comparator.api_key=***",
            "hf_token=***",
            "--password",
            "***",
            "--max_new_tokens",
            "8",
            "task_args=***",
            "task_args.judge_headers.x=***",
            "url=https://***@host/v1",
        )
    ]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_git_commit_of_a_checkout(tmp_path):
    def git(*arguments):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@x", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert git_commit(tmp_path) is None
    git("init")
    assert git_commit(tmp_path) is None
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    head = git("rev-parse", "HEAD")
    assert git_commit(tmp_path) == head
    (tmp_path / "file").write_text("2")
    assert git_commit(tmp_path) == f"{head}+changes"
    (tmp_path / "site-packages").mkdir()
    assert git_commit(tmp_path / "site-packages") is None
