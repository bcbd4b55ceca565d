"""Placement as a Gymnasium environment, for agents of reinforcement learning.

Importing this module registers two environments. Gymnasium can also import the module itself, by the prefix of a name::

    import gymnasium
    import simdev.integrations.gymnasium

    env = gymnasium.make("simdev/Placement-v0", workload="nmt", topology="p100x4", nodes=64)
    env = gymnasium.make("simdev.integrations.gymnasium:simdev/Placement-v0", workload="nmt")  # needs no second import

* ``simdev/Placement-v0`` is *progressive*: the decision process of Placeto (Addanki et al. 2019). An episode starts
from
  a full placement and visits each node once, in the order of their first ops. An action is the device of the current
  node. Its reward is the reduction of the simulated step time.
* ``simdev/PlacementOneShot-v0`` is *one-shot* (Mirhoseini et al. 2017). An episode is one action, which holds the
  devices of all nodes. Its reward is minus the square root of the step time.

A *node* is what one action places: a group of placement units (``nodes=64``: at most 64 groups), one placement unit
(``nodes="units"``) or one op (``nodes="ops"``). Times in rewards are relative to the *work*, which is the sum of all
durations, each op on its fastest device. A placement that does not fit counts as ``memory_penalty_s_per_gib`` seconds
slower for each GiB above capacity (the rule and the number of Placeto).

An observation is a Dict, for N nodes, E edges between them and D devices:

============= =================== ============================================================================
``nodes``      float32 (N, D + 5)  duration on each device, persistent bytes, output bytes, t-level, b-level, number
                                  of ops; each column is divided by its largest value
``edges``      int32 (E, 2)        distinct pairs of a producing node and a reading node
``edge_bytes`` float32 (E,)        bytes that the edge carries, divided by the largest value
``devices``    float32 (D, 2)      speed and memory, each divided by its largest value
``transfers``  float32 (D, D)      mean time of a tensor between two devices, divided by the largest value
``colocation`` int32 (N,)          the node whose device each node must share; itself unless ``nodes="ops"``
``placement``  int64 (N,)          device of each node
``current``    int64 ()            the node to place next (progressive only)
``visited``    int8 (N,)           1 if the episode has placed the node (progressive only)
``action_mask`` int8               (D,) progressive or (N, D) one-shot: 1 if the device supports all ops of the node.
                                  In the progressive form its memory must also hold the node's persistent bytes, and
                                  it must be the device of the node's colocation group. At least one entry is 1
============= =================== ============================================================================

Actions against the mask are allowed. If the device does not support the node, the node stays where it is. A node of a
colocation group follows the group's first node. Bytes above capacity cost the memory penalty.
"""

from __future__ import annotations

from collections.abc import Sequence

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from simdev.analysis.coarsen import group_units
from simdev.analysis.levels import b_level, t_level
from simdev.errors import InvalidInput, UnknownName, Unsupported
from simdev.placers import registry
from simdev.problem.placement import Placement
from simdev.problem.problem import Problem
from simdev.problem.topology import load_topology
from simdev.sim import simulate_many

FORMS = ("progressive", "one-shot")
STARTS = ("single", "random")
IDS = {"simdev/Placement-v0": "progressive", "simdev/PlacementOneShot-v0": "one-shot"}


