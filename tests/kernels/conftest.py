"""What tests of kernels share."""

import pytest

from minidl.runtime import launch


@pytest.fixture
def fresh_plans():
    """No plan or replay that was made with other tiles or processors is used."""
    launch.forget()
    yield
    launch.forget()
