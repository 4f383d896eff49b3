"""Tasks from Hugging Face datasets on this machine; nothing is downloaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from trivium.clients.hub import DatasetPath, absence
from trivium.config import RunConfig
from trivium.foundation.errors import DataError, MissingPackage, Problem
from trivium.foundation.registry import suggest
from trivium.tasks.rows import RowTasks, missing_package


class DatasetsTasks(RowTasks):
    """A dataset saved with `save_to_disk`, or a folder of data files; needs `datasets` (extra `data`)."""

    class Config(RowTasks.Config):
        """Which dataset, and how a row becomes a task."""

        path: DatasetPath
        """The folder, relative to the config; or a Hugging Face id whose files are in the local cache."""
        subset: str | None = None
        """Which of the dataset's configurations, for a folder of data files that has several."""
        split: str | None = None
        """The split; may be left out if there is only one."""

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            if not Path(self.path).is_dir():
                yield _no_folder(self.path, where)
            yield from missing_package(where, "datasets", _no_datasets(where))

    config: Config

    @property
    def origin(self) -> str:
        return self.config.path

    def rows(self) -> Iterator[tuple[str, Any]]:
        return dataset_rows(self.config.path, f"tasks.{self.name}", self.config.subset, self.config.split)


def dataset_rows(path: str, where: str, subset: str | None, split: str | None) -> Iterator[tuple[str, Any]]:
    """(location, row) for each row of a dataset's folder; `where` is the config key for errors. Raises MissingPackage
    without `datasets`."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise _no_datasets(where) from error
    if not Path(path).is_dir():
        problem = _no_folder(path, where)
        raise DataError(f"{problem.where}: {problem.asked}", problem.found, problem.do)
    for number, row in enumerate(_encoded(datasets, _split(_load(datasets, path, subset), path, split))):
        yield f"{path}, row {number}", row


def _encoded(datasets: Any, data: Any) -> Iterable[Any]:
    """The rows with undecoded images, since an image is identified by its bytes."""
    for name, feature in (getattr(data, "features", None) or {}).items():
        # The feature itself, or the element of a list: a column may hold several images in a row.
        inner = getattr(feature, "feature", feature[0] if isinstance(feature, list) and feature else feature)
        if isinstance(inner, datasets.Image):
            encoded = datasets.Image(decode=False)
            data = data.cast_column(name, encoded if inner is feature else datasets.List(encoded))
    return data


def _load(datasets: Any, path: str, subset: str | None) -> Iterable[Any]:
    """The dataset in a folder, or its splits by name."""
    folder = Path(path)
    if (folder / "state.json").exists() or (folder / "dataset_dict.json").exists():
        return datasets.load_from_disk(path)
    try:
        return datasets.load_dataset(path, subset)
    except (FileNotFoundError, ValueError) as error:
        raise DataError(
            f"a dataset in {folder}",
            str(error),
            "give a folder written by save_to_disk, or one that holds data files (Parquet, JSON, CSV)",
        ) from error


def _split(data: Iterable[Any], path: str, wanted: str | None) -> Iterable[Any]:
    """The rows of the wanted split; `data` is a dataset or a mapping from split to dataset."""
    if not isinstance(data, dict):
        if wanted is not None:
            raise DataError(f"split {wanted!r} of {path}", "a dataset without splits", "leave `split` out")
        return data
    if wanted is None and len(data) == 1:
        return next(iter(data.values()))
    if wanted not in data:
        raise DataError(
            f"split {wanted!r} of {path}" if wanted else f"one split of {path}",
            f"{len(data)} splits",
            suggest(wanted or "", data),
        )
    return data[wanted]


def _no_folder(path: str, where: str) -> Problem:
    return Problem(f"{where}.path", f"the dataset folder {path}", *absence(path, "dataset"))


def _no_datasets(where: str) -> MissingPackage:
    return MissingPackage("datasets", "data", f"read {where} from a dataset")
