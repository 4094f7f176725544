"""The first calls of a model, so that no client waits for what they prepare.

First made-up rows, in the numbers that batches will have; then the requests that came with the
model, as TensorFlow Serving replays them: a file of records, each a PredictionLog with a request
of `PredictionService`. Source: `apis/prediction_log.proto` and
`servables/tensorflow/saved_model_warmup.cc` of tensorflow/serving.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.console import logger
from nanotf.inference.signature import STRING, TensorSpec
from nanotf.serving.computing.loaded_model import LoadedModel
from nanotf.serving.remote import serving_bodies
from nanotf.serving.remote.remote_interface import field_of

REQUESTS = "assets.extra/tf_serving_warmup_requests"  # in the folder of a SavedModel
_MOST_REQUESTS = 1000  # TensorFlow Serving takes no more
# Numbers of fields.
_CLASSIFY, _REGRESS, _MULTI_INFERENCE, _PREDICT = 2, 3, 4, 6  # PredictionLog
_REQUEST = 1  # PredictLog and the others
_LENGTH = 1  # of axes of any length but the first, in rows that are made up


def warm_up(model: LoadedModel, most_rows: int, most_bytes: int) -> None:
    """Computes made-up rows with each signature, and the requests that came with the model.

    What fails is told to the log alone: clients may ask for something else.

    Args:
        most_rows: that the model computes at once.
        most_bytes: of an array in a request.
    """
    try:
        _compute_made_up(model, most_rows)
    except Exception as error:  # a model may refuse zeros, or empty texts
        logger.info("%s does not take rows of zeros: %s", model.name, error)
    file = model.folder / REQUESTS
    if not file.is_file():
        return
    done = 0
    try:
        for record in tf.data.TFRecordDataset(str(file)).take(_MOST_REQUESTS):
            replay(record.numpy(), model, most_bytes)
            done += 1
    except Exception as error:
        logger.warning(
            "%s, version %d: record %d of %s cannot be replayed: %s",
            *(model.name, model.version, done + 1, REQUESTS, error),
        )


def sizes(most_rows: int) -> list[int]:
    """Returns the numbers of rows to compute: 1, 2, 4, ... and the most."""
    found = [1]
    while found[-1] * 2 < most_rows:
        found.append(found[-1] * 2)
    return found if found[-1] == most_rows else [*found, most_rows]


def _compute_made_up(model: LoadedModel, most_rows: int) -> None:
    for name, signature in model.signatures.items():
        for rows in sizes(most_rows) if model.has_rows_apart(name) else [1]:
            model.run({spec.name: made_up(spec, rows) for spec in signature.inputs}, name)


def made_up(spec: TensorSpec, rows: int) -> np.ndarray[Any, Any]:
    """Returns rows of zeros, or of empty texts, that an input accepts."""
    known = (None,) if spec.shape is None else spec.shape
    shape = tuple(
        (rows if place == 0 else _LENGTH) if length is None else length
        for place, length in enumerate(known)
    )
    if spec.dtype == STRING:
        return np.full(shape, b"", dtype=object)
    return np.zeros(shape, dtype=spec.dtype)


def replay(record: bytes, model: LoadedModel, most_bytes: int) -> None:
    """Computes the request of a PredictionLog. Its answer, if there is one, is not read.

    Raises:
        Refusal, NanoError: It cannot be used.
        Exception: What the model raises.
    """
    for number in (_PREDICT, _CLASSIFY, _REGRESS, _MULTI_INFERENCE):
        for log in field_of(record, number):
            body = b"".join(field_of(log, _REQUEST))
            if number == _MULTI_INFERENCE:
                serving_bodies.multi_inference(body, model)
                continue
            if number == _PREDICT:
                decoded = serving_bodies.decode_predict(body, model, most_bytes)
            else:
                verb = "classify" if number == _CLASSIFY else "regress"
                decoded = serving_bodies.decode_examples(body, model, verb)
            model.run(decoded.inputs, decoded.signature)
