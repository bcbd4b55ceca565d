"""Reserved memory of recorded steps: the order of a first step, and a small Llama against its allocated peak."""

import pytest

from simdev.parallel import Mesh, Plan, find_model, load_cluster

MIB = 1 << 20


def test_the_optimizer_state_of_the_first_step_takes_the_place_of_activations():
    pytest.importorskip("torch")
    from simdev.parallel.costs.reserved import replay_steps

    parameters = [(0, 64 * MIB, 0)]
    step = [(1, 64 * MIB, 0), (1, 0, 0), (2, 64 * MIB, 0), (2, 0, 0)]
    allocated, reserved = replay_steps(parameters + step, 1, 3, [32 * MIB])
    # the state takes half of the segment in which the activations were, and the next step needs another one
    assert (allocated, reserved) == (160 * MIB, 192 * MIB)


def test_more_is_reserved_than_allocated_and_sharding_reserves_less():
    pytest.importorskip("torch")
    from simdev.parallel.costs.reserved import reserved_bytes

    model, parameters = find_model("llama3-8b[layers=3,width=512,hidden=1024,heads=8,length=512,vocabulary=1024]")
    peaks = {}
    for ranks in (2, 8):
        plan = Plan(model, parameters, load_cluster("dgx-h100"), Mesh({"dp_shard": ranks}))
        peaks[ranks] = allocated, reserved = reserved_bytes(plan)
        assert allocated < reserved < 2 * allocated
    assert peaks[8][1] < peaks[2][1]
