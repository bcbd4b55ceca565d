"""Placeto (Addanki et al. 2019): a policy that improves a placement by visiting one group of ops at a time."""

from __future__ import annotations

from simdev.baselines.rl._grouped import bucket, device_columns, group_problem
from simdev.baselines.rl._groups import coarse_groups, fine_groups
from simdev.baselines.rl._train import Learner, learn, learned

DEFAULTS = {
    "groups": 64, "layers": True, "hidden": 16, "rounds": 8, "episodes": 4, "every": 4, "from_best": True,
    "discount": 1.0, "history": 16, "rate": 0.003, "entropy": 0.02, "entropy_updates": 20, "policy": "",
}  # fmt: skip
SHAPE = ("groups", "layers", "hidden", "rounds", "devices")  # settings that a policy file stores


def learner(problems, *, groups, layers, devices=0, **given) -> Learner:
    """The learner for ``simdev train`` and the placer; it names at most ``devices`` (0: as many as needed)."""
    from simdev.baselines.rl._placeto import learner_functions, with_view

    devices = device_columns(problems, devices)
    settings = {"groups": groups, "layers": layers, "devices": devices, **given}
    group_of = {id(problem): (coarse_groups if layers else fine_groups)(problem, groups) for problem in problems}
    rows = bucket(max(int(group.max()) + 1 for group in group_of.values()))
    functions = learner_functions(devices=devices, rows=rows, **given)

    def grouped(problem):
        return with_view(group_problem(problem, group_of[id(problem)], rows=rows, columns=devices))

    stored = {name: settings[name] for name in SHAPE}
    return Learner("placeto", 4, stored, grouped, functions.init, functions.step, functions.greedy)


@learned(
    "placeto",
    version=4,
    defaults=DEFAULTS,
    learner=learner,
    source="Addanki et al.: Placeto: Learning Generalizable Device Placement Algorithms for Distributed Machine "
    "Learning, NeurIPS 2019",
)
def placeto(problem, *, rng, budget, policy, **params):
    """Learn to improve a placement: an episode visits each group once and chooses its device again.

    From the paper: the state is the graph, the placement and the visited group; node embeddings come from ``rounds``
    rounds of message passing along and against the edges with shared weights; there are summaries of the visited
    group's ancestors, descendants and parallel groups; the reward is the difference of step times; REINFORCE takes the
    mean return of the same step over the last ``history`` episodes as baseline; an entropy bonus decays; gradients are
    clipped at 1.25. It departs from the paper, or fills a gap in it, as follows:

    * The step time is measured after every ``every``-th group that is visited (1: the paper's), and only if
      a group has moved; a group in between shares the difference with its neighbours. ``every=groups`` gives the
      paper's other form, the reward at the end. Message passing runs as often: the groups up to the next measurement
      share the embeddings of the placement before them, and only the devices of their neighbours and the load are
      up to date.
    * Episodes start from the best placement so far (``from_best=False``: from all groups on the first device), and the
      policy has a learned bonus, 2 at first, for leaving a group where it is; otherwise the first policy hardly
      prefers any device. Logits are bounded to -3 to 3, so that a policy never stops exploring.
    * ``episodes`` episodes run side by side with one policy, then it is updated; the paper's workers are asynchronous.
      Step times are relative to the time of all ops on one device, and count at most ten times that; a placement that
      does not fit counts as ten times that, plus a part that grows with its overflow. Advantages are divided by the
      deviation of the returns.
    * Groups are the layers of the source model (in graphs that name none, ops with their only reader), merged to at
      most ``groups``, or with ``layers=false`` single forward ops that share traffic; backward and update ops go with
      their forward op. They are visited in running order. Messages are averaged, not summed, and normalised;
      otherwise they would grow without limit over the rounds.
    * Node features are those of the paper (time, output bytes, device, visited now, visited before) and others that
      mean the same in every graph (levels, memory, op classes, even shares of the time); the last layer also sees the
      features and the load of each device, so that one policy serves unlike machines of up to 8 devices.

    If ``policy``, a folder that ``simdev train`` wrote, is given, learning starts from it.
    """
    return learn(learner, problem, rng, budget, policy, params)
