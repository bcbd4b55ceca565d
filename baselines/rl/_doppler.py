"""The networks of ``doppler``, the schedules that an episode builds, the teacher and the updates."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np

from simdev.baselines.rl._grouped import GroupedArrays, GroupedProblem, bucket
from simdev.baselines.rl._jax import eqx, initializer, jax, jnp, optax
from simdev.baselines.rl._layers import Dense, normalised
from simdev.baselines.rl._pairs import group_loads, group_pairs, neighbours
from simdev.baselines.rl._train import Episodes, State

LONGEST = 20.0  # times the scale: the largest cost; placements that exceed memory cost 10 or more
NODE_FEATURES, DEVICE_FEATURES = 6, 6


class Dag(NamedTuple):
    """What the networks and the schedules read, as a pytree of arrays; times in mean group times.

    ``G`` groups, ``D`` devices, ``E`` edges and ``K`` parents. ``real`` bool ``(G,)`` and ``allowed`` bool ``(G, D)``
    are those of ``_grouped.GroupedArrays``. ``nodes`` float32 ``(G, NODE_FEATURES)``: logs of the mean time, of the
    time to receive all inputs and of the time to send all outputs; t-level and b-level (with the group's own time) over
    the longest path; share of a device's memory. ``source`` and ``target`` int32 ``(E,)``: edges (padding: from and to
    the last row); ``edge`` float32 ``(E,)``: log of the mean transfer time; ``edge_real`` bool ``(E,)``. ``below`` and
    ``above`` float32 ``(G, G)``: 1 / (groups on the path) for the groups on the longest path from each group to an end
    (its b-level), and from a start to the group (its t-level). ``time``, ``need`` float32 ``(G, D)``: see
    ``_pairs.group_loads``; ``b_level`` float32 ``(G,)``; ``parents`` int32 ``(G, K)``, ``parent_real`` bool ``(G, K)``,
    ``arrive`` float32 ``(G, K, D, D)``: transfer time from each device of the parent to each device of the group.
    """

    real: np.ndarray
    allowed: np.ndarray
    nodes: np.ndarray
    source: np.ndarray
    target: np.ndarray
    edge: np.ndarray
    edge_real: np.ndarray
    below: np.ndarray
    above: np.ndarray
    time: np.ndarray
    need: np.ndarray
    b_level: np.ndarray
    parents: np.ndarray
    parent_real: np.ndarray
    arrive: np.ndarray


def with_dag(grouped: GroupedProblem[GroupedArrays]) -> GroupedProblem[Dag]:
    """``grouped`` with a :class:`Dag` in place of its inputs."""
    inputs, count, used = grouped.inputs, grouped.n_groups, len(grouped.devices)
    rows, columns = inputs.allowed.shape
    time, need = group_loads(grouped)
    low, high, _, transfer = group_pairs(grouped)
    sending = transfer[:, :used, :used].sum(axis=(1, 2)) / max(1, used * (used - 1))
    mean = np.zeros(rows)
    mean[:count] = (time * inputs.allowed).sum(axis=1)[:count] / inputs.allowed.sum(axis=1)[:count]
    above, t_level = _longest_paths(rows, low, high, sending, mean)
    flipped, b_level = _longest_paths(rows, rows - 1 - high, rows - 1 - low, sending, mean[::-1])
    below, b_level = flipped[::-1, ::-1], (b_level + mean[::-1])[::-1]
    longest = max(1e-6, float(b_level.max()))
    received, sent = (np.bincount(end, sending, rows) for end in (high, low))
    features = [np.log1p(mean), np.log1p(received), np.log1p(sent)]
    features += [t_level / longest, b_level / longest, need.max(axis=1)]
    nodes = np.where(inputs.real[:, None], np.stack(features, axis=1), 0.0).astype(np.float32)
    parents, pair = neighbours(high, low, rows)
    width = bucket(parents.shape[1], 2)
    padded, real = np.zeros((rows, width), np.int32), np.zeros((rows, width), bool)
    arrive = np.zeros((rows, width, columns, columns), np.float32)
    there = pair >= 0
    padded[:, : pair.shape[1]], real[:, : pair.shape[1]] = parents, there
    arrive[:, : pair.shape[1]][there] = transfer[pair[there]]
    length = bucket(len(low), 2 * rows)
    source, target = (np.append(end, np.full(length - len(end), rows - 1)).astype(np.int32) for end in (low, high))
    edge = np.zeros(length, np.float32)
    edge[: len(low)] = np.log1p(sending)
    dag = Dag(
        inputs.real,
        inputs.allowed,
        nodes,
        source,
        target,
        edge,
        np.arange(length) < len(low),
        _shares(below),
        _shares(above),
        time,
        need,
        b_level.astype(np.float32),
        padded,
        real,
        arrive,
    )
    return grouped.with_inputs(dag)


def _longest_paths(rows: int, low, high, sending, time) -> tuple[np.ndarray, np.ndarray]:
    """The longest path that leads to each group.

    Returns bool ``(rows, rows)``, the groups on the path, the group itself included, and float ``(rows,)``, the length
    of the path without the group's own time (the t-level). Of equal paths, the one through the first parent counts.
    """
    path, level = np.eye(rows, dtype=bool), np.zeros(rows)
    for pair in np.lexsort((low, high)).tolist():  # a group comes after all its parents
        parent, child = low[pair], high[pair]
        length = level[parent] + time[parent] + sending[pair]
        if length > level[child]:
            level[child] = length
            path[child] = path[parent]
            path[child, child] = True
    return path, level


def _shares(table: np.ndarray) -> np.ndarray:
    return (table / table.sum(axis=1, keepdims=True)).astype(np.float32)


class Schedules:
    """The partial schedules of ``B`` episodes, which grow by one group at a step.

    They assume that each device runs groups in the order in which they were placed, and that transfers do not contend.
    Arrays: ``device`` int32 and ``start``, ``finish`` float32 ``(B, G)``; ``free``, ``work`` and ``filled`` float32
    ``(B, D)``; ``missing`` int32 ``(B, G)``.
    """

    def __init__(self, dag: Dag, count: int):
        rows, devices = dag.allowed.shape
        self.dag, self.all = dag, np.arange(count)
        self.device = np.full((count, rows), -1, np.int32)
        self.start, self.finish = np.zeros((2, count, rows), np.float32)
        self.free, self.work, self.filled = np.zeros((3, count, devices), np.float32)
        self.missing = np.repeat(dag.parent_real.sum(axis=1, dtype=np.int32)[None], count, axis=0)
        self.children = np.zeros((rows, rows), np.int32)  # [parent, child]
        child, at = np.nonzero(dag.parent_real)
        self.children[dag.parents[child, at], child] = 1

    def ready(self) -> np.ndarray:
        """bool ``(B, G)``: groups that are not placed and whose parents all are."""
        return (self.missing == 0) & (self.device < 0) & self.dag.real

    def outlook(self, group: np.ndarray) -> np.ndarray:
        """float32 ``(B, D)``: the time at which ``group`` int ``(B,)`` would start on each device."""
        parents, real = self.dag.parents[group], self.dag.parent_real[group]
        where = np.maximum(0, np.take_along_axis(self.device, parents, axis=1))
        arrive = self.dag.arrive[group[:, None], np.arange(parents.shape[1]), where]
        ends = np.take_along_axis(self.finish, parents, axis=1)
        arrive = np.where(real[..., None], arrive + ends[..., None], 0.0)
        return np.maximum(self.free, arrive.max(axis=1))

    def features(self, group: np.ndarray) -> np.ndarray:
        """float32 ``(B, D, DEVICE_FEATURES)``: the features of each device for ``group`` int ``(B,)``.

        Columns: work assigned to the device over an even share; log of the work of the group's inputs on the device;
        log of the time from the start of the first input there, and from the end of the last input there, to the end of
        the last input anywhere (0 without inputs there); log of the group's start there less its earliest start on any
        device; share of the memory that would be filled.
        """
        parents, real = self.dag.parents[group], self.dag.parent_real[group]
        devices = self.dag.allowed.shape[1]
        where = np.take_along_axis(self.device, parents, axis=1)
        here = real[..., None] & (where[..., None] == np.arange(devices))  # (B, K, D)
        starts, ends = (np.take_along_axis(times, parents, axis=1)[..., None] for times in (self.start, self.finish))
        last = np.where(real[..., None], ends, 0.0).max(axis=(1, 2))[:, None]
        some = here.any(axis=1)
        first = np.where(some, last - np.where(here, starts, np.inf).min(axis=1, initial=1e9), 0.0)
        latest = np.where(some, last - np.where(here, ends, -np.inf).max(axis=1, initial=-1e9), 0.0)
        start = np.where(self.dag.allowed[group], self.outlook(group), np.inf)
        late = np.where(np.isfinite(start), start, 0.0) - start.min(axis=1, keepdims=True)
        even = self.dag.real.sum() / max(1, self.dag.allowed[self.dag.real].any(axis=0).sum())
        columns = [
            self.work / even,
            np.log1p(np.where(here, ends - starts, 0.0).sum(axis=1)),
            np.log1p(first),
            np.log1p(latest),
            np.log1p(np.maximum(late, 0.0)),
            np.minimum(self.filled + self.dag.need[group], 4.0),
        ]
        return np.stack(columns, axis=2).astype(np.float32)

    def place(self, group: np.ndarray, device: np.ndarray) -> None:
        """Put ``group`` int ``(B,)`` on ``device`` int ``(B,)``."""
        start = self.outlook(group)[self.all, device]
        time = self.dag.time[group, device]
        self.device[self.all, group] = device
        self.start[self.all, group], self.finish[self.all, group] = start, start + time
        self.free[self.all, device] = start + time
        self.work[self.all, device] += time
        self.filled[self.all, device] += self.dag.need[group, device]
        self.missing -= self.children[group]

    def teacher(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """The next choice of critical-path list scheduling, int ``(B,)`` each: a group and its device.

        The group is the ready one with the highest b-level; the device is the one with enough memory where the group
        ends first, or the emptiest if none has enough. Ties are broken at random.
        """
        group = np.argmax(np.where(self.ready(), self.dag.b_level, -1.0), axis=1)
        allowed = self.dag.allowed[group]
        filled = self.filled + self.dag.need[group]
        fitting = allowed & (filled <= 1.0)
        end = np.where(fitting, self.outlook(group) + self.dag.time[group], np.inf)
        end = np.where(fitting.any(axis=1)[:, None], end, np.where(allowed, filled, np.inf))
        ties = end <= end.min(axis=1, keepdims=True) * (1 + 1e-6)
        return group, np.argmax(ties * rng.uniform(0.5, 1.0, ties.shape), axis=1)


class Choices(NamedTuple):
    """The choices of ``B`` episodes of ``T`` steps, and what the policy saw at each step.

    ``group``, ``device`` int32 ``(B, T)``, ``ready`` bool ``(B, T, G)``, ``devices`` float32
    ``(B, T, D, DEVICE_FEATURES)``, ``real`` bool ``(T,)``: False for padding.
    """

    group: np.ndarray
    device: np.ndarray
    ready: np.ndarray
    devices: np.ndarray
    real: np.ndarray


class MessageRound(eqx.Module):
    """A round of message passing.

    Both ends and the edge make a message; a group averages the messages of its parents and those of its children.
    """

    near: Dense
    far: Dense
    edge: Dense
    join: Dense

    def __init__(self, hidden: int, *, key):
        keys = jax.random.split(key, 4)
        self.near = Dense(hidden, 2 * hidden, key=keys[0])
        self.far = Dense(hidden, 2 * hidden, key=keys[1])
        self.edge = Dense(1, 2 * hidden, key=keys[2])
        self.join = Dense(3 * hidden, hidden, key=keys[3])

    def __call__(self, h, dag: Dag):
        hidden = h.shape[1]
        near, far, edge = self.near(h), self.far(h), self.edge(dag.edge[:, None])
        ways = ((dag.target, dag.source, slice(hidden)), (dag.source, dag.target, slice(hidden, None)))
        heard = []
        for to, of, half in ways:
            message = jax.nn.relu((near[to] + far[of] + edge)[:, half]) * dag.edge_real[:, None]
            total = jnp.zeros_like(h).at[to].add(message)
            heard.append(total / jnp.maximum(1.0, jnp.zeros(len(h)).at[to].add(dag.edge_real))[:, None])
        return normalised(h + jax.nn.relu(self.join(jnp.concatenate([h, *heard], axis=1))))


class Encoder(eqx.Module):
    """Embeddings of the groups, float32 ``(G, hidden)`` each: by message passing, and from their features alone."""

    enter: Dense
    layers: MessageRound  # all rounds: the first axis of each array
    alone: Dense

    def __init__(self, hidden: int, rounds: int, *, key):
        keys = jax.random.split(key, 3)
        self.enter = Dense(NODE_FEATURES, hidden, key=keys[0])
        self.layers = eqx.filter_vmap(lambda one: MessageRound(hidden, key=one))(jax.random.split(keys[2], rounds))
        self.alone = Dense(NODE_FEATURES, hidden, key=keys[1], scale=1.4)

    def __call__(self, dag: Dag):
        h = jax.nn.relu(self.enter(dag.nodes))
        h, _ = jax.lax.scan(lambda h, layer: (layer(h, dag), None), h, self.layers)
        return h, jax.nn.relu(self.alone(dag.nodes))


class DopplerPolicy(eqx.Module):
    """SEL chooses the next group and PLC its device; message passing runs once for a whole episode."""

    select: Encoder
    select_join: Dense
    select_out: Dense
    place: Encoder
    place_join: Dense
    place_there: Dense
    place_device: Dense
    place_out: Dense

    def __init__(self, hidden: int, rounds: int, *, key):
        keys = jax.random.split(key, 8)
        self.select = Encoder(hidden, rounds, key=keys[0])
        self.select_join = Dense(4 * hidden, hidden, key=keys[1], scale=1.4)
        self.select_out = Dense(hidden, 1, key=keys[2], scale=0.05)  # nearly uniform at first
        self.place = Encoder(hidden, rounds, key=keys[3])
        self.place_join = Dense(2 * hidden, hidden, key=keys[4])
        self.place_there = Dense(hidden, hidden, key=keys[5])
        self.place_device = Dense(DEVICE_FEATURES, hidden, key=keys[6], scale=1.4)
        self.place_out = Dense(hidden, 1, key=keys[7], scale=0.05)

    def __call__(self, dag: Dag):
        """SEL's logits ``(G,)``, and PLC's parts ``(G, hidden)`` for the group itself and for the groups on a device.

        The parts for the groups on a device are averaged over these groups; :meth:`devices` joins both parts.
        """
        h, alone = self.select(dag)
        joined = jnp.concatenate([h, dag.below @ h, dag.above @ h, alone], axis=1)
        selected = self.select_out(jax.nn.relu(self.select_join(joined)))[:, 0]
        h, alone = self.place(dag)
        return selected, self.place_join(jnp.concatenate([h, alone], axis=1)), h @ self.place_there.weight

    def devices(self, own, there, features):
        """Logits ``(..., D)`` from ``own`` ``(..., 1, hidden)``, ``there`` ``(..., D, hidden)`` and ``features``."""
        return self.place_out(jax.nn.relu(own + there + self.place_device(features)))[..., 0]


class DualPolicy:
    """``init``, ``step`` and ``greedy`` of a :class:`~simdev.baselines.rl._train.Learner`.

    The policy first imitates the teacher, then learns by REINFORCE.
    """

    def __init__(self, new, *, episodes, imitation, imitation_rate, rate, epsilon, epsilon_updates, history):
        self.episodes, self.imitation, self.history = episodes, imitation, history
        self.epsilon, self.epsilon_updates = epsilon, epsilon_updates
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
        student = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(imitation_rate))

        def likelihood(policy, dag, choices, epsilon):
            """Log-probabilities of the chosen groups and of the chosen devices, and the entropy of the device choice.

            Each is float32 ``(B, T)``.
            """
            selected, own, there = policy(dag)
            count = len(dag.real)
            chosen = jax.nn.one_hot(choices.group, count) * choices.real[:, None]  # (B, T, G)
            on = jax.nn.one_hot(choices.device, dag.allowed.shape[1])
            before = jnp.cumsum(chosen[:, :, None] * on[..., None], axis=1) - chosen[:, :, None] * on[..., None]
            before = before / jnp.maximum(1.0, before.sum(axis=3, keepdims=True))
            devices = policy.devices(own[choices.group][:, :, None], before @ there, choices.devices)
            allowed = dag.allowed[choices.group]
            groups, _ = _log_chances(jnp.broadcast_to(selected, choices.ready.shape), choices.ready, epsilon)
            devices, undecided = _log_chances(devices, allowed, epsilon)
            taken = (
                jnp.take_along_axis(table, index[..., None], axis=2)[..., 0]
                for table, index in ((groups, choices.group), (devices, choices.device))
            )
            return *taken, undecided

        def objective(policy, dag, choices, advantage, epsilon):
            groups, devices, undecided = likelihood(policy, dag, choices, epsilon)
            steps = jnp.sum(choices.real)
            loss = -jnp.mean(jnp.sum((groups + devices) * choices.real, axis=1) * advantage) / steps
            return loss, jnp.sum(jnp.mean(undecided, axis=0) * choices.real) / steps

        self._first = initializer(new, optimizer)
        self._gradient = jax.jit(jax.value_and_grad(objective, has_aux=True))
        self._climb, self._imitate = (jax.jit(partial(_climb, one)) for one in (optimizer, student))
        self._student = jax.jit(student.init)
        self._embed = jax.jit(lambda policy, dag: policy(dag))
        self._split = jax.jit(jax.random.split)

    def init(self, seed: int, n_problems: int) -> State:
        policy, optimizer_state, key = self._first(seed)
        return {
            "policy": policy,
            "optimizer": optimizer_state,
            "key": key,
            "updates": np.zeros(n_problems, np.int32),
            "costs": np.zeros((n_problems, self.history), np.float32),
        }

    def step(self, state: State, index: int, evaluate: Episodes) -> tuple[State, dict]:
        dag = evaluate.grouped.inputs
        key, noise = self._split(state["key"])
        rng = np.random.default_rng(np.asarray(noise))
        updates, known = state["updates"].copy(), state["costs"].copy()
        policy = state["policy"]
        if updates[index] == 0:
            policy, _ = self.imitate(policy, dag, rng)
        epsilon = self.epsilon * max(0.0, 1.0 - updates[index] / self.epsilon_updates)
        choices, actions = self.run(policy, dag, self.episodes, rng, epsilon)
        costs = np.minimum(evaluate(actions) ** 2, LONGEST)
        at = (updates[index] * self.episodes + np.arange(self.episodes)) % self.history
        known[index, at] = costs
        updates[index] += 1
        past = known[index, : min(self.history, updates[index] * self.episodes)]
        advantage = np.clip((past.mean() - costs) / (past.std() + 1e-6), -3.0, 3.0).astype(np.float32)
        (_, entropy), gradient = self._gradient(policy, _seen(dag), choices, advantage, np.float32(epsilon))
        policy, optimizer_state = self._climb(policy, state["optimizer"], gradient)
        new = {"policy": policy, "optimizer": optimizer_state, "key": key, "updates": updates, "costs": known}
        return new, {"entropy": float(entropy)}

    def imitate(self, policy, dag: Dag, rng: np.random.Generator) -> tuple[DopplerPolicy, list[float]]:
        """Run ``imitation`` updates towards the teacher; return the policy and the loss (nats a step) before each."""
        optimizer_state, losses = self._student(policy), []
        every = np.ones(self.episodes, np.float32)
        for _ in range(self.imitation):
            choices, _ = self.run(None, dag, self.episodes, rng, 0.0)
            (loss, _), gradient = self._gradient(policy, _seen(dag), choices, every, np.float32(0.0))
            policy, optimizer_state = self._imitate(policy, optimizer_state, gradient)
            losses.append(float(loss))
        return policy, losses

    def run(self, policy, dag: Dag, count: int, rng, epsilon: float) -> tuple[Choices, np.ndarray]:
        """Run ``count`` episodes of ``policy``, or of the teacher if it is None.

        Also returns the devices of the groups, int32 ``(count, G)``. If ``rng`` is None, the most probable choices are
        made.
        """
        rows, devices = dag.allowed.shape
        group, device = np.zeros((2, count, rows), np.int32)
        choices = Choices(
            group,
            device,
            np.zeros((count, rows, rows), bool),
            np.zeros((count, rows, devices, DEVICE_FEATURES), np.float32),
            dag.real,
        )
        schedules = Schedules(dag, count)
        if policy is not None:
            selected, own, there = map(np.asarray, self._embed(policy, _seen(dag)))
            choose = _Chooser(policy, selected, own, there, schedules, rng, epsilon)
        for step in range(int(dag.real.sum())):
            choices.ready[:, step] = schedules.ready()
            if policy is None:
                group[:, step], device[:, step] = schedules.teacher(rng)
                choices.devices[:, step] = schedules.features(group[:, step])
            else:
                group[:, step] = choose.group(choices.ready[:, step])
                choices.devices[:, step] = schedules.features(group[:, step])
                device[:, step] = choose.device(group[:, step], choices.devices[:, step])
            schedules.place(group[:, step], device[:, step])
        return choices, np.maximum(0, schedules.device)

    def greedy(self, state: State, grouped: GroupedProblem[Dag]) -> np.ndarray:
        return self.run(state["policy"], grouped.inputs, 1, None, 0.0)[1][0]


def _climb(optimizer, policy, optimizer_state, gradient):
    change, optimizer_state = optimizer.update(gradient, optimizer_state, policy)
    return optax.apply_updates(policy, change), optimizer_state


def _seen(dag: Dag) -> Dag:
    """``dag`` without the arrays that only the schedules read, so that programs are compiled for fewer shapes."""
    nothing: Any = None  # an empty pytree
    return dag._replace(
        time=nothing, need=nothing, b_level=nothing, parents=nothing, parent_real=nothing, arrive=nothing
    )


class _Chooser:
    """A policy's choices in NumPy: one step after message passing is too little work for compiled code."""

    def __init__(self, policy, selected, own, there, schedules, rng, epsilon):
        self.selected, self.own, self.there = selected, own, there
        self.into, self.out = (
            (np.asarray(layer.weight), np.asarray(layer.bias)) for layer in (policy.place_device, policy.place_out)
        )
        self.schedules, self.rng, self.epsilon = schedules, rng, epsilon
        count, devices = schedules.free.shape
        self.sum, self.placed = np.zeros((count, devices, own.shape[1]), np.float32), np.zeros((count, devices, 1))

    def group(self, ready):
        return self._draw(np.broadcast_to(self.selected, ready.shape), ready)

    def device(self, group, features):
        there = self.sum / np.maximum(1.0, self.placed)
        hidden = np.maximum(0.0, self.own[group][:, None] + there + features @ self.into[0] + self.into[1])
        chosen = self._draw((hidden @ self.out[0])[..., 0] + self.out[1], self.schedules.dag.allowed[group])
        self.sum[self.schedules.all, chosen] += self.there[group]
        self.placed[self.schedules.all, chosen] += 1
        return chosen

    def _draw(self, logits, legal):
        logits = np.where(legal, logits, -np.inf)
        if self.rng is None:
            return np.argmax(logits, axis=1)
        drawn = np.argmax(logits + self.rng.gumbel(size=logits.shape), axis=1)
        if not self.epsilon:
            return drawn
        any_legal = np.argmax(legal * self.rng.uniform(0.5, 1.0, legal.shape), axis=1)
        return np.where(self.rng.random(len(drawn)) < self.epsilon, any_legal, drawn)


def _log_chances(logits, legal, epsilon):
    """Log-probabilities of the choices among ``legal``, and their entropy.

    With probability ``epsilon`` the choice is uniform, else it follows the logits.
    """
    legal = legal | ~jnp.any(legal, axis=-1, keepdims=True)
    logp = jax.nn.log_softmax(jnp.where(legal, logits, -1e9))
    entropy = -jnp.sum(jnp.where(legal, jnp.exp(logp) * logp, 0.0), axis=-1)
    uniform = epsilon / jnp.sum(legal, axis=-1, keepdims=True)
    return jnp.log(jnp.where(legal, (1 - epsilon) * jnp.exp(logp) + uniform, 1.0) + 1e-12), entropy


@cache  # compiled functions are kept with it
def learner_functions(*, hidden, rounds, **how) -> DualPolicy:
    """The learner functions of ``doppler``."""

    def new(key):
        return DopplerPolicy(hidden, rounds, key=key)

    return DualPolicy(new, **how)
