"""Records a machine within a time limit, for comparisons elsewhere: ``python -m simdev.recorder OUT``.

Four parts, each within its share of the time, each written as it goes, so that an interruption loses little:

* ``machine.json``: versions, devices, their rates, copies between them by size;
* ``ops/``: a machine file and measured op costs (``simdev profile``) of all workloads;
* ``steps.json``: whole training steps of plain PyTorch on each device: samples in ns, eager and, on a GPU, as a CUDA
  graph; most memory allocated;
* ``placements/WORKLOAD/``: ``simdev compare-real``.

What fails is written down with its error and does not stop the rest.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

from simdev.files import write_text

FITTED = ("inception-v3", "nmt", "transformer-xl-4", "wavenet-2x18")
HELD_OUT = ("nasnet-a-mobile", "rnnlm", "amoebanet-d")


def record(out: Path, units: tuple[str, ...], seconds: float, workloads: tuple[str, ...], *, small: bool) -> None:
    """Record everything within ``seconds``: a tenth for the machine, 3 for ops, 2 for steps, the rest for
    placements."""
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    _guarded(out, "machine", lambda: write_text(out / "machine.json", json.dumps(_machine(units), indent=1) + "\n"))
    _guarded(out, "ops", lambda: _ops(out, units, workloads, small))
    steps: dict[str, dict] = {}
    for name in workloads:
        for unit in units:
            if time.monotonic() < end - 0.4 * seconds:
                _guarded(
                    out, f"step {name} {unit}", lambda n=name, u=unit: steps.update({f"{n} {u}": _steps(n, u, small)})
                )
                write_text(out / "steps.json", json.dumps(steps) + "\n")
    for number, name in enumerate(workloads):
        share = (end - time.monotonic()) / (len(workloads) - number)
        if share > 0:
            _guarded(out, f"placements {name}", lambda n=name, s=share: _placements(out, n, s, small))


def _guarded(out: Path, what: str, work) -> None:
    begin, error = time.monotonic(), ""
    try:
        work()
    except Exception as found:  # the rest is worth having
        error = f"{type(found).__name__}: {found}"
    with open(out / "log.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"what": what, "seconds": round(time.monotonic() - begin, 2), "error": error}) + "\n")


def _machine(units: tuple[str, ...]) -> dict:
    import torch

    from simdev.execute.host import check_units
    from simdev.execute.link import profile_link, rates

    check_units(units)
    pairs = [(a, b) for at, a in enumerate(units) for b in units[at + 1 :]]
    links = {f"{a} {b}": profile_link(a, b) for a, b in pairs}
    return {
        "torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version(),
        "processor": platform.processor(), "system": platform.platform(),
        "rates": {unit: rates(unit) for unit in units},
        "links": {pair: {"bytes": link.sizes, "ns": link.ns} for pair, link in links.items()},
    }  # fmt: skip


def _ops(out: Path, units, workloads, small: bool) -> None:
    from simdev.real import profile_machine

    profile_machine(list(workloads), units, out / "ops", repeats=10, small=small, seed=0)


def _steps(name: str, unit: str, small: bool) -> dict:
    """Samples of whole steps in a process of their own, as the parent must not open a GPU before it forks workers."""
    import numpy as np

    from simdev.execute.link import in_processes
    from simdev.execute.shared import Shared

    shared = Shared()
    shared.reserve("eager", 30)
    shared.reserve("graph", 30)
    shared.reserve("peak", 1)
    shared.open()
    in_processes([lambda: _time_steps(shared, name, unit, small)])
    found = {key: [int(ns) for ns in shared.array(key)] for key in ("eager", "graph", "peak")}
    return {key: value for key, value in found.items() if np.any(value)}


def _time_steps(shared, name: str, unit: str, small: bool) -> None:
    import torch

    from simdev import registry
    from simdev.execute.cpu import settle
    from simdev.real import SMALL

    kind, _, number = unit.partition(":")
    if kind == "cpu":
        settle(int(number))
    device = torch.device("cpu") if kind == "cpu" else torch.device("cuda", int(number))
    spec, params = registry.find_workload(name)
    torch.manual_seed(0)
    step = spec.function(**spec.parameters({**(SMALL.get(name, {}) if small else {}), **params}))
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


def _placements(out: Path, name: str, seconds: float, small: bool) -> None:
    from simdev.real import compare_real

    end = time.monotonic() + seconds

    def say(line: str) -> None:
        print(line, flush=True)
        if time.monotonic() > end:
            raise TimeoutError("the share of time is used up; what was run is kept")

    machine = str(out / "ops" / "machine.toml")
    compare_real(
        name, machine, out / "placements" / name, placements=40, repeats=5, rounds=2, seed=0, small=small, say=say
    )


def main() -> None:
    """``python -m simdev.recorder OUT --devices cpu:0,cuda:0 --seconds 1500``"""
    parser = argparse.ArgumentParser(prog="python -m simdev.recorder", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--devices", default="cpu:0,cuda:0")
    parser.add_argument("--seconds", type=float, default=1500)
    parser.add_argument("--workloads", default=",".join(FITTED + HELD_OUT))
    parser.add_argument("--full-size", action="store_true", help="the workloads' own sizes, which need a GPU")
    given = parser.parse_args()
    units, workloads = tuple(given.devices.split(",")), tuple(given.workloads.split(","))
    record(given.out, units, given.seconds, workloads, small=not given.full_size)


if __name__ == "__main__":
    main()
