"""Engines that go wrong, each in another way, for the tests of `optimize`."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np

from nanotf.errors import ConversionError
from nanotf.inference.engines.inference_engine import (
    BF16,
    F32,
    INT8,
    Arrays,
    Runner,
)
from nanotf.inference.engines.tensorflow_engine import TensorFlowEngine
from nanotf.inference.signature import Signature


class FailingEngine(TensorFlowEngine):
    """An engine of these tests; this one does not fail."""

    name: ClassVar[str] = "failing"


class AbortingEngine(FailingEngine):
    """A converter that aborts its process, as LLVM does."""

    name: ClassVar[str] = "aborting"

    def convert(self, *_: Any) -> None:
        os.abort()


class AbortingLaterEngine(FailingEngine):
    """An engine that aborts when it computes."""

    name: ClassVar[str] = "aborting_later"

    def load(self, *arguments: Any) -> Runner:
        runner = super().load(*arguments)
        return ChangedRunner(runner, lambda _: os.abort())


class RaisingEngine(FailingEngine):
    """A converter that knows none of the operations."""

    name: ClassVar[str] = "raising"

    def convert(self, *_: Any) -> None:
        raise ConversionError("no rule for TensorList")


class HangingEngine(FailingEngine):
    """A converter that comes to no end."""

    name: ClassVar[str] = "hanging"

    def convert(self, *_: Any) -> None:
        time.sleep(3600)


class WrongEngine(FailingEngine):
    """An engine that loads, and computes something else."""

    name: ClassVar[str] = "wrong"

    def load(self, *arguments: Any) -> Runner:
        return ChangedRunner(super().load(*arguments), lambda array: array * np.float32(1.01))


class WrongInBatchesEngine(FailingEngine):
    """An engine that computes NaN for some numbers of rows."""

    name: ClassVar[str] = "wrong_in_batches"

    def load(self, *arguments: Any) -> Runner:
        return ChangedRunner(
            super().load(*arguments), lambda array: array * np.nan if len(array) == 3 else array
        )


class RoundingEngine(FailingEngine):
    """An engine whose lower precisions round the outputs, to one digit or to none."""

    name: ClassVar[str] = "rounding"
    precisions: ClassVar[tuple[str, ...]] = (F32, BF16, INT8)
    needs: ClassVar[Mapping[str, tuple[tuple[str, ...], str]]] = {}

    def load(
        self,
        folder: pathlib.Path,
        signatures: Mapping[str, Signature],
        threads: int,
        precision: str,
        apart: Collection[str],
    ) -> Runner:
        digits = {F32: 9, BF16: 1, INT8: -9}[precision]
        runner = super().load(folder, signatures, threads, precision, apart)
        return ChangedRunner(runner, lambda array: np.round(array, digits))


class AbsentEngine(FailingEngine):
    """An engine whose package nobody has."""

    name: ClassVar[str] = "absent"
    needs: ClassVar[Mapping[str, tuple[tuple[str, ...], str]]] = {
        F32: (("package_that_nobody_has",), "absent")
    }


class ChangedRunner:
    """A runner whose outputs a function changes."""

    def __init__(self, runner: Runner, change: Any) -> None:
        self._runner, self._change = runner, change

    def run(self, inputs: Arrays, signature: str) -> dict[str, np.ndarray[Any, Any]]:
        found = self._runner.run(inputs, signature)
        return {name: self._change(array) for name, array in found.items()}
