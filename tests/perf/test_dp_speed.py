"""Speed of the dynamic program over ideals on published inputs. Skipped unless asked for: ``pytest tests/perf
--benchmark-only``, with SIMDEV_DATA naming the folder that holds dnn-partitioning.

The published C++ program takes 31 s on the GNMT layer graph on a 2-core machine, and does not finish Inception-V3.
"""

import os
from pathlib import Path

import pytest

from simdev.exact.dp import best_contiguous
from simdev.exact.load import read_load_problem

DATA = Path(os.environ.get("SIMDEV_DATA", Path(__file__).parents[3] / "shared" / "data")) / "dnn-partitioning"


@pytest.mark.skipif(not DATA.is_dir(), reason="SIMDEV_DATA names no folder with dnn-partitioning")
@pytest.mark.parametrize(
    "name, ideals",
    [
        ("LayerGraphs/gnmt_inference", 17914),
        ("OperatorGraphs/bert_l-6_training", 3776),
        ("LayerGraphs/inceptionv3_inference", 36596),
        ("LayerGraphs/inceptionv3_training", 36596),
    ],
)
def test_contiguous_optimum(benchmark, name, ideals):
    problem = read_load_problem(DATA / "throughput-inputs" / f"{name}.json")
    best_contiguous(read_load_problem(DATA / "throughput-inputs" / "LayerGraphs" / "bert24_inference.json"))  # compiles
    found = benchmark.pedantic(best_contiguous, (problem,), rounds=1, iterations=1)
    benchmark.extra_info.update(ideals=found.ideals, pairs=found.pairs, largest_load=found.largest)
    assert found.ideals == ideals
