"""Remote copies of checkpoints, by fsspec URL. The only module that knows fsspec."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trivium.checkpoint.atomic import MANIFEST, manifest_files
from trivium.errors import ConfigError


class RemoteDirectory:
    """Copies of complete directories. A copy counts only once its manifest is there, which is copied last.

    A copy is replaced by a newer one of the same name, and never removed.
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
                f"copy checkpoints to {url}",
                str(error),
                "use a URL that fsspec knows (file://, s3://, gs://, hdfs://, ...), its package installed",
            ) from error
        self._files, self._root = opened

    def holds(self, folder: Path) -> bool:
        """Whether there is a complete and equal copy of a directory."""
        try:
            return self._files.cat_file(f"{self._root}/{folder.name}/{MANIFEST}") == (folder / MANIFEST).read_bytes()
        except FileNotFoundError:
            return False

    def copy(self, folder: Path) -> None:
        """Copies a complete directory. Raises what the storage raises; a copy that fails does not count."""
        target = f"{self._root}/{folder.name}"
        if self._files.exists(f"{target}/{MANIFEST}"):
            self._files.rm_file(f"{target}/{MANIFEST}")
        for name in (*manifest_files(folder), MANIFEST):
            self._files.makedirs(f"{target}/{name}".rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(folder / name), f"{target}/{name}")
