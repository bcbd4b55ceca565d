"""Expert: the placement that practitioners make by hand for each model family, derived from the graph's layer names.

* Convolutional networks: contiguous stages with about the same number of layers (Mirhoseini et al. 2017, section 4.2);
  cells and blocks stay whole. WaveNet: its layers in order, which keeps stacks together. Transformers: contiguous
  blocks of layers; the embedding joins the first block and the softmax the last.
* LSTM models: each layer has a device of its own; the embeddings join the first layer, attention and softmax the last
  (Mirhoseini et al. 2017 after Sutskever et al. 2014 and Wu et al. 2016). An encoder and a decoder layer of the same
  depth share a device unless there are enough devices for all layers.
* A captured model of no family: the members of its lists and sequences (``h.3``, ``encoder.layer.3``), in the order of
  the forward pass, in contiguous stages of about as many members each.
* DLRM: the embedding tables are spread over the devices by size, largest first; all else is on the first device (Naumov
  et al. 2019, section 3: model parallelism for the tables; a placement cannot express its data parallelism).
"""

from __future__ import annotations

import re

import numpy as np

from simdev.baselines._units import choices, move_to_allowed, unit_adjacency, used_devices
from simdev.errors import Unsupported
from simdev.placers.placer import placer
from simdev.problem.placement import Placement

FIRST, LAST = -1, 1 << 30

# family -> ((pattern of the layer name, position in the chain), ...): a number is the position itself; None means that
# the numbers in the pattern's groups are the position.
_TRANSFORMER = (
    (r"layer\.?(\d+)", None),
    (r"(?:embedding|position|patch)", FIRST),
    (r"(?:norm|softmax|head)", LAST),
)
_CELLS = ((r"cell\.(\d+)", None), (r"stem", FIRST), (r"head", LAST))  # the auxiliary head goes with its neighbour
CHAINS = {
    "inception": ((r"mixed\.(\d+)", None), (r"stem", FIRST), (r"aux", 7), (r"head", LAST)),
    "transformer-xl": _TRANSFORMER,
    "bert": _TRANSFORMER,
    "gpt2": _TRANSFORMER,
    "llama3": _TRANSFORMER,
    "llama-moe": _TRANSFORMER,
    "vit": _TRANSFORMER,
    "nasnet": _CELLS,
    "amoebanet": _CELLS,
    "wavenet": ((r"stack\.(\d+)\.(\d+)", None), (r"input", FIRST), (r"head", LAST)),
}


@placer(
    "expert",
    version=1,
    family="expert",
    memory_aware=False,
    source="Mirhoseini et al. 2017, section 4.2; Wu et al. 2016, section 3.3; Naumov et al. 2019, section 3",
)
def expert(problem, *, rng, budget):
    """Place as practitioners do by hand for the graph's family (see the module); memory is ignored.

    Raises :class:`Unsupported` for a family without a rule.
    """
    graph, allowed = problem.graph, choices(problem)
    devices = used_devices(allowed)
    devices = devices[np.isin(devices, problem.topology.accelerators)]
    family = graph.meta.get("family")
    if not len(devices):
        raise Unsupported("no accelerator supports any op")
    if family in CHAINS:
        stage_of_layer = _chain_stages(graph, CHAINS[family], len(devices))
    elif family in ("nmt", "rnnlm"):
        stage_of_layer = _lstm_stages(graph.layers, len(devices))
    elif family is None:
        stage_of_layer = _member_stages(graph, len(devices))
    elif family == "dlrm":
        stage_of_layer = _table_stages(graph, len(devices))
    else:
        raise Unsupported(f"no hand-made placement is known for the family {family!r}")
    if (stage_of_layer < 0).all():
        kind = "is a member of a list of modules" if family is None else f"is named as in the family {family!r}"
        remedy = "keep the blocks in a torch.nn.ModuleList or Sequential, so that their paths have a number (blocks.3)"
        raise Unsupported(f"no layer {kind}" + (f"; {remedy}" if family is None else ""))
    stage = _follow_neighbours(problem, _vote(problem, stage_of_layer[graph.op_layer], len(devices)))
    return Placement.of_units(problem, move_to_allowed(problem, devices[stage], allowed))


