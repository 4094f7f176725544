"""Reads and writes bodies for a model of the user's own, of which nothing is known.

The rules of the SageMaker inference toolkit (decoder.py, encoder.py): JSON and CSV become
arrays of numbers, without a request's keys. It unpickles npy files; nanotf never does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from nanotf.inference.signature import TensorSpec
from nanotf.sagemaker.serving import csv_bodies, media_types, model_bodies, numpy_bodies
from nanotf.serving.interface import JSON, Refusal
from nanotf.serving.json_text import parse

_NUMBERS = TensorSpec("data", "float64", None)  # of CSV, since no signature tells a type


def read(body: bytes, header: str | None, most: int) -> Any:
    """Returns the value of a body: an array, or a dict of arrays for npz.

    Args:
        header: the content type.
        most: bytes, see `model_bodies.decode`.

    Raises:
        Refusal: 400, the body cannot be used; 413, it is too large; 415, the type is unknown.
    """
    kind, charset = media_types.content_type(header)
    if kind == JSON:
        return _array(parse(body))
    if kind == media_types.CSV:
        return csv_bodies.read_csv(media_types.decoded(body, charset), _NUMBERS)
    if kind == media_types.NPY:
        return numpy_bodies.read_npy(body).copy()  # the user's code may write to it
    if kind == media_types.NPZ:
        arrays = numpy_bodies.read_npz(body, most)
        if numpy_bodies.is_sparse(arrays):
            return numpy_bodies.dense(arrays, most)
        return {name: array.copy() for name, array in arrays.items()}
    raise media_types.unsupported(kind)


def _array(value: Any) -> np.ndarray[Any, Any]:
    try:
        return np.array(value)
    except (ValueError, OverflowError):  # the second for too large a whole number
        raise Refusal(
            400, "A body of JSON must be a value, or lists of equal lengths. Define input_fn."
        ) from None


def write(prediction: Any, accept: str) -> bytes:
    """Returns the body of a prediction.

    Args:
        prediction: arrays, tensors, plain values, or lists and dicts of them.
        accept: one of `media_types.ANSWERS`.

    Raises:
        Refusal: 500, JSON cannot hold the prediction; 406, the other types cannot.
    """
    if accept not in (JSON, media_types.JSON_LINES):
        named = prediction if isinstance(prediction, Mapping) else {"prediction": prediction}
        return model_bodies.written(
            {name: np.asarray(each) for name, each in named.items()}, accept
        )
    try:
        return json.dumps(prediction, default=_plain).encode()
    except (TypeError, ValueError) as error:
        raise Refusal(
            500, f"JSON must be able to hold the prediction: {error}. Define output_fn."
        ) from None


def _plain(value: Any) -> Any:
    if not hasattr(value, "__array__"):
        raise TypeError(f"received a {type(value).__name__}")
    return np.asarray(value).tolist()
