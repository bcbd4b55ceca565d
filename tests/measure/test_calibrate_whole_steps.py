"""Whole training steps of transformers: their kernels by hand, published rows, and one factor judged leave-one-out."""

import numpy as np
import pytest

from simdev.calibrate.whole_steps import (
    MODELS,
    MeasuredStep,
    factor,
    leave_one_out,
    read_llm_foundry,
    step_parts,
    step_seconds,
)
from simdev.problem.opcost.physics import PRODUCTS, work_flops
from simdev.problem.topology import load_kinds

ROW = "7b,2048,8,h100_80gb,6,2,10643,amp_bf16,{}\n"
HEADER = (
    "Model,SeqLen (T),# GPUs,GPU,MicroBatchSize,GradAccum,Throughput (T/s/GPU),Precision,Activation Checkpointing\n"
)


def products(parts):
    return sum(
        count * work_flops(part.name, np.array([part.dims]))[0] for part, count in parts if part.name in PRODUCTS
    )


def test_a_step_does_six_operations_for_each_parameter_and_token():
    model = MODELS["7b"]
    assert model.parameters == pytest.approx(6.66e9, rel=0.01)  # as llm-foundry counts them
    assert MODELS["llama3.1-8b"].parameters == pytest.approx(8.03e9 - 128256 * 4096, rel=0.01)  # one of two embeddings
    parts = step_parts(model, 2, 1024)
    assert products(parts) == pytest.approx(6 * model.parameters * 2 * 1024)
    layers = model.parameters - model.vocabulary * model.width
    again = step_parts(model, 2, 1024, recompute="full")
    assert products(again) - products(parts) == pytest.approx(2 * layers * 2 * 1024)
    names = [part.name for part, _ in parts]
    assert names.count("flash_attention") == names.count("flash_attention_backward") == 1


def test_published_rows_become_steps(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(HEADER + ROW.format("False") + ROW.replace("7b", "9b").format("False") + ROW.format("True"))
    plain, again = read_llm_foundry(path)
    assert plain.measured_s == pytest.approx(2 * 6 * 2048 / 10643) and plain.kind == "h100-sxm5-80gb"
    assert 0.6 < plain.predicted_s / plain.measured_s < 1.2
    assert 1.2 < again.predicted_s / plain.predicted_s < 1.4  # a third forward pass


def test_the_factor_of_the_others_judges_a_step():
    steps = [MeasuredStep(str(k), "x", "bf16", measured, 1.0) for k, measured in enumerate((1.1, 1.2, 1.6))]
    assert factor(steps) == 1.2
    assert leave_one_out(steps) == pytest.approx([1.4, 1.35, 1.15])
    assert leave_one_out(steps[:1]) == pytest.approx([1.0])


def test_less_power_slows_products_on_matrix_units():
    kinds, parts = load_kinds(), step_parts(MODELS["1b"], 2, 1024)
    seconds = [step_seconds(parts, kinds[name]) for name in ("a100-sxm4-40gb", "a100-pcie-40gb")]
    assert 1.05 < seconds[1] / seconds[0] < (400 / 250) ** (1 / 3)
