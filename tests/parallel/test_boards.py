"""Shipped clusters: boards with a device file use it, and a precision without a rate is refused."""

import pytest

from simdev.errors import Unsupported
from simdev.parallel import Mesh, Prices, load_cluster
from simdev.parallel.costs.float8 import Float8
from simdev.parallel.program import COMPUTE, Call
from simdev.problem.opcost.device import calibration_names
from simdev.problem.topology import load_topology, topology_names


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
    product = "mm(bf16[4096,4096],bf16[4096,4096])->bf16[4096,4096]"
    half, eight = priced("dgx-b200", product), priced("dgx-b200", product, float8=Float8())
    assert 50_000 < half < 120_000  # 137 GFLOP at 2,250 TFLOP/s take 61 us
    assert eight < half < priced("dgx-h100", product)
    with pytest.raises(Unsupported, match=r"dgx-a100: no rate for products in f8; a100-sxm4-80gb has .*bf16"):
        priced("dgx-a100", product, float8=Float8())


def test_bf16_is_refused_on_a_board_that_multiplies_in_f16_alone():
    assert priced("v100x8-dgx1", "mm(f16[4096,4096],f16[4096,4096])->f16[4096,4096]") > 0
    with pytest.raises(Unsupported, match="no rate for products in bf16"):
        priced("v100x8-dgx1", "mm(bf16[4096,4096],bf16[4096,4096])->bf16[4096,4096]")


def test_nodes_of_h200():
    for name, gpus in (("h200x4", 4), ("dgx-h200", 8)):
        cluster = load_cluster(f"{name}[nodes=2]")
        assert (cluster.gpus, cluster.nodes, cluster.kind.calibrated) == (gpus, 2, "h200")
