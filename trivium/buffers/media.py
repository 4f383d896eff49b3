"""Stores of the media of rollouts. Each item is stored once, under its hash; records contain hashes, not bytes."""

from __future__ import annotations

import hashlib
import uuid
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Protocol

from trivium.foundation.atomic import writing
from trivium.foundation.errors import DataError
from trivium.types import Media

_CACHED_BYTES = 1 << 27


class MediaStore(Protocol):
    """Stores encoded bytes by their SHA-256."""

    def keep(self, media: Media) -> None:
        """Stores the bytes unless they are already stored. Raises DataError for media without bytes that are not
        stored."""
        ...

    def load(self, sha256: str) -> bytes:
        """The verified bytes. Raises DataError if they are missing or differ from what was stored."""
        ...


class MediaFiles:
    """A folder with one file for each of the media, named by its hash. A file is complete or absent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cache = MediaCache()

    @staticmethod
    def beside(records: Path) -> MediaFiles:
        """The media files for the records in a folder. All stages of a run share one folder of media."""
        return MediaFiles((records.parent if records.name.startswith("stage-") else records) / "media")

    def keep(self, media: Media) -> None:
        path = self.folder / media.sha256
        if path.is_file():
            return
        check_media(media.sha256, media.data, f"store the media {media.sha256[:12]}", "roll its group out again")
        # A unique name, since two threads or processes may store one image at the same time.
        staging = path.with_name(f".{media.sha256}.{uuid.uuid4().hex}")
        with writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            staging.write_bytes(media.data)
            staging.replace(path)

    def load(self, sha256: str) -> bytes:
        data = self._cache.get(sha256)
        if data is None:
            path = self.folder / sha256
            if not path.is_file():
                raise DataError(f"the media {path}", "no such file", "restore it: recorded rollouts refer to it")
            data = path.read_bytes()
            check_media(sha256, data, f"the media {path}", "restore the file")
            self._cache.put(sha256, data)
        return data


def check_media(sha256: str, data: bytes, asked: str, do: str) -> None:
    """Raises DataError if the bytes do not match the hash."""
    if hashlib.sha256(data).hexdigest() != sha256:
        raise DataError(asked, "its bytes do not match its hash", do)


class MediaCache:
    """Caches the bytes that were read last, so that the groups of a task share one copy."""

    def __init__(self) -> None:
        self._data: OrderedDict[str, bytes] = OrderedDict()
        self._size, self._lock = 0, Lock()

    def get(self, sha256: str) -> bytes | None:
        with self._lock:
            data = self._data.get(sha256)
            if data is not None:
                self._data.move_to_end(sha256)
            return data

    def put(self, sha256: str, data: bytes) -> None:
        with self._lock:
            if self._data.setdefault(sha256, data) is data:
                self._size += len(data)
            while self._size > _CACHED_BYTES:
                self._size -= len(self._data.popitem(last=False)[1])
