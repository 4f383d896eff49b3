"""Media in the database of a buffer that several processes share: one row for each."""

from __future__ import annotations

import sqlalchemy as sa

from trivium.buffers.media import MediaCache, check_media
from trivium.buffers.sql.database import Database
from trivium.buffers.sql.slot_tables import MEDIA
from trivium.foundation.errors import DataError
from trivium.types import Media


class MediaRows:
    """Stores the media of one buffer's groups in its database (`trivium.buffers.media.MediaStore`)."""

    def __init__(self, database: Database, buffer: str) -> None:
        self._database, self._buffer = database, buffer
        self._stored: set[str] = set()
        self._cache = MediaCache()

    def keep(self, media: Media) -> None:
        if media.sha256 in self._stored:
            return
        if not media.data:
            self.load(media.sha256)  # raises DataError unless the bytes are stored already
        else:
            check_media(media.sha256, media.data, f"store the media {media.sha256[:12]}", "roll its group out again")
            row = {"buffer": self._buffer, "sha256": media.sha256, "data": media.data}
            self._database.transact(lambda connection: connection.execute(self._database.insert(MEDIA), row))
        self._stored.add(media.sha256)

    def load(self, sha256: str) -> bytes:
        data = self._cache.get(sha256)
        if data is None:
            mine = (MEDIA.c.buffer == self._buffer, MEDIA.c.sha256 == sha256)
            query = sa.select(MEDIA.c.data).where(*mine)
            data = self._database.read(lambda connection: connection.execute(query).scalar_one_or_none())
            place = f"the media {sha256[:12]} of the buffer {self._buffer}"
            if data is None:
                raise DataError(place, "no such row", "run again in another run.dir: its groups refer to it")
            check_media(sha256, data, place, "run again in another run.dir")
            self._cache.put(sha256, data)
        return data

    def forget(self) -> None:
        """Empties the set of media that are known to be stored, since their rows may have been deleted."""
        self._stored.clear()
