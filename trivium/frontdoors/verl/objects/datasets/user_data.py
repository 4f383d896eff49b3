"""Datasets and samplers of users: the classes that a config names, and the parts of a torch DataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from os.path import expanduser
from typing import Any

from trivium.foundation.errors import ConfigError
from trivium.foundation.registry import resolve
from trivium.frontdoors.keywords import accepted
from trivium.frontdoors.tables import Settings
from trivium.frontdoors.verl.data import Data
from trivium.frontdoors.verl.objects.datasets.samplers import AbstractSampler
from trivium.frontdoors.verl.rewards.reward_loading import address


@dataclass(frozen=True)
class RowLoader:
    """Iterates over the batches of an epoch in the run's order, for code that reads a dataloader."""

    dataset: Any
    data: Data

    @property
    def sampler(self) -> Any:
        """The train_sampler; a range of positions without one."""
        return range(self.data.epoch_length) if self.data.sampler is None else self.data.sampler

    @property
    def batch_size(self) -> int:
        return self.data.batch

    @property
    def collate_fn(self) -> Any:
        return self.data.collate_fn

    def __len__(self) -> int:
        """Returns the number of batches of an epoch."""
        return self.data.epoch_length // self.data.batch

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        """Yields the batches of the first epoch as columns."""
        return (self.data.columns(0, number) for number in range(len(self)))


@dataclass(frozen=True)
class DataSources:
    """Datasets, collate function and sampler that rows are read with."""

    train: Any = None
    val: Any = None
    collate_fn: Any = None
    sampler: Any = None

    @classmethod
    def of_loaders(cls, train: Any, val: Any, batch: int) -> DataSources:
        """Returns the sources of DataLoaders that an override of `_create_dataloader` built."""
        parts = {"dataset", "sampler", "batch_size", "collate_fn"}
        for name, loader in (("train_dataloader", train), ("val_dataloader", val)):
            missing = [part for part in sorted(parts) if loader is not None and not hasattr(loader, part)]
            if missing:
                raise ConfigError(
                    f"a {name} whose rows can be read in order",
                    f"a {type(loader).__name__} without {', '.join(missing)}",
                    "build a DataLoader of a sized dataset",
                )
        if train.batch_size != batch:
            raise ConfigError(
                f"a train_dataloader with batches of data.train_batch_size ({batch})",
                f"its batch_size is {train.batch_size}",
                "make the two equal",
            )
        return cls(train.dataset, None if val is None else val.dataset, train.collate_fn, train.sampler)


def dataset_class(verl: Settings) -> Any:
    """Returns the class that `data.custom_cls` names, or None."""
    if not verl.has("data.custom_cls.path"):
        return None
    return _named(verl, "data.custom_cls.path", "data.custom_cls.name")


def custom_dataset(verl: Settings, section: object, split: str, tokenizer: object, processor: object) -> Any:
    """Returns an instance of `data.custom_cls` over the files of a split, or None without a class or files."""
    files, cls = verl[f"data.{split}_files"], dataset_class(verl)
    if cls is None or not files:
        return None
    arguments = {
        "data_files": files,
        "tokenizer": tokenizer,
        "processor": processor,
        "config": section,
        "max_samples": verl[f"data.{split}_max_samples"],
    }
    # A user's class may have fewer parameters than verl's own.
    return cls(**accepted(cls, arguments))


def custom_sampler(verl: Settings, section: object, dataset: Sized) -> Any:
    """Returns an instance of `data.sampler.class_name`, or None if the config names no class."""
    if not verl.has("data.sampler.class_path"):
        return None
    cls = _named(verl, "data.sampler.class_path", "data.sampler.class_name")
    if not (isinstance(cls, type) and issubclass(cls, AbstractSampler)):
        raise ConfigError(
            f"a sampler class from {verl['data.sampler.class_path']}",
            f"{verl['data.sampler.class_name']!r} does not derive from AbstractSampler",
            "derive it from trivium.frontdoors.verl.AbstractSampler, or AbstractCurriculumSampler",
        )
    if hasattr(cls, "update") and verl["data.dataloader_num_workers"]:
        raise ConfigError(
            f"data.dataloader_num_workers {verl['data.dataloader_num_workers']} with {cls.__name__}",
            "workers would draw batches before the sampler has learned from the one before",
            "set data.dataloader_num_workers: 0",
        )
    return cls(data_source=dataset, data_config=section)  # pyright: ignore[reportCallIssue]


def _named(verl: Settings, path: str, name: str) -> Any:
    """Returns the class whose file and name are under these keys."""
    if not verl.has(name):
        raise ConfigError(name, "nothing", "name the class in that file")
    return resolve("tasks", address(expanduser(verl[path]), verl[name]))
