"""Tasks from the dataset class and the sampler class that verl's config names, for `trivium run`."""

from __future__ import annotations

from typing import Any, Literal

from trivium.clients.hub import ModelPath
from trivium.config import Plugin
from trivium.foundation.errors import ConfigError
from trivium.frontdoors.plain_values import Section
from trivium.frontdoors.verl.config.config_table import TABLE
from trivium.frontdoors.verl.data import Data, OrderedRows, rows_of, split_rows
from trivium.frontdoors.verl.objects.datasets.prompts import template_of
from trivium.frontdoors.verl.objects.datasets.user_data import custom_dataset, custom_sampler
from trivium.text import hf_processor, hf_tokenizer
from trivium.text.renderer import ChatRenderer


class ConfiguredTasks(OrderedRows):
    """A task source over the rows of a user's dataset, in the order of a user's sampler."""

    class Config(Plugin):
        kind: str = "trivium.frontdoors.verl.configured_tasks:ConfiguredTasks"
        model: ModelPath
        """The model, whose tokenizer and processor the dataset receives."""
        split: Literal["train", "val"] = "train"
        """Whether the files are `train_files` or `val_files`."""
        data: dict[str, Any]
        """The section `data` of verl's config."""

    def __init__(self, config: Config, *, name: str, seed: int) -> None:
        verl, split, trains = TABLE.read({"data": config.data}), config.split, config.split == "train"
        tokenizer, processor = hf_tokenizer(config.model), hf_processor(config.model)
        section, where = Section.of(config.data), f"data.{split}_files"
        dataset = custom_dataset(verl, section, split, tokenizer, processor)
        rows = split_rows(verl, split, seed) if dataset is None else rows_of(dataset, where)
        sampler = custom_sampler(verl, section, rows if dataset is None else dataset) if trains else None
        if hasattr(sampler, "update"):
            raise ConfigError(
                f"the sampler {type(sampler).__name__}, which learns from every batch",
                "a RunConfig gives it no batches",
                "train with RayPPOTrainer (python -m trivium.frontdoors.verl)",
            )
        super().__init__(
            Data.of(
                verl,
                split,
                rows,
                ChatRenderer(tokenizer, chat_template=template_of(verl, tokenizer)),
                taskset=name,
                origin=where,
                # Validation visits every row: the last batch, which is dropped if it is incomplete, has one.
                batch=verl["data.train_batch_size"] if trains else 1,
                sampler=sampler,
                shuffle=trains and bool(verl["data.shuffle"]),
                seed=seed,
            )
        )
