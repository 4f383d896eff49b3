"""LightRFT's data sets: prompts for rollouts, supervised text for pretraining, and their tokenizers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils.data import Dataset

from trivium.errors import ConfigError, DataError
from trivium.frontdoors.lightrft.arguments import option
from trivium.frontdoors.lightrft.config.data_section import probabilities_of as checked
from trivium.frontdoors.lightrft.config.data_section import system_prompt
from trivium.frontdoors.lightrft.config.prompt_sets import Row, mixed_places, rows_of, sets_of, source_of
from trivium.frontdoors.lightrft.rule_rewards import label_of, reference_of
from trivium.frontdoors.tables import announce
from trivium.models.vision.images import Images, images_of
from trivium.tasks.rows import RowTasks, task_of_row
from trivium.text import hf_processor, hf_tokenizer
from trivium.text.renderer import ChatRenderer
from trivium.types import IMAGE, Message

PromptItem = tuple[str, Any, Any, Any]
"""(prompt, its images, reference, label)"""


class Rows(Sequence[Row]):
    """A list of rows in memory."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> Row | Rows:
        return Rows(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def select(self, indices: Sequence[int]) -> Rows:
        """Returns the rows at these indices."""
        return Rows([self._rows[index] for index in indices])


def blending_datasets(
    datasets: str,
    probabilities: str | Sequence[float] | None = None,
    strategy: Any = None,
    seed: int = 42,
    max_count: int = 5_000_000,
    return_eval: bool = False,
    train_split: str = "train",
    eval_split: str = "test",
) -> Any:
    """Reads the rows of one or more sets.

    `datasets` is a comma-separated list of `file.jsonl`, `file.parquet`, `folder` or `folder@subfolder`. Several sets
    are mixed by `probabilities` until one is exhausted, or concatenated without them. With `return_eval`, also returns
    the rows of `eval_split`. Relative file paths in rows become absolute. Raises ConfigError for an unreadable set,
    DataError for an unreadable row.
    """
    del strategy
    names = sets_of(datasets)
    weights = probabilities_of(probabilities, len(names))
    if not return_eval:
        return Rows(_blended(names, weights, seed, train_split)[:max_count])
    return tuple(Rows(_blended(names, weights, seed, split)[:max_count]) for split in (train_split, eval_split))


def probabilities_of(value: object, count: int) -> list[float] | None:
    """Returns the sampling probability of each set, or None for a single set and without a value."""
    if value is None or count < 2:
        return None
    problems: list[Any] = []
    weights = checked(value, [""] * count, "probabilities", problems)
    if problems:
        raise ConfigError(f"probabilities of {count} sets", repr(value), problems[0].do)
    return weights


def _blended(names: Sequence[str], weights: Sequence[float] | None, seed: int, split: str) -> list[Row]:
    if not names:
        raise ConfigError("data", "no name", "name a file or a folder")
    sets = [[_at_home(row, source) for row in rows_of(source)] for source in (source_of(n, split) for n in names)]
    return [sets[number][row] for number, row in mixed_places([len(rows) for rows in sets], weights, seed)]


def _at_home(row: Row, source: Mapping[str, Any]) -> Row:
    """Returns the row with paths that are relative to its data made absolute."""
    path = Path(source["path"]).absolute()
    home = path if source["kind"] == "datasets" else path.parent
    return {name: _absolute(value, home) for name, value in row.items()}


def _absolute(value: Any, home: Path) -> Any:
    if isinstance(value, list):
        return [_absolute(part, home) for part in value] if value and isinstance(value[0], str) else value
    short = isinstance(value, str) and 0 < len(value) < 256 and "\n" not in value and Path(value).suffix
    return str(home / value) if short and (home / value).is_file() else value


class PromptDatasetVL(Dataset[PromptItem]):
    """Prompts with their images, for `PPOTrainerVL.fit`. `strategy.args` names the columns."""

    def __init__(
        self,
        dataset: Any,
        tokenizer: Any,
        processor: Any,
        max_length: int,
        strategy: Any,
        input_template: str | None = None,
    ) -> None:
        """`dataset` is a Hugging Face dataset or a sequence of mappings. Images are read if `processor` has an image
        processor.

        Reads `input_key`, `images_key`, `reference_key`, `label_key`, `system_prompt`, `system_prompt_path`,
        `apply_chat_template` and `limit_mm_image_per_prompt` of `args`, with the launcher's defaults. The trainer
        limits the length of prompts (`prompt_max_len`). Raises ConfigError for a template without a placeholder for
        the prompt.
        """
        super().__init__()
        args = getattr(strategy, "args", strategy)
        if max_length != getattr(args, "prompt_max_len", max_length):
            announce([f"max_length={max_length} of PromptDatasetVL: the trainer's prompt_max_len limits prompts"])
        self._dataset, self._args = dataset, args
        self._template = None if option(args, "apply_chat_template") else input_template
        if self._template is not None and self._template.count("{}") != 1:
            raise ConfigError("input_template", repr(input_template), "write {} once, where the prompt goes")
        self._sees = reads_images(processor) and not option(args, "text_only")
        self._videos = getattr(args, "videos_key", None) or "videos"
        self._renderer: ChatRenderer | None = None
        self._system: str | None = None
        if option(args, "apply_chat_template"):
            self._renderer = ChatRenderer(tokenizer, images=_images_of(tokenizer) if self._sees else None)
            self._system = system_prompt(option(args, "system_prompt"), option(args, "system_prompt_path"))
        self._limit = int(option(args, "limit_mm_image_per_prompt"))

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> PromptItem:
        """Returns (text of the prompt, its images or None, reference, label).

        Raises DataError for a row without a prompt, with too many images, or whose image marks do not match its images.
        """
        row, where = self._dataset[index], f"row {index}"
        if row.get(self._videos):
            raise DataError(f"text and images at {where}", f"videos in {self._videos!r}", "leave the row out")
        messages, images = self._messages(row, where)
        if 0 <= self._limit < len(images):
            do = "raise limit_mm_image_per_prompt, or leave the row out"
            raise DataError(f"at most {self._limit} image(s) at {where}", f"{len(images)}", do)
        text = self._text(messages, where)
        reference = reference_of(row, option(self._args, "reference_key"))
        return text, images or None, reference, label_of(row, option(self._args, "label_key"))

    def collate_fn(self, items: Sequence[PromptItem]) -> tuple[list[Any], ...]:
        """Returns lists of (prompts, images, references, labels), or of (prompts, images, videos, references, labels)
        if `args.videos_key` is set."""
        prompts, images, references, labels = (list(column) for column in zip(*items, strict=True))
        if getattr(self._args, "videos_key", None):
            return prompts, images, [None] * len(prompts), references, labels
        return prompts, images, references, labels

    def _messages(self, row: Mapping[str, Any], where: str) -> tuple[tuple[Message, ...], list[Any]]:
        """Returns (the conversation, its images)."""
        key, images_key = option(self._args, "input_key"), option(self._args, "images_key") if self._sees else ""
        given = _listed(row.get(images_key)) if images_key else []
        located = [_located(image) for image in given]
        columns = {key: row[key]} if key in row else {}
        config = RowTasks.Config(
            kind="rows", prompt=key, images="images" if located else "", image_root="/", system=self._system
        )
        task = task_of_row(where, {**columns, **({"images": located} if located else {})}, config, "prompts")
        media = [item for message in task.prompt for item in message.media]
        return task.prompt, given if len(media) == len(given) else media

    def _text(self, messages: Sequence[Message], where: str) -> str:
        if self._renderer is not None:
            return self._renderer.text(messages)
        text = "".join(_marked(message) for message in messages)
        return text if self._template is None else self._template.replace("{}", text)


def reads_images(processor: Any) -> bool:
    """Whether this is a processor of a vision-language model. Text models have a tokenizer in its place."""
    return getattr(processor, "image_processor", None) is not None


def _marked(message: Message) -> str:
    """Returns a message's text with a mark for each of its images."""
    return message.content if IMAGE in message.content else IMAGE * len(message.media) + message.content


def _images_of(tokenizer: Any) -> Images | None:
    """Returns the image processor of the tokenizer's model, or None for a text-only model."""
    return images_of(tokenizer.name_or_path)


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _located(value: Any) -> Any:
    """Makes the path of an image absolute."""
    if isinstance(value, str) and len(value) < 4096 and not value.startswith("data:") and Path(value).is_file():
        return str(Path(value).resolve())
    return value


class SFTDatasetVL(Dataset[tuple[int, Tensor, Tensor, dict[str, Any]]]):
    """Supervised text, whose loss PPOTrainerVL adds to the policy loss (`ptx_coef`). Images are not supported."""

    def __init__(
        self,
        dataset: Any,
        tokenizer: Any,
        processor: Any = None,
        max_length: int = 1024,
        strategy: Any = None,
        input_template: str | None = None,
        pretrain_mode: bool = True,
    ) -> None:
        """Rows have a text or messages in `args.input_key`, and optionally the completion in `args.output_key`.

        Every token is trained, as in pretraining; `pretrain_mode` False raises ConfigError. Texts are truncated to
        `max_length` tokens.
        """
        super().__init__()
        if isinstance(processor, int):  # the original's scripts pass (dataset, tokenizer, max_length, strategy)
            processor, max_length, strategy = None, processor, max_length
        if reads_images(processor):
            announce(["processor of SFTDatasetVL: supervised rows are text here, images are not read"])
        if not pretrain_mode:
            do = "use a Trivium config with algorithm.kind sft"
            raise ConfigError("pretrain_mode False", "every token of supervised rows is trained here", do)
        self._dataset, self._tokenizer, self._longest = dataset, tokenizer, max_length
        self._args, self._template = getattr(strategy, "args", Namespace()), input_template

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor, dict[str, Any]]:
        """Returns (number of prompt tokens, ids (1, S), mask (1, S), the texts)."""
        prompt, completion = self._texts(self._dataset[index], index)
        ids = self._tokenizer(prompt + completion, add_special_tokens=False)["input_ids"]
        if ids[-1:] != [self._tokenizer.eos_token_id]:
            ids = [*ids, self._tokenizer.eos_token_id]
        tokens = torch.tensor(ids[: self._longest]).unsqueeze(0)
        before = len(self._tokenizer(prompt, add_special_tokens=False)["input_ids"])
        return min(before, tokens.shape[1]), tokens, torch.ones_like(tokens), {"input": prompt, "output": completion}

    def collate_fn(self, items: Sequence[tuple[int, Tensor, Tensor, dict[str, Any]]]) -> tuple[Any, ...]:
        """Returns (prompt lengths, ids (B, 1, S), mask (B, 1, S), None, None), padded on the right."""
        lengths, tokens, masks, _ = zip(*items, strict=True)
        longest = max(each.shape[1] for each in tokens)
        pad = self._tokenizer.pad_token_id or 0
        ids = [torch.nn.functional.pad(each, (0, longest - each.shape[1]), value=pad) for each in tokens]
        mask = [torch.nn.functional.pad(each, (0, longest - each.shape[1])) for each in masks]
        return list(lengths), torch.stack(ids), torch.stack(mask), None, None

    def _texts(self, row: Mapping[str, Any], index: int) -> tuple[str, str]:
        """Returns (prompt, completion) of a row; either may be empty."""
        key, output = option(self._args, "input_key"), row.get(option(self._args, "output_key"))
        value = row.get(key)
        if not value or not isinstance(value, str | list):
            raise DataError(f"text or messages in {key!r} of row {index}", repr(value)[:80], "correct input_key")
        if option(self._args, "apply_chat_template"):
            messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
            if output is None:
                return "", self._tokenizer.apply_chat_template(messages, tokenize=False)
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True), str(
                output
            )
        text = value if isinstance(value, str) else "".join(str(message["content"]) for message in value)
        return text if self._template is None else self._template.replace("{}", text), str(output or "")


def get_tokenizer_processor_vl(
    pretrain: str | Path,
    model: Any = None,
    padding_side: str = "left",
    strategy: Any = None,
    use_fast: bool = True,
) -> tuple[Any, Any]:
    """Returns (tokenizer, processor) of a model directory.

    For a text-only model and with `strategy.args.text_only`, the tokenizer takes the place of the processor. A missing
    pad token is set to the end-of-sequence token. The config of `model` gets the pad token.
    """
    if not use_fast:
        announce(["use_fast=False: a tokenizer that has a fast form is opened in that form"])
    tokenizer = hf_tokenizer(pretrain)
    tokenizer.padding_side = padding_side
    text_only = bool(getattr(getattr(strategy, "args", None), "text_only", False))
    processor = None if text_only else hf_processor(pretrain)
    if processor is not None:
        processor.tokenizer = tokenizer
    config = getattr(getattr(model, "model", model), "config", None)
    if config is not None:
        config.pad_token_id = tokenizer.pad_token_id
    return tokenizer, processor or tokenizer
