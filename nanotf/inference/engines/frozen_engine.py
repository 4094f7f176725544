"""Skeleton: not yet written."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import ClassVar

from nanotf.inference.engines.inference_engine import Arrays, InferenceEngine, Runner
from nanotf.inference.signature import Signature


class FrozenEngine(InferenceEngine):
    """Skeleton."""

    name: ClassVar[str] = "frozen"

    def convert(
        self,
        exported: pathlib.Path,
        folder: pathlib.Path,
        signature: Signature | None,
        precision: str,
        rows: Arrays | None,
    ) -> None:
        raise NotImplementedError

    def load(
        self,
        folder: pathlib.Path,
        signatures: Mapping[str, Signature],
        threads: int,
        precision: str,
    ) -> Runner:
        raise NotImplementedError
