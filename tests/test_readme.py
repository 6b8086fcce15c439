"""README.md: every command and Python block runs in an empty folder and prints what the page says."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.pages import ROOT, blocks, commands, prose, unprinted

README = ROOT / "README.md"
MOST_LINES = 200
# Of a nested pytest these would make a worker of this one.
XDIST = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID", "PYTEST_CURRENT_TEST")


def run(command, folder):
    """The standard output of a command, which must end with exit code 0."""
    environment = {name: value for name, value in os.environ.items() if name not in XDIST}
    environment |= {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def minidl(words, folder):
    """The standard output of `minidl ...` with this Python and this package."""
    return run([sys.executable, "-m", "minidl", *words[1:]], folder)


def recipe(words):
    """The commands, as words, that `make ...` runs once everything is installed."""
    stamps = ("-o", ".venv/.installed", "-o", ".venv/.installed-dev")
    made = subprocess.run(["make", "-n", *stamps, *words[1:]], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = made.stdout.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if ".venv/bin/" in line]


def of_readme(program):
    """(words, output) of the README's commands of a program."""
    return [(words, output) for words, output in commands(README) if words[0] == program]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """(folder, output by command) of the README's `minidl` commands, run one after another in an empty folder."""
    folder = tmp_path_factory.mktemp("readme")
    return folder, {shlex.join(words): minidl(words, folder) for words, _ in of_readme("minidl")}


def test_the_readme_is_a_front_page():
    assert len(README.read_text().splitlines()) <= MOST_LINES
    assert {words[0] for words, _ in commands(README)} == {"git", "cd", "make", "minidl", "."}


@pytest.mark.slow
def test_commands_print_what_the_page_says(done):
    _, printed = done
    for words, page in of_readme("minidl"):
        assert page
        assert not list(unprinted(printed[shlex.join(words)], page)), printed[shlex.join(words)]


@pytest.mark.slow
def test_commands_make_the_files_that_the_page_names(done):
    folder, _ = done
    assert all((folder / "runs/first" / name).exists() for name in ("model.safetensors", "report.txt", "metrics.jsonl"))
    assert len(list((folder / "runs/pictures").glob("seed-*.png"))) == 64
    assert (folder / "runs/pictures" / "grid.png").exists()
    files = json.loads((folder / "runs/pictures" / "images.json").read_text())["files"]
    assert sorted(file["seed"] for file in files if "seed" in file) == list(range(64))


@pytest.mark.slow
def test_make_demo_runs_these_commands(done):
    """Into folders of its own, so that the README's commands can follow it."""
    folder, _ = done
    train, predict, generate = recipe(["make", "demo"])
    shown = [shlex.join(words) for words, _ in of_readme("minidl")]
    assert train[-3:] == ["--out", "runs/demo", "--overwrite"]
    assert shlex.join(["minidl", *train[1:-3], "--out", "runs/first"]) in shown
    assert generate[-3:] == ["--out", "runs/demo-pictures", "--overwrite"]
    assert shlex.join(["minidl", *generate[1:-3], "--out", "runs/pictures"]) in shown
    predict[predict.index("runs/demo")] = "runs/first"
    answers = [json.loads(line) for line in minidl(predict, folder).splitlines()]
    assert [answer["label"] for answer in answers] == ["numbers", "networking", "concurrency"]


def test_make_test_runs_lint_types_and_the_suite():
    tools = [next(word for word in words if not re.match(r"[A-Z_]+=", word)) for words in recipe(["make", "test"])]
    assert len(tools) == 5
    text = "\n".join(" ".join(words) for words in recipe(["make", "test"]))
    assert all(f".venv/bin/{tool}" in text for tool in ("lint-imports", "python -m mypy", "python -m pytest"))


def test_make_results_writes_the_table_and_the_charts():
    (command,) = recipe(["make", "results"])
    assert command[1:4] == ["-m", "benchmarks.bench.results_page", "benchmarks/results/nvidia-h200.json"]
    charts = [f"benchmarks/results/nvidia-h200{name}.svg" for name in ("", "-short")]
    assert command[4:] == ["docs/performance.md", *charts]


def test_the_property_tests_are_found():
    """At least as many as pass on the page; they run where the suite does."""
    ((words, page),) = [(words, page) for words, page in of_readme("make") if words[1] == "pytest"]
    (command,) = recipe(words)
    command = command[command.index(".venv/bin/python") + 1 :]
    printed = run([sys.executable, *command, "--collect-only", "-q", "-p", "no:cacheprovider"], ROOT)
    (found,) = re.findall(r"^(\d+)/\d+ tests collected", printed, re.MULTILINE)
    assert int(found) >= int(re.search(r"^=+ (\d+) passed in ", page, re.MULTILINE)[1])


@pytest.mark.slow
def test_the_python_examples_run(tmp_path):
    block, in_torch = blocks(README, "python")
    (tmp_path / "runs").mkdir()  # as `make demo` does
    printed = run([sys.executable, "-c", block.text], tmp_path)
    assert 0 < float(printed) < 0.1
    assert (tmp_path / "runs" / "graph.svg").read_text().startswith(("<svg", "<?xml"))
    assert "torch.Size([4, 8, 14, 14])" in run([sys.executable, "-c", in_torch.text], tmp_path)


@pytest.mark.parametrize("folder", ["minidl", "tests"])
def test_the_readme_states_the_size_of_the_code(folder):
    (thousands,) = re.findall(rf"`{folder}/`[^`]*?(\d+),000", prose(README))
    lines = sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py"))
    assert int(thousands) * 1000 == pytest.approx(lines, rel=0.1)


def test_the_layout_is_that_of_the_package():
    ((block),) = [block for block in blocks(README, "") if block.text.startswith("minidl/\n")]
    named = [line.split()[0].rstrip("/") for line in block.text.splitlines()[1:]]
    there = {path.name for path in (ROOT / "minidl").iterdir() if not path.name.startswith(("_", "."))} - {"py.typed"}
    assert sorted(named) == sorted(there)
