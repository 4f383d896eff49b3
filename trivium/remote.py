"""A directory elsewhere that sealed directories are copied to, by fsspec URL. The only place that knows fsspec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trivium.errors import ConfigError
from trivium.sealing import MANIFEST, sealed_files


class RemoteDirectory:
    """Copies of sealed directories. A copy counts by the same law: only once its manifest is there, which goes last.

    Nothing is removed there but what a newer copy of the same name replaces.
    """

    def __init__(self, url: str) -> None:
        """Raises ConfigError for a URL that fsspec cannot open."""
        # Imported where a run names a remote directory: it takes a moment.
        import fsspec  # pyright: ignore[reportMissingTypeStubs]

        self.url = url
        try:
            opened: tuple[Any, str] = fsspec.url_to_fs(url)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        except (ValueError, ImportError) as error:
            raise ConfigError(
                f"copy checkpoints to {url}", str(error),
                "use a URL that fsspec knows (file://, s3://, gs://, hdfs://, ...), its package installed",
            ) from error  # fmt: skip
        self._files, self._root = opened

    def holds(self, folder: Path) -> bool:
        """Whether the copy of a sealed directory is there, whole and the same."""
        try:
            return self._files.cat_file(f"{self._root}/{folder.name}/{MANIFEST}") == (folder / MANIFEST).read_bytes()
        except FileNotFoundError:
            return False

    def copy(self, folder: Path) -> None:
        """Copies a sealed directory. Raises whatever the storage raises; what was copied then does not count."""
        there = f"{self._root}/{folder.name}"
        if self._files.exists(f"{there}/{MANIFEST}"):
            self._files.rm_file(f"{there}/{MANIFEST}")
        for name in (*sealed_files(folder), MANIFEST):
            self._files.makedirs(f"{there}/{name}".rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(folder / name), f"{there}/{name}")
