"""``simdev plan``."""

from __future__ import annotations

import math
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simdev.cli import completion
from simdev.cli.app import JOBS, command
from simdev.cli.options import (
    Backend,
    BackendOption,
    FrameworkOption,
    JsonOption,
    SchedulerOption,
    dask_address,
    in_a_folder,
    positive,
    refuse_chosen,
)
from simdev.cli.pace import left as in_words
from simdev.cli.tables import print_json, print_table
from simdev.errors import BudgetExhausted, InvalidInput, UnknownName, Unsupported, counted

if TYPE_CHECKING:
    from simdev.planners import Choice, Job, PlanBudget, PlannerSpec, Proof

SPACES = ("node", "wide")


@command("plan", topic=JOBS)
def plan(
    model: Annotated[
        str,
        typer.Argument(
            help="llama3-70b, my_model.py:name, or a Hugging Face config.json.", autocompletion=completion.models
        ),
    ],
    cluster: Annotated[
        str,
        typer.Argument(
            help="Topology of a node and number of nodes: dgx-h100[nodes=8].", autocompletion=completion.machines
        ),
    ],
    batch: Annotated[int, typer.Option(help="Sequences in a step (the global batch).")] = 1024,
    planner: Annotated[
        str,
        typer.Option(
            "--planner", "-p", help="Planner id: search, megatron, grid ...", autocompletion=completion.planners
        ),
    ] = "search",
    framework: FrameworkOption = "eager",
    microbatch: Annotated[str, typer.Option(help="Microbatch sizes that may be chosen.")] = "1,2,4,8",
    recompute: Annotated[str, typer.Option(help="Kinds of recomputation that may be chosen.")] = "none,selective,full",
    schedules: Annotated[
        str, typer.Option(help="Pipeline schedules that may be chosen: 1f1b, interleaved, zero-bubble, zbv ...")
    ] = "1f1b,interleaved",
    space: Annotated[
        str,
        typer.Option(
            help="Plans that may be chosen: node (degrees inside a node, two stages on a rank, parameters gathered for "
            "each pass), or wide (four times as many and more: a search takes several times as long)."
        ),
    ] = "node",
    evaluations: Annotated[int | None, typer.Option(help="Plans to simulate at most.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Seconds to search at most.")] = None,
    prove: Annotated[
        float | None,
        typer.Option(
            help="Then prove, within --evaluations and --seconds, that no plan of the space is quicker by this share "
            "(0.02: 2 %): simulate all that may be, by their bounds."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of planners that draw at random.")] = 0,
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", help="Plans at a time (default: one per core).")] = None,
    top: Annotated[int, typer.Option(help="How many plans to print.")] = 6,
    price: Annotated[float | None, typer.Option(help="Dollars for an hour of one GPU (default: its kind's).")] = None,
    tokens: Annotated[
        float | None, typer.Option(help="Tokens of the whole training run (15e12): days and dollars are printed.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the best pipeline (PNG, SVG or PDF).", callback=in_a_folder)
    ] = None,
    chart: Annotated[
        Path | None, typer.Option(help="Draw the step time of each mesh (PNG, SVG or PDF).", callback=in_a_folder)
    ] = None,
    write: Annotated[
        str | None,
        typer.Option(
            help="Print a configuration: torchtitan, transformers, accelerate ...",
            autocompletion=completion.configurations,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Write it there; without --write: the plan itself (JSON).", callback=in_a_folder
        ),
    ] = None,
    backend: BackendOption = Backend.local,
    scheduler: SchedulerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find the best parallel plan of a training job.

    A cost model ranks all plans, and those that it ranks first are simulated. Programs are captured from PyTorch once
    and kept, so that the second search is quick. Ctrl-C ends the search and keeps the best plan so far.
    """
    from simdev.parallel import find_model, load_cluster
    from simdev.parallel.framework import find_framework
    from simdev.parallel.orders import SCHEDULES
    from simdev.planners import Evaluator, Job, PlanBudget, find_planner
    from simdev.planners.figures import demand, figures, other_sizes, what_helps, why_nothing_can_fit, why_slower

    for option, given in (("--evaluations", evaluations), ("--jobs", jobs), ("--top", top)):
        if given is not None and given < 1:
            raise InvalidInput(f"expected a whole number from 1 on, got {given}", source=option)
    if prove is not None and not 0 <= prove < 1:
        raise InvalidInput(f"expected a share from 0 to less than 1, got {prove:g}", source="--prove")
    tokens, seconds = positive(tokens, "--tokens"), positive(seconds, "--seconds")
    price = positive(price, "--price")
    spec, params = find_planner(planner)
    refuse_chosen(model, options=True)
    found, parameters = find_model(model, packed=True)
    job = Job(
        found,
        find_framework(framework).parameters_of(found.name, parameters, model),
        load_cluster(cluster),
        batch,
        framework=framework,
        microbatches=_numbers(microbatch),
        recomputes=tuple(recompute.split(",")),
        schedules=_known(schedules.split(","), SCHEDULES, "--schedules"),
        wide=_known([space], SPACES, "--space") == ("wide",),
        ids=(model, cluster),
    )
    job.check()
    writer = _writer(write)
    price = price or job.cluster.kind.dollars_per_hour or None
    workers = jobs or os.cpu_count() or 1
    with _executor(backend, scheduler) as executor, Evaluator(job, workers, executor) as evaluator:
        if message := why_nothing_can_fit(job, evaluator):
            raise Unsupported(message)
        progress = _Progress(evaluations, seconds)
        budget = progress.budget = PlanBudget(
            evaluator,
            evaluations=evaluations or math.inf,
            seconds=seconds or math.inf,
            tell=progress,
            screen=True,
        )
        choice, stopped = _searched(spec, params, job, budget, seed)
        proof = None
        if prove is not None and not stopped:
            proof, choice = _proved(budget, choice, prove)
        best = evaluator.outcome(choice, always=True)
        others = [o for o in sorted(budget.tried.values()) if o.choice != choice and o.step_ns is not None]
        helps = what_helps(job, budget, best)
        sizes = [{**demand(job, best.time_ns / 1e9, tokens, price), "name": str(choice), "fits": best.fits}]
        sizes += other_sizes(job, evaluator, best, tokens, price)
        if picture is not None:
            from simdev.parallel.picture import draw_pipeline

            draw_pipeline(evaluator.report(choice), picture)
    if chart is not None:
        from simdev.files import write_picture
        from simdev.planners import plot_meshes

        write_picture(plot_meshes([best, *others], title=job.name).figure, chart, dpi=110)
    rows = [
        {**figures(job, o, price), "why": why_slower(best, o) if o is not best else ""} for o in [best, *others][:top]
    ]
    try:
        text = writer(job, choice) if writer else None
    except Unsupported as error:
        if not as_json:  # a search takes minutes, and its table is the answer, too
            _print(job, rows, budget, proof, helps, sizes, price)
        raise Unsupported(f"{error}; {_who_can(write, job, choice)}") from None
    if out is not None:
        _keep(out, text, job, choice, rows[0])
    if as_json:
        document = {"model": model, "cluster": cluster, "batch": batch, "ranks": job.ranks, "planner": planner}
        document |= {"estimated": len(budget.estimated), "simulated": budget.used, "plans": rows}
        document |= {"proof": asdict(proof)} if proof else {}
        print_json({**document, "what_helps": helps, "sizes": sizes, "configuration": text})
        return
    _print(job, rows, budget, proof, helps, sizes, price)
    if text is not None and out is None:
        print(f"\n{text}", end="")


def _searched(spec: PlannerSpec, params: dict, job: Job, budget: PlanBudget, seed: int) -> tuple[Choice, bool]:
    """The planner's answer, and whether Ctrl-C ended the search, which then answers with the best plan so far."""
    import numpy as np

    from simdev.planners.figures import why_none_fits

    try:
        return spec.plan(job, rng=np.random.default_rng(seed), budget=budget, **params), False
    except KeyboardInterrupt:
        if budget.best is None:
            print("simdev: interrupted before any plan fitted", file=sys.stderr)
            raise typer.Exit(130) from None
        print(f"simdev: interrupted after {budget.used} plans; the best so far", file=sys.stderr)
        return budget.best.choice, True
    except BudgetExhausted as error:
        message = f"{error}; none fits{why_none_fits(job, budget)}"
        raise InvalidInput(message, source=f"planner {spec.name}") from None
    except Unsupported as error:
        raise Unsupported(f"{error}{why_none_fits(job, budget)}") from None


def _proved(budget: PlanBudget, choice: Choice, gain: float) -> tuple[Proof | None, Choice]:
    """What is proven of the planner's answer, and the best plan that is known then. Nothing is proven of a plan that
    does not fit, after Ctrl-C, or if a worker is lost."""
    from simdev.planners import prove
    from simdev.planners.evaluate import WorkersLost

    best, proof = budget.evaluator.outcome(choice, exact=False), None
    if not best.fits:
        return None, choice
    try:
        proof = prove(budget, best, gain)
    except KeyboardInterrupt:
        print("simdev: interrupted; nothing is proven of the best plan so far", file=sys.stderr)
    except WorkersLost as error:
        print(f"simdev: {error}; nothing is proven of the best plan so far", file=sys.stderr)
    return proof, budget.best.choice if budget.best is not None else choice


def _who_can(write: str | None, job: Job, choice: Choice) -> str:
    """Which targets can say a plan that ``write`` cannot."""
    from simdev.integrations.configs import other_targets

    others = other_targets(str(write), job, choice)
    return f"{' and '.join(others)} can (--write)" if others else "no other target can"


def _keep(out: Path, text: str | None, job: Job, choice: Choice, figures: dict) -> None:
    """Write the configuration, or without one the plan itself."""
    from simdev.files import write_text

    if text is None:
        choice.save(out, job, figures)
    else:
        write_text(out, text)


def _executor(backend: Backend, scheduler: str | None):
    """The workers of a Dask cluster, or None for processes of this machine."""
    address = dask_address(backend, scheduler)
    if address is None:
        return nullcontext()
    from simdev.bench.dask_cluster import dask_executor

    return dask_executor(address)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidInput(f"expected whole numbers with commas, got {text!r}", source="--microbatch") from None
    if min(found) < 1:
        raise InvalidInput(f"expected whole numbers from 1 on, got {text!r}", source="--microbatch")
    return found


def _known(given: list[str], known: tuple[str, ...], option: str) -> tuple[str, ...]:
    for name in given:
        if name not in known:
            raise UnknownName(option, name, known)
    return tuple(given)


def _writer(write: str | None):
    if write is None:
        return None
    from simdev.integrations.configs import find_writer

    return find_writer(write)


def _print(
    job: Job,
    rows: list[dict],
    budget: PlanBudget,
    proof: Proof | None,
    helps: list[str],
    sizes: list[dict],
    price: float | None,
) -> None:
    estimated = f"{counted(len(budget.estimated), 'plan')} estimated, " if budget.estimated else ""
    size = f"{counted(job.ranks, 'GPU')}, {counted(job.batch, 'sequence')} in a step"
    print(f"{job.name}: {size}; {estimated}{budget.used} simulated")
    header = ["plan", "step s", f"{_unit(job)}/s/GPU", "MFU", "allocated GiB", "reserved GiB", "idle", "exposed"]
    header += [f"$/M {_unit(job)}"] if price is not None else []
    lines, times = [], told_apart([row["step_time_s"] for row in rows])
    for row, seconds in zip(rows, times, strict=True):
        peak, reserved = (
            "/".join(_shortened([f"{peak / 2**30:.0f}" for peak in row[name]]))
            for name in ("peak_memory_bytes", "reserved_memory_bytes")
        )
        line = [row["name"], seconds, _digits(row["tokens_per_s_per_gpu"]), f"{row['mfu']:.1%}"]
        line += [
            peak,
            reserved + ("" if row["fits"] else " (!)"),
            f"{row['bubble_share']:.1%}",
            f"{row['exposed_share']:.1%}",
        ]
        line += [f"{row['dollars_per_million_tokens']:.3f}"] if price is not None else []
        lines.append(line)
    print_table(header, lines)
    if not rows[0]["fits"]:
        print("OUT OF MEMORY: the best plan does not fit")
    for row in rows[1:]:
        print(f"{row['name']}: {row['why']}")
    gap = rows[0]["step_time_s"] / rows[0]["bound_s"] - 1
    same = "these stages" if "stage_meshes" in rows[0]["plan"] else "this mesh, microbatch, recomputation, resharding"
    print(f"No plan with {same} can be more than {gap:.1%} faster.")
    if proof:
        print(_in_words(proof))
    for note in job.model.notes:
        print(f"Not offered: {note}.")
    if helps:
        print("What would help:")
    for sentence in helps:
        print(f"  {sentence}")
    _print_sizes(job, sizes)


def _in_words(proof: Proof) -> str:
    """What is proven, in a sentence."""
    how = f"{proof.excluded:,} cannot by their bounds of time and memory, {proof.simulated:,} were simulated"
    less = f"more than {100 * proof.gain:g}% less time" if proof.gain else "less time"
    several = counted(proof.plans, "plan")
    if proof.left:
        return f"Not proven: {proof.left:,} of the {several} of this space may take {less} ({how})."
    return f"Proven: none of the {several} of this space takes {less} ({how})."


def _unit(job) -> str:
    """What throughput counts: a model that does not say how many tokens a sample has counts samples."""
    return "tokens" if int(job.parameters["length"]) > 1 else "samples"


def _print_sizes(job, sizes: list[dict]) -> None:
    """What the best plan trains in a day, on this cluster and on half and twice as many GPUs."""
    print("With the same sequences in a step:")
    for row in sizes:
        text = f"  {counted(row['ranks'], 'GPU')}: {_large(row['tokens_per_day'])} {_unit(job)} a day"
        text += f", {row['days']:,.1f} days" if "days" in row else ""
        text += f", {row['dollars']:,.0f} dollars" if "dollars" in row else ""
        print(text + ("" if row["fits"] else " (does not fit)") + f" ({row['name']})")


def _digits(value: float) -> str:
    """A throughput as a whole number, or with three digits if it has fewer."""
    return f"{value:,.0f}" if value >= 99.5 else f"{value:#.3g}"


def _large(count: float) -> str:
    """A count in billions, or in millions where these are fewer than one."""
    return f"{count / 1e9:,.1f} billion" if count >= 1e9 else f"{_digits(count / 1e6)} million"


def told_apart(seconds: list[float]) -> list[str]:
    """Times with at least two decimals, and as many as it takes for three digits of each and to tell apart those that
    differ by a thousandth."""
    different = len({f"{value:.3e}" for value in seconds})
    for digits in range(2, 9):
        texts = [f"{value:.{digits}f}" for value in seconds]
        exact = all(abs(float(text) / value - 1) <= 0.005 for text, value in zip(texts, seconds, strict=True))
        if exact and len(set(texts)) >= different:
            return texts
    return [f"{value:.9f}" for value in seconds]


def _shortened(peaks: list[str]) -> list[str]:
    """At most four of the peaks: the first ones and the last."""
    return peaks if len(peaks) <= 4 else [*peaks[:2], "..", peaks[-1]]


MEANT = 24  # plans that have to be estimated before the time left is


class _Progress:
    """Lines on standard error: the first plan that fits at once; then, now and then, what is under way, plans done of
    plans to do, the best step time and the time left."""

    budget: PlanBudget | None = None

    def __init__(self, evaluations: int | None, seconds: float | None):
        self.evaluations, self.seconds = evaluations, seconds
        self.begin = self.last = time.monotonic()
        self.first = True

    def __call__(self, used: int, best) -> None:
        now = time.monotonic()
        if best is not None and self.first:
            self.first = False
            print(f"first plan that fits: {best.choice}: {best.step_ns / 1e9:.4g} s", file=sys.stderr, flush=True)
        if now - self.last < 2 or self.budget is None:
            return
        self.last = now
        budget, left = self.budget, []
        if self.seconds:
            left.append(self.seconds - (now - self.begin))
        # Estimates of one split of a layer wait for its captures together: one tenth of all says more than one plan.
        # How many batches of plans will be simulated, nobody knows beforehand.
        if budget.phase != "simulating" and budget.done >= max(MEANT, budget.total / 10):
            left.append((now - budget.phase_began) / budget.done * (budget.total - budget.done))
        figure = f"best {best.choice}: {best.step_ns / 1e9:.4g} s" if best else "none fits yet"
        rest = in_words(min(left)) if left else ""
        under_way = f"{budget.phase} {budget.done:,} of {budget.total:,} plans"
        print(f"{under_way}; {used} simulated, {figure}{rest and ', ' + rest}", file=sys.stderr, flush=True)
