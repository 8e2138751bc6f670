"""The task of test_divided_work.py: says who did what, and makes answers end at very different lengths.

A prompt that begins with 0 is answered with one token, every other with as many as are allowed. What each process
generates and scores goes into `calls-<rank>.jsonl` beside this file, of which the tests make a copy.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

from comlrl import logprobs, rollouts
from comlrl.tasks import matrix_game

RANK = int(os.environ.get("RANK", "0"))
VOCABULARY = 258
logprobs.CHUNK, logprobs.KEPT = 10 * VOCABULARY, 20 * VOCABULARY  # ten tokens a chunk: 64 make seven chunks
generate = rollouts.generate


def log(**entry):
    with (Path(__file__).parent / f"calls-{RANK}.jsonl").open("a") as file:
        print(json.dumps(entry), file=file)


def uneven(agent, requests, sampling, max_rows):
    log(agent=agent.name, answers=sum(len(request.seeds) for request in requests))
    results = []
    for request in requests:
        short = agent.decode(request.prompt_ids).startswith("0")
        results += generate(agent, [request], replace(sampling, max_new_tokens=1) if short else sampling, max_rows)
    return results


rollouts.generate = uneven


def divided(num_agents, rows=2):
    task = matrix_game.pairing(num_agents, rows)
    task.score = score
    return task


def score(row, texts):
    """Parts of one row are named otherwise than those of the other, so processes have different ones."""
    log(row=row["prompt"], texts=list(texts))
    reward = sum(ord(letter) for text in texts for letter in text) % 7 / 7
    return reward, {"long" if row["prompt"] != "0>" else "short": reward}
