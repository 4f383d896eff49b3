"""Images in rows and messages: paths, bytes, PIL images, base64 and data URIs, as columns or as parts of messages.

Nothing is fetched: an http(s) URL is refused. Paths are confined to one folder.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from trivium.foundation.errors import DataError
from trivium.types import IMAGE, Media, Message

_SIGNATURES = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF8", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\x00", "image/tiff"),
    (b"MM\x00*", "image/tiff"),
)
_SOURCES = ("image_url", "image", "bytes", "path", "url", "base64")
"""The keys that hold an image in a mapping, in the order in which they are read."""
_OTHER_MEDIA = ("video", "audio")
Reader = Callable[[object, str], Media]
"""(value, its location) -> the image."""


def common_folder(files: Sequence[str | Path]) -> Path:
    """The innermost folder that holds all files."""
    return Path(os.path.commonpath([Path(file).expanduser().resolve().parent for file in files]))


def image_reader(root: Path | None) -> Reader:
    """Reads images; paths are relative to `root` and confined to it. Without a root, paths are refused."""

    def read(value: object, where: str) -> Media:
        return read_image(value, where, root)

    return read


def read_image(value: object, where: str, root: Path | None = None) -> Media:
    """Reads an image from bytes, a PIL image, a path, base64, a data URI, or a mapping with one of them
    (`datasets.Image`, a part of an OpenAI message, {"image": ...}).

    Raises DataError for anything else, including an http(s) URL.
    """
    if isinstance(value, Media):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return _media(bytes(value), where)
    if isinstance(value, Path):
        return _file(str(value), where, root)
    if isinstance(value, str):
        return _text(value, where, root)
    if isinstance(value, Mapping):
        _refuse_other_media(value, where)
        source = next((value[key] for key in _SOURCES if value.get(key) is not None), None)
        if source is not None:
            return read_image(source, where, root)
    save = getattr(value, "save", None)
    if save is not None and hasattr(value, "getbands"):  # a PIL image, without importing it
        file = io.BytesIO()
        try:
            save(file, "PNG")
        except Exception as error:  # errors of the decoder, which reads the pixels lazily
            raise DataError(f"an image at {where}", str(error), "give a whole image, in RGB") from error
        return Media("image/png", file.getvalue())
    raise DataError(
        f"an image at {where}",
        f"{type(value).__name__} {value!r:.60}",
        "give its bytes, a path, base64, a data URI, a PIL image, or a mapping with `bytes` or `path`",
    )


def _text(value: str, where: str, root: Path | None) -> Media:
    """Reads an image from a data URI, base64 or a path."""
    scheme = value[:16].partition(":")[0].lower()
    if scheme in ("http", "https", "ftp", "s3", "gs", "hf", "hdfs"):
        raise DataError(
            f"an image at {where}",
            f"the URL {value:.80}: images are not downloaded",
            "download it, and give a path, its bytes or a data URI",
        )
    if scheme == "data":
        return _data_uri(value, where)
    data = _base64(value)
    # A short path may be base64 as well: what counts is that the bytes are an image.
    if data is not None and _mime(data) is not None:
        return _media(data, where)
    return _file(os.fsdecode(unquote_to_bytes(value[7:])) if value.startswith("file://") else value, where, root)


def _data_uri(value: str, where: str) -> Media:
    header, comma, body = value[5:].partition(",")
    mime, *options = header.split(";")
    data = _base64(body) if "base64" in options else unquote_to_bytes(body)
    if not comma or not data:
        raise DataError(f"an image at {where}", f"the data URI {value:.60}", "write data:image/png;base64,...")
    if mime and not mime.lower().startswith("image/"):
        raise DataError(
            f"an image at {where}", f"a data URI of {mime}", "images are supported, videos and sound are not"
        )
    return _media(data, where)


def _base64(text: str) -> bytes | None:
    """The bytes; None if the text is not base64."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        return None


def _file(name: str, where: str, root: Path | None) -> Media:
    """Reads a file inside the folder `root`."""
    if root is None:
        raise DataError(
            f"an image at {where}",
            f"the path {name!r:.120}, but no folder for relative paths is known",
            "set image_root of the taskset to that folder, or give the image's bytes",
        )
    folder = root.resolve()
    try:
        path = (folder / name).resolve()
        if not path.is_relative_to(folder):
            raise DataError(
                f"the image {name!r:.120} at {where}",
                f"it is outside {folder}",
                "put it there, or set image_root of the taskset to the folder of the images",
            )
        if not path.is_file():
            raise DataError(f"the image {name!r:.120} at {where}", f"no such file in {folder}", "correct the path")
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # a NUL in the path, or too long a path
        if isinstance(error, DataError):
            raise
        raise DataError(f"the image {name!r:.120} at {where}", str(error), "correct the path") from error
    return _media(data, where)


