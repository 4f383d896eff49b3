"""Saved states on disk: a directory each, complete or absent, under the names of its model, its kind and itself."""

from __future__ import annotations

import json
import logging
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from trivium.foundation.atomic import MANIFEST, atomic_write, commit, fsync, make_directories, staging_directory
from trivium.foundation.errors import DataError
from trivium.serving.bodies import RequestError, bad_request

_log = logging.getLogger("trivium")

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""Part of a path -> the kind of checkpoint as the SDK names it."""
SNAPSHOT = "snapshot"
"""The kind of sampler weights without a name: they go with their session and are not listed."""
_SCHEME, _INFO, _MODEL = "tinker://", "checkpoint.json", "model.json"
_READY, _REPLACED = ".ready", ".replaced"
"""What a hidden directory ends with: a complete state before it gets its name, and one that has lost its name to it."""
_NAME, _MODEL_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}"), re.compile(r"[0-9a-f]{32}:train:[0-9]{1,16}")


@dataclass(frozen=True)
class SavedState:
    """A saved state, or the place of one."""

    model_id: str
    kind: str
    name: str
    directory: Path
    id: str
    """Of this save: another one under the same name has another."""
    info: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)
    """The rest of what its directory says of it."""

    @property
    def path(self) -> str:
        """The path by which clients name it."""
        return f"{_SCHEME}{self.model_id}/{self.kind}/{self.name}"

    def row(self) -> dict[str, Any]:
        """The state as the SDK lists it."""
        name = {"checkpoint_id": f"{self.kind}/{self.name}", "checkpoint_type": KINDS[self.kind]}
        return {**name, "tinker_path": self.path, "public": False, **self.info}

    def check(self) -> None:
        """Raises DataError if the state was deleted, or replaced by another one of its name."""
        try:
            there = json.loads((self.directory / _INFO).read_text(encoding="utf-8"))["id"]
        except OSError:
            there = None
        if there != self.id:
            found = "they were deleted, or newer ones have replaced them"
            raise DataError("weights of a sampler", found, "create a new SamplingClient")


class SavedStates:
    """All saved states of a service. Its methods may run in several threads."""

    def __init__(self, root: Path) -> None:
        """Removes what a killed service has left: unfinished states, those without a name, and those whose time is
        over."""
        self._root, self._renaming = root, threading.Lock()
        make_directories(root)
        for old in root.glob(f"*/*/.*{_REPLACED}"):  # a save was killed while it replaced this state
            final = old.with_name(old.name.removesuffix(_REPLACED)[1:])
            shutil.rmtree(old) if final.exists() else old.rename(final)
        for unnamed in root.glob(f"*/{SNAPSHOT}"):
            shutil.rmtree(unnamed)
        for directory in [each for each in root.glob("*/*/*") if each.is_dir()]:
            if directory.name.startswith(".") or not (directory / MANIFEST).is_file():
                _log.warning("%s is unfinished: it is removed", directory)
                shutil.rmtree(directory)
        for model in root.iterdir():
            self.of(model.name)

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

    def runs(self) -> list[dict[str, Any]]:
        """All models as the SDK lists training runs, newest first."""
        models = [each.parent.name for each in self._root.glob(f"*/{_MODEL}")]
        return sorted(map(self.run, models), key=lambda run: run["last_request_time"], reverse=True)

    def run(self, model_id: str) -> dict[str, Any]:
        """A model as the SDK shows a training run. Raises RequestError (404) for an unknown one."""
        info, states = self.model(model_id), [saved.row() for saved in self.of(model_id)]
        newest = {row["checkpoint_type"]: row for row in states}
        last = {"last_checkpoint": newest.get("training"), "last_sampler_checkpoint": newest.get("sampler")}
        created = datetime.fromtimestamp(info.pop("created", 0), UTC).isoformat()
        when = max([created, *(row["time"] for row in states)])
        return {**info, **last, "training_run_id": model_id, "model_owner": "local", "last_request_time": when}

    def place(self, model_id: str, kind: str, name: str, *, overwrite: bool) -> SavedState:
        """Where a new state goes. Raises RequestError for a name that cannot be one, or that is taken."""
        saved = SavedState(model_id, kind, name, self._root / model_id / kind / name, uuid.uuid4().hex)
        do = "a name has up to 128 letters, digits, dots, dashes and underscores, and does not begin with a dot"
        if not _NAME.fullmatch(name):
            raise bad_request("path", f"a checkpoint named {name[:80]!r}", "no such name", do)
        if saved.directory.exists() and not overwrite:
            raise bad_request("path", f"the checkpoint {saved.path}", "it exists", "pass overwrite, or another name")
        return saved

    def save(self, saved: SavedState, write: Callable[[Path], object], ttl_s: int | None, metadata: Any = None) -> None:
        """Writes a state: complete, or absent after an error or a kill. One that it replaces stays until then."""
        final, now = saved.directory, datetime.now(UTC)
        staging = staging_directory(final)
        ready, old = (final.with_name(f".{saved.name}{end}") for end in (_READY, _REPLACED))
        try:
            write(staging)
            size = sum(file.stat().st_size for file in staging.rglob("*") if file.is_file())
            expires = None if ttl_s is None else (now + timedelta(seconds=ttl_s)).isoformat()
            info = {"time": now.isoformat(), "expires_at": expires, "user_metadata": metadata, "size_bytes": size}
            (staging / _INFO).write_text(json.dumps({"id": saved.id, **info}) + "\n", encoding="utf-8")
            commit(staging, ready, 0)
            with self._renaming:
                if final.exists():
                    shutil.rmtree(old, ignore_errors=True)
                    final.rename(old)
                ready.rename(final)
        except BaseException:
            with self._renaming:
                if old.exists() and not final.exists():
                    old.rename(final)
            for unfinished in (staging, ready):
                shutil.rmtree(unfinished, ignore_errors=True)
            raise
        fsync(final.parent)
        shutil.rmtree(old, ignore_errors=True)

    def open(self, path: str) -> SavedState:
        """The state of a path. Raises RequestError (404) if there is none."""
        parts = path.removeprefix(_SCHEME).split("/")
        if len(parts) == 3 and _MODEL_ID.fullmatch(parts[0]):
            states = self.of(parts[0], (parts[1],)) if parts[1] in (*KINDS, SNAPSHOT) else ()
            saved = next((each for each in states if each.name == parts[2]), None)
            if saved is not None:
                return saved
        do = "name one that save_state or save_weights_for_sampler returned"
        raise RequestError(404, f"the checkpoint {path[:120]!r}", "no such checkpoint here", do, code="no_checkpoint")

    def of(self, model_id: str, kinds: Iterable[str] = KINDS) -> list[SavedState]:
        """The states of a model, oldest first. Removes those whose time is over."""
        states, now = list[SavedState](), datetime.now(UTC)
        with self._renaming:
            for file in [file for kind in kinds for file in (self._root / model_id / kind).glob(f"[!.]*/{MANIFEST}")]:
                at = file.parent
                info = json.loads((at / _INFO).read_text(encoding="utf-8"))
                states.append(SavedState(model_id, at.parent.name, at.name, at, info.pop("id"), info))
        over = [each for each in states if (end := each.info["expires_at"]) and datetime.fromisoformat(end) < now]
        for saved in over:
            self.delete(saved)
        return sorted((each for each in states if each not in over), key=lambda saved: saved.info["time"])

    def delete(self, saved: SavedState) -> None:
        """Removes a state: at once by its name, then its files."""
        removed = saved.directory.with_name(f".{saved.name}.{saved.id}")
        with self._renaming:
            if not saved.directory.exists():
                return
            saved.directory.rename(removed)
        shutil.rmtree(removed)

    def delete_unnamed(self, model_id: str) -> None:
        """Removes the states of a model that have no name."""
        for saved in self.of(model_id, (SNAPSHOT,)):
            self.delete(saved)
