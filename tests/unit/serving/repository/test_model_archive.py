"""Archives that somebody else has made: nothing leaves the folder, and nothing is left of them."""

from __future__ import annotations

import gzip
import io
import pathlib
import tarfile

import pytest
from tiny_models import archive

from nanotf.errors import InvalidArgumentError
from nanotf.sagemaker.jobs import archives
from nanotf.serving.repository import model_archive

File, Folder, Link, Hard = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
Member = tuple[str, bytes, str | bytes]  # name, type, content or target


def _member(name: str, kind: bytes, content: str | bytes) -> tuple[tarfile.TarInfo, io.BytesIO]:
    info = tarfile.TarInfo(name)
    info.type = kind
    if isinstance(content, str):
        info.linkname, content = content, b""
    info.size = len(content)
    return info, io.BytesIO(content)


def _archive(path: pathlib.Path, members: list[Member]) -> pathlib.Path:
    with tarfile.open(path, "w:gz") as tar:
        for each in members:
            tar.addfile(*_member(*each))
    return path


@pytest.fixture
def place(tmp_path: pathlib.Path) -> pathlib.Path:
    """Returns the folder to unpack into. Only it may have new files."""
    folder = tmp_path / "outer" / "private"
    folder.mkdir(parents=True)
    return folder


def _refused(path: pathlib.Path, place: pathlib.Path, text: str, limit: int = 1 << 20) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        model_archive.unpack(path, place, limit)
    assert list(place.parent.rglob("*")) == [place]


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ([("../x", File, b"w")], "leads out"),
        ([("a/../../x", File, b"w")], "leads out"),
        ([("a", Folder, b""), ("a/../x", File, b"w")], "upward"),
        ([("/etc/x", File, b"w")], "leads out"),
        ([("x", Link, "/etc/passwd")], "absolute"),
        ([("x", Link, "../../x")], "outside"),
        ([("x", Hard, "../x")], "leads out"),
        ([("x", Hard, "/etc/passwd")], "leads out"),
        ([("x", Hard, "nothing")], "no file"),
        ([("x", Link, "nothing")], "No such file"),
        ([("x", Link, "x")], "symlink loop|symbolic links"),
        ([("x", tarfile.CHRTYPE, b"")], "special"),
        ([("x", tarfile.BLKTYPE, b"")], "special"),
        ([("x", tarfile.FIFOTYPE, b"")], "special"),
        ([("a", File, b""), ("a/b", File, b"")], "NotADirectory|FileExists"),
        # A link to a folder, and a file or link that would go through it.
        ([("a", Folder, b""), ("b", Link, "a"), ("b/c", Link, "../x")], "behind a link|Exists"),
        ([("x" * 300, File, b"")], "name too long"),
    ],
)
def test_hostile_members(
    tmp_path: pathlib.Path, place: pathlib.Path, members: list[Member], text: str
) -> None:
    path = _archive(tmp_path / "m.tar.gz", [("good", File, b"w"), *members])
    _refused(path, place, f"(?i){text}")


def test_no_file_is_written_through_a_link(tmp_path: pathlib.Path, place: pathlib.Path) -> None:
    """Chains of links with long names lead older filters astray: CVE-2025-4517."""
    members: list[Member] = []
    prefix = ""
    for letter in "abcdefghijklmnop":
        members.append((f"{prefix}{'d' * 247}", Folder, b""))
        members.append((f"{prefix}{letter}", Link, "d" * 247))
        prefix += f"{letter}/"
    members.append((f"{prefix}{'l' * 254}", Link, "../" * 16))
    members.append(("escape", Link, f"{prefix}{'l' * 254}/../../../.."))
    members.append(("escape/outer/stolen", File, b"w"))
    path = _archive(tmp_path / "m.tar.gz", members)
    _refused(path, place, "MODEL")


def test_links_and_names_that_come_twice(tmp_path: pathlib.Path, place: pathlib.Path) -> None:
    """Archives of several hosts' output have names twice; the later member counts."""
    members: list[Member] = [
        *[("3", Folder, b""), ("3/x", File, b"old"), ("3/x", File, b"new")],
        *[("latest", Link, "3"), ("3/y", Hard, "3/x"), ("3/z", File, b"z"), ("3/z", Link, "x")],
    ]
    root = model_archive.unpack(_archive(tmp_path / "m.tar.gz", members), place)
    assert [(root / name).read_text() for name in ("3/x", "3/y", "3/z", "latest/x")] == ["new"] * 4
    assert (root / "latest").is_symlink()
    assert root.stat().st_mode & 0o077 == 0


