"""``simdev costs``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from simdev.cli.app import REAL, command
from simdev.cli.options import CostsOption, GraphArgument, JsonOption
from simdev.cli.tables import print_json, print_table
from simdev.errors import UnknownName


@command("costs", topic=REAL)
def costs(
    graph: GraphArgument,
    device: Annotated[str, typer.Argument(help="Device kind, or a topology: all its kinds.")],
    top: Annotated[
        int, typer.Option(min=0, help="Number of the most expensive ops to list; 0 lists all ops in order.")
    ] = 20,
    measured: CostsOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the cost of each op and its source.

    Also prints the share of each source (measured, fitted, roofline) in the total time.
    """
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
    answers: list[dict[str, Any]] = []
    for kind in chosen:
        ns, source = model.op_costs(workload, kind)
        total = int(np.maximum(ns, 0).sum())
        shares = {name: int(ns[source == k].clip(0).sum()) / max(total, 1) for k, name in enumerate(SOURCES)}
        order = np.argsort(-ns, kind="stable")[:top] if top else np.arange(workload.n_ops)
        rows = [
            {
                "op": workload.op_names[v],
                "kind": workload.kinds[workload.op_kind[v]],
                "ns": int(ns[v]),
                "source": SOURCES[source[v]],
                "signature": workload.signatures[workload.op_signature[v]],
            }
            for v in order
        ]
        answers.append(
            {
                "device": kind.name,
                "device_file": kind.calibrated or None,
                "total_s": total / 1e9,
                "share": {name: share for name, share in shares.items() if share},
                "ops": rows,
            }
        )
    if as_json:
        print_json(answers)
        return
    for answer in answers:
        parts = ", ".join(f"{name} {100 * share:.1f} %" for name, share in answer["share"].items())
        file = f", device file {answer['device_file']}" if answer["device_file"] else ""
        print(f"{answer['device']}{file}: all ops in sequence take {1e3 * answer['total_s']:.3f} ms; {parts}")
        lines = [[row["op"], row["kind"], f"{row['ns']:,}", row["source"]] for row in answer["ops"]]
        print_table(["op", "kind", "ns", "source"], lines)
