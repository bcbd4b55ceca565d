"""Readers of kernel tables on matrix units, and the fits to them: small tables made by a known law."""

import gzip
from dataclasses import replace

import numpy as np
import pytest

from simdev.calibrate.build import datasheets
from simdev.calibrate.kernel_tables import fitted, read_kernel_tables
from simdev.calibrate.matrix_units import predicted_s, with_matrix_units
from simdev.calibrate.observations import Observations
from simdev.errors import InvalidInput
from simdev.problem.opcost.device import Calibration, ClassFit, load_calibration
from simdev.problem.opcost.physics import baseline_s
from simdev.studies.fidelity.kernels import kernel_cases

H100 = "NVIDIA_H100_80GB_HBM3"
VIDUR = "num_tokens,n_embd,n_expanded_embd,n_head,n_kv_head,num_tensor_parallel_workers,use_gated_mlp"


def vidur_table(path, rows):
    """Rows of ``(tokens, split, ms of attn_pre_proj, ms of add)`` of a model of width 1,024."""
    lines = [f"{VIDUR},time_stats.attn_pre_proj.median,time_stats.add.median"]
    lines += [f"{tokens},1024,4096,16,4,{split},True,{float(one)!r},{float(two)!r}" for tokens, split, one, two in rows]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))


def test_vidur_rows_become_products_and_passes(tmp_path):
    vidur_table(tmp_path / "vidur_h100_toy_mlp.csv.gz", [(2048, 2, 0.5, 0.25)])
    tables = {rows.name: rows for rows in read_kernel_tables([tmp_path])}
    assert set(tables) == {"gemm", "vector"}
    gemm, vector = tables["gemm"], tables["vector"]
    assert gemm.dims.tolist() == [[1, 2048, (16 + 8) * 64 // 2, 1024]] and gemm.seconds.tolist() == [0.0005]
    assert (gemm.device, gemm.dtype, gemm.source) == (H100, "f16", "vidur toy")
    assert vector.dims.tolist() == [[2 * 2 * 2048 * 1024, 2 * 2048 * 1024]]


def test_openxla_rows_become_products_by_precision(tmp_path):
    (tmp_path / "openxla_matmul.csv").write_text(
        "device,batch,m,n,k,dtypes,flop_per_s\n"
        "sm_90,2,256,512,1024,bf16xbf16->bf16,1e14\nsm_90,1,256,256,256,f32xf32->f32,1e14\nother,1,1,1,1,x,1\n"
    )
    tables = read_kernel_tables([tmp_path])
    assert [(rows.name, rows.dtype) for rows in tables] == [("bmm", "bf16"), ("gemm", "tf32")]
    assert tables[0].seconds[0] == pytest.approx(2 * 2 * 256 * 512 * 1024 / 1e14)
    assert not any(map(fitted, tables))


def test_parquet_tables_of_a_stack(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def write(stack, what, table, **columns):
        folder = tmp_path / "h100_sxm" / what / stack / "1.0"
        folder.mkdir(parents=True, exist_ok=True)
        columns["device"] = ["NVIDIA H100 80GB HBM3"] * len(columns["m"])
        parquet.write_table(pa.table(columns), folder / f"{table}_perf.parquet")

    kinds, latency = ["bfloat16", "fp8", "fp8", "fp8", "int8_wo"], [1.0, 2.0, 2.0, 2.0, 3.0]
    for stack in ("vllm", "trtllm"):
        write(stack, "gemm", "gemm", gemm_dtype=kinds, m=[1, 2, 3, 4, 5], n=[4] * 5, k=[7] * 5, latency=latency)
        write(stack, "quantize", "scale_matrix", m=[2, 3], k=[7, 7], latency=[0.25, 1.5])
        write(stack, "quantize", "computescale", m=[2, 3], k=[7, 7], latency=[0.5, 0.5])
    first, one, _, two = read_kernel_tables([tmp_path])  # in order of stacks
    assert (first.dtype, first.dims.tolist(), first.seconds.tolist()) == ("bf16", [[1, 1, 4, 7]], [0.001])
    # the cast is left out, and products whose cast is not known or takes most of the reading
    assert one.dims.tolist() == two.dims.tolist() == [[1, 2, 4, 7]]
    assert (one.dtype, one.source, fitted(one)) == ("f8", "aiconfigurator trtllm", True)
    assert one.seconds.tolist() == pytest.approx([0.002 - 0.00075])
    assert (two.source, fitted(two)) == ("aiconfigurator vllm", False)
    assert two.seconds.tolist() == pytest.approx([0.002 - 0.00025])


def test_damaged_tables_are_named(tmp_path):
    (tmp_path / "openxla_matmul.csv").write_text("device,batch\nsm_90,x\n")
    with pytest.raises(InvalidInput, match="openxla"):
        read_kernel_tables([tmp_path])
    with pytest.raises(InvalidInput, match="no such"):
        read_kernel_tables([tmp_path / "absent"])


def test_a_fit_finds_the_efficiency_and_is_judged_by_other_sources(tmp_path):
    pytest.importorskip("sklearn")
    known = datasheets()[H100]
    rng = np.random.default_rng(0)

    def law(tokens, split, efficiency):
        dims = np.array([[1, tokens, (16 + 8) * 64 // split, 1024]])
        return 1e3 * (known.launch_s + baseline_s("gemm", dims, known.sheet, "f16")[0] / efficiency)

    shapes = [
        (int(tokens), int(split)) for tokens, split in zip(rng.integers(512, 4096, 200), [1, 2] * 100, strict=True)
    ]
    vidur_table(tmp_path / "vidur_h100_phi-2_mlp.csv.gz", [(t, s, law(t, s, 0.6), 0.25) for t, s in shapes])
    vidur_table(tmp_path / "vidur_h100_other_mlp.csv.gz", [(t, s, law(t, s, 0.5), 0.25) for t, s in shapes])
    device = Calibration("h100", known.sheet, 2500, {"gemm": ClassFit(0.5)})
    fit = with_matrix_units(device, read_kernel_tables([tmp_path])).classes["product bf16"]
    assert fit.efficiency == pytest.approx(0.6, rel=0.02)
    assert fit.error_mean == pytest.approx(1 - 0.5 / 0.6, abs=0.03)  # of the source that was not fitted to
    assert "other" not in fit.source


def test_the_smallest_products_of_a_table_show_the_constant_of_its_timer(tmp_path):
    calibration, known = load_calibration("b200"), datasheets()["NVIDIA_B200"]
    calibration = replace(calibration, steps={})
    sides = [(256, 256, 256), (256, 256, 512), (256, 512, 256), (512, 256, 256), (2048, 2048, 2048), (4096, 4096, 2048)]
    dims = np.array([(1, *side) for side in sides])
    rows = Observations("NVIDIA_B200", "gemm", "bf16", dims, np.ones(len(dims)), "OpenXLA")
    kernel = predicted_s(calibration, rows, known.sheet, 0.0)

    def error(constant_s, few=0):
        lines = [
            f"sm_100_B200,1,{m},{n},{k},bf16xbf16->bf16,{2 * m * n * k / (seconds + constant_s)!r}"
            for (m, n, k), seconds in zip(sides[few:], kernel[few:].tolist(), strict=True)
        ]
        text = "\n".join(["device,batch,m,n,k,dtypes,flop_per_s", *lines])
        (tmp_path / "openxla_matmul.csv").write_text(text)
        (case,) = kernel_cases(tmp_path, [])
        assert case["case"] == "OpenXLA: gemm bf16, 2 shapes"
        return case["mean_error"]

    assert error(9e-6) < 1e-6 and error(1e-6) < 1e-6
    assert error(9e-6, few=2) > 0.05  # too few small products: a launch is taken
