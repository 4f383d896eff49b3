"""Tasks from the dataset class and the sampler class that verl's config names, for `trivium run`."""

from __future__ import annotations

from typing import Any, Literal

from trivium.clients.hub import ModelPath
from trivium.config import Plugin
from trivium.errors import ConfigError
from trivium.frontdoors.plain_values import Section
from trivium.frontdoors.verl.config.config_table import TABLE
from trivium.frontdoors.verl.data import Data, read_files, rows_of, some_rows
from trivium.frontdoors.verl.objects.datasets.prompts import template_of
from trivium.frontdoors.verl.objects.datasets.user_data import custom_dataset, custom_sampler
from trivium.tasks.pictures import common_folder
from trivium.text import hf_processor, hf_tokenizer
from trivium.text.renderer import ChatRenderer
from trivium.types import Task


class ConfiguredTasks:
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
        verl, split = TABLE.read({"data": config.data}), config.split
        tokenizer, processor = hf_tokenizer(config.model), hf_processor(config.model)
        section, trains = Section.of(config.data), split == "train"
        dataset = custom_dataset(verl, section, split, tokenizer, processor)
        files, where = verl[f"data.{split}_files"], f"data.{split}_files"
        rows = (
            some_rows(
                read_files(files, where),
                verl[f"data.{split}_max_samples"],
                shuffle=trains and bool(verl["data.shuffle"]),
                seed=seed,
            )
            if dataset is None
            else rows_of(dataset, where)
        )
        sampler = custom_sampler(verl, section, rows if dataset is None else dataset) if trains else None
        if hasattr(sampler, "update"):
            raise ConfigError(
                f"the sampler {type(sampler).__name__}, which learns from every batch",
                "a RunConfig gives it no batches",
                "train with RayPPOTrainer (python -m trivium.frontdoors.verl)",
            )
        data = Data(
            rows,
            taskset=name,
            origin=where,
            batch=verl["data.train_batch_size"] if trains else 1,
            prompt_key=verl["data.prompt_key"],
            image_key=verl["data.image_key"],
            image_root=str(common_folder([files] if isinstance(files, str) else files)),
            sampler=sampler,
            shuffle=trains and bool(verl["data.shuffle"]),
            seed=seed,
        )
        self._data = data.within(
            verl["data.max_prompt_length"],
            ChatRenderer(tokenizer, chat_template=template_of(verl, tokenizer)),
            truncation=verl["data.truncation"],
            filtered=bool(verl["data.filter_overlong_prompts"]),
        )

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
