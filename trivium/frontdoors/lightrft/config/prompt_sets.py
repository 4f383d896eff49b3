"""Reads the rows of the sets in LightRFT's data flags, from files and folders, alone or mixed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from trivium.errors import ConfigError
from trivium.randomness import stream, uniforms
from trivium.tasks.files import jsonl_rows, parquet_rows
from trivium.tasks.hf import dataset_rows

Row = dict[str, Any]
_KINDS = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}


def sets_of(text: str | None) -> list[str]:
    """Splits a comma-separated list of sets."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def source_of(name: str, split: str) -> dict[str, Any]:
    """Returns the task source of a set: `file`, `folder` or `folder@subfolder`. Raises ConfigError for other files."""
    path, at, inner = name.partition("@")
    where = Path(path.strip()).expanduser()
    where = where / inner.strip() if at else where
    if where.suffix in _KINDS:
        return {"kind": _KINDS[where.suffix], "path": str(where)}
    if where.suffix in (".csv", ".arrow", ".py"):
        raise ConfigError(f"the data {name}", f"no reader for {where.suffix}", "save it as Parquet or JSON lines")
    whole = (where / "state.json").exists()  # a single dataset without splits
    return {"kind": "datasets", "path": str(where)} | ({} if whole else {"split": split})


def rows_of(source: Mapping[str, Any], most: int | None = None) -> list[Row]:
    """Returns the raw rows of a task source, at most `most` of them.

    Raises DataError for an unreadable source, and MissingPackage if the reader's package is not installed.
    """
    path = source["path"]
    if source["kind"] == "datasets":
        rows = dataset_rows(path, "the data", None, source.get("split"))
    else:
        rows = jsonl_rows(path) if source["kind"] == "jsonl" else parquet_rows(path, "the data")
    return [row for _, row in islice(rows, most)]


def is_here(source: Mapping[str, Any]) -> bool:
    """Whether a task source exists on this machine."""
    return Path(source["path"]).exists()


def mixed_places(lengths: Sequence[int], probabilities: Sequence[float] | None, seed: int) -> Iterator[tuple[int, int]]:
    """Yields (set, row) of a mix, with the rows of each set in order.

    Draws sets by their probabilities until one is exhausted. Without probabilities, concatenates the sets.
    """
    if probabilities is None:
        yield from ((number, row) for number, length in enumerate(lengths) for row in range(length))
        return
    taken, draw, key = [0] * len(lengths), 0, stream("sets of prompts", seed)
    while True:
        uniform = float(uniforms(key, draw))
        bounds = (sum(probabilities[: number + 1]) for number in range(len(lengths)))
        chosen = next((number for number, bound in enumerate(bounds) if uniform < bound), len(lengths) - 1)
        if taken[chosen] == lengths[chosen]:
            return
        yield chosen, taken[chosen]
        taken[chosen] += 1
        draw += 1
