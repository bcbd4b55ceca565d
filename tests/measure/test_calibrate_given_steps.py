"""Factors of a device file from measured whole steps."""

import numpy as np
import pytest

from simdev.calibrate.given_steps import fit_steps, left_out_ns, read_steps
from simdev.cli import main as cli
from simdev.errors import InvalidInput
from simdev.problem.graph import GraphBuilder
from simdev.problem.graph_file import save_graph
from simdev.problem.opcost.device import load_calibration

KIND = "a100-sxm4-80gb"


def write(folder, measured_ms):
    """Graphs of products in bf16 and a file that says how long their steps took."""
    lines = ["graph,precision,step_ms"]
    for number, ms in enumerate(measured_ms):
        builder, size = GraphBuilder(f"g{number}"), 4096 * (number + 1)
        text = f"mm(bf16[{size},4096],bf16[4096,4096])->bf16[{size},4096]"
        moved = dict(bytes_read=2 * 4096 * (size + 4096), bytes_written=2 * size * 4096)
        builder.op("product", "mm", signature=text, flops=2 * size * 4096**2, **moved)
        save_graph(builder.build(), folder / f"g{number}.npz")
        lines.append(f"{folder / f'g{number}.npz'},bf16,{ms}")
    path = folder / "steps.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def alone_ms(folder, count):
    _, steps = fit_steps(read_steps(write(folder, [0.7 * (n + 1) for n in range(count)])), KIND)
    return [step.alone_ns / 1e6 for step in steps]


def test_the_factor_is_the_median_of_what_the_steps_ask_for(tmp_path):
    times = alone_ms(tmp_path, 3)
    path = write(tmp_path, [ms * slower for ms, slower in zip(times, (1.1, 1.2, 1.5), strict=True)])
    calibration, steps = fit_steps(read_steps(path), KIND)
    assert calibration.steps["bf16"] == pytest.approx(1.2, rel=0.01)  # launches are not multiplied
    left_out = np.array(left_out_ns(steps)) / [step.step_ns for step in steps]
    assert left_out == pytest.approx([1.35 / 1.1, 1.3 / 1.2, 1.15 / 1.5], rel=0.01)
    assert calibration.classes["product bf16"] is load_calibration("a100").classes["product bf16"]


def test_a_single_step_has_no_other_to_be_judged_by(tmp_path):
    _, steps = fit_steps(read_steps(write(tmp_path, [0.7])), KIND)
    assert np.isnan(left_out_ns(steps)).all()


@pytest.mark.parametrize(
    "change, message",
    [
        (("bf16,0.7", "f8,0.7"), "no kernel of the graph is costed in f8"),
        (("bf16,0.7", "bf16,700"), "would need a factor of"),
        (("bf16,0.7", "bf16,-1"), "line 2, step_ms"),
        (("bf16,0.7", "b16,0.7"), "line 2.*precision"),
        (("step_ms", "ms"), "step_ms"),
    ],
)
def test_steps_that_say_nothing_are_refused(tmp_path, change, message):
    path = write(tmp_path, [0.7])
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(InvalidInput, match=message):
        fit_steps(read_steps(path), KIND)


def test_the_command_writes_a_device_file(tmp_path, monkeypatch, capsys):
    path, out = write(tmp_path, [0.7, 1.4]), tmp_path / "mine.toml"

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["simdev", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        return code, capsys.readouterr()

    code, said = run("calibrate", "--steps", path, "--kind", KIND, "-o", out)
    assert code == 0 and "factor of the others" in said.out
    assert load_calibration(str(out)).steps["bf16"] > 0
    code, said = run("calibrate", "--steps", path)
    assert code == 2 and "--steps needs --kind" in said.err
