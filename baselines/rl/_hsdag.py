"""The inputs of ``hsdag``, the network that parses a graph into groups and places them, and the update."""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import numpy as np

from simdev.baselines.rl._grouped import FEATURES, NUMBERS, GroupedProblem, bucket, group_problem
from simdev.baselines.rl._groups import chain_groups
from simdev.baselines.rl._jax import eqx, initializer, jax, jnp, optax
from simdev.baselines.rl._layers import Dense, normalised
from simdev.baselines.rl._train import Episodes, State
from simdev.problem.problem import Problem

CONVOLUTIONS = 2
DROPPED = 0.2  # share of hidden values, while learning
WAVES = 4  # sines and cosines of the position in the running order
HEAVY = 1 / 16  # of a device's memory: a node that holds more stays alone
EDGES_A_NODE = 8  # the least number of edges that arrays are padded for, so that few programs are compiled
NODE_FEATURES = FEATURES - NUMBERS + 6 + 2 * WAVES
TIME, HELD = 1, 4  # columns of ``_grouped.node_features``
LEAST_SPREAD, MOST = 1e-3, 3.0  # of rewards, in one episode; of advantages


class Structure(NamedTuple):
    """What the network reads, as a pytree of arrays; ``G`` nodes, ``D`` devices and ``E`` edges, all padded.

    ``nodes`` float32 ``(G, NODE_FEATURES)``: shares of op kinds in hash buckets, mean output shapes, logs of the
    numbers of predecessors and of successors, fractal dimension, square root of the share of time, share of persistent
    bytes, position in the running order and ``WAVES`` sines and cosines of it. ``real`` bool ``(G,)`` and
    ``allowed`` bool ``(G, D)`` are those of ``_grouped.GroupedArrays``. ``ends`` int32 ``(E, 2)``: pairs of nodes that
    a tensor joins, each pair once; ``edge_real`` bool ``(E,)``; ``joins`` bool ``(E,)``: edges that parsing may keep,
    whose ends each hold at most ``HEAVY`` of the smallest device's memory. ``adjacency`` float32 ``(G, G)``: the matrix
    of a graph convolution, 1 / the root of the product of both ends' degrees, where a node is a neighbour of itself.
    """

    nodes: np.ndarray
    real: np.ndarray
    allowed: np.ndarray
    ends: np.ndarray
    edge_real: np.ndarray
    joins: np.ndarray
    adjacency: np.ndarray


def structured(problem: Problem, nodes: int, columns: int) -> GroupedProblem[Structure]:
    """``problem`` with chains of ops as nodes, at most ``nodes``, and a :class:`Structure` as inputs."""
    grouped = group_problem(problem, chain_groups(problem, nodes), rows=nodes, columns=columns)
    inputs, count, rows = grouped.inputs, grouped.n_groups, len(grouped.inputs.real)
    source, target = inputs.source[inputs.edge_real], inputs.target[inputs.edge_real]
    ends = np.unique(np.sort(np.stack([source, target], axis=1), axis=1), axis=0).astype(np.int32).reshape(-1, 2)
    numbers = np.zeros((rows, 6 + 2 * WAVES), np.float32)
    place = np.arange(count) / count  # nodes are numbered in running order
    angle = np.pi * place[:, None] * 2.0 ** np.arange(WAVES)
    numbers[:count] = np.concatenate(
        [
            np.log1p(np.stack([np.bincount(target, minlength=count), np.bincount(source, minlength=count)], axis=1)),
            fractal_dimension(count, ends)[:, None],
            inputs.nodes[:count, [TIME, HELD]],
            place[:, None],
            np.sin(angle),
            np.cos(angle),
        ],
        axis=1,
    )
    held = np.bincount(grouped.group, problem.unit_persistent_bytes.astype(float), count)
    light = held <= HEAVY * problem.topology.memory_bytes[grouped.devices].min()
    length = bucket(len(ends), EDGES_A_NODE * rows)
    joins = np.zeros(length, bool)
    joins[: len(ends)] = light[ends].all(axis=1)
    padded = np.full((length, 2), rows - 1, np.int32)
    padded[: len(ends)] = ends
    structure = Structure(
        np.concatenate([inputs.nodes[:, NUMBERS:], numbers], axis=1),
        inputs.real,
        inputs.allowed,
        padded,
        np.arange(length) < len(ends),
        joins,
        _adjacency(rows, ends),
    )
    return grouped.with_inputs(structure)


def _adjacency(rows: int, ends: np.ndarray) -> np.ndarray:
    joined = np.eye(rows, dtype=np.float32)
    joined[ends[:, 0], ends[:, 1]] = joined[ends[:, 1], ends[:, 0]] = 1.0
    root = np.sqrt(joined.sum(axis=1))
    return joined / root[:, None] / root


