"""Names, signatures, defaults and flags are promises: none goes or changes unnoticed."""

import difflib

import pytest

from tests.snapshots.make import HERE, SNAPSHOTS


@pytest.mark.parametrize("file", SNAPSHOTS)
def test_nothing_public_has_changed(file):
    before, now = (HERE / file).read_text(), SNAPSHOTS[file]()
    changes = list(difflib.unified_diff(before.splitlines(), now.splitlines(), "promised", "now", lineterm="", n=0))
    assert before == now, (
        f"what users rely on has changed ({len(changes)} lines); where that is meant, renew tests/snapshots/{file} "
        "with `python -m tests.snapshots.make` and name the change in CHANGELOG.md:\n" + "\n".join(changes[:60])
    )


def test_the_snapshots_have_what_they_are_for():
    api, commands = ((HERE / file).read_text() for file in ("api.txt", "commands.txt"))
    for name in ("ops.conv2d(", "nn.Linear(", "optim.AdamW(", "manual_seed(", "testing.", "Tensor.backward("):
        assert f"\nminidl.{name}" in api
    for line in ("minidl train text\n", "    --batch-size: int | None (Default: 128.)", "    --out: Path, required"):
        assert line in commands
