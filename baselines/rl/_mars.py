"""The network of ``mars``, its self-supervised pre-training and its update."""

from __future__ import annotations

from functools import cache

import numpy as np

from simdev.baselines.rl._grouped import FEATURES
from simdev.baselines.rl._jax import eqx, jax, jnp, optax
from simdev.baselines.rl._layers import Dense
from simdev.baselines.rl._reinforce import Reinforce
from simdev.baselines.rl._seq2seq import Seq2Seq
from simdev.baselines.rl._train import Episodes, State

CONVOLUTIONS = 3
CLIP, EPOCHS = 0.2, 4  # of proximal policy optimisation
PRETRAINING_RATE = 0.001


class SegmentSeq2Seq(Seq2Seq):
    """A :class:`Seq2Seq` over segments of ``length`` groups.

    The encoder reads a segment in both directions and the decoder attends to the groups of the segment only. The
    states of the forward encoder and of the decoder, and the device that was chosen last, go on to the next segment.
    """

    length: int = eqx.field(static=True)

    def __init__(self, features: int, hidden: int, devices: int, reach: float, length: int, *, key):
        super().__init__(features, hidden, devices, reach, both_ways=True, key=key)
        self.length = length

    def decode(self, groups, real, allowed, chosen, *, draw: bool):
        """As :meth:`Seq2Seq.decode`; the number of groups is a multiple of ``length`` or less than it."""
        length = min(self.length, len(real))
        parts = tuple(array.reshape(-1, length, *array.shape[1:]) for array in (groups, real, allowed, chosen))
        hidden, states = self.forward.hidden_size, self.decoder.hidden_size

        def zeros(size):
            return jnp.zeros(size), jnp.zeros(size)

        def over(cell, state, rows, reverse):
            def step(carry, row):
                carry = cell(row, carry)
                return carry, carry[0]

            return jax.lax.scan(step, state, rows, reverse=reverse)

        def segment(carry, part):
            encoder, decoder, before = carry
            rows, real, allowed, chosen = part
            encoder, onward = over(self.forward, encoder, rows, False)
            _, back = over(self.backward, zeros(hidden), rows, True)
            seen = jnp.concatenate([onward, back], axis=1)
            keys = jax.vmap(self.keys)(seen)

            def step(carry, row):
                (h, c), before = carry
                mask, given = row
                h, c = self.decoder(self.device[before], (h, c))
                energy = jnp.tanh(keys + self.query(h)) @ self.score
                context = jax.nn.softmax(jnp.where(real, energy, -1e9)) @ seen
                logits = self.reach * jnp.tanh(self.head(jnp.concatenate([h, context])))
                logp = jax.nn.log_softmax(jnp.where(mask, logits, -1e9))
                action = jnp.argmax(logp + given).astype(jnp.int32) if draw else given
                return ((h, c), action), (logp, action)

            (decoder, before), found = jax.lax.scan(step, (decoder, before), (allowed, chosen))
            return (encoder, decoder, before), found

        go = jnp.int32(self.device.shape[0] - 1)
        _, (logp, action) = jax.lax.scan(segment, (zeros(hidden), zeros(states), go), parts)
        return logp.reshape(-1, logp.shape[-1]), action.reshape(-1)


class MarsPolicy(eqx.Module):
    """A graph convolutional encoder, the discriminator of its pre-training, and the placer."""

    convolve: list[Dense]
    judge: jax.Array  # (hidden, hidden)
    place: SegmentSeq2Seq

    def __init__(self, devices: int, hidden: int, reach: float, length: int, *, key):
        keys = jax.random.split(key, CONVOLUTIONS + 2)
        sizes = [FEATURES, *[hidden] * (CONVOLUTIONS - 1)]
        self.convolve = [Dense(size, hidden, key=key) for size, key in zip(sizes, keys, strict=False)]
        self.judge = jax.random.normal(keys[-2], (hidden, hidden)) / hidden
        self.place = SegmentSeq2Seq(FEATURES + hidden, hidden, devices, reach, length, key=keys[-1])

    def encode(self, nodes, mixing):
        """float32 ``(G, hidden)`` for features ``(G, FEATURES)``, with the matrix ``(G, G)`` of a convolution."""
        for number, layer in enumerate(self.convolve):
            nodes = mixing @ layer(nodes)
            nodes = jnp.where(nodes > 0, nodes, 0.25 * nodes) if number < CONVOLUTIONS - 1 else nodes
        return nodes

    def embed(self, inputs):
        return jnp.concatenate([inputs.nodes, self.encode(inputs.nodes, mixing(inputs))], axis=1)


def mixing(inputs):
    """float32 ``(G, G)``: 1 / the root of the product of both ends' degrees, edges in both directions and from each
    group to itself; 0 in the padding."""
    joined = jnp.zeros((len(inputs.real), len(inputs.real)))
    joined = joined.at[inputs.source, inputs.target].max(inputs.edge_real.astype(jnp.float32))
    joined = jnp.maximum(jnp.maximum(joined, joined.T), jnp.diag(inputs.real.astype(jnp.float32)))
    root = jnp.sqrt(jnp.maximum(1.0, joined.sum(axis=1)))
    return joined / root[:, None] / root


