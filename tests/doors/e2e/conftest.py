from pathlib import Path

import pytest


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "notes").mkdir()
    return tmp_path
