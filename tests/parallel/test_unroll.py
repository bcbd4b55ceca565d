"""Steps as problems: what cannot be unrolled is one sentence."""

import pytest
from drawn import two_streams

from simdev.errors import InvalidInput
from simdev.parallel import unroll
from simdev.parallel.mesh import Mesh


def test_a_step_with_too_many_ops_says_what_to_do(monkeypatch):
    monkeypatch.setattr(unroll, "MAX_OPS", 3)
    with pytest.raises(InvalidInput, match="more than 3 ops, the most that are simulated: simulate it folded"):
        two_streams(10, 10, 2)
    monkeypatch.setattr(unroll, "MAX_OPS", 2)
    with pytest.raises(InvalidInput, match="simulate fewer microbatches"):
        two_streams(10, 10, 1)


def test_an_action_without_work_is_named():
    from simdev.parallel import load_cluster
    from simdev.parallel.costs.timing import Host, Prices, make_template
    from simdev.parallel.program import Segment

    cluster = load_cluster("dgx-h100")
    empty = make_template(Segment("forward", ()), cluster, Mesh({}), 0, Host(), Prices(cluster))
    with pytest.raises(InvalidInput, match="F3.0 has no work"):
        unroll.Unroller([Mesh({})] * 4, True).add(3, ("F", 3, 0), empty, [])