class Scenario:
    """Everything that does not change between episodes: nodes, devices, masks, and the constant observations."""

    def __init__(self, problem: Problem, nodes: int | str, form: str, hosts: bool):
        if form not in FORMS:
            raise UnknownName("form", form, FORMS)
        pairs = problem.costs.pair_class
        if ((pairs < 0) & ~np.eye(len(pairs), dtype=bool)).any():
            raise Unsupported(f"{problem.topology.name}: a pair of devices has no route")
        self.problem, self.form, graph = problem, form, problem.graph
        self.work_ns = max(1, int(_least(problem).sum()))
        self.node_of_op = _nodes(problem, nodes)
        self.n_nodes = int(self.node_of_op.max()) + 1
        self.leader = _leaders(graph.unit_of_op, self.node_of_op)
        self.leads = self.leader == np.arange(self.n_nodes)
        party = self.leader[self.node_of_op]
        supported = np.ones((problem.topology.n_devices, self.n_nodes), bool)
        for device, row in enumerate(problem.costs.device_op_ns >= 0):
            np.logical_and.at(supported[device], party, row)
        accelerators = np.isin(np.arange(len(supported)), problem.topology.accelerators)
        wanted = accelerators | hosts | ~supported[:, self.leads][accelerators].any(axis=0).all()
        self.devices = np.flatnonzero(wanted & (supported[:, self.leads].any(axis=1)))
        self.n_devices = len(self.devices)
        self.supported = supported[self.devices][:, self.leader].T
        if not self.supported.any(axis=1).all():
            raise Unsupported("no device supports all ops of a node; more nodes may help")
        self.persistent = np.zeros(self.n_nodes, np.int64)
        np.add.at(self.persistent, party, graph.op_persistent_bytes)
        self.capacity = np.asarray(problem.topology.memory_bytes, np.int64)[self.devices]
        self.constant = self._constant()
        self.observation_space = self._observation_space()
        count = self.n_devices
        self.action_space = (
            spaces.Discrete(count) if form == "progressive" else spaces.MultiDiscrete([count] * self.n_nodes)
        )

    def _constant(self) -> dict[str, np.ndarray]:
        graph, costs, node = self.problem.graph, self.problem.costs, self.node_of_op
        duration = _least(self.problem)
        columns = [_sums(np.maximum(costs.device_op_ns[device], 0), node) for device in self.devices]
        largest = max(1, *(int(column.max()) for column in columns))
        columns = [column / largest for column in columns]
        first, last = np.full(self.n_nodes, np.iinfo(np.int64).max), np.zeros(self.n_nodes, np.int64)
        np.minimum.at(first, node, t_level(graph, duration))
        np.maximum.at(last, node, b_level(graph, duration))
        outputs = np.zeros(self.n_nodes, np.int64)
        np.add.at(outputs, node[graph.tensor_producer], graph.tensor_bytes)
        rest = [_sums(graph.op_persistent_bytes, node), outputs, first, last, np.bincount(node)]
        columns += [column / max(1, column.max()) for column in rest]
        edges, size = _edges(graph, node)
        if not len(edges):  # a Box needs a row: an edge of 0 bytes from the first node to itself
            edges, size = np.zeros((1, 2), np.int32), np.zeros(1, np.int64)
        routes = costs.pair_class[np.ix_(self.devices, self.devices)]
        mean = [row.mean() if len(row) else 0.0 for row in costs.transfer_ns]
        times = np.array([*mean, 0.0])[routes]  # a device has no route to itself: -1
        np.fill_diagonal(times, 0)
        speed = 1 / np.maximum(1, np.maximum(costs.device_op_ns[self.devices], 0).sum(axis=1))
        return {
            "nodes": np.stack(columns, axis=1).astype(np.float32),
            "edges": edges,
            "edge_bytes": (size / max(1, size.max())).astype(np.float32),
            "devices": np.stack([speed / speed.max(), self.capacity / self.capacity.max()], 1).astype(np.float32),
            "transfers": (times / max(1e-9, times.max())).astype(np.float32),
            "colocation": self.leader.astype(np.int32),
        }

    def _observation_space(self) -> spaces.Dict:
        def unit(name):
            return spaces.Box(0, 1, self.constant[name].shape, np.float32)

        n, d = self.n_nodes, self.n_devices
        parts = {
            "nodes": unit("nodes"),
            "edges": spaces.Box(0, n - 1 if n > 1 else 1, self.constant["edges"].shape, np.int32),
            "edge_bytes": unit("edge_bytes"),
            "devices": unit("devices"),
            "transfers": unit("transfers"),
            "colocation": spaces.Box(0, n - 1 if n > 1 else 1, (n,), np.int32),
            "placement": spaces.MultiDiscrete([d] * n),
        }
        if self.form == "progressive":
            parts |= {"current": spaces.Discrete(n), "visited": spaces.MultiBinary(n)}
        parts["action_mask"] = spaces.MultiBinary(d if self.form == "progressive" else (n, d))
        return spaces.Dict(parts)

    def mask(self, node: int, placement: np.ndarray, resident: np.ndarray, visited: np.ndarray) -> np.ndarray:
        """bool ``(k, D)``: the devices that the mask allows for ``node`` in each of ``k`` placements int ``(k, N)``."""
        rows, leader = np.arange(len(placement)), self.leader[node]
        mask = np.repeat(self.supported[node][None], len(rows), axis=0)
        if leader != node and visited[leader]:
            mask[:] = False
            mask[rows, placement[:, leader]] = True
            return mask
        free = self.capacity - resident
        free[rows, placement[:, node]] += self.persistent[leader]
        fits = mask & (free >= self.persistent[leader])
        most = np.where(mask, free, np.iinfo(np.int64).min).argmax(axis=1)
        fits[rows[~fits.any(axis=1)], most[~fits.any(axis=1)]] = True
        return fits

    def resident(self, placement: np.ndarray) -> np.ndarray:
        """int64 ``(k, D)``: persistent bytes on each device."""
        total = np.zeros((len(placement), self.n_devices), np.int64)
        rows = np.repeat(np.arange(len(placement))[:, None], self.leads.sum(), axis=1)
        np.add.at(total, (rows, placement[:, self.leads]), self.persistent[self.leads])
        return total


