"""Records everything that a comparison with this computer needs, within a time limit, for use elsewhere.

Run ``python -m simdev.measure.recorder OUT``. The recording has five parts. Each part has a share of the time and is
written while it is recorded, so that an interruption loses little; the same command resumes it:

* ``machine.json``: versions, driver, devices, their rates, copies between them by size;
* ``ops/WORKLOAD/``: the graph, a machine file and measured op costs (``simdev profile``);
* ``steps.json``: whole training steps of plain PyTorch on each device: samples in ns (eager, and on a GPU also as a
  CUDA graph), and the most memory allocated;
* ``placements/WORKLOAD/``: the results of ``simdev study compare-real``;
* ``report/``: whole steps of each workload predicted from its own ops and from the ops of the other workloads
  (``steps.md``), and the report of ``simdev study measured`` on the placements.

On a GPU, ``clocks.csv`` holds clocks, temperature and power for every second. A failure is written to ``log.jsonl``
with its error and does not stop the recording.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from simdev.errors import InvalidInput
from simdev.files import read_json, write_text

FITTED = ("inception-v3", "nmt", "transformer-xl-4", "wavenet-2x18")
HELD_OUT = ("nasnet-a-mobile", "rnnlm", "amoebanet-d")
PARTS = {"machine": 0.05, "ops": 0.3, "steps": 0.15, "placements": 0.5, "report": 0.0}  # shares of the time
PRECISIONS = ("f32", "tf32", "bf16")


def record(
    out: Path,
    workers: tuple[str, ...],
    seconds: float,
    workloads: tuple[str, ...],
    *,
    parts=tuple(PARTS),
    small: bool,
    placements: int = 40,
) -> None:
    """Record ``parts`` within ``seconds``, in this order, and write them to folder ``out``.

    Time that a part does not use goes to the next parts. If the share of a part ends while a workload is measured, the
    workload is finished; only its placements are cut short.
    """
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    work: dict[str, Callable[..., None]] = {
        "machine": _machine,
        "ops": _ops,
        "steps": _steps,
        "placements": partial(_placements, placements),
        "report": _report,
    }
    with _clocks(out, workers):
        for number, part in enumerate(parts):
            left = sum(PARTS[name] for name in parts[number:])
            share = (end - time.monotonic()) * (PARTS[part] / left if left else 1.0)
            work[part](out, workers, workloads, small, time.monotonic() + share)


def _guarded(out: Path, what: str, work) -> None:
    begin, error = time.monotonic(), ""
    try:
        work()
    except Exception as found:  # one failure must not stop the recording
        error = f"{type(found).__name__}: {found}"
    with open(out / "log.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"what": what, "seconds": round(time.monotonic() - begin, 2), "error": error}) + "\n")


@contextmanager
def _clocks(out: Path, workers: tuple[str, ...]):
    query = shutil.which("nvidia-smi")
    if query is None or not any(worker.startswith("cuda") for worker in workers):
        yield
        return
    fields = "timestamp,index,clocks.sm,clocks.mem,temperature.gpu,power.draw"
    with open(out / "clocks.csv", "a", encoding="utf-8") as file:
        child = subprocess.Popen([query, f"--query-gpu={fields}", "--format=csv,nounits", "-lms", "1000"], stdout=file)
        try:
            yield
        finally:
            child.terminate()
            child.wait()


def _machine(out: Path, workers, workloads, small: bool, end: float) -> None:
    def work():
        if not (out / "machine.json").exists():
            write_text(out / "machine.json", json.dumps(_facts(workers), indent=1) + "\n")

    _guarded(out, "machine", work)


def _facts(workers: tuple[str, ...]) -> dict:
    import torch

    from simdev.measure.execute.host import check_workers
    from simdev.measure.execute.link import profile_link, rates

    check_workers(workers)
    pairs = [(a, b) for at, a in enumerate(workers) for b in workers[at + 1 :]]
    links = {f"{a} {b}": profile_link(a, b) for a, b in pairs}
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "processor": platform.processor(),
        "system": platform.platform(),
        "gpus": _gpus(),
        "rates": {worker: rates(worker) for worker in workers},
        "links": {pair: {"bytes": link.sizes, "ns": link.ns} for pair, link in links.items()},
    }


def _gpus() -> list[str]:
    query = shutil.which("nvidia-smi")
    if query is None:
        return []
    fields = "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current"
    command = [query, f"--query-gpu={fields}", "--format=csv"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.splitlines()


def _ops(out: Path, workers, workloads, small: bool, end: float) -> None:
    from simdev.measure.profiles import profile_machine
    from simdev.measure.programs import load_program
    from simdev.problem.graph_file import save_graph

    def work(name: str) -> None:
        folder = out / "ops" / name
        profile_machine([name], workers, folder, repeats=10, small=small, seed=0)
        save_graph(load_program(name, small=small).graph, folder / "graph.npz")

    for name in workloads:
        if time.monotonic() < end and not (out / "ops" / name / "graph.npz").exists():
            _guarded(out, f"ops {name}", lambda n=name: work(n))


def _steps(out: Path, workers, workloads, small: bool, end: float) -> None:
    file = out / "steps.json"
    steps = _read_steps(file) if file.exists() else {}
    for name in workloads:
        for worker in workers:
            if time.monotonic() < end and f"{name} {worker}" not in steps:
                _guarded(
                    out,
                    f"step {name} {worker}",
                    lambda n=name, u=worker: steps.update({f"{n} {u}": _samples(n, u, small)}),
                )
                write_text(file, json.dumps(steps) + "\n")


def _read_steps(path: Path) -> dict:
    """The samples in ns by run mode, for each workload and device."""
    steps = read_json(path)
    if isinstance(steps, dict) and all(isinstance(found, dict) for found in steps.values()):
        return steps
    raise InvalidInput("expected an object of objects, as the recorder writes it", source=path)


def _samples(name: str, worker: str, small: bool) -> dict:
    """Time whole steps in a separate process, because this process must not open a GPU before it forks workers."""
    import numpy as np

    from simdev.measure.execute.link import in_processes
    from simdev.measure.execute.shared import Shared

    shared = Shared()
    shared.reserve("eager", 30)
    shared.reserve("graph", 30)
    shared.reserve("peak", 1)
    shared.open()
    in_processes([lambda: _time_steps(shared, name, worker, small)])
    found = {key: [int(ns) for ns in shared.array(key)] for key in ("eager", "graph", "peak")}
    return {key: value for key, value in found.items() if np.any(value)}


def _time_steps(shared, name: str, worker: str, small: bool) -> None:
    import torch

    from simdev.graphs.workload import TrainingStep
    from simdev.measure.execute.cpu import settle
    from simdev.measure.programs import SMALL
    from simdev.placers import registry

    kind, _, number = worker.partition(":")
    if kind == "cpu":
        settle(int(number))
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", int(number))
    spec, params = registry.find_workload(name)
    torch.manual_seed(0)
    step = spec.function(**spec.parameters({**(SMALL.get(spec.name, {}) if small else {}), **params}))
    if not isinstance(step, TrainingStep):
        raise InvalidInput("its step is no training step", source=f"workload {name}")
    model = step.model.to(device)
    inputs = [tensor.to(device) for tensor in step.inputs]

    def work():
        step.optimizer.zero_grad(set_to_none=False)
        step.loss(model, *inputs).backward()
        step.optimizer.step()

    def wait():
        if kind == "cuda":
            torch.cuda.synchronize(device)

    def sample(key, once):
        words = shared.words(key)
        for repeat in range(30):
            wait()
            begin = time.perf_counter_ns()
            once()
            wait()
            words[repeat] = time.perf_counter_ns() - begin

    for _ in range(3):
        work()
    sample("eager", work)
    if kind == "cuda":
        shared.words("peak")[0] = torch.cuda.max_memory_allocated(device)
        for group in step.optimizer.param_groups:
            group["capturable"] = True
        graph = torch.cuda.CUDAGraph()
        side = torch.cuda.Stream(device)
        with torch.cuda.stream(side):
            work()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            work()
        sample("graph", graph.replay)


def _placements(count: int, out: Path, workers, workloads, small: bool, end: float) -> None:
    for number, name in enumerate(workloads):
        share = (end - time.monotonic()) / (len(workloads) - number)
        if share > 0 and (out / "ops" / name / "machine.toml").exists():
            _guarded(out, f"placements {name}", lambda n=name, s=share: _compare(out, n, count, s, small))


def _compare(out: Path, name: str, count: int, seconds: float, small: bool) -> None:
    from simdev.measure.compare import compare_placements

    end = time.monotonic() + seconds

    def say(line: str) -> None:
        print(line, flush=True)
        if time.monotonic() > end:
            raise TimeoutError("the share of the time is used up; finished runs are kept")

    machine = str(out / "ops" / name / "machine.toml")
    compare_placements(
        name, machine, out / "placements" / name, placements=count, repeats=5, rounds=2, seed=0, small=small, say=say
    )


def _report(out: Path, workers, workloads, small: bool, end: float) -> None:
    from simdev.measure.report import report

    folders = [out / "placements" / name for name in workloads]
    folders = [folder for folder in folders if (folder / "cases.jsonl").exists()]
    if folders:
        _guarded(out, "report on placements", lambda: report(folders, out / "report"))
    if (out / "steps.json").exists():
        (out / "report").mkdir(exist_ok=True)
        _guarded(out, "report on steps", lambda: write_text(out / "report" / "steps.md", steps_report(out, workers)))


def steps_report(out: Path, workers: tuple[str, ...]) -> str:
    """A Markdown table of measured whole steps and of their simulations on one device.

    ``own ops`` uses the costs measured on the workload itself. ``other ops`` uses only the costs of all other
    workloads, and a roofline at the measured rates for signatures that none of them has; ``covered`` is the share of
    the ops whose signature another workload has.
    """
    import numpy as np

    from simdev.problem.costs import FREE_KINDS, CostModel, load_measured
    from simdev.problem.graph_file import load_graph
    from simdev.problem.placement import Placement
    from simdev.problem.problem import Problem
    from simdev.problem.topology import load_topology
    from simdev.sim import simulate

    steps = _read_steps(out / "steps.json")
    names = sorted({key.rpartition(" ")[0] for key in steps})
    names = [name for name in names if (out / "ops" / name / "graph.npz").exists()]
    tables = {name: load_measured(out / "ops" / name / "costs.csv") for name in names}
    header = ["workload", "device", "measured ms", "spread", "own ops", "other ops", "covered"]
    lines = [header, ["---"] * len(header)]
    errors: dict[str, list[float]] = {"own": [], "other": []}
    for name in names:
        graph = load_graph(out / "ops" / name / "graph.npz")
        topology = load_topology(str(out / "ops" / name / "machine.toml"))
        free = np.array([kind in FREE_KINDS for kind in graph.kinds])[graph.op_kind]
        for number, worker in enumerate(workers):
            samples = steps.get(f"{name} {worker}", {}).get("eager")
            if not samples:
                continue
            low, measured, high = np.percentile(samples, [10, 50, 90])
            kind = topology.devices[number].kind.name
            others = {s: ns for other in names if other != name for s, ns in tables[other].get(kind, {}).items()}
            gap = {}
            for which, table in (("own", tables[name].get(kind, {})), ("other", others)):
                problem = Problem.build(graph, topology, CostModel(measured={kind: table}))
                placement = Placement(np.full(graph.n_ops, number, np.int32))
                gap[which] = simulate(problem, placement).step_ns / measured - 1
                errors[which].append(abs(gap[which]))
            known = np.array([signature in others for signature in graph.signatures])[graph.op_signature]
            lines.append(
                [
                    name,
                    worker,
                    f"{measured / 1e6:.2f}",
                    f"{(high - low) / measured:.1%}",
                    f"{gap['own']:+.1%}",
                    f"{gap['other']:+.1%}",
                    f"{known[~free].mean():.0%}",
                ]
            )
    text = ["# Whole steps: measured, and simulated from measured ops", ""]
    text += ["| " + " | ".join(line) + " |" for line in lines]
    if errors["own"]:
        own, other = (np.mean(errors[which]) for which in ("own", "other"))
        text += ["", f"Mean error: {own:.1%} with the own ops, {other:.1%} with the ops of the other workloads."]
    return "\n".join([*text, ""])


def main() -> None:
    """``python -m simdev.measure.recorder OUT --devices cpu:0,cuda:0 --seconds 550 --parts machine ops``"""
    import torch

    parser = argparse.ArgumentParser(prog="python -m simdev.measure.recorder", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--devices", default="cpu:0,cuda:0")
    parser.add_argument("--seconds", type=float, default=1500)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--workloads", nargs="+", default=[*FITTED, *HELD_OUT], metavar="ID")
    parser.add_argument("--precision", choices=PRECISIONS, default="f32", help="use a separate folder for each")
    parser.add_argument("--placements", type=int, default=40)
    parser.add_argument("--full-size", action="store_true", help="the workloads' own sizes, which require a GPU")
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = given.precision == "tf32"
    if given.precision == "bf16":
        torch.set_default_dtype(torch.bfloat16)
    parts = [part for part in PARTS if part in given.parts]
    workers, workloads = tuple(given.devices.split(",")), tuple(given.workloads)
    record(
        given.out,
        workers,
        given.seconds,
        workloads,
        parts=parts,
        small=not given.full_size,
        placements=given.placements,
    )


if __name__ == "__main__":
    main()
