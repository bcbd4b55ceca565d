"""Random problems with every awkward feature, and the conformance check of placers: for tests, also of your own."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from simdev.errors import BudgetExhausted, InvalidInput, Unsupported
from simdev.placers.budget import Budget
from simdev.placers.placer import PlacerSpec
from simdev.problem.costs import MAX_NS, CostTable, transfer_durations
from simdev.problem.graph import ComputationGraph, GraphBuilder
from simdev.problem.placement import Placement
from simdev.problem.problem import CONTENTIONS, ORDERS, RUNTIMES, Problem, Rules
from simdev.problem.topology import Device, DeviceKind, Link, Topology
from simdev.shelf import parse_id
from simdev.user_file import sentence

if TYPE_CHECKING:
    from simdev.sim.schedule import Schedule


def random_graph(rng: np.random.Generator, max_ops: int = 25) -> ComputationGraph:
    """A graph of 1 to ``max_ops`` ops: several outputs an op, shared tensors, unread tensors, zero bytes, parameters
    and results, workspaces, colocation groups."""
    n, reach, largest = int(rng.integers(1, max_ops + 1)), int(rng.integers(1, 12)), int(rng.choice([1, 4, 40, 3000]))
    groups = int(rng.integers(0, 4))
    b, tensors = GraphBuilder("random"), list[int]()
    for op in range(n):
        recent = tensors[-reach:]
        count = min(int(rng.integers(0, 4)), len(recent))
        reads = [recent[i] for i in rng.choice(len(recent), count, replace=False)] if count else []
        grouped = groups and rng.random() < 0.3
        handle = b.op(
            f"op{op}",
            "input" if rng.random() < 0.1 else "op",
            inputs=reads,
            persistent_bytes=int(rng.integers(0, largest + 1)) if rng.random() < 0.3 else 0,
            workspace_bytes=int(rng.integers(0, largest + 1)) if rng.random() < 0.3 else 0,
            group=int(rng.integers(groups)) if grouped else None,
        )
        for _ in range(int(rng.choice([0, 1, 1, 1, 2, 3]))):
            size = 0 if rng.random() < 0.15 else int(rng.integers(0, largest + 1))
            tensors.append(b.tensor(handle, size, persistent=rng.random() < 0.1, result=rng.random() < 0.1))
    return b.build()


def random_topology(rng: np.random.Generator, max_devices: int = 5) -> Topology:
    """1 to ``max_devices`` devices, the first of them a host, of one or two kinds, joined directly, through shared
    switches or through the host, by full or half duplex links; now and then a pair without a route."""
    count = int(rng.integers(2, max_devices + 1)) if rng.random() < 0.9 else 1
    kinds = [
        DeviceKind(
            f"kind{i}",
            int(rng.choice([1, 50, 500, 10**6])),
            {"f32": 1e9},
            1e9,
            slots=int(rng.choice([1, 1, 1, 2, 3])),
            granularity=int(rng.choice([1, 1, 8, 512])),
        )
        for i in range(int(rng.integers(1, 3)))
    ]
    devices = [Device(f"d{i}", kinds[int(rng.integers(len(kinds))) if i else 0], host=i == 0) for i in range(count)]
    shape = rng.choice(["mesh", "switch", "host", "two switches", "islands"], p=[0.3, 0.2, 0.2, 0.25, 0.05])
    switches = {"switch": ["s0"], "two switches": ["s0", "s1"]}.get(shape, [])
    if shape == "mesh":
        ends = [(f"d{a}", f"d{b}") for a in range(count) for b in range(a + 1, count)]
    elif shape == "host":
        ends = [("d0", f"d{a}") for a in range(1, count)]
    elif shape == "islands":
        ends = [(f"d{a}", f"d{a + 1}") for a in range(0, count - 1, 2)]
    else:
        ends = [(f"d{a}", switches[a % len(switches)]) for a in range(count)]
        ends += [("s0", "s1")] if len(switches) == 2 else []
    same = rng.random() < 0.5
    links = [
        Link(
            pair,
            10**9 if same else int(rng.choice([10**9, 2 * 10**9, 3 * 10**8, 7])) if rng.random() < 0.9 else 1,
            int(rng.choice([0, 0, 1, 7])),
            str(rng.choice(["full", "half"])),
        )
        for pair in ends
    ]
    more = rng.spawn(1)[0]  # leaves the draws of callers as they are
    if more.random() < 0.3:
        links = [replace(link, ranges=_random_ranges(more)) if more.random() < 0.7 else link for link in links]
    return Topology("random", tuple(devices), tuple(links), tuple(switches))


def _random_ranges(rng: np.random.Generator) -> tuple[tuple[int, int, int], ...]:
    """What measured links have: a latency and a bandwidth for each range of sizes, here mostly slower than the link."""
    begins = [0, *sorted(rng.choice([3, 20, 500, 2000], int(rng.integers(0, 3)), replace=False).tolist())]
    return tuple((begin, int(rng.choice([0, 9, 400])), int(rng.choice([10**9, 10**8, 10**6, 5]))) for begin in begins)


def random_costs(rng: np.random.Generator, graph: ComputationGraph, topology: Topology) -> CostTable:
    """Whole-number durations with many ties; some ops have a kernel on the first kind only. Now and then the transfers
    are slower or faster than the topology says, as measured ones are."""
    longest = int(rng.choice([1, 3, 30, 10**6]))
    op_ns = rng.integers(1, longest + 1, (len(topology.kinds), graph.n_ops))
    op_ns[1:][rng.random(op_ns[1:].shape) < 0.1] = -1
    transfer_ns, pair_class = transfer_durations(graph.tensor_bytes, topology)
    more = rng.spawn(1)[0]
    if more.random() < 0.3:
        scaled = transfer_ns * more.choice([1, 2, 30], transfer_ns.shape) // int(more.choice([1, 1, 3]))
        transfer_ns = np.clip(scaled, 1, MAX_NS)
    dispatch = rng.integers(0, longest + 1, graph.n_ops) * (rng.random(graph.n_ops) < 0.7)
    return CostTable(op_ns, topology.device_kind, transfer_ns, pair_class, dispatch)


def random_rules(rng: np.random.Generator) -> Rules:
    """Any order, contention and runtime; the default variant most often."""
    runtime = RUNTIMES[int(rng.random() < 0.25)]
    return Rules(str(rng.choice(ORDERS)), str(rng.choice(CONTENTIONS, p=[0.5, 0.2, 0.3])), runtime)


def random_problem(rng: np.random.Generator, *, max_ops: int = 25, rules: Rules | None = None) -> Problem:
    """A random graph on a random topology; the rules are random too unless ``rules`` is given."""
    graph, topology = random_graph(rng, max_ops), random_topology(rng)
    return Problem(graph, topology, random_costs(rng, graph, topology), rules or random_rules(rng))


def random_placement(rng: np.random.Generator, problem: Problem, *, tries: int = 20) -> Placement:
    """A valid random placement, half of the time with priorities (with ties); all ops on device 0 where ``tries``
    random ones break a rule (device 0 of :func:`random_problem` runs everything)."""
    graph, n_devices = problem.graph, problem.topology.n_devices
    allowed = problem.unit_op_ns >= 0
    priority = rng.integers(-3, 4, graph.n_ops) if rng.random() < 0.5 else None
    for _ in range(tries):
        part = rng.choice(n_devices, int(rng.integers(1, n_devices + 1)), replace=False)
        score = rng.random(allowed.shape) * allowed
        score[np.setdiff1d(np.arange(n_devices), part)] *= 1e-9
        placement = Placement(np.argmax(score, axis=0)[graph.unit_of_op], priority)
        try:
            placement.check(problem)
        except InvalidInput:
            continue
        return placement
    return Placement(np.zeros(graph.n_ops, np.int64), priority)


def assert_same_schedule(first: Schedule, second: Schedule) -> None:
    """Raise AssertionError naming the first field in which two schedules differ, or a dtype."""
    for name in (*first.ARRAYS, "step_ns", "comm_bytes"):
        a, b = np.asarray(getattr(first, name)), np.asarray(getattr(second, name))
        if a.shape != b.shape or a.dtype != b.dtype or not np.array_equal(a, b):
            raise AssertionError(f"{name} differs: {a.dtype} {a.tolist()} and {b.dtype} {b.tolist()}")


def check_placer(
    spec: PlacerSpec, problem: Problem, *, evaluations: int = 0, seed: int = 0, **params: Any
) -> Placement | None:
    """Check that a placer keeps the rules on ``problem``; return its placement, or None if it raises
    :class:`Unsupported` with a reason. Raises AssertionError with all that is missing.

    The rules: the placer is described (:func:`spec_faults`); the placement is valid and of the right type; the problem
    is unchanged; no more than ``evaluations`` are used; random numbers come only from ``rng``; and the same seed and
    evaluations give the same placement again.
    """
    before, state = (problem.graph.fingerprint, problem.costs.hash), ""
    faults, answers = spec_faults(spec), list[tuple[str | None, int]]()
    placement: Placement | None = None
    cause: Exception | None = None
    for _ in range(2):
        budget, placement, state = Budget(problem, evaluations=evaluations), None, random_state()
        try:
            placement = spec.place(problem, rng=np.random.default_rng(seed), budget=budget, **params)
        except Unsupported as error:
            faults += [] if str(error).strip() else ["is unsupported without a reason"]
        except BudgetExhausted:
            faults.append("returns no placement when the budget ends before one fits")
        except InvalidInput as error:
            faults.append(str(error).removeprefix(f"placer {spec.name}: "))
        except Exception as error:
            faults.append(f"raised {sentence(error)}")
            cause = error
        answers.append((placement.hash if placement is not None else None, budget.used))
        if budget.used > evaluations:
            faults.append(f"used {budget.used} of {evaluations} evaluations")
    del problem.graph.__dict__["fingerprint"], problem.costs.__dict__["hash"]  # computed once, so compute them again
    if before != (problem.graph.fingerprint, problem.costs.hash):
        faults.append("changed the problem")
    if random_state() != state:  # of the second run: to import JAX for the first time draws a number
        faults.append("drew random numbers from another source than rng")
    (first, used), (second, used_again) = answers
    if first != second:
        faults.append("gave two placements for one seed")
    if used != used_again:
        faults.append(f"used {used}, then {used_again} evaluations for one seed")
    if faults:
        raise AssertionError(f"placer {spec.name}: " + "; ".join(dict.fromkeys(faults))) from cause
    return placement


class _Spec(Protocol):
    """What placers and planners say about themselves."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def family(self) -> str: ...
    @property
    def function(self) -> Callable[..., Any]: ...
    @property
    def defaults(self) -> Mapping[str, object]: ...


