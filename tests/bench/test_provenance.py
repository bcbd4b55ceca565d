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
