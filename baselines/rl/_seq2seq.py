"""The sequence-to-sequence placer of Mirhoseini et al. (2017 and 2018): it maps a list of groups to their devices."""

from __future__ import annotations

from simdev.baselines.rl._jax import eqx, jax, jnp


class Seq2Seq(eqx.Module):
    """An LSTM encoder over the groups (in both directions if ``backward`` is set), and an attentional LSTM decoder.

    The decoder attends to all states of the encoder and chooses a device for each group in order; its input is the
    embedding of the device that it chose last.
    """

    forward: eqx.nn.LSTMCell
    backward: eqx.nn.LSTMCell | None
    decoder: eqx.nn.LSTMCell
    device: jax.Array  # (D + 1, size): embeddings, the last one "go"
    keys: eqx.nn.Linear
    query: eqx.nn.Linear
    score: jax.Array  # (attention,)
    head: eqx.nn.Linear

    reach: float = eqx.field(static=True)  # bound of the logits, so that every device keeps some probability
    attention: bool = eqx.field(static=True)  # without it, the decoder knows the last state of the encoder only

    def __init__(
        self, features: int, hidden: int, devices: int, reach: float, *, both_ways: bool, attention: bool = True, key
    ):
        keys = jax.random.split(key, 8)
        self.reach, self.attention = reach, attention
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
        """States float32 ``(G, h)`` for features ``(G, features)``, and the decoder's first state."""
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

    def decode(self, groups, real, allowed, chosen, *, draw: bool):
        """Log-probabilities float32 ``(G, D)`` and actions int32 ``(G,)`` for group features ``(G, features)``.

        With ``draw``, ``chosen`` is Gumbel noise float32 ``(G, D)`` (zeros: the most probable actions are taken);
        without it, ``chosen`` holds the actions. Use ``jax.vmap`` for a batch.
        """
        states, start = self.encode(groups)
        keys = jax.vmap(self.keys)(states)

        def step(carry, row):
            (h, c), before = carry
            mask, given = row
            h, c = self.decoder(self.device[before], (h, c))
            if self.attention:
                energy = jnp.tanh(keys + self.query(h)) @ self.score
                context = jax.nn.softmax(jnp.where(real, energy, -1e9)) @ states
            else:
                context = jnp.zeros(states.shape[1])
            logits = self.reach * jnp.tanh(self.head(jnp.concatenate([h, context])))
            logp = jax.nn.log_softmax(jnp.where(mask, logits, -1e9))
            action = jnp.argmax(logp + given).astype(jnp.int32) if draw else given
            return ((h, c), action), (logp, action)

        go = jnp.int32(self.device.shape[0] - 1)
        _, (logp, action) = jax.lax.scan(step, (start, go), (allowed, chosen))
        return logp, action


def _cell(inputs: int, hidden: int, key) -> eqx.nn.LSTMCell:
    """An LSTM cell with forget bias 1."""
    cell = eqx.nn.LSTMCell(inputs, hidden, key=key)
    return eqx.tree_at(lambda c: c.bias, cell, jnp.zeros(4 * hidden).at[hidden : 2 * hidden].set(1.0))
