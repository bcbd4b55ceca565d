"""Mirhoseini et al. 2017, table 1: RNNLM, NMT and Inception-V3 on two and four K80s, and which findings hold here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from simdev.problem.placement_file import stored_placement
from simdev.problem.problem import Problem
from simdev.sim import simulate
from simdev.studies.reproduce.lab import Lab, LabCase, RunResult, interval, interval_text, of_entry, sizes, steps_ms
from simdev.studies.reproduce.picture import learning_curves

TITLE = "Device Placement Optimization with Reinforcement Learning (Mirhoseini et al. 2017), table 1"
EAGER = "fifo/fifo/eager"
DATAFLOW = "fifo/fifo/dataflow"
BASELINES = ("single-cpu", "single-gpu", "scotch", "min-cut", "expert")
POLICY = "colocrl[hosts=true]"  # which may place on the CPU, as in the paper
# Seconds per step in the paper: baselines in the order above, then the policy; None means out of memory.
PAPER = {
    ("rnnlm", 2): (6.89, 1.57, 13.43, 11.94, 3.81, 1.57),
    ("rnnlm", 4): (6.89, 1.57, 11.52, 10.44, 4.46, 1.57),
    ("nmt", 2): (10.72, None, 14.19, 11.54, 4.99, 4.04),
    ("nmt", 4): (10.72, None, 11.23, 11.78, 4.73, 3.92),
    ("inception-v3", 2): (26.21, 4.60, 25.24, 22.88, 11.22, 4.60),
    ("inception-v3", 4): (26.21, 4.60, 23.41, 24.52, 10.65, 3.85),
}
SAME = 0.01  # step times within 1 % count as equal
BUILT_IN = "does not fit one GPU"  # the length of the sentences was chosen so
CROSSINGS_MS = (0.1, 0.3, 1, 3, 10, 30, 100)
PRESET = """\
*TensorFlow of 2017* is made of public figures other than this table, on the machines `k80x2-tensorflow` and
`k80x4-tensorflow`:

- All copies between GPUs pass through the host, one at a time on each path. TensorFlow's logs of 2017 say "Peer access
  not supported" between GPUs of different boards.
- Each tensor costs a Send, a Recv and a copy for each device that reads it: 134 us between two GPUs, which Baechi
  (2020) measured under TensorFlow, at 7.6 GB/s, which Placeto's simulator was fitted to on eight K80 under TensorFlow.
