"""Rows of a task in training order."""

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

Row = dict[str, Any]


class RowSource:
    """A dataset as numbered rows.

    `data`: a sequence (a list, a `datasets.Dataset`), any other iterable (an `IterableDataset`: read anew in each epoch,
    in its own order), or None. len() is 0 for an iterable: its length is unknown.
    """

    def __init__(self, data: Any, name: str, seed: int, shuffle: bool):
        self.name, self.seed, self.shuffle = name, seed, shuffle
        self.data: Any = data if data is not None else []
        if isinstance(data, Mapping):
            raise ValueError(
                f"{name} must be a sequence or an iterable of rows, not a mapping with the keys {', '.join(map(str, data))}; "
                "choose a split, or give a list of rows"
            )
        if isinstance(data, Iterator):
            raise ValueError(
                f"{name} is a {type(data).__name__}, which can be read only once; give list({name}), or an object whose "
                "__iter__ starts anew (datasets.IterableDataset.from_generator)"
            )
        self.sized = isinstance(self.data, Sequence) or (hasattr(self.data, "__len__") and hasattr(self.data, "__getitem__"))
        if not self.sized and not hasattr(self.data, "__iter__"):
            raise ValueError(f"{name} must be a sequence or an iterable of rows, not {type(data).__name__}")
        if self.sized and len(self.data) and not isinstance(self.data[0], Mapping):
            raise ValueError(f"{name}: rows must be mappings such as {{'prompt': ...}}, not {type(self.data[0]).__name__}")
        if not self.sized and shuffle:
            warnings.warn(
                f"{name} is an iterable: shuffle is ignored, rows come in its own order "
                "(datasets.IterableDataset.shuffle(seed, buffer_size) shuffles a stream)",
                stacklevel=3,
            )

    def __len__(self) -> int:
        return len(self.data) if self.sized else 0

    def batches(self, epoch: int, start: int, size: int) -> Iterator[list[tuple[int, Row]]]:
        """(row id, row) in lists of `size`, from position `start` of the epoch's order.

        The order depends on the seed and the epoch only, so a run that goes on in the middle sees the same rows.
        """
        if self.sized:
            order = list(range(len(self.data)))
            if self.shuffle:
                generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
                order = torch.randperm(len(order), generator=generator).tolist()
            rows: Iterator[tuple[int, Row]] = ((i, dict(self.data[i])) for i in order[start:])
        else:
            if hasattr(self.data, "set_epoch"):
                self.data.set_epoch(epoch)
            rows = ((i, dict(row)) for i, row in itertools.islice(enumerate(self.data), start, None))
        while batch := list(itertools.islice(rows, size)):
            yield batch

    def first(self, count: int | None) -> list[tuple[int, Row]]:
        """The first `count` rows in their own order; none: all."""
        return [(i, dict(row)) for i, row in enumerate(itertools.islice(iter(self.data), count))]
