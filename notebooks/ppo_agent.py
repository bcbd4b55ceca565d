"""A PPO agent of one file on simdev's Gymnasium environment, in the manner of single-file RL libraries: it knows
nothing of placement but the observation and action spaces.

    pip install '.[env]'
    python notebooks/ppo_agent.py --workload inception-v3 --topology p100x4

Proximal policy optimisation (Schulman et al. 2017) with generalised advantage estimation, masked actions, JAX and
optax. It prints the episodes' mean final step time every few updates and writes ``ppo_agent.csv`` and ``.png``.
"""

from __future__ import annotations

import argparse
import csv
import time
from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax

import simdev.integrations.gymnasium

OBSERVED = ("placement", "current", "visited")  # one-hot but for visited


def flat(observation: dict, space: gymnasium.spaces.Dict) -> np.ndarray:
    """float32 ``(k, width)``: the changing parts of a batch of observations, discrete ones as one-hot."""
    parts = []
    for name in OBSERVED:
        values = np.asarray(observation[name])
        if isinstance(space[name], gymnasium.spaces.MultiDiscrete):
            values = np.eye(int(space[name].nvec.max()))[values]
        elif isinstance(space[name], gymnasium.spaces.Discrete):
            values = np.eye(int(space[name].n))[values]
        parts.append(values.reshape(len(values), -1))
    return np.concatenate(parts, axis=1).astype(np.float32)


def dense(key, inputs: int, outputs: int, gain: float) -> dict:
    weight = jax.nn.initializers.orthogonal(gain)(key, (inputs, outputs))
    return {"weight": weight, "bias": jnp.zeros(outputs)}


def network(key, width: int, actions: int, hidden: int) -> dict:
    keys = jax.random.split(key, 5)
    body = [(width, hidden, 2**0.5), (hidden, hidden, 2**0.5)]
    return {
        "body": [dense(k, *shape) for k, shape in zip(keys, body, strict=False)],
        "actor": dense(keys[3], hidden, actions, 0.01),
        "critic": dense(keys[4], hidden, 1, 1.0),
    }


def apply(net: dict, x, mask):
    """Logits of allowed actions, and the value."""
    for layer in net["body"]:
        x = jnp.tanh(x @ layer["weight"] + layer["bias"])
    logits = x @ net["actor"]["weight"] + net["actor"]["bias"]
    value = (x @ net["critic"]["weight"] + net["critic"]["bias"])[..., 0]
    return jnp.where(mask > 0, logits, -1e9), value


@jax.jit
def act(net, x, mask, key):
    logits, value = apply(net, x, mask)
    action = jax.random.categorical(key, logits)
    return action, jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0], value


def loss(net, batch, clip, entropy_weight):
    x, mask, action, logp_old, advantage, target = batch
    logits, value = apply(net, x, mask)
    logp_all = jax.nn.log_softmax(logits)
    logp = jnp.take_along_axis(logp_all, action[:, None], 1)[:, 0]
    ratio = jnp.exp(logp - logp_old)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    gain = jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage).mean()
    entropy = -(jnp.exp(logp_all) * logp_all * (mask > 0)).sum(-1).mean()
    return -gain + 0.5 * ((value - target) ** 2).mean() - entropy_weight * entropy


def learner(rate: float, clip: float, entropy_weight: float):
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate))

    @jax.jit
    def update(net, state, batch):
        gradient = jax.grad(loss)(net, batch, clip, entropy_weight)
        change, state = optimizer.update(gradient, state)
        return optax.apply_updates(net, change), state

    return optimizer, update


def advantages(rewards, values, ended, last_value, discount, smoothing):
    """Generalised advantage estimates, float ``(T, k)``."""
    found, running = np.zeros_like(rewards), np.zeros(rewards.shape[1])
    following = last_value
    for t in range(len(rewards) - 1, -1, -1):
        alive = 1.0 - ended[t]
        running = rewards[t] + discount * following * alive - values[t] + discount * smoothing * alive * running
        found[t], following = running, values[t]
    return found


def train(workload, topology, *, nodes, updates, envs, seed, rate=2e-3, clip=0.2, epochs=4, batches=4, hidden=64):
    """Rows ``(update, evaluations, seconds, mean final step ms, best step ms)``, and the environment."""
    env = gymnasium.make_vec("simdev/Placement-v0", num_envs=envs, workload=workload, topology=topology, nodes=nodes)
    space, rng, started = env.unwrapped.single_observation_space, np.random.default_rng(seed), time.monotonic()
    observation, _ = env.reset(seed=seed)
    net_key, key = jax.random.split(jax.random.PRNGKey(seed))
    steps = nodes_of(space)
    net = network(net_key, flat(observation, space).shape[1], int(env.unwrapped.single_action_space.n), hidden)
    optimizer, update = learner(rate, clip, 0.01)
    state, rows = optimizer.init(net), []
    for number in range(1, updates + 1):
        memory, finals = [], []
        for _ in range(steps):
            x, mask = flat(observation, space), np.asarray(observation["action_mask"], np.float32)
            key, draw = jax.random.split(key)
            action, logp, value = (np.asarray(part) for part in act(net, x, mask, draw))
            observation, reward, ended, _, info = env.step(action)
            memory.append((x, mask, action, logp, value, reward.astype(np.float32), ended.astype(np.float32)))
            if ended.all():
                finals.append(info["final_info"]["step_time_s"].mean() * 1e3)
        x, mask, action, logp, value, reward, ended = (np.stack(part) for part in zip(*memory, strict=True))
        gained = advantages(reward, value, ended, np.zeros(envs), 1.0, 0.95).astype(np.float32)
        data = [part.reshape(-1, *part.shape[2:]) for part in (x, mask, action, logp, gained, gained + value)]
        for _ in range(epochs):
            for rows_of_batch in np.array_split(rng.permutation(len(data[0])), batches):
                net, state = update(net, state, tuple(part[rows_of_batch] for part in data))
        best = env.unwrapped.best
        best_ms = float("nan") if best is None else step_ms(env.unwrapped.problem, best)
        seconds = time.monotonic() - started
        rows.append((number, env.unwrapped.evaluations, round(seconds, 2), float(np.mean(finals)), best_ms))
        if number % 10 == 0 or number == 1:
            print(
                f"update {number:4}  {rows[-1][1]:7} evaluations  {seconds:6.1f} s  "
                f"episodes end at {rows[-1][3]:9.2f} ms  best {best_ms:9.2f} ms",
                flush=True,
            )
    return rows, env.unwrapped


def nodes_of(space) -> int:
    return len(space["placement"].nvec)


def step_ms(problem, placement) -> float:
    return simdev.simulate(problem, placement).step_ns / 1e6


def draw(rows, title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6.5, 4), layout="constrained")
    axis.plot([row[1] for row in rows], [row[3] for row in rows], label="mean of the episodes' last placements")
    axis.plot([row[1] for row in rows], [row[4] for row in rows], label="best placement so far")
    axis.set(xlabel="evaluations", ylabel="step time (ms)", title=title)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", default="inception-v3")
    parser.add_argument("--topology", default="p100x4")
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--envs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("."))
    given = parser.parse_args()
    rows, _ = train(
        given.workload, given.topology, nodes=given.nodes, updates=given.updates, envs=given.envs, seed=given.seed
    )
    with open(given.out / "ppo_agent.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["update", "evaluations", "seconds", "mean_final_step_ms", "best_step_ms"])
        writer.writerows(rows)
    draw(rows, f"PPO on {given.workload}, {given.topology}, {given.nodes} nodes", given.out / "ppo_agent.png")


if __name__ == "__main__":
    main()