- An op occupies a K80 for 5.7 us more than its kernel (Placeto's fit), and convolutions run as fast as in TensorFlow's
  benchmarks of 2017 (29 to 30 images/s for Inception-V3); both hold on all three machines of this report.
"""


@dataclass(frozen=True)
class Setting:
    """A machine (``{}`` stands for its number of GPUs) and rules."""

    title: str
    tag: str
    machine: str
    rules: str


SETTINGS = (
    Setting("overlapped dispatch", "dataflow", "k80x{}", DATAFLOW),
    Setting("one dispatching host", "eager", "k80x{}", EAGER),
    Setting("TensorFlow of 2017", "tensorflow", "k80x{}-tensorflow", DATAFLOW),
)
Found = dict[tuple[str, int], list[RunResult]]
Numbers = dict[tuple[str, int], tuple[float | None, ...]]


SIZES = sizes(
    small=dict(evaluations=500, seeds=5, workloads=("rnnlm", "nmt", "inception-v3"), learned=("dataflow",)),
    tiny=dict(evaluations=30, seeds=2, workloads=("rnnlm",), learned=("dataflow", "eager")),
    # Small leaves open whether the policy catches up on RNNLM, and what it finds on the other two machines.
    full=dict(evaluations=20_000, learned=("dataflow", "eager", "tensorflow")),
)


def run(lab: Lab) -> Iterator[list[str]]:
    """The parts of the report."""
    yield [
        "The tables show step times on two and four K80 in ms: the mean over the seeds, for policies with its 95 % "
        "bootstrap interval. *One dispatching host* is the runtime `eager`, in which one thread launches all ops in "
        "order. *Overlapped dispatch* is the default. The policy may place on the CPU, as the paper's did.\n",
        PRESET,
    ]
    every: dict[Setting, Found] = {}
    for setting in SETTINGS:
        found = {
            (workload, gpus): _runs(lab, setting, workload, gpus) for workload in lab.size.workloads for gpus in (2, 4)
        }
        every[setting] = found
        parts = [f"## Step times, {setting.title}\n", lab.table(f"table1-{setting.tag}", _times(found))]
        panels = {f"{workload}, {gpus} GPUs": runs for (workload, gpus), runs in found.items()}
        if setting.tag in lab.size.learned:
            path = lab.folder / f"curves-{setting.tag}.png"
            learning_curves(path, panels, BASELINES, title=f"colocrl, {setting.title}")
            parts.append(f"![learning curves](curves-{setting.tag}.png)\n")
        yield parts
    yield _findings(lab, {setting: signs(_numbers(found)) for setting, found in every.items()})
    yield _dear_crossings(lab, every[SETTINGS[-1]])


def _case(setting: Setting, workload: str, gpus: int) -> LabCase:
    return LabCase(workload, setting.machine.format(gpus), rules=setting.rules)


def _runs(lab: Lab, setting: Setting, workload: str, gpus: int) -> list[RunResult]:
    entries = (*BASELINES, POLICY) if setting.tag in lab.size.learned else BASELINES
    return lab.runs([_case(setting, workload, gpus)], entries, lab.size.evaluations, lab.size.seeds)


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _times(found: Found) -> list[dict]:
    lines = []
    for (workload, gpus), runs in found.items():
        line = {"workload": workload, "GPUs": gpus}
        for name in BASELINES:
            mean = _mean(steps_ms(of_entry(runs, name)))
            line[name] = "OOM" if mean is None else f"{mean:,.0f}"
        if any(run.row.entry == POLICY for run in runs):
            learned = steps_ms(of_entry(runs, POLICY))
            line[POLICY] = interval_text(interval(learned), 0) if learned else "OOM"
        paper = PAPER[workload, gpus]
        line["paper, s"] = " / ".join("OOM" if value is None else f"{value:.2f}" for value in paper)
        lines.append(line)
    return lines


def _numbers(found: Found) -> Numbers:
    """Step times in the order of :data:`PAPER`, means over the seeds; the last one is that of the policy."""
    return {
        case: tuple(_mean(steps_ms(of_entry(runs, name))) for name in (*BASELINES, POLICY))
        for case, runs in found.items()
    }


def _findings(lab: Lab, found: dict[Setting, list[dict]]) -> list[str]:
    """The section that says which findings hold in which setting."""
    lines = []
    for row in zip(*found.values(), strict=True):
        line = {name: row[0][name] for name in ("finding", "workload", "GPUs")}
        lines.append(line | {setting.title: each["holds"] for setting, each in zip(found, row, strict=True)})
    count = {setting.title: sum(line[setting.title] == "yes" for line in lines) for setting in found}
    built_in = sum(line["finding"] == BUILT_IN for line in lines)
    counts = ", ".join(f"{number} of {len(lines)} ({title})" for title, number in count.items())
    return [
        "## Which findings of the paper hold\n",
        f'They hold in {counts}. "-" means that a policy did not learn there or that a placement does not fit. '
        f'The {built_in} lines "{BUILT_IN}" are no evidence: the length of the sentences of `nmt` was chosen so that '
        "the step does not fit on one K80. The seeds of Scotch and min-cut differ by several per cent, and step times "
        "within 1 % count as equal.\n",
        lab.table("signs", lines),
    ]


def _dear_crossings(lab: Lab, found: Found) -> list[str]:
    """The section on what a crossing would have to cost, with the placements of the baselines unchanged."""
    dearer: dict[float, dict[tuple, str]] = {}
    crossings: dict[tuple[str, int], list[str]] = {}
    problems = {case: _case(SETTINGS[-1], *case).problem() for case in found}
    for extra_ms in (0.0, *CROSSINGS_MS):
        numbers: Numbers = {}
        for case, runs in found.items():
            steps: list[float | None] = []
            counts = []
            for name in BASELINES:
                step, sent = _with_dear_crossings(lab, problems[case], runs, name, round(extra_ms * 1e6))
                steps.append(step)
                counts.append(sent)
            numbers[case], crossings[case] = (*steps, None), [f"{count:,}" for count in counts[2:]]
        dearer[extra_ms] = {
            (line["finding"], line["workload"], line["GPUs"]): line["holds"]
            for line in signs(numbers)
            if "the policy" not in line["finding"] and line["finding"] not in (BUILT_IN, "four GPUs beat one")
        }
    lines = []
    for sign in dearer[0.0]:
        enough = [extra for extra in dearer if all(dearer[more][sign] == "yes" for more in dearer if more >= extra)]
        answer = f"{min(enough):g}" if enough else f"over {CROSSINGS_MS[-1]:g}"
        lines.append(
            {"finding": sign[0], "workload": sign[1], "GPUs": sign[2]}
            | {
                "crossings of scotch / min-cut / expert": " / ".join(crossings[sign[1:]]),
                "ms for each crossing": answer,
            }
        )
    return [
        "## What a crossing would have to cost\n",
        "A crossing is a tensor that another device reads. The last column is the time that each crossing would have "
        "to take beyond that of TensorFlow of 2017 for the finding to hold, among "
        f"{', '.join(f'{extra:g}' for extra in (0, *CROSSINGS_MS))} ms; the placements stay the same. "
        "A copy of a megabyte through the host takes 0.3 ms.\n",
        lab.table("dear-crossings", lines),
    ]


def _with_dear_crossings(
    lab: Lab, problem: Problem, runs: list[RunResult], entry: str, extra_ns: int
) -> tuple[float | None, int]:
    """Mean step time in ms if each transfer takes ``extra_ns`` more, and the crossings of the first seed."""
    dear = replace(problem, costs=replace(problem.costs, transfer_ns=problem.costs.transfer_ns + extra_ns))
    rows = [run.row for run in of_entry(runs, entry) if run.row.placement]
    found = [simulate(dear, stored_placement(lab.folder, row.placement)) for row in rows]
    steps = [schedule.step_ns / 1e6 for schedule in found if schedule.feasible]
    return _mean(steps), len(found[0].transfer_tensor) if found else 0


def signs(numbers: dict[tuple[str, int], tuple[float | None, ...]]) -> list[dict]:
    """One line for each qualitative finding of the paper and each case of ``numbers``: does the finding hold there?

    ``numbers`` are step times in the order of :data:`PAPER`. A comparison with a placement that does not fit has no
    answer ("-").
    """
    lines = []

    def line(finding, case, holds):
        answer = "-" if holds is None else "yes" if holds else "no"
        lines.append({"finding": finding, "workload": case[0], "GPUs": case[1], "holds": answer})

    for case, (cpu, gpu, scotch, min_cut, expert, learned) in numbers.items():
        workload, gpus = case
        if workload == "nmt":
            line(BUILT_IN, case, gpu is None)
            line("the policy beats the expert", case, _faster(learned, expert))
        else:
            line("Scotch is slower than one GPU", case, _faster(gpu, scotch))
            line("min-cut is slower than one GPU", case, _faster(gpu, min_cut))
            line("the expert is slower than one GPU", case, _faster(gpu, expert))
        if workload != "inception-v3":
            line("Scotch is slower than one CPU", case, _faster(cpu, scotch))
            line("min-cut is slower than one CPU", case, _faster(cpu, min_cut))
        if workload == "rnnlm" or case == ("inception-v3", 2):
            line("the policy ends at one GPU, which is best", case, _equal(gpu, learned))
        if case == ("inception-v3", 4):
            line("four GPUs beat one", case, _faster(learned, gpu))
    return lines


def _faster(one: float | None, other: float | None) -> bool | None:
    return None if one is None or other is None else one < other * (1 - SAME)


def _equal(one: float | None, other: float | None) -> bool | None:
    return None if one is None or other is None else abs(one - other) <= SAME * one
