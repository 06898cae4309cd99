"""What holds for every unit test."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def no_ray() -> Iterator[None]:
    """A unit test starts no Ray; many of its calls do so without being asked, and later tests would meet that one."""
    yield
    ray = sys.modules.get("ray")
    if ray is not None and hasattr(ray, "is_initialized") and ray.is_initialized():
        ray.shutdown()
        pytest.fail("this test started Ray")
