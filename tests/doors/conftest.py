from tests.ray_fixtures import connected, pytest_runtest_teardown, ray_address

__all__ = ["connected", "pytest_runtest_teardown", "ray_address"]
