from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doors.e2e.trinity_savers import Start, forked, on_ray


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "notes").mkdir()
    return tmp_path


@pytest.fixture(params=["file", "ray"])
def start(request: pytest.FixtureRequest, directory: Path) -> Iterator[Start]:
    """In processes that are connected to Ray, as this one is then, or in none that are."""
    on = on_ray(request.getfixturevalue("ray_address"), directory) if request.param == "ray" else forked(directory)
    with on as starter:
        yield starter
