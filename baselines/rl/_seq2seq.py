"""The sequence-to-sequence placer of Mirhoseini et al. (2017 and 2018): groups in, one device for each out."""

from __future__ import annotations

from simdev.baselines.rl._jax import eqx, jax, jnp


class Seq2Seq(eqx.Module):
    """An LSTM over the groups (both ways if ``backward`` is there), and an LSTM that attends to all of its states and
    names a device for each group in turn, fed with the embedding of the device that it named before."""

    forward: eqx.nn.LSTMCell
    backward: eqx.nn.LSTMCell | None
    decoder: eqx.nn.LSTMCell
    device: jax.Array  # (D + 1, size): embeddings, the last one "go"
    keys: eqx.nn.Linear
    query: eqx.nn.Linear
    score: jax.Array  # (attention,)
    head: eqx.nn.Linear

    def __init__(self, features: int, hidden: int, devices: int, *, both_ways: bool, key):
        keys = jax.random.split(key, 8)
        states = hidden * (2 if both_ways else 1)
        self.forward = _cell(features, hidden, keys[0])
        self.backward = _cell(features, hidden, keys[1]) if both_ways else None
        self.decoder = _cell(hidden, states, keys[2])
        self.device = 0.1 * jax.random.normal(keys[3], (devices + 1, hidden))
        self.keys = eqx.nn.Linear(states, hidden, use_bias=False, key=keys[4])
        self.query = eqx.nn.Linear(states, hidden, use_bias=False, key=keys[5])
        self.score = 0.1 * jax.random.normal(keys[6], (hidden,))
        head = eqx.nn.Linear(2 * states, devices, key=keys[7])
        self.head = eqx.tree_at(lambda layer: layer.weight, head, 0.1 * head.weight)  # starts near uniform

    def encode(self, groups):
        """States float32 ``(G, h)`` of features ``(G, features)``, and the decoder's first state."""
        state = jnp.zeros(self.forward.hidden_size), jnp.zeros(self.forward.hidden_size)

        def over(cell, reverse):
            def step(carry, row):
                carry = cell(row, carry)
                return carry, carry[0]

            return jax.lax.scan(step, state, groups, reverse=reverse)

        last, states = over(self.forward, False)
        if self.backward is not None:
            other, others = over(self.backward, True)
            states = jnp.concatenate([states, others], axis=1)
            last = tuple(jnp.concatenate(pair) for pair in zip(last, other, strict=True))
        return states, last

    def decode(self, groups, real, allowed, *, actions=None, noise=None):
        """Log-probabilities float32 ``(k, G, D)`` and actions int32 ``(k, G)``: the given ones, or drawn with Gumbel
        ``noise`` float32 ``(k, G, D)`` (zeros: the most probable)."""
        states, (h, c) = self.encode(groups)
        keys = jax.vmap(self.keys)(states)
        drawn = actions is None
        count = (noise if drawn else actions).shape[0]
        start = jnp.broadcast_to(h, (count, *h.shape)), jnp.broadcast_to(c, (count, *c.shape))
        go = jnp.full(count, self.device.shape[0] - 1)

        def attend(h):
            energy = jnp.tanh(keys + self.query(h)) @ self.score
            return jax.nn.softmax(jnp.where(real, energy, -1e9)) @ states

        def step(carry, row):
            (h, c), before = carry
            state, mask, chosen = row
            h, c = jax.vmap(self.decoder)(self.device[before], (h, c))
            context = jax.vmap(attend)(h)
            logits = jax.vmap(self.head)(jnp.concatenate([h, context], axis=1))
            logp = jax.nn.log_softmax(jnp.where(mask, logits, -1e9))
            action = jnp.argmax(logp + chosen, axis=1) if drawn else chosen
            return ((h, c), action), (logp, action)

        chosen = jnp.swapaxes(noise if drawn else actions, 0, 1)
        _, (logp, action) = jax.lax.scan(step, (start, go), (states, allowed, chosen))
        return jnp.swapaxes(logp, 0, 1), jnp.swapaxes(action, 0, 1).astype(jnp.int32)


def _cell(inputs: int, hidden: int, key) -> eqx.nn.LSTMCell:
    """An LSTM cell with forget bias 1."""
    cell = eqx.nn.LSTMCell(inputs, hidden, key=key)
    return eqx.tree_at(lambda c: c.bias, cell, jnp.zeros(4 * hidden).at[hidden : 2 * hidden].set(1.0))
