"""Tokenizers and processors as Hugging Face keeps them, with the two corrections that training needs."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trivium.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GEMMA2_END = "<end_of_turn>"
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")

# transformers is imported inside the functions: reading a config that names a tiny model must not wait for torch.


def hf_tokenizer(
    name_or_path: str | Path, correct_pad_token: bool = True, correct_gemma2: bool = True, **kwargs: object
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory (never asks a hub) or of a hub id.

    A missing pad token becomes the end-of-sequence token; the instruction-tuned Gemma 2 ends its turns with
    `<end_of_turn>`, which becomes the end-of-sequence token. Either correction warns. `kwargs` go to
    `AutoTokenizer.from_pretrained`. Raises DataError for a directory that is not there.
    """
    from transformers import AutoTokenizer

    name, options = _source(name_or_path, kwargs)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(name, **options)
    if correct_gemma2 and tokenizer.eos_token != _GEMMA2_END and _is_gemma2_chat(name, tokenizer):
        tokenizer.eos_token = _GEMMA2_END
        warnings.warn(f"{name}: end of sequence is now {_GEMMA2_END}, which ends Gemma 2's turns", stacklevel=2)
    if correct_pad_token and tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise DataError(
                f"a pad token for the tokenizer {name}",
                "it has neither a pad nor an end-of-sequence token",
                "pass pad_token='...' or correct_pad_token=False",
            )
        tokenizer.pad_token = tokenizer.eos_token
        warnings.warn(f"{name}: no pad token; padding is now the end of sequence {tokenizer.eos_token}", stacklevel=2)
    return tokenizer


def hf_processor(name_or_path: str | Path, **kwargs: object) -> Any | None:
    """The processor of a vision or audio model; None only where the model has none.

    Whatever goes wrong while a processor is loaded is raised: a vision model must not quietly become a text model.
    """
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    name, options = _source(name_or_path, kwargs)
    directory = Path(name)
    if directory.is_dir() and not _may_have_processor(directory):
        return None
    processor = AutoProcessor.from_pretrained(name, **options)
    if not isinstance(processor, PreTrainedTokenizerBase):
        return processor
    orphans = [file for file in _PROCESSOR_FILES if (directory / file).is_file()]
    if orphans:
        raise DataError(
            f"the processor of {name}",
            f"{', '.join(orphans)} is there, but names no class that this transformers version knows",
            "add `processor_class` to it, or install the transformers version the model asks for",
        )
    return None  # AutoProcessor falls back to the tokenizer of a text model


def _source(name_or_path: str | Path, kwargs: dict[str, object]) -> tuple[str, dict[str, Any]]:
    """(name, options) for from_pretrained; a directory is never looked up anywhere else."""
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return str(path), {"local_files_only": True, **kwargs}
    name = str(name_or_path)
    if isinstance(name_or_path, Path) or name.startswith((".", "~", "/")) or name.count("/") > 1:
        raise DataError(f"load from {name}", "no such directory", "give a model directory, or a hub id `owner/name`")
    return name, kwargs


def _may_have_processor(directory: Path) -> bool:
    """Whether anything in the directory could name a processor."""
    if any((directory / file).is_file() for file in ("config.json", *_PROCESSOR_FILES)):
        return True
    return "processor_class" in _json(directory / "tokenizer_config.json")


def _is_gemma2_chat(name: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """By name, as the model is published, or by what a local directory says about itself."""
    if _GEMMA2_END not in tokenizer.get_vocab():
        return False
    named = re.search(r"gemma-2-\d+b-it", name) is not None
    is_gemma2 = _json(Path(name) / "config.json").get("model_type") == "gemma2"
    return named or (is_gemma2 and _GEMMA2_END in str(tokenizer.chat_template))


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
