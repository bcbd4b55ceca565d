"""The network of ``gdp`` and its updates."""

from __future__ import annotations

from functools import cache, partial

import numpy as np

from simdev.baselines.rl._grouped import DEVICE_FEATURES, GroupedProblem
from simdev.baselines.rl._jax import eqx, initializer, jax, jnp, optax
from simdev.baselines.rl._layers import Dense, normalised
from simdev.baselines.rl._sight import NODE_FEATURES, SUMMARY_FEATURES, Sight
from simdev.baselines.rl._train import Evaluator, State

SEGMENT = 128  # groups; the placer attends to its own segment and to the segment before
HEADS = 4
FIRST_WEIGHT, WEIGHT_GAIN = 0.05, 0.05  # of the entropy bonus; the weight follows the entropy that is wanted


class Sage(eqx.Module):
    """A layer of GraphSAGE (GDP, equations 2 and 3).

    The element-wise maximum over the neighbours of sigmoid(W h + b) is joined to the node's own embedding.
    """

    pool: Dense
    join: Dense

    def __init__(self, hidden: int, *, key):
        one, two = jax.random.split(key)
        self.pool = Dense(hidden + 2, hidden, key=one)
        self.join = Dense(2 * hidden, hidden, key=two)

    def __call__(self, h, sight: Sight):
        number = jnp.concatenate([sight.parents, sight.children], axis=1)
        real = jnp.concatenate([sight.parent_real, sight.child_real], axis=1)
        cost = jnp.concatenate([sight.parent_cost, sight.child_cost], axis=1)
        side = jnp.concatenate([jnp.zeros_like(sight.parent_cost), jnp.ones_like(sight.child_cost)], axis=1)
        near = jnp.concatenate([h[number], cost[..., None], side[..., None]], axis=2)
        near = jnp.max(jax.nn.sigmoid(self.pool(near)) * real[..., None], axis=1)
        return normalised(h + jax.nn.relu(self.join(jnp.concatenate([h, near], axis=1))))


class Block(eqx.Module):
    """A layer of the placer: attention, then a feed-forward layer.

    A segment attends to itself and, without gradient, to the segment before (Transformer-XL). The inputs of both layers
    are multiplied by a gate that is computed from the graph (superposition).
    """

    gate: Dense
    query: Dense
    key_value: Dense
    out: Dense
    up: Dense
    down: Dense

    def __init__(self, hidden: int, *, key):
        keys = jax.random.split(key, 6)
        self.gate = Dense(hidden + SUMMARY_FEATURES, hidden, key=keys[0], scale=0.1)
        self.query = Dense(hidden, hidden, key=keys[1])
        self.key_value = Dense(hidden, 2 * hidden, key=keys[2])
        self.out = Dense(hidden, hidden, key=keys[3], scale=0.3)
        self.up = Dense(hidden, 2 * hidden, key=keys[4])
        self.down = Dense(2 * hidden, hidden, key=keys[5], scale=0.3)

    def __call__(self, h, real, graph):
        count, hidden = h.shape
        segment = min(SEGMENT, count)
        gate = 2.0 * jax.nn.sigmoid(self.gate(graph))
        x = (normalised(h) * gate).reshape(-1, segment, hidden)
        query, memory, known = self.query(x), self.key_value(x), real.reshape(-1, segment)
        if len(x) > 1:
            before = jax.lax.stop_gradient(jnp.concatenate([jnp.zeros_like(memory[:1]), memory[:-1]]))
            memory = jnp.concatenate([before, memory], axis=1)
            known = jnp.concatenate([jnp.concatenate([jnp.zeros_like(known[:1]), known[:-1]]), known], axis=1)
        size = hidden // HEADS
        heads = []
        for head in range(HEADS):  # head by head: faster and smaller on a processor than all at once
            columns = slice(head * size, (head + 1) * size)
            keys, values = memory[..., :hidden][..., columns], memory[..., hidden:][..., columns]
            score = jnp.einsum("sqk,smk->sqm", query[..., columns], keys) / np.sqrt(size)
            weight = jax.nn.softmax(jnp.where(known[:, None], score, -1e9), axis=-1)
            heads.append(jnp.einsum("sqm,smk->sqk", weight, values))
        h = h + self.out(jnp.concatenate(heads, axis=-1).reshape(count, hidden))
        return h + self.down(jax.nn.relu(self.up(normalised(h) * gate)))


class Policy(eqx.Module):
    """Logits of every device for every group at once, float32 ``(G, D)``."""

    enter: Dense
    sages: list[Sage]
    blocks: list[Block]
    name: Dense
    query: Dense
    device: Dense
    share: Dense

    def __init__(self, hidden: int, devices: int, sages: int, blocks: int, *, key):
        keys = jax.random.split(key, 5 + sages + blocks)
        self.enter = Dense(NODE_FEATURES + SUMMARY_FEATURES, hidden, key=keys[0])
        self.name = Dense(hidden, devices, key=keys[1], scale=0.1)
        self.query = Dense(hidden, 16, key=keys[2], scale=0.3)
        self.device = Dense(DEVICE_FEATURES, 16, key=keys[3], scale=0.3)
        share = Dense(hidden, 1, key=keys[4], scale=0.1)
        self.share = eqx.tree_at(lambda layer: layer.bias, share, share.bias + 0.25)
        self.sages = [Sage(hidden, key=one) for one in keys[5 : 5 + sages]]
        self.blocks = [Block(hidden, key=one) for one in keys[5 + sages :]]

    def __call__(self, sight: Sight):
        summary = jnp.broadcast_to(sight.summary, (len(sight.real), SUMMARY_FEATURES))
        h = jax.nn.relu(self.enter(jnp.concatenate([sight.nodes, summary], axis=1)))
        for layer in self.sages:
            h = layer(h, sight)
        pooled = jnp.sum(h * sight.real[:, None], axis=0) / jnp.sum(sight.real)
        for layer in self.blocks:
            h = layer(h, sight.real, jnp.concatenate([pooled, sight.summary]))
        h = normalised(h)
        logits = self.name(h) + self.query(h) @ self.device(sight.devices).T + 4.0 * self.share(h) * sight.shares
        return jnp.where(sight.allowed, logits, -1e9)


