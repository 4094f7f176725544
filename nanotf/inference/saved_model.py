"""Recognizes the folder of a SavedModel, and reads its signatures."""

from __future__ import annotations

import pathlib
from typing import Any

from nanotf.compat.versions import require_tensorflow
from nanotf.errors import InvalidArgumentError
from nanotf.inference.signature import Signature, TensorSpec


def is_saved_model(path: pathlib.Path) -> bool:
    """Returns True if a folder holds a SavedModel."""
    return any((path / f"saved_model.{kind}").is_file() for kind in ("pb", "pbtxt"))


def read_signatures(folder: pathlib.Path) -> dict[str, Signature]:
    """Reads the signatures of a SavedModel's folder, without loading the model.

    Returns:
        By name, with inputs and outputs in the order of their names.

    Raises:
        InvalidArgumentError: The SavedModel cannot be read.
    """
    from nanotf.compat import saved_models  # imports TensorFlow

    try:
        found = saved_models.signature_definitions(folder)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"A SavedModel must be complete. Received: {folder}, of which TensorFlow says: {error}"
        ) from error
    return {
        name: Signature(
            _specs(definition.inputs), _specs(definition.outputs), definition.method_name
        )
        for name, definition in sorted(found.items())  # a map of protobuf has no order
    }


def _specs(tensors: Any) -> tuple[TensorSpec, ...]:
    as_dtype = require_tensorflow().as_dtype
    return tuple(
        TensorSpec(name, as_dtype(tensors[name].dtype).name, _shape_of(tensors[name].tensor_shape))
        for name in sorted(tensors)
    )


def _shape_of(shape: Any) -> tuple[int | None, ...] | None:
    if shape.unknown_rank:
        return None
    return tuple(None if axis.size < 0 else axis.size for axis in shape.dim)  # -1: any length
