"""Run notebooks and store their outputs, so that they can be read where nothing runs.

python notebooks/store_outputs.py [NOTEBOOK ...]          (default: all; needs: pip install nbclient ipykernel)
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent


def store(path: Path) -> None:
    """Run a notebook from top to bottom, in its folder, and write it back. Raises the error of a cell that fails."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=1800, kernel_name="python3", resources={"metadata": {"path": FOLDER}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times, which differ on every run
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(FOLDER.glob("*.ipynb")):
        print(name, flush=True)
        store(Path(name))
