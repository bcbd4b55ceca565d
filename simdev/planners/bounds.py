"""Step times that no plan can beat, without simulation.

In every plan the kernels of a rank's compute stream run in program order, one at a time, and a kernel that waits for a
collective of its own segment stalls those behind it. So each forward and backward pass occupies the stream for at
least its longest path from its first to its last kernel (:func:`span_ns`). These spans add up.

A pipeline adds its fill and its drain. Stage ``r`` cannot begin before the forward passes of one microbatch on all
earlier stages, and they cannot end before their backward passes of its last one. With ``m`` microbatches and ``w_r``
the span of both passes on stage ``r``, the step time ``T`` obeys ``T >= m w_r + w_0 + ... + w_(r-1)`` for each stage.
However the sum ``W`` of all ``w_r`` is divided among ``p`` stages, this gives
``T >= W / (1 - (1 - 1/m)^p)``: each stage takes as much as the inequality allows.
"""

from __future__ import annotations

import numpy as np

from simdev.parallel.plan import PlanProgram
from simdev.parallel.timing import Template


def span_ns(template: Template) -> int:
    """Least time between the first start and the last finish of a segment's kernels on the compute stream.

    The longest path through the segment that begins at a kernel on the compute stream. Items that wait for nothing
    on this path, and everything before the segment, count as finished when the segment begins; the host is never late.
    """
    waits: dict[int, list[int]] = {}
    for item, target in zip(template.wait_item.tolist(), template.wait_for.tolist(), strict=True):
        if target >= 0:
            waits.setdefault(item, []).append(target)
    free = [0] * len(template.streams)  # when each stream has finished its items so far
    finish: list[int] = []
    for item, (stream, ns) in enumerate(zip(template.stream.tolist(), template.ns.tolist(), strict=True)):
        start = max([free[stream], *(finish[target] for target in waits.get(item, ()))])
        done = start + ns if stream == 0 or start else 0  # what no kernel of the segment delays may have run before it
        finish.append(done)
        free[stream] = max(free[stream], done)
    return free[0]


def plan_bound_ns(program: PlanProgram) -> int:
    """A step time that no plan with the mesh, microbatch and recomputation of ``program`` can beat, however its layers
    are divided among the stages."""
    plan = program.plan
    spans: dict[int, int] = {}

    def span(template: Template) -> int:
        if id(template) not in spans:
            spans[id(template)] = span_ns(template)
        return spans[id(template)]

    ranks, microbatches = plan.mesh["pp"], plan.microbatches
    forward = np.array([span(template) for template in program.forward])
    backward = np.array([min(map(span, kinds)) for kinds in program.backward])
    passes = int((forward + backward).sum())
    update = sum(span(template) for template in program.finish)
    busy = max((microbatches * passes + update) / ranks, microbatches * _issue_ns(program) / ranks)
    if plan.stages_per_rank > 1:
        return int(busy)
    filled = passes / (1 - (1 - 1 / microbatches) ** ranks)
    return int(max(busy, filled))


def _issue_ns(program: PlanProgram) -> int:
    """Host time to issue one forward and one backward pass of all stages: each rank's host issues its own."""
    return sum(
        int(forward.issue_ns.sum() + forward.rest_ns.sum())
        + min(int(kind.issue_ns.sum() + kind.rest_ns.sum()) for kind in backward)
        for forward, backward in zip(program.forward, program.backward, strict=True)
    )
