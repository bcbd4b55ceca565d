"""Run notebooks and store their outputs, so that they can be read where nothing runs. `python docs/facts.py` names the
notebooks whose outputs come from other tables, or other versions of a placer, than there are now.

python notebooks/store_outputs.py [NOTEBOOK ...]          (default: all; needs: pip install nbclient ipykernel)
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))
from docs.facts import read_boards  # noqa: E402


def store(path: Path) -> None:
    """Run a notebook from top to bottom, in its folder, and write it back. Raises the error of a cell that fails."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=1800, kernel_name="python3", resources={"metadata": {"path": FOLDER}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times, which differ on every run
    notebook.metadata = {
        "simdev": read_boards(path),
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
    }
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(FOLDER.glob("*.ipynb")):
        print(name, flush=True)
        store(Path(name))
