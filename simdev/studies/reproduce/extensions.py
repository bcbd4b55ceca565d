"""What Placeto's paper leaves open: grouping learned together with placement, and one policy for several families."""

from __future__ import annotations

from collections.abc import Iterator

from simdev.studies.reproduce.lab import Lab, LabCase, cell, geometric, interval_text, of_entry, sizes, steps_ms
from simdev.studies.reproduce.placeto import FAMILIES, TRAINED_BY, family_cases, ratios_to_best

TITLE = "Placeto: grouping learned with placement, one policy for several families"
CLIMB = "group-climb[by=coarse]"
JOINTLY = {
    "one GPU": "single-gpu",
    "expert": "expert",
    "joint": "placeto-joint",
    "joint, untrained": "placeto-joint[rate=0]",
    "`placeto`": "placeto",
    "`placeto` on the nodes": "placeto[groups=128,layers=false]",
    "climb on the nodes": "group-climb[by=fine,groups=128]",
    "climb on `placeto`'s groups": CLIMB,
}


JOINT = ("inception-v3", "nmt", "transformer-xl-2")
SIZES = sizes(
    small=dict(
        topology="p100x4",
        joint=JOINT,
        joint_evaluations=500,
        seeds=3,
        families=FAMILIES,
        graphs_of_a_family=10,
        training_evaluations=2000,
        tuning_evaluations=200,
    ),
    tiny=dict(
        joint=("transformer-xl-2",),
        joint_evaluations=60,
        seeds=2,
        families=("inception", "nmt"),
        graphs_of_a_family=5,
        training_evaluations=60,
        tuning_evaluations=20,
    ),
    # Small leaves open whether groups are learned in more evaluations, and whether two test graphs of a family are
    # like the others.
    full=dict(
        joint_evaluations=2500,
        graphs_of_a_family=32,
        training_evaluations=20_000,
        tuning_evaluations=2000,
    ),
)


def run(lab: Lab) -> Iterator[list[str]]:
    """The parts of the report."""
    yield _joint(lab)
    yield _mixed(lab)


def _joint(lab: Lab) -> list[str]:
    size, lines = lab.size, []
    for workload in size.joint:
        found = lab.runs([LabCase(workload, size.topology)], JOINTLY.values(), size.joint_evaluations, size.seeds)
        line = {name: cell(steps_ms(of_entry(found, entry))) for name, entry in JOINTLY.items()}
        lines.append({"case": workload} | line)
    return [
        "## Grouping and placement learned together\n",
        "Placeto takes groups that a heuristic has made. `placeto-joint` learns to join up to 128 nodes into groups "
        "while it learns to place the groups. The controls have as many evaluations: the same search with networks "
        "that do not learn (`rate=0`), `placeto` with its groups (at most 64, the layers of the source model) and with "
        "the nodes as groups, and hill climbs without learning over the nodes and over the groups of `placeto`. Step "
        f"times in ms after {size.joint_evaluations:,} evaluations on `{size.topology}`, means of {size.seeds} seeds "
        "with 95 % bootstrap intervals.\n",
        lab.table("joint", lines),
    ]


def _mixed(lab: Lab) -> list[str]:
    size, lines = lab.size, []
    splits = {family: family_cases(size, family) for family in size.families}
    every = [case for seen, _ in splits.values() for case in seen]
    for family, (seen, unseen) in splits.items():
        how = {"seeds": size.seeds, "tuning": size.tuning_evaluations}
        own = lab.trained(TRAINED_BY, family, seen, unseen, evaluations=size.training_evaluations, **how)
        evaluations = size.training_evaluations * len(splits)
        mixed = lab.trained(TRAINED_BY, "mixed", every, unseen, evaluations=evaluations, **how)
        ratios = ratios_to_best(
            {
                "one GPU": lab.runs(unseen, ["single-gpu"], 1, 1),
                "untrained, zero-shot": lab.runs(unseen, ["placeto"], 0, size.seeds),
                "own family, zero-shot": own[0],
                "mixed, zero-shot": mixed[0],
                "from scratch": lab.runs(unseen, ["placeto"], size.tuning_evaluations, size.seeds),
                "climb": lab.runs(unseen, [CLIMB], size.tuning_evaluations, size.seeds),
                "own family, fine-tuned": own[1],
                "mixed, fine-tuned": mixed[1],
            }
        )
        cells = {name: interval_text(geometric(values), 3) if values else "-" for name, values in ratios.items()}
        lines.append({"family": family, "test graphs": len(unseen)} | cells)
    return [
        "## One policy for several families\n",
        f"For each seed, one policy of `placeto` is trained on each family ({size.graphs_of_a_family} graphs, of which "
        f"80 % are for training, {size.training_evaluations:,} evaluations), and the *mixed* policy on the training "
        f"graphs of all {len(splits)} families in turn ({size.training_evaluations * len(splits):,} evaluations, as "
        "many for each graph). All are tried on the other graphs: *zero-shot* without further training, *fine-tuned* "
        f"with {size.tuning_evaluations} evaluations. The controls are one GPU, the most probable placement of an "
        "untrained network, training from scratch, and a hill climb without learning over the same groups; the last "
        "two have the evaluations of the fine-tuning. The table shows the step time over the best of all these runs: "
        "the geometric mean over the test graphs and seeds with a 95 % bootstrap interval over the seeds. A placement "
        "that does not fit counts as 10.\n",
        lab.table("mixed", lines),
    ]
