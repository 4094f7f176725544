"""Reads the bodies of requests, and writes answers, without a user's code.

| content type | inputs |
| --- | --- |
| application/json, /jsonlines, /jsons | see `json_request` |
| text/csv | a row in each line, for a model of one input, see `csv_bodies` |
| application/x-npy | all rows, for a model of one input |
| application/x-npz | arrays by the inputs' names; or in the inputs' order, named arr_0, arr_1 by |
|                   | `numpy.savez`; or a sparse matrix that SciPy has written                    |

Others are refused with status 415. Source: tensorflowServing.js of
aws/sagemaker-tensorflow-serving-container for JSON and CSV; the serializers of SageMaker's SDK for
the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from nanotf.inference.signature import DEFAULT, Signature, TensorSpec
from nanotf.sagemaker.serving import csv_bodies, media_types, numpy_bodies
from nanotf.serving import tensorflow_examples, tensorflow_predict
from nanotf.serving.common_rows import common_rows
from nanotf.serving.interface import JSON, Decoded, Refusal, Request, Response, ServedModel
from nanotf.serving.json_text import parse

Array = np.ndarray[Any, Any]

_KEYS = ("instances", "inputs", "examples")  # of TensorFlow Serving's requests
_ROWS = "instances"  # the form of an answer to what is not TensorFlow Serving's JSON


@dataclasses.dataclass(frozen=True)
class BodyForm:
    """The form of an answer, which holds for any outputs."""

    accept: str  # one of `media_types.ANSWERS`
    json: Any  # the form for TensorFlow Serving's JSON


def json_request(body: bytes) -> dict[str, Any]:
    """Returns a body of JSON as a request of TensorFlow Serving's REST.

    An object with one of its keys is one. Of several values, each in a line, each is a row. Lists
    in a list are rows. Any other value is the only row. The containers decide by searching the
    text, and misread a text that holds `] [` or `"inputs":`; here the values decide.

    Raises:
        Refusal: 400, it is no JSON.
    """
    try:
        value = parse(body)
    except Refusal:
        return {_ROWS: _values(body)}
    if isinstance(value, dict) and any(key in value for key in _KEYS):
        return value
    are_rows = isinstance(value, list) and value and isinstance(value[0], list)
    return {_ROWS: value if are_rows else [value]}


def _values(body: bytes) -> list[Any]:
    lines = [line for line in body.splitlines() if line.strip()]
    try:
        several = len(lines) > 1 and [parse(lines[0])]
    except Refusal:
        several = False
    if not several:
        parse(body)  # raises again, with the place of the error in the whole body
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(parse(line))
        except Refusal as refusal:
            raise Refusal(400, f"{refusal.text} (line {number} of JSON lines)") from None
    return found


def decode(request: Request, model: ServedModel, accept: str, most: int) -> Decoded:
    """Reads a body.

    Args:
        request: its verb is predict, classify or regress.
        accept: the type of the answer.
        most: bytes, the size that arrays in a compressed body may have.

    Returns:
        The content, with a `BodyForm`.

    Raises:
        Refusal: 400, it cannot be used; 413, it is too large; 415, the content type is unknown.
        NanoError: See `Signature.checked`.
    """
    kind, charset = media_types.content_type(request.headers.get("content-type"))
    if kind in media_types.JSON_TYPES:
        decoded = _decode_json(request, model)
        return dataclasses.replace(decoded, form=BodyForm(accept, decoded.form))
    if kind not in (media_types.CSV, media_types.NPY, media_types.NPZ):
        raise media_types.unsupported(kind)
    if request.verb != "predict":  # the others need examples, which JSON alone can hold
        raise Refusal(400, f"tfs-method={request.verb} needs a body of application/json.")
    signature = model.signatures.get(DEFAULT)
    if signature is None:
        raise Refusal(400, f'Serving signature name: "{DEFAULT}" not found in signature def')
    inputs = signature.checked(_arrays(kind, charset, request.body, signature, most))
    return Decoded(DEFAULT, inputs, common_rows(signature, inputs), row_form(accept))


def row_form(accept: str) -> BodyForm:
    """Returns the form of the answer to rows that came in another way than in JSON."""
    return BodyForm(accept, _ROWS)


def _decode_json(request: Request, model: ServedModel) -> Decoded:
    content = json_request(request.body)
    if request.verb in tensorflow_examples.VERBS:
        return tensorflow_examples.decode(content, model.signatures, request.verb)
    return tensorflow_predict.decode(content, model.signatures)


def _arrays(
    kind: str, charset: str, body: bytes, signature: Signature, most: int
) -> dict[str, Array]:
    if kind == media_types.NPZ:
        return _named(numpy_bodies.read_npz(body, most), signature, most)
    spec = _only_input(kind, signature)
    if kind == media_types.CSV:
        return {spec.name: csv_bodies.read_csv(media_types.decoded(body, charset), spec)}
    return {spec.name: numpy_bodies.read_npy(body)}


def _only_input(kind: str, signature: Signature) -> TensorSpec:
    if len(signature.inputs) != 1:
        raise Refusal(
            400,
            f"{kind} needs a model with one input. Received: a request to a model with the inputs "
            f"{', '.join(signature.input_names) or 'none'}. Send application/json, or "
            f"{media_types.NPZ} with an array for each.",
        )
    return signature.inputs[0]


def _named(arrays: dict[str, Array], signature: Signature, most: int) -> dict[str, Array]:
    names = signature.input_names
    if set(arrays) == set(names):
        return arrays
    if numpy_bodies.is_sparse(arrays):
        return {_only_input(media_types.NPZ, signature).name: numpy_bodies.dense(arrays, most)}
    if set(arrays) == {f"arr_{index}" for index in range(len(names))}:
        return {name: arrays[f"arr_{index}"] for index, name in enumerate(names)}
    return arrays  # `Signature.checked` names the difference


def encode(decoded: Decoded, outputs: Mapping[str, Array]) -> Response:
    """Makes the answer to what `decode` has read.

    JSON is TensorFlow Serving's, in one line. So it is the answer for JSON lines, too, as in
    SageMaker's containers.

    Raises:
        Refusal: 406, the type of the answer cannot hold the outputs. See also the interfaces'.
    """
    form = decoded.form
    if form.accept in (JSON, media_types.JSON_LINES):
        plain = dataclasses.replace(decoded, form=form.json)
        if isinstance(form.json, tensorflow_examples.Examples):
            answer = tensorflow_examples.encode(form.json, outputs)
        else:
            answer = tensorflow_predict.encode(plain, outputs)
        return dataclasses.replace(answer, content_type=form.accept)
    return Response(200, written(outputs, form.accept), form.accept)


def written(outputs: Mapping[str, Array], accept: str) -> bytes:
    """Returns outputs as npz, or the only one as CSV or npy.

    Raises:
        Refusal: 406, there are several.
    """
    if accept == media_types.NPZ:
        return numpy_bodies.write_npz(outputs)
    if len(outputs) != 1:
        raise Refusal(
            406,
            f"{accept} holds one output. The model has {', '.join(outputs)}. Ask for "
            f"application/json or {media_types.NPZ}.",
        )
    (output,) = outputs.values()
    if accept == media_types.CSV:
        return csv_bodies.write_csv(output)
    return numpy_bodies.write_npy(output)
