"""A pipe, a device, a socket, a folder or far too large a file in the place of any file of a run: every command that
reads it ends within seconds, with one error."""

import json
import os
import threading

import pytest

from minidl import random
from minidl.models import dcgan
from tests.cli.conftest import unfinished
from tests.strange import STRANGE, copy_with, files_of, replace, soon

ROW = json.dumps({"size": 1, "age": 1, "kind": "flat"})


def ends(result):
    """Whether a command went on without the file; otherwise it has said so in one sentence."""
    if result.code == 0:
        return True
    assert result.code in (1, 2), result.err
    notes, _, error = result.err.rpartition("error: ")
    assert all(line.startswith("note: ") for line in notes.splitlines())
    assert error.strip()
    assert "Traceback" not in result.err
    return False


@pytest.mark.parametrize("kind", STRANGE)
def test_files_of_a_finished_run(command, table_run, tmp_path, kind):
    needed = {"config.json", "report.json", "manifest.json", "schema.json", "model.safetensors"}
    names = [name for name in files_of(table_run[0]) if not name.startswith("checkpoints")]
    assert needed < set(names)
    for number, name in enumerate(names):
        folder = copy_with(table_run[0], tmp_path / str(number), name, kind)
        with soon(60):
            answered = ends(command("predict", folder, ROW))
            compared = ends(command("compare", folder, table_run[0]))
        assert answered == (name not in needed), name
        assert compared == (name not in {*needed, "metrics.jsonl"} - {"schema.json", "model.safetensors"}), name
        if name in ("report.txt", "schema.json"):
            with soon(60):
                assert not ends(command("train", "table", "--out", folder, "--resume")) or name == "schema.json"


@pytest.mark.parametrize("kind", STRANGE)
def test_files_of_an_unfinished_run(command, table_run, tmp_path, kind):
    begun = unfinished(table_run[0], tmp_path / "begun")
    names = [name for name in files_of(begun) if name.endswith((".json", ".safetensors"))]
    states = [name for name in names if name.startswith("checkpoints")]
    assert len(states) >= 3
    for number, name in enumerate(names):
        folder = copy_with(begun, tmp_path / str(number), name, kind)
        with soon(60):
            went_on = ends(command("train", "table", "--out", folder, "--resume", "--no-plots", "--quiet"))
        assert not (went_on and name in (*states, "config.json")), name


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    random.manual_seed(1)
    path = tmp_path_factory.mktemp("models") / "tiny.safetensors"
    dcgan.save_generator(dcgan.Generator(6, 3, (8, 8), 2).eval(), path, command="test", seed=1)
    return path


@pytest.mark.parametrize("kind", STRANGE)
def test_files_of_pictures(command, model, tmp_path, kind):
    out = tmp_path / "out"
    flags = ("generate", "--model", model, "--count", "3", "--quiet", "--out", out)
    assert command(*flags).code == 0
    replace(out / "images.json", kind)
    with soon(60):
        assert not ends(command(*flags, "--overwrite"))
    for name in (".new-pictures/plan.json", ".new-pictures/made-0.txt"):
        out = tmp_path / name.replace("/", "-")
        (out / ".new-pictures").mkdir(parents=True)
        replace(out / name, kind)
        with soon(60):
            ends(command(*flags[:-1], out))
    replace(tmp_path / "z.safetensors", kind)
    with soon(60):
        assert not ends(command("generate", "--model", tmp_path / "z.safetensors", "--out", tmp_path / "new"))


def test_a_tile_table_that_is_a_pipe(minidl, table_run, tmp_path, monkeypatch):
    monkeypatch.setenv("MINIDL_TILES", str(tmp_path))
    replace(tmp_path / "gemm.json", "pipe")
    result = minidl("predict", table_run[0], ROW)
    assert not ends(result)
    assert "gemm.json: no tile table for this version (it is a pipe, a socket or a device" in result.err


def test_data_may_come_by_a_pipe(command, table_run, table, tmp_path):
    """By a named one, and by /dev/stdin or a shell's <(command), which lead to one without a name."""
    expected = command("predict", table_run[0], "--file", table)
    assert expected.out.count("\n") == 120
    reading, writing = os.pipe()
    (tmp_path / "in.csv").symlink_to(f"/dev/fd/{reading}")
    STRANGE["pipe"](tmp_path / "pipe.csv")
    named = tmp_path / "pipe.csv"
    for path, begin in ((tmp_path / "in.csv", lambda: writing), (named, lambda: os.open(named, os.O_WRONLY))):

        def write(begin=begin):
            with os.fdopen(begin(), "wb") as file:
                file.write(table.read_bytes())

        threading.Thread(target=write, daemon=True).start()
        with soon(60):
            assert command("predict", table_run[0], "--file", path) == expected
    os.close(reading)


@pytest.mark.parametrize("name", ["data.csv", "data.jsonl.gz", "lines.txt"])
def test_data_without_end_is_refused(command, table_run, tmp_path, name):
    for kind in ("link to a device", "folder", "socket", "sparse file"):
        replace(tmp_path / name, kind)
        with soon(60):
            assert not ends(command("predict", table_run[0], "--file", tmp_path / name)), kind
        (tmp_path / name).rmdir() if kind == "folder" else (tmp_path / name).unlink()