class EpisodeBatch:
    """``k`` episodes of one scenario in lock step; the environment and its vectorised form share this class."""

    def __init__(self, scenario: Scenario, count: int, start: str, memory_penalty_s_per_gib: float):
        if start not in STARTS:
            raise UnknownName("start", start, STARTS)
        if not 0 <= memory_penalty_s_per_gib < float("inf"):
            raise InvalidInput("expected a number of seconds", source="memory_penalty_s_per_gib")
        self.scenario, self.count, self.start, self.penalty = scenario, count, start, memory_penalty_s_per_gib
        self.evaluations = 0
        self.best_ns: int | None = None
        self.best: np.ndarray | None = None

    def reset(self, rng: np.random.Generator, given: Placement | None = None) -> None:
        """Begin new episodes, all from placement ``given`` or else as ``start`` says."""
        scenario = self.scenario
        self.visited, self.node = np.zeros(scenario.n_nodes, bool), 0
        if given is not None:
            given.check(scenario.problem, source="options: placement")
            place = np.searchsorted(scenario.devices, given.devices)
            first = np.unique(scenario.node_of_op, return_index=True)[1]
            row = np.minimum(place[first], scenario.n_devices - 1)
            if not (scenario.devices[row][scenario.node_of_op] == given.devices).all():
                raise InvalidInput(
                    "the placement splits a node, or uses a device that this environment does not have",
                    source="options",
                )
            self.placement = np.repeat(row[None], self.count, axis=0)
        elif self.start == "random":
            draw = rng.random((self.count, *scenario.supported.shape))
            self.placement = np.where(scenario.supported, draw, -1).argmax(axis=2)[:, scenario.leader]
        else:
            self.placement = np.repeat(scenario.supported.argmax(axis=1)[None], self.count, axis=0)
        self._simulate(np.ones(self.count, bool))

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, bool]:
        """Apply int actions ``(k,)`` or ``(k, N)``; rewards float64 ``(k,)``, and whether the episodes have ended."""
        before, cost, scenario = self.placement.copy(), self.cost.copy(), self.scenario
        if scenario.form == "one-shot":
            actions = np.asarray(actions, np.int64).reshape(self.count, scenario.n_nodes)[:, scenario.leader]
            possible = scenario.supported[np.arange(scenario.n_nodes), actions]
            self.placement = np.where(possible, actions, self.placement)
        else:
            actions = np.asarray(actions, np.int64).reshape(self.count)
            follows = scenario.leader[self.node] != self.node and self.visited[scenario.leader[self.node]]
            possible = scenario.supported[self.node, actions] & (not follows)
            party = scenario.leader == scenario.leader[self.node]
            self.placement[:, party] = np.where(possible, actions, before[:, self.node])[:, None]
            self.visited[self.node] = True
        self._simulate((self.placement != before).any(axis=1))
        if scenario.form == "one-shot":
            return -np.sqrt(self.cost), True
        done = bool(self.visited.all())
        self.node = 0 if done else self.node + 1
        return cost - self.cost, done

    def _simulate(self, changed: np.ndarray) -> None:
        scenario, rows = self.scenario, np.flatnonzero(changed)
        if not hasattr(self, "cost"):
            self.step_ns, self.overflow = np.zeros(self.count, np.int64), np.zeros(self.count, np.int64)
        if len(rows):
            devices = scenario.devices[self.placement[rows]][:, scenario.node_of_op]
            found = simulate_many(scenario.problem, devices.astype(np.int32))
            self.step_ns[rows], self.overflow[rows] = found.step_ns, found.overflow_bytes
            self.evaluations += len(rows)
            for row in rows[self.overflow[rows] == 0]:
                if self.best_ns is None or self.step_ns[row] < self.best_ns:
                    self.best_ns, self.best = int(self.step_ns[row]), self.placement[row].copy()
        penalty_ns = self.penalty * 1e9 * self.overflow / 2**30
        self.cost = (self.step_ns + penalty_ns) / scenario.work_ns

    def observe(self) -> dict[str, np.ndarray]:
        """The current observations, each with a leading axis ``k``."""
        scenario, n = self.scenario, self.count
        found = {name: np.repeat(value[None], n, axis=0) for name, value in scenario.constant.items()}
        found["placement"] = self.placement.astype(np.int64)
        if scenario.form == "progressive":
            found["current"] = np.full(n, self.node, np.int64)
            found["visited"] = np.repeat(self.visited[None], n, axis=0).astype(np.int8)
            mask = scenario.mask(self.node, self.placement, scenario.resident(self.placement), self.visited)
        else:
            mask = np.repeat(scenario.supported[None], n, axis=0)
        found["action_mask"] = mask.astype(np.int8)
        return found

    def info(self) -> dict[str, np.ndarray]:
        """Step time and overflow of each episode."""
        return {"step_time_s": self.step_ns / 1e9, "overflow_bytes": self.overflow.copy()}


