"""TrioSim's operator tables."""

import pytest

from simdev.errors import InvalidInput
from simdev.studies.fidelity.triosim import convolution_cases, predicted_s, read_operators

TENSORS = """Index,TensorID,TensorShape,TensorNumElement,TensorEachByte,TensorType,TensorStorgeid,gpuid
0,4,"[8, 3, 32, 32]",24576,4,input,5,0
1,6,"[16, 3, 3, 3]",432,4,weight,7,0
2,13,"[8, 16, 16, 16]",32768,4,output,14,0
"""
HEADER = "OperatorName,Operator_input,Operator_output,Operator_cudatime,Operator_cudatimenooverlap,OutputSize\n"
ROWS = """aten::conv2d,[4; 6],[13],12,10,[32768]
aten::view,[4],[4],1,1,[1]
aten::batch_norm,[13; 6],[13],20,20,[32768]
autograd::engine::evaluate_function: ConvolutionBackward0,[13; 4; 6],[9; 6; 9],99,30,[0; 432; 0]
"""


def write(folder, rows=ROWS):
    (folder / "h100_bs128_resnet50_tensors.csv").write_text(TENSORS)
    path = folder / "h100_bs128_resnet50.csv"
    path.write_text(HEADER + rows)
    return path


def test_operators_have_the_signatures_of_captured_graphs(tmp_path):
    forward, norm, backward = read_operators(write(tmp_path))
    text = "convolution(f32[8,3,32,32],f32[16,3,3,3],stride=[2,2],groups=1)->f32[8,16,16,16]"
    assert forward.signature == text and forward.flops == 2 * 32768 * 27
    assert forward.measured_s == pytest.approx(10e-6)  # without overlap
    assert norm.signature == "native_batch_norm" and norm.flops == 0
    assert "output_mask=[False,True,False]" in backward.signature and backward.flops == forward.flops
    assert (predicted_s([forward, norm, backward]) > 0).all()


def test_what_was_used_for_the_device_does_not_count(tmp_path):
    write(tmp_path)
    cases = {case["group"]: case for case in convolution_cases(tmp_path)}
    assert len(cases) == 3 and not cases["H100, convolutions (TrioSim)"]["left_out"]
    assert cases["H100, batch norm (TrioSim)"]["left_out"]


def test_damaged_tables_are_refused(tmp_path):
    with pytest.raises(InvalidInput):
        read_operators(write(tmp_path, "aten::conv2d,[4; 77],[13],12,10,[32768]\n"))
    path = write(tmp_path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(InvalidInput):
        read_operators(path)
