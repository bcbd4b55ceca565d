"""The networks of ``placeto-joint``: one joins nodes into groups, Placeto's visits the groups; they learn together."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from simdev.baselines.rl._grouped import GroupedArrays, GroupedProblem
from simdev.baselines.rl._jax import eqx, jax, jnp
from simdev.baselines.rl._placeto import Mlp, PlacetoPolicy, View, VisitLearner, with_view
from simdev.baselines.rl._sight import NODE_FEATURES, SUMMARY_FEATURES, Sight

SUMMED = np.isin(np.arange(NODE_FEATURES), [0, 3, 4, 5, 6])  # node features that are amounts; of the rest, the mean
SURE = 3.0  # bound of the logits of joining, so that no grouping is ever certain


class Nodes(NamedTuple):
    """What the networks read: the :class:`View` of ``N`` nodes, and the node that each of them may join.

    ``partner`` int32 ``(N,)``: of the nodes before it in running order that may go to the same devices, the one that
    exchanges most with the node; the node itself if there is none. ``cost`` float32 ``(N,)``: log of the time of this
    exchange over the mean time of a node.
    """

    view: View
    partner: np.ndarray
    cost: np.ndarray

    @property
    def sight(self) -> Sight:
        return self.view.sight


def with_nodes(grouped: GroupedProblem[GroupedArrays]) -> GroupedProblem[Nodes]:
    """``grouped``, whose groups are the nodes, with :class:`Nodes` in place of its inputs."""
    inputs, rows = grouped.inputs, len(grouped.inputs.real)
    real = inputs.edge_real
    traffic = np.zeros((rows, rows))
    np.add.at(traffic, (inputs.target[real], inputs.source[real]), inputs.edge[real, 1])
    both = np.tril(traffic + traffic.T, -1) * (inputs.allowed[:, None] == inputs.allowed).all(axis=2)
    partner = np.where(both.max(axis=1) > 0, both.argmax(axis=1), np.arange(rows)).astype(np.int32)
    cost = np.log1p(both.max(axis=1) * grouped.n_groups).astype(np.float32)
    return grouped.with_inputs(Nodes(with_view(grouped).inputs, partner, cost))


def labels(partner, joins):
    """int ``(N,)``: the group of each node, named by its first member.

    A node that ``joins`` bool ``(N,)`` marks is in the group of its ``partner``.
    """
    number = jnp.arange(len(partner))
    first = jnp.where(joins, partner, number)
    return jax.lax.fori_loop(0, max(1, (len(partner) - 1).bit_length()), lambda _, far: far[far], first)


def pooled(view: View, label) -> View:
    """The view of the groups ``label`` int ``(N,)``, each in the row of its first member; the other rows are padding.

    Amounts are summed, and the other features are means weighted by time. The tables of neighbours and relatives are
    those of the graph of groups.
    """
    sight, count = view.sight, len(label)
    member = (label == jnp.arange(count)[:, None]) & sight.real  # (groups, nodes)
    real = member.any(axis=1)
    weight = member * (sight.nodes[:, 0] + 1e-6)
    mean = (weight @ sight.nodes) / jnp.maximum(weight.sum(axis=1, keepdims=True), 1e-12)
    nodes = jnp.where(SUMMED, member.astype(jnp.float32) @ sight.nodes, mean)
    middle = nodes[:, -3]
    nodes = nodes.at[:, 1].set(jnp.sqrt(nodes[:, 0]))
    nodes = nodes.at[:, -2].set(jnp.sin(2 * jnp.pi * middle)).at[:, -1].set(jnp.cos(2 * jnp.pi * middle))
    there = sight.devices[:, 0] > 0
    even = middle[:, None] * jnp.sum(there) - jnp.arange(len(there)) - 0.5
    shares = jnp.where(there & real[:, None], jnp.exp(-2.0 * even**2), 0.0)
    nodes = nodes * real[:, None]

    def between(table):
        of_groups = member.astype(jnp.float32) @ (table > 0).astype(jnp.float32) @ member.T.astype(jnp.float32)
        return (of_groups > 0) & ~jnp.eye(count, dtype=bool)

    edge = between(view.before)

    def further(_, reach):
        step = reach.astype(jnp.float32)
        return reach | (step @ step > 0)

    reach = jax.lax.fori_loop(0, max(1, (count - 1).bit_length()), further, edge) & ~jnp.eye(count, dtype=bool)
    apart = real[:, None] & real & ~reach & ~reach.T & ~jnp.eye(count, dtype=bool)
    tables = [table / jnp.maximum(1.0, table.sum(axis=1, keepdims=True)) for table in (edge, edge.T, reach, reach.T)]
    apart = apart / jnp.maximum(1.0, apart.sum(axis=1, keepdims=True))
    only_first = jnp.zeros_like(sight.allowed).at[:, 0].set(True)
    allowed = jnp.where(real[:, None], sight.allowed, only_first)
    nothing: Any = None  # an empty pytree: the tables below hold the neighbours
    neighbours = (nothing, nothing, nothing, nothing, nothing, nothing)
    seen = Sight(nodes, real, allowed, sight.devices, shares, *neighbours, sight.summary)
    before, behind, ancestors, descendants = tables
    return View(seen, before, behind, ancestors, descendants, apart)


class JointPolicy(eqx.Module):
    """The grouper, and the policy of ``placeto`` over its groups."""

    join: Mlp
    place: PlacetoPolicy

    def __init__(self, hidden: int, devices: int, rounds: int, *, key):
        one, two = jax.random.split(key)
        self.join = Mlp(2 * NODE_FEATURES + SUMMARY_FEATURES + 2, hidden, hidden, 1, key=one, last=0.1)
        self.place = PlacetoPolicy(hidden, devices, rounds, key=two)

    def joining(self, nodes: Nodes, placed):
        """Logits float32 ``(N,)`` of joining the partner, if the nodes are on devices ``placed`` int ``(N,)``."""
        sight, partner = nodes.view.sight, nodes.partner
        together = (placed == placed[partner]).astype(jnp.float32)
        summary = jnp.broadcast_to(sight.summary, (len(partner), SUMMARY_FEATURES))
        pair = [sight.nodes, sight.nodes[partner], summary, nodes.cost[:, None], together[:, None]]
        return SURE * jnp.tanh(self.join(jnp.concatenate(pair, axis=1))[:, 0] / SURE)


class JointLearner(VisitLearner):
    """A :class:`VisitLearner` whose episodes draw a grouping first.

    Both networks learn by REINFORCE: a choice of a device from the return since its step, the grouping from the return
    of the whole episode.
    """

    views_axis = 0
    first_of_equals = "F"

    def __init__(self, new, *, rows, **how):
        super().__init__(new, rows=rows, **how)

        @jax.jit
        def group(policy, nodes, placed, key, greedy):
            level = jnp.where(greedy, 0.5, jax.random.uniform(key, placed.shape))
            logits = jax.vmap(policy.joining, (None, 0))(nodes, placed)
            joins = (level < jax.nn.sigmoid(logits)) & (nodes.partner != jnp.arange(rows))
            label = jax.vmap(labels, (None, 0))(nodes.partner, joins)
            views = jax.vmap(pooled, (None, 0))(nodes.view, label)
            sight = nodes.view.sight
            time = jax.nn.one_hot(placed, sight.allowed.shape[1]) * (sight.nodes[:, :1] + 1e-6)
            of_groups = (label[:, None] == jnp.arange(rows)[:, None]).astype(jnp.float32) @ time
            return joins, label, jnp.argmax(of_groups, axis=2).astype(jnp.int32), views

        self._group = group
        self._split = jax.jit(lambda key: jax.random.split(key, 3))

    @staticmethod
    def _visitor(policy: JointPolicy) -> PlacetoPolicy:
        return policy.place

    def _groups(self, policy, inputs, placed, key, greedy):
        """Which nodes join their partners bool ``(B, N)``, the groups and the device of each (where most of its time
        is), and the views of the groups, with a first axis of ``B``."""
        return self._group(policy, inputs, placed, key, greedy)

    def _loss(self, policy, inputs, start, drawn, placed, actions, advantage, weight):
        view = pooled(inputs.view, labels(inputs.partner, drawn))
        gain, undecided = self._visits(policy.place, view, placed, actions, advantage)
        grouping, unsure = _chances(policy, inputs, start, drawn)
        return -(gain + grouping * advantage[0]) - weight * (undecided + unsure), undecided


def _chances(policy: JointPolicy, nodes: Nodes, placed, joins):
    """Mean log-likelihood and entropy of ``joins``, over the nodes that have a partner."""
    logits = policy.joining(nodes, placed)
    free = (nodes.partner != jnp.arange(len(nodes.partner))) & nodes.view.sight.real
    yes, no = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    undecided = -jnp.exp(yes) * yes - jnp.exp(no) * no
    count = jnp.maximum(1, jnp.sum(free))
    return jnp.sum(jnp.where(joins, yes, no) * free) / count, jnp.sum(undecided * free) / count


@cache  # compiled functions are kept with it
def learner_functions(*, hidden, devices, rounds, rows, **how) -> JointLearner:
    """The learner functions of ``placeto-joint``, for problems of ``rows`` nodes and ``devices`` columns."""

    def new(key):
        return JointPolicy(hidden, devices, rounds, key=key)

    return JointLearner(new, rows=rows, **how)
