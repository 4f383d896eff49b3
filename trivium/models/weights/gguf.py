"""Models in GGUF files, whose weights are in few bits: converted once into plain Hugging Face directories.

transformers reads such a file only whole, and refuses to save what it read as a model. A directory with its weights in
float32 is what every other part of the system reads.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from trivium.foundation.atomic import MANIFEST, commit, make_directories, staging_directory, writing
from trivium.foundation.board import locked
from trivium.foundation.errors import DataError, MissingPackage

_log = logging.getLogger("trivium")

SUFFIX = ".gguf"
_CONVERTED_S = 1800.0
"""How long another process may take to convert a file."""


def converted(file: Path) -> Path:
    """The Hugging Face directory of the model in a GGUF file: float32 weights, the tokenizer with its chat template,
    and both configs. It is in the user's cache directory, under the name and a hash of the file, and is written by the
    first call.

    Raises MissingPackage without the packages that read the file, DataError for a file that transformers cannot read.
    """
    if not file.is_file():
        raise DataError(f"the model {file}", "no such file", "correct the path")
    with open(file, "rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    directory = _cache() / f"{file.stem}-{digest[:12]}"
    if (directory / MANIFEST).is_file():
        return directory
    make_directories(directory.parent)
    with writing(directory), locked(directory, _CONVERTED_S):  # ranks read the same config at the same time
        if not (directory / MANIFEST).is_file():
            _log.warning("converting %s once, into %s", file.name, directory)
            staging = staging_directory(directory)
            _convert(file, staging)
            commit(staging, directory, step=0)
    return directory


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "trivium" / "models"


def _convert(file: Path, directory: Path) -> None:
    """Writes the model and the tokenizer of `file` to `directory`."""
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise MissingPackage(package, "gguf", f"read a model from {file}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        with _parsed_once():
            tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
            model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **source)
    # What transformers and gguf raise for unknown formats, and for a file that is cut off.
    except (NotImplementedError, ValueError, KeyError, struct.error) as error:
        raise DataError(
            f"the model in {file}",
            f"transformers cannot read it: {type(error).__name__}: {error}",
            "give a whole file in another quantization (Q4_0, Q4_K, Q6_K, Q8_0, F16), or a Hugging Face directory",
        ) from error
    # The weights are plain numbers now, but save_pretrained refuses a model whose config names a quantization.
    config: Any = model.config
    del config.quantization_config
    with torch.device("meta"):  # no random weights, which are replaced
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    plain.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Within it, transformers parses a file once, makes one table of tensor names for a model, and shows no progress.

    It parses the file for the tokenizer, for the config and for the weights, and makes the table for every tensor: 18
    of 24 s for a model of 135 million parameters.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils

    replaced: list[tuple[Any, str, Any]] = [
        (gguf, "GGUFReader", cache(gguf.GGUFReader)),
        (gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
        (modeling_gguf_pytorch_utils, "tqdm", _without_progress),  # called whatever transformers' setting for bars
    ]
    originals = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    try:
        for module, name, value in replaced:
            setattr(module, name, value)
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)


def _without_progress(items: Any, **_: object) -> Any:
    return items
