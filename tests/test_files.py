import os
import stat

import pytest

from simdev.errors import InvalidInput
from simdev.files import replacing, write_text


def test_a_file_is_replaced_at_the_end(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_an_error_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:
        file.write(b"new")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_link_is_followed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "a.txt")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "a.txt").read_text() == "new"


def test_a_pipe_stays_a_pipe(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_text(path, "new")
    assert os.read(reader, 10) == b"new" and stat.S_ISFIFO(path.stat().st_mode)
    os.close(reader)


@pytest.mark.parametrize("path", ["no/such/folder", "."])
def test_what_cannot_be_written_is_named(tmp_path, path):
    with pytest.raises(InvalidInput, match=str(tmp_path)):
        write_text(tmp_path / path, "new")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_named():
    with pytest.raises(InvalidInput, match="/dev/full: No space left"):
        write_text("/dev/full", "new")
