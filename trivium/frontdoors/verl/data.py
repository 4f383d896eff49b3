"""Converts rows of the RLHF schema to tasks: from files or the user's dataset, with the user's order and collation.

A row has `prompt` (a list of messages) and, for rewards, `data_source`, `ability`, `reward_model` and `extra_info`.
`Task.columns` keeps all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from pydantic import PrivateAttr

from trivium.config import Plugin
from trivium.foundation.errors import DataError
from trivium.foundation.randomness import permutation
from trivium.frontdoors.tables import Settings
from trivium.frontdoors.verl.objects.batches.protocol import as_columns
from trivium.frontdoors.verl.objects.datasets.orders import Orders
from trivium.protocols import Renderer
from trivium.tasks.files import jsonl_rows, parquet_rows
from trivium.tasks.pictures import common_folder, portable
from trivium.tasks.rows import RowTasks, task_of_row
from trivium.types import Task

_OTHER_MEDIA = ("videos", "video", "audios", "audio")
_CACHED_BATCHES = 8
_KIND = "trivium.frontdoors.verl.data:DatasetTasks"


@runtime_checkable
class RowDataset(Protocol):
    """A dataset whose rows are read by position."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> object: ...


class OrderedRows:
    """A task source over rows, with its own order (see `schedule.OrderedTasks`)."""

    def __init__(self, data: Data) -> None:
        self._data = data

    def __len__(self) -> int:
        return self._data.epoch_length

    def __getitem__(self, index: int) -> Task:
        return self.visit(0, index)

    @property
    def epoch_length(self) -> int:
        """Number of tasks of an epoch, in whole batches."""
        return self._data.epoch_length

    def visit(self, epoch: int, place: int) -> Task:
        """Returns the task at a position of an epoch."""
        return self._data.visit(epoch, place)


class DatasetTasks(OrderedRows):
    """A task source over rows in the memory of this process."""

    class Config(Plugin):
        """What a saved run knows of the data: enough to notice that they have changed."""

        kind: str = _KIND
        origin: str
        """Where the rows come from."""
        rows: int
        """How many there are."""
        digest: str
        """A hash of their content."""
        _data: Data | None = PrivateAttr(default=None)

        @classmethod
        def of(cls, data: Data) -> DatasetTasks.Config:
            """Returns the config section for these rows."""
            config = cls(kind=_KIND, origin=data.origin, rows=len(data.rows), digest=data.digest)
            config._data = data
            return config

        @property
        def data(self) -> Data:
            """The rows. Raises DataError if the section was read from a file."""
            if self._data is None:
                raise DataError(
                    f"the rows of {self.origin}",
                    "only the script that built the run has them",
                    "build the RayPPOTrainer again and call fit()",
                )
            return self._data

    def __init__(self, config: Config, *, name: str, seed: int) -> None:
        del name, seed  # `Data` holds both
        super().__init__(config.data)