def test_bombs(tmp_path: pathlib.Path, place: pathlib.Path) -> None:
    big = archive(tmp_path / "big.tar.gz", {"zeros": bytes(3 << 20)})
    assert big.stat().st_size < 10_000
    _refused(big, place, "more than 1,048,576 bytes", limit=1 << 20)
    assert (model_archive.unpack(big, place, 3 << 20) / "zeros").stat().st_size == 3 << 20


def test_many_small_files_are_a_bomb(
    tmp_path: pathlib.Path, place: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_archive, "_MEMBERS", 50)
    path = archive(tmp_path / "m.tar.gz", {f"{n}.txt": b"" for n in range(51)})
    _refused(path, place, "50 members")


def test_content_after_the_end_is_a_bomb(
    tmp_path: pathlib.Path, place: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_archive, "_MEMBERS", 50)
    path = archive(tmp_path / "m.tar.gz", {"x": b"x"})
    with gzip.open(path) as stream:
        data = stream.read()
    with gzip.open(path, "wb") as stream:
        stream.write(data + bytes(20 << 20))
    _refused(path, place, "more content")


def test_a_long_header_is_not_held_in_memory(tmp_path: pathlib.Path, place: pathlib.Path) -> None:
    info = tarfile.TarInfo("header")
    info.type, info.size = tarfile.XHDTYPE, 1 << 40
    path = tmp_path / "m.tar.gz"
    with gzip.open(path, "wb") as stream:
        stream.write(info.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20))
    _refused(path, place, "a header of 1,099,511,627,776 bytes")


def test_a_member_that_claims_more_than_there_is(
    tmp_path: pathlib.Path, place: pathlib.Path
) -> None:
    info = tarfile.TarInfo("x")
    info.size = 5000
    path = tmp_path / "m.tar.gz"
    with gzip.open(path, "wb") as stream:
        stream.write(info.tobuf() + b"short")
    _refused(path, place, "unexpected end of data")


def test_archives_that_are_not_whole(tmp_path: pathlib.Path, place: pathlib.Path) -> None:
    path = archive(tmp_path / "m.tar.gz", {"a": bytes(range(256)) * 40, "b": b"b" * 3000})
    data = path.read_bytes()
    for length in range(0, len(data), 5):
        path.write_bytes(data[:length])
        _refused(path, place, "Received: .*m.tar.gz")
    path.write_bytes(data[:-6] + b"\1" + data[-5:])  # its checksum
    _refused(path, place, "CRC|Incorrect length")
    path.write_bytes(b"PK\3\4" + data)
    _refused(path, place, "not compressed by gzip")


def test_damaged_archives(tmp_path: pathlib.Path, place: pathlib.Path) -> None:
    """An archive with any byte of a header changed is unpacked or refused."""
    path = archive(tmp_path / "m.tar.gz", {"a": b"content"})
    with gzip.open(path) as stream:
        data = stream.read()
    for byte in range(0, 512, 5):
        for value in (0, 0x2F, 0x80, 0xFF):
            changed = bytearray(data[:1024])
            changed[byte] = value
            changed[148:156] = b"%06o\0 " % (sum(changed[:148]) + sum(changed[156:512]) + 8 * 32)
            with gzip.open(path, "wb", compresslevel=0) as stream:
                stream.write(changed + bytes(1024))
            try:
                model_archive.unpack(path, place, 1 << 20)
            except InvalidArgumentError:
                continue
    assert list(place.parent.iterdir()) == [place]
    assert {each.name for each in tmp_path.iterdir()} == {"m.tar.gz", "outer"}


def test_a_python_without_the_filter(
    tmp_path: pathlib.Path, place: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(tarfile, "data_filter")
    path = archive(tmp_path / "m.tar.gz", {"a": b""})
    _refused(path, place, r"3\.10\.12, 3\.11\.4, or later\. Received: Python")


def test_an_archive_of_a_job(tmp_path: pathlib.Path, place: pathlib.Path) -> None:
    made = tmp_path / "model"
    (made / "1").mkdir(parents=True)
    (made / "1" / "x").write_bytes(b"x")
    (made / "1" / "y").hardlink_to(made / "1" / "x")
    assert archives.pack([made, made], tmp_path / "model.tar.gz")
    root = model_archive.unpack(tmp_path / "model.tar.gz", place)
    assert sorted(path.name for path in root.rglob("*")) == ["1", "x", "y"]
    assert (root / "1" / "y").read_bytes() == b"x"