def spec_faults(spec: _Spec) -> list[str]:
    """What is missing in the description of a placer or planner, as sentences: an id must find it, each default be a
    text, a number or a flag that the function takes, the version a whole number from 1 on, and the function or its file
    have a docstring."""
    faults = []
    try:
        if parse_id(spec.name) != (spec.name, None, {}):
            faults.append(f"the name {spec.name!r} is not one that an id can hold")
    except InvalidInput:
        faults.append(f"the name {spec.name!r} is not one that an id can hold")
    if type(spec.version) is not int or spec.version < 1:
        faults.append(f"version is {spec.version!r}, not a whole number from 1 on")
    faults += [] if spec.family else ["family is missing"]
    module = sys.modules.get(spec.function.__module__)
    if not (inspect.getdoc(spec.function) or (module and module.__doc__)):
        faults.append("a docstring is missing")
    parameters = inspect.signature(spec.function).parameters.values()
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    taken = {one.name for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)}
    for name in ("rng", "budget", *spec.defaults):
        if name not in taken and not takes_all:
            faults.append(f"the function takes no parameter {name!r}")
    for name, value in spec.defaults.items():
        if not isinstance(value, (str, int, float, bool)):
            faults.append(f"the default of {name!r} is {value!r}, not a text, a number or a flag")
    wanted = {one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is one.empty}
    faults += [f"defaults lack the parameter {name!r}" for name in sorted(wanted - {"rng", "budget", *spec.defaults})]
    return faults


