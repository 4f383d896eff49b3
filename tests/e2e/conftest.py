"""One Ray instance for all tests of a test process."""

from collections.abc import Iterator

import pytest

from tests.e2e.ray_parts import ray_instance


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """The address of a Ray instance with four CPUs that only tests use."""
    with ray_instance() as address:
        yield address


@pytest.fixture(scope="module")
def connected(ray_address: str) -> Iterator[None]:
    """This process is connected to the instance."""
    import ray

    ray.init(ray_address, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()
