"""The learned search against its controls: does the network help, on graphs and machines that it has never seen?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from simdev.bench.matrix import MACHINES, TWELVE
from simdev.studies.reproduce.lab import Lab, LabCase, RunResult, Size, best_at, chosen, geometric, interval_text, sizes

TITLE = "Learned search: a network that chooses the moves of a search"
LEARNED = "learned-search"
UNIFORM, UNTRAINED, ESTIMATE = (f"{LEARNED}[choice={choice}]" for choice in ("uniform", "untrained", "estimate"))
SEARCHES = ("portfolio", "local-search")
CAP = 10.0  # the ratio of a run that does not fit


SMALLEST = ("dlrm", "transformer-xl-2", "wavenet-2x18")  # graphs of the board
TEN = tuple(name for name in TWELVE if not name.startswith("gnmt"))  # of GNMT, a run takes up to a minute
SIZES = sizes(
    small=dict(
        evaluations=2000,
        seeds=3,
        workloads=TEN,
        workloads_of_all_seeds=SMALLEST,
        topologies=MACHINES,
        checkpoints=(20, 100, 500, 2000),
    ),
    tiny=dict(
        evaluations=60,
        seeds=2,
        workloads=("transformer-xl-2",),
        workloads_of_all_seeds=("transformer-xl-2",),
        topologies=("p100x4",),
        checkpoints=(20, 60),
    ),
    full=dict(workloads=TWELVE),  # small leaves open what the network is worth on GNMT, the largest graphs
)

Runs = dict[str, list[RunResult]]  # of each entry, over cases and seeds


def run(lab: Lab) -> Iterator[list[str]]:
    """The parts of the report."""
    size = lab.size
    cases = [LabCase(name, machine) for name in size.workloads for machine in size.topologies]
    whole = _runs(lab, cases, (LEARNED, UNIFORM, UNTRAINED, *SEARCHES, "single-gpu"), 1)
    best = best_known(whole)
    yield [
        "The network was trained on drawn graphs and machines alone: every workload, family and machine below is "
        f"unseen. Each entry has {size.evaluations:,} evaluations. A ratio is a step time over the best one of all "
        f"entries; a placement that does not fit counts as {CAP:g}. Intervals are 95 % bootstrap intervals over cases "
        "and seeds. All variants of the learned search draw the same kinds of moves: *uniform* simulates a random one, "
        "and *untrained* chooses by a network of random weights.\n",
        f"## All {len(cases)} cases, one seed\n",
        lab.table("board", ratios_of(whole, best, size, "portfolio")),
        "## Unseen families\n",
        f"The ratios of `{LEARNED}`, and its smallest speedup over one GPU (empty: one GPU never fits).\n",
        lab.table("families", families(whole, best, size)),
    ]
    cases = [LabCase(name, machine) for name in size.workloads_of_all_seeds for machine in size.topologies]
    controlled = _runs(lab, cases, (LEARNED, UNIFORM, UNTRAINED, ESTIMATE), size.seeds)
    yield [
        f"## {len(cases)} cases, {size.seeds} seeds, all controls\n",
        "*estimate* chooses by the feature that matters most to the network: how long the moved ops wait for their "
        "device on urgent paths.\n",
        lab.table("controls", ratios_of(controlled, best_known(controlled), size, UNIFORM)),
    ]


def _runs(lab: Lab, cases: list[LabCase], entries: tuple[str, ...], seeds: int) -> Runs:
    for repeats in range(1, seeds):  # an interrupted study then has the first seeds of all entries
        for entry in entries:
            lab.runs(cases, [entry], lab.size.evaluations, repeats)
    return {entry: lab.runs(cases, [entry], lab.size.evaluations, seeds) for entry in entries}


def best_known(runs: Runs) -> dict[tuple[str, str], float]:
    """Case -> the shortest step time, ms."""
    best: dict[tuple[str, str], float] = {}
    for found in (run for group in runs.values() for run in group if run.row.step_ns is not None):
        case = found.row.workload, found.row.topology
        best[case] = min(best.get(case, float("inf")), found.step_ms)
    return best


def ratio(found: RunResult, best: dict[tuple[str, str], float], evaluations: int) -> float:
    """The step time after ``evaluations`` over the best known one, at most :data:`CAP`."""
    step_ns = best_at(found.points, evaluations)
    if step_ns is None:
        return CAP
    return min(CAP, step_ns / 1e6 / best[found.row.workload, found.row.topology])


def ratios_of(runs: Runs, best: dict[tuple[str, str], float], size: Size, rival: str) -> list[dict]:
    """One line for each search: mean ratios after some numbers of evaluations, and how often it beats ``rival``."""
    lines = []
    for entry in (name for name in runs if name != "single-gpu"):
        line: dict[str, object] = {"placer": f"`{entry}`"}
        for used in size.checkpoints:
            line[f"ratio after {used:,}"] = interval_text(geometric(ratio(run, best, used) for run in runs[entry]), 3)
        last = size.checkpoints[-1]
        pairs = [
            (ratio(mine, best, last), ratio(other, best, last))
            for mine, other in zip(runs[entry], runs[rival], strict=True)
        ]
        line[f"shorter than {rival}"] = f"{sum(mine < other for mine, other in pairs)} of {len(pairs)}"
        line["longer"] = sum(mine > other for mine, other in pairs)
        lines.append(line)
    return lines


def families(runs: Runs, best: dict[tuple[str, str], float], size: Size) -> list[dict]:
    """One line for each workload."""
    lines = []
    for name in size.workloads:
        found, alone = (chosen(runs[entry], workload=name) for entry in (LEARNED, "single-gpu"))
        faster = list(_speedups(alone, found))
        line = {"workload": name}
        for used in size.checkpoints:
            line[f"worst after {used:,}"] = f"{max(ratio(run, best, used) for run in found):.3f}"
        lines.append(line | {"least speedup over one GPU": f"{min(faster):.2f}" if faster else ""})
    return lines


def _speedups(alone: Iterable[RunResult], found: Iterable[RunResult]) -> Iterator[float]:
    for one, other in zip(alone, found, strict=True):
        if one.row.step_ns is not None and other.row.step_ns is not None:
            yield one.step_ms / other.step_ms
