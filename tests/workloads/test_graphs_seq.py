"""The shipped graphs of the sequence and recommendation workloads, against figures computed by hand (no PyTorch)."""

from __future__ import annotations

import re

import numpy as np
import pytest

from simdev.placers.registry import load_workload
from simdev.problem.graph import PHASES

NAMES = (
    "nmt",
    "gnmt-4",
    "gnmt-8",
    "rnnlm",
    "transformer-xl-2",
    "transformer-xl-4",
    "transformer-xl-8",
    "gpt2-medium",
    "llama-moe",
    "dlrm",
)
PRODUCTS = ("mm", "addmm", "bmm", "_scaled_dot_product_flash_attention")


def product_flops(graph, phase):
    """FLOPs of matrix products and attention in a phase."""
    product = np.array([kind in PRODUCTS or kind == f"{PRODUCTS[-1]}_backward" for kind in graph.kinds])
    return int(graph.op_flops[product[graph.op_kind] & (graph.op_phase == PHASES.index(phase))].sum())


def lstm(inputs, units):
    return (inputs + units) * 4 * units


def nmt_macs(batch, length, units, vocabulary):
    attention = length * batch * units * (units + length + length) + batch * length * units * units
    cells = 3 * lstm(units, units) + lstm(2 * units, units)
    return length * batch * (cells + units * vocabulary) + attention


def gnmt_macs(layers, batch, length, units, vocabulary):
    attention = length * batch * units * (units + length + length) + batch * length * units * units
    encoder = 2 * lstm(units, units) + lstm(2 * units, units) + (layers - 2) * lstm(units, units)
    return length * batch * (encoder + layers * lstm(2 * units, units) + units * vocabulary) + attention


def rnnlm_macs(batch, length, units, vocabulary, layers):
    return length * batch * (layers * lstm(units, units) + units * vocabulary)


def transformer_xl_macs(layers, batch, length, memory, units, heads, inner, vocabulary):
    keys = memory + length
    projections = batch * keys * 3 * units**2 + keys * units**2 + batch * length * units**2
    scores = 3 * batch * length * keys * units
    return layers * (projections + scores + batch * length * 2 * units * inner) + batch * length * units * vocabulary


def gpt2_macs(batch, length, layers, units, heads, vocabulary, precision):
    layer = batch * length * 12 * units**2 + 2 * batch * length**2 * units
    return layers * layer + batch * length * units * vocabulary


