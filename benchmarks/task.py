"""A contestant's process: `python -m benchmarks.task SETUP`, a JSON object.

Reads commands from standard input, one JSON object per line, and answers each with a JSON list on
standard output: an object for each rank that it speaks for. Library output goes to standard error.
The process ends at the end of its input, so it does not outlive the benchmark.

Most processes speak for themselves. Under `nanotf run --ranks`, only rank 0 has the driver's pipes.
It tells the other ranks what it reads, and collects their answers.

| command | what it does |
| --- | --- |
| `{"do": "use", "model": NAME, "size": N, ...}` | switches to another model, and N workers |
| `{"do": "prepare", "steps": S}` | makes the data |
| `{"do": "run", "steps": S, "epochs": E, "at": T}` | trains, from `time.monotonic() == T` on |

Environment variables set here: `TF_CPP_MIN_LOG_LEVEL` (2 if unset).
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any


class _Alone:
    """The exchange of a process that speaks for itself."""

    def __init__(self, setup: Any) -> None:
        self.rank = setup["rank"]

    def read(self) -> str:
        """Returns the next command; "" at the end."""
        return sys.stdin.readline()

    def collect(self, answer: Any) -> list:  # type: ignore[type-arg]
        """Returns the answers of all ranks that this process speaks for."""
        return [answer]


class _Ranks(_Alone):
    """The exchange of a rank."""

    def __init__(self, setup: Any) -> None:
        from nanotf import hvd

        hvd.init()
        self.hvd = hvd
        self.rank = hvd.rank()

    def read(self) -> str:
        return str(self.hvd.broadcast_object(super().read() if self.rank == 0 else ""))

    def collect(self, answer: Any) -> list:  # type: ignore[type-arg]
        return list(self.hvd.allgather_object(answer))


def _make(setup: Any, rank: int) -> Any:
    role = setup["role"]
    if role in ("stock", "ranks"):
        from benchmarks.by_strategy import ByStrategy as Maker
    elif role == "peer":
        from benchmarks.by_peer import ByPeer as Maker  # type: ignore[assignment]
    else:
        from benchmarks.by_fit import ByFit as Maker  # type: ignore[assignment]
    return Maker(role, _model(setup), rank, setup["size"])


def _model(setup: Any) -> Any:
    from benchmarks.models import chosen

    return chosen(setup["model"], setup["optimizer"], setup["batch_size"])


def _obey(contestant: Any, command: Any) -> Any:
    if command["do"] == "use":
        contestant.use(_model(command), command["size"])
        return {}
    if command["do"] == "prepare":
        contestant.prepare(command["steps"])
        return {}
    while time.monotonic() < command.get("at", 0.0):
        time.sleep(0.0005)
    return contestant.run(command["steps"], command["epochs"])


def main(arguments: list) -> int:  # type: ignore[type-arg]
    """Serves one contestant until its input ends. Returns the exit code."""
    started = time.monotonic()
    setup = json.loads(arguments[0])
    if setup["cores"] and hasattr(os, "sched_setaffinity"):
        # Before TensorFlow is imported, which sizes its thread pools by the environment.
        os.sched_setaffinity(0, setup["cores"])
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        try:
            import tensorflow as tf

            imported = time.monotonic()
            exchange = _Ranks(setup) if setup["role"] == "ranks" else _Alone(setup)
            contestant = _make(setup, exchange.rank)
            ready = {
                "import_s": imported - started,
                "build_s": time.monotonic() - imported,
                "tensorflow": tf.__version__,
                "keras": getattr(tf.keras, "__version__", ""),
            }
            print(json.dumps(exchange.collect(ready)), file=answers, flush=True)
            for line in iter(exchange.read, ""):
                found = exchange.collect(_obey(contestant, json.loads(line)))
                print(json.dumps(found), file=answers, flush=True)
        except BaseException as error:
            traceback.print_exc()
            failure = {"error": "%s: %s" % (type(error).__name__, error)}  # noqa: UP031
            print(json.dumps(failure), file=answers, flush=True)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
