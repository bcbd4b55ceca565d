"""Kept captures: read back, refused where they were altered, and made anew where nothing may be trusted."""

import gzip
import os

import pytest

from simdev.errors import InvalidInput
from simdev.files import private
from simdev.parallel.capture import kept
from simdev.parallel.program import Segment


@pytest.fixture
def stored(monkeypatch, tmp_path):
    """A kept stage without calls, and its file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept.save("name", [Segment("forward", (), 7)], {"parameters": 3})
    return kept.folder() / "name.json.gz"


def test_a_stage_is_read_back(stored):
    assert kept.load("name") == {"parameters": 3, "segments": [Segment("forward", (), 7)]}
    assert kept.load("other") is None


@pytest.mark.parametrize("old, new", [(b'"parameters":3', b'"parameters":0'), (b",7,", b",8,"), (b"\n", b" ")])
def test_an_altered_file_is_captured_anew(stored, old, new):
    text = gzip.decompress(stored.read_bytes())
    assert old in text
    stored.write_bytes(gzip.compress(text.replace(old, new)))
    assert kept.load("name") is None


def test_the_file_of_another_capture_is_captured_anew(stored):
    stored.rename(stored.with_name("other.json.gz"))
    assert kept.load("other") is None


def test_apart_nothing_older_is_loaded(stored):
    with kept.apart():
        assert kept.load("name") is None
        kept.save("name", [], {"parameters": 4})
        assert kept.load("name") == {"parameters": 4, "segments": []}
        place = kept.folder()
    assert not place.exists() and kept.load("name")["parameters"] == 3


def test_a_cache_that_others_can_write_to_is_refused(stored):
    os.chmod(stored.parent, 0o777)
    with pytest.raises(InvalidInput, match="captures: other users can write"):
        kept.load("name")
    os.chmod(stored.parent, 0o755)
    assert private(stored.parent) == stored.parent
