"""The shelf: ids, versions, parameters, entry points and files of the user, the same for all kinds of entries."""

import sys
from types import SimpleNamespace

import pytest

from simdev import shelf
from simdev.errors import InvalidInput, UnknownName
from simdev.graphs import importers, parallel_model, workload
from simdev.parallel import find_model, parallel_models
from simdev.placers import find_placer, find_workload, placer, placers, workloads
from simdev.planners import find_planner, planners
from simdev.planners.planner import SHELF as PLANNERS

FILE = """
from simdev import placer, planner
import beside_{tag}

@placer("mine", version=3, family="test", defaults={{"parts": 3, "share": 0.5, "kind": "a", "deep": False}})
def place(problem, *, rng, budget, **options):
    return {value}

@planner("mine", version=2, family="test", defaults={{"steps": 4}})
def plan(job, *, rng, budget, steps):
    pass
"""
BESIDE = """
from simdev import placer

@placer("beside", version=1, family="test")
def place(problem, *, rng, budget):
    return {value}
"""


@pytest.fixture
def file(tmp_path):
    tag = tmp_path.name.replace("-", "_")
    path = tmp_path / "mine.py"

    def write(value=0, beside=0):
        path.write_text(FILE.format(tag=tag, value=value))
        (tmp_path / f"beside_{tag}.py").write_text(BESIDE.format(value=beside))
        return path

    yield write
    sys.modules.pop(f"beside_{tag}", None)


@pytest.mark.parametrize(
    "entry, found",
    [
        ("gdp", ("gdp", None, {})),
        ("gdp@2[groups=8, policy=here]", ("gdp", 2, {"groups": 8, "policy": "here"})),
        ("a b/m@1.py:gdp@2[x=1]", ("a b/m@1.py:gdp", 2, {"x": 1})),
        ("gdp[policy=m.py:x]", ("gdp", None, {"policy": "m.py:x"})),
        ("gdp[]", ("gdp", None, {})),
    ],
)
def test_ids_are_parsed(entry, found):
    assert shelf.parse_id(entry) == found


@pytest.mark.parametrize("entry", ["", "m.py:", "gdp[", "gdp@x", "gdp[x]", "gdp]["])
def test_what_is_no_id_is_refused(entry):
    with pytest.raises(InvalidInput, match="is not an id|is not param=value"):
        shelf.parse_id(entry)


@pytest.mark.parametrize("entry", ["f" * 256, f"folder/{'f' * 253}.py:name", f"{'é' * 128}[x=1]"])
def test_a_name_that_no_file_may_have_is_refused(entry):
    """Names are looked for on the disk, too."""
    with pytest.raises(InvalidInput, match="longer than a name may be: 255 bytes"):
        shelf.parse_id(entry)
    assert shelf.parse_id(f"{'f' * 200}/{'f' * 255}")


def test_one_file_holds_placers_and_planners_and_leaves_the_shelves_alone(file):
    path = file()
    spec, params = find_placer(f"{path}:mine@3[parts=6,share=1]")
    assert spec.version == 3 and params == {"parts": 6, "share": 1}
    assert find_planner(f"{path}:mine[steps=5]")[1] == {"steps": 5}
    assert find_placer(f"{path}:beside")[0].name == "beside"
    assert find_placer(f"{path}:mine")[0] is spec  # the file is not executed again
    assert not {"mine", "beside"} & {*placers(), *planners()}


def test_a_file_that_changed_is_executed_again(file):
    first = find_placer(f"{file(1, 1)}:mine")[0]
    second = find_placer(f"{file(2, 1)}:mine")[0]
    assert (first.function(0, rng=0, budget=0), second.function(0, rng=0, budget=0)) == (1, 2)
    assert find_placer(f"{file(2, 7)}:beside")[0].function(0, rng=0, budget=0) == 7


@pytest.mark.parametrize(
    "entry, message",
    [
        ("mine@1", "version 1 is not here; this is version 3"),
        ("mine[part=1]", "unknown parameter 'part'.*parts"),
        ("mine[parts=many]", "parts: expected a whole number, got 'many'"),
        ("mine[share=much]", "share: expected a number"),
        ("mine[kind=3]", "kind: expected a name"),
        ("mine[deep=1]", "deep: expected true or false"),
        ("mina", "unknown placer 'mina'; did you mean 'mine'"),
    ],
)
def test_mistakes_name_the_entry(file, entry, message):
    with pytest.raises(InvalidInput, match=message):
        find_placer(f"{file()}:{entry}")


