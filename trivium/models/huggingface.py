"""The model kind `hf`: a Hugging Face directory on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trivium.config import Plugin, RunConfig
from trivium.config.model_shape import ModelShape, read_shape
from trivium.errors import DataError, Problem
from trivium.models.hub import ModelPath, absence


class HuggingFaceModel:
    """A model and tokenizer that are on disk."""

    class Config(Plugin):
        kind: str = "hf"
        path: ModelPath
        """Directory with config.json, weights and tokenizer; or a Hugging Face id that `hf download` has put into the
        local cache: it becomes the directory of the version found there."""

        def problems(self, run: RunConfig, where: str) -> Iterator[Problem]:
            missing = missing_model_error(Path(self.path))
            if missing is not None:
                yield Problem(f"{where}.path", missing.asked, missing.found, missing.do)

        def shape(self) -> ModelShape:
            """Its sizes, by its config.json alone."""
            return read_shape(self.path)

    def __init__(self, config: Config, *, seed: int = 0) -> None:
        self.config = config

    def materialize(self, directory: Path) -> Path:
        """The directory that holds the model; `directory` (inside the run) is for sources that build one."""
        path = Path(self.config.path)
        missing = missing_model_error(path)
        if missing is not None:
            raise missing
        return path


def missing_model_error(path: Path) -> DataError | None:
    """The error for a directory without a model; None where it has a config.json."""
    if (path / "config.json").is_file():
        return None
    return DataError(f"load the model {path}", *absence(path))
