import pytest

from simdev.errors import InvalidInput
from simdev.parallel.mesh import Mesh, parse_mesh


def test_a_mesh_is_parsed_and_counted():
    mesh = parse_mesh("dp_shard=8, tp=4,pp=2")
    assert (mesh.ranks, mesh.stage_ranks, mesh.replicas) == (64, 32, 8)
    assert mesh["dp_replicate"] == 1 and mesh.inner == (("dp_shard", 8), ("tp", 4))


@pytest.mark.parametrize("text", ["", "tp", "tp=0", "tp=2,tp=4", "tp=x", "rows=2", "tp=8,dp_shard=10000000"])
def test_bad_meshes_are_refused(text):
    with pytest.raises(InvalidInput, match="mesh"):
        parse_mesh(text)


def test_the_lines_of_an_axis_are_its_communicators():
    mesh = Mesh({"dp_shard": 2, "tp": 3})
    assert mesh.lines(["tp"]).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert mesh.lines(["dp_shard"]).tolist() == [[0, 3], [1, 4], [2, 5]]
    assert sorted(mesh.lines(["dp_shard", "tp"])[0].tolist()) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("axes", [("tp",), ("dp_shard",), ("dp_shard", "tp")])
def test_a_communicator_names_its_axes(axes):
    mesh = Mesh({"dp_shard": 2, "tp": 3})
    assert all(mesh.axes_of(line) == axes for line in mesh.lines(axes))


def test_ranks_of_expert_parallelism_hold_different_tokens():
    assert Mesh({"dp_replicate": 3, "dp_shard": 2, "ep": 4, "tp": 5}).replicas == 24
