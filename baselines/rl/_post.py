"""The distribution of ``post`` and its two updates."""

from __future__ import annotations

from functools import cache

import numpy as np

from simdev.baselines.rl._grouped import GroupedProblem, bucket
from simdev.baselines.rl._jax import jax, jnp, optax
from simdev.baselines.rl._train import Episodes, State

LEAST_SPREAD = 1e-3  # of rewards, in one batch


def elite(step_ns: np.ndarray, overflow_bytes: np.ndarray, share: float) -> np.ndarray:
    """bool ``(k,)``: the best ``share`` of the samples by (overflow, step time).

    At least one sample is selected, and so is every sample equal to the last selected one.
    """
    order = np.lexsort((step_ns, overflow_bytes))
    last = order[max(1, int(share * len(order))) - 1]
    lacks_less = overflow_bytes < overflow_bytes[last]
    return lacks_less | ((overflow_bytes == overflow_bytes[last]) & (step_ns <= step_ns[last]))


def cross_entropy(actions: np.ndarray, allowed: np.ndarray, mix: float) -> np.ndarray:
    """Logits float32 ``(G, D)`` of the distribution nearest in cross-entropy to ``actions`` int ``(k, G)``.

    That is how often each device is chosen, mixed with ``mix`` of the uniform distribution over the devices that
    ``allowed`` bool ``(G, D)`` marks.
    """
    named = (actions[..., None] == np.arange(allowed.shape[1])).mean(axis=0)
    even = allowed / allowed.sum(axis=1, keepdims=True)
    return np.log(np.maximum((1 - mix) * named + mix * even, 1e-30)).astype(np.float32)


class Post:
    """``init``, ``step`` and ``greedy`` of a :class:`~simdev.baselines.rl._train.Learner`.

    ``step`` draws ``samples`` placements and updates once: by proximal policy optimisation from these or, once ``pool``
    placements are collected, by cross-entropy minimisation from the elite of all of them.
    """

    def __init__(self, *, rows, columns, samples, pool, share, mix, epochs, rate, penalty):
        self.rows, self.columns, self.pool, self.share, self.mix = rows, columns, pool, share, mix
        optimizer = optax.sgd(rate)

        def log_probabilities(logits, allowed):
            return jax.nn.log_softmax(jnp.where(allowed, logits, -1e9))

        def objective(logits, seen, actions, before, advantage):
            allowed, real = seen
            after = log_probabilities(logits, allowed)
            change = jnp.take_along_axis((after - before)[None], actions[..., None], axis=2)[..., 0]
            gain = jnp.mean(jnp.exp(change) * advantage[:, None], axis=0)
            distance = jnp.sum(jnp.where(allowed, jnp.exp(before) * (before - after), 0.0), axis=1)
            return -jnp.sum((gain - penalty * distance) * real)

        @jax.jit
        def draw(logits, seen, key):
            allowed, real = seen
            key, noise_key = jax.random.split(key)
            logp = log_probabilities(logits, allowed)
            undecided = -jnp.sum(jnp.where(allowed, jnp.exp(logp) * logp, 0.0), axis=1)
            actions = jnp.argmax(logp + jax.random.gumbel(noise_key, (samples, *logp.shape)), axis=2)
            return key, actions, jnp.sum(undecided * real) / jnp.sum(real)

        @jax.jit
        def proximal(logits, seen, actions, advantage):
            before = log_probabilities(logits, seen[0])

            def epoch(carry, _):
                logits, state = carry
                gradient = jax.grad(objective)(logits, seen, actions, before, advantage)
                change, state = optimizer.update(gradient, state)
                return (optax.apply_updates(logits, change), state), None

            return jax.lax.scan(epoch, (logits, optimizer.init(logits)), None, length=epochs)[0][0]

        self._draw, self._proximal = draw, proximal

    def init(self, seed: int, n_problems: int) -> State:
        return {
            "policy": np.zeros((self.rows, self.columns), np.float32),
            "key": jax.random.PRNGKey(seed),
            "drawn": np.zeros((0, self.rows), np.int16),
            "step_ns": np.zeros(0, np.int64),
            "overflow": np.zeros(0, np.int64),
        }

    def step(self, state: State, index: int, evaluate: Episodes) -> tuple[State, dict]:
        inputs, logits = evaluate.grouped.inputs, state["policy"]
        seen = inputs.allowed, inputs.real  # without the edges, so that graphs with any number of edges share a program
        key, actions, entropy = self._draw(logits, seen, state["key"])
        actions = np.asarray(actions)
        step_ns, overflow = evaluate.simulate(actions)
        drawn = np.concatenate([state["drawn"], actions.astype(np.int16)])
        step_ns, overflow = (np.concatenate([state["step_ns"], step_ns]), np.concatenate([state["overflow"], overflow]))
        if len(drawn) >= self.pool:
            logits = cross_entropy(drawn[elite(step_ns, overflow, self.share)], inputs.allowed, self.mix)
            drawn, step_ns, overflow = drawn[:0], step_ns[:0], overflow[:0]
        else:
            rewards = evaluate.rewards
            advantage = (rewards - rewards.mean()) / max(float(rewards.std()), LEAST_SPREAD)
            logits = self._proximal(logits, seen, actions, advantage.astype(np.float32))
        new = {"policy": logits, "key": key, "drawn": drawn, "step_ns": step_ns, "overflow": overflow}
        return new, {"entropy": float(entropy)}

    def greedy(self, state: State, grouped: GroupedProblem) -> np.ndarray:
        return np.where(grouped.inputs.allowed, state["policy"], -np.inf).argmax(axis=1)


@cache  # compiled functions are kept with it
def learner_functions(*, groups, devices, samples, pool, share, mix, epochs, rate, penalty) -> Post:
    """The learner functions of ``post``, for problems of ``bucket(groups)`` rows and ``devices`` columns."""
    return Post(
        rows=bucket(groups),
        columns=devices,
        samples=samples,
        pool=pool,
        share=share,
        mix=mix,
        epochs=epochs,
        rate=rate,
        penalty=penalty,
    )
