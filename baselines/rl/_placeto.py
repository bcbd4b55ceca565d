"""The network of ``placeto``, its episodes and its updates."""

from __future__ import annotations

from functools import cache
from typing import Literal, NamedTuple

import numpy as np

from simdev.baselines.rl._grouped import DEVICE_FEATURES, GroupedArrays, GroupedProblem
from simdev.baselines.rl._jax import eqx, initializer, jax, jnp, optax
from simdev.baselines.rl._layers import Dense, normalised
from simdev.baselines.rl._sight import NODE_FEATURES, SUMMARY_FEATURES, Sight, with_sight
from simdev.baselines.rl._train import Episodes, State

LONGEST = 10.0  # times the scale: a longer step time counts as this one
FLAT = 0.1  # scale of the last layer's first weights, so that the first policy hardly prefers a device
BOUND = 3.0  # of logits (Bello et al. 2016): a policy that is sure of every group would learn nothing more
STAY = 2.0  # the first value of the learned bonus for leaving a group where it is


class View(NamedTuple):
    """A :class:`Sight` and weights of neighbours and relatives, float32 ``(G, G)`` each.

    ``before[v, u]`` is 1 / (number of parents of v) if u is a parent of v, else 0; ``behind`` is the same for children,
    and ``ancestors``, ``descendants`` and ``parallel`` for ancestors, descendants and all other groups.
    """

    sight: Sight
    before: np.ndarray
    behind: np.ndarray
    ancestors: np.ndarray
    descendants: np.ndarray
    parallel: np.ndarray


def with_view(grouped: GroupedProblem[GroupedArrays]) -> GroupedProblem[View]:
    """``grouped`` with a :class:`View` in place of its inputs."""
    inputs, rows = grouped.inputs, len(grouped.inputs.real)
    edge = np.zeros((rows, rows), bool)
    edge[inputs.target[inputs.edge_real], inputs.source[inputs.edge_real]] = True
    reach = edge.copy()
    for middle in range(rows):  # transitive closure; groups may depend on one another in cycles
        reach |= reach[:, middle : middle + 1] & reach[middle]
    np.fill_diagonal(reach, False)
    real = inputs.real[:, None] & inputs.real
    parallel = real & ~reach & ~reach.T & ~np.eye(rows, dtype=bool)
    sighted = with_sight(grouped, 1)
    tables = (edge, edge.T, reach, reach.T, parallel)
    return sighted.with_inputs(View(sighted.inputs, *map(_mean, tables)))


def _mean(table: np.ndarray) -> np.ndarray:
    return (table / np.maximum(1, table.sum(axis=1, keepdims=True))).astype(np.float32)


class Mlp(eqx.Module):
    layers: list[Dense]

    def __init__(self, *sizes: int, key, last: float = 1.4):
        keys = jax.random.split(key, len(sizes) - 1)
        scales = [1.4] * (len(sizes) - 2) + [last]
        pairs = zip(sizes[:-1], sizes[1:], keys, scales, strict=True)
        self.layers = [Dense(before, after, key=one, scale=scale) for before, after, one, scale in pairs]

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x)


