"""A finished training that tests of several processes compare theirs with."""

import pytest

from tests.trials.kills import alone, command

SHORT = "--epochs", "3", "--quiet", "--shards", "4"


@pytest.fixture(scope="session")
def expected(tmp_path_factory):
    """The run of one process that nobody disturbed. Tests copy it before they change it."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    alone(*command(folder, *SHORT))
    return folder
