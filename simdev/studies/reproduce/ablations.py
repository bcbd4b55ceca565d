"""What the parts of each learned placer are worth: the same search without one of them, beside its controls."""

from __future__ import annotations

from collections.abc import Iterator

from simdev.studies.reproduce.lab import (
    Lab,
    LabCase,
    RunResult,
    chosen,
    interval,
    interval_text,
    of_entry,
    sizes,
    steps_ms,
)

TITLE = "Ablations of the learned placers"
CLIMB = "group-climb[by=coarse]"
# Of each paper: what its parts do here, and the variants, the whole placer first and the controls last.
PAPERS = {
    "colocrl": (
        "Mirhoseini et al. 2017",
        "The decoder attends to all groups, or it does not (`attention=false`). `post` has no network: it learns a "
        "distribution for each of the same groups. `group-climb` does not learn.",
        ("colocrl", "colocrl[attention=false]", "colocrl[rate=0.0]", "post", CLIMB),
    ),
    "hdp": (
        "Mirhoseini et al. 2018",
        "The grouper groups at most 64 layers, or several hundred groups of ops (`layers=false`). `colocrl` has "
        "the same kind of placer over given groups.",
        ("hdp", "hdp[layers=false]", "hdp[rate=0.0]", "colocrl", CLIMB),
    ),
    "placeto": (
        "Addanki et al. 2019",
        "Eight rounds of messages between groups, two, or none, in which case a group knows itself and the summaries "
        "of its ancestors, descendants and parallel groups only.",
        ("placeto", "placeto[rounds=2]", "placeto[rounds=0]", "placeto[rate=0.0]", CLIMB),
    ),
    "gdp": (
        "Zhou et al. 2019",
        "Without edits of the best placement (`edits=0.0`, the paper's search); without attention, without the "
        "superposition inside it, or without both (`blocks=0`); without the graph network (`sages=0`).",
        (
            "gdp", "gdp[edits=0.0]", "gdp[attention=false]", "gdp[superposition=false]", "gdp[blocks=0]",
            "gdp[sages=0]", "gdp[rate=0.0]", "group-climb",
        ),
    ),
}  # fmt: skip
BATCHES = ("single-gpu", "expert", "colocrl", "hdp", "placeto", "gdp", "gdp[rate=0.0]", CLIMB)

SIZES = sizes(
    small=dict(
        evaluations=500,
        seeds=3,
        workloads=("inception-v3", "nmt"),
        topologies=("p100x4", "p100x2-v100x2"),
        papers=tuple(PAPERS),
        batches=("inception-v3", "inception-v3[batch=64]", "inception-v3[batch=128]", "nmt", "nmt[batch=128]"),
        unequal="p100x2-v100x2",
    ),
    tiny=dict(
        evaluations=20,
        seeds=2,
        workloads=("transformer-xl-2",),
        topologies=("p100x4",),
        papers=("gdp",),
        batches=("transformer-xl-2",),
    ),
    # Small leaves open whether a part helps by less than three seeds can show, or later than after 500 evaluations.
    full=dict(evaluations=2000, seeds=5),
)


def run(lab: Lab) -> Iterator[list[str]]:
    """The parts of the report."""
    size = lab.size
    cases = [LabCase(workload, topology) for workload in size.workloads for topology in size.topologies]
    yield [
        f"Step times in ms after {size.evaluations:,} evaluations, means of {size.seeds} seeds with 95 % bootstrap "
        "intervals. Under `rate=0.0`, a placer draws everything from a network that does not learn.\n"
    ]
    for name in size.papers:
        paper, what, entries = PAPERS[name]
        yield [f"## `{name}` ({paper})\n", f"{what}\n", _table(lab, name, cases, entries)]
    yield [
        "## Larger batches on unequal devices\n",
        f"The larger the batch, the more of a step is arithmetic, in which the devices of `{size.unequal}` differ.\n",
        _table(lab, "batches", [LabCase(workload, size.unequal) for workload in size.batches], BATCHES),
    ]


def _table(lab: Lab, name: str, cases: list[LabCase], entries: tuple[str, ...]) -> str:
    """A line for each placer, with its step times on each case."""
    found, lines = lab.runs(cases, entries, lab.size.evaluations, lab.size.seeds), []
    for entry in entries:
        runs = of_entry(found, entry)
        here = {case.label: chosen(runs, workload=case.workload, topology=case.topology) for case in cases}
        lines.append({"placer": f"`{entry}`", **{label: _cell(runs) for label, runs in here.items()}})
    return lab.table(name, lines)


def _cell(runs: list[RunResult]) -> str:
    """The mean and its interval; if a run has no placement that fits, how many of them have one."""
    fits = steps_ms(runs)
    return interval_text(interval(fits)) if len(fits) == len(runs) else f"fits in {len(fits)} of {len(runs)}"