def contrast(policy: MarsPolicy, inputs, key):
    """The loss of Deep Graph Infomax: can the discriminator tell the groups from groups with shuffled features, given
    the mean embedding of the graph?"""
    weight = inputs.real.astype(jnp.float32) / jnp.sum(inputs.real)
    order = jnp.argsort(jnp.where(inputs.real, jax.random.uniform(key, inputs.real.shape), 2.0))
    near = mixing(inputs)
    true, false = policy.encode(inputs.nodes, near), policy.encode(inputs.nodes[order], near)
    summary = policy.judge @ jax.nn.sigmoid(weight @ true)
    return -jnp.sum(weight * (jax.nn.log_sigmoid(true @ summary) + jax.nn.log_sigmoid(-(false @ summary))))


class Mars(Reinforce):
    """``init``, ``step`` and ``greedy`` of a :class:`~simdev.baselines.rl._train.Learner`: pre-training on the first
    visit of a problem, and proximal policy optimisation with the baseline and the advantages of
    :class:`Reinforce`."""

    def __init__(self, new, sample, likelihood, optimizer, *, samples, entropy, pretrain):
        super().__init__(new, sample, likelihood, optimizer, samples=samples, entropy=entropy)
        teacher = optax.adam(PRETRAINING_RATE)
        self._pretrained = bool(pretrain)

        def proximal(policy, inputs, drawn, advantage, before):
            logp, undecided = likelihood(policy, inputs, drawn)
            change = jnp.exp(jnp.clip(logp - before, -10.0, 10.0))
            gain = jnp.minimum(change * advantage, jnp.clip(change, 1 - CLIP, 1 + CLIP) * advantage)
            return -jnp.mean(gain) - entropy * undecided * jnp.sum(inputs.real), undecided

        @jax.jit
        def update(policy, optimizer_state, inputs, drawn, advantage, updates):
            before, _ = likelihood(policy, inputs, drawn)

            def epoch(carry, _):
                policy, state = carry
                (_, undecided), gradient = jax.value_and_grad(proximal, has_aux=True)(
                    policy, inputs, drawn, advantage, before
                )
                change, state = optimizer.update(gradient, state, policy)
                return (optax.apply_updates(policy, change), state), undecided

            (policy, optimizer_state), undecided = jax.lax.scan(epoch, (policy, optimizer_state), None, length=EPOCHS)
            return policy, optimizer_state, undecided[0]

        @jax.jit
        def taught(policy, inputs, key):
            key, *keys = jax.random.split(key, pretrain + 1)

            def step(carry, key):
                policy, state = carry
                loss, gradient = jax.value_and_grad(contrast)(policy, inputs, key)
                change, state = teacher.update(gradient, state, policy)
                return (optax.apply_updates(policy, change), state), loss

            (policy, _), loss = jax.lax.scan(step, (policy, teacher.init(policy)), jnp.stack(keys))
            return policy, key, loss

        self._update, self._taught = update, taught

    def step(self, state: State, index: int, evaluate: Episodes) -> tuple[State, dict]:
        if self._pretrained and not state["updates"][index]:
            state = self.pretrain(state, evaluate.grouped.inputs)[0]
        return super().step(state, index, evaluate)

    def pretrain(self, state: State, inputs) -> tuple[State, np.ndarray]:
        """The state after pre-training on one graph, and the losses on the way."""
        policy, key, loss = self._taught(state["policy"], inputs, state["key"])
        return {**state, "policy": policy, "key": key}, np.asarray(loss)


@cache  # compiled functions are kept with it
def learner_functions(*, devices, hidden, samples, rate, entropy, reach, segment, pretrain) -> Mars:
    """The learner functions of ``mars``, for problems of ``devices`` columns."""

    def new(key):
        return MarsPolicy(devices, hidden, reach, segment, key=key)

    def decode(policy, inputs, chosen, draw):
        groups = policy.embed(inputs)
        return jax.vmap(lambda row: policy.place.decode(groups, inputs.real, inputs.allowed, row, draw=draw))(chosen)

    def sample(policy, inputs, key, count, greedy):
        noise = jax.random.gumbel(key, (count, *inputs.allowed.shape)) * jnp.where(greedy, 0.0, 1.0)
        return {"actions": decode(policy, inputs, noise, True)[1]}

    def likelihood(policy, inputs, drawn):
        actions = drawn["actions"]
        logp, _ = decode(policy, inputs, actions, False)
        taken = jnp.take_along_axis(logp, actions[..., None], axis=2)[..., 0]
        entropy = -jnp.sum(jnp.where(inputs.allowed, jnp.exp(logp) * logp, 0.0), axis=2)
        return jnp.sum(taken * inputs.real, axis=1), jnp.sum(entropy.mean(axis=0) * inputs.real) / jnp.sum(inputs.real)

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    return Mars(new, sample, likelihood, optimizer, samples=samples, entropy=entropy, pretrain=pretrain)
