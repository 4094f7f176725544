"""Damages the files that nanotf writes, and reads them: each reader must say so in its own words.

A valid file is made once for each reader. Each input is that file with a few changes: bits, cuts,
parts of itself in other places and, in JSON, other values, deep nesting and long numbers. Where a
checksum guards the content, half of the inputs have the right one: what wrote it may have been
another program, or a broken one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import pathlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from nanotf.errors import NanoError
from nanotf.machine import shell_state
from nanotf.parent.auto import choice_cache
from nanotf.parent.resume.resumption import Resumption
from nanotf.parent.resume.store import OWN, Folder
from nanotf.pool.hosts import secret
from nanotf.sagemaker.detached.folders import now
from nanotf.sagemaker.detached.owner import Owner
from nanotf.sagemaker.jobs import follow, hyperparameters, metrics, record, script_variables
from nanotf.sagemaker.jobs.record import JobFolder, JobRequest, JobState
from nanotf.sagemaker.jobs.source import SourceCode
from nanotf.sagemaker.jobs.tree import Tree
from nanotf.sagemaker.pipes.channel_feeder import as_record
from nanotf.sagemaker.pipes.pipe_files import take_index
from nanotf.sagemaker.pipes.records import RecordReader
from nanotf.wire import files


@dataclasses.dataclass(frozen=True)
class Reader:
    """A reader of a file.

    Args:
        name: str.
        file: `pathlib.Path` of the file.
        valid: bytes, what nanotf has written.
        read: callable, reads the file; raises nothing but `NanoError` and `OSError`.
        sign: callable of damaged bytes, returns them with the right checksum; None for none.
    """

    name: str
    file: pathlib.Path
    valid: bytes
    read: Callable[[], object]
    sign: Callable[[bytes], bytes] | None = None


_VALUES: list[Any] = [
    *(
        None,
        True,
        -1,
        0,
        2**70,
        1.5,
        float("nan"),
        "",
        "text",
        "\0",
        "9" * 50,
        [],
        {},
        [[]],
        {"": 0},
    ),
    *([1] * 1000, {"sha256": 1}, "a/../b", -(10**30), 1e308),
]


def _in_json(value: Any, draw: random.Random) -> Any:
    """Returns a JSON value with a change somewhere inside."""
    if isinstance(value, (dict, list)) and value and draw.random() < 0.85:
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        place = draw.choice(places)
        found: Any = dict(value) if isinstance(value, dict) else list(value)
        if draw.random() < 0.15:
            del found[place]
        else:
            found[place] = _in_json(value[place], draw)
        return found
    return draw.choice(_VALUES)


def damaged(valid: bytes, draw: random.Random) -> bytes:
    """Returns bytes with a few changes."""
    try:
        value = json.loads(valid)
    except ValueError:
        value = None
    if value is not None and draw.random() < 0.6:
        for _ in range(draw.randint(1, 3)):
            value = _in_json(value, draw)
        text = json.dumps(value)
        if draw.random() < 0.1:
            deep = "[" * 50_000 + "]" * 50_000
            text = text.replace("null", draw.choice([deep, "9" * 5000, "1e999"]), 1)
        return text.encode()
    content = bytearray(valid)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(content) + 1)
        kind = draw.randrange(5)
        if kind == 0 and at < len(content):
            content[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del content[at:]
        elif kind == 2:
            content[at:at] = draw.randbytes(draw.choice([1, 4, 64]))
        elif kind == 3:
            del content[at : at + draw.choice([1, 8, 100])]
        else:
            other = draw.randrange(len(content) + 1)
            content[at : at + 16] = content[other : other + 16]
    return bytes(content)


def readers(folder: pathlib.Path) -> list[Reader]:
    """Returns all readers, with valid files in a folder."""
    return [
        *_of_checkpoints(folder / "resume"),
        *_of_jobs(folder / "jobs"),
        *_of_records(),
        _of_measurements(folder / "cache"),
        _of_file(folder / "secret", bytes(32), lambda path: secret._of_home(path)),
        _of_file(folder / ".train-pipe_mode-state", b"7", lambda path: take_index("train", folder)),
        _of_file(folder / "env", _shell_state().encode(), _read_shell_state),
    ]


def _of_file(path: pathlib.Path, valid: bytes, read: Callable[[pathlib.Path], object]) -> Reader:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    return Reader(path.name, path, valid, lambda: read(path))


def _shell_state() -> str:
    options = shell_state.Options()
    return shell_state.ShellState(options, {"TF_X": "1"}, {"TF_X": None}).dump()


def _read_shell_state(path: pathlib.Path) -> object:
    text = path.read_bytes().decode(errors="surrogateescape").replace("\0", "")
    return shell_state.read_state({shell_state.STATE_VARIABLE: text})


# ------------------------------------------------------------------------------- checkpoints
FACTS = {
    "optimizer": ["SGD"],
    "variables": [["kernel", [3], "<f8"]],
    "metrics": [["total", [], "<f4"]],
    "data": {"rows": 10},
}


def _of_checkpoints(folder: pathlib.Path) -> list[Reader]:
    kept = Folder(folder)
    best = [["best", {"array": "callbacks/0", "dtype": "<f8"}]]
    manifest = {
        "versions": {"nanotf": "0"},
        "facts": FACTS,
        "order_seed": [1, True],
        "epoch": 1,
        "step": 2,
        "stop": False,
        "finished": False,
        "logs": {"dict": [["loss", 1.0]]},
        "chance": {"tuple": [{"dict": []}, None, {"tuple": []}]},
        "reading": None,
        "callbacks": {"dict": [["0", {"dict": best}]]},
    }
    arrays = {
        "variables/0": np.arange(3.0),
        "metrics/0": np.float32(1.0),
        "callbacks/0": np.ones(2),
    }
    for _ in range(2):
        kept.write(manifest, arrays)
    newest = max((folder / OWN).glob("checkpoint-*"))
    content_of_arrays = (newest / "arrays.npz").read_bytes()

    def read() -> object:
        resumption = Resumption.__new__(Resumption)
        resumption._folder, resumption._facts, resumption._epochs = kept, FACTS, 5
        resumption.moment = None
        resumption._take_newest()
        assert resumption.moment is not None, "the checkpoint before is whole"
        return resumption

    def sign_arrays(content: bytes) -> bytes:
        whole = json.loads((newest / "manifest.json").read_text())
        whole["content"]["sha256"] = _sha256(content)
        (newest / "manifest.json").write_bytes(_signed(json.dumps(whole).encode()))
        return content

    valid = (newest / "manifest.json").read_bytes()
    return [
        Reader("manifest.json", newest / "manifest.json", valid, read, _signed),
        Reader("arrays.npz", newest / "arrays.npz", content_of_arrays, read, sign_arrays),
    ]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _signed(content: bytes) -> bytes:
    try:
        whole = json.loads(content)
        text = json.dumps(whole["content"], sort_keys=True)
        return json.dumps({"sha256": _sha256(text.encode()), "content": whole["content"]}).encode()
    except Exception:  # no manifest any more: nothing to sign
        return content


# -------------------------------------------------------------------------------------- jobs
def _of_jobs(folder: pathlib.Path) -> list[Reader]:
    found = JobFolder(folder / "a")
    found.path.mkdir(parents=True)
    found.write_state(JobState(record.IN_PROGRESS, "Training", Owner.this_process(), now()))
    found.write_request(JobRequest("a", SourceCode("train.py"), {"lr": 0.1}, num_processes="2"))
    line = {"name": "loss", "value": 0.5, "time": now(), "host": "algo-1"}
    found.metrics.write_text(f"{json.dumps(line)}\n" * 3)
    tree = Tree(folder / "tree")
    tree.make()
    files.write_json(tree.hyperparameters, hyperparameters.encode({"lr": 0.1, "b": [1, {"c": 2}]}))
    files.write_json(tree.resources, script_variables.resource_config(["algo-1"], "algo-1"))
    files.write_json(tree.input_data, {"train": {"TrainingInputMode": "File"}})

    def describe() -> object:
        return script_variables.variables(tree, "a", script_variables.Counts(1, 0))

    reads: dict[pathlib.Path, Callable[[], object]] = {
        found._state: lambda: follow.describe(found),
        found.path / "request.json": lambda: follow.describe(found),
        found.metrics: lambda: metrics.last_values(metrics.read(found.metrics)),
        tree.hyperparameters: describe,
        tree.resources: describe,
        tree.input_data: describe,
    }
    return [Reader(path.name, path, path.read_bytes(), read) for path, read in reads.items()]


# ----------------------------------------------------------------------------- other readers
def _of_measurements(folder: pathlib.Path) -> Reader:
    measured = [{"num_processes": n, "step": 0.1} for n in (1, 2)]
    choice_cache.remember("key", {"measured": measured, "date": "2026-01-01", "model": "m"})
    path = choice_cache.path()
    return Reader(path.name, path, path.read_bytes(), choice_cache.entries)


def _of_records() -> list[Reader]:
    path = pathlib.Path(choice_cache.path().parent, "records")
    record = b"".join(as_record(io.BytesIO(b"abcde")))

    def read(kind: str) -> Callable[[], object]:
        def batches() -> object:
            with path.open("rb") as file:
                return list(RecordReader(path.name, file.fileno(), kind, 3).batches())

        return batches

    return [
        Reader("RecordIO", path, record * 20, read("RecordIO")),
        Reader("TFRecord", path, _tfrecords(), read("TFRecord")),
    ]


def _tfrecords() -> bytes:
    import tensorflow as tf

    path = pathlib.Path(choice_cache.path().parent, "made.tfrecord")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in range(10):
            writer.write(b"x" * number)
    return path.read_bytes()


def run(reader: Reader, count: int, seed: int) -> None:
    """Reads damaged inputs.

    Raises:
        AssertionError: One of them raised something else than it should; has its seed.
    """
    reader.file.write_bytes(reader.valid)
    reader.read()
    beside = {p: p.read_bytes() for p in reader.file.parent.glob("*.json")}
    for number in range(seed, seed + count):
        draw = random.Random(number)
        content = damaged(reader.valid, draw)
        if reader.sign is not None and draw.random() < 0.5:
            content = reader.sign(content)
        reader.file.write_bytes(content)
        try:
            reader.read()
        except (NanoError, OSError) as error:
            assert str(error), "it says why"
        except BaseException as error:
            raise AssertionError(
                f"{reader.name}, seed {number}: {type(error).__name__}: {error}\n{content[:500]!r}"
            ) from error
        for path, before in beside.items():
            path.write_bytes(before)
    reader.file.write_bytes(reader.valid)
    reader.read()
