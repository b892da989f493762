"""A file is written whole or not at all, also where the disk ends in the middle of it."""

import os
import resource

import pytest

from lib.storage.writing import write_whole


def test_a_file_that_cannot_be_written_stays_as_it_was_and_nothing_is_left_beside_it(tmp_path):
    path, limits = tmp_path / "a", resource.getrlimit(resource.RLIMIT_FSIZE)
    write_whole(path, b"old")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_whole(path, bytes(200))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a"]


def test_of_what_stood_under_the_temporary_name_nothing_is_left(tmp_path):
    staged = tmp_path / "room"
    staged.write_bytes(bytes(9000))
    write_whole(tmp_path / "a", b"new", staged=staged)
    assert (tmp_path / "a").read_bytes() == b"new" and os.listdir(tmp_path) == ["a"]


def test_what_somebody_put_at_the_name_until_then_is_never_written_through(tmp_path):
    other, staged = tmp_path / "other", tmp_path / "staged"
    other.write_text("theirs")
    for plant in (lambda: staged.symlink_to(other), lambda: os.link(other, staged), lambda: os.mkfifo(staged)):
        plant()
        with pytest.raises(OSError, match="staged"):
            write_whole(tmp_path / "file", b"ours", staged=staged)
        assert other.read_text() == "theirs" and not (tmp_path / "file").exists() and not os.path.lexists(staged)
    write_whole(tmp_path / "file", b"ours", staged=staged)
    assert (tmp_path / "file").read_bytes() == b"ours"