@pytest.mark.parametrize(
    "find, said",
    [
        (find_placer, "registers no placer; put @placer over its function"),
        (find_planner, "registers no planner; put @planner over its function"),
        (find_model, "mine: no such function"),  # a function that is not registered may build a plain step
    ],
)
def test_a_file_that_registers_nothing_is_named(tmp_path, find, said):
    if find is find_model:
        pytest.importorskip("torch")
    (tmp_path / "empty.py").write_text("x = 1")
    with pytest.raises(InvalidInput, match=f"empty.py: {said}"):
        find(f"{tmp_path / 'empty.py'}:mine")
    with pytest.raises(InvalidInput, match="none.py: no such file"):
        find(f"{tmp_path / 'none.py'}:mine")
    (tmp_path / "broken.py").write_text("x = 1\n1 // 0\n")
    with pytest.raises(InvalidInput, match="broken.py: line 2, in <module>: cannot be imported: ZeroDivisionError"):
        find(f"{tmp_path / 'broken.py'}:mine")


def test_what_has_no_version_takes_none():
    with pytest.raises(InvalidInput, match="a workload has no version"):
        find_workload("nmt@2")
    with pytest.raises(InvalidInput, match="a parallel model has no version"):
        find_model("gpt-1.3b@2")


@pytest.mark.parametrize(
    "kept, listing",
    [
        (placer.SHELF, placers),
        (PLANNERS, planners),
        (workload.SHELF, workloads),
        (parallel_model.SHELF, parallel_models),
    ],
)
def test_other_packages_add_entries_through_entry_points(monkeypatch, kept, listing):
    def asked(group):
        def load():
            kept.add(SimpleNamespace(name="of-a-package", function=load))

        def fail():
            raise ImportError("no module named numba")

        points = [SimpleNamespace(name="good", load=load), SimpleNamespace(name="bad", load=fail)]
        return points if group == kept.group else []

    monkeypatch.setattr(shelf, "entry_points", asked)
    monkeypatch.setattr(kept, "_loaded", False)
    try:
        with pytest.warns(UserWarning, match=rf"{kept.group}: bad: ImportError: no module named numba"):
            assert "of-a-package" in listing()
    finally:
        kept.pop("of-a-package", None)
    groups = {"simdev.placers", "simdev.planners", "simdev.workloads", "simdev.models"}
    assert kept.group in groups


def test_a_name_is_registered_once():
    with pytest.raises(InvalidInput, match="placer 'heft' is registered twice"):
        placers() and placer.placer("heft", version=1, family="test")(lambda problem, *, rng, budget: None)


def test_an_importer_is_found_by_its_presence(tmp_path, monkeypatch):
    (tmp_path / "two_columns.py").write_text(
        """
from simdev.graphs.importers import Imported, importer
from simdev.problem.graph import GraphBuilder

@importer("two-columns", detects=lambda data, path: data.startswith(b"two columns"))
def parse(data, path, *, format, device_kind):
    builder = GraphBuilder("mine")
    for line in data.decode().splitlines()[1:]:
        builder.op(*line.split())
    return Imported(builder.build())
"""
    )
    (tmp_path / "graph.two").write_text("two columns\na mm\nb add\n")
    with pytest.raises(InvalidInput, match="not a graph in any known format"):
        importers.import_graph(tmp_path / "graph.two")
    monkeypatch.setattr(importers, "__path__", [*importers.__path__, str(tmp_path)])
    shelf._import_package.cache_clear()
    try:
        assert importers.import_graph(tmp_path / "graph.two").graph.n_ops == 2
    finally:
        importers.SHELF.pop("two-columns", None)
        sys.modules.pop("simdev.graphs.importers.two_columns", None)
    with pytest.raises(UnknownName, match="format 'two-column'"):
        importers.import_graph(tmp_path / "graph.two", "two-column")
