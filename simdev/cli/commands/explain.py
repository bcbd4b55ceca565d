"""``simdev explain``."""

from __future__ import annotations

from simdev.cli.app import command
from simdev.cli.chosen_run import EntryOption, MachineOption, RunArgument, WorkloadOption, chosen_run
from simdev.cli.options import JsonOption
from simdev.cli.tables import print_json


@command("explain")
def explain(
    run: RunArgument,
    workload: WorkloadOption = None,
    topology: MachineOption = None,
    placer: EntryOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a step spends its time on, and what would help.

    Of a row of throughput or serve: what the pipeline of all its microbatches or queries spends its time on.
    """
    from simdev.report.explain import Explanation, explain_plan
    from simdev.report.explain import explain as findings

    explanation = chosen_run(run, workload, topology, placer)
    if not isinstance(explanation, Explanation):
        summary, texts = explanation.summary(), explain_plan(explanation)
        if as_json:
            print_json({**summary, "findings": texts})
            return
        where = f"{summary['model']} on {summary['ranks']} x {summary['cluster']}, {summary['mesh']}"
        print(f"{where}: {explanation.step_ns / 1e6:.3f} ms")
        for number, text in enumerate(texts, 1):
            print(f"{number:3}. {text}")
        return
    found = findings(explanation)
    if as_json:
        answers = [{"seconds": finding.ns / 1e9, "text": finding.text} for finding in found]
        print_json({**explanation.times(), "findings": answers})
        return
    print(explanation.heading())
    for number, finding in enumerate(found, 1):
        print(f"{number:3}. {finding.text}")