def fractal_dimension(count: int, ends: np.ndarray) -> np.ndarray:
    """float64 ``(count,)``: how fast the neighbourhood of each node grows with the distance, in both edge directions.

    It is the least-squares slope of log(number of other nodes within r steps) over log r, for all distances r; 0 for a
    node with fewer than two distances.
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import shortest_path

    joined = coo_array((np.ones(len(ends)), (ends[:, 0], ends[:, 1])), shape=(count, count)).tocsr()
    slope = np.zeros(count)
    for node, distance in enumerate(shortest_path(joined, method="D", directed=False, unweighted=True)):
        distance = distance[np.isfinite(distance) & (distance > 0)].astype(np.int64)
        radius, at = np.unique(distance, return_counts=True)
        if len(radius) > 1:
            slope[node] = np.polyfit(np.log(radius), np.log(np.cumsum(at)), 1)[0]
    return slope


def parsed(score, ends, joins, count: int):
    """int32 ``(count,)``: the group of each node, named by one of its members.

    Each node keeps one of its edges that ``joins`` bool ``(E,)`` marks: the one of the largest ``score`` float
    ``(E,)``, the first of equals. Nodes that kept edges join form a group.
    """
    edges, number = len(score), jnp.arange(count)
    order = jnp.argsort(jnp.where(joins, -score, jnp.inf), stable=True)
    rank = jnp.zeros(edges, jnp.int32).at[order].set(jnp.arange(edges, dtype=jnp.int32))
    rank = jnp.where(joins, rank, edges)
    best = jnp.full(count, edges, jnp.int32).at[ends[:, 0]].min(rank).at[ends[:, 1]].min(rank)
    kept = ends[order[jnp.minimum(best, edges - 1)]]
    partner = jnp.where(best < edges, kept.sum(axis=1) - number, number)
    # From a node to its partner and on, edges only get better, until two nodes chose each other.
    far = jax.lax.fori_loop(0, max(1, (count - 1).bit_length()), lambda _, far: far[far], partner)
    return jnp.minimum(far, partner[far])


class HsdagPolicy(eqx.Module):
    """Maps the features of nodes to groups, and groups to new features and to logits of their devices."""

    enter: list[Dense]
    convolve: list[Dense]
    score: list[Dense]
    before: Dense
    after: Dense
    leave: list[Dense]
    name: list[Dense]

    def __init__(self, hidden: int, devices: int, *, key):
        keys = iter(jax.random.split(key, 10 + CONVOLUTIONS))
        self.enter = [Dense(NODE_FEATURES, hidden, key=next(keys)), Dense(hidden, hidden, key=next(keys))]
        self.convolve = [Dense(hidden, hidden, key=next(keys)) for _ in range(CONVOLUTIONS)]
        self.score = [Dense(hidden, hidden, key=next(keys)), Dense(hidden, 1, key=next(keys))]
        self.before, self.after = (Dense(hidden, hidden, key=next(keys)) for _ in range(2))
        self.leave = [Dense(hidden, hidden, key=next(keys)), Dense(hidden, NODE_FEATURES, key=next(keys), scale=0.3)]
        self.name = [Dense(NODE_FEATURES, hidden, key=next(keys)), Dense(hidden, devices, key=next(keys), scale=0.1)]

    def __call__(self, nodes, seen: Structure, key, label=None):
        """``(label, pooled, logits)`` for the nodes' features float32 ``(G, NODE_FEATURES)``.

        ``label`` int ``(G,)`` is the group of each node (parsed, unless given). ``pooled`` and ``logits`` float32
        ``(G, D)`` are the new features and the logits of the groups, in the rows that name them. Without a ``key``
        there is no dropout.
        """
        count, (one, two) = len(seen.real), seen.ends.T
        keep, *keep_convolved, keep_score, keep_leave, keep_name = _dropout(
            key, [count] * (1 + CONVOLUTIONS) + [len(one)] + [count] * 2, len(self.before.bias)
        )
        first = self.enter[1](keep * jax.nn.relu(normalised(self.enter[0](nodes))))
        h = first
        for layer, keep in zip(self.convolve, keep_convolved, strict=True):
            h = keep * jax.nn.relu(seen.adjacency @ layer(h))
        h = normalised(first + h)
        score = keep_score * jax.nn.relu(normalised(self.score[0](h[one] * h[two])))
        score = jax.nn.sigmoid(self.score[1](score)[:, 0])
        if label is None:
            label = parsed(score, seen.ends, seen.joins, count)
        member = (label == jnp.arange(count)[:, None]) * seen.real.astype(jnp.float32)  # (groups, nodes)
        inside = (seen.edge_real & (label[one] == label[two])).astype(jnp.float32)
        total, edges = (member[:, one] @ jnp.stack([inside * score, inside], axis=1)).T
        trust = jnp.where(edges > 0, total / jnp.maximum(1.0, edges), 1.0)
        pooled = member @ normalised(h + self.before(h))
        pooled = normalised(pooled + self.after(pooled)) * trust[:, None]
        pooled = self.leave[1](keep_leave * jax.nn.relu(self.leave[0](pooled)))
        logits = self.name[1](keep_name * jax.nn.relu(self.name[0](pooled)))
        refused = member @ (~seen.allowed).astype(jnp.float32)
        least = refused.min(axis=1, keepdims=True)
        return label, pooled, jnp.where(refused == least, logits, -1e9)


def _dropout(key, rows: list[int], hidden: int) -> list:
    """Dropout masks for hidden layers of ``rows`` rows each: 0 for ``DROPPED`` of the values; all 1 without a key."""
    if key is None:
        return [1.0] * len(rows)
    kept = jax.random.bernoulli(key, 1.0 - DROPPED, (sum(rows), hidden)) / (1.0 - DROPPED)  # one draw compiles faster
    return jnp.split(kept, np.cumsum(rows)[:-1])


class Parser:
    """``init``, ``step`` and ``greedy`` of a :class:`~simdev.baselines.rl._train.Learner`.

    An episode is ``steps`` placements, one for each parsing of the graph. After each step, the features of each group
    are added to those of its members. One update by the policy gradient follows an episode.
    """

    def __init__(self, new, *, steps, rate, discount):
        self.steps, self.discount = steps, discount
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))

        @jax.jit
        def draw(policy, seen, key):
            """An episode: for each step the features, keys, groups and devices of all nodes."""

            def step(nodes, key):
                drop_key, noise_key = jax.random.split(key)
                label, pooled, logits = policy(nodes, seen, drop_key)
                chosen = jnp.argmax(logits + jax.random.gumbel(noise_key, logits.shape), axis=1)
                after = nodes + pooled[label] * seen.real[:, None]
                return after, (nodes, drop_key, label, chosen[label])

            key, episode_key = jax.random.split(key)
            return key, jax.lax.scan(step, seen.nodes, jax.random.split(episode_key, steps))[1]

        def likelihood(policy, seen, nodes, key, label, actions):
            logits = policy(nodes, seen, key, label)[2]
            logp = jax.nn.log_softmax(logits)
            groups = (label == jnp.arange(len(label))) & seen.real
            taken = jnp.take_along_axis(logp, actions[:, None], axis=1)[:, 0]
            undecided = -jnp.sum(jnp.exp(logp) * jnp.maximum(logp, -100.0), axis=1)
            return jnp.sum(taken * groups), jnp.sum(undecided * groups) / jnp.sum(groups)

        def loss(policy, seen, episode, advantage):
            logp, undecided = jax.vmap(partial(likelihood, policy, seen))(*episode)
            return -jnp.mean(advantage * logp), jnp.mean(undecided)

        @jax.jit
        def update(policy, optimizer_state, seen, episode, advantage):
            (_, undecided), gradient = jax.value_and_grad(loss, has_aux=True)(policy, seen, episode, advantage)
            change, optimizer_state = optimizer.update(gradient, optimizer_state, policy)
            return optax.apply_updates(policy, change), optimizer_state, undecided

        @jax.jit
        def likeliest(policy, seen):
            label, _, logits = policy(seen.nodes, seen, None)
            return jnp.argmax(logits, axis=1)[label]

        self._draw, self._update, self._likeliest, self._start = draw, update, likeliest, initializer(new, optimizer)

    def init(self, seed: int, n_problems: int) -> State:
        policy, optimizer_state, key = self._start(seed)
        return {"policy": policy, "optimizer": optimizer_state, "key": key}

    def step(self, state: State, index: int, evaluate: Episodes) -> tuple[State, dict]:
        seen = evaluate.grouped.inputs
        key, episode = self._draw(state["policy"], seen, state["key"])
        rewards = speeds(evaluate(np.asarray(episode[3])))
        advantage = np.clip((rewards - rewards.mean()) / max(float(rewards.std()), LEAST_SPREAD), -MOST, MOST)
        advantage = (advantage * self.discount ** np.arange(self.steps)).astype(np.float32)
        policy, optimizer_state, entropy = self._update(state["policy"], state["optimizer"], seen, episode, advantage)
        return {"policy": policy, "optimizer": optimizer_state, "key": key}, {"entropy": float(entropy)}

    def greedy(self, state: State, grouped: GroupedProblem) -> np.ndarray:
        return np.asarray(self._likeliest(state["policy"], grouped.inputs))


def speeds(rewards: np.ndarray) -> np.ndarray:
    """The scale over the step time, computed from ``GroupedProblem.rewards``."""
    return 1.0 / np.square(rewards)


@cache  # compiled functions are kept with it
def learner_functions(*, hidden, devices, **how) -> Parser:
    """The learner functions of ``hsdag``, for problems of ``devices`` columns."""

    def new(key):
        return HsdagPolicy(hidden, devices, key=key)

    return Parser(new, **how)
