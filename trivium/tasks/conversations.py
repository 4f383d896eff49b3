"""Columns that hold a separate conversation with its own images: the two sides of a pair that a reward model scores."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trivium.foundation.errors import DataError
from trivium.tasks.pictures import Reader, row_images, with_leading
from trivium.types import Media, Message

ReadMessages = Callable[[object, str, list[Media]], tuple[Message, ...]]
"""(value, its location, images for its marks) -> messages."""


def sides_of(
    where: str, row: Mapping[str, Any], names: Sequence[str], reader: Reader, messages_of: ReadMessages, prompt: object
) -> dict[str, tuple[Message, ...]]:
    """The conversation in each of the columns.

    A column holds messages, whose images are parts or in the column `<name>_images`; or only images, which are added to
    the `prompt`. Raises DataError for anything else.
    """
    return {name: _side(f"{where}, {name!r}", row, name, reader, messages_of, prompt) for name in names}


def _side(
    where: str, row: Mapping[str, Any], name: str, reader: Reader, messages_of: ReadMessages, prompt: object
) -> tuple[Message, ...]:
    """`sides_of`, for one column."""
    value = row.get(name)
    if _is_conversation(value):
        images = row_images(row.get(f"{name}_images"), f"{where}_images", reader)
    else:
        images, value = row_images(value, where, reader), prompt
        if not images or prompt is None:
            raise DataError(
                f"a conversation at {where}",
                f"{row.get(name)!r:.80}",
                "give a list of {role, content} messages, or images, and a prompt that they are shown with",
            )
    messages = messages_of(value, where, images)
    return with_leading(messages, images, where)


def _is_conversation(value: object) -> bool:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(entry, Mapping) and "role" in entry for entry in value)
    )


def as_json(messages: Sequence[Message]) -> dict[str, Any]:
    """A conversation in the format of a task column: messages with their images in the order of their `<image>`
    marks."""
    return {
        "conversation": [
            {
                **message.entry(),
                "images": [[item.mime, base64.b64encode(item.data).decode()] for item in message.media],
            }
            for message in messages
        ]
    }
