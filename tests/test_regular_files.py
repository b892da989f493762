"""Nothing but a regular file is opened: what is none is told at once, and a link to a file is one."""

import os
import socket

import pytest

from lib.errors import DamagedCheckpoint, UserError
from lib.regular_files import check_regular, open_regular


def test_what_is_no_file_is_told_and_never_waited_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    os.mkfifo("fifo")
    os.symlink("fifo", "link")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("socket")
        for name, found in {
            "fifo": "a FIFO", "link": "a FIFO", "socket": "a socket", "/dev/zero": "a device", ".": "a folder",
        }.items():  # fmt: skip
            for read in (check_regular, open_regular):
                with pytest.raises(UserError, match=f"; {name}; found {found}, expected"):
                    read(name)
    with pytest.raises(DamagedCheckpoint):
        open_regular("fifo", error=DamagedCheckpoint)
    with pytest.raises(FileNotFoundError):
        open_regular("nowhere")


def test_a_link_to_a_file_is_a_file(tmp_path):
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        with open_regular(tmp_path / name) as stream:
            assert stream.read() == b"text"
