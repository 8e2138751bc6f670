"""`python -m comlrl.evaluate`: its table against the trainer's own evaluation, the chat loop, the errors."""

import io
import json
from pathlib import Path

import pytest
import yaml

from comlrl.config import RunConfig, load, load_object
from comlrl.evaluate import load_agents, main, read_run, swap_rows
from comlrl.rollouts import walk

SCRIPT = Path(__file__).parent.parent / "train_magrpo.py"
SETTINGS = [
    "model=tiny",
    "task=pairing",
    "args.num_turns=1",
    "args.num_generations=4",
    "args.max_new_tokens=4",
    "args.max_steps=2",
    "args.agent_learning_rate=0.02",
    "args.eval_interval=0",
    "args.eval_generations=3",
    "args.dtype=float32",
]


def build(root, *overrides):
    """A trainer as the script builds it."""
    changes = [*SETTINGS, f"args.output_dir={root}", *overrides]
    config = load(RunConfig, None, changes, load_object(f"{SCRIPT}:choose_config", "script"))
    return load_object(f"{SCRIPT}:build_trainer", "script")(config, False)


def saved(root, *overrides):
    """The folder of a run whose models were not trained, and its trainer."""
    trainer = build(root, *overrides)
    folder = trainer.open_run().folder
    trainer.save_model(str(folder / "model"))
    return folder, trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Two agents after two steps: (folder, metrics before, metrics after, trainer)."""
    trainer = build(tmp_path_factory.mktemp("runs"))
    before = trainer.evaluate()
    trainer.train()
    folder = trainer.open_run().folder
    trainer.save_model(str(folder / "model"))
    yield folder, before, trainer.evaluate(), trainer
    trainer.close()


def report(folder, *argv):
    main([str(folder), *argv])
    return json.loads((folder / "evaluation.json").read_text())


def expected_row(team, metrics, num_agents, samples, score="reward"):
    """A table's row from the metrics of a one-turn trainer."""
    row = {
        "team": team,
        f"{score} greedy": metrics[f"eval/{score}_mean"],
        f"{score} sampled": metrics[f"eval/sampled/{score}_mean"],
        f"best of {samples}": metrics["eval/sampled/best_of_k"],
    }
    for i in range(num_agents):
        row[f"agent_{i} chars"] = metrics[f"eval/sampled/agent_{i}/turn_1/characters"]
        row[f"agent_{i} truncated"] = metrics[f"eval/sampled/agent_{i}/turn_1/truncated_share"]
    return row


