"""Run the notebooks and write each .ipynb, with its output, from the text source of the same name.

    python notebooks/run.py [NAME ...]

Without a GPU kernels are compiled for the CPU.
"""

import os
import sys
from pathlib import Path

import jupytext
import nbclient
import nbformat

FOLDER = Path(__file__).parent


def main() -> None:
    os.environ["MINIDL_CPU"] = "compiled"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER.parent), os.environ.get("PYTHONPATH", "")])
    for source in sorted(FOLDER.glob("[0-9]*.py")):
        if sys.argv[1:] and source.stem not in sys.argv[1:]:
            continue
        notebook = jupytext.read(source)
        resources = {"metadata": {"path": FOLDER}}
        nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # timestamps
        nbformat.write(notebook, source.with_suffix(".ipynb"))
        print(source.with_suffix(".ipynb"))


if __name__ == "__main__":
    main()
