"""``simdev view``."""

from __future__ import annotations

from simdev.cli.app import command
from simdev.cli.chosen_run import EntryOption, MachineOption, RunArgument, WorkloadOption, chosen_run
from simdev.cli.options import OutOption


@command("view")
def view(
    run: RunArgument,
    out: OutOption,
    workload: WorkloadOption = None,
    topology: MachineOption = None,
    placer: EntryOption = None,
) -> None:
    """Draw a run.

    Shows devices, links and memory over time, what the step waits for, and the placement on the graph.

    A name that ends in .json is a trace for Perfetto (ui.perfetto.dev) instead.
    """
    explanation = chosen_run(run, workload, topology, placer)
    if out.suffix == ".json":
        from simdev.report.perfetto import trace_events, write_trace

        name = f"{explanation.graph.name} on {explanation.topology.name}, simulated"
        memory = {device.name: explanation.memory(number) for number, device in enumerate(explanation.topology.devices)}
        found = explanation.graph, explanation.topology, explanation.device, explanation.schedule
        write_trace(out, trace_events(*found, name, memory=memory))
    else:
        from simdev.report.timeline import draw

        draw(explanation, out)
    print(out)
