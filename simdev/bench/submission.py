"""Submissions: pack results into an archive, and unpack an archive for verification without running its code."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from simdev.bench import stored
from simdev.bench.journal import Results
from simdev.bench.matrix import DEFAULT_RULES, Run, parse_rules
from simdev.bench.plan_rows import PLANS, TABLES, as_row, read_folder
from simdev.bench.provenance import circumstances
from simdev.bench.release import PACKAGE, SHEET, data_sheet, package
from simdev.bench.rows import RESULTS, Row
from simdev.bench.run import Instance, blank_row, score
from simdev.errors import InvalidInput
from simdev.files import MAX_DOCUMENT, MAX_TOML, MIB, Bounded, open_zip, read_bytes, replacing
from simdev.problem.placement import Placement
from simdev.problem.placement_file import FILE as PLACEMENTS
from simdev.problem.placement_file import packed_text
from simdev.problem.problem import Problem

MEMBER = re.compile(
    r"(results|leaderboard|ranking|curves|plans|plan_curves)\.csv|plans\.md|datapackage\.json|DATASHEET\.md|placements\.jsonl|placements/[0-9a-f]{1,64}\.npz|graphs/[0-9a-f]{1,64}\.npz"
    r"|machines/[0-9a-f]{1,64}\.(toml|npz)"
)
MAX_MEMBERS = 50_000
MAX_UNPACKED = 1 << 30
MOST_BYTES = {
    ".csv": MAX_DOCUMENT,
    ".json": MAX_DOCUMENT,
    ".jsonl": MAX_DOCUMENT,
    ".md": MAX_TOML,
    ".npz": 64 * MIB,
    ".toml": MAX_TOML,
}  # of one file, by the end of its name
NAME = re.compile(r"[a-z][a-z0-9-]{0,63}")


def submit(folder: str | os.PathLike, out: str | os.PathLike, *, name: str = "", release: bool = False) -> int:
    """Pack a result folder, or a folder of placement files (JSON, as ``simdev place`` writes them) made by a placer
    called ``name``, into the archive ``out``. Returns the number of rows.

    A ``release`` also holds checksums, a schema and a data sheet (:mod:`simdev.bench.release`). Raises
    :class:`InvalidInput` if the folder cannot be read or lacks a file that its rows need.
    """
    folder = Path(folder)
    if any((folder / schema.file).is_file() for schema in (RESULTS, PLANS)):
        return _pack(folder, out, release)
    files = sorted(folder.glob("*.json"))
    if not files:
        raise InvalidInput("holds neither results.csv nor plans.csv nor placement files (*.json)", source=folder)
    if not NAME.fullmatch(name):
        raise InvalidInput(f"{name!r} is not a name of small letters, digits and hyphens", source="--name")
    with tempfile.TemporaryDirectory(prefix="simdev-") as scratch:
        _score_files(files, name, Path(scratch))
        return _pack(Path(scratch), out, release)


def _score_files(files: list[Path], name: str, out: Path) -> None:
    """Simulate the placement of each file and write the rows as a result folder into ``out``."""
    from simdev.analysis.bounds import lower_bound
    from simdev.sim import simulate

    results = Results(out)
    for path in files:
        workload, topology = stored.named_in(path)
        run = Run(workload, topology, DEFAULT_RULES, name, "{}", "evaluations=0", 0)
        if results.row(run.key) is not None:
            raise InvalidInput(f"a second placement of {workload} on {topology}", source=path)
        problem = Problem.build(
            stored.registered_workload(workload), stored.registered_machine(topology), rules=parse_rules(DEFAULT_RULES)
        )
        placement = Placement.load(path, problem)
        bound = lower_bound(problem)
        instance = Instance(
            workload,
            topology,
            DEFAULT_RULES,
            problem.graph.fingerprint,
            problem.costs.hash,
            problem.graph.n_ops,
            bound_ns=int(bound.ns),
            bound_method=str(bound.method),
        )
        row = score(blank_row(run, instance, 1), problem, placement, simulate(problem, placement))
        results.add(replace(row, evaluations=0, **circumstances()), placement, ())
    results.write()
    results.pack()
    results.close()


def _pack(folder: Path, out: str | os.PathLike, release: bool) -> int:
    found = read_folder(folder)
    placed = [row for row in found if isinstance(row, Row)]
    wanted = ["results.csv", "leaderboard.csv", "ranking.csv", "curves.csv"] if placed else []
    wanted += [PLANS.file, TABLES] if len(placed) < len(found) else []
    wanted += ["plan_curves.csv"] if (folder / "plan_curves.csv").is_file() else []
    wanted += sorted(path.relative_to(folder).as_posix() for path in folder.glob("graphs/*.npz"))
    wanted += sorted(path.relative_to(folder).as_posix() for path in folder.glob("machines/*"))
    for name in wanted:
        if not (folder / name).is_file():
            raise InvalidInput("is missing", source=folder / name)
    members = {name: read_bytes(folder / name, MOST_BYTES[Path(name).suffix]) for name in wanted}
    if placed:
        members[PLACEMENTS] = packed_text(folder, {row.placement for row in placed if row.placement})
    if release:
        members[PACKAGE] = (json.dumps(package(folder.name, members), indent=1) + "\n").encode()
        members[SHEET] = data_sheet(list(map(as_row, found))).encode()
    with replacing(out) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():  # members without a date: the same rows give the same archive
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
    return len(found)


@contextlib.contextmanager
def unpacked(archive: str | os.PathLike) -> Iterator[Path]:
    """The files of a submission in a folder that is removed afterwards.

    Raises :class:`InvalidInput` if the archive is not a zip file, holds anything but results (paths out of the folder,
    links, programs), names a file twice, or unpacks to more than :data:`MOST_BYTES` in one file or
    :data:`MAX_UNPACKED` in total. The sizes are counted during unpacking; the sizes in the archive are not trusted.
    """
    with tempfile.TemporaryDirectory(prefix="simdev-") as scratch:
        with open_zip(archive) as found:
            members = found.infolist()
            _check(members, archive)
            left = MAX_UNPACKED
            for member in members:
                target = Path(scratch) / member.filename
                target.parent.mkdir(exist_ok=True)
                left -= _unpack(found, member, target, min(left, MOST_BYTES[target.suffix]), archive)
        yield Path(scratch)


def _unpack(found: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path, most: int, archive) -> int:
    """Write one member to ``target`` and return its size. Raises :class:`InvalidInput` if it exceeds ``most`` bytes."""
    with found.open(member) as source, open(target, "wb") as file:
        bounded = Bounded(source, most, f"{archive}: {member.filename}")
        shutil.copyfileobj(bounded, file)
        return file.tell()


def _check(members: list[zipfile.ZipInfo], archive) -> None:
    if len(members) > MAX_MEMBERS:
        raise InvalidInput(f"{len(members)} members are too many: refused", source=archive)
    seen = set()
    for member in members:
        name = member.filename
        kind = stat.S_IFMT(member.external_attr >> 16)
        if not MEMBER.fullmatch(name) or kind not in (0, stat.S_IFREG):
            raise InvalidInput(f"holds {name[:100]!r}, which is no part of a submission", source=archive)
        if name in seen:
            raise InvalidInput(f"holds {name!r} twice", source=archive)
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise InvalidInput(f"compression method {member.compress_type} is not used", source=archive, field=name)
        seen.add(name)
    if not seen & {RESULTS.file, PLANS.file}:
        raise InvalidInput(f"holds neither {RESULTS.file} nor {PLANS.file}", source=archive)
