"""HSDAG (Duan et al. 2024): a graph network parses the graph into any number of groups and places them."""

from __future__ import annotations

from simdev.baselines.rl._grouped import device_columns
from simdev.baselines.rl._train import Learner, learn, learned

DEFAULTS = {"nodes": 64, "hidden": 64, "steps": 20, "rate": 0.001, "discount": 0.95, "policy": ""}
SHAPE = ("nodes", "hidden", "devices")  # settings that a policy file stores


def learner(problems, *, nodes, devices=0, **given) -> Learner:
    """The learner for ``simdev train`` and the placer; it names at most ``devices`` (0: as many as needed)."""
    from simdev.baselines.rl._hsdag import learner_functions, structured

    devices = device_columns(problems, devices)
    settings = {"nodes": nodes, "devices": devices, **given}
    functions = learner_functions(devices=devices, **given)

    def grouped(problem):
        return structured(problem, nodes, devices)

    stored = {name: settings[name] for name in SHAPE}
    return Learner("hsdag", 2, stored, grouped, functions.init, functions.step, functions.greedy)


@learned(
    "hsdag",
    version=2,
    defaults=DEFAULTS,
    learner=learner,
    source="Duan et al.: A Structure-Aware Framework for Learning Device Placements on Computation Graphs, "
    "NeurIPS 2024",
)
def hsdag(problem, *, rng, budget, policy, **params):
    """Parse the graph into groups and place these, ``steps`` times, then follow the policy gradient.

    From the paper: ops joined along chains (an op with its only successor where that has no other predecessor);
    features of a node from its kinds of ops, output shapes, numbers of predecessors and successors, fractal dimension
    and place in the running order; an encoder of two graph convolutions; parsing: an edge is scored by a network
    from the product of its ends' embeddings, each node keeps its best edge, what kept edges join is a group, so that
    there may be any number of them; a group's embedding is made from the sum of its members' and scaled by the mean
    score of its edges, through which the scores learn; a softmax over devices for each group; from step to step of an
    episode, the groups' new features are added to their members'; reward 1 / step time; one update after ``steps``
    placements, with discount. ``steps``, ``rate``, ``discount``, two convolutions and dropout of 0.2 are those of the
    authors' program. It departs from the paper, or fills a gap in it, as follows:

    * The graphs are of training steps, not of inference: a forward op has its backward and update ops with it, and
      only forward ops make chains. Where there are more than ``nodes`` chains, nodes are the groups of
      :func:`~simdev.baselines.rl._groups.coarse_groups` instead (the layers of the source model, or ops with their
      only reader, merged), as for the other learned placers. ``hidden`` is 64, not the program's 128.
    * A node that holds more than a sixteenth of a device's memory in persistent bytes is a group of its own: embedding
      tables that one op reads would all be in its group, which fits nowhere.
    * The graph is parsed once a step; the program parses the groups again until no edge is left. Edges have no
      direction when they are scored, in the convolutions and in the fractal dimension, which counts reachable nodes.
    * Kinds are hashed into buckets, degrees and shapes are logarithms, the place in the order also comes as sines and
      cosines, and a node also knows its shares of time and of persistent bytes.
    * An advantage is the reward less the episode's mean, over its deviation, within 3; the paper has no baseline. It
      weighs its own step by ``discount`` to the power of the step's number: no later reward depends on it. The program
      weighs all steps of an episode with one discounted sum.
    * A placement that does not fit counts as ten times the time of all ops, plus a part that grows with its overflow.
      The program leaves out placements on one device only; they count here. Gradients are clipped at 1. Layers are
      normalised.
    * Accelerators only, two to any number of them; the paper has one CPU and one GPU.

    A few thousand placements are too few for this gradient: after 2,000 for `inception-v3` or `nasnet-a-large` on
    `p100x4` the policy is still undecided, and the variety of the parsings finds the best placements. With a larger
    ``rate`` the policy converges sooner, on `inception-v3` to a single device.

    If ``policy``, a folder that ``simdev train`` wrote, is given, learning starts from it: without dropout, on the most
    probable devices, for the first evaluation.
    """
    return learn(learner, problem, rng, budget, policy, params)
