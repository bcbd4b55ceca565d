"""Errors say where and what in one sentence, suggest names, and cross process borders."""

import pickle

import pytest

from simdev.errors import InvalidInput, SimdevError, UnknownName


def test_the_file_and_the_field_lead():
    error = InvalidInput("is negative", source="a.npz", field="op_flops")
    assert str(error) == "a.npz: op_flops: is negative"
    assert (error.message, error.source, error.field) == ("is negative", "a.npz", "op_flops")
    assert str(InvalidInput("x", field="f")) == "f: x" and str(InvalidInput("x")) == "x"
    assert isinstance(error, SimdevError) and isinstance(error, ValueError)


@pytest.mark.parametrize(
    "name, known, message",
    [
        ("scoth", ["scotch", "heft"], "unknown placer 'scoth'; did you mean 'scotch'?"),
        ("zzz", ["heft", "a"], "unknown placer 'zzz'; known: a, heft"),
        ("zzz", [], "unknown placer 'zzz'"),
    ],
)
def test_unknown_names_suggest_the_nearest(name, known, message):
    assert str(UnknownName("placer", name, known)) == message


@pytest.mark.parametrize("error", [InvalidInput("m", source="s", field="f"), UnknownName("op", "a", ["b"], source="s")])
def test_errors_survive_pickling(error):
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)
    assert (again.source, again.field) == (error.source, error.field)
