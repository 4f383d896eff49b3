"""Remote copies of checkpoints, by fsspec URL. The only module that uses fsspec."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trivium.foundation.atomic import MANIFEST, manifest_files
from trivium.foundation.concurrency import Threads
from trivium.foundation.errors import ConfigError, RunDirError


class RemoteDirectory:
    """Copies of complete directories. The manifest is copied last, so a copy with a manifest is complete.

    A newer directory of the same name replaces a copy. Copies are never removed.
    """

    def __init__(self, url: str, deadline_s: float) -> None:
        """`deadline_s` bounds each `copy_missing`. Raises ConfigError for a URL that fsspec cannot open."""
        # Imported only if a run names a remote directory, because the import is slow.
        import fsspec  # pyright: ignore[reportMissingTypeStubs]

        self.url, self._deadline_s = url, deadline_s
        self._threads = Threads(1, "trivium-copy")
        try:
            opened: tuple[Any, str] = fsspec.url_to_fs(url)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        except (ValueError, ImportError) as error:
            raise ConfigError(
                f"copy checkpoints to {url}",
                str(error),
                "use a URL that fsspec supports (file://, s3://, gs://, hdfs://, ...), its package installed",
            ) from error
        self._files, self._root = opened

    async def copy_missing(self, folders: Sequence[Path]) -> None:
        """Copies the complete directories that have no equal copy yet. Raises RunDirError if that fails."""

        def copy() -> None:
            for folder in folders:
                if not self._holds(folder):
                    self._copy(folder)

        try:
            async with asyncio.timeout(self._deadline_s):
                await self._threads.run(copy)
        except Exception as error:  # each kind of storage raises its own errors
            raise RunDirError(
                f"copy checkpoints to {self.url}",
                f"{type(error).__name__}: {str(error) or f'it was not done within {self._deadline_s:.0f} s'}",
                "the copy is retried after the next save, and when the same command runs again",
            ) from error

    def _holds(self, folder: Path) -> bool:
        try:
            return self._files.cat_file(f"{self._root}/{folder.name}/{MANIFEST}") == (folder / MANIFEST).read_bytes()
        except FileNotFoundError:
            return False

    def _copy(self, folder: Path) -> None:
        target = f"{self._root}/{folder.name}"
        # First, so that a copy that is replaced only in part counts as absent.
        if self._files.exists(f"{target}/{MANIFEST}"):
            self._files.rm_file(f"{target}/{MANIFEST}")
        for name in (*manifest_files(folder), MANIFEST):
            self._files.makedirs(f"{target}/{name}".rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(folder / name), f"{target}/{name}")
