"""Every constant of simdev that was fitted to measurements: its value, the rows of the fit, and what judges it."""

from __future__ import annotations

from simdev.calibrate.matrix_units import FLASH
from simdev.parallel.costs.timing import ODD_PRODUCT
from simdev.parallel.framework import find_framework
from simdev.problem.opcost.device import calibration_names, load_calibration
from simdev.problem.topology import load_kinds

ROOFLINES = (
    "convolutions on H100, H200, B200, L40S and MI300X, and pooling and batch norm there but on H100; on A100, only "
    "3 x 3 convolutions of stride 1 are measured, others follow P100, T4 and V100",
    "f32 kernels and elementwise kernels of H100, H200, B200, L40S and MI300X: those of the A100, scaled by datasheets",
    "norms and softmax in 16 bit: fits of f32 by bytes",
    "the backward pass of fused attention: 2.5 times the products of forward, at 1/1.16 of its rate (Dao 2023)",
    "FlashAttention 2 on H100 and H200: " + ", ".join(f"{ratio} times" for ratio in FLASH["h100"]) + " the vendor's "
    "forward and backward pass (Shah et al. 2024, middle of the range)",
    "collectives across nodes: NCCL's own constants; over PCIe the same, compared with one machine of four A100",
    "elementwise kernels under torch.compile: one kernel for each run, which reads its inputs and writes its last "
    "result",
    "FP8 training: casts by their bytes; gathers of weights stay in 16 bit; the factor of whole steps is that of bf16",
)
FILE_ROWS = "op tables and kernel tables without their held-out rows; sources in the file"

STEPS_JUDGED = {"bf16": "F7, by the other steps", "f32": "none: the data holds no f32 step of the board"}


def constants() -> list[list[str]]:
    """Rows ``(constant, value, fitted to, judged by)``."""
    rows = []
    for name in calibration_names():
        found = load_calibration(name)
        own = [fit for key, fit in found.classes.items() if key in found.own and fit.rows]
        count = sum(fit.rows for fit in own)
        judged = "held-out rows and other sources: F5"
        rows.append(
            [f"device file {name}: {len(own)} classes", "efficiency and trees", f"{count} rows: {FILE_ROWS}", judged]
        )
        for precision, factor in found.steps.items():
            note = str(found.notes.get(f"steps {precision}", "given by the user"))
            rows.append(
                [
                    f"device file {name}: whole steps in {precision}",
                    f"{factor:g}",
                    note,
                    STEPS_JUDGED.get(precision, "none"),
                ]
            )
    shares = load_kinds()["h100-sxm5-80gb"].memory_efficiency
    host, three = (
        find_framework("megatron").host,
        ", ".join(f"{shares[name]:g}" for name in ("norm", "norm_backward", "pool")),
    )
    foundry = find_framework("llm-foundry").factors
    rows += [
        ["H100: shares of bandwidth of batch norm, its backward, and pooling", three, "ResNet-50 on H100 (TrioSim)",
         "pooling by VGG-13, for information"],
        ["host megatron: forward kernel, collective, collective of eight ranks",
         f"{host.forward_ns / 1e3:g}, {host.collective_ns / 1e3:g}, {host.wide_collective_ns / 1e3:g} us",
         "vTrain, one node, all rows; for each judged model the rows of the other two", "F8 one node, F8 many nodes"],
        ["host megatron: backward kernel", f"{host.backward_ns / 1e3:g} us", "the same, with all rows in view", "none"],
        ["factor of 16-bit products with an odd side", f"{ODD_PRODUCT:g}",
         "vTrain, one node, without tensor parallelism", "none"],
        ["attention of 2023 (Triton) in llm-foundry", f"{foundry['attention']:g}",
         "26 of 52 rows of llm-foundry, those with odd numbers", "the other 26 rows (4.3 %); F8 FSDP has rows of both"],
    ]  # fmt: skip
    return rows
