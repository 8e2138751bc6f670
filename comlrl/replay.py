"""Which pairs an iteration trains on: the new ones, or a draw from those of several iterations."""

import random
from collections.abc import Sequence
from typing import Any

REPLAY_MODES = {
    "current": "current",
    "latest": "current",
    "new": "current",
    "nearest_k": "nearest_k",
    "recent_k": "nearest_k",
    "last_k": "nearest_k",
    "k": "nearest_k",
    "all_history": "all_history",
    "lambda_decay": "lambda_decay",
    "lambda": "lambda_decay",
    "td_lambda": "lambda_decay",
    "td-lambda": "lambda_decay",
}


def select_pairs(
    sizes: Sequence[int], mode: str, k: int | None, decay: float | None, sample_size: int | None, seed: int
) -> list[tuple[int, int]]:
    """(iteration, number of the pair) of every pair to train on.

    sizes: pairs of each iteration so far, the newest last.
    current: all new ones. Otherwise `sample_size` draws (none: as many as there are new ones, else as the newest
    iteration with pairs has); each first draws an iteration, then a pair of it that was not drawn before, and once all
    of its pairs were drawn, starts it anew.
    nearest_k: iterations uniformly among the newest k; all_history: among all; lambda_decay: with weights
    decay^(iterations since). Iterations without pairs are left out.
    """
    filled = [iteration for iteration, size in enumerate(sizes) if size]
    if mode == "current":
        return [(len(sizes) - 1, place) for place in range(sizes[-1])]
    if mode == "nearest_k":
        assert k is not None
        filled = [iteration for iteration in filled if iteration >= len(sizes) - k]
    if not filled:
        return []
    newest = filled[-1]
    weights = [1.0] * len(filled)
    if mode == "lambda_decay":
        assert decay is not None
        weights = [decay ** (newest - iteration) for iteration in filled]  # 0 ** 0 is 1: the newest only
    generator = random.Random(seed)
    waiting: dict[int, list[int]] = {iteration: [] for iteration in filled}
    drawn = []
    for _ in range(sample_size or sizes[-1] or sizes[newest]):
        iteration = generator.choices(filled, weights)[0]
        if not waiting[iteration]:
            waiting[iteration] = generator.sample(range(sizes[iteration]), sizes[iteration])
        drawn.append((iteration, waiting[iteration].pop()))
    return drawn


def check_replay(mode: str, k: int | None, decay: float | None, sample_size: int | None) -> None:
    """Refuse settings that contradict each other."""

    def refuse(key: str, value: Any, rule: str) -> None:
        raise ValueError(f"{key}={value!r} with preference_replay_mode={mode!r}: must be {rule}")

    if mode == "nearest_k":
        if k is None or k < 1:
            refuse("preference_replay_k", k, "at least 1")
    elif k is not None and not (mode == "current" and k == 1):
        refuse("preference_replay_k", k, "none")
    if mode == "lambda_decay":
        if decay is None or not 0 <= decay <= 1:
            refuse("preference_replay_lambda", decay, "in [0, 1]")
    elif decay is not None:
        refuse("preference_replay_lambda", decay, "none")
    if sample_size is not None and (sample_size < 1 or mode == "current"):
        refuse("preference_replay_sample_size", sample_size, "none" if mode == "current" else "at least 1")
