"""Resolves Hugging Face ids in the local cache, in fields that hold paths. Nothing is downloaded."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from trivium.config import config_path
from trivium.foundation.errors import DataError

_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
"""`owner/name`, or the name of an old model without an owner."""

Kind = Literal["model", "dataset"]


def _local_path(kind: Kind) -> Callable[[str], str]:
    def local(name: str) -> str:
        path = config_path(name)
        if path.exists() or _ID.fullmatch(name) is None:
            return str(path)
        return _cached(name, kind) or name

    return local


ModelPath = Annotated[str, AfterValidator(_local_path("model"))]
"""A field with a model directory, or a Hugging Face id whose files are in the local cache. Validation replaces both by
the absolute path of the directory; an id that the cache lacks stays as it is, for a later error (`absence`)."""

DatasetPath = Annotated[str, AfterValidator(_local_path("dataset"))]
"""A field with a dataset directory or id, as `ModelPath`."""


def _cached(name: str, kind: Kind) -> str | None:
    """The directory of the newest downloaded version. None without one, or if it lacks weights or data files."""
    from huggingface_hub import snapshot_download  # slow to import, and rarely needed
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, repo_type=kind, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    patterns = ("*.safetensors", "*.bin") if kind == "model" else ("**/*",)
    files = [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
    return str(folder) if files else None


def source_of(name_or_path: str | Path, options: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """(name, options) for from_pretrained. A directory is read without network access. Raises DataError for a missing
    directory."""
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return str(path), {"local_files_only": True, **options}
    name = str(name_or_path)
    if isinstance(name_or_path, Path) or name.startswith((".", "~", "/")) or name.count("/") > 1:
        raise DataError(f"load from {name}", "no such directory", "give a model directory, or a hub id `owner/name`")
    return name, options


def absence(path: str | Path, kind: Kind = "model") -> tuple[str, str]:
    """The parts `found` and `do` of an error about a path without a model or dataset."""
    if Path(path).is_dir():
        return "no config.json there", "give a Hugging Face model directory"
    if Path(path).is_absolute() or _ID.fullmatch(str(path)) is None:
        return "no such directory", f"give a {kind} directory on this machine, or a Hugging Face id `owner/name`"
    option = "" if kind == "model" else "--repo-type dataset "
    return (
        f"no such directory, and no complete {kind} of this id in the Hugging Face cache of this machine",
        f"download it once: `hf download {option}{path}`; or give a directory",
    )
