"""The networks of ``hdp``: a grouper of ops and a placer of groups, and their joint likelihood."""

from __future__ import annotations

from functools import cache

from simdev.baselines.rl._grouped import FEATURES
from simdev.baselines.rl._jax import eqx, jax, jnp, optax
from simdev.baselines.rl._reinforce import Reinforce
from simdev.baselines.rl._seq2seq import Seq2Seq

GROUPER_HIDDEN = 64


class HdpPolicy(eqx.Module):
    """A feed-forward network gives each op a group; a sequence-to-sequence network gives each group a device."""

    hidden: eqx.nn.Linear
    group: eqx.nn.Linear
    sharpness: jax.Array
    place: Seq2Seq

    def __init__(self, groups: int, devices: int, hidden: int, sharpness: float, reach: float, *, key):
        one, two, three = jax.random.split(key, 3)
        self.hidden = eqx.nn.Linear(3 * FEATURES, GROUPER_HIDDEN, key=one)
        self.group = eqx.nn.Linear(GROUPER_HIDDEN, groups, key=two)
        self.sharpness = jnp.asarray(sharpness)
        self.place = Seq2Seq(FEATURES + 2 * groups, hidden, devices, reach, both_ways=True, key=three)

    def grouping(self, inputs):
        """Log-probabilities float32 ``(N, groups)`` of the group of each op."""
        ops = jnp.concatenate([inputs.nodes, *_neighbours(inputs)], axis=1)
        logits = jax.vmap(self.group)(jax.nn.relu(jax.vmap(self.hidden)(ops)))
        return jax.nn.log_softmax(logits - self.sharpness * _distances(inputs, logits.shape[1]))


def _distances(inputs, groups):
    """Squared distance of each op from the middle of each group, float32 ``(N, groups)``.

    The groups divide the running sum of the time evenly; the unit is the length of a group. Rows of ``nodes`` are in
    topological order, and their first column is the share of the time.
    """
    share = inputs.nodes[:, 0]
    middle = jnp.cumsum(share) - share / 2
    return (middle[:, None] * groups - jnp.arange(groups) - 0.5) ** 2


def _neighbours(inputs):
    """Mean features of the producers that each op reads, and of the readers of each op, float32 ``(N, FEATURES)``
    each."""
    weight, count = inputs.edge_real.astype(jnp.float32), len(inputs.real)

    def mean(of, at):
        total = jnp.zeros_like(inputs.nodes).at[at].add(inputs.nodes[of] * weight[:, None])
        return total / jnp.maximum(1.0, jnp.zeros(count).at[at].add(weight))[:, None]

    return mean(inputs.source, inputs.target), mean(inputs.target, inputs.source)


def _embed(inputs, group, groups):
    """The groups that ``group`` int ``(N,)`` makes.

    Returns their features float32 ``(groups, FEATURES + 2 groups)``, which of them have members, and their allowed
    devices.
    """
    member = jax.nn.one_hot(group, groups) * inputs.real[:, None]
    size = member.sum(axis=0)
    features = (member.T @ inputs.nodes) / jnp.maximum(1.0, size)[:, None]
    apart = inputs.edge_real & (group[inputs.source] != group[inputs.target])
    joined = jnp.zeros((groups, groups)).at[group[inputs.source], group[inputs.target]].max(apart.astype(jnp.float32))
    refused = member.T @ (~inputs.allowed).astype(jnp.float32) + 1e9 * (inputs.devices[:, 0] == 0)
    allowed = refused == refused.min(axis=1, keepdims=True)
    return jnp.concatenate([features, joined, joined.T], axis=1), size > 0, allowed


@cache  # compiled functions are kept with it
def learner_functions(*, groups, devices, hidden, samples, rate, entropy, reach, sharpness) -> Reinforce:
    """The learner functions of ``hdp``, for problems of ``devices`` columns."""

    def new(key):
        return HdpPolicy(groups, devices, hidden, sharpness, reach, key=key)

    def sample(policy, inputs, key, count, greedy):
        one, two = jax.random.split(key)
        logp = policy.grouping(inputs)
        level = jax.random.uniform(one, (count, len(inputs.real)))
        bound = jnp.cumsum(jnp.exp(logp), axis=1)
        drawn = jnp.minimum(groups - 1, jnp.sum(bound < level[..., None], axis=2))
        group = jnp.where(greedy, jnp.argmax(logp, axis=1), drawn)
        noise = jax.random.gumbel(two, (count, groups, devices)) * jnp.where(greedy, 0.0, 1.0)

        def place(group, noise):
            features, real, allowed = _embed(inputs, group, groups)
            return policy.place.decode(features, real, allowed, noise, draw=True)[1]

        chosen = jax.vmap(place)(group, noise)
        return {"actions": jnp.take_along_axis(chosen, group, axis=1), "group": group, "chosen": chosen}

    def likelihood(policy, inputs, drawn):
        grouping = policy.grouping(inputs)
        of_ops = jnp.take_along_axis(grouping[None], drawn["group"][..., None], axis=2)[..., 0]

        def place(group, chosen):
            features, real, allowed = _embed(inputs, group, groups)
            logp, _ = policy.place.decode(features, real, allowed, chosen, draw=False)
            taken = jnp.take_along_axis(logp, chosen[:, None], axis=1)[:, 0]
            undecided = -jnp.sum(jnp.where(allowed, jnp.exp(logp) * logp, 0.0), axis=1)
            return jnp.sum(taken * real), jnp.sum(undecided * real) / jnp.sum(real)

        of_groups, undecided = jax.vmap(place)(drawn["group"], drawn["chosen"])
        return jnp.sum(of_ops * inputs.real, axis=1) + of_groups, undecided.mean()

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate))
    return Reinforce(new, sample, likelihood, optimizer, samples=samples, entropy=entropy)
