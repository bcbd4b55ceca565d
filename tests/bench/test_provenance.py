from importlib.metadata import distribution

from simdev.bench import provenance


def test_versions_name_every_library_that_is_installed_and_decides_a_row():
    found = dict(part.split("=") for part in provenance.versions().split())
    for package in (
        "python",
        "simdev",
        "numpy",
        "numba",
        "jax",
        "jaxlib",
        "optax",
        "equinox",
        "ortools",
        "pymetis",
        "pyscotch",
    ):
        assert package == "python" or found[package] == distribution(package).version
    assert all(found.values())


def test_uncommitted_changes_are_a_warning(monkeypatch):
    for commit, warned in (("abc", False), ("", False), ("abc-dirty", True)):
        monkeypatch.setattr(provenance, "commit", lambda commit=commit: commit)
        assert bool(provenance.dirty()) == warned


def test_origins_count_states_of_the_code_and_uncommitted_ones():
    assert provenance.origins(["a1", "a1"]) == "2 rows from 1 state of the code"
    found = provenance.origins(["a1", "b2-dirty", "b2-dirty"])
    assert found == "3 rows from 2 states of the code; 2 of them made with uncommitted changes"
