"""Tiny teams for the preference trainers, whose every log-prob can be computed by a plain loop."""

import torch
from stopping import LETTERS, feedback, reward, rows
from tiny_team import build_model, build_tokenizer

from comlrl.trainers.preference import MADPOTrainer


def build(kind=MADPOTrainer, data=None, reward_func=reward, seeds=(2, 9), turns=1, options=None, **changes):
    """A fresh team of two different shapes: as a new process would make it."""
    settings = {
        "run_name": "run",
        "dtype": "float32",
        "num_turns": turns,
        "preference_num_candidates": 4,
        "preference_pairs_per_sample": 3,
        "max_new_tokens": 4,
        "rollout_buffer_size": 2,
        "train_batch_size": 3,
        "agent_learning_rate": 1e-2,
        "num_train_epochs": 2,
        "eval_interval": 2,
        "logging_steps": 1,
        **changes,
    }
    options = {"eval_dataset": rows(2), **(options or {})}
    trainer = kind(
        agents=[build_model(len(LETTERS) + 1, seed, layers=1 + i) for i, seed in enumerate(seeds)],
        tokenizer=build_tokenizer(LETTERS),
        train_dataset=rows(4) if data is None else data,
        reward_func=reward_func,
        external_transition=feedback if turns > 1 else None,
        args=kind.config_class(**settings),
        **options,
    )
    trainer.verbose = False
    return trainer


def plain_logprob(model, prompt_ids, token_ids):
    """Sum over the answer's tokens, one forward a token, no padding, no cache."""
    total = torch.zeros((), dtype=torch.float64)
    for place, token in enumerate(token_ids):
        ids = torch.tensor([[*prompt_ids, *token_ids[:place]]])
        total = total + torch.log_softmax(model(input_ids=ids).logits[0, -1].double(), -1)[token]
    return total
