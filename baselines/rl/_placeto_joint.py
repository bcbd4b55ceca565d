"""The networks of ``placeto-joint``: one joins nodes into groups, Placeto's visits the groups; they learn together."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from simdev.baselines.rl._grouped import GroupedArrays, GroupedProblem
from simdev.baselines.rl._jax import eqx, initializer, jax, jnp, optax
from simdev.baselines.rl._placeto import Mlp, View, VisitLearner, _costs, with_view
from simdev.baselines.rl._placeto import PlacetoPolicy as Placer
from simdev.baselines.rl._sight import NODE_FEATURES, SUMMARY_FEATURES, Sight
from simdev.baselines.rl._train import Episodes, State

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
    place: Placer

    def __init__(self, hidden: int, devices: int, rounds: int, *, key):
        one, two = jax.random.split(key)
        self.join = Mlp(2 * NODE_FEATURES + SUMMARY_FEATURES + 2, hidden, hidden, 1, key=one, last=0.1)
        self.place = Placer(hidden, devices, rounds, key=two)

    def joining(self, nodes: Nodes, placed):
        """Logits float32 ``(N,)`` of joining the partner, if the nodes are on devices ``placed`` int ``(N,)``."""
        sight, partner = nodes.view.sight, nodes.partner
        together = (placed == placed[partner]).astype(jnp.float32)
        summary = jnp.broadcast_to(sight.summary, (len(partner), SUMMARY_FEATURES))
        pair = [sight.nodes, sight.nodes[partner], summary, nodes.cost[:, None], together[:, None]]
        return SURE * jnp.tanh(self.join(jnp.concatenate(pair, axis=1))[:, 0] / SURE)


class JointLearner(VisitLearner):
    """``init``, ``step`` and ``greedy`` of a :class:`~simdev.baselines.rl._train.Learner`.

    An episode draws a grouping and then visits its groups. Both networks learn by REINFORCE: a choice of a device from
    the return since its step, the grouping from the return of the whole episode.
    """

    def __init__(self, new, *, rows, episodes, every, from_best, discount, history, rate, entropy, entropy_updates):
        self.rows, self.episodes, self.every, self.from_best = rows, episodes, every, from_best
        self.discount, self.history = discount, history
        self.steps = -(-rows // every) * every
        optimizer = optax.flatten(optax.chain(optax.clip_by_global_norm(1.25), optax.adam(rate)))

        def chances(policy, nodes, placed, joins):
            """Mean log-likelihood and entropy of ``joins``, over the nodes that have a partner."""
            logits = policy.joining(nodes, placed)
            free = (nodes.partner != jnp.arange(rows)) & nodes.view.sight.real
            yes, no = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
            undecided = -jnp.exp(yes) * yes - jnp.exp(no) * no
            count = jnp.maximum(1, jnp.sum(free))
            return jnp.sum(jnp.where(joins, yes, no) * free) / count, jnp.sum(undecided * free) / count

        @jax.jit
        def group(policy, nodes, placed, key, greedy):
            """Groupings of ``episodes`` episodes that start at ``placed`` int ``(B, N)``, and the views of the groups.

            Returns bool ``(B, N)``, labels int ``(B, N)``, the device of each group (where most of its time is) int
            ``(B, N)``, and the views with a first axis of ``B``.
            """
            level = jnp.where(greedy, 0.5, jax.random.uniform(key, placed.shape))
            logits = jax.vmap(policy.joining, (None, 0))(nodes, placed)
            joins = (level < jax.nn.sigmoid(logits)) & (nodes.partner != jnp.arange(rows))
            label = jax.vmap(labels, (None, 0))(nodes.partner, joins)
            views = jax.vmap(pooled, (None, 0))(nodes.view, label)
            sight = nodes.view.sight
            time = jax.nn.one_hot(placed, sight.allowed.shape[1]) * (sight.nodes[:, :1] + 1e-6)
            of_groups = (label[:, None] == jnp.arange(rows)[:, None]).astype(jnp.float32) @ time
            return joins, label, jnp.argmax(of_groups, axis=2).astype(jnp.int32), views

        @jax.jit
        def act(policy, views, placed, begin, key, greedy):
            """Take the steps from ``begin`` to the next measurement; as in :class:`VisitLearner`, for groups at
            ``placed`` int ``(B, N)``. A row that is no group keeps its device."""
            policy = policy.place
            embedded = jax.vmap(lambda view, one: policy.embed(view, one, begin, begin + every))(views, placed)
            shape = (every, len(placed), views.sight.allowed.shape[2])
            noise = jax.random.gumbel(jax.random.fold_in(key, begin), shape)

            def visit(placed, step):
                visited, noise = step
                logits = jax.vmap(policy, (0, 0, 0, None))(views, embedded, placed, visited)
                action = jnp.argmax(logits + jnp.where(greedy, 0.0, noise), axis=1)
                is_group = views.sight.real.at[:, visited].get(mode="fill", fill_value=False)
                here = placed.at[:, visited].get(mode="fill", fill_value=0)
                action = jnp.where(is_group, action, here)
                return placed.at[:, visited].set(action, mode="drop"), (placed, action)

            after, (placed, actions) = jax.lax.scan(visit, placed, (begin + jnp.arange(every), noise))
            return placed, actions, after

        def stretch(policy, view, placed, visited, actions):
            def likelihood(placed, visited, action):
                logp = jax.nn.log_softmax(policy(view, embedded, placed, visited))
                undecided = -jnp.sum(jnp.where(view.sight.allowed[visited], jnp.exp(logp) * logp, 0.0))
                return logp[action], undecided

            embedded = policy.embed(view, placed[0], visited[0], visited[0] + every)
            return jax.vmap(likelihood)(placed, visited, actions)

        def objective(policy, nodes, start, joins, placed, actions, advantage, weight):
            view = pooled(nodes.view, labels(nodes.partner, joins))
            steps = jnp.arange(self.steps)
            parts = [array.reshape(-1, every, *array.shape[1:]) for array in (placed, steps, actions)]
            found = jax.vmap(stretch, (None, None, 0, 0, 0))(policy.place, view, *parts)
            logp, undecided = (array.ravel() for array in found)
            real = jnp.asarray(view.sight.real).at[steps].get(mode="fill", fill_value=False)
            undecided = jnp.sum(undecided * real) / jnp.sum(real)
            grouping, unsure = chances(policy, nodes, start, joins)
            gain = jnp.sum(logp * advantage * real) / jnp.sum(real) + grouping * advantage[0]
            return -gain - weight * (undecided + unsure), undecided

        @jax.jit
        def update(policy, optimizer_state, nodes, start, joins, placed, actions, advantage, updates):
            weight = entropy * jnp.maximum(0.0, 1.0 - updates / entropy_updates)

            def mean(policy):
                loss, left = jax.vmap(objective, (None, None, None, 0, 0, 0, 0, None))(
                    policy, nodes, start, joins, placed, actions, advantage, weight
                )
                return loss.mean(), left.mean()

            (_, left), gradient = jax.value_and_grad(mean, has_aux=True)(policy)
            change, optimizer_state = optimizer.update(gradient, optimizer_state, policy)
            return optax.apply_updates(policy, change), optimizer_state, left

        self._group, self._act, self._update, self._first = group, act, update, initializer(new, optimizer)
        self._split = jax.jit(lambda key: jax.random.split(key, 3))

    def step(self, state: State, index: int, evaluate: Episodes) -> tuple[State, dict]:
        nodes = evaluate.grouped.inputs
        start, cost = state["start"].copy(), state["cost"].copy()
        if cost[index] < 0:
            start[index] = first_placement(evaluate.grouped)
            cost[index] = _costs(evaluate, start[index][None])[0]
        begin = start[index].copy()  # JAX may still read it when the start is replaced
        key, draw, noise = self._split(state["key"])
        episode = self._episodes(state["policy"], evaluate, begin, cost[index], draw, noise)
        joins, placed, actions, costs, best = episode
        returns, history = self._returns(costs), state["returns"].copy()
        episodes = state["episodes"].copy()
        for row in returns:
            history[index, episodes[index] % self.history] = row
            episodes[index] += 1
        known = history[index, : min(episodes[index], self.history)]
        advantage = (returns - known.mean(axis=0)) / (known[:, : evaluate.grouped.n_groups].std() + 1e-6)
        advantage = np.pad(np.clip(advantage, -5, 5), ((0, 0), (0, self.steps - self.rows)))
        updates = (int(episodes[index]) - 1) // self.episodes
        policy, optimizer_state, entropy = self._update(
            state["policy"], state["optimizer"], nodes, begin, joins, placed, actions, advantage, updates
        )
        if self.from_best and best[0] < cost[index]:
            cost[index], start[index] = best
        new = {"policy": policy, "optimizer": optimizer_state, "key": key, "episodes": episodes, "returns": history}
        return {**new, "start": start, "cost": cost}, {"entropy": float(entropy)}

    def _episodes(self, policy, evaluate, start, cost, draw, noise):
        """Run ``B`` episodes from ``start`` int ``(N,)``; a placement that no step has changed is not simulated.

        Returns the groupings bool ``(B, N)``, the states of the groups int32 ``(B, steps, N)``, the actions int32
        ``(B, steps)``, the cost float32 ``(B, nodes + 1)`` before each step and at the end, and the least cost with its
        placement int32 ``(N,)``.
        """
        many, count, every = self.episodes, evaluate.grouped.n_groups, self.every
        now, best = np.repeat(start[None], many, axis=0), (cost, start)
        joins, label, groups, views = self._group(policy, evaluate.grouped.inputs, now, draw, False)
        label, groups = np.asarray(label), np.asarray(groups)
        placed, actions = np.zeros((many, self.steps, self.rows), np.int32), np.zeros((many, self.steps), np.int32)
        costs = np.full((many, count + 1), cost, np.float32)
        for begin in range(0, count, every):
            end = begin + every
            states, chosen, after = map(np.asarray, self._act(policy, views, groups, begin, noise, False))
            placed[:, begin:end], actions[:, begin:end] = states.swapaxes(0, 1), chosen.T
            moved, now = _moved(now, label, groups, after)
            groups, costs[:, begin + 1 :] = after, costs[:, begin, None]
            if moved.any():
                found = _costs(evaluate, now[moved])
                costs[moved, min(end, count) :] = found[:, None]
                if found.min() < best[0]:
                    best = found.min(), now[moved][found.argmin()].copy()
        return joins, placed, actions, costs, best

    def greedy(self, state: State, grouped: GroupedProblem) -> np.ndarray:
        now = first_placement(grouped)[None]
        _, label, groups, views = self._group(state["policy"], grouped.inputs, now, state["key"], True)
        label, groups = np.asarray(label), np.asarray(groups)
        for begin in range(0, grouped.n_groups, self.every):
            after = np.asarray(self._act(state["policy"], views, groups, begin, state["key"], True)[2])
            now, groups = _moved(now, label, groups, after)[1], after
        return now[0]


def _moved(now: np.ndarray, label: np.ndarray, before: np.ndarray, after: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether each episode has moved a group, bool ``(B,)``, and the devices of the nodes then, int32 ``(B, N)``.

    ``now`` are their devices before; those of groups are ``before`` and ``after``. A group whose device is chosen again
    leaves its nodes where they are, also if they are on several devices.
    """
    changed = np.take_along_axis(after != before, label, axis=1)
    new = np.where(changed, np.take_along_axis(after, label, axis=1), now).astype(np.int32)
    return (new != now).any(axis=1), new


def first_placement(grouped: GroupedProblem[Nodes]) -> np.ndarray:
    """int32 ``(N,)``: every node on the first device that may take it."""
    return np.argmax(grouped.inputs.view.sight.allowed, axis=1).astype(np.int32)


@cache  # compiled functions are kept with it
def learner_functions(*, hidden, devices, rounds, rows, **how) -> JointLearner:
    """The learner functions of ``placeto-joint``, for problems of ``rows`` nodes and ``devices`` columns."""

    def new(key):
        return JointPolicy(hidden, devices, rounds, key=key)

    return JointLearner(new, rows=rows, **how)
