"""Compares plans that run for real on this computer with their simulations."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from simdev.errors import InvalidInput, Unsupported
from simdev.files import write_text
from simdev.measure.programs import need_torch, workers_of
from simdev.parallel import Cluster, Host, Mesh, Plan, Prices, find_model, parse_mesh
from simdev.parallel.capture.stage import segments_of
from simdev.parallel.plan import PlanReport, capture_stages, simulate_program, time_stages
from simdev.parallel.program import COMPUTE, Call, Segment
from simdev.planners import Choice, Job
from simdev.problem.topology import Topology

if TYPE_CHECKING:
    from simdev.measure.execute.ranks import RankRuns


Writer = Callable[[Job, Choice], str]
# Ten plans of one step of 16 sequences on two ranks: mesh, sequences of a microbatch, microbatches, schedule, stages.
PLANS = (
    ("dp_replicate=2", 2, 4, "1f1b", 1),
    ("dp_replicate=2", 8, 1, "1f1b", 1),
    ("dp_shard=2", 2, 4, "1f1b", 1),
    ("dp_shard=2", 8, 1, "1f1b", 1),
    ("tp=2", 4, 4, "1f1b", 1),
    ("tp=2", 16, 1, "1f1b", 1),
    ("pp=2", 2, 8, "1f1b", 1),
    ("pp=2", 8, 2, "1f1b", 1),
    ("pp=2", 4, 4, "zero-bubble", 1),
    ("pp=2", 4, 4, "interleaved", 2),
)


class MeasuredPrices(Prices):
    """Prices of calls as :func:`~simdev.measure.execute.ranks.run_ranks` measured them on this computer.

    Collectives were measured over all ranks; those of smaller groups, on meshes of several axes, are taken for equal.
    """

    def __init__(self, cluster: Cluster, runs: RankRuns):
        super().__init__(cluster)
        self.runs = runs

    def of(self, segment: Segment, mesh: Mesh, first: int) -> np.ndarray:
        """int64: the duration of each call and of the Python code between it and the next one."""
        ns = [max(1, round(self._call_ns(call, first // mesh.stage_ranks))) for call in segment.distinct]
        return np.array(ns, np.int64)[segment.order]

    def _call_ns(self, call: Call, rank: int) -> float:
        kernels = self.runs.kernels[rank]
        phase = "forward" if call.is_forward else "backward" if call.in_backward else "finish"
        if call.is_collective:
            return kernels.gap_ns[phase] + self.runs.collective_ns[call.kind, call.payload_bytes]
        if call.signature not in kernels.ns:
            raise InvalidInput(f"no measured time for {call.signature}; use fewer layers", source="rank program")
        return kernels.gap_ns[phase] + kernels.scale[phase] * kernels.ns[call.signature]


def collectives_of(programs: tuple) -> tuple[tuple[str, int], ...]:
    """Kind and bytes of all collectives of the stages, and of the sends between them. Raises :class:`InvalidInput` for
    a kind that is not measured."""
    from simdev.measure.execute.ranks import KINDS

    calls = {call for program in programs for segment in segments_of(program) for call in segment.calls}
    found = {(call.kind, call.payload_bytes) for call in calls if call.is_collective}
    for kind, _ in found:
        if kind not in KINDS:
            raise InvalidInput(f"{kind} is not measured on this computer", source="rank program")
    return tuple(sorted(found | {("send", programs[0].output_bytes)}))


def execute_plan(
    model: str,
    topology: Topology,
    mesh: Mesh,
    microbatches: int = 1,
    schedule: str = "1f1b",
    stages_per_rank: int = 1,
    repeats: int = 10,
    write: Writer | None = None,
) -> dict[str, Any]:
    """Run a step of a plan on the cores of ``topology`` and simulate it from what was measured beside it.

    With ``write``, which returns the script of a plan, the script runs on the same cores, too: its step times are
    ``script_ns``, ``script_p10_ns`` and ``script_p90_ns``; ``no_script`` says why a plan has none.

    Raises :class:`InvalidInput` for a plan that does not fit, and :class:`SimdevError` if a rank fails.
    """
    need_torch()
    from simdev.measure.execute.cases import others
    from simdev.measure.execute.host import check_workers
    from simdev.measure.execute.ranks import run_ranks

    workers = workers_of(topology)
    if any(not worker.startswith("cpu") for worker in workers):
        raise InvalidInput("plans run on cores only", source=topology.name, field="device")
    if mesh.ranks > len(workers) or mesh.ranks < 2:
        message = f"the mesh has {mesh.ranks} ranks; between 2 and {len(workers)} can run on this topology"
        raise InvalidInput(message, source="mesh")
    workers = workers[: mesh.ranks]
    check_workers(workers)
    spec, parameters = find_model(model)
    kind = topology.devices[0].kind
    cluster = Cluster(topology.name, kind, mesh.ranks, 1, 1, 0, 0, 0)
    plan = Plan(spec, parameters, cluster, mesh, microbatches, schedule, stages_per_rank, Host())
    programs = tuple(map(serial, capture_stages(plan)))
    cores = [int(worker[4:]) for worker in workers]
    wanted = collectives_of(programs)
    with others(cores) as taken:
        runs = run_ranks(plan, wanted, cores, repeats)
    report = simulate_runs(plan, programs, runs)
    amid_work = simulate_runs(plan, programs, replace(runs, collective_ns=runs.added_ns))
    scripted = {} if write is None else _run_script(write, plan, model, cores, repeats)
    low, median, high = np.percentile(runs.step_ns, [10, 50, 90])
    return {
        "model": spec.name,
        "mesh": str(mesh),
        "microbatches": microbatches,
        "schedule": schedule,
        "stages_per_rank": stages_per_rank,
        "sequences": plan.sequences,
        "measured_ns": int(median),
        "measured_p10_ns": int(low),
        "measured_p90_ns": int(high),
        "measured_compute_ns": int(runs.compute_ns),
        "simulated_ns": report.step_ns,
        "simulated_compute_ns": int(report.compute_ns.max()),
        "amid_work_ns": amid_work.step_ns,
        "error": report.step_ns / float(median) - 1,
        "disturbed": round(taken[0], 4),
        "bubble_share": float(report.bubble_ns.mean() / report.step_ns),
        "gap_us": {phase: ns / 1e3 for phase, ns in runs.kernels[0].gap_ns.items()},
        "kernel_scale": runs.kernels[0].scale,
        "collective_ms": {f"{kind} {size}": ns / 1e6 for (kind, size), ns in runs.collective_ns.items()},
        "added_ms": {f"{kind} {size}": ns / 1e6 for (kind, size), ns in runs.added_ns.items()},
        **scripted,
    }


def _run_script(write: Writer, plan: Plan, model: str, cores: list[int], repeats: int) -> dict[str, Any]:
    """The times of the script that runs ``plan``, for a row."""
    from simdev.measure.execute.ranks import run_script

    given = plan.parameters
    job = Job(plan.model, given, plan.cluster, plan.sequences, ranks=plan.mesh.ranks, ids=(model, plan.cluster.name))
    recompute = str(given.get("recompute", "none"))
    choice = Choice(plan.mesh, int(given["microbatch"]), recompute, plan.schedule, plan.stages_per_rank)
    try:
        text = write(job, choice)
    except (InvalidInput, Unsupported) as error:  # of this plan, such as a schedule that PyTorch does not have
        return {"no_script": error.message if isinstance(error, InvalidInput) else str(error)}
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        script.write_text(text, encoding="utf-8")
        step_ns = run_script(script, Path(model.partition(".py:")[0] + ".py"), cores, repeats)
    low, median, high = np.percentile(step_ns, [10, 50, 90])
    return {"script_ns": int(median), "script_p10_ns": int(low), "script_p90_ns": int(high)}


def compare(model: str, topology: Topology, repeats: int = 20, write: Writer | None = None) -> Iterator[dict[str, Any]]:
    """Execute and simulate each of :data:`PLANS`; a plan that other processes disturb is run again, at most twice. If
    all three runs of a plan are disturbed, the computer is busy, and later plans run once.
    ``write`` is that of :func:`execute_plan`."""
    from simdev.measure.execute.figures import CALM

    name, _, rest = model.partition("[")
    given, most = rest.rstrip("]"), 3
    for mesh, microbatch, microbatches, schedule, stages in PLANS:
        entry = f"{name}[{','.join(filter(None, (given, f'microbatch={microbatch}')))}]"
        tries: list[dict[str, Any]] = []
        while not tries or (tries[-1]["disturbed"] > CALM and len(tries) < most):
            tries.append(
                execute_plan(entry, topology, parse_mesh(mesh), microbatches, schedule, stages, repeats, write)
            )
        if tries[-1]["disturbed"] > CALM:
            most = 1
        title = f"{mesh}, {schedule}, {microbatches} x {microbatch}" + (f", {stages} stages a rank" * (stages > 1))
        yield {"plan": title, **min(tries, key=lambda row: row["disturbed"])}


def write_report(rows: list[dict[str, Any]], out: Path) -> dict[str, float]:
    """Write ``plans.jsonl`` and ``report.md`` into ``out``; returns mean and largest error, Kendall's tau and regret
    (how much slower, as measured, the plan is that the simulation ranks first)."""
    from scipy.stats import kendalltau

    measured = np.array([row["measured_ns"] for row in rows], float)
    simulated = np.array([row["simulated_ns"] for row in rows], float)
    error = np.abs(simulated / measured - 1)
    amid_work = np.abs(np.array([row["amid_work_ns"] for row in rows], float) / measured - 1)
    found = {
        "mean error": float(error.mean()),
        "mean error with collectives amid work": float(amid_work.mean()),
        "largest error": float(error.max()),
        "Kendall's tau": float(kendalltau(measured, simulated).statistic) if len(rows) > 1 else 1.0,
        "regret": float(measured[simulated.argmin()] / measured.min() - 1),
        "largest disturbance": max(float(row["disturbed"]) for row in rows),
    }
    scripts = [row for row in rows if "script_ns" in row]
    if scripts:
        error_of_scripts = [abs(row["simulated_ns"] / row["script_ns"] - 1) for row in scripts]
        found["mean error against the scripts' steps"] = float(np.mean(error_of_scripts))
    model = Path(rows[0].get("model", "small")).name
    lines = [
        "# Plans: measured and simulated",
        "",
        f"{len(rows)} of {len(PLANS)} ways to train the same 16 sequences of the model `{model}` on two cores, run for",
        "real with gloo.",
        "The simulation knows the program of each rank (captured without a run), the kernels and the time between them",
        "(measured on each rank alone, beside a busy neighbour) and gloo's collectives (measured by themselves).",
        "",
        "Measurements and steps took turns in five rounds. Of both times, the part in which the rank that computes",
        "longest computes is given in brackets; for the rest it communicates and waits.",
        "",
        "Collectives amid work are priced by how much longer kernels take with collectives between them.",
        "",
        "| plan | measured ms | simulated ms | error | error with collectives amid work | taken by other processes |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        took, predicted = (
            f"{row[f'{kind}_ns'] / 1e6:.1f} ({row[f'{kind}_compute_ns'] / 1e6:.1f})"
            for kind in ("measured", "simulated")
        )
        other = row["amid_work_ns"] / row["measured_ns"] - 1
        times = f"{took} | {predicted} | {row['error']:+.1%} | {other:+.1%}"
        lines.append(f"| {row['plan']} | {times} | {row['disturbed']:.1%} |")
    lines += ["", *(f"- {name}: {value:.3f}" for name, value in found.items()), ""]
    if scripts:
        lines += [
            "The scripts of `simdev plan --write pytorch` for the same plans, on the same cores:",
            "",
            "| plan | step of the script, ms | simulated against it |",
            "|---|--:|--:|",
        ]
        for row in rows:
            if "script_ns" in row:
                off = f"{row['simulated_ns'] / row['script_ns'] - 1:+.1%}"
                lines.append(f"| {row['plan']} | {row['script_ns'] / 1e6:.1f} | {off} |")
            else:
                lines.append(f"| {row['plan']} | none: {row.get('no_script', 'not asked for')} | |")
        lines.append("")
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "report.md", "\n".join(lines))
    write_text(out / "plans.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return found


def simulate_runs(plan: Plan, programs: tuple, runs: RankRuns) -> PlanReport:
    """Simulate ``plan`` at the prices that were measured; ``programs`` are its stages."""
    prices = MeasuredPrices(plan.cluster, runs)
    sent = runs.collective_ns["send", programs[0].output_bytes]
    plan = replace(plan, cluster=replace(plan.cluster, node_bytes_per_s=10**18, node_latency_ns=round(sent)))
    return simulate_program(time_stages(plan, programs, prices))


def serial(program):
    """The stage as one core runs it: each call starts when the one before it has ended, collectives too.

    gloo moves data with the core that computes; its own threads find no idle core beside the ranks.
    """
    names = {call.stream for segment in segments_of(program) for call in segment.calls} | {COMPUTE}

    def one(segment: Segment) -> Segment:
        calls, last = [], None
        for call in segment.calls:
            before = sorted(names - {call.stream}) if last is None else [last] if last != call.stream else []
            calls.append(replace(call, waits=tuple((stream, 0) for stream in before)))
            last = call.stream
        return replace(segment, calls=tuple(calls))

    return replace(
        program,
        forward=one(program.forward),
        backward=tuple(map(one, program.backward)),
        split=tuple(map(one, program.split)),
        others=tuple((name, one(segment)) for name, segment in program.others),
        finish=one(program.finish),
    )
