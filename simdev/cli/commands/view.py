"""``simdev view``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simdev.cli import completion
from simdev.cli.app import command
from simdev.cli.chosen_run import (
    EntryOption,
    MachineOption,
    RunArgument,
    WorkloadOption,
    chosen_run,
    compared_runs,
)
from simdev.cli.options import JsonOption, OutOption
from simdev.cli.tables import print_answer


@command("view")
def view(
    run: RunArgument,
    out: OutOption,
    workload: WorkloadOption = None,
    topology: MachineOption = None,
    placer: EntryOption = None,
    before: Annotated[
        str | None,
        typer.Option(help="Draw the run of this placer above, over the same time.", autocompletion=completion.placers),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Draw a run.

    Of a placement, shows devices, links and memory over time, what the step waits for, and the placement on the graph.

    With --before, shows two placements of a folder over the same time.

    Of a row of throughput or serve, shows all microbatches or queries.

    Of a plan, shows the passes of each pipeline rank and its memory over time.

    A name that ends in .json is a trace for Perfetto (ui.perfetto.dev) instead.
    """
    from simdev.report.explain import Explanation

    if before is not None:
        from simdev.report.timeline import draw_before

        old, new, names = compared_runs(run, workload, topology, before, placer)
        draw_before(old, new, names, out)
        times = [one.schedule.step_time_s for one in (old, new)]
        print_answer({"written": [str(out)], "step_time_s": times[1], "before_s": times[0]}, [str(out)], as_json)
        return
    explanation = chosen_run(run, workload, topology, placer)
    if not isinstance(explanation, Explanation):
        _draw_plan(explanation, out)
        print_answer({"written": [str(out)], "step_time_s": explanation.step_ns / 1e9}, [str(out)], as_json)
        return
    if out.suffix == ".json":
        from simdev.report.perfetto import trace_events, write_trace

        name = f"{explanation.graph.name} on {explanation.topology.name}, simulated"
        memory = {device.name: explanation.memory(number) for number, device in enumerate(explanation.topology.devices)}
        found = explanation.graph, explanation.topology, explanation.device, explanation.schedule
        write_trace(out, trace_events(*found, name, memory=memory))
    else:
        from simdev.report.timeline import draw

        draw(explanation, out)
    print_answer({"written": [str(out)], **explanation.times()}, [str(out)], as_json)


def _draw_plan(report, out: Path) -> None:
    if out.suffix == ".json":
        from simdev.report.perfetto import plan_trace_events, write_trace

        write_trace(out, plan_trace_events(report))
    else:
        from simdev.parallel.picture import draw_pipeline

        draw_pipeline(report, out)