def _chain_stages(graph, rules, k: int) -> np.ndarray:
    """Stage of each layer name, or -1: positions in order, cut into ``k`` runs of about as many layers each."""
    position = [_position(layer, rules) for layer in graph.layers]
    forward = np.unique(graph.op_layer[graph.op_phase == 0])
    chain = sorted({place for place in position if place is not None})
    count = dict.fromkeys(chain, 0)
    for layer in forward:
        if position[layer] is not None:
            count[position[layer]] += 1
    total, before = max(1, sum(count.values())), 0
    stage: dict[tuple | None, int] = {None: -1}
    for place in chain:
        stage[place] = min(k - 1, int(k * (before + count[place] / 2) / total))
        before += count[place]
    return np.array([stage[place] for place in position])


def _position(layer: str, rules) -> tuple | None:
    for pattern, position in rules:
        match = re.match(pattern + r"(?![a-z])", layer)
        if match:
            return (position,) if position is not None else tuple(int(number) for number in match.groups())
    return None


def _member_stages(graph, k: int) -> np.ndarray:
    """Stage of each layer name of a captured model: that of the list member that it is in, or else of the member that
    ran last before it; -1 if no module is a member of a list."""
    member: dict[str, int] = {}
    place = np.full(len(graph.layers), -1)
    computes = (graph.op_phase == 0) & (np.diff(graph.input_ptr) > 0)
    for layer in graph.op_layer[computes]:
        match = re.match(r"(?:[^.]*[^.\d][^.]*\.)*\d+(?=\.|$)", graph.layers[layer])
        if match:
            place[layer] = member.setdefault(match[0], len(member))
        elif place[layer] < 0:
            place[layer] = max(0, len(member) - 1)
    return np.where(place >= 0, place * k // max(1, len(member)), -1) if member else np.full(len(place), -1)


def _lstm_stages(layers, k: int) -> np.ndarray:
    """Stage of each layer name of an LSTM language model or encoder-decoder, or -1."""
    found = [re.match(r"(?:(encoder|decoder)\.)?(?:layer(\d+)|(embedding|attention|softmax))", name) for name in layers]
    depths = [int(match[2]) + 1 for match in found if match and match[2]]
    depth, sides = max(depths, default=1), {match[1] for match in found if match and match[2]}
    apart = len(sides) == 2 and 2 * depth <= k
    stages = []
    for match in found:
        if not match:
            stages.append(-1)
            continue
        side, number, other = match.groups()
        level = int(number) if number else (0 if other == "embedding" else depth - 1)
        upper = apart and (side == "decoder" or other in ("attention", "softmax"))
        stages.append(level + depth * upper if apart or depth <= k else level * k // depth)
    return np.array(stages)


def _table_stages(graph, k: int) -> np.ndarray:
    """Tables by decreasing size, each on the device with the fewest bytes so far; everything else on the first
    device."""
    table = np.array([bool(re.match(r"table\d+", name)) for name in graph.layers])
    size = np.zeros(len(table), np.int64)
    np.add.at(size, graph.op_layer, graph.op_persistent_bytes)
    stage, filled = np.zeros(len(table), int), np.zeros(k, np.int64)
    for layer in sorted(np.flatnonzero(table), key=lambda layer: (-size[layer], layer)):
        stage[layer] = int(np.argmin(filled))
        filled[stage[layer]] += size[layer]
    return stage


def _vote(problem, op_stage: np.ndarray, k: int) -> np.ndarray:
    """Stage of each unit, by the time of its ops; -1 if no op has a stage. Ties go to the earliest stage."""
    known = op_stage >= 0
    votes = np.zeros((k, problem.graph.n_units), np.int64)
    weight = problem.costs.op_ns.max(axis=0)
    np.add.at(votes, (op_stage[known], problem.graph.unit_of_op[known]), weight[known])
    return np.where(votes.any(axis=0), votes.argmax(axis=0), -1)


def _follow_neighbours(problem, stage: np.ndarray) -> np.ndarray:
    """Give each unit without a stage the stage of the unit with which it exchanges most bytes, or else the first."""
    ptr, neighbour, size = unit_adjacency(problem)
    unit = np.repeat(np.arange(len(stage)), np.diff(ptr))
    while (stage < 0).any():
        edge = np.flatnonzero((stage[unit] < 0) & (stage[neighbour] >= 0))
        if not len(edge):
            return np.maximum(stage, 0)
        edge = edge[np.lexsort((neighbour[edge], -size[edge], unit[edge]))]
        heaviest = edge[np.concatenate([[True], np.diff(unit[edge]) > 0])]
        stage = stage.copy()
        stage[unit[heaviest]] = stage[neighbour[heaviest]]
    return stage
