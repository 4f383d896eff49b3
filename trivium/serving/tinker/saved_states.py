"""Saved states on disk: a directory each, complete or absent, under the names of its model, its kind and itself."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from trivium.foundation.atomic import MANIFEST, atomic_write, commit, discard, make_directories, staging_directory
from trivium.serving.bodies import RequestError, bad_request

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""Part of a path -> the kind of checkpoint as the SDK names it."""
_SCHEME, _INFO, _MODEL, _REPLACED = "tinker://", "checkpoint.json", "model.json", ".replaced"
_NAME, _MODEL_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}"), re.compile(r"[0-9a-f]{32}:train:[0-9]{1,16}")


@dataclass(frozen=True)
class SavedState:
    """A saved state, or the place of one."""

    model_id: str
    kind: str
    name: str
    directory: Path

    @property
    def path(self) -> str:
        """The path by which clients name it."""
        return f"{_SCHEME}{self.model_id}/{self.kind}/{self.name}"

    def row(self) -> dict[str, Any]:
        """The state as the SDK lists it."""
        size = sum(file.stat().st_size for file in self.directory.rglob("*") if file.is_file())
        info = json.loads((self.directory / _INFO).read_text(encoding="utf-8"))
        name = {"checkpoint_id": f"{self.kind}/{self.name}", "checkpoint_type": KINDS[self.kind]}
        return {**name, "tinker_path": self.path, "size_bytes": size, "public": False, **info}


class SavedStates:
    """All saved states of a service."""

    def __init__(self, root: Path) -> None:
        self._root = root
        make_directories(root)
        for old in root.glob(f"*/*/.*{_REPLACED}"):  # a save was killed while it replaced this state
            final = old.with_name(old.name.removesuffix(_REPLACED)[1:])
            shutil.rmtree(old) if final.exists() else old.rename(final)
        for unfinished in root.glob("*/*/.*.writing"):
            shutil.rmtree(unfinished)

    def describe(self, model_id: str, info: Mapping[str, Any]) -> None:
        """Keeps what a new model is: its base and its adapter."""
        make_directories(self._root / model_id)
        atomic_write(self._root / model_id / _MODEL, json.dumps(info, indent=1) + "\n")

    def model(self, model_id: str) -> dict[str, Any]:
        """What a model is. Raises RequestError (404) for an unknown one."""
        file = self._root / model_id / _MODEL
        if not _MODEL_ID.fullmatch(model_id) or not file.is_file():
            raise RequestError(404, f"the model {model_id[:64]!r}", "no such model here", "create it first")
        return json.loads(file.read_text(encoding="utf-8"))

    def place(self, model_id: str, kind: str, name: str, *, overwrite: bool) -> SavedState:
        """Where a new state goes. Raises RequestError for a name that cannot be one, or that is taken."""
        saved = SavedState(model_id, kind, name, self._root / model_id / kind / name)
        do = "a name has up to 128 letters, digits, dots, dashes and underscores, and does not begin with a dot"
        if not _NAME.fullmatch(name):
            raise bad_request("path", f"a checkpoint named {name[:80]!r}", "no such name", do)
        if saved.directory.exists() and not overwrite:
            raise bad_request("path", f"the checkpoint {saved.path}", "it exists", "pass overwrite, or another name")
        return saved

    def save(self, saved: SavedState, write: Callable[[Path], object], ttl_s: int | None, metadata: Any = None) -> None:
        """Writes a state: complete, or absent if the process is killed. One that it replaces stays until then."""
        staging, now = staging_directory(saved.directory), datetime.now(UTC)
        write(staging)
        expires = None if ttl_s is None else (now + timedelta(seconds=ttl_s)).isoformat()
        info = {"time": now.isoformat(), "expires_at": expires, "user_metadata": metadata}
        (staging / _INFO).write_text(json.dumps(info) + "\n", encoding="utf-8")
        old = saved.directory.with_name(f".{saved.name}{_REPLACED}")
        if saved.directory.exists():
            saved.directory.rename(old)
        commit(staging, saved.directory, 0)
        if old.exists():
            shutil.rmtree(old)

    def open(self, path: str) -> SavedState:
        """The state of a path. Raises RequestError (404) if there is none."""
        parts = path.removeprefix(_SCHEME).split("/")
        if len(parts) == 3 and _MODEL_ID.fullmatch(parts[0]):
            saved = next((each for each in self.of(parts[0]) if [each.kind, each.name] == parts[1:]), None)
            if saved is not None:
                return saved
        do = "name one that save_state or save_weights_for_sampler returned"
        raise RequestError(404, f"the checkpoint {path[:120]!r}", "no such checkpoint here", do, code="no_checkpoint")

    def of(self, model_id: str) -> Iterator[SavedState]:
        """The states of a model, oldest first. Removes those whose time is over."""
        files = [file for kind in KINDS for file in (self._root / model_id / kind).glob(f"[!.]*/{MANIFEST}")]
        for file in sorted(files, key=lambda file: file.stat().st_mtime_ns):
            saved = SavedState(model_id, file.parent.parent.name, file.parent.name, file.parent)
            expires = saved.row()["expires_at"]
            if expires is not None and datetime.fromisoformat(expires) < datetime.now(UTC):
                discard(saved.directory)
            else:
                yield saved

    def delete(self, saved: SavedState) -> None:
        discard(saved.directory)
