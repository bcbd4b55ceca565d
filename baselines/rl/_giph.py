"""The network of ``giph``, its moves and its updates."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from simdev.baselines.rl._grouped import GroupedArrays, GroupedProblem, bucket
from simdev.baselines.rl._jax import eqx, initializer, jax, jnp, optax
from simdev.baselines.rl._layers import Dense
from simdev.baselines.rl._pairs import group_loads, group_pairs, neighbours
from simdev.baselines.rl._train import Episodes, State

LONGEST = 20.0  # times the scale: the largest cost; placements that exceed memory cost 10 or more
NODE_FEATURES, EDGE_FEATURES = 8, 3


class Net(NamedTuple):
    """The arrays from which gpNet is built, as a pytree; ``G`` groups, ``D`` devices and ``K`` neighbours.

    ``real`` bool ``(G,)`` and ``allowed`` bool ``(G, D)`` are those of ``_grouped.GroupedArrays``. ``time`` float32
    ``(G, D)``: time of a group on a device over the mean time of a group (each op on its fastest device); ``need``
    float32 ``(G, D)``: the persistent and output bytes of the group over the device's memory. The other arrays have an
    axis for the direction: 0 for the neighbours before a group; 1 for the neighbours after it, where the groups are in
    reverse order. ``near`` int32 ``(2, G, K)``: neighbours; ``near_real`` bool ``(2, G, K)``; ``size`` float32 ``(2, G,
    K)``: log of the MB between them; ``transfer`` float32 ``(2, G, K, D, D)``: time to send these bytes, for each
    device of the neighbour and of the group.
    """

    real: np.ndarray
    allowed: np.ndarray
    time: np.ndarray
    need: np.ndarray
    near: np.ndarray
    near_real: np.ndarray
    size: np.ndarray
    transfer: np.ndarray


def with_net(grouped: GroupedProblem[GroupedArrays]) -> GroupedProblem[Net]:
    """``grouped`` with a :class:`Net` in place of its inputs."""
    inputs = grouped.inputs
    rows, columns = inputs.allowed.shape
    time, need = group_loads(grouped)
    low, high, size, transfer = group_pairs(grouped)
    sides = [neighbours(high, low, rows), neighbours(rows - 1 - low, rows - 1 - high, rows)]
    most = bucket(max(side[0].shape[1] for side in sides), 2)
    near, real = np.zeros((2, rows, most), np.int32), np.zeros((2, rows, most), bool)
    sizes = np.zeros((2, rows, most), np.float32)
    transfers = np.zeros((2, rows, most, columns, columns), np.float32)
    tables = (transfer, transfer.transpose(0, 2, 1))  # the neighbour's device is the first axis
    for side, ((neighbour, pair), table) in enumerate(zip(sides, tables, strict=True)):
        there = pair >= 0
        width = pair.shape[1]
        near[side, :, :width], real[side, :, :width] = neighbour, there
        sizes[side, :, :width][there] = size[pair[there]]
        transfers[side, :, :width][there] = table[pair[there]]
    net = Net(inputs.real, inputs.allowed, time, need, near, real, sizes, transfers)
    return grouped.with_inputs(net)


def expected_schedule(net: Net, placed):
    """A schedule in which each device runs its groups in order and transfers do not contend.

    Returns float32 ``(G, D)``, the time when all inputs of each group could be on each device; ``(G,)``, the start of
    each group; and a scalar, the end of the last group.
    """
    rows, devices = net.allowed.shape
    here = jax.nn.one_hot(placed, devices)
    own = jnp.sum(net.time * here, axis=1) * net.real
    arrive = jnp.sum(net.transfer[0] * here[net.near[0]][..., None], axis=2)
    arrive = jnp.where(net.near_real[0][..., None], arrive, -jnp.inf)  # (G, K, D)

    def place(carry, now):
        finish, free = carry
        number, near, arrive, here, own = now
        ready = jnp.maximum(0.0, jnp.max(finish[near][:, None] + arrive, axis=0))
        start = jnp.sum(jnp.maximum(ready, free) * here)
        end = start + own
        return (finish.at[number].set(end), jnp.where(here > 0, end, free)), (ready, start)

    groups = (jnp.arange(rows), net.near[0], arrive, here, own)
    (finish, _), (ready, start) = jax.lax.scan(place, (jnp.zeros(rows), jnp.zeros(devices)), groups)
    return ready, start, jnp.max(finish)


def node_features(net: Net, placed):
    """The features of gpNet's nodes, float32 ``(G, D, NODE_FEATURES)``.

    Columns: log of the time; log of the time over the time on the fastest device; start-time potential; 1 for a pivot;
    log of the time of all groups on the device over an even share; the share of its memory that they fill; the share
    that the group would fill; log of the start of the group.
    """
    ready, start, _ = expected_schedule(net, placed)
    here = jax.nn.one_hot(placed, net.allowed.shape[1]) * net.real[:, None]
    fastest = jnp.min(jnp.where(net.allowed, net.time, jnp.inf), axis=1, keepdims=True)
    potential = (ready - start[:, None]) * (1 - here)
    load = jnp.sum(net.time * here, axis=0)
    even = jnp.maximum(jnp.sum(load), 1e-6) / jnp.maximum(1, jnp.sum(jnp.any(net.allowed & net.real[:, None], axis=0)))
    filled = jnp.sum(net.need * here, axis=0)
    columns = [
        jnp.log1p(net.time),
        jnp.log((net.time + 1e-3) / (fastest + 1e-3)),
        jnp.sign(potential) * jnp.log1p(jnp.abs(potential)) / 2,
        here,
        jnp.log1p(load / even),
        jnp.minimum(filled, 4.0),
        jnp.minimum(net.need, 4.0),
        jnp.log1p(start)[:, None] / 4,
    ]
    return jnp.stack([jnp.broadcast_to(column, net.time.shape) for column in columns], axis=2)


class Passing(eqx.Module):
    """Message passing in one direction, in the order of the groups.

    A node's embedding is h2 of its features and of the mean message over its edges; the message of an edge is h1 of the
    embedding at its other end and of its features.
    """

    one: Dense
    edge: Dense
    two: Dense
    out: Dense

    def __init__(self, hidden: int, output: int, *, key):
        keys = jax.random.split(key, 4)
        self.one = Dense(output, hidden, key=keys[0])
        self.edge = Dense(EDGE_FEATURES, hidden, key=keys[1])
        self.two = Dense(NODE_FEATURES + hidden, hidden, key=keys[2], scale=1.4)
        self.out = Dense(hidden, output, key=keys[3])

    def __call__(self, nodes, placed, allowed, near, near_real, size, transfer):
        """float32 ``(G, D, output)``; the groups of all arguments are in the order of this direction."""
        rows, devices = nodes.shape[:2]
        here = jax.nn.one_hot(placed, devices)
        there = here[near]  # (G, K, D): the neighbours' pivots
        # from the neighbour's pivot to every node of the group, and from its other nodes to the group's pivot
        onward = jnp.sum(transfer * there[..., None], axis=2)
        others = jnp.sum(transfer * here[:, None, None], axis=3)
        onward, others = (
            self.edge(jnp.stack([jnp.broadcast_to(size[..., None], x.shape), jnp.log1p(x), 1.0 * (x > 0)], axis=3))
            for x in (onward, others)
        )
        besides = near_real[..., None] * allowed[near] * (1 - there)
        edges = jnp.sum(near_real, axis=1)[:, None] + here * jnp.sum(besides, axis=(1, 2))[:, None]
        share = 1.0 / jnp.maximum(edges, 1.0)
        known = self.two.bias + nodes @ self.two.weight[:NODE_FEATURES]

        def visit(embedding, now):
            number, near, near_real, there, onward, others, besides, here, share, known = now
            sent = self.one(embedding[near])  # (K, D, hidden)
            pivot = jnp.sum(sent * there[..., None], axis=1, keepdims=True)
            heard = jnp.sum(jax.nn.relu(pivot + onward) * near_real[:, None, None], axis=0)
            more = jnp.sum(jax.nn.relu(sent + others) * besides[..., None], axis=(0, 1))
            heard = (heard + here[:, None] * more) * share[:, None]
            own = self.out(jax.nn.relu(known + heard @ self.two.weight[NODE_FEATURES:]))
            return embedding.at[number].set(own), None

        first = jnp.zeros((rows, devices, self.out.bias.shape[0]))
        groups = (jnp.arange(rows), near, near_real, there, onward, others, besides, here, share, known)
        return jax.lax.scan(visit, first, groups)[0]


class GiphPolicy(eqx.Module):
    """Scores of all moves, float32 ``(G, D)``: group to device."""

    passing: list[Passing]  # forward and backward
    score: Dense
    out: Dense

    def __init__(self, hidden: int, output: int, *, key):
        one, two, three = jax.random.split(key, 3)
        self.passing = [Passing(hidden, output // 2, key=each) for each in jax.random.split(one)]
        self.score = Dense(2 * (output // 2), hidden, key=two, scale=1.4)
        self.out = Dense(hidden, 1, key=three, scale=0.05)  # nearly uniform at first

    def __call__(self, net: Net, placed):
        nodes = node_features(net, placed)
        ways = zip(self.passing, *((x, x[::-1]) for x in (nodes, placed, net.allowed)), strict=True)
        both = [
            passing(*given, net.near[side], net.near_real[side], net.size[side], net.transfer[side])
            for side, (passing, *given) in enumerate(ways)
        ]
        embedding = jnp.concatenate([both[0], both[1][::-1]], axis=2)
        return self.out(jax.nn.relu(self.score(embedding)))[..., 0]


def legal_moves(net: Net, placed, last):
    """bool ``(G, D)``: False for a group's present device, and for the group that moved last unless only it can
    move."""
    rows, devices = net.allowed.shape
    moves = net.allowed & net.real[:, None] & ~jax.nn.one_hot(placed, devices, dtype=bool)
    fresh = moves & (jnp.arange(rows) != last)[:, None]
    return jnp.where(jnp.any(fresh), fresh, moves)


class MovePolicy:
    """``init``, ``step`` and ``greedy`` of a :class:`~simdev.baselines.rl._train.Learner`; REINFORCE over moves."""

    def __init__(self, new, *, rows, episodes, length, every, from_best, discount, rate):
        self.rows, self.episodes, self.length, self.every = rows, episodes, length, every
        self.from_best, self.discount = from_best, discount
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))

        def logits(policy, net, placed, last):
            return jnp.where(legal_moves(net, placed, last), policy(net, placed), -1e9).reshape(-1)

        def objective(policy, net, placed, last, actions, advantage):
            """The loss over the steps of all episodes: ``placed`` int ``(B, G)``; the other arguments ``(B,)``."""
            logp = jax.nn.log_softmax(jax.vmap(logits, (None, None, 0, 0))(policy, net, placed, last))
            undecided = -jnp.sum(jnp.where(logp > -1e8, jnp.exp(logp) * logp, 0.0), axis=1)
            taken = jnp.take_along_axis(logp, actions[:, None], axis=1)[:, 0]
            return -jnp.mean(taken * advantage), jnp.mean(undecided)

        @jax.jit
        def act(policy, net, placed, last, key, step):
            """Moves int ``(B,)``: group times devices plus device. If ``step`` is -1, the most probable moves."""
            scores = jax.vmap(logits, (None, None, 0, 0))(policy, net, placed, last)
            noise = jax.random.gumbel(jax.random.fold_in(key, step), scores.shape)
            return jnp.argmax(scores + jnp.where(step < 0, 0.0, noise), axis=1)

        @jax.jit
        def update(policy, optimizer_state, net, placed, last, actions, advantage):
            (_, undecided), gradient = jax.value_and_grad(objective, has_aux=True)(
                policy, net, placed, last, actions, advantage
            )
            change, optimizer_state = optimizer.update(gradient, optimizer_state, policy)
            return optax.apply_updates(policy, change), optimizer_state, undecided

        self._act, self._update, self._first = act, update, initializer(new, optimizer)
        self._split = jax.jit(jax.random.split)
        self._expected = jax.jit(lambda net, placed: expected_schedule(net, placed)[2])

    def init(self, seed: int, n_problems: int) -> State:
        policy, optimizer_state, key = self._first(seed)
        return {
            "policy": policy,
            "optimizer": optimizer_state,
            "key": key,
            "moves": np.zeros(n_problems, np.int32),
            "start": np.zeros((n_problems, self.rows), np.int32),
            "best": np.full(n_problems, -1.0, np.float32),
            "now": np.zeros((n_problems, self.episodes, self.rows), np.int32),
            "cost": np.zeros((n_problems, self.episodes), np.float32),
            "last": np.full((n_problems, self.episodes), -1, np.int32),
        }

    def step(self, state: State, index: int, evaluate: Episodes) -> tuple[State, dict]:
        grouped, net = evaluate.grouped, evaluate.grouped.inputs
        kept = {name: state[name].copy() for name in ("moves", "start", "best", "now", "cost", "last")}
        rows, moves = len(net.real), kept["moves"]
        if kept["best"][index] < 0:
            kept["start"][index, :rows] = first_placement(grouped)
            kept["best"][index] = _costs(evaluate(kept["start"][index, :rows][None]))[0]
        if not (net.allowed.sum(axis=1) > 1).any():  # nothing can move
            return {**state, **kept}, {"entropy": 0.0}
        key, noise = self._split(state["key"])
        if moves[index] == 0:
            kept["now"][index], kept["cost"][index] = kept["start"][index], kept["best"][index]
            kept["last"][index] = -1
            if not self.from_best:
                random = np.random.default_rng(np.asarray(noise)).random((self.episodes, *net.allowed.shape))
                kept["now"][index, :, :rows] = np.argmax(random * net.allowed, axis=2)
                kept["cost"][index] = _costs(evaluate(kept["now"][index, :, :rows]))
        placed, last, actions, costs = self._run(state["policy"], evaluate, noise, kept, index)
        policy, optimizer_state, entropy = self._update(
            state["policy"],
            state["optimizer"],
            net,
            placed.reshape(-1, rows),
            last.reshape(-1),
            actions.reshape(-1),
            self._advantage(costs).reshape(-1),
        )
        moves[index] += self.every
        if moves[index] >= self.length * grouped.n_groups:
            moves[index] = 0
        return {**state, **kept, "policy": policy, "optimizer": optimizer_state, "key": key}, {
            "entropy": float(entropy)
        }

    def _run(self, policy, evaluate, noise, kept, index):
        """Run ``every`` moves of each episode, and store the states that they reach, and the best one, in ``kept``.

        Returns the states before the moves, int32 ``(T, B, G)`` and ``(T, B)``, the moves int32 ``(T, B)``, and the
        costs float32 ``(T + 1, B)``.
        """
        net, every = evaluate.grouped.inputs, self.every
        rows, devices = net.allowed.shape
        now, before = kept["now"][index, :, :rows], kept["last"][index]
        many = np.arange(self.episodes)
        placed, last = np.zeros((every, self.episodes, rows), np.int32), np.zeros((every, self.episodes), np.int32)
        actions, costs = np.zeros((every, self.episodes), np.int32), np.zeros((every + 1, self.episodes), np.float32)
        costs[0] = kept["cost"][index]
        for step in range(every):
            placed[step], last[step] = now, before
            actions[step] = self._act(policy, net, now, before, noise, step)
            before[:] = actions[step] // devices
            now[many, before] = actions[step] % devices
            costs[step + 1] = _costs(evaluate(now))
            best = int(np.argmin(costs[step + 1]))
            if costs[step + 1, best] < kept["best"][index]:
                kept["best"][index], kept["start"][index, :rows] = costs[step + 1, best], now[best]
        kept["cost"][index] = costs[-1]
        return placed, last, actions, costs

    def _advantage(self, costs: np.ndarray) -> np.ndarray:
        """float32 ``(T, B)``: discounted sums of the improvements less their mean, divided by their deviation."""
        gain = costs[:-1] - costs[1:]
        gain = gain - gain.mean()
        total, returns = np.zeros(gain.shape[1], np.float32), np.zeros_like(gain)
        for step in reversed(range(len(gain))):
            total = gain[step] + self.discount * total
            returns[step] = total
        return np.clip(returns / (returns.std() + 1e-6), -3.0, 3.0)

    def greedy(self, state: State, grouped: GroupedProblem[Net]) -> np.ndarray:
        """Follow the most probable moves and return the placement on the way that is expected to end first."""
        net = grouped.inputs
        now, last = first_placement(grouped)[None].copy(), np.full(1, -1, np.int32)
        if not (net.allowed.sum(axis=1) > 1).any():
            return now[0]
        rank = np.arange(len(net.real))
        best = now[0]
        least: tuple[float, float] | None = None
        for _ in range(self.length * grouped.n_groups + 1):
            filled = np.zeros(net.need.shape[1])
            np.add.at(filled, now[0], net.need[rank, now[0]])
            value = float(np.maximum(filled - 1.0, 0.0).sum()), float(self._expected(net, now[0]))
            if least is None or value < least:
                best, least = now[0].copy(), value
            move = np.asarray(self._act(state["policy"], net, now, last, state["key"], -1))
            last = (move // net.allowed.shape[1]).astype(np.int32)
            now[0, last] = move % net.allowed.shape[1]
        return best


def first_placement(grouped: GroupedProblem) -> np.ndarray:
    """int32 ``(G,)``: every group on the first device that may take it."""
    return np.argmax(grouped.inputs.allowed, axis=1).astype(np.int32)


def _costs(rewards: np.ndarray) -> np.ndarray:
    """Step times over the scale, from the rewards of a grouped."""
    return np.minimum(rewards**2, LONGEST)


@cache  # compiled functions are kept with it
def learner_functions(*, hidden, output, rows, **how) -> MovePolicy:
    """The learner functions of ``giph``, for problems of at most ``rows`` groups."""

    def new(key):
        return GiphPolicy(hidden, output, key=key)

    return MovePolicy(new, rows=rows, **how)
