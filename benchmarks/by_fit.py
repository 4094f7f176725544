"""Trains by Keras's `fit`: plain, ideal, and nanotf. Runs in the contestants' processes."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from typing import Any

from benchmarks.clock import Processor, make_clock, own_processor
from benchmarks.models import Model, share

# What a role's suffix changes in a model.
_SUFFIXES: dict[str, dict[str, Any]] = {
    "": {},
    "bf16": {"precision": "mixed_bfloat16"},
    "16": {"steps_per_execution": 16},
}


class ByFit:
    """A contestant that calls `fit`.

    Args:
        role: str, "plain", "ideal", "one", "shm", "grpc" or "auto"; with the suffix "_bf16", in
            mixed_bfloat16; with "_16", compiled with that many `steps_per_execution`. "auto" is
            nanotf with `num_processes="auto"`, and with workers already started, since a block
            takes less time than starting them.
        spec: `Model`.
        rank, size: int, of this process among the processes of "ideal"; for nanotf, `size` is the
            number of workers.
    """

    def __init__(self, role: str, spec: Model, rank: int, size: int) -> None:
        import tensorflow as tf

        self.keras = tf.keras
        role, _, suffix = role.partition("_")
        self.changes = _SUFFIXES[suffix]
        self.role = role
        self.rank = rank
        self.model_class = tf.keras.Model
        self.extra: dict = {}  # type: ignore[type-arg]
        if role in ("one", "shm", "grpc", "auto"):
            from nanotf.keras import Model as NanoModel

            os.environ["NANOTF_IDLE_SECONDS"] = "86400"  # the other contestants' blocks take long
            self.model_class = NanoModel
        if role in ("shm", "grpc", "auto"):
            self.extra = {"transport": "grpc" if role == "grpc" else "shm"}
        if role == "auto":
            self._cache = tempfile.TemporaryDirectory(prefix="nanotf-benchmark-")
            os.environ["XDG_CACHE_HOME"] = self._cache.name  # no measurements of earlier runs
            from nanotf.parent.auto import rule

            rule.SHARE = 1e9  # a block is too short to be worth a measurement
        self.use(spec, size)

    def use(self, spec: Model, size: int) -> None:
        """Switches to another model, trained by `size` processes."""
        if self.extra:
            self.extra["num_processes"] = "auto" if self.role == "auto" else size
        self.size = size
        self.spec = dataclasses.replace(spec, **self.changes)
        self.batch_size = self.spec.batch_size
        if self.role == "ideal":
            self.batch_size = share(self.batch_size, self.rank, size)
        self.model = self.spec.compiled(self.keras, self.model_class)

    def prepare(self, steps: int) -> None:
        """Makes the data of an epoch of `steps` steps."""
        self.x, self.y = self.spec.data(steps * self.batch_size, self.rank)

    def _processor(self) -> Processor:
        """Returns the clock of the workers, or of this process if it computes the steps."""
        if not self.extra:
            return own_processor()
        if self.role == "auto":
            return Processor([])  # "auto" may use either
        import psutil

        pids = [child.pid for child in psutil.Process().children(recursive=True)]
        return Processor(pids, self.size)

    def _warm_up(self) -> None:
        import nanotf
        from nanotf.pool import warm

        nanotf.warm_up(self.size)
        while not warm.is_warm(nanotf.plan(self.size), "shm"):
            time.sleep(0.01)

    def run(self, steps: int, epochs: int) -> dict:  # type: ignore[type-arg]
        """Trains, and returns timestamped events for `timeline.read`."""
        if self.role == "auto":
            self._warm_up()
        rows = steps * self.batch_size
        x, y = self.x[:rows], self.y[:rows]
        clock = make_clock(self.keras, self._processor())
        call = time.monotonic()
        self.model.fit(
            x,
            y,
            batch_size=self.batch_size,
            epochs=epochs,
            verbose=0,
            callbacks=[clock],
            **self.extra,
        )
        return {"call": call, "ends": clock.ends, "steps": clock.steps, "done": time.monotonic()}
