"""Ids and entries: what names a file, a workload, or a placer with parameters."""

import pytest

from simdev.placers import registry


@pytest.mark.parametrize(
    "entry, step, graph",
    [
        ("m.py:f", True, False),
        ("folder/m.py:f", True, False),
        ("m.npz", False, True),
        ("m.json", False, True),
        ("graph.txt", False, True),
        ("nmt", False, False),
        ("nmt[batch=3]", False, False),
        ("m.py", False, False),
    ],
)
def test_a_step_file_is_no_graph_file(entry, step, graph):
    assert (registry.is_step_file(entry), registry.is_graph_file(entry)) == (step, graph)
    assert registry.is_file(entry) == (step or graph)
