"""The max-load model: hand-worked loads, and the published splits as the files give them."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from test_dp import load_problem

from simdev.errors import InvalidInput
from simdev.exact.load import processor_loads, read_load_problem, read_split

DATA = Path(os.environ.get("SIMDEV_DATA", Path(__file__).parents[3] / "shared" / "data")) / "dnn-partitioning"
published = pytest.mark.skipif(not DATA.is_dir(), reason="SIMDEV_DATA names no folder with dnn-partitioning")


def write(tmp_path, **changes):
    """a (3 on an accelerator, 30 on a CPU) -> b, c; b -> c; a costs 2 to send, b 5."""
    document = {
        "maxFPGAs": 2,
        "maxCPUs": 1,
        "maxSizePerFPGA": 10.0,
        "nodes": [
            {"id": 7, "supportedOnFpga": 1, "cpuLatency": 30.0, "fpgaLatency": 3.0, "isBackwardNode": 0, "size": 4},
            {"id": 8, "supportedOnFpga": 1, "cpuLatency": 40.0, "fpgaLatency": 4.0, "isBackwardNode": 0, "size": 7},
            {"id": 9, "supportedOnFpga": 0, "cpuLatency": 50.0, "fpgaLatency": 5.0, "isBackwardNode": 0},
        ],
        "edges": [
            {"sourceId": 7, "destId": 8, "cost": 2.0},
            {"sourceId": 7, "destId": 9, "cost": 2.0},
            {"sourceId": 8, "destId": 9, "cost": 5.0},
        ],
    }
    path = tmp_path / "three.json"
    path.write_text(json.dumps(document | changes))
    return path


def test_loads_by_hand(tmp_path):
    problem = read_load_problem(write(tmp_path))
    found = processor_loads(problem, np.array([0, 1, 2]))
    # Accelerator 0: 3 + 2 sent once to two others. Accelerator 1: 4 + 2 received + 5 sent. The CPU pays no transfer.
    assert found.load.tolist() == [5, 11, 50]
    assert found.size.tolist() == [4, 7, 0] and found.overfull == ()
    together = processor_loads(problem, np.array([0, 0, 2]))
    assert together.load.tolist() == [3 + 4 + 2 + 5, 0, 50] and together.overfull == (0,)


def test_unsupported_node_has_no_load(tmp_path):
    problem = read_load_problem(write(tmp_path))
    assert processor_loads(problem, np.array([0, 0, 1])).load[1] == np.inf


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"maxFPGAs": 0, "maxCPUs": 0}, "no accelerator and no CPU core"),
        ({"maxCPUs": 0}, "node 9: no processor supports it"),
        ({"edges": [{"sourceId": 7, "destId": 5, "cost": 1}]}, "edge 0: destId: 5 is not the id"),
        ({"edges": [{"sourceId": 7, "destId": 8, "cost": -1}]}, "edge 0: cost: .*-1"),
        ({"nodes": 3}, "nodes: expected a list"),
        ({"nodes": [], "edges": []}, "nodes: there is none"),
        (
            {"edges": [{"sourceId": 7, "destId": 8, "cost": 1}, {"sourceId": 7, "destId": 9, "cost": 2}]},
            "edge 1: cost: another cost",
        ),
    ],
)
def test_bad_files_are_refused_in_a_sentence(tmp_path, changes, message):
    with pytest.raises(InvalidInput, match=message) as error:
        read_load_problem(write(tmp_path, **changes))
    assert "three.json" in str(error.value)


def test_separated_group_is_refused(tmp_path):
    path = write(tmp_path)
    document = json.loads(path.read_text())
    for node in document["nodes"][:2]:
        node["colorClass"] = 1
    path.write_text(json.dumps(document))
    with pytest.raises(InvalidInput, match="is apart from its group"):
        processor_loads(read_load_problem(path), np.array([0, 1, 2]))


def test_unit_slip_is_fixed_only_where_it_is(tmp_path):
    edges = [{"sourceId": 7, "destId": 8, "cost": 2.0, "size": 2.0 * 2**31}]
    slipped = write(tmp_path, edges=edges)
    assert read_load_problem(slipped).tensor_cost.tolist() == [2]
    assert read_load_problem(slipped, fix_units=True).tensor_cost.tolist() == [2000]
    edges[0]["size"] /= 1000
    assert read_load_problem(write(tmp_path, edges=edges), fix_units=True).tensor_cost.tolist() == [2]


@published
@pytest.mark.parametrize(
    "name, one_device, overfull, expert",
    [
        ("LayerGraphs/bert24_inference", 92.406, False, 20.084),
        ("LayerGraphs/bert24_training", 217.813, False, 49.4049),
        ("LayerGraphs/gnmt_inference", 182.563, False, 46.2085),
        ("LayerGraphs/inceptionv3_inference", 310.969, False, 102.482),
        ("LayerGraphs/inceptionv3_training", 710.738, True, 213.654),
        ("LayerGraphs/resnet50_inference", 201.45, True, 43.9183),
        ("LayerGraphs/resnet50_training", 462.381, True, 112.108),
        ("OperatorGraphs/bert_l-3_inference", 49.3526, False, None),
        ("OperatorGraphs/bert_l-3_training", 122.987, False, None),
        ("OperatorGraphs/bert_l-6_inference", 77.4615, False, None),
        ("OperatorGraphs/bert_l-6_training", 192.917, False, None),
        ("OperatorGraphs/resnet50_inference", 325.132, False, None),
    ],
)
def test_published_loads(name, one_device, overfull, expert):
    problem = read_load_problem(DATA / "throughput-inputs" / f"{name}.json")
    single = processor_loads(problem, np.zeros(problem.n_nodes, np.int64))
    assert single.largest == pytest.approx(one_device, rel=1e-4)
    assert bool(single.overfull) == overfull
    if expert is not None:
        stem = name.split("/")[1].replace("inceptionv3_training", "inceptionv3_inference")
        stem = stem.replace("resnet50_training", "resnet50_inference")  # backward nodes follow their colour class
        split = read_split(DATA / "human-experts" / f"{stem}_expert.json", problem)
        found = processor_loads(problem, split)
        assert found.largest == pytest.approx(expert, rel=1e-4) and not found.overfull


def test_no_processor_at_all():
    with pytest.raises(InvalidInput, match="hand: maxFPGAs, maxCPUs: no accelerator and no CPU core to place on"):
        load_problem([1.0], [], k=0)
    assert processor_loads(load_problem([1.0], [], k=0, cpus=1), np.array([0])).largest == 10.0
