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


def test_a_machine_names_the_widest_vector_set(monkeypatch):
    assert provenance.vector_set("fpu sse4_2 avx avx2 fma avx512f") == "AVX-512"
    assert provenance.vector_set("fpu sse4_2 avx avx2") == "AVX2"
    assert provenance.vector_set("fp asimd") == "NEON" and provenance.vector_set("") == ""
    text = "processor\t: 0\nmodel name\t: Abacus 2\nflags\t\t: sse4_2 avx2 fma\n\nprocessor\t: 1\nmodel name\t: Other\n"
    monkeypatch.setattr(provenance.Path, "read_text", lambda *_, **__: text)
    provenance.machine.cache_clear()
    assert provenance.machine().startswith("Abacus 2 [AVX2 with FMA], ")
    provenance.machine.cache_clear()


def test_what_differs_between_two_processors():
    new, narrow = "Abacus 2 [AVX-512], 4 cores, Linux", "Abacus 2 [AVX2], 2 cores, Linux"
    assert provenance.differing_processor(new, new.replace("4", "8")) == ""
    assert provenance.differing_processor("Abacus 2, 4 cores, Linux", new) == ""  # a cell of version 0.1.0
    assert provenance.differing_processor(narrow, new) == "AVX2, here AVX-512"
    assert provenance.differing_processor("Abacus 1, 1 cores, Linux", new) == "Abacus 1, here Abacus 2 with AVX-512"
