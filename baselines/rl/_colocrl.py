"""The network of ``colocrl`` and its likelihood."""

from __future__ import annotations

from functools import cache

from simdev.baselines.rl._grouped import FEATURES, KIND_COLUMNS, KINDS, bucket
from simdev.baselines.rl._jax import eqx, jax, jnp, optax
from simdev.baselines.rl._reinforce import Reinforce
from simdev.baselines.rl._seq2seq import Seq2Seq

KIND_SIZE = 16


class ColocrlPolicy(eqx.Module):
    """Embeds groups (kinds, numbers and shapes, neighbours) and chooses a device for each."""

    kind: jax.Array  # (KINDS, KIND_SIZE)
    place: Seq2Seq

    def __init__(self, groups: int, devices: int, hidden: int, reach: float, attention: bool, *, key):
        one, two = jax.random.split(key)
        self.kind = jax.random.normal(one, (KINDS, KIND_SIZE))
        features = FEATURES - KINDS + KIND_SIZE + 2 * groups
        self.place = Seq2Seq(features, hidden, devices, reach, both_ways=False, attention=attention, key=two)

    def embed(self, inputs):
        """float32 ``(G, features)``: the mean embedding of the kinds, the numbers and shapes, and the adjacency
        rows."""
        kinds = inputs.nodes[:, KIND_COLUMNS] @ self.kind
        others = jnp.concatenate([inputs.nodes[:, : KIND_COLUMNS.start], inputs.nodes[:, KIND_COLUMNS.stop :]], axis=1)
        joined = jnp.zeros((len(inputs.real), len(inputs.real)))
        joined = joined.at[inputs.source, inputs.target].add(inputs.edge_real.astype(jnp.float32))
        return jnp.concatenate([kinds, others, joined, joined.T], axis=1)


@cache  # compiled functions are kept with it
def learner_functions(*, groups, devices, hidden, samples, rate, entropy, reach, attention) -> Reinforce:
    """The learner functions of ``colocrl``, for problems of ``bucket(groups)`` rows and ``devices`` columns."""

    def new(key):
        return ColocrlPolicy(bucket(groups), devices, hidden, reach, attention, key=key)

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
    return Reinforce(new, sample, likelihood, optimizer, samples=samples, entropy=entropy)
