"""The notebooks run from top to bottom, and each .ipynb has the cells of its text source.

With a C compiler they run as they are, with kernels compiled for the CPU. Without one they run at a smaller size: a
cell with the values below follows the one tagged "parameters", as papermill does it.
"""

import ast
import os
import sys
from pathlib import Path

import pytest

from minidl.cpu import build

jupytext = pytest.importorskip("jupytext")
nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

FOLDER = Path(__file__).parent.parent / "notebooks"
SOURCES = sorted(FOLDER.glob("[0-9]*.py"))
SMALLER = {
    "01_text_classifier": {"TERMS": 2000, "EPOCHS": 2, "RATE": 0.02},
    "02_gemm_ladder": {"SIZE": 24},
    "03_convolution_ladder": {"IMAGES": 2},
    "04_image_classifier": {"EPOCHS": 5, "RATE": 0.02},
    "05_gan": {"BATCH": 64, "STEPS": 6},
}


def cells(notebook):
    return [(cell.cell_type, cell.source.strip(), cell.metadata.get("tags", [])) for cell in notebook.cells]


def make_smaller(notebook, values):
    """Set the parameters of a notebook. Each must be there, and be used."""
    (place,) = (i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", []))
    names = [
        {
            node.id
            for node in ast.walk(ast.parse(cell.source))
            if isinstance(node, ast.Name) and isinstance(node.ctx, of)
        }
        for cell, of in ((notebook.cells[place], ast.Store), *((c, ast.Load) for c in notebook.cells[place + 1 :]))
        if cell.cell_type == "code"
    ]
    assert values.keys() <= names[0]
    assert values.keys() <= set().union(*names[1:])
    source = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(source))


def test_there_are_notebooks():
    assert len(SOURCES) >= 2
    assert SMALLER.keys() == {source.stem for source in SOURCES}


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
    if build.compiler() is not None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setenv("MINIDL_CPU", "compiled")
    else:
        make_smaller(notebook, SMALLER[source.stem])
    client = nbclient.NotebookClient(
        notebook, timeout=280, kernel_name="python3", resources={"metadata": {"path": FOLDER}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs) or "ladder" in source.stem
