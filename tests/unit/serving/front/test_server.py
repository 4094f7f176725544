"""A server's own duties, without models."""

import asyncio
import errno
import json
import logging
import os

import pytest

pytest.importorskip("httptools")

from nanotf.serving.front import server
from nanotf.wire import files


def test_the_ready_file_waits_for_room(tmp_path, monkeypatch, caplog):
    """A server that a supervisor has started again must not end for it."""
    write, tries = files.write_json, []

    def full_at_first(path, value):
        tries.append(path)
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, value)

    monkeypatch.setattr(server, "_TICK", 0.0)
    monkeypatch.setattr(files, "write_json", full_at_first)
    with caplog.at_level(logging.WARNING, "nanotf"):
        asyncio.run(server.write_ready(tmp_path / "ready.json", {"port": 1}))
    assert json.loads((tmp_path / "ready.json").read_text()) == {"port": 1}
    assert caplog.text.count("The ready file waits for room") == 1


def test_a_ready_file_in_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        asyncio.run(server.write_ready(tmp_path / "no" / "ready.json", {"port": 1}))
