"""The leaderboard: tables that are derived from the rows and never edited.

A run without a score (out of memory, skipped, failed) counts as :data:`CAP` times the best known step time, and so does
every slower one: failing a run improves no mean. A run that was never made counts as nothing. Placers are ranked over
cases in common. Only placers that ran all of these have a place, so leaving a run out improves no place; the others are
compared with the first one, pairwise, over the cases that both ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from simdev.bench.plan_rows import ANY_MESHES, as_row, read_folder
from simdev.bench.rows import PACE, Row, entry_id, seconds_text, time_column, write_csv
from simdev.errors import InvalidInput

CAP = 10.0
MAX_CELLS = 1 << 20  # placers times instances of a ranking, which takes about 300 MB and 3 s
LEADERBOARD = (
    "workload", "topology", "rules", "objective", "budget", "placer", "variant_of", "version", "params", "runs",
    "solved", "status", "step_time_s", PACE, "best_time_s", "lower_bound_s", "bound_method", "gap", "best_known_s",
    "ratio_to_best", "speedup_vs_single_gpu", "speedup_vs_expert", "rank",
)  # fmt: skip
RANKING = (
    "rules", "objective", "budget", "place", "placer", "variant_of", "version", "params", "instances", "cases",
    "solved", "wins", "mean_rank", "geomean_ratio_to_best", "common_with_first", "ratio_to_first",
)  # fmt: skip
GAPS = ("workload", "topology", "rules", "objective", "best placer", "best ms", "bound ms", "bound method", "gap")
INSTANCE = ["workload", "topology", "rules", "objective"]
ENTRY = ["placer", "params"]


def scores(rows: Iterable[Row]) -> pd.DataFrame:
    """A line for each placer (with its parameters and budget) on each instance, over its seeds, sorted.

    ``step_ns`` and ``status`` are those of the run of (lower) median step time, where runs without a score come last;
    ``best_ns`` is the best run's, ``best_known_ns`` the best of all placers and budgets on the instance, ``rank`` the
    place within the budget (equal times share the better), ``log_ratio`` the mean over the seeds of the logarithm of
    the ratio to the best known, at most :data:`CAP`. Absent numbers are ``<NA>``.
    """
    runs = pd.DataFrame(
        [(row.workload, row.topology, row.rules, row.objective, row.budget, row.placer, row.params, row.version,
          row.seed, "oom" if row.status == "ok" and not row.feasible else row.status, row.step_ns, row.lower_bound_ns,
          row.bound_method) for row in rows],
        columns=[*INSTANCE, "budget", *ENTRY, "version", "seed", "status", "step_ns", "bound_ns", "bound_method"],
    ).astype({"step_ns": "Int64", "bound_ns": "Int64"})  # fmt: skip
    key = [*INSTANCE, "budget", *ENTRY]
    runs = runs.sort_values([*key, "step_ns", "seed"], na_position="last", ignore_index=True)
    runs["best_known_ns"] = runs.groupby(INSTANCE)["step_ns"].transform("min")
    ratio = (runs["step_ns"] / runs["best_known_ns"]).fillna(CAP).clip(upper=CAP).astype(float)
    runs["log_ratio"] = np.log(ratio)
    entries = runs.groupby(key)
    median = runs[entries.cumcount() == (entries["seed"].transform("size") - 1) // 2]
    seeds = entries.agg(
        runs=("seed", "size"), solved=("step_ns", "count"), best_ns=("step_ns", "min"), log_ratio=("log_ratio", "mean")
    )
    table = median.drop(columns="log_ratio").merge(seeds, on=key).sort_values(key, ignore_index=True)
    table["rank"] = table.groupby([*INSTANCE, "budget"])["step_ns"].rank(method="min").astype("Int64")
    return table


def leaderboard(rows: Iterable[Row]) -> list[dict[str, str]]:
    """The table of ``leaderboard.csv``: a line for each placer on each instance."""
    table = scores(rows)
    for placer in ("single-gpu", "expert"):
        plain = table[(table["placer"] == placer) & (table["params"] == "{}")]
        reference = plain.groupby(INSTANCE)["step_ns"].min().rename(placer)
        table = table.join(reference, on=INSTANCE)
    text = pd.DataFrame({name: table[name] for name in (*INSTANCE, "budget", *ENTRY, "status", "bound_method")})
    text = _named(text)
    for name in ("version", "runs", "solved", "rank"):
        text[name] = [_text(value) for value in table[name]]
    for name, source in (("best_time", "best"), ("lower_bound", "bound"), ("best_known", "best_known")):
        text[f"{name}_s"] = [seconds_text(_whole(value)) for value in table[f"{source}_ns"]]
    times = [seconds_text(_whole(value)) for value in table["step_ns"]]
    for name in ("step_time_s", PACE):
        text[name] = [
            time if time_column(objective) == name else ""
            for time, objective in zip(times, table["objective"], strict=True)
        ]
    for name, above, below in (
        ("ratio_to_best", "step_ns", "best_known_ns"),
        ("speedup_vs_single_gpu", "single-gpu", "step_ns"),
        ("speedup_vs_expert", "expert", "step_ns"),
    ):
        text[name] = [_quotient(*map(_whole, pair)) for pair in zip(table[above], table[below], strict=True)]
    pairs = zip(table["step_ns"], table["bound_ns"], strict=True)
    text["gap"] = [_quotient(_whole(step), _whole(bound), lambda value: value - 1) for step, bound in pairs]
    return text[list(LEADERBOARD)].to_dict("records")


def ranking(rows: Iterable[Row]) -> list[dict[str, str]]:
    """The table of ``ranking.csv``: a line for each placer of a rule set, objective and budget.

    The common cases are chosen by :func:`_places`. The figures of a placer that ran all of them count these cases only,
    so that every placer with a ``place`` is judged by the same cases. Any other placer has an
    empty ``place``, and its figures count the cases that it ran. It stands below, by ``ratio_to_first``: the geometric
    mean of its step time over that of the placer in the first place, over the ``common_with_first`` cases that both
    ran.
    """
    lines = []
    for (rules, objective, budget), group in scores(rows).groupby(["rules", "objective", "budget"]):
        instances = group[INSTANCE].drop_duplicates()
        entries = group.groupby(ENTRY, as_index=False)["version"].max()
        if len(entries) * len(instances) > MAX_CELLS:
            raise InvalidInput(
                f"{len(entries)} placers on {len(instances)} instances: at most {MAX_CELLS} pairs are ranked"
            )
        group = group.assign(rank=group["rank"].fillna(len(entries)).astype(float), won=group["rank"].eq(1))
        logs = {key: lines.set_index(INSTANCE)["log_ratio"] for key, lines in group.groupby(ENTRY)}
        places, common = _places(logs)
        placed = pd.MultiIndex.from_frame(group[ENTRY]).isin(list(places))
        counted = group[~placed | pd.MultiIndex.from_frame(group[INSTANCE]).isin(common)]
        found = counted.groupby(ENTRY, as_index=False).agg(
            version=("version", "max"),
            cases=("rank", "size"),
            solved=("step_ns", "count"),
            wins=("won", "sum"),
            mean_rank=("rank", "mean"),
            log_ratio=("log_ratio", "mean"),
        )
        first = logs[next(iter(places))]
        shared = {key: (mine - first)[common if key in places else mine.index].dropna() for key, mine in logs.items()}
        keys = list(zip(found["placer"], found["params"], strict=True))
        found["place"] = [str(places.get(key, "")) for key in keys]
        found["common_with_first"] = [len(shared[key]) for key in keys]
        found["ratio_to_first"] = [_mean_ratio(shared[key]) for key in keys]
        found["geomean_ratio_to_best"] = [f"{value:.4f}" for value in np.exp(found["log_ratio"])]
        found["mean_rank"] = [f"{value:.2f}" for value in found["mean_rank"]]
        found["order"] = [
            (places.get(key, len(keys) + 1), float(ratio or "inf"), entry_id(*key))
            for key, ratio in zip(keys, found["ratio_to_first"], strict=True)
        ]
        found = _named(found.sort_values("order", ignore_index=True))
        found = found.assign(rules=rules, objective=objective, budget=budget, instances=len(instances))
        lines += found[list(RANKING)].astype(str).to_dict("records")
    return lines


def _places(logs: dict[tuple[str, str], pd.Series]) -> tuple[dict[tuple[str, str], int], list]:
    """The common cases, and the places of the placers that ran them all, in order.

    The common cases are those of the largest table without a blank: of the sets of cases that a placer ran, the one
    with the most placers that ran it all, times cases. A table of one placer is taken only where no set has two.
    ``logs`` holds the logarithms of the ratios by case.
    """
    sets = {key: frozenset(mine.index) for key, mine in logs.items()}
    held = {mine: sum(mine <= other for other in sets.values()) for mine in set(sets.values())}
    size = {mine: (held[mine] > 1, held[mine] * len(mine), len(mine)) for mine in held}
    common = sorted(max(held, key=lambda mine: (size[mine], sorted(mine))))
    ranked = [key for key, mine in sets.items() if mine.issuperset(common)]
    ranked.sort(key=lambda key: (round(float(np.exp(logs[key][common].mean())), 4), entry_id(*key)))
    return {key: place for place, key in enumerate(ranked, 1)}, common


def _mean_ratio(logs: pd.Series) -> str:
    return f"{np.exp(logs.mean()):.4f}" if len(logs) else ""


def _named(table: pd.DataFrame) -> pd.DataFrame:
    """The table with variants as placers of their own: ``placer`` is the id with its parameters."""
    entries = [entry_id(*key) for key in zip(table["placer"], table["params"], strict=True)]
    variant_of = [name if text != "{}" else "" for name, text in zip(table["placer"], table["params"], strict=True)]
    return table.assign(placer=entries, variant_of=variant_of)


def gaps(rows: Iterable[Row]) -> list[dict[str, str]]:
    """A line for each instance, by workload and topology: the best run of any placer and budget, the proven lower
    bound, and the gap between them (``GAPS``). A cell is empty if there is no such value."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        found.setdefault(row.case, []).append(row)
    lines = []
    for instance, runs in sorted(found.items()):
        scored = [row for row in runs if row.step_ns is not None]
        best = min(scored, key=lambda row: (row.step_ns, row.key), default=None)
        # of plans: a bound of all plans holds where one of plans with one mesh does not
        bounded = max(runs, key=lambda row: (row.bound_method == ANY_MESHES, row.lower_bound_ns or 0))
        time, bound = best and best.step_ns, bounded.lower_bound_ns
        lines.append(
            dict(
                zip(
                    GAPS,
                    (
                        *instance,
                        best.entry if best else "",
                        f"{time / 1e6:.3f}" if time else "",
                        f"{bound / 1e6:.3f}" if bound else "",
                        bounded.bound_method,
                        f"{time / bound - 1:.1%}" if time and bound else "",
                    ),
                    strict=True,
                )
            )
        )
    return lines


