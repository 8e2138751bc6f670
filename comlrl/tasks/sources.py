"""Rows of a task from a local file or the Hugging Face hub."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from comlrl.tasks import Row

SUFFIXES = (".json", ".jsonl", ".jsonl.gz", ".json.gz", ".parquet")


def load_rows(source: str, fields: Sequence[str], split: str = "train", key: str = "dataset") -> list[Row]:
    """All rows of ``source``: a file (.json, .jsonl, perhaps .gz, or .parquet) or a hub id, then its ``split``.

    Raises a ValueError that names ``task_args.<key>`` if there is no such source, or if a row lacks one of ``fields``
    (an empty string or list counts as lacking).
    """
    if Path(source).is_file():
        rows = read_file(Path(source))
    elif source.endswith(SUFFIXES) or source.startswith((".", "/")):
        raise ValueError(f"task_args.{key}={source!r}: no such file (working directory: {Path.cwd()})")
    else:
        rows = read_hub(source, split, key)
    if not rows:
        raise ValueError(f"task_args.{key}={source!r}: no rows")
    for number, row in enumerate(rows):
        lacking = [field for field in fields if not isinstance(row, dict) or row.get(field) in (None, "", [], {})]
        if lacking:
            raise ValueError(f"task_args.{key}={source!r}: row {number} lacks {', '.join(lacking)}")
    return rows


def read_file(path: Path) -> list[Row]:
    """A JSON list, or one JSON object a line, whatever the file is called; or a .parquet file."""
    if path.suffix == ".parquet":
        from pyarrow import parquet  # comes with datasets

        return parquet.read_table(path).to_pylist()
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    try:
        if text.lstrip().startswith("["):
            return json.loads(text)
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: neither a JSON list nor JSON lines: {error}") from error


def read_hub(source: str, split: str, key: str) -> list[Row]:
    from datasets import load_dataset  # takes a second to import, and most tasks never need it

    try:
        return [dict(row) for row in load_dataset(source, split=split)]
    except (OSError, ValueError) as error:  # no such data set or split, no network, offline mode
        raise ValueError(
            f"task_args.{key}={source!r}: neither a file nor a data set that could be read from the hub "
            f"(split {split}): {error}"
        ) from error