def error(capsys, *argv):
    """The one line that a mistake prints."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in argv])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def chat(folder, typed, monkeypatch, capsys, *argv):
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    capsys.readouterr()
    main([str(folder), "--chat", *argv])
    return capsys.readouterr().out


# --- scores ---


def test_table_agrees_with_the_trainers_own_evaluation(trained, tmp_path, capsys):
    folder, before, after, trainer = trained
    result = report(folder, "--samples", "3")
    table = {row["team"]: row for row in result["table"]}
    assert list(table) == ["untrained", "trained", "agent_0 alone", "agent_1 alone"]
    assert table["untrained"] == expected_row("untrained", before, 2, 3)
    assert table["trained"] == expected_row("trained", after, 2, 3)
    assert table["trained"]["reward sampled"] != table["untrained"]["reward sampled"]
    for key, value in result["metrics"]["trained"].items():
        assert value == pytest.approx(after[f"eval/{key}"], abs=1e-12), key
    # One trained agent put into an untrained team.
    for i in range(2):
        mixed = build(tmp_path)
        mixed.agents[i].model.load_state_dict(trainer.agents[i].model.state_dict())
        name = f"agent_{i} alone"
        assert table[name] == expected_row(name, mixed.evaluate(), 2, 3)
    score = {name: row["reward sampled"] for name, row in table.items()}
    for i, swap in enumerate(result["partner_swap"]):
        alone, without = score[f"agent_{i} alone"], score[f"agent_{1 - i} alone"]
        values = [score["untrained"], alone, without, score["trained"]]
        assert list(swap.values())[1:5] == values
        assert swap["partners matter"] == pytest.approx(values[3] - values[2] - values[1] + values[0])
    out = capsys.readouterr().out
    for text in (
        "partner swap: sampled scores",
        "pairing: 4 of 4 rows",
        "agent_1 alone",
        "reward sampled",
        "best of 3",
        "agent_1 truncated",
    ):
        assert text in " ".join(out.replace("┃", " ").split())


def test_rows_samples_and_shown_answers(trained, capsys):
    folder, _, _, trainer = trained
    result = report(folder, "--rows", "3", "--samples", "0", "--show", "2")
    assert (result["rows"], result["samples"]) == (3, 0)
    assert "reward sampled" not in result["table"][0]
    out = capsys.readouterr().out
    roots, _ = trainer.rollouts.expand(trainer.eval_rows.first(3), trainer.shape, trainer.sampling, (), greedy=True)
    for root in roots[:2]:
        block = out.partition(f"\nrow {root.row_id}\n")[2]
        for agent in range(2):
            assert block.startswith(
                f"agent_{agent} is asked: {root.row['prompt']!r}\nagent_{agent}: {root.responses[0][agent]}\n"
            )
            block = block.partition(f"agent_{agent}: {root.responses[0][agent]}\n")[2]
        assert block.startswith(f"reward: {root.rewards[0]}\n")
    assert "\nrow 2\n" not in out
    answers = [root.completions[1][0].text for root in roots]
    assert result["table"][1]["agent_1 chars"] == pytest.approx(sum(map(len, answers)) / 3)


def test_several_turns_are_scored_by_their_return(tmp_path):
    folder, trainer = saved(tmp_path, "task=two_turn", "args.num_turns=2", "args.discount=0.5")
    row = report(folder, "--samples", "3")["table"][1]
    metrics = trainer.evaluate()
    assert row["return greedy"] == metrics["eval/return_mean"]
    assert row["return sampled"] == metrics["eval/sampled/return_mean"] != metrics["eval/sampled/reward_mean"]
    assert row["best of 3"] == metrics["eval/sampled/best_of_k"]
    lengths = [metrics[f"eval/sampled/agent_1/turn_{turn}/characters"] for turn in (1, 2)]
    assert lengths[0] != lengths[1]
    assert row["agent_1 chars"] == pytest.approx(sum(lengths) / 2)


def test_one_coordinator(tmp_path, monkeypatch, capsys):
    folder, trainer = saved(tmp_path, "algorithm=centralized_magrpo", "num_agents=3")
    result = report(folder, "--samples", "3")
    assert [row["team"] for row in result["table"]] == ["untrained", "trained"]
    assert result["table"][1] == expected_row("trained", trainer.evaluate(), 1, 3)
    lines = chat(folder, "0>\n", monkeypatch, capsys).splitlines()
    assert lines[1:4] == ["agent_0: ", "agent_1: ", "agent_2: "]
    assert lines[4].startswith("the coordinator wrote no agent's section: ")


def test_models_and_rewards_of_the_run(tmp_path, tiny_other):
    (tmp_path / "rewards.py").write_text("def length(first, second):\n    return [len(x) for x in second]\n")
    folder, trainer = saved(
        tmp_path,
        f"models=[tiny,{tiny_other}]",
        "reward=[{use: task, weight: 0.5}, {use: rewards.py:length, weight: 2}]",
        f"save_dir={tmp_path}/kept",
        "args.eval_num_samples=2",
    )
    with pytest.raises(ValueError, match=f"no saved model in {tmp_path}/kept/agent_0"):
        read_run(folder, None, [])
    trainer.save_model(f"{tmp_path}/kept")
    result = report(folder, "--samples", "3")
    assert result["rows"] == 2
    assert result["table"][0] == expected_row("untrained", trainer.evaluate(), 2, 3)
    assert result["table"][1] == result["table"][0] | {"team": "trained"}
    longer = report(folder, "--model-dir", str(folder / "model"), "--samples", "0", "args.max_new_tokens=12")["table"][
        1
    ]
    assert longer["agent_1 chars"] > result["table"][1]["agent_1 chars"]


def test_same_weights_are_loaded_once(trained):
    run = read_run(trained[0], None, [])
    agents = load_agents(run.trained + run.untrained)
    assert [agents.index(agent) for agent in agents] == [0, 1, 2, 2]
    before, after = (agent.model.state_dict()["lm_head.weight"] for agent in (agents[2], agents[0]))
    assert not before.equal(after)
    assert after.equal(trained[3].agents[0].model.state_dict()["lm_head.weight"].cpu())


# --- chat ---


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
def test_chat_answers_each_line_turn_by_turn(mode, tmp_path, monkeypatch, capsys):
    folder, trainer = saved(tmp_path, "task=two_turn", "args.num_turns=2", "args.num_generations=2")
    lines = chat(folder, "2>\n0>\n\n1>\n", monkeypatch, capsys, *(["--sampled"] if mode == "sampled" else []))
    typed = [(0, trainer.eval_rows.data[2]), (1, trainer.eval_rows.data[0])]
    roots, _ = trainer.rollouts.expand(
        typed, read_run(folder, None, []).shape, trainer.sampling, (0, "chat"), greedy=mode == "greedy"
    )
    expected = "One prompt a line; an empty line ends.\n"
    for root in roots:
        for node in walk([root]):
            expected += f"turn {node.turn + 1}\n"
            expected += "".join(f"agent_{i}: {text}\n" for i, text in enumerate(node.responses[0]))
    assert lines == expected
    assert lines.count("turn 2") == 2
    assert not (folder / "evaluation.json").exists()


def test_chat_leaves_out_a_prompt_that_is_too_long(trained, monkeypatch, capsys):
    out = chat(trained[0], "12345\n1234\n", monkeypatch, capsys, "args.max_prompt_length=4")
    lines = out.splitlines()
    assert lines[1] == "left out: this prompt has more than 4 tokens"
    assert out.count("left out") == 1
    assert "agent_1: " in out


def test_chat_refuses_a_task_whose_prompts_need_more(tmp_path, capsys):
    (tmp_path / "sums.py").write_text(
        "from comlrl.tasks import Task\n"
        "def sums(num_agents):\n"
        "    rows = [{'prompt': 'x', 'left': 1}]\n"
        "    ask = [lambda row: f\"{row['left']}+\"] * num_agents\n"
        "    return Task('sums', rows, rows, ask, lambda row, texts: (0.0, {}), 1.0)\n"
    )
    folder, _ = saved(tmp_path, "task=sums.py:sums")
    assert "task sums needs a row's 'left' beside its prompt" in error(capsys, folder, "--chat")


# --- settings and errors ---


def test_config_of_a_run_reads_back(tmp_path):
    overrides = [
        "args.stop_strings=['\\${x}', ' \\n']",
        "args.adam_betas=[0.8, 0.9]",
        "args.unparsable_reward=none",
    ]
    _, trainer = saved(tmp_path, "algorithm=centralized_magrpo", *overrides)
    assert trainer.args.stop_strings[0] == "${x}"
    path = trainer.run.folder / "config.yaml"
    again = load(RunConfig, str(path), [], load_object(f"{SCRIPT}:choose_config", "script"))
    assert again.args == trainer.args
    assert again.task == "pairing"


def test_script_writes_what_evaluate_reads(tmp_path, capsys):
    load_object(f"{SCRIPT}:main", "script")([*SETTINGS, f"args.output_dir={tmp_path}", "args.max_steps=1"])
    result = report(tmp_path / "magrpo", "--samples", "1")
    assert [row["agent_0 truncated"] >= 0 for row in result["table"]] == [True] * 4
    assert f"written: {tmp_path / 'magrpo' / 'evaluation.json'}" in capsys.readouterr().out


def test_mistakes_are_one_line(trained, tmp_path, capsys):
    folder = trained[0]
    assert f"RUN={tmp_path}/none does not exist" in error(capsys, tmp_path / "none")
    assert "is no run's folder, it has no config.yaml" in error(capsys, tmp_path)
    assert "no saved model in nowhere/agent_0: a training script" in error(capsys, folder, "--model-dir", "nowhere")
    assert "task='pairin': unknown task; did you mean 'pairing'?" in error(capsys, folder, "task=pairin")
    assert "model 'gone' cannot be found" in error(capsys, folder, "model=gone")
    assert "args.num_turns=2: task pairing has no transition" in error(capsys, folder, "args.num_turns=2")
    assert "task pairing: no evaluation rows" in error(capsys, folder, "--rows", "0")
    assert "must not be negative" in error(capsys, folder, "--samples", "-1")
    assert "--sampled goes with --chat" in error(capsys, folder, "--sampled")
    assert "algorithm='ppo' must be one of magrpo, " in error(capsys, folder, "algorithm=ppo")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"trainer": "MAGRPOTrainer", "args": {"seed": 1}}))
    assert "algorithm=None must be one of magrpo, " in error(capsys, tmp_path)


def test_partner_swap_of_three_agents(tmp_path):
    folder, _ = saved(tmp_path, "num_agents=3")
    result = report(folder, "--samples", "0", "--rows", "2")
    teams = [row["team"] for row in result["table"]]
    assert teams[2:] == [f"agent_{i} alone" for i in range(3)] + [f"all but agent_{i}" for i in range(3)]
    assert [swap["agent"] for swap in result["partner_swap"]] == ["agent_0", "agent_1", "agent_2"]
    # Nothing was trained, so nothing depends on who is swapped.
    assert all(swap["partners matter"] == 0.0 for swap in result["partner_swap"])
    (made_up,) = [
        swap
        for swap in swap_rows(
            [
                {"team": team, "return greedy": value}
                for team, value in zip([*teams[:2], *teams[2:]], [0.0, 1.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
            ],
            3,
        )
        if swap["agent"] == "agent_1"
    ]
    assert list(made_up.values())[1:5] == [0.0, 0.2, 0.5, 1.0]
    assert made_up["partners matter"] == pytest.approx(0.5 - 0.2)
