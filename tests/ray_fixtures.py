"""One Ray instance for files that run one after the other in a test process: fixtures of `e2e` and of `doors`."""

from collections.abc import Generator, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.e2e.ray_parts import ray_instance

_instance = ExitStack()
_address = ""


@pytest.fixture(scope="module")
def ray_address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of a Ray instance with four CPUs that only tests use."""
    global _address
    if not _address:
        _address = _instance.enter_context(ray_instance(tmp_path_factory.mktemp("ray")))
    return _address


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Function, nextitem: pytest.Function | None) -> Generator[None, Any, None]:
    """Ends the instance before a file that does not use it: an idle one takes 5 % of a core, and memory."""
    global _address
    yield
    if _address and (nextitem is None or (nextitem.path != item.path and not _is_on_ray(nextitem))):
        _address = ""
        _instance.close()


def _is_on_ray(item: pytest.Function) -> bool:
    """Whether a test of the item's file uses the instance."""
    tests = (other for other in item.session.items if other.path == item.path)
    return any("ray_address" in getattr(test, "fixturenames", ()) for test in tests)


@pytest.fixture(scope="module")
def connected(ray_address: str) -> Iterator[None]:
    """This process is connected to the instance."""
    import ray

    ray.init(ray_address, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()
