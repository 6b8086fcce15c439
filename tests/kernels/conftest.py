"""What tests of kernels share."""

import pytest

from minidl.kernels.conv import plan


@pytest.fixture
def fresh_plans():
    """No plan that was made with other tiles or processors is used."""
    plan.plan.cache_clear()
    yield
    plan.plan.cache_clear()
