"""GDP (Zhou et al. 2019): a graph network and a segment-recurrent attention placer choose all devices at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from simdev.baselines.rl._grouped import bucket, device_columns, group_problem
from simdev.baselines.rl._groups import fine_groups, layer_groups
from simdev.baselines.rl._sight import with_sight
from simdev.baselines.rl._train import Learner, learn, learned, with_policy_settings
from simdev.errors import Unsupported
from simdev.placers.placer import placer
from simdev.placers.policy_file import policy_arrays
from simdev.problem.placement import Placement

DEFAULTS = {
    "groups": 64, "layers": True, "hidden": 64, "sages": 3, "blocks": 2, "neighbours": 8, "samples": 20, "epochs": 4,
    "attention": True, "superposition": True,
    "edits": 0.75, "wide": True, "starts": True, "imitation": 0.1,
    "rate": 0.001, "clip": 0.2, "entropy": 0.9, "entropy_end": 0.05, "entropy_updates": 80, "tuning_entropy": 0.3,
    "policy": "",
}  # fmt: skip
# Settings that a policy file stores; one that an older file lacks has its default.
SHAPE = (
    "groups", "layers", "hidden", "sages", "blocks", "attention", "superposition", "neighbours", "devices",
)  # fmt: skip
NETWORK = 1  # the version of the network, and so of policy files
SHIPPED = "gdp"  # a folder in policies/
SOURCE = "Zhou et al.: GDP: Generalized Device Placement for Dataflow Graphs, arXiv:1910.01578, 2019"


def learner(problems, *, groups, layers, neighbours, devices=0, tuning_entropy=0.0, **given) -> Learner:
    """The learner for ``simdev train`` and the placer; it names at most ``devices`` (0: as many as needed)."""
    from simdev.baselines.rl._gdp import learner_functions

    devices = device_columns(problems, devices)
    settings = {"groups": groups, "layers": layers, "neighbours": neighbours, "devices": devices, **given}
    group_of = {id(problem): _groups(problem, groups, layers) for problem in problems}
    rows = _rows(groups, group_of.values())
    functions = learner_functions(devices=devices, rows=rows, **given)

    def grouped(problem):
        return with_sight(group_problem(problem, group_of[id(problem)], rows=rows, columns=devices), neighbours)

    stored = {name: settings[name] for name in SHAPE}
    return Learner("gdp", NETWORK, stored, grouped, functions.init, functions.step, functions.greedy)


def _groups(problem, most, layers):
    if not most:
        return np.arange(problem.graph.n_units)
    return (layer_groups if layers else fine_groups)(problem, most)


def _rows(most, groups):
    """The padded number of groups: ``most``, or as many as there are."""
    return bucket(max(most, *(int(group.max()) + 1 for group in groups)))


@learned(
    "gdp",
    version=2,
    defaults=DEFAULTS,
    learner=learner,
    source=SOURCE,
)
def gdp(problem, *, rng, budget, policy, **params):
    """GDP-one: a network is trained on the problem at hand, ``samples`` placements an update.

    From the paper: a GraphSAGE of ``sages`` layers (element-wise maximum over neighbours of a sigmoid layer); a placer
    of ``blocks`` layers of attention over ops in running order, segment by segment with the one before as memory
    and without positional encoding; the devices of the whole graph named at once; the placer's layers conditioned on
    the graph by superposition; PPO with ``epochs`` steps an update and reward minus the square root of the step time.
    It departs from the paper, or fills a gap in it, as follows:

    * Samples of whole placements alone do not reach what a hill climb over the same groups finds. A share ``edits`` of
      each batch therefore edits the best placement so far: a group, the groups of a module, or a run of groups
      (``wide=false``: always one group) moves to a device that the policy draws, and an edit that does not make the
      placement worse is kept. The baseline of an edit is the reward of the placement that it was made from, and only
      the edited groups learn from it. The likelihood of the best placement has the weight ``imitation`` in the
      objective. ``starts`` adds two placements to the first batch: one device, and an even share of the time for each.
      ``edits=0`` is the paper's search; ``rate=0`` draws everything from the untrained network.
    * Two parts of the placer can be left out apart, for ablations; ``blocks=0`` leaves out the whole placer.
      ``superposition=false`` does not multiply the layers' inputs by the gate of the graph. ``attention=false`` keeps
      the feed-forward layers, whose inputs stay gated: a group then knows of others by the graph network, the gate
      and the summary of the graph only.
    * Ops are grouped first, to at most ``groups`` groups: the layers of the source model, merged if there are more; in
      graphs that name few layers, ops that share traffic within a layer; with ``layers=false`` single forward ops that
      share traffic. Backward and update ops go with their forward op. ``groups=0`` places every op (or colocation
      group) by itself.
    * Node features are numbers that mean the same in every graph (shares of time and memory, levels, op classes), not
      an embedding of op types and shapes. Two of them, the running share of the time and the nearness to each device's
      even share of it, give the position of a group in the graph; the logits get a learned multiple of the latter.
    * Neighbours are the ``neighbours`` parents and children with the longest transfers, not a random sample; layers
      have residual connections and normalisation.
    * Logits have a term from the devices' features, so that one policy works on different topologies of up to 8
      devices; absent devices are masked.
    * The most probable placement is the first sample of each batch. Advantages of samples are rewards less the batch's
      mean; all advantages are divided by the deviation of their kind and lie within 3. The ratio is clipped group by
      group.
    * A bonus keeps the entropy, as a share of the largest possible one, on a line from ``entropy`` to ``entropy_end``
      over ``entropy_updates`` updates.
    * The reward of a placement that does not fit is not -10; it falls with the overflow.

    If ``policy``, a folder that ``simdev train`` wrote, is given, learning starts from it, with the entropy
    ``tuning_entropy``.
    """
    return _place(problem, rng, budget, policy, params)


def _place(problem, rng, budget, policy, params):
    if policy:
        params = {**params, "entropy": params["tuning_entropy"]}
    return learn(learner, problem, rng, budget, policy, params)


@placer(
    "gdp-zero-shot",
    version=1,
    family="learned",
    same_processor=True,
    defaults={"policy": SHIPPED},
    source=SOURCE,
)
def gdp_zero_shot(problem, *, rng, budget, policy):
    """GDP-batch without tuning: the most probable placement of a trained policy, and nothing else.

    The network runs in NumPy, and nothing is simulated or learned. JAX is needed for training only. The placement is
    the one that :func:`gdp_batch` evaluates first. ``policy`` is the policy that ships, or a folder that
    ``simdev train -p gdp`` wrote. Where a placement brings its order of ops, the default order is used.
    """
    from simdev.baselines.rl import _gdp_net

    folder = _folder(problem, policy)
    settings = with_policy_settings({name: DEFAULTS.get(name, 0) for name in SHAPE}, folder)
    most, layers, neighbours = (settings[name] for name in ("groups", "layers", "neighbours"))
    sizes = {name: settings[name] for name in ("hidden", "devices", "sages", "blocks")}
    wanted = {name: (shape, np.dtype(np.float32)) for name, shape in _gdp_net.shapes(**sizes).items()}
    arrays = policy_arrays(folder, wanted, placer="gdp", version=NETWORK)
    group, columns = _groups(problem, most, layers), device_columns([problem], sizes["devices"])
    grouped = with_sight(group_problem(problem, group, rows=_rows(most, [group]), columns=columns), neighbours)
    parts = {name: settings[name] for name in ("attention", "superposition")}
    logits = _gdp_net.logits(_gdp_net.NumPy, _gdp_net.policy_of(arrays), grouped.inputs, **parts)
    return Placement(grouped.placements(logits.argmax(axis=1)[None])[0])


@learned(
    "gdp-batch",
    version=2,
    defaults={**DEFAULTS, "policy": SHIPPED},
    learner=learner,
    source=SOURCE,
)
def gdp_batch(problem, *, rng, budget, policy, **params):
    """GDP-batch: :func:`gdp` from the policy that ships, which was trained on many graphs and topologies together.

    Its most probable placement is evaluated first (zero-shot); the rest of the budget tunes it to the problem.
    ``policies/README.md`` lists the problems that it was trained on and those that were held out. It supports
    topologies of at most 8 accelerators.
    """
    return _place(problem, rng, budget, _folder(problem, policy), params)


def _folder(problem, policy) -> str:
    """The folder of a policy, by its name or path. Raises :class:`Unsupported` if the one that ships does not serve."""
    if policy != SHIPPED:
        return policy
    if device_columns([problem]) > 8:
        raise Unsupported("the policy that ships supports at most 8 accelerators")
    return str(Path(__file__).parent / "policies" / policy)
