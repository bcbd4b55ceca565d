"""Every notebook runs from top to bottom on what is committed, and holds its outputs: each picture once."""

import json
from pathlib import Path

import matplotlib
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def code_cells(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


LONG = {
    "8-simulate-a-training-job",
    "9-which-parallelism-when",
    "10-plan-write-run",
    "11-ten-models",
}  # what it calls is tested on smaller models
SLOW = {"5-reproduce-the-papers", "7-when-does-model-parallelism-pay"}  # measured: 13 and 7 processor seconds
MARKS = dict.fromkeys(LONG, pytest.mark.long) | dict.fromkeys(SLOW, pytest.mark.slow)
RUNS = [pytest.param(path, marks=MARKS.get(path.stem, ())) for path in NOTEBOOKS]


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch):
    if "simdev[capture]" in path.read_text(encoding="utf-8"):
        pytest.importorskip("torch")
    matplotlib.use("Agg")
    monkeypatch.chdir(path.parent)
    names: dict = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(path)):
        exec(compile("".join(cell["source"]), f"{path.name}[{number}]", "exec"), names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_holds_its_outputs(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))  # in one run, in order
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert all(output["output_type"] != "error" for output in outputs)
    pictures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert pictures and len(set(pictures)) == len(pictures)
    assert path.stat().st_size < 500_000 and "/home/" not in path.read_text(encoding="utf-8")


def test_there_are_notebooks():
    assert NOTEBOOKS


def test_the_agent_learns():
    pytest.importorskip("gymnasium", reason="needs gymnasium (extra env)")
    path = Path(__file__).parents[1] / "notebooks" / "ppo_agent.py"
    names: dict = {"__name__": "ppo_agent"}
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
    rows, env = names["train"]("transformer-xl-2", "p100x4", nodes=8, updates=40, envs=8, seed=0)
    finals = [row[3] for row in rows]
    assert sum(finals[-5:]) < 0.9 * sum(finals[:5])
    assert rows[-1][4] == min(row[4] for row in rows) and rows[-1][1] == env.evaluations
