"""One Ray instance for all tests of a test process."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.ray_parts import ray_instance
from tests.e2e.trinity_savers import Start, forked, on_ray


@pytest.fixture(scope="session")
def ray_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Ray instance with four CPUs that only tests use."""
    with ray_instance(tmp_path_factory.mktemp("ray")) as address:
        yield address


@pytest.fixture(scope="module")
def connected(ray_address: str) -> Iterator[None]:
    """This process is connected to the instance."""
    import ray

    ray.init(ray_address, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


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