class _Episodes:
    """What both environments say of their episodes."""

    _scenario: Scenario
    _episodes: EpisodeBatch

    @property
    def problem(self) -> Problem:
        return self._scenario.problem

    @property
    def best(self) -> Placement | None:
        """The fastest placement that fits, of all episodes so far."""
        return None if self._episodes.best is None else _full(self._scenario, self._episodes.best)

    @property
    def evaluations(self) -> int:
        """Simulations since the environment was made."""
        return self._episodes.evaluations


class PlacementEnv(_Episodes, gymnasium.Env):
    """One episode at a time. The docstring of this module describes observations, actions and rewards.

    ``workload`` is a workload id or graph file, and ``topology`` a name or TOML file; ``problem`` replaces both.
    ``nodes`` is a number of groups, ``"units"`` or ``"ops"``. ``start`` is the placement from which an episode starts:
    ``"single"`` (each node on the first device that supports it) or ``"random"``. ``hosts`` adds the hosts to the
    devices. ``reset`` accepts ``options={"placement": Placement}``. ``info`` holds ``step_time_s`` and
    ``overflow_bytes``.

    Raises :class:`InvalidInput` or :class:`UnknownName` for an invalid argument, and :class:`Unsupported` if no device
    supports a node or if two devices have no route.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}

    def __init__(
        self,
        workload: str = "inception-v3",
        topology: str = "p100x4",
        *,
        problem: Problem | None = None,
        form: str = "progressive",
        nodes: int | str = 64,
        start: str = "single",
        hosts: bool = False,
        memory_penalty_s_per_gib: float = 2.0,
        render_mode: str | None = None,
    ):
        self.render_mode = render_mode
        self._scenario = Scenario(problem or _problem(workload, topology), nodes, form, hosts)
        self._episodes = EpisodeBatch(self._scenario, 1, start, memory_penalty_s_per_gib)
        self.observation_space, self.action_space = self._scenario.observation_space, self._scenario.action_space

    @property
    def placement(self) -> Placement:
        """The current placement of all ops."""
        return _full(self._scenario, self._episodes.placement[0])

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        self._episodes.reset(self.np_random, (options or {}).get("placement"))
        return self._observation(), self._info()

    def step(self, action):
        if not self.action_space.contains(np.asarray(action, np.int64)):
            raise InvalidInput(f"{action!r} is not in {self.action_space}", source="action")
        reward, done = self._episodes.step(np.asarray(action)[None])
        return self._observation(), float(reward[0]), done, False, self._info()

    def action_masks(self) -> np.ndarray:
        """bool, flat: the mask of the current observation. Agents that use masks call this method by its name."""
        return self._episodes.observe()["action_mask"][0].astype(bool).ravel()

    def render(self) -> str:
        """One line: the step time, and the number of nodes on each device."""
        counts = np.bincount(self._episodes.placement[0], minlength=self._scenario.n_devices)
        names = [self.problem.topology.devices[device].name for device in self._scenario.devices]
        shares = ", ".join(f"{name} {count}" for name, count in zip(names, counts, strict=True))
        return f"{self._episodes.step_ns[0] / 1e6:.3f} ms; nodes: {shares}"

    def _observation(self) -> dict:
        found = {name: value[0] for name, value in self._episodes.observe().items()}
        return found | ({"current": int(found["current"])} if "current" in found else {})

    def _info(self) -> dict:
        return {name: value[0].item() for name, value in self._episodes.info().items()}


class PlacementVectorEnv(_Episodes, VectorEnv):
    """``num_envs`` episodes in lock step, which are simulated together. The arguments are those of
    :class:`PlacementEnv`.

    All episodes are equally long and end at the same time. The next ones begin in the same step
    (``AutoresetMode.SAME_STEP``): ``infos["final_obs"]`` then holds the last observations and ``infos["final_info"]``
    the last infos, each with a leading axis ``num_envs``.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": []}

    def __init__(
        self, num_envs: int = 1, *arguments, start: str = "single", memory_penalty_s_per_gib: float = 2.0, **k
    ):
        single = PlacementEnv(*arguments, **k)
        self.num_envs, self._scenario = num_envs, single._scenario
        self._episodes = EpisodeBatch(self._scenario, num_envs, start, memory_penalty_s_per_gib)
        self.single_observation_space, self.single_action_space = single.observation_space, single.action_space
        self.observation_space = batch_space(single.observation_space, num_envs)
        self.action_space = batch_space(single.action_space, num_envs)

    def reset(self, *, seed: int | Sequence[int | None] | None = None, options: dict | None = None):
        super().reset(seed=seed if seed is None or isinstance(seed, int) else seed[0])
        self._episodes.reset(self.np_random, (options or {}).get("placement"))
        return self._episodes.observe(), _with_masks(self._episodes.info())

    def step(self, actions):
        rewards, done = self._episodes.step(actions)
        info = self._episodes.info()
        more = {}
        if done:
            more = {"final_obs": self._episodes.observe(), "final_info": _with_masks(info)}
            self._episodes.reset(self.np_random)
        flags = np.full(self.num_envs, done)
        return self._episodes.observe(), rewards, flags, np.zeros(self.num_envs, bool), _with_masks({**info, **more})


