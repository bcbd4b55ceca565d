"""Improves a free split of the max-load model by simulated annealing (Kirkpatrick et al., Science 1983).

The integer programs start from the result. They prove bounds, but on operator graphs they rarely find a better split
than the one they are given.
"""

from __future__ import annotations

import numpy as np

from simdev.exact.contract import Classes
from simdev.exact.load import LoadProblem, processor_loads

HOT = (
    0.02  # first temperature of the first run, as a share of the largest load; each later run begins at a quarter of it
)


def anneal(
    problem: LoadProblem, classes: Classes, processor: np.ndarray, *, moves: int, restarts: int = 3, seed: int = 0
) -> np.ndarray:
    """The best split found from ``processor`` int ``(n,)``, which keeps ``classes`` whole and fits in memory.

    A move takes a class, or up to 32 classes that tensors join, to another processor. ``moves`` are divided among
    ``restarts`` runs, each from the best split so far. The result is never worse, and depends on nothing but the
    arguments.
    """
    from simdev.exact._anneal_kernel import run

    home = np.zeros(classes.n_classes, np.int64)
    home[classes.class_of] = processor
    if processor_loads(problem, home[classes.class_of]).overfull:
        return processor
    arguments = (
        classes.accelerator_time,
        classes.cpu_time,
        classes.size,
        *classes.borders(),
        classes.member_ptr,
        classes.members,
        classes.border_cost,
        float(problem.memory),
        problem.accelerators,
        problem.cpus,
        moves // restarts,
    )
    for number in range(restarts):
        best = home.copy()
        run(home.copy(), *arguments, HOT / 5**number, seed + number, best)
        if processor_loads(problem, best[classes.class_of]).largest < processor_loads(
            problem, home[classes.class_of]
        ).largest * (1 - 1e-9):
            home = best
    return home[classes.class_of]
