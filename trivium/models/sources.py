"""Where a policy comes from: a section of the config that becomes a plain Hugging Face directory on disk."""

from __future__ import annotations

from pathlib import Path

from trivium.config import ConfigPath, Plugin
from trivium.errors import DataError


class HuggingFaceModel:
    """A model and tokenizer that are on disk already."""

    class Config(Plugin):
        kind: str = "hf"
        path: ConfigPath
        """Directory with config.json, weights and tokenizer."""

    def __init__(self, config: Config, *, seed: int = 0) -> None:
        self.config = config

    def materialize(self, directory: Path) -> Path:
        """The directory that holds the model; `directory` (inside the run) is for sources that build one."""
        path = Path(self.config.path)
        if not (path / "config.json").is_file():
            raise DataError(
                f"load the model {path}",
                "no config.json there" if path.is_dir() else "no such directory",
                "give model.path a Hugging Face model directory on this machine",
            )
        return path
