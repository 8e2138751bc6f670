"""Each process does its share and no more, and takes part in everything, however uneven the shares are."""

import json
import shutil
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import ClassVar

import pytest
import torch
from processes import assert_same, lines, train

from comlrl.batches import MicroBatch, Sample
from comlrl.summaries import TokenMeter

ZERO_3 = "args.deepspeed_config=ds_configs/zero3.json"
SHORT = ["args.max_new_tokens=64", "args.max_steps=2", "args.eval_interval=2", "args.eval_num_samples=1"]
TWO_ROWS = ["args.rollout_buffer_size=2", "args.num_generations=2", "args.micro_batch_tokens=70"]
TWO_ROWS += ["args.reference_kl_enabled=true", "args.epochs_per_rollout=2"]
RUNS = {
    # Of the samples, one process has those of one token, the other those of 64, in more micro-batches.
    "uneven lengths": (TWO_ROWS, [ZERO_3]),
    # One sample a step: a process has nothing to generate and to learn, the other nothing to score.
    "one sample": (["algorithm=mareinforce", "args.rollout_buffer_size=1", "args.num_generations=1"], [ZERO_3]),
    "a process without models": (TWO_ROWS, ["args.placement={agents: [[0], [0]]}"]),
}


class Run:
    """A run in one process and the same in two; `calls[rank]`: what each of the two generated and scored."""

    alone_runs: ClassVar[dict[tuple[str, ...], Path]] = {}  # by settings

    def __init__(self, name, folder):
        task, divided = RUNS[name]
        if tuple(task) not in self.alone_runs:
            self.alone_runs[tuple(task)] = self.start(1, folder / "alone", task)
        self.alone, self.run = self.alone_runs[tuple(task)], self.start(2, folder / "divided", [*task, *divided])
        files = [folder / "divided" / f"calls-{rank}.jsonl" for rank in range(2)]
        self.calls = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]

    @staticmethod
    def start(processes, folder, settings):
        folder.mkdir()
        shutil.copy(Path(__file__).parent / "divided_task.py", folder)
        return train(processes, folder, f"task={folder}/divided_task.py:divided", *SHORT, *settings)

    def generated(self, rank, agent):
        return sum(call["answers"] for call in self.calls[rank] if call.get("agent") == f"agent_{agent}")

    def scored(self, rank):
        return [(call["row"], *call["texts"]) for call in self.calls[rank] if "texts" in call]


@pytest.fixture(scope="module", params=RUNS)
def run(request, tmp_path_factory):
    return request.param, Run(request.param, tmp_path_factory.mktemp("divided"))


@pytest.mark.full
def test_uneven_shares_neither_hang_nor_change_the_result(run):
    assert_same(run[1].alone, run[1].run, agents=2)
    lengths = {record["tokens"] for record in lines(run[1].run, "completions") if record["kind"] == "train"}
    assert min(lengths) == 1
    assert max(lengths) == 64


@pytest.mark.full
def test_every_answer_is_generated_once_and_every_joint_answer_scored_once(run):
    name, run = run
    answers = Counter(record["agent"] for record in lines(run.run, "completions"))
    for agent in range(2):
        assert run.generated(0, agent) + run.generated(1, agent) == answers[agent]
    records = {}  # sample -> its texts, agent 0's first
    for r in lines(run.run, "completions"):
        records.setdefault((r["kind"], r["step"], r["sample"], r["prompt"]), []).append(r["completion"])
    said = Counter((prompt, *texts) for (_, _, _, prompt), texts in records.items())
    assert Counter(run.scored(0) + run.scored(1)) == said
    generated = [[run.generated(rank, agent) for agent in range(2)] for rank in range(2)]
    if name == "uneven lengths":  # a rollout of four answers, and two evaluations of one
        assert generated == [[2, 2], [4, 4]]
        assert [len(run.scored(rank)) for rank in range(2)] == [4, 2]
    elif name == "one sample":
        assert generated == [[0, 0], [4, 4]]
        assert [len(run.scored(rank)) for rank in range(2)] == [4, 0]
    else:
        assert generated == [[6, 6], [0, 0]]
        assert [len(run.scored(rank)) for rank in range(2)] == [4, 2]


@pytest.mark.full
def test_a_metric_is_the_mean_over_the_samples_of_all_processes(run):
    """Each process names the parts of its rows in its own way: `short` or `long`."""
    records = [record for record in lines(run[1].run, "completions") if record["kind"] == "train"]
    seen = set()
    for line in lines(run[1].run, "metrics"):
        here = [record for record in records if record["step"] == line["step"] and record["agent"] == 0]
        if line["kind"] != "train" or not here or "reward_mean" not in line:
            continue
        assert line["reward_mean"] == pytest.approx(fmean(record["reward"] for record in here))
        for part in ("short", "long"):
            values = [record["parts"][part] for record in here if part in record["parts"]]
            key = f"turn_1/parts/{part}"
            assert (key in line) == bool(values)
            if values:
                seen.add(part)
                assert line[key] == pytest.approx(fmean(values))
    assert seen == {"short", "long"}


def test_token_means_weigh_every_token_of_all_processes_alike():
    """Of processes that have different turns, keys and numbers of tokens: the same as of one that has all samples."""
    torch.manual_seed(0)
    parts = [fake_batch([3, 1], turn=0, keys=["entropy", "extra"]), fake_batch([5], turn=1, keys=["entropy"])]
    parts.append(fake_batch([2, 2], turn=0, keys=["entropy"]))
    meters = [TokenMeter(0), TokenMeter(0), TokenMeter(0)]
    for meter, (batch, logged, loss) in zip(meters, parts):
        meter.add(batch, logged, loss)
    total = TokenMeter(0)
    for meter in [TokenMeter(0), *meters]:  # the first one had nothing to do
        total.merge(meter)
    metrics = total.metrics()
    for turn, key in ((0, "entropy"), (0, "extra"), (1, "entropy")):
        values = [
            value
            for batch, logged, _ in parts
            for row, sample in enumerate(batch.samples)
            if sample.turn == turn and key in logged
            for value in logged[key][row, : len(sample.token_ids)].tolist()
        ]
        assert metrics[f"agent_0/turn_{turn + 1}/{key}"] == pytest.approx(fmean(values))
    losses = sum(float(loss[batch.completion_mask.bool()].sum()) for batch, _, loss in (parts[0], parts[2]))
    assert metrics["agent_0/turn_1/loss"] == pytest.approx(losses)
    assert "agent_0/turn_2/extra" not in metrics


def fake_batch(lengths, turn, keys):
    samples = [Sample([1], [2] * n, turn, "", 0.0, 1.0, True, False, torch.zeros(n)) for n in lengths]
    mask = torch.zeros(len(lengths), max(lengths))
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    ids = torch.zeros_like(mask, dtype=torch.long)
    batch = MicroBatch(samples, ids[:, :1], mask[:, :1], ids, mask, torch.arange(len(lengths)))
    logged = {key: torch.rand(mask.shape) for key in [*keys, "sampler_gap"]}
    return batch, logged, torch.rand(mask.shape)