def _media(data: bytes, where: str) -> Media:
    mime = _mime(data)
    if mime is None:
        raise DataError(
            f"an image at {where}",
            f"{len(data)} bytes that begin with {data[:8]!r}: not PNG, JPEG, GIF, WebP, BMP or TIFF",
            "give the bytes of an image file",
        )
    return Media(mime, data)


def _mime(data: bytes) -> str | None:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((mime for signature, mime in _SIGNATURES if data.startswith(signature)), None)


def _refuse_other_media(value: Mapping[Any, Any], where: str) -> None:
    named = next((kind for kind in _OTHER_MEDIA if any(kind in str(key) and value[key] for key in value)), None)
    kind = named or next((kind for kind in _OTHER_MEDIA if kind in str(value.get("type", ""))), None)
    if kind is not None:
        raise DataError(
            f"an image at {where}",
            f"a part with {kind}",
            "images are supported, videos and sound are not: leave it out",
        )


# --------------------------------------------------------------------------- messages


def read_content(content: object, where: str, reader: Reader, images: list[Media] | None = None) -> Message | None:
    """The content of a message, with its media, as a message without a role; None if it is neither text nor a list of
    parts.

    `images` are the images of the row. An empty part `{"type": "image"}` and each `<image>` in a text take the next of
    them. None: `<image>` is text.
    """
    if isinstance(content, str):
        return Message("", content, tuple(_taken(images, content.count(IMAGE), where)))
    if not isinstance(content, list | tuple):
        return None
    texts: list[str] = []
    media: list[Media] = []
    for number, entry in enumerate(content):
        part = {key: value for key, value in entry.items() if value is not None} if isinstance(entry, Mapping) else None
        if part is None:
            return None
        here = f"{where}[{number}]"
        kind = part.get("type")
        if kind == "text" or (kind is None and set(part) == {"text"}):
            if not isinstance(part.get("text"), str):
                return None
            media += _taken(images, part["text"].count(IMAGE), here)
            texts.append(part["text"])
        elif kind == "image" and not any(key in part for key in _SOURCES):
            media += _taken([] if images is None else images, 1, here)
            texts.append(IMAGE)
        else:
            if kind not in ("image", "image_url", "input_image", None):
                _refuse_other_media(part, here)
                return None
            media.append(reader(part, here))
            texts.append(IMAGE)
    text = "".join(texts)
    if media and text.count(IMAGE) != len(media):
        raise DataError(
            f"the text of a message with images at {where}",
            f"it contains {IMAGE!r}, which marks the place of an image",
            "remove it from the text",
        )
    return Message("", text, tuple(media))


def row_images(value: object, where: str, reader: Reader) -> list[Media]:
    """The images in a column of a row: one, several or none."""
    if value is None:
        return []
    values = value if isinstance(value, list | tuple) else [value]
    return [reader(item, f"{where}[{number}]") for number, item in enumerate(values)]


def with_leading(messages: tuple[Message, ...], images: Sequence[Media], where: str) -> tuple[Message, ...]:
    """Puts the remaining images of a row before the text of the first user message.

    Raises DataError if the messages mark images but not all of them.
    """
    if not images:
        return messages
    first = next((number for number, message in enumerate(messages) if message.role == "user"), None)
    if first is None or any(IMAGE in message.content for message in messages if message.media):
        raise DataError(
            f"a mark for each image of {where}",
            f"the prompt marks fewer: {len(images)} image(s) are left",
            f"mark the place of each with {IMAGE}, or of none (they precede the user's first text)",
        )
    message = messages[first]
    pictured = Message(message.role, message.content, (*images, *message.media))
    return (*messages[:first], pictured, *messages[first + 1 :])


def portable(value: object) -> object:
    """A value for JSON: images (bytes, PIL) in it become data URIs, the rest is unchanged."""
    if isinstance(value, Mapping):
        if isinstance(value.get("bytes"), bytes):
            return portable(value["bytes"])
        return {key: portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [portable(item) for item in value]
    if isinstance(value, Media) or (isinstance(value, bytes) and _mime(value)) or hasattr(value, "getbands"):
        media = read_image(value, "")
        return f"data:{media.mime};base64,{base64.b64encode(media.data).decode()}"
    return value


def _taken(images: list[Media] | None, count: int, where: str) -> Sequence[Media]:
    """Removes and returns the next images of a row."""
    if images is None:
        return ()
    if count > len(images):
        raise DataError(
            f"an image for each {IMAGE} at {where}",
            f"{count} marked there, and {len(images)} image(s) of the row left",
            "give the row as many images as its prompt marks",
        )
    next_images, images[:] = images[:count], images[count:]
    return next_images
