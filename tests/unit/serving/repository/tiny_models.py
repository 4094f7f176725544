"""Models as they lie on disk, made without TensorFlow: a few bytes in the formats' own words."""

from __future__ import annotations

import io
import pathlib
import struct
import tarfile
import zipfile
from collections.abc import Iterable

from nanotf.serving.repository import Repository, Wanted

_MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)


def varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def block(entries: Iterable[tuple[bytes, bytes]]) -> bytes:
    data, last = b"", b""
    for key, value in entries:
        shared = 0
        while shared < min(len(last), len(key)) and last[shared] == key[shared]:
            shared += 1
        lengths = varint(shared) + varint(len(key) - shared) + varint(len(value))
        data += lengths + key[shared:] + value
        last = key
    return data + struct.pack("<II", 0, 1)


def table(entries: list[tuple[bytes, bytes]], per_block: int = 2) -> bytes:
    """A LevelDB table, as the index of a bundle is."""
    data, handles = b"", []
    for start in range(0, len(entries), per_block):
        part = block(entries[start : start + per_block])
        handles.append((entries[start][0], varint(len(data)) + varint(len(part))))
        data += part + b"\0CRC4"
    ends = []
    for part in (block([]), block(handles)):
        ends.append(varint(len(data)) + varint(len(part)))
        data += part + b"\0CRC4"
    return data + b"".join(ends).ljust(40, b"\0") + _MAGIC


def index(sizes: list[int]) -> bytes:
    """The index of variables of which each data file holds two, with sizes in bytes in all."""
    entries = [(b"", field(1, len(sizes)) + field(3, field(1, 1)))]
    for shard, size in enumerate(sizes):
        first = field(1, 1) + field(3, shard) + field(5, size // 2)
        rest = field(1, 1) + field(3, shard) + field(4, size // 2) + field(5, size - size // 2)
        entries += [(f"layer/{shard}/a".encode(), first), (f"layer/{shard}/b".encode(), rest)]
    return table(entries)


def saved_model_files(sizes: list[int], assets: Iterable[str] = ()) -> dict[str, bytes]:
    """The files of a SavedModel, by name, in the order in which TensorFlow writes them."""
    graph = field(2, b"\x0a" + varint(200) + b"n" * 200)
    graph += b"".join(field(6, field(2, name.encode())) for name in assets)
    graph += field(7, b"objects")
    files = {f"assets/{name}": b"words" for name in assets}
    for shard, size in enumerate(sizes):
        files[f"variables/variables.data-{shard:05}-of-{len(sizes):05}"] = b"w" * size
    files["variables/variables.index"] = index(sizes)
    files["saved_model.pb"] = field(1, 1) + field(2, graph)
    return files


def write(folder: pathlib.Path, files: dict[str, bytes]) -> pathlib.Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def saved_model(folder: pathlib.Path, size: int = 100) -> pathlib.Path:
    return write(folder, saved_model_files([size]))


def keras_bytes() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("metadata.json", "{}")
        archive.writestr("config.json", "{}")
        archive.writestr("model.weights.h5", b"w" * 300)
    return data.getvalue()


def hdf5_bytes(length: int = 800) -> bytes:
    """The beginning of an HDF5 file as h5py writes it, and its length."""
    head = b"\x89HDF\r\n\x1a\n" + bytes([0, 0, 0, 0, 0, 8, 8, 0]) + struct.pack("<HHI", 4, 16, 0)
    head += struct.pack("<QQQQ", 0, 2**64 - 1, length, 2**64 - 1)
    return head.ljust(length, b"\0")


def archive(path: pathlib.Path, files: dict[str, bytes]) -> pathlib.Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def prefixed(prefix: str, files: dict[str, bytes]) -> dict[str, bytes]:
    return {f"{prefix}/{name}": data for name, data in files.items()}


def numbers(wanted: Wanted, model: str | None = None) -> list[int]:
    return sorted(v.number for v in wanted.versions if model in (None, v.model))


def settled(repository: Repository) -> Wanted:
    repository.look()
    return repository.look()


def tick(folder: pathlib.Path) -> None:
    """Returns once the file system's clock has advanced; some count in steps of milliseconds."""
    probe, times = folder / ".probe", set()
    while len(times) < 2:
        probe.write_bytes(b"")
        times.add(probe.stat().st_ctime_ns)
        probe.unlink()
