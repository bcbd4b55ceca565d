"""``simdev train``."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from simdev.cli import completion
from simdev.cli.app import OWN, command
from simdev.cli.options import Aim, Backend, BackendOption, JsonOption, SchedulerOption, dask_address, positive
from simdev.cli.pace import Pace
from simdev.cli.problems import build_problem
from simdev.cli.tables import print_answer
from simdev.errors import InvalidInput

SECONDS_BETWEEN_LINES = 2.0


@command("train", topic=OWN)
def train(
    placer: Annotated[
        str,
        typer.Option(
            "--placer", "-p", help="Learned placer: name or name[param=value].", autocompletion=completion.placers
        ),
    ],
    workload: Annotated[
        list[str],
        typer.Option(
            "--workload", "--workloads", "-w", help="Workload or graph file.", autocompletion=completion.workloads
        ),
    ],
    topology: Annotated[
        list[str],
        typer.Option(
            "--topology", "--topologies", "-t", help="Topology or TOML file.", autocompletion=completion.machines
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the policy and its checkpoint.")],
    evaluations: Annotated[int, typer.Option(help="Simulations to spend in all.")] = 20000,
    seed: Annotated[int, typer.Option(help="Seed of the first weights and of all samples.")] = 0,
    objective: Annotated[
        Aim, typer.Option(help="What to learn to make fast: steps, pipelines, one query or a stream of them.")
    ] = Aim.step,
    microbatches: Annotated[int, typer.Option(min=3, help="Microbatches of throughput, queries of serve.")] = 32,
    schedule: Annotated[str, typer.Option(help="Schedule of --objective throughput: gpipe or 1f1b.")] = "1f1b",
    backend: BackendOption = Backend.local,
    scheduler: SchedulerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a policy of a learned placer.

    The training takes every workload on every topology in turn.

    If the command is interrupted, even by a crash, the same command resumes it. With more --evaluations it continues a
    finished training.
    """
    from simdev.bench.dask_cluster import dask_simulator
    from simdev.bench.objective import parse_objective
    from simdev.placers import registry

    positive(evaluations, "--evaluations")
    if seed < 0:
        raise InvalidInput("cannot be negative", source="--seed")
    spec, params = registry.find_placer(placer)
    if spec.learner is None:
        learned = ", ".join(name for name, one in registry.placers().items() if one.learner is not None)
        raise InvalidInput(f"is not a learned placer; these are: {learned}", source=f"placer {spec.name}")
    problems = [build_problem(graph, machine) for graph in workload for machine in topology]
    learner = spec.learner(
        problems, **{key: value for key, value in {**spec.defaults, **params}.items() if key != "policy"}
    )
    lines = Lines(evaluations)
    name = objective.named(schedule, microbatches)
    aim = parse_objective(name)
    for problem in problems:
        aim.check_graph(problem.graph)
    address = dask_address(backend, scheduler)
    away = nullcontext(aim.simulate_many) if address is None else dask_simulator(address)
    if aim.microbatches and address is not None:
        raise InvalidInput(f"--objective {objective} trains on this computer only: leave out --backend dask")
    try:
        with away as simulate:
            learner.train(
                problems,
                seed=seed,
                evaluations=evaluations,
                out=out,
                progress=lines,
                simulate=simulate,
                objective=name,
            )
    except KeyboardInterrupt:
        print(f"simdev: interrupted; the same command resumes the training in {out}", file=sys.stderr)
        raise typer.Exit(130) from None
    facts = {"written": [str(out)], "placer": spec.name, "samples": lines.samples, "cases": list(lines.cases.values())}
    print_answer(facts, [f"{out}: a policy of {spec.name}, {lines.samples} samples"], as_json)


class Lines:
    """Prints the progress every few seconds: samples, best step time of the case, mean reward, entropy.

    ``cases`` holds the last row of each workload and topology.
    """

    def __init__(self, evaluations: int):
        self.evaluations, self.samples, self.printed = evaluations, 0, 0.0
        self.cases: dict[tuple[str, str], dict] = {}
        self.pace = Pace()

    def __call__(self, row: dict) -> None:
        self.samples = row["samples"]
        self.cases[row["workload"], row["topology"]] = row
        if time.monotonic() - self.printed < SECONDS_BETWEEN_LINES:
            return
        self.printed = time.monotonic()
        best = (
            "no feasible placement yet" if row["best_step_ns"] is None else f"best {row['best_step_ns'] / 1e6:.1f} ms"
        )
        print(
            f"[{self.samples}/{self.evaluations}] {row['workload']} on {row['topology']}: {best}, "
            f"mean reward {row['mean_reward']:.3f}, entropy {row['entropy']:.3f}"
            f"{self.pace.left(self.samples, self.evaluations)}",
            file=sys.stderr,
            flush=True,
        )
