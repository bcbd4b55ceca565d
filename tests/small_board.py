"""A result folder of a few rows, made without a bench: a drawn graph on a small machine, kept in the folder."""

from dataclasses import replace

import numpy as np
from drawn import chain

from simdev.analysis.bounds import lower_bound
from simdev.bench import stored
from simdev.bench.journal import Results
from simdev.bench.matrix import DEFAULT_RULES, Run
from simdev.bench.provenance import circumstances
from simdev.bench.rows import Row
from simdev.bench.run import Instance, blank_row, score
from simdev.placers import registry
from simdev.problem.graph_file import save_graph
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.problem.topology import load_topology
from simdev.sim import simulate

MACHINE = """
name = "mine"
[kind.k]
memory_gib = 8
peak_tflops = { f32 = 1.0 }
memory_gb_per_s = 100
[[device]]
names = ["a", "b"]
kind = "k"
[[link]]
ends = ["a", "b"]
gb_per_s = 10
latency_us = 1
"""


def row(placer, step_ns=None, **changed):
    """A row that no run has made, without a score if ``step_ns`` is None."""
    fields = dict(
        workload="w", topology="t", rules="fifo/fifo/dataflow", version=1, params="{}", budget="evaluations=1", seed=0,
        fingerprint="f", cost_hash="c", status="ok", feasible=step_ns is not None,
    )  # fmt: skip
    return Row(placer=placer, step_ns=step_ns, **{**fields, **changed})


def small_board(folder, *, workload="mine.npz", topology="mine.toml", placers=("single-gpu", "single-cpu"), **changed):
    """Write rows of ``placers`` to ``folder``, one placement each, and return them. The columns in ``changed`` are
    written as given, with the digest and the tables that belong to them."""
    folder.mkdir(parents=True, exist_ok=True)
    graph = chain(1000, 2000, 0).build()
    kept = stored.kept_graph(folder, graph.fingerprint)
    kept.parent.mkdir(exist_ok=True)
    save_graph(graph, kept)
    where = stored.kept_machine(folder, topology)
    where.parent.mkdir(exist_ok=True)
    where.write_text(MACHINE, encoding="utf-8")
    problem = Problem.build(graph, load_topology(where, kept=True))
    bound, results = lower_bound(problem), Results(folder)
    for number, placer in enumerate(placers):
        placement = Placement(np.array([0, 0, 1] if number % 2 else [0, 0, 0]))
        run = Run(workload, topology, DEFAULT_RULES, placer, "{}", "evaluations=10", 0)
        instance = Instance(
            workload,
            topology,
            DEFAULT_RULES,
            graph.fingerprint,
            problem.costs.hash,
            graph.n_ops,
            bound_ns=int(bound.ns),
            bound_method=str(bound.method),
        )
        version = registry.placers()[placer].version if placer in registry.placers() else 1
        row = score(blank_row(run, instance, version), problem, placement, simulate(problem, placement))
        row = replace(row, evaluations=0, place_seconds=0.5, **circumstances())
        results.add(replace(row, **changed), placement, [(0, 0.5, row.step_ns)])
    results.write()
    results.pack()
    results.close()
    return results.rows