class ProximalPolicy:
    """``init``, ``step`` and ``greedy`` of a :class:`~simdev.baselines.rl._train.Learner`.

    Learns by PPO (Schulman et al. 2017) with a clipped ratio for each group.
    """

    def __init__(self, new, *, samples, epochs, rate, clip, entropy, entropy_end, entropy_updates):
        self.entropy, self.entropy_end, self.entropy_updates = entropy, entropy_end, entropy_updates
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))

        def objective(policy, sight, actions, before, advantage, weight):
            logp = jax.nn.log_softmax(policy(sight))
            taken = jnp.take_along_axis(logp[None], actions[..., None], axis=2)[..., 0]
            ratio, advantage = jnp.exp(taken - before), advantage[:, None]
            gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage)
            choices = jnp.maximum(2, jnp.sum(sight.allowed, axis=1))
            entropy = -jnp.sum(jnp.where(sight.allowed, jnp.exp(logp) * logp, 0.0), axis=1) / jnp.log(choices)
            mean = partial(jnp.average, weights=sight.real.astype(jnp.float32))
            return -mean(gain.mean(axis=0)) - weight * mean(entropy), mean(entropy)

        @jax.jit
        def draw(policy, sight, key):
            """The most probable placement, followed by samples."""
            key, noise_key = jax.random.split(key)
            logits = policy(sight)
            noise = jax.random.gumbel(noise_key, (samples, *logits.shape)).at[0].set(0.0)
            return key, jnp.argmax(logits[None] + noise, axis=2)

        @jax.jit
        def update(policy, optimizer_state, sight, actions, advantage, weight):
            logp = jax.nn.log_softmax(policy(sight))
            before = jnp.take_along_axis(logp[None], actions[..., None], axis=2)[..., 0]

            def epoch(carry, _):
                policy, optimizer_state = carry
                (_, left), gradient = jax.value_and_grad(objective, has_aux=True)(
                    policy, sight, actions, before, advantage, weight
                )
                change, optimizer_state = optimizer.update(gradient, optimizer_state, policy)
                return (optax.apply_updates(policy, change), optimizer_state), left

            (policy, optimizer_state), left = jax.lax.scan(epoch, (policy, optimizer_state), None, length=epochs)
            return policy, optimizer_state, left[0]

        self._draw, self._update, self._start = draw, update, initializer(new, optimizer)

    def init(self, seed: int, n_problems: int) -> State:
        policy, optimizer_state, key = self._start(seed)
        weight = np.full((), FIRST_WEIGHT, np.float32)
        updates = np.zeros(n_problems, np.int32)
        return {"policy": policy, "optimizer": optimizer_state, "key": key, "weight": weight, "updates": updates}

    def step(self, state: State, index: int, evaluate: Evaluator) -> tuple[State, dict]:
        sight = evaluate.grouped.inputs
        key, actions = self._draw(state["policy"], sight, state["key"])
        rewards = evaluate(np.asarray(actions))[1:]  # the most probable placement is evaluated but not learned from
        spread = rewards.std() + 1e-6
        advantage = np.clip((rewards - rewards.mean()) / spread, -3.0, 3.0).astype(np.float32)
        updates = state["updates"].copy()
        policy, optimizer_state, entropy = self._update(
            state["policy"], state["optimizer"], sight, actions[1:], advantage, state["weight"]
        )
        passed = min(1.0, updates[index] / self.entropy_updates)
        wanted = self.entropy + (self.entropy_end - self.entropy) * passed
        weight = np.clip(state["weight"] + WEIGHT_GAIN * (wanted - float(entropy)), 0.0, 1.0).astype(np.float32)
        updates[index] += 1
        new = {"policy": policy, "optimizer": optimizer_state, "key": key, "weight": weight, "updates": updates}
        return new, {"entropy": float(entropy)}

    def greedy(self, state: State, grouped: GroupedProblem) -> np.ndarray:
        return np.asarray(self._draw(state["policy"], grouped.inputs, state["key"])[1][0])


@cache  # compiled functions are kept with it
def learner_functions(
    *, hidden, devices, sages, blocks, samples, epochs, rate, clip, entropy, entropy_end, entropy_updates
) -> ProximalPolicy:
    """The learner functions of ``gdp``, for problems of ``devices`` columns."""

    def new(key):
        return Policy(hidden, devices, sages, blocks, key=key)

    return ProximalPolicy(
        new,
        samples=samples,
        epochs=epochs,
        rate=rate,
        clip=clip,
        entropy=entropy,
        entropy_end=entropy_end,
        entropy_updates=entropy_updates,
    )
