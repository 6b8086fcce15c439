"""Standard output that is closed, full, cut off or of another encoding; run names and settings that are odd."""

import subprocess
import sys

import pytest

from tests.cli.conftest import SMALL, environment

MINIDL = f"{sys.executable} -W error -m minidl"
TRAIN = f"{MINIDL} train text --out run {' '.join(SMALL[:-1])}"


GOING_ON = "note: standard output cannot be written (No space left on device); the command continues\n"


@pytest.fixture
def shell(tmp_path, texts):
    """Runs a line of bash with `minidl` in it."""

    def run(line, **variables):
        line = line.replace("minidl", MINIDL).replace("TRAIN", f"{TRAIN} --data {texts}")
        done = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {line}"], cwd=tmp_path, env={**environment(), **variables},
            capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stderr
        return done

    return run


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        (">&- 2>&- <&-", ""),
        ("| head -1", ""),
        ("> /dev/full", GOING_ON),
        ("> /dev/full 2> /dev/full", ""),
    ],
)
def test_a_run_is_finished_without_its_output(shell, tmp_path, text_run, ending, said):
    done = shell(f"TRAIN --no-plots {ending}")
    assert (done.returncode, done.stderr) == (0, said)
    for name in ("model.safetensors", "labels.json"):
        assert (tmp_path / "run" / name).read_bytes() == (text_run[0] / name).read_bytes()
    assert (tmp_path / "run" / "report.json").exists()


FULL = "error: standard output: No space left on device\n"


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("minidl --help > /dev/full", 1, FULL),
        ("minidl --version > /dev/full", 1, FULL),
        ("minidl train text --help >&-", 0, ""),
        ("minidl bench --list > /dev/full", 1, FULL),
        ("minidl predict nothing oil 2> /dev/full", 2, ""),
        ("minidl predict nothing oil 2>&-", 2, ""),
        ("minidl predict nothing oil > /dev/full 2> /dev/full", 2, ""),
    ],
)
def test_lines_that_cannot_be_written(shell, line, code, said):
    done = shell(line)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)


@pytest.mark.parametrize(("ending", "said"), [("| true", ""), ("> /dev/full", GOING_ON)])
def test_pictures_are_made_without_their_output(shell, tmp_path, ending, said):
    done = shell(f"minidl generate --count 1 --out pictures {ending}")
    assert (done.returncode, done.stderr) == (0, said)
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {"images.json", "seed-000000.png"}


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        (">&-", 0, ""),
        ("| head -c 1", 141, ""),
        ("> /dev/full", 1, FULL),
    ],
)
def test_answers_that_cannot_be_written(shell, text_run, ending, code, said):
    done = shell(f"printf 'oil\\n%.0s' {{1..3000}} | minidl predict {text_run[0]} {ending}")
    assert (done.returncode, done.stderr) == (code, said)


def test_characters_that_the_terminal_has_not(shell, tmp_path):
    done = shell("TRAIN --no-plots && mv run r\u00e9 && minidl evaluate r\u00e9", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    done = shell("minidl predict r\u00e9/nothing oil", PYTHONIOENCODING="ascii")
    assert done.returncode == 2
    assert "/nothing is not a minidl run" in done.stderr


def test_a_run_name_that_is_no_text(shell, text_run):
    done = shell(f"r=$'r\\xff'; cp -r {text_run[0]} $r && minidl evaluate $r && minidl predict $r oil")
    assert done.returncode == 0, done.stderr
    assert '"label": "crude"' in done.stdout
    done = shell("minidl evaluate $'r\\xff' --json scores.json")
    assert done.returncode == 0, done.stderr


def test_settings_of_matplotlib_change_no_plot(shell, tmp_path):
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\naxes.facecolor: red\nsavefig.format: pdf\n")
    done = shell("TRAIN", MPLBACKEND="junk")
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_that_fails_costs_a_note(command, texts, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")

    def fail(*_, **__):
        raise RuntimeError("no\nfont")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    run = tmp_path / "run"
    done = command("train", "text", "--data", texts, "--out", run, *SMALL[:-1])
    assert (done.code, done.err) == (0, "")
    assert done.out.count("note: a plot cannot be drawn (RuntimeError: no font)\n") == 1
    assert (run / "report.json").exists()
    assert not (run / "loss.png").exists()


@pytest.mark.parametrize(
    ("variable", "value", "library"),
    [
        ("TORCH_LOGS", "junk", "torch"),
        ("PYTORCH_JIT", "junk", "torch"),
        ("TORCH_COMPILE_DEBUG", "junk", "torch"),
        ("SOURCE_DATE_EPOCH", "junk", "scipy"),
    ],
)
def test_a_variable_with_which_a_library_cannot_be_imported(shell, tmp_path, variable, value, library):
    done = shell("TRAIN", **{variable: value})
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {library} cannot be imported: ValueError: ")
    assert f"{variable} ('{value}')" in done.stderr.rpartition("; unset ")[2]
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("line", ["predict a b", "train text --help", "sanitize a.py", "compare a b", "doctor"])
def test_a_working_folder_that_was_deleted(shell, line):
    done = shell(f"mkdir gone; cd gone; rmdir ../gone; minidl {line}")
    expected = "error: the working folder cannot be read: No such file or directory; change to another folder with cd\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)
