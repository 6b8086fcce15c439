"""CONTRIBUTING.md's worked example: its blocks make an operation in a copy of the repository, and its checks pass."""

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.pages import ROOT, blocks, commands, new_files

PAGE = ROOT / "CONTRIBUTING.md"
COPIED = ("minidl", "tests", "pyproject.toml")


def changed(text, diff):
    """The text with the lines marked + inserted after those before them, which stand in it once."""
    lines = diff.splitlines(keepends=True)
    place = "".join(line[1:] for line in lines if line.startswith(" "))
    assert text.count(place) == 1, place
    return text.replace(place, "".join(line[1:] for line in lines))


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A copy of the repository with the operation of the page."""
    copy = tmp_path_factory.mktemp("house")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "old"))
        else:
            shutil.copy(source, copy)
    for path, text in new_files(PAGE):
        assert not (copy / path).exists()
        (copy / path).write_text(text)
    path = None
    for block in blocks(PAGE, "diff"):
        named = re.search(r"In\s`([^`]+)`", block.before)
        path = copy / named[1] if named else path
        path.write_text(changed(path.read_text(), block.text))
    return copy


def run(house, words):
    """The finished process of a command of the page, in the copy."""
    assert words[0] in ("python", "minidl")
    command = [sys.executable, *words[1:]] if words[0] == "python" else [sys.executable, "-m", "minidl", *words[1:]]
    environment = {**os.environ, "PYTHONPATH": str(house), "COLUMNS": "200"}
    if "pytest" in words:
        command += ["-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
    return subprocess.run(command, cwd=house, env=environment, capture_output=True, text=True, check=False)


def test_the_example_has_its_five_places():
    paths = [path for path, _ in new_files(PAGE)]
    assert {path.split("/")[1] for path in paths} == {"kernels", "runtime", "ops", "testing"}
    assert "minidl/ops/__init__.py" in re.findall(r"In\s`([^`]+)`", PAGE.read_text())


@pytest.mark.slow
def test_the_operation_passes_its_checks(house):
    done = run(house, ["python", "-m", "pytest", "tests/snapshots"])
    assert done.returncode == 1, "a new public name goes unnoticed"
    (renew,) = [words for words, _ in commands(PAGE) if words[-1] == "tests.snapshots.make"]
    checks = [words for words, _ in commands(PAGE) if any("exp2" in word for word in words)]
    assert len(checks) == 4
    for words in (renew, *checks):
        done = run(house, words)
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
        if "pytest" in words:
            assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 10, done.stdout


def test_the_example_is_linted_as_the_rest_is(house):
    for words in (("check",), ("format", "--check")):
        done = run(house, ["python", "-m", "ruff", *words, "minidl"])
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_without_its_spec_the_suite_fails(house):
    record = house / "minidl/testing/specs/exp2.py"
    text = record.read_text()
    record.unlink()
    try:
        done = run(house, ["python", "-m", "pytest", "tests/test_operations.py", "-k", "has_a_spec or family"])
    finally:
        record.write_text(text)
    assert done.returncode == 1
    assert "add specs to minidl/testing/specs for ['exp2']" in done.stdout