def random_state() -> str:
    """The state of the random generators that every module shares; placers and planners must leave it alone."""
    return f"{random.getstate()} {np.random.get_state()}"


def training_graph(rng: np.random.Generator, blocks: int) -> ComputationGraph:
    """A graph shaped like a training step, about 16 ops per block: forward blocks of 1 to 6 parallel branches with a
    residual edge, a backward pass in reverse that reads the forward activations, an update per weight."""
    b, size = GraphBuilder(f"training-{blocks}"), 1 << 20
    gradients: list[tuple[int, int]] = []
    trunk = b.outputs(b.op("images", "input", outputs=[size]))[0]
    forward: list[tuple[list[int], list[int], int]] = []

    def cost() -> dict[str, Any]:
        return {"flops": int(rng.integers(10**7, 10**9)), "outputs": [int(rng.integers(1 << 12, 1 << 20))]}

    for block in range(blocks):
        branches, weights = [], []
        for branch in range(int(rng.integers(1, 7))):
            weight = b.op(f"w{block}.{branch}", "parameter", persistent_bytes=3 << 16)
            weights.append(b.tensor(weight, 1 << 16, persistent=True))
            branches.append(b.outputs(b.op(f"f{block}.{branch}", "mm", inputs=[trunk, weights[-1]], **cost()))[0])
        joined = b.outputs(b.op(f"join{block}", "add", inputs=[trunk, *branches], **cost()))[0]
        forward.append((weights, branches, trunk))
        trunk = joined
    grad = b.outputs(b.op("loss", "sum", inputs=[trunk], phase="backward", **cost()))[0]
    for block, (weights, branches, source) in reversed(list(enumerate(forward))):
        grads = []
        for branch, (weight, activation) in enumerate(zip(weights, branches, strict=True)):
            reads = [grad, activation, source, weight]
            made = b.op(f"b{block}.{branch}", "mm", inputs=reads, phase="backward", **cost())
            grads.append(b.outputs(made)[0])
            gradients.append((weight, b.tensor(made, 1 << 16)))
        grad = b.outputs(b.op(f"split{block}", "add", inputs=[grad, *grads], phase="backward", **cost()))[0]
    for number, (weight, gradient) in enumerate(gradients):
        b.op(f"u{number}", "sgd", inputs=[weight, gradient], phase="update", flops=1 << 16)
    return b.build()