@dataclass(eq=False)
class Data:
    """Rows, the order in which epochs visit them, and the collation of batches.

    Raises DataError for rows that cannot be converted to tasks, and for an unsupported sampler.
    """

    rows: Sequence[Any]
    _: KW_ONLY
    taskset: str
    origin: str
    """Source of the rows, for error messages."""
    batch: int
    """Number of rows that are collated together. The incomplete last batch of an epoch is dropped."""
    prompt_key: str = "prompt"
    image_key: str = "images"
    image_root: str | None = None
    """Folder of the images that rows reference by path."""
    collate_fn: Callable[[list[Any]], Mapping[str, Any]] | None = None
    sampler: Any = None
    """Yields positions of `rows` in order. Without a sampler, `shuffle` and `seed` determine the order."""
    shuffle: bool = False
    seed: int = 0
    folder: Path | None = None
    """Folder in which drawn orders are stored."""

    def __post_init__(self) -> None:
        plain = [_as_mapping(json_like(row), self._where(number)) for number, row in enumerate(self.rows)]
        plain = [_with_images(row, self.image_key, self._where(number)) for number, row in enumerate(plain)]
        # Images count by their content, so that another process has the same digest.
        self.digest = _digest(map(portable, plain))
        self._prompts = [
            {
                "prompt": row.get(self.prompt_key, row.get("raw_prompt")),
                **({self.image_key: row[self.image_key]} if self.image_key in row else {}),
            }
            for row in plain
        ]
        self.orders = Orders(len(self.rows), self.batch, self.sampler, self.shuffle, self.seed, self.folder)
        self.epoch_length = self.orders.epoch_length
        if not self.epoch_length:
            raise DataError(
                f"a batch of {self.batch} rows of {self.origin}",
                f"an epoch has {len(self.rows) if self.sampler is None else len(self.sampler)}",
                "lower the number of rows in a batch, or give more rows",
            )
        # Tasks are asked for one by one, but a batch is collated as a whole, and `collate_fn` may draw at random.
        self._batch_tasks = lru_cache(maxsize=_CACHED_BATCHES)(self._tasks_of)
        if self.collate_fn is not None:  # reports collation errors before training starts
            for row in self._collated(list(self.rows[: self.batch]), 0, 0):
                self._task(self.origin, row)

    @classmethod
    def of(cls, verl: Settings, split: str, rows: Sequence[Any], renderer: Renderer | None, **options: Any) -> Data:
        """Returns the data of a split with the columns and the image folder that the config names. With a renderer,
        prompts are limited as the config says (`within`)."""
        files = verl[f"data.{split}_files"] or ()
        folder = common_folder([files] if isinstance(files, str) else files) if files else None
        data = cls(
            rows,
            prompt_key=verl["data.prompt_key"],
            image_key=verl["data.image_key"],
            image_root=folder and str(folder),
            **options,
        )
        if renderer is None:
            return data
        return data.within(
            verl["data.max_prompt_length"],
            renderer,
            truncation=verl["data.truncation"],
            filtered=bool(verl["data.filter_overlong_prompts"]),
        )

    def visit(self, epoch: int, place: int) -> Task:
        """Returns the task at a position of an epoch. Each visit of a row within an epoch is a separate task."""
        number, position = divmod(place, self.batch)
        return self._batch_tasks(epoch, number)[position]

    def columns(self, epoch: int, number: int) -> Mapping[str, Any]:
        """Returns batch `number` of an epoch: the result of `collate_fn`, or a list of values per column."""
        start = number * self.batch
        places = self.orders.until(epoch, start + self.batch)[start : start + self.batch]
        rows = [self.rows[place] for place in places]
        if self.collate_fn is not None:
            return self.collate_fn(rows)
        return as_columns([_as_mapping(row, self.origin) for row in rows])

    def _tasks_of(self, epoch: int, number: int) -> tuple[Task, ...]:
        start, stop = number * self.batch, (number + 1) * self.batch
        order = self.orders.until(epoch, stop)
        places = order[start:stop]
        before = Counter(order[:start])
        rows = self._collated([self.rows[place] for place in places], epoch, number)
        tasks: list[Task] = []
        for place, row in zip(places, rows, strict=True):
            before[place] += 1
            task = self._task(self._where(place), row)
            tasks.append(_named(task, f"{place}" if before[place] == 1 else f"{place}#{before[place]}"))
        return tuple(tasks)

    def _collated(self, rows: list[Any], epoch: int, number: int) -> list[dict[str, Any]]:
        """Applies `collate_fn` to the rows of a batch, and splits its columns into rows again."""
        if self.collate_fn is None:
            return [_as_mapping(json_like(row), self.origin) for row in rows]
        where = f"batch {number} of epoch {epoch} from collate_fn"
        try:
            columns: dict[str, Any] = dict(self.collate_fn(rows))
        except (TypeError, ValueError, RuntimeError, KeyError) as error:
            raise DataError(
                where, f"{type(error).__name__}: {error}", "accept a list of rows with columns of any type"
            ) from error
        columns = {name: json_like(column) for name, column in columns.items()}
        wrong = [name for name, column in columns.items() if not isinstance(column, list) or len(column) != len(rows)]
        if wrong:
            raise DataError(
                f"{where}: columns with one value per row",
                f"{wrong[0]!r} has another shape",
                f"return arrays or lists of {len(rows)} by name",
            )
        return [{name: column[row] for name, column in columns.items()} for row in range(len(rows))]

    def _task(self, where: str, row: dict[str, Any]) -> Task:
        # verl's own dataset moves the messages to this name.
        key = self.prompt_key if self.prompt_key in row else "raw_prompt"
        prompt = row.get(key)
        if prompt is None:
            raise DataError(
                f"a prompt in column {self.prompt_key!r} at {where}",
                f"the columns are {', '.join(sorted(row))}",
                "name the column in data.prompt_key; collate_fn must keep it",
            )
        return self._task_of(where, _with_images(row, self.image_key, where), key)

    def _task_of(self, where: str, row: dict[str, Any], prompt_key: str) -> Task:
        images = self.image_key if self.image_key in row else ""
        config = RowTasks.Config(kind="rows", prompt=prompt_key, images=images, image_root=self.image_root)
        return task_of_row(where, row, config, self.taskset)

    def _where(self, number: int) -> str:
        return f"{self.origin}, row {number}"

    def within(self, longest: int, renderer: Renderer, *, truncation: str, filtered: bool) -> Data:
        """Returns the data for prompts of at most `longest` tokens. With `filtered`, longer ones are dropped. Otherwise
        they stay, and the renderer cuts them unless `truncation` is `error`.

        Raises DataError for longer prompts that are neither dropped nor cut.
        """
        if truncation not in ("error", "left", "right", "middle"):
            raise DataError(f"data.truncation {truncation!r}", "unknown", "use error, left, right or middle")
        if truncation != "error" and not filtered:
            return self
        lengths = self._prompt_lengths(renderer)
        too_long = [number for number, length in enumerate(lengths) if length > longest]
        if not too_long:
            return self
        if not filtered:
            raise DataError(
                f"prompts of at most {longest} tokens (data.max_prompt_length)",
                f"{len(too_long)} of {len(lengths)} rows of {self.origin} are longer, first row {too_long[0]} with "
                f"{lengths[too_long[0]]}",
                "set data.filter_overlong_prompts, or data.truncation to left, right or middle",
            )
        if self.sampler is not None:
            raise DataError(
                "data.filter_overlong_prompts with a train_sampler",
                f"{len(too_long)} rows are too long, and the sampler counts them",
                "filter the dataset before you build its sampler",
            )
        remaining = [row for row, length in zip(self.rows, lengths, strict=True) if length <= longest]
        return replace(self, rows=remaining)

    def _prompt_lengths(self, renderer: Renderer) -> list[int]:
        """Returns the number of tokens of each row's prompt with the chat template applied."""
        return [
            len(renderer.render(self._task_of(self._where(number), row, "prompt").prompt))
            for number, row in enumerate(self._prompts)
        ]


