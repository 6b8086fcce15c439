"""The notebooks run from top to bottom, and each .ipynb has the cells of its text source."""

import os
import sys
from pathlib import Path

import pytest

jupytext = pytest.importorskip("jupytext")
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

FOLDER = Path(__file__).parent.parent / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))


def cells(notebook):
    return [(cell.cell_type, cell.source.strip()) for cell in notebook.cells]


def test_there_are_notebooks():
    assert len(SOURCES) >= 2


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_pair_agrees(source):
    paired = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    assert cells(paired) == cells(jupytext.read(source)), f"run `make notebooks`: {source.stem}.ipynb is out of date"
    code = [cell for cell in paired.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code), "the committed notebook holds its output"


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_it_runs(source, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER.parent), *sys.path]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = jupytext.read(source)
    client = nbclient.NotebookClient(
        notebook, timeout=280, kernel_name="python3", resources={"metadata": {"path": FOLDER}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs) or "ladder" in source.stem
