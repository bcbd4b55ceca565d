"""``simdev calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.app import REAL, command
from simdev.cli.options import JsonOption, writable
from simdev.cli.tables import print_figures
from simdev.errors import InvalidInput, UnknownName


@command("calibrate", topic=REAL)
def calibrate(
    data: Annotated[
        list[Path] | None,
        typer.Argument(help="Measured files or folders: op tables, profiler traces, logs of nccl-tests."),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Where to write: a file, or a folder.", callback=writable)
    ] = Path("device.toml"),
    model: Annotated[str | None, typer.Option(help="Which device model of the data (default: all).")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the fits.")] = 0,
    steps: Annotated[
        Path | None,
        typer.Option(help="CSV of measured whole steps (graph,precision,step_ms): fit a factor to each precision."),
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="With --steps or traces: the device kind that they were measured on.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a device file from measured times: op tables, or profiler traces of your own board.

    A fifth of all shapes is held out of the fit; the errors are measured on it. A device kind of a topology file uses
    the device file by calibrated = "device.toml". If --out is a folder, every device model of the data gets a file.
    Traces (PyTorch's profiler with record_shapes) with --kind: the device file of the kind is copied with the times of
    their ops. A log of nccl-tests gives the ranges of a link. With --steps, the device file of a kind is copied with
    factors fitted to measured whole steps.
    """
    if steps is not None:
        if data or kind is None:
            raise InvalidInput("--steps needs --kind, and no data beside it", source="calibrate")
        _fit_steps(steps, kind, out, as_json)
        return
    if not data:
        raise InvalidInput("name measured files or folders, or --steps with --kind", source="calibrate")
    if kind is not None:
        _from_traces(data, kind, out, as_json)
        return
    if all(path.is_file() and path.suffix in (".txt", ".log", ".out") for path in data):
        _link(data, out, as_json)
        return
    from simdev.calibrate import matrix_units
    from simdev.calibrate.build import (
        build_one,
        has_op_tables,
        read_tables,
        samples_by_model,
        save_calibration,
        with_host,
    )
    from simdev.calibrate.kernel_tables import read_kernel_tables

    kernels = read_kernel_tables(data)
    found = read_tables(data) if has_op_tables(data) or not kernels else None
    grouped = samples_by_model(found) if found else {}
    models = sorted({*grouped, *matrix_units.models_of(kernels)})
    if model is not None and model not in models:
        raise UnknownName("device model", model, models, source="data")
    if model is None and len(models) > 1 and not out.is_dir():
        choices = ", ".join(models)
        text = f"several device models: choose one with --model, or give a folder as --out: {choices}"
        raise InvalidInput(text, source="data")
    fitted, written = [], []
    for chosen in [model] if model else models:
        if found is not None and chosen in grouped:
            measured = with_host(build_one(chosen, grouped, seed), found)
        else:
            measured = matrix_units.bare(chosen)
        calibration = matrix_units.with_matrix_units(measured, kernels, seed)
        path = out / f"{chosen}.toml" if out.is_dir() else out
        save_calibration(calibration, path)
        fitted += [[chosen, *line] for line in _fits(calibration)]
        written.append(path)
        if as_json:
            continue
        print_figures(HEADER, _fits(calibration), False)
        for what, why in calibration.notes.items():
            if str(why).startswith("left out"):
                print(f"{what} {why}")
        print(path)
    left_out = list(found.report()) if found else []
    if as_json:
        print_figures(["model", *HEADER], fitted, True, written, left_out=left_out)
        return
    for problem in left_out:
        print(f"left out: {problem}")


def _fit_steps(path: Path, kind: str, out: Path, as_json: bool) -> None:
    from simdev.calibrate.build import save_calibration
    from simdev.calibrate.given_steps import fit_steps, left_out_ns, read_steps

    calibration, steps = fit_steps(read_steps(path), kind)
    lines = []
    for step, left_out in zip(steps, left_out_ns(steps), strict=True):
        errors = [f"{100 * (ns / step.step_ns - 1):+.1f}" if ns == ns else "" for ns in (step.alone_ns, left_out)]
        lines.append([step.graph, step.precision, f"{step.step_ns / 1e6:.4g}", *errors])
    save_calibration(calibration, out)
    header = ["step", "precision", "measured ms", "without a factor %", "factor of the others %"]
    if as_json:
        print_figures(header, lines, True, [out], factors=dict(calibration.steps))
        return
    print_figures(header, lines, False)
    print(", ".join(f"{precision}: {factor:.4g}" for precision, factor in calibration.steps.items()))
    print(out)


def _from_traces(paths: list[Path], kind: str, out: Path, as_json: bool) -> None:
    from simdev.calibrate.build import save_calibration
    from simdev.calibrate.own_trace import own_calibration, read_own_traces
    from simdev.calibrate.traces import read_traces
    from simdev.problem.topology import load_kinds

    kinds = load_kinds()
    if kind not in kinds:
        raise UnknownName("device kind", kind, kinds, source="--kind")
    found = read_own_traces([trace for path in paths for trace in read_traces(path)])
    calibration, classes = own_calibration(found, kinds[kind])
    save_calibration(calibration, out)
    total = sum(line.ns for line in classes)
    rows = [
        [line.name, str(line.ops), f"{100 * line.ns / total:.1f}", f"{line.factor:.3f}", *map(_percent, line.errors)]
        for line in classes
    ]
    header = ["class", "ops", "% of the time", "factor", "error before %", "by the factor of the others %"]
    left_out = f"{100 * found.left_out_ns / max(1, found.busy_ns):.1f} % of the kernels' time has no op with shapes"
    if as_json:
        print_figures(header, rows, True, [out], launch_us=calibration.launch_ns / 1e3, left_out=left_out)
        return
    print_figures(header, rows, False)
    print(
        f"launch {calibration.launch_ns / 1e3:.2f} us; {len(calibration.ops)} ops with a time of their own; {left_out}"
    )
    print(
        f'{out}: name it in a topology file: calibrated = "{out.name}", launch_us = {calibration.launch_ns / 1e3:.2f}'
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f}" if share == share else ""


def _link(paths: list[Path], out: Path, as_json: bool) -> None:
    from simdev.calibrate.links import fit_table, of_one_hop, ranges_toml, read_links
    from simdev.files import write_text

    fits = [fit_table(of_one_hop(table)) for path in paths for table in read_links(path)]
    rows = [[fit.name, str(len(fit.ranges)), f"{100 * fit.residual:.1f}", _percent(fit.error)] for fit in fits]
    write_text(out, "\n".join(f'[link."{fit.name}"]\n{ranges_toml(fit)}\n' for fit in fits))
    print_figures(["link", "ranges", "error %", "held-out sizes %"], rows, as_json, [out])
    if not as_json:
        print(out)


HEADER = ["class", "rows", "efficiency", "held-out mean %", "median %", "source"]


def _fits(calibration) -> list[list[str]]:
    """A line of the table for each class of ops."""
    return [
        [
            name,
            str(fit.rows),
            f"{fit.efficiency:.3f}",
            f"{100 * fit.error_mean:.1f}",
            f"{100 * fit.error_median:.1f}",
            fit.source[:60],
        ]
        for name, fit in calibration.classes.items()
    ]