def write(out: Path, rows: list[Row]) -> None:
    """Write ``leaderboard.csv`` and ``ranking.csv`` of a result folder."""
    write_csv(out / "leaderboard.csv", LEADERBOARD, leaderboard(rows))
    write_csv(out / "ranking.csv", RANKING, ranking(rows))


def compare(left: Path, right: Path) -> list[dict[str, str]]:
    """The runs whose score, status or problem differs between the result folders ``left`` and ``right``.

    ``change`` is the step time of ``right`` over that of ``left``, minus one.
    """
    before, after = ({row.key: row for row in map(as_row, read_folder(folder))} for folder in (left, right))
    if not before.keys() & after.keys():
        raise InvalidInput(f"has no run in common with {right}", source=left)
    lines = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        run = old or new
        verdict = _verdict(old, new)
        if verdict == "same":
            continue
        lines.append(
            {
                "workload": run.workload,
                "topology": run.topology,
                "placer": run.entry,
                "budget": run.budget,
                "seed": str(run.seed),
                "before": _shown(old),
                "after": _shown(new),
                "change": _quotient(new and new.step_ns, old and old.step_ns, lambda value: value - 1),
                "verdict": verdict,
            }
        )
    return lines


def _verdict(old: Row | None, new: Row | None) -> str:
    if old is None or new is None:
        return "only after" if old is None else "only before"
    if (old.fingerprint, old.cost_hash) != (new.fingerprint, new.cost_hash):
        return "another problem"
    if old.step_ns != new.step_ns:
        if old.step_ns is None or new.step_ns is None:
            return "worse" if new.step_ns is None else "better"
        return "worse" if new.step_ns > old.step_ns else "better"
    if old.status != new.status:
        return f"{old.status} -> {new.status}"
    answer = "plan" if old.objective == "plan" else "placement"
    return "same" if old.placement == new.placement else f"another {answer}"


def _shown(row: Row | None) -> str:
    if row is None:
        return ""
    if row.step_ns is not None:
        return seconds_text(row.step_ns)
    return "oom" if row.status == "ok" else row.status


def _quotient(above: int | None, below: int | None, change: Callable[[float], float] = float) -> str:
    return f"{change(above / below):.4f}" if above is not None and below else ""


def _whole(value) -> int | None:
    return None if pd.isna(value) else int(value)


def _text(value) -> str:
    return "" if pd.isna(value) else str(value)
