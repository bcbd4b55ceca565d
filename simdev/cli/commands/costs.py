"""costs, calibrate: what ops take and where the figures come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from simdev.cli.commands import CostsOption, GraphArgument, JsonOption, OutOption, command, print_table
from simdev.errors import InvalidInput, UnknownName


@command("costs")
def costs(
    graph: GraphArgument,
    device: Annotated[str, typer.Argument(help="Device kind, or a topology: all its kinds.")],
    top: Annotated[int, typer.Option(min=0, help="How many of the costliest ops to list; 0: all, in order.")] = 20,
    measured: CostsOption = None,
    as_json: JsonOption = False,
) -> None:
    """What each op takes on a device and where the figure comes from; the share of all time by source."""
    import numpy as np

    from simdev.placers import registry
    from simdev.problem.costs import SOURCES, CostModel, load_measured
    from simdev.problem.topology import load_kinds, load_topology, topology_names

    workload, kinds = registry.load_workload(graph), load_kinds()
    if device in kinds:
        chosen = [kinds[device]]
    elif device in topology_names() or device.endswith(".toml"):
        chosen = list(load_topology(device).kinds)
    else:
        raise UnknownName("device kind or topology", device, [*kinds, *topology_names()])
    model = CostModel() if measured is None else CostModel(measured=load_measured(measured))
    answers = []
    for kind in chosen:
        ns, source = model.op_costs(workload, kind)
        total = int(np.maximum(ns, 0).sum())
        shares = {name: int(ns[source == k].clip(0).sum()) / max(total, 1) for k, name in enumerate(SOURCES)}
        order = np.argsort(-ns, kind="stable")[:top] if top else np.arange(workload.n_ops)
        rows = [
            {"op": workload.op_names[v], "kind": workload.kinds[workload.op_kind[v]], "ns": int(ns[v]),
             "source": SOURCES[source[v]], "signature": workload.signatures[workload.op_signature[v]]}
            for v in order
        ]  # fmt: skip
        answers.append({"device": kind.name, "device_file": kind.calibrated or None, "total_s": total / 1e9,
                        "share": {name: share for name, share in shares.items() if share}, "ops": rows})  # fmt: skip
    if as_json:
        print(json.dumps(answers, indent=1))
        return
    for answer in answers:
        shares = ", ".join(f"{name} {100 * share:.1f} %" for name, share in answer["share"].items())
        file = f", device file {answer['device_file']}" if answer["device_file"] else ""
        print(f"{answer['device']}{file}: ops in turn take {1e3 * answer['total_s']:.3f} ms; {shares}")
        lines = [[row["op"], row["kind"], f"{row['ns']:,}", row["source"]] for row in answer["ops"]]
        print_table(["op", "kind", "ns", "source"], lines)


@command("calibrate")
def calibrate(
    data: Annotated[
        list[Path], typer.Argument(help="Measured files, or folders: NeuSight, DeepBench, PyTorch traces.")
    ],
    out: OutOption = Path("device.toml"),
    model: Annotated[str | None, typer.Option(help="Which device model of the data (default: all).")] = None,
    seed: Annotated[int, typer.Option(help="Of the fits.")] = 0,
) -> None:
    """Fit a device file to measured op tables: classes, efficiencies, errors on held-out shapes, and sources.

    A fifth of all shapes is never fitted to and gives the errors. A kind of a topology file uses it by
    calibrated = "device.toml". Where --out is a folder, every device model of the data gets a file in it.
    """
    from simdev.measure.calibrate.build import build_one, read_tables, samples_by_model, save_calibration, with_host

    found = read_tables(data)
    grouped = samples_by_model(found)
    if model is not None and model not in grouped:
        raise UnknownName("device model", model, grouped, source="data")
    if model is None and len(grouped) > 1 and not out.is_dir():
        choices = ", ".join(sorted(grouped))
        raise InvalidInput(f"several device models: one by --model, or a folder as --out: {choices}", source="data")
    for chosen in [model] if model else sorted(grouped):
        calibration = with_host(build_one(chosen, grouped, seed), found)
        path = out / f"{chosen}.toml" if out.is_dir() else out
        save_calibration(calibration, path)
        _print_fits(calibration)
        for what, why in calibration.notes.items():
            if str(why).startswith("left out"):
                print(f"{what} {why}")
        print(path)
    for problem in found.report():
        print(f"left out: {problem}")


def _print_fits(calibration) -> None:
    lines = [
        [name, str(fit.rows), f"{fit.efficiency:.3f}", f"{100 * fit.error_mean:.1f}", f"{100 * fit.error_median:.1f}",
         fit.source[:60]]
        for name, fit in calibration.classes.items()
    ]  # fmt: skip
    print_table(["class", "rows", "efficiency", "held-out mean %", "median %", "source"], lines)
