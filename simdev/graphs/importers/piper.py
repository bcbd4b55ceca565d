"""Import the JSON inputs of Piper (Tarnawski et al., NeurIPS 2021; msr-fiddle/piper).

A node is a layer with its forward and backward pass. It has one record for each degree of tensor parallelism and each
choice of recomputation (``TMPCs``). The importer reads degree 1 without recomputation (``vanilla``). The memory of a
layer is ``memoryUsageA`` for each microbatch in flight plus ``memoryUsageB``. The op holds this memory, for one
microbatch, during the whole step, so its outputs need no further memory on its device. ``communicationCost`` is in
bytes.

``timePerSample`` has no unit in the files. In graphs made from PipeDream profiles (layers called ``node1``, ``node2``
...) it is in milliseconds, as in the profiles; in all others it is in seconds (BERT-32 on an A100: 0.0286 for a layer).
"""

from __future__ import annotations

import re

from simdev.graphs.importers import Imported, importer, json_with
from simdev.graphs.importers.reading import json_object, name_of
from simdev.problem.graph import GraphBuilder


@importer("piper", detects=json_with(b'"TMPCs"'))
def parse(data: bytes, path, *, format: str, device_kind: str) -> Imported:
    document = json_object(data, path)
    nodes = document.rows("nodes")
    from_profile = all(re.fullmatch(r"node\d+", node.text("name", "")) for node in nodes)
    ns = 1e6 if from_profile else 1e9
    builder = GraphBuilder(name_of(path), meta={"source": "Piper JSON", "time_unit": "ms" if from_profile else "s"})
    ops: dict[float, int] = {}  # by id
    times: dict[str, float] = {}
    for node in nodes:
        number = node.number("id")
        if number in ops:
            raise node.fail(f"{number!r} is given twice", "id")
        choices = node.object("TMPCs").rows("1")
        choice = next((one for one in choices if one.text("id", "") == "vanilla"), choices[0] if choices else None)
        if choice is None:
            raise node.fail("no choices for degree 1", "TMPCs: 1")
        name = f"{node.text('name', 'node')}#{number}"
        times[name] = choice.number("timePerSample") * ns
        memory = choice.bytes("memoryUsageA", 0) + choice.bytes("memoryUsageB", 0)
        ops[number] = builder.op(name, "layer", signature=name, persistent_bytes=memory)
    tensors: dict[tuple[int, int], int] = {}
    for edge in document.rows("edges"):
        source, target = edge.end("sourceId", ops), edge.end("destId", ops)
        size = edge.bytes("communicationCost")
        if (source, size) not in tensors:
            tensors[source, size] = builder.tensor(source, size, persistent=True)
        builder.connect(tensors[source, size], target)
    return Imported(builder.build(), {device_kind: times})
