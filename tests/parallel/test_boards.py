"""Shipped clusters: boards with a device file use it, and a precision without a rate is refused."""

import numpy as np
import pytest

from simdev.errors import Unsupported
from simdev.parallel import Mesh, Prices, load_cluster
from simdev.parallel.costs.collectives import collective_ns
from simdev.parallel.costs.float8 import Float8
from simdev.parallel.program import COMPUTE, Call
from simdev.problem.opcost.device import calibration_names
from simdev.problem.topology import load_topology, topology_names

PRODUCT = "mm(bf16[4096,4096],bf16[4096,4096])->bf16[4096,4096]"


@pytest.mark.parametrize("name", topology_names())
def test_a_board_that_has_a_device_file_uses_it(name):
    for device in load_topology(name).devices:
        board = device.kind.name.partition("-")[0]
        if board in calibration_names():
            assert device.kind.calibrated == board, f"{name}: {device.kind.name}"


def priced(cluster, signature, **options):
    call = Call(COMPUTE, signature.partition("(")[0], signature, 2 * 4096**3, 2**26, 2**25)
    return Prices(load_cluster(cluster), **options).of((call,), Mesh({}), 0)[0]


def test_fp8_is_quicker_on_b200_and_refused_on_a100():
    half, eight = priced("dgx-b200", PRODUCT), priced("dgx-b200", PRODUCT, float8=Float8())
    assert 50_000 < half < 120_000  # 137 GFLOP at 2,250 TFLOP/s take 61 us
    assert eight < half < priced("dgx-h100", PRODUCT)
    with pytest.raises(Unsupported, match=r"dgx-a100: no rate for products in f8; a100-sxm4-80gb has .*bf16"):
        priced("dgx-a100", PRODUCT, float8=Float8())


def test_bf16_is_refused_on_a_board_that_multiplies_in_f16_alone():
    assert priced("v100x8-dgx1", "mm(f16[4096,4096],f16[4096,4096])->f16[4096,4096]") > 0
    with pytest.raises(Unsupported, match="no rate for products in bf16"):
        priced("v100x8-dgx1", "mm(bf16[4096,4096],bf16[4096,4096])->bf16[4096,4096]")


def test_nodes_of_h200():
    for name, gpus in (("h200x4", 4), ("dgx-h200", 8)):
        cluster = load_cluster(f"{name}[nodes=2]")
        assert (cluster.gpus, cluster.nodes, cluster.kind.calibrated) == (gpus, 2, "h200")


def all_reduce_gb_per_s(cluster, ranks, size=1 << 33):
    """Bytes that each rank's links carry, over the time (``busbw`` of nccl-tests)."""
    taken_ns = collective_ns("all_reduce", size, np.arange(ranks), load_cluster(cluster))
    return 2 * (ranks - 1) / ranks * size / taken_ns


def test_a_rack_of_gb200_is_one_domain_of_72():
    cluster = load_cluster("gb200-nvl72[nodes=2]")
    assert (cluster.gpus, cluster.nodes) == (72, 2)
    assert 600 < all_reduce_gb_per_s("gb200-nvl72", 8) < 811  # measured on two trays with 16 GB: 811
    assert 600 < all_reduce_gb_per_s("gb200-nvl72", 72) < 811
    small = [collective_ns("all_gather", 2048, np.arange(ranks), cluster) for ranks in (4, 8, 72)]
    assert small == [
        11_900,
        11_900 + 4 * 600,
        11_900 + 68 * 600,
    ]  # the table's 11.9 us, and a step for each further rank
    half, eight = (priced("gb200-nvl72", PRODUCT, **options) for options in ({}, {"float8": Float8()}))
    assert eight < half < priced("dgx-b200", PRODUCT)


def test_all_links_of_an_mi300x_carry_an_all_reduce():
    for ranks, links in ((2, 1), (4, 3), (8, 7)):  # AMD: 48 GB/s a link; RCCL carries 0.92 of it
        assert all_reduce_gb_per_s("mi300x8", ranks) == pytest.approx(48 * 0.92 * links, rel=0.01)
    assert load_cluster("mi300x8").kind.calibrated == "mi300x"