class PlacetoPolicy(eqx.Module):
    """Logits of the devices for the visited group, float32 ``(D,)``: :meth:`embed`, then :meth:`__call__`."""

    enter: Mlp
    down: list[Mlp]  # f and g along the edges
    up: list[Mlp]  # f and g against them
    pools: list[Mlp]
    out: Mlp
    device: Dense
    stay: jax.Array
    rounds: int = eqx.field(static=True)

    def __init__(self, hidden: int, devices: int, rounds: int, *, key):
        keys = jax.random.split(key, 10)
        features = NODE_FEATURES + SUMMARY_FEATURES + 2 * devices + DEVICE_FEATURES + 2
        self.enter = Mlp(features, hidden, hidden, key=keys[0])
        self.down = [Mlp(hidden, hidden, hidden, key=one) for one in keys[1:3]]
        self.up = [Mlp(hidden, hidden, hidden, key=one) for one in keys[3:5]]
        self.pools = [Mlp(2 * hidden, hidden, hidden, key=one) for one in keys[5:8]]
        width = 5 * hidden + devices
        self.out = Mlp(width, 2 * hidden, hidden, devices + 16, key=keys[8], last=FLAT)
        self.device = Dense(DEVICE_FEATURES + 2, 16, key=keys[9], scale=0.3)
        self.stay = jnp.asarray(STAY)
        self.rounds = rounds

    def embed(self, view: View, placed, begin, end):
        """Embeddings of the groups, float32 ``(G, 2 * hidden)``, and their terms in the summaries, ``(3, G, hidden)``.

        ``placed`` int ``(G,)`` is the device of each group; the groups from ``begin`` up to ``end`` are visited next.
        """
        sight = view.sight
        rows, devices = sight.allowed.shape
        here = jax.nn.one_hot(placed, devices) * sight.real[:, None]
        summary = jnp.broadcast_to(sight.summary, (rows, SUMMARY_FEATURES))
        row = jnp.arange(rows)
        now = jnp.stack([(row >= begin) & (row < end), row < begin], axis=1)
        nodes = jnp.concatenate([sight.nodes, summary, here, sight.shares, here @ sight.devices, now], axis=1)
        own = self.enter(nodes)

        def hear(both, _):
            along, against = both
            return (own + _message(self.down, view.before, along), own + _message(self.up, view.behind, against)), None

        both = jnp.concatenate(jax.lax.scan(hear, (own, own), None, length=self.rounds)[0], axis=1)
        return both, jnp.stack([jax.nn.relu(pool(both)) for pool in self.pools])

    def __call__(self, view: View, embedded, placed, visited):
        """``embedded``: the result of :meth:`embed`; ``placed`` int ``(G,)``: devices now; ``visited`` int: the
        group."""
        sight, (both, pools) = view.sight, embedded
        here = jax.nn.one_hot(placed, sight.allowed.shape[1]) * sight.real[:, None]
        load = (sight.nodes[:, 0] * sight.real) @ here  # share of the time on each device
        near = (view.before[visited] + view.behind[visited]) @ here  # share of the neighbours on each device
        tables = (view.ancestors, view.descendants, view.parallel)
        pooled = [table[visited] @ pool for table, pool in zip(tables, pools, strict=True)]
        answer = self.out(jnp.concatenate([both[visited], *pooled, sight.shares[visited]]))
        seen = jnp.concatenate([sight.devices, load[:, None], near[:, None]], axis=1)
        devices = len(load)
        logits = answer[:devices] + self.device(seen) @ answer[devices:] + self.stay * here[visited]
        return jnp.where(sight.allowed[visited], BOUND * jnp.tanh(logits / BOUND), -1e9)


def _message(pair, table, x):
    """The mean message of the neighbours in ``table``, normalised; 0 for a group without neighbours.

    Without normalisation, many rounds with the same weights would make the messages of some first weights grow without
    limit, and an untrained policy would be certain of its choices.
    """
    one, two = pair
    return jax.nn.relu(normalised(two(table @ jax.nn.relu(one(x))))) * table.any(axis=1, keepdims=True)