def llama_moe_macs(batch, length, layers, units, heads, key_heads, experts, inner, vocabulary, capacity, precision):
    tokens = batch * length
    attention = tokens * (2 * units**2 + 2 * units * key_heads * units // heads) + 2 * tokens * length * units
    experts_macs = capacity * 2 * tokens * 3 * units * inner + tokens * units * experts
    return layers * (attention + experts_macs) + tokens * units * vocabulary


def dlrm_macs(batch, max_rows, units, rate):
    bottom = 13 * 512 + 512 * 256 + 256 * 128
    top = 479 * 1024 + 1024 * 1024 + 1024 * 512 + 512 * 256 + 256
    return batch * (bottom + top + 27 * 27 * units)


MACS = {
    "nmt": nmt_macs,
    "gnmt-4": lambda **p: gnmt_macs(4, **p),
    "gnmt-8": lambda **p: gnmt_macs(8, **p),
    "rnnlm": rnnlm_macs,
    "transformer-xl-2": transformer_xl_macs,
    "transformer-xl-4": transformer_xl_macs,
    "transformer-xl-8": transformer_xl_macs,
    "gpt2-medium": gpt2_macs,
    "llama-moe": llama_moe_macs,
    "dlrm": dlrm_macs,
}


@pytest.mark.parametrize("name", NAMES)
def test_forward_products_by_hand(name):
    graph = load_workload(name)
    assert product_flops(graph, "forward") == 2 * MACS[name](**graph.meta["params"])


@pytest.mark.parametrize("name", NAMES)
def test_backward_products_are_twice_the_forward_ones(name):
    graph = load_workload(name)
    ratio = product_flops(graph, "backward") / product_flops(graph, "forward")
    # Flash attention computes the scores anew (5 products for 2); nothing flows back to data.
    assert 1.98 < ratio < 2.15


@pytest.mark.parametrize("name", NAMES)
def test_phases_persistent_bytes_and_updates(name):
    graph = load_workload(name)
    meta = graph.meta
    expected = meta["parameter_bytes"] + meta["optimizer_state_bytes"] + meta["buffer_bytes"]
    assert int(graph.op_persistent_bytes.sum()) == expected
    # No op works for an earlier phase than the ops that it reads from.
    assert (graph.op_phase[graph.consumers] >= graph.op_phase[graph.edge_source]).all()
    kinds = np.array(graph.kinds)[graph.op_kind]
    units = graph.unit_of_op
    updated = set(units[graph.op_phase == PHASES.index("update")])
    tables = re.compile(r"table\d+$")
    fused = 0
    for op in np.flatnonzero(kinds == "parameter"):
        layer = graph.layers[graph.op_layer[op]]
        if graph.op_names[op].endswith("memory"):
            assert "copy_" in kinds[units == units[op]]
        elif tables.match(layer) and graph.op_persistent_bytes[op] > meta["batch"] * 128 * 4:  # rows of 128 floats
            assert "index_add_" in kinds[units == units[op]] and units[op] not in updated
            assert graph.updated_in_backward[op]
            fused += 1
        else:
            assert units[op] in updated, graph.op_names[op]
    assert fused == (8 if name == "dlrm" else 0)


def tops(graph):
    """First two parts of the module paths, numbers folded."""
    return {re.sub(r"\d+", "#", ".".join(name.split(".")[:2])) for name in graph.layers}


def test_module_paths_of_nmt():
    graph = load_workload("gnmt-8")
    layers = set(graph.layers)
    assert graph.n_ops > 50_000
    for side in ("encoder", "decoder"):
        assert {f"{side}.layer{number}" for number in range(8)} | {f"{side}.embedding"} <= layers
    assert {"encoder.layer0_reversed", "decoder.attention", "decoder.attention.key", "softmax"} <= layers
    share = np.isin(np.array(graph.layers)[graph.op_layer], ["", "encoder", "decoder", "loss"]).mean()
    assert share < 0.01


def test_module_paths_of_transformers():
    assert {"layer#.attention", "layer#.feed_forward", "softmax", "embedding", "position"} <= tops(
        load_workload("transformer-xl-2")
    )
    assert {"layer#.attention", "layer#.feed_forward", "softmax"} <= tops(load_workload("gpt2-medium"))
    layers = set(load_workload("llama-moe").layers)
    assert {"layer23.experts.router", "layer23.experts.dispatch", "layer23.experts.expert7.up"} <= layers
    assert {"table25", "bottom.0", "top.8", "interaction", "loss"} <= set(load_workload("dlrm").layers)


def test_a_memory_of_transformer_xl_is_read_before_it_is_overwritten():
    graph = load_workload("transformer-xl-2")
    kinds = np.array(graph.kinds)[graph.op_kind]
    writes = np.flatnonzero(kinds == "copy_")
    assert len(writes) == 2
    for write in writes:
        sources = set(graph.edge_source[graph.consumers == write])
        assert any(kinds[source] == "cat" for source in sources)


def test_nmt_is_too_large_for_one_k80_as_in_mirhoseini_2017():
    from simdev.placers.registry import find_placer
    from simdev.problem.placement import Placement
    from simdev.problem.problem import Problem
    from simdev.problem.topology import load_topology
    from simdev.sim import simulate

    problem = Problem.build(load_workload("nmt"), load_topology("k80x2"))
    gpu = problem.topology.accelerators[0]
    assert not simulate(problem, Placement(np.full(problem.graph.n_ops, gpu))).feasible
    expert = find_placer("expert")[0].function(problem, rng=None, budget=None)
    assert simulate(problem, expert).feasible
