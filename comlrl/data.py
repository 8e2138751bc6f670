"""Rows of a task in training order."""

import itertools
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

Row = dict[str, Any]


class RowSource:
    """A dataset as numbered rows.

    `data`: a sequence (a list, a `datasets.Dataset`), any other iterable (an `IterableDataset`: read anew in each
    epoch, in its own order), or None. len() is 0 for an iterable: its length is unknown.
    """

    def __init__(self, data: Any, name: str, seed: int, shuffle: bool):
        self.name, self.seed, self.shuffle = name, seed, shuffle
        self.data: Any = data if data is not None else []
        self._epoch, self._position = -1, 0
        self._order: list[int] = []
        self._stream: Iterator[Any] = iter(())
        if isinstance(data, Mapping):
            raise ValueError(
                f"{name} must be a sequence or an iterable of rows, not a mapping of {', '.join(map(str, data))}; "
                "choose a split, or give a list of rows"
            )
        if isinstance(data, Iterator):
            raise ValueError(
                f"{name} is a {type(data).__name__}, which can be read once; give list({name}), or an object whose "
                "__iter__ starts anew (datasets.IterableDataset.from_generator)"
            )
        self.sized = isinstance(self.data, Sequence) or (
            hasattr(self.data, "__len__") and hasattr(self.data, "__getitem__")
        )
        if not self.sized and not hasattr(self.data, "__iter__"):
            raise ValueError(f"{name} must be a sequence or an iterable of rows, not {type(data).__name__}")
        if self.sized and len(self.data) and not isinstance(self.data[0], Mapping):
            raise ValueError(
                f"{name}: rows must be mappings such as {{'prompt': ...}}, not {type(self.data[0]).__name__}"
            )
        if not self.sized and shuffle:
            warnings.warn(
                f"{name} is an iterable: shuffle is ignored, rows come in its own order "
                "(datasets.IterableDataset.shuffle(seed, buffer_size) shuffles a stream)",
                stacklevel=3,
            )

    def __len__(self) -> int:
        return len(self.data) if self.sized else 0

    def take(self, epoch: int, start: int, size: int) -> list[tuple[int, Row]]:
        """Up to `size` pairs (row id, row) from position `start` of the epoch's order.

        The order depends on the seed and the epoch only, so a run that goes on in the middle sees the same rows.
        """
        if self.sized:
            if self._epoch != epoch:
                self._epoch, self._order = epoch, self.order(epoch)
            return [(i, dict(self.data[i])) for i in self._order[start : start + size]]
        if (self._epoch, self._position) != (epoch, start):
            if hasattr(self.data, "set_epoch"):
                self.data.set_epoch(epoch)
            self._epoch, self._position = epoch, start
            self._stream = itertools.islice(iter(self.data), start, None)
        rows = [(start + i, dict(row)) for i, row in enumerate(itertools.islice(self._stream, size))]
        self._position += len(rows)
        return rows

    def fetch(self, epoch: int, row_ids: Collection[int]) -> dict[int, Row]:
        """Rows of the epoch by id; an iterable is read up to them, and one that has ended has fewer."""
        if self.sized or not row_ids:
            return {i: dict(self.data[i]) for i in row_ids}
        first = min(row_ids)
        return dict(self.take(epoch, first, max(row_ids) - first + 1))

    def exhausted(self, position: int, taken: int, asked: int) -> bool:
        """Whether the epoch has no rows left, after `taken` of `asked` rows came and the position is `position`."""
        return position >= len(self.data) if self.sized else taken < asked

    def order(self, epoch: int) -> list[int]:
        if not self.shuffle:
            return list(range(len(self.data)))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(len(self.data), generator=generator).tolist()

    def first(self, count: int | None) -> list[tuple[int, Row]]:
        """The first `count` rows in their own order; none: all."""
        if self.sized:
            return [(i, dict(self.data[i])) for i in range(len(self.data))[:count]]
        return [(i, dict(row)) for i, row in enumerate(itertools.islice(iter(self.data), count))]
