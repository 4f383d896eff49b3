"""Messages in the format of OpenAI's chat completions, and the choice in a response."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trivium.clients.http import EndpointClient
from trivium.foundation.errors import described
from trivium.types import IMAGE, openai_parts

if TYPE_CHECKING:
    from trivium.types import Media, Message

_BASE_URL = "name the base URL of an endpoint for OpenAI's clients in urls, with its /v1"


def image_part(item: Media) -> dict[str, Any]:
    """An image as a part of a message's content."""
    data = base64.b64encode(item.data).decode("ascii")
    return {"type": "image_url", "image_url": {"url": f"data:{item.mime};base64,{data}"}}


def chat_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """A conversation. Images are at their places in the text, or before it if it marks none."""
    parts = openai_parts(messages)
    return [{"role": m.role, "content": _content(m), **more} for m, more in zip(messages, parts, strict=True)]


def _content(message: Message) -> str | list[dict[str, Any]]:
    if not message.media:
        return message.content
    texts = message.content.split(IMAGE)
    if len(texts) != len(message.media) + 1:  # the text does not mark the place of each image
        texts = [*[""] * len(message.media), message.content]
    parts: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        parts += [image_part(message.media[number - 1])] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def read_choice(client: EndpointClient, url: str, value: Any) -> dict[str, Any]:
    """The first choice of a response. Raises MalformedResponse."""
    try:
        choice = value["choices"][0]
        choice.keys()  # raises AttributeError unless it is a mapping
    except (LookupError, TypeError, AttributeError):
        raise client.malformed(url, f"no choices[0] in {described(value)}", _BASE_URL) from None
    return choice


def read_text(client: EndpointClient, url: str, value: Any) -> tuple[dict[str, Any], str]:
    """(the first choice, the text of its message). Raises MalformedResponse."""
    try:
        choice = value["choices"][0]
        text = choice["message"]["content"]
        choice.keys()
    except (LookupError, TypeError, AttributeError):
        found = f"no choices[0].message.content in {described(value)}"
        raise client.malformed(url, found, _BASE_URL) from None
    if not isinstance(text, str):
        raise client.malformed(url, f"content: {described(text)}, expected text", _BASE_URL)
    return choice, text