class VisitLearner:
    """``init``, ``step`` and ``greedy`` of a :class:`~simdev.baselines.rl._train.Learner`.

    Learns by REINFORCE over episodes that visit every group once. A subclass may draw the groups of each episode
    (:meth:`_groups`); here they are the rows of the inputs.
    """

    views_axis: int | None = None  # 0 if each episode has a view of its own
    first_of_equals: Literal["C", "F"] = "C"  # which of equal costs counts: the first episode's; F: the first step's

    def __init__(self, new, *, rows, episodes, every, from_best, discount, history, rate, entropy, entropy_updates):
        self.rows, self.episodes, self.every, self.from_best = rows, episodes, every, from_best
        self.discount, self.history = discount, history
        self.steps = -(-rows // every) * every  # of an episode, padded to whole stretches
        optimizer = optax.flatten(optax.chain(optax.clip_by_global_norm(1.25), optax.adam(rate)))

        def likelihood(policy, view, embedded, placed, visited, action):
            logp = jax.nn.log_softmax(policy(view, embedded, placed, visited))
            undecided = -jnp.sum(jnp.where(view.sight.allowed[visited], jnp.exp(logp) * logp, 0.0))
            return logp[action], undecided

        def stretch(policy, view, placed, visited, actions):
            """Log-likelihoods and entropies float32 ``(every,)`` of the steps between two measurements."""
            embedded = policy.embed(view, placed[0], visited[0], visited[0] + every)
            return jax.vmap(likelihood, (None, None, None, 0, 0, 0))(policy, view, embedded, placed, visited, actions)

        def visits(policy, view, placed, actions, advantage):
            """Gain and mean entropy of an episode: ``placed`` int ``(steps, G)`` are the states at its steps; the
            others are ``(steps,)``."""
            steps = jnp.arange(self.steps)
            parts = [array.reshape(-1, every, *array.shape[1:]) for array in (placed, steps, actions)]
            logp, left = (array.ravel() for array in jax.vmap(stretch, (None, None, 0, 0, 0))(policy, view, *parts))
            real = jnp.asarray(view.sight.real).at[steps].get(mode="fill", fill_value=False)
            return jnp.sum(logp * advantage * real) / jnp.sum(real), jnp.sum(left * real) / jnp.sum(real)

        @jax.jit
        def act(policy, views, placed, begin, key, greedy):
            """Take the steps from ``begin`` to the next measurement, for episodes at ``placed`` int ``(B, G)``.

            A row that is no group keeps its device. Returns the state before each step int ``(every, B, G)``, the
            actions int ``(every, B)``, and the last states.
            """
            policy, axis = self._visitor(policy), self.views_axis
            embedded = jax.vmap(lambda view, one: policy.embed(view, one, begin, begin + every), (axis, 0))(
                views, placed
            )
            shape = (every, len(placed), views.sight.allowed.shape[-1])
            noise = jax.random.gumbel(jax.random.fold_in(key, begin), shape)

            def visit(placed, step):
                visited, noise = step
                logits = jax.vmap(policy, (axis, 0, 0, None))(views, embedded, placed, visited)
                action = jnp.argmax(logits + jnp.where(greedy, 0.0, noise), axis=1)
                is_group = jnp.asarray(views.sight.real).at[..., visited].get(mode="fill", fill_value=False)
                action = jnp.where(is_group, action, placed.at[:, visited].get(mode="fill", fill_value=0))
                return placed.at[:, visited].set(action, mode="drop"), (placed, action)

            after, (placed, actions) = jax.lax.scan(visit, placed, (begin + jnp.arange(every), noise))
            return placed, actions, after

        @jax.jit
        def update(policy, optimizer_state, inputs, start, drawn, placed, actions, advantage, updates):
            weight = entropy * jnp.maximum(0.0, 1.0 - updates / entropy_updates)

            def mean(policy):
                loss, left = jax.vmap(self._loss, (None, None, None, 0, 0, 0, 0, None))(
                    policy, inputs, start, drawn, placed, actions, advantage, weight
                )
                return loss.mean(), left.mean()

            (_, left), gradient = jax.value_and_grad(mean, has_aux=True)(policy)
            change, optimizer_state = optimizer.update(gradient, optimizer_state, policy)
            return optax.apply_updates(policy, change), optimizer_state, left

        self._visits, self._act, self._update, self._first = visits, act, update, initializer(new, optimizer)
        self._split = jax.jit(jax.random.split)

    @staticmethod
    def _visitor(policy) -> PlacetoPolicy:
        """The part of ``policy`` that visits groups."""
        return policy

    def _loss(self, policy, inputs, start, drawn, placed, actions, advantage, weight):
        """The loss of one episode from ``start`` int ``(G,)``, with what :meth:`_groups` has ``drawn`` for it; and the
        mean entropy of its visits."""
        gain, undecided = self._visits(policy, inputs, placed, actions, advantage)
        return -gain - weight * undecided, undecided

    def _groups(self, policy, inputs, placed, key, greedy):
        """What episodes from ``placed`` int ``(B, N)`` draw: an array with ``B`` rows, the group of each row int
        ``(B, N)``, the device of each group int ``(B, N)``, and the views."""
        return np.zeros(len(placed), bool), np.broadcast_to(np.arange(self.rows), placed.shape), placed, inputs

    def init(self, seed: int, n_problems: int) -> State:
        policy, optimizer_state, key = self._first(seed)
        return {
            "policy": policy,
            "optimizer": optimizer_state,
            "key": key,
            "episodes": np.zeros(n_problems, np.int32),
            "returns": np.zeros((n_problems, self.history, self.rows), np.float32),
            "start": np.zeros((n_problems, self.rows), np.int32),
            "cost": np.full(n_problems, -1.0, np.float32),
        }

    def step(self, state: State, index: int, evaluate: Episodes) -> tuple[State, dict]:
        inputs = evaluate.grouped.inputs
        start, cost = state["start"].copy(), state["cost"].copy()
        if cost[index] < 0:
            start[index] = first_placement(evaluate.grouped)
            cost[index] = _costs(evaluate, start[index][None])[0]
        begin = start[index].copy()  # JAX may still read it when the start is replaced
        key, *keys = self._split(state["key"])
        drawn, placed, actions, costs, reached = self._run(state["policy"], evaluate, begin, cost[index], keys)
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
            state["policy"], state["optimizer"], inputs, begin, drawn, placed, actions, advantage, updates
        )
        if self.from_best:
            least = np.argmin(costs.ravel(self.first_of_equals))
            row, when = np.unravel_index(least, costs.shape, self.first_of_equals)
            if costs[row, when] < cost[index]:
                cost[index], start[index] = costs[row, when], reached[(when - 1) // self.every, row]
        new = {"policy": policy, "optimizer": optimizer_state, "key": key, "episodes": episodes, "returns": history}
        return {**new, "start": start, "cost": cost}, {"entropy": float(entropy)}

    def _run(self, policy, evaluate, start, cost, keys):
        """Run ``B`` episodes from ``start`` int ``(N,)``; a placement that no step has changed is not simulated.

        Returns what the episodes have drawn, the states of the groups int32 ``(B, steps, N)`` and the actions int32
        ``(B, steps)`` at each step, the cost float32 ``(B, rows + 1)`` before each step and at the end, and the
        placements int32 ``(stretches, B, N)`` after each stretch.
        """
        many, count, every = self.episodes, evaluate.grouped.n_groups, self.every
        now = np.repeat(start[None], many, axis=0)
        drawn, label, groups, views = self._groups(policy, evaluate.grouped.inputs, now, keys[0], False)
        label, groups = np.asarray(label), np.asarray(groups)
        placed, actions = np.zeros((many, self.steps, self.rows), np.int32), np.zeros((many, self.steps), np.int32)
        costs, reached = np.full((many, count + 1), cost, np.float32), []
        for begin in range(0, count, every):
            end = begin + every
            states, chosen, after = map(np.asarray, self._act(policy, views, groups, begin, keys[-1], False))
            placed[:, begin:end], actions[:, begin:end] = states.swapaxes(0, 1), chosen.T
            moved, now = _moved(now, label, groups, after)
            groups, costs[:, begin + 1 :] = after, costs[:, begin, None]
            if moved.any():
                costs[moved, min(end, count) :] = _costs(evaluate, now[moved])[:, None]
            reached.append(now)
        return drawn, placed, actions, costs, np.stack(reached)

    def _returns(self, costs) -> np.ndarray:
        """float32 ``(B, G)``: discounted sum of the cost differences from each step to the end."""
        returns, total = np.zeros((len(costs), self.rows), np.float32), np.zeros(len(costs), np.float32)
        for step in reversed(range(costs.shape[1] - 1)):
            total = costs[:, step] - costs[:, step + 1] + self.discount * total
            returns[:, step] = total
        return returns

    def greedy(self, state: State, grouped: GroupedProblem) -> np.ndarray:
        now = first_placement(grouped)[None]
        _, label, groups, views = self._groups(state["policy"], grouped.inputs, now, state["key"], True)
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


def first_placement(grouped: GroupedProblem) -> np.ndarray:
    """int32 ``(N,)``: every row of the inputs on the first device that may take it."""
    return np.argmax(grouped.inputs.sight.allowed, axis=1).astype(np.int32)


def _costs(evaluate: Episodes, actions: np.ndarray) -> np.ndarray:
    """float32 ``(k,)``: step times over the scale of actions int ``(k, G)``.

    A placement that exceeds memory costs more, the larger its overflow.
    """
    costs = evaluate(actions) ** 2
    return np.where(evaluate.fits, np.minimum(costs, LONGEST), costs)


@cache  # compiled functions are kept with it
def learner_functions(*, hidden, devices, rounds, rows, **how) -> VisitLearner:
    """The learner functions of ``placeto``, for problems of ``rows`` groups and ``devices`` columns."""

    def new(key):
        return PlacetoPolicy(hidden, devices, rounds, key=key)

    return VisitLearner(new, rows=rows, **how)
