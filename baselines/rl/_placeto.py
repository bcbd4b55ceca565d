"""The network of ``placeto``, its episodes and its updates."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

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

    Learns by REINFORCE over episodes that visit every group once.
    """

    def __init__(self, new, *, rows, episodes, every, from_best, discount, history, rate, entropy, entropy_updates):
        self.rows, self.episodes, self.every, self.from_best = rows, episodes, every, from_best
        self.discount, self.history = discount, history
        self.steps = -(-rows // every) * every  # of an episode, padded to whole stretches
        optimizer = optax.flatten(optax.chain(optax.clip_by_global_norm(1.25), optax.adam(rate)))

        def likelihood(policy, view, embedded, placed, visited, action):
            logp = jax.nn.log_softmax(policy(view, embedded, placed, visited))
            entropy = -jnp.sum(jnp.where(view.sight.allowed[visited], jnp.exp(logp) * logp, 0.0))
            return logp[action], entropy

        def stretch(policy, view, placed, visited, actions):
            """Log-likelihoods and entropies float32 ``(every,)`` of the steps between two measurements."""
            embedded = policy.embed(view, placed[0], visited[0], visited[0] + every)
            return jax.vmap(likelihood, (None, None, None, 0, 0, 0))(policy, view, embedded, placed, visited, actions)

        def objective(policy, view, placed, actions, advantage, weight):
            """The loss: ``placed`` int ``(steps, G)``: the state at each step of an episode; the others
            ``(steps,)``."""
            steps = jnp.arange(self.steps)
            parts = [array.reshape(-1, every, *array.shape[1:]) for array in (placed, steps, actions)]
            logp, entropy = (array.ravel() for array in jax.vmap(stretch, (None, None, 0, 0, 0))(policy, view, *parts))
            real = view.sight.real.at[steps].get(mode="fill", fill_value=False)
            entropy = jnp.sum(entropy * real) / jnp.sum(real)
            return -jnp.sum(logp * advantage * real) / jnp.sum(real) - weight * entropy, entropy

        @jax.jit
        def act(policy, view, placed, begin, key, greedy):
            """Take the steps from ``begin`` to the next measurement, for episodes at ``placed`` int ``(B, G)``.

            Returns the state before each step int ``(every, B, G)``, the actions int ``(every, B)``, and the last
            states.
            """
            embedded = jax.vmap(lambda one: policy.embed(view, one, begin, begin + every))(placed)
            shape = (every, len(placed), view.sight.allowed.shape[1])
            noise = jax.random.gumbel(jax.random.fold_in(key, begin), shape)

            def visit(placed, step):
                visited, noise = step
                logits = jax.vmap(policy, (None, 0, 0, None))(view, embedded, placed, visited)
                action = jnp.argmax(logits + jnp.where(greedy, 0.0, noise), axis=1)
                return placed.at[:, visited].set(action, mode="drop"), (placed, action)

            after, (placed, actions) = jax.lax.scan(visit, placed, (begin + jnp.arange(every), noise))
            return placed, actions, after

        @jax.jit
        def update(policy, optimizer_state, view, placed, actions, advantage, updates):
            weight = entropy * jnp.maximum(0.0, 1.0 - updates / entropy_updates)

            def mean(policy):
                loss, left = jax.vmap(objective, (None, None, 0, 0, 0, None))(
                    policy, view, placed, actions, advantage, weight
                )
                return loss.mean(), left.mean()

            (_, left), gradient = jax.value_and_grad(mean, has_aux=True)(policy)
            change, optimizer_state = optimizer.update(gradient, optimizer_state, policy)
            return optax.apply_updates(policy, change), optimizer_state, left

        self._act, self._update, self._first = act, update, initializer(new, optimizer)
        self._split = jax.jit(jax.random.split)

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
        grouped, view = evaluate.grouped, evaluate.grouped.inputs
        start, cost = state["start"].copy(), state["cost"].copy()
        if cost[index] < 0:
            start[index] = first_placement(grouped)
            cost[index] = _costs(evaluate, start[index][None])[0]
        key, noise = self._split(state["key"])
        placed, actions, costs = self._run(state["policy"], view, evaluate, start[index], cost[index], noise)
        returns, history = self._returns(costs), state["returns"].copy()
        episodes = state["episodes"].copy()
        for row in returns:
            history[index, episodes[index] % self.history] = row
            episodes[index] += 1
        known = history[index, : min(episodes[index], self.history)]
        advantage = (returns - known.mean(axis=0)) / (known[:, : grouped.n_groups].std() + 1e-6)
        advantage = np.pad(np.clip(advantage, -5, 5), ((0, 0), (0, self.steps - self.rows)))
        updates = (int(episodes[index]) - 1) // self.episodes
        policy, optimizer_state, entropy = self._update(
            state["policy"], state["optimizer"], view, placed, actions, advantage, updates
        )
        if self.from_best:
            row, when = np.unravel_index(np.argmin(costs), costs.shape)
            if costs[row, when] < cost[index]:
                after = np.append(placed[row, when - 1, : when - 1], actions[row, when - 1])
                start[index, :when] = after
                cost[index] = costs[row, when]
        new = {"policy": policy, "optimizer": optimizer_state, "key": key, "episodes": episodes, "returns": history}
        return {**new, "start": start, "cost": cost}, {"entropy": float(entropy)}

    def _run(self, policy, view, evaluate, start, cost, noise):
        """Run ``B`` episodes; a placement that no step has changed is not simulated.

        Returns the states ``placed`` int32 ``(B, steps, G)`` and actions int32 ``(B, steps)`` of each step, and the
        cost float32 ``(B, groups + 1)`` before each step and at the end.
        """
        many, groups, every = self.episodes, evaluate.grouped.n_groups, self.every
        placed, actions = np.zeros((many, self.steps, self.rows), np.int32), np.zeros((many, self.steps), np.int32)
        now, costs = np.repeat(start[None], many, axis=0), np.full((many, groups + 1), cost, np.float32)
        for begin in range(0, groups, every):
            end = begin + every
            states, chosen, after = map(np.asarray, self._act(policy, view, now, begin, noise, False))
            placed[:, begin:end], actions[:, begin:end] = states.swapaxes(0, 1), chosen.T
            moved = (after != now).any(axis=1)
            now, costs[:, end:] = after, costs[:, begin, None]
            costs[:, begin + 1 : end] = costs[:, begin, None]
            if moved.any():
                costs[moved, min(end, groups) :] = _costs(evaluate, now[moved])[:, None]
        return placed, actions, costs

    def _returns(self, costs) -> np.ndarray:
        """float32 ``(B, G)``: discounted sum of the cost differences from each step to the end."""
        returns, total = np.zeros((len(costs), self.rows), np.float32), np.zeros(len(costs), np.float32)
        for step in reversed(range(costs.shape[1] - 1)):
            total = costs[:, step] - costs[:, step + 1] + self.discount * total
            returns[:, step] = total
        return returns

    def greedy(self, state: State, grouped: GroupedProblem) -> np.ndarray:
        now = first_placement(grouped)[None]
        for begin in range(0, grouped.n_groups, self.every):
            now = self._act(state["policy"], grouped.inputs, now, begin, state["key"], True)[2]
        return np.asarray(now)[0]


def first_placement(grouped: GroupedProblem[View]) -> np.ndarray:
    """int32 ``(G,)``: every group on the first device that may take it."""
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
