"""verl's dataset of prompts, its collation and its sampler, over the rows that `data` reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Dataset, RandomSampler, Sampler, SequentialSampler

from trivium.frontdoors.plain_values import read
from trivium.frontdoors.verl.config.config_table import TABLE
from trivium.frontdoors.verl.data import Data, read_files, some_rows
from trivium.frontdoors.verl.objects.batches.protocol import objects
from trivium.frontdoors.verl.objects.datasets.prompts import template_of
from trivium.frontdoors.verl.objects.datasets.user_data import custom_sampler, dataset_class
from trivium.models.vision.images import Images
from trivium.text.renderer import ChatRenderer


class RLHFDataset(Dataset[dict[str, Any]]):
    """The rows of Parquet or JSON Lines files, without prompts that are too long.

    `config` is the section `data` of the config. A row has the columns of the files, `raw_prompt` (messages) and
    `index`. A subclass may override `_build_messages`, `_read_files_and_tokenize` and `maybe_filter_out_long_prompts`.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any,
        config: Any,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        self.data_files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.tokenizer, self.processor, self.config, self.max_samples = tokenizer, processor, config, max_samples
        self._verl = TABLE.read({"data": config})
        self.prompt_key, self.image_key = self._verl["data.prompt_key"], self._verl["data.image_key"]
        self.max_prompt_length, self.truncation = self._verl["data.max_prompt_length"], self._verl["data.truncation"]
        self.filter_overlong_prompts = self._verl["data.filter_overlong_prompts"]
        self.shuffle, self.seed = self._verl["data.shuffle"], self._verl["data.seed"]
        self.dataframe: Any = []
        self._read_files_and_tokenize()

    def _read_files_and_tokenize(self) -> None:
        """Sets `dataframe` to the rows: a list, or another sized, indexable object."""
        rows = read_files(self.data_files, "data_files")
        rows = some_rows(rows, self.max_samples, shuffle=bool(self.shuffle), seed=self.seed or 0)
        self.dataframe = self.maybe_filter_out_long_prompts(rows)

    def maybe_filter_out_long_prompts(self, dataframe: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Returns the rows whose prompts have at most `max_prompt_length` tokens, if
        `filter_overlong_prompts` is set."""
        if not self.filter_overlong_prompts:
            return dataframe
        images = None if self.processor is None else Images(self.processor)
        chat = ChatRenderer(self.tokenizer, chat_template=template_of(self._verl, self.tokenizer), images=images)
        rows = [self._with_messages(row) for row in dataframe]
        data = Data(rows, taskset="train", origin="the dataset", batch=1, prompt_key=self.prompt_key)
        short_rows = data.within(self.max_prompt_length, chat, truncation=self.truncation, filtered=True).rows
        remaining = {id(row) for row in short_rows}  # `within` returns the same objects
        return [row for row, whole in zip(dataframe, rows, strict=True) if id(whole) in remaining]

    def _build_messages(self, example: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the messages of a row. `<image>` in a text stands for the row's next image."""
        return example[self.prompt_key]

    def _with_messages(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the row with its messages, in the prompt's column and as `raw_prompt`."""
        messages = self._build_messages(dict(row))
        return {**row, self.prompt_key: messages, "raw_prompt": messages}

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._with_messages(self.dataframe[index])
        extra: Mapping[str, Any] = row.get("extra_info") or {}
        return {**row, "extra_info": extra, "index": extra.get("index", 0)}


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the rows as columns: tensors stacked, other values as arrays of objects."""
    names = dict.fromkeys(name for row in data_list for name in row)
    columns = {name: [row[name] for row in data_list] for name in names}
    return {
        name: torch.stack(column) if isinstance(column[0], torch.Tensor) else objects(column)
        for name, column in columns.items()
    }


def get_dataset_class(data_config: Any) -> type[Any]:
    """Returns the class that `custom_cls` of the section `data` names, else `RLHFDataset`."""
    return dataset_class(TABLE.read({"data": data_config})) or RLHFDataset


def create_rl_dataset(
    data_paths: str | Sequence[str],
    data_config: Any,
    tokenizer: Any,
    processor: Any,
    is_train: bool = True,
    max_samples: int = -1,
) -> Any:
    """Returns the dataset of the section `data` of a config over files. `is_train` has no effect."""
    del is_train
    arguments = {"data_files": data_paths, "tokenizer": tokenizer, "processor": processor, "config": data_config}
    return get_dataset_class(data_config)(**arguments, max_samples=max_samples)


def create_rl_sampler(data_config: Any, dataset: Sized) -> Sampler[int]:
    """Returns the sampler of the section `data` of a config: the class in `sampler`, a shuffle with `seed`, or the
    order of the rows. Raises ConfigError for a class that is not supported."""
    sampler = custom_sampler(TABLE.read({"data": data_config}), data_config, dataset)
    if sampler is not None:
        return sampler
    if not read(data_config, "shuffle", TABLE.default_of("data.shuffle")):
        return SequentialSampler(dataset)
    # A generator of its own, because the global one also serves the user's script.
    generator, seed = torch.Generator(), read(data_config, "seed")
    return RandomSampler(dataset, generator=generator if seed is None else generator.manual_seed(int(seed)))