def read_files(files: str | Sequence[str], where: str) -> list[dict[str, Any]]:
    """Returns the rows of Parquet and JSON Lines files in the given order. `where` is the config key of the files.

    Raises DataError for a missing file or an unsupported file type.
    """
    rows: list[dict[str, Any]] = []
    for name in [files] if isinstance(files, str) else files:
        path = Path(name).expanduser()
        if not path.is_file():
            raise DataError(f"the file {path}", "no such file", f"correct {where}")
        if path.suffix == ".parquet":
            rows += [row for _, row in parquet_rows(str(path), where)]
        elif path.suffix in (".jsonl", ".json"):
            rows += [row for _, row in jsonl_rows(str(path))]
        else:
            raise DataError(f"rows of {path}", f"a file named *{path.suffix}", "give .parquet or .jsonl files")
    return rows


def rows_of(dataset: object, name: str) -> list[Any]:
    """Reads every row of a sized, indexable dataset once."""
    if not isinstance(dataset, RowDataset):
        raise DataError(
            f"rows of {name}",
            f"a {type(dataset).__name__}, which has no length or no index",
            "pass a sized dataset with `__getitem__`; one that is only iterated cannot be resumed",
        )
    if hasattr(dataset, "on_batch_end"):
        raise DataError(
            f"rows of {name}",
            f"a {type(dataset).__name__} with `on_batch_end`, which adds rows during training",
            "leave `on_batch_end` out; a train_sampler with `update` may choose other rows after every batch",
        )
    return [dataset[index] for index in range(len(dataset))]


def split_rows(verl: Settings, split: str, seed: int) -> list[Any]:
    """Returns the rows of the files that the config names for a split, at most as many as it says."""
    files, where = verl[f"data.{split}_files"], f"data.{split}_files"
    shuffle = split == "train" and bool(verl["data.shuffle"])
    return some_rows(read_files(files or (), where), verl[f"data.{split}_max_samples"], shuffle=shuffle, seed=seed)


def some_rows(rows: list[Any], most: int, *, shuffle: bool, seed: int) -> list[Any]:
    """Returns at most `most` rows (-1: all): a seeded choice in file order with `shuffle`, else the first rows."""
    if most < 0 or most >= len(rows):
        return rows
    chosen = sorted(permutation(len(rows), seed, "subset")[:most]) if shuffle else range(most)
    return [rows[int(place)] for place in chosen]


def json_like(value: object) -> object:
    """Converts tensors, arrays and NumPy numbers to lists and Python numbers; other values stay unchanged."""
    if isinstance(value, Mapping):
        return {str(key): json_like(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [json_like(part) for part in value]
    if isinstance(value, np.generic):
        return value.item()
    tolist = getattr(value, "tolist", None)
    if tolist is not None and (isinstance(value, np.ndarray) or hasattr(value, "detach")):
        return json_like(tolist())
    return value


def _as_mapping(row: object, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"a row at {where}", f"{type(row).__name__}", "give a mapping from column to value")
    return row


def _with_images(row: dict[str, Any], image_key: str, where: str) -> dict[str, Any]:
    """Moves the images of `multi_modal_data`, a column of verl's dataset, to the image column.

    Raises DataError for a row with videos or sound.
    """
    media = row.get("multi_modal_data")
    media = media if isinstance(media, Mapping) else {}
    named = next((name for name in _OTHER_MEDIA if row.get(name) or media.get(name)), None)
    if named is not None:
        raise DataError(
            f"a row of text and images at {where}",
            f"it has {named!r}",
            "videos and sound are not supported: remove the column, or leave such rows out",
        )
    row = {name: value for name, value in row.items() if name != "multi_modal_data"}
    images = media.get("image") or media.get("images")
    return {**row, image_key: images} if images and not row.get(image_key) else row


def _named(task: Task, task_id: str) -> Task:
    return Task(task_id, task.prompt, task.columns, task.taskset)


def _digest(rows: Iterable[Any]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, separators=(",", ":"), default=repr).encode())
    return digest.hexdigest()
