"""Reads prompts from the data loader: texts with the chat template already applied, and their images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trivium.foundation.errors import DataError
from trivium.frontdoors.padding import Truncation, cut_prompt
from trivium.models.vision.images import Images
from trivium.tasks.pictures import read_image
from trivium.text.renderer import ChatRenderer
from trivium.types import IMAGE, Media, Message, Prompt, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# LightRFT's data sets apply the chat template, so the template of the model would be applied twice.
_TEXT = "{{ messages[0].content }}"
_PARTS = (
    "{% for part in messages[0].content %}{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}"
)
_TEMPLATE = f"{{% if messages[0].content is string %}}{_TEXT}{{% else %}}{_PARTS}{{% endif %}}"


class PromptBatch(NamedTuple):
    """One batch of the loader."""

    prompts: Sequence[str]
    images: Sequence[Any]
    """Per prompt: None, an image, or several."""
    references: Sequence[Any]
    labels: Sequence[Any]


def read_batch(loaded: Any) -> PromptBatch:
    """Reads a batch (prompts, images, videos, references, labels), or the same without videos.

    Raises DataError for any other form, for videos, and for columns of different lengths.
    """
    if not isinstance(loaded, tuple | list) or len(loaded) not in (4, 5):
        what = f"{len(loaded)} columns" if isinstance(loaded, tuple | list) else f"a {type(loaded).__name__}"
        raise DataError("a batch (prompts, images, [videos], references, labels)", what, "collate prompts so")
    columns = list(loaded)
    if len(columns) == 5:
        videos = columns.pop(2)
        if videos is not None and any(_listed(video) for video in videos):
            raise DataError("prompts of text and images", "videos", "leave them out: this trainer reads none")
    prompts = list(columns[0])
    others = [list(column) if column is not None else [None] * len(prompts) for column in columns[1:]]
    for name, column in zip(("images", "references", "labels"), others, strict=True):
        if len(column) != len(prompts):
            raise DataError(f"{name} of {len(prompts)} prompts", f"{len(column)}", "give one entry per prompt")
    return PromptBatch(prompts, *others)


def task_of(batch: PromptBatch, row: int, name: str, images: Images | None) -> Task:
    """Converts a prompt of the batch to a task with this name."""
    text, where = str(batch.prompts[row]), f"image of prompt {name}"
    media = tuple(_image(image, where) for image in _listed(batch.images[row]))
    # The data set writes the model's own token for an image; tasks have one marker for all models.
    if media and images is not None:
        text = text.replace(images.token, IMAGE)
    columns = {"reference": batch.references[row], "label": batch.labels[row], "prompt": str(batch.prompts[row])}
    return Task(name, (Message("user", text, media),), columns)


def _listed(value: Any) -> list[Any]:
    """Returns the flat list of a prompt's images, [] for None."""
    if value is None:
        return []
    if isinstance(value, list | tuple):
        return [image for part in value for image in _listed(part)]
    return [value]


def _image(value: Any, where: str) -> Media:
    if isinstance(value, str | Path) and not str(value).startswith(("data:", "http")) and Path(value).is_file():
        return read_image(str(Path(value).resolve()), where, Path("/"))
    return read_image(value, where)


class PromptRenderer(ChatRenderer):
    """Encodes text without a chat template.

    Truncates prompts to `longest` tokens on the tokenizer's truncation side. Raises PromptTooLong for a longer prompt
    with images.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, images: Images | None, longest: int) -> None:
        template = _TEMPLATE.replace("IMAGE", images.token) if images is not None else _TEXT
        super().__init__(tokenizer, chat_template=template, images=images)
        self._longest = longest
        self._side: Truncation = "left" if tokenizer.truncation_side == "left" else "right"

    def render(self, messages: Sequence[Message]) -> Prompt:
        return cut_prompt(super().render(messages), self._longest, self._side, "prompt_max_len", "shrink the images")
