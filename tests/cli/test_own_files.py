"""Outputs replace no file that minidl did not write as one: every flag of every command that names a file to write."""

import json
import os
from pathlib import Path

import pytest
from PIL import Image

from minidl.cli import COMMANDS, Deferred
from minidl.errors import ConfigError
from minidl.training.run_folder import files, provenance
from minidl.training.run_folder.outputs import check_output
from minidl.training.settings.declaration import note, value_type
from tests.cli.conftest import SMALL
from tests.cli.test_images import refused

# Files and folders that a command reads, and folders that it writes, which tell their content themselves.
READ = {"run", "file", "latents", "show", "evaluator"}
FOLDERS = {"out"}


def options():
    """(words of the command, name, field) of each option whose value is a path."""
    for name in COMMANDS:
        command = Deferred(name).load()
        for each in getattr(command, "commands", {"": command}).values():
            call = each.callback
            while hasattr(call, "__wrapped__"):
                call = call.__wrapped__
            for option, info in call.fields.items():
                if value_type(info) is Path:
                    yield f"{name} {each.name}", option, info


def test_every_option_that_names_a_file_to_write_says_what_it_writes():
    found = {(words, name): note(info, provenance.Kind) for words, name, info in options()}
    assert len(found) > 20
    for (words, name), kind in found.items():
        assert (kind is not None) == (name not in READ | FOLDERS), f"{words} --{name}"


# What commands have deleted: data, scripts, pictures and states of runs.
MINE = {
    "m.py": b"print('mine')\n",
    "data.csv": b"text,label\na,b\n",
    "state.json": b'{"format": "minidl-checkpoint", "version": 1, "tensors": "step-1.safetensors", "sha256": ""}',
    "list.json": b"[1, 2]",
    "deep.json": b"[" * 100_000,
    "half.json": b'{"task": ',
    "scores.jsonl": b'{"task": 1, "data": 2, "source": 3, "run": 4}\n{"mine": 1}\n',
    "page.html": b"<!doctype html><title>mine</title>",
    "report.html": b'<!doctype html><meta name="generator" content="minidl train">',
    "plot.svg": b"<svg><title>mine</title></svg>",
    "weights.safetensors": b"\x10\0\0\0\0\0\0\0{'__metadata__':{}}",
}


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in MINE.items():
        (tmp_path / name).write_bytes(content)
    Image.new("L", (4, 4)).save(tmp_path / "picture.png")
    return tmp_path


KINDS = {name: kind for name, kind in vars(provenance).items() if isinstance(kind, provenance.Kind)}


@pytest.mark.parametrize("kind", [name for name in KINDS if not name.startswith("_")])
def test_no_kind_of_output_replaces_a_file_of_the_users(mine, kind):
    for path in mine.iterdir():
        with pytest.raises(ConfigError, match="exists and was not written by --x"):
            check_output("--x", path, KINDS[kind])
    (mine / "empty").touch()
    check_output("--x", mine / "empty", KINDS[kind])
    check_output("--x", mine / "new", KINDS[kind])


@pytest.mark.parametrize(
    "words",
    [
        ("sanitize", "--json", "m.py", "m.py"),
        ("sanitize", "--json", "m.py", "-m", "m"),
        ("doctor", "--compile", "m.py", "--json", "m.py"),
        ("evaluate", "run", "--json", "picture.png"),
        ("predict", "run", "--file", "data.csv", "--profile", "--trace", "data.csv"),
        ("predict", "run", "picture.png", "--profile", "--trace", "picture.png"),
        ("compare", "run", "other", "--html", "state.json"),
        ("train", "text", "--data", "data.csv", "--out", "new", "--profile", "--trace", "data.csv"),
        ("generate", "--out", "new", "--profile", "--trace", "weights.safetensors"),
        ("bench", "--json", "data.csv"),
        ("bench", "--plot", "plot.svg"),
        ("tune", "--json", "list.json"),
    ],
)
def test_commands_refuse_before_their_work(command, mine, words):
    before = {path.name: path.read_bytes() for path in mine.iterdir()}
    refused(command(*words), "exists and was not written by --")
    assert {path.name: path.read_bytes() for path in mine.iterdir()} == before


def test_states_of_a_run_are_no_outputs(command, text_run):
    run = text_run[0]
    for path in (run / "checkpoints").iterdir():
        before = path.read_bytes()
        for words in (("evaluate", run, "--json"), ("compare", run, run, "--html")):
            refused(command(*words, path), "exists and was not written by --")
        assert path.read_bytes() == before


def test_outputs_are_replaced_by_those_of_the_same_command(command, text_run, tmp_path):
    path = tmp_path / "scores.json"
    for _ in range(2):
        assert command("evaluate", text_run[0], "--json", path).code == 0
    assert json.loads(path.read_text())["run"]
    for _ in range(2):
        assert command("predict", text_run[0], "oil", "--profile", "--trace", tmp_path / "t.json").code == 0
        assert command("compare", text_run[0], text_run[0], "--html", tmp_path / "c.html").code in (0, 2)
    refused(command("compare", text_run[0], text_run[0], "--html", path), "was not written by --html")


def test_a_file_that_the_script_makes_is_not_replaced(command, mine):
    (mine / "writes.py").write_text("from pathlib import Path; Path('new.json').write_text('mine')\n")
    result = command("sanitize", "--json", "new.json", "writes.py")
    assert result.code == 2
    assert "new.json exists and was not written by --json" in result.err
    assert (mine / "new.json").read_text() == "mine"


def test_a_folder_that_takes_the_place_of_a_run_stays_as_it_is(texts, tmp_path, command, monkeypatch):
    """`--out` swapped for a link while it trains."""
    out, other = tmp_path / "run", tmp_path / "other"
    flags = ("train", "text", "--data", texts, "--quiet", *SMALL)
    assert command(*flags, "--out", other).code == 0
    before = {str(path): path.read_bytes() for path in other.rglob("*") if path.is_file()}
    real = files.write_json_lines

    def swapped(path, values):
        if not out.is_symlink():
            out.rename(tmp_path / "moved")
            out.symlink_to(other)
        real(path, values)

    monkeypatch.setattr(files, "write_json_lines", swapped)
    result = command(*flags, "--out", out)
    refused(result, "another folder, or a link, is in its place", 1)
    assert {str(path): path.read_bytes() for path in other.rglob("*") if path.is_file()} == before
    assert os.path.realpath(out) == str(other)