def register_envs() -> None:
    """Register the environments :data:`IDS` with Gymnasium; registering again changes nothing."""
    for name, form in IDS.items():
        if name not in gymnasium.registry:
            gymnasium.register(
                name,
                entry_point="simdev.integrations.gymnasium:PlacementEnv",
                vector_entry_point="simdev.integrations.gymnasium:PlacementVectorEnv",
                kwargs={"form": form},
            )


def _problem(workload: str, topology: str) -> Problem:
    return Problem.build(registry.load_workload(workload), load_topology(topology))


def _full(scenario: Scenario, placement: np.ndarray) -> Placement:
    return Placement(scenario.devices[placement][scenario.node_of_op].astype(np.int32))


def _with_masks(info: dict) -> dict:
    """``info`` with Gymnasium's masks, which say for which sub-environments a key is valid: for all."""
    count = len(info["step_time_s"])
    return {**info, **{f"_{key}": np.ones(count, bool) for key in info}}


def _least(problem: Problem) -> np.ndarray:
    """int64 ``(n,)``: duration of each op on its fastest device."""
    durations = problem.costs.device_op_ns
    return np.where(durations < 0, np.iinfo(np.int64).max, durations).min(axis=0)


def _nodes(problem: Problem, nodes: int | str) -> np.ndarray:
    """int ``(n,)``: the node of each op, numbered by first op."""
    graph = problem.graph
    if nodes == "ops":
        return np.arange(graph.n_ops)
    if nodes == "units":
        return graph.unit_of_op
    if isinstance(nodes, bool) or not isinstance(nodes, int | np.integer) or nodes < 1:
        raise InvalidInput(f"{nodes!r} is neither a positive number nor 'units' nor 'ops'", source="nodes")
    return group_units(graph, _least(problem), int(nodes))


def _leaders(unit_of_op: np.ndarray, node_of_op: np.ndarray) -> np.ndarray:
    """int ``(N,)``: the first node that has an op of the unit of the node's first op."""
    first = np.full(int(unit_of_op.max()) + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, unit_of_op, node_of_op)
    return first[unit_of_op[np.unique(node_of_op, return_index=True)[1]]]


def _sums(values: np.ndarray, node: np.ndarray) -> np.ndarray:
    total = np.zeros(int(node.max()) + 1, np.int64)
    np.add.at(total, node, values)
    return total


def _edges(graph, node: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Distinct pairs of nodes, int32 ``(E, 2)``, and the bytes from one to the other, each tensor once."""
    count = int(node.max()) + 1
    source, target = node[graph.edge_source].astype(np.int64), node[graph.consumers].astype(np.int64)
    once = np.unique(np.stack([source * count + target, graph.edge_tensor]), axis=1)[:, :]
    once = once[:, once[0] // count != once[0] % count]
    pairs, inverse = np.unique(once[0], return_inverse=True)
    size = np.zeros(len(pairs), np.int64)
    np.add.at(size, inverse, graph.tensor_bytes[once[1]])
    return np.stack([pairs // count, pairs % count], axis=1).astype(np.int32), size


register_envs()
