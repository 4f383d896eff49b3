"""Hugging Face tokenizers, with the two corrections that training needs."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from trivium.clients.hub import source_of
from trivium.foundation.errors import DataError
from trivium.models.vision.processor import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GEMMA2_END = "<end_of_turn>"

# transformers is imported inside the functions, so that reading a config that names a tiny model does not import torch.


def hf_tokenizer(
    name_or_path: str | Path, correct_pad_token: bool = True, correct_gemma2: bool = True, **kwargs: object
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory (without access to a hub) or of a hub id.

    A missing pad token becomes the end-of-sequence token; the instruction-tuned Gemma 2 ends its turns with
    `<end_of_turn>`, which becomes the end-of-sequence token. Both corrections warn. `kwargs` are passed to
    `AutoTokenizer.from_pretrained`. Raises DataError for a missing directory.
    """
    from transformers import AutoTokenizer

    name, options = source_of(name_or_path, kwargs)
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


def _is_gemma2_chat(name: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Checks the published name of the model, or the files of a local directory."""
    if _GEMMA2_END not in tokenizer.get_vocab():
        return False
    named = re.search(r"gemma-2-\d+b-it", name) is not None
    is_gemma2 = read_json(Path(name) / "config.json").get("model_type") == "gemma2"
    return named or (is_gemma2 and _GEMMA2_END in str(tokenizer.chat_template))
