"""The tensors and the metadata of the Open Inference Protocol over REST.

Source: `specification/protocol/inference_rest.md` of kserve/open-inference-protocol.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from nanotf.inference.signature import DEFAULT, STRING, Signature, TensorSpec
from nanotf.serving import json_tensors
from nanotf.serving.common_rows import common_rows
from nanotf.serving.interface import Decoded, Refusal, Response, ServedModel
from nanotf.serving.json_text import shown

_DATATYPES = {
    "bool": "BOOL",
    **{
        f"{kind}int{bits}": f"{kind}INT{bits}".upper()
        for kind in ("", "u")
        for bits in (8, 16, 32, 64)
    },
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",  # of gRPC's protocol; the other one has no numbers for it
    STRING: "BYTES",
}
_PLATFORM = "nanotf_program"  # <project>_<format>; whatever the engine, a client notices nothing


@dataclasses.dataclass(frozen=True)
class InferenceForm:
    """`Decoded.form` of these requests."""

    identifier: str | None
    outputs: tuple[str, ...]  # names, in order


def metadata(model: ServedModel) -> dict[str, Any]:
    """Returns what the protocol says of a model, but for its versions."""
    signature = model.signatures.get(DEFAULT, Signature((), ()))
    return {
        "name": model.name,
        "platform": _PLATFORM,
        "inputs": [_described(spec) for spec in signature.inputs],
        "outputs": [_described(spec) for spec in signature.outputs],
    }


def decode(content: Mapping[str, Any], model: ServedModel, booleans: bool = True) -> Decoded:
    """Reads the object that is a request's body.

    Args:
        content: of the body.
        model: that is asked.
        booleans: False if no value in it is true or false, see `has_booleans`.

    Raises:
        Refusal: It cannot be used. Status 400, or 501 for a type that JSON cannot express.
        NanoError: See `Signature.checked`.
    """
    signature = model.signatures.get(DEFAULT)
    if signature is None:
        raise Refusal(
            400, f"The model must have the signature {DEFAULT}. Received: {_names(model)}"
        )
    specs = {spec.name: spec for spec in signature.inputs}
    arrays = {}
    for each in _objects(content, "inputs"):
        name = each["name"]
        if name not in specs or name in arrays:
            raise Refusal(
                400, f"Each of the inputs {', '.join(specs)} must be sent once. Received: {name}"
            )
        arrays[name] = _array(each, specs[name], booleans)
    inputs = signature.checked(arrays)
    form = InferenceForm(_identifier(content), _wanted(content, signature))
    return Decoded(DEFAULT, inputs, common_rows(signature, inputs), form)


def encode(
    form: InferenceForm, outputs: Mapping[str, np.ndarray[Any, Any]], model: ServedModel
) -> Response:
    """Makes the answer, with flat data.

    Raises:
        Refusal: JSON cannot express an output. Status 400.
    """
    import orjson

    fields = {"model_name": model.name, "model_version": str(model.version)}
    if form.identifier is not None:
        fields["id"] = form.identifier
    texts, all_finite = [], True
    for name in form.outputs:
        array = outputs[name]
        data, finite = json_tensors.tensor_text(array.reshape(-1))
        all_finite &= finite
        head = orjson.dumps(
            {"name": name, "shape": array.shape, "datatype": _datatype_of(array.dtype)}
        )
        texts.append(head[:-1] + b',"data":' + data + b"}")
    body = orjson.dumps(fields)[:-1] + b',"outputs":[' + b",".join(texts) + b"]}"
    return Response(200, body, headers=() if all_finite else (json_tensors.NONFINITE,))


# --------------------------------------------------------------------------------------- requests
def _objects(content: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Returns a list of objects that have names."""
    found = content.get(key, [])
    if not isinstance(found, list) or not all(
        isinstance(each, dict) and isinstance(each.get("name"), str) for each in found
    ):
        raise Refusal(
            400, f'"{key}" must be a list of objects that have a "name". Received: {shown(found)}'
        )
    return found


def _identifier(content: Mapping[str, Any]) -> str | None:
    identifier = content.get("id")
    if identifier is not None and not isinstance(identifier, str):
        raise Refusal(400, f'"id" must be a text. Received: {shown(identifier)}')
    return identifier


def _wanted(content: Mapping[str, Any], signature: Signature) -> tuple[str, ...]:
    known = tuple(spec.name for spec in signature.outputs)
    wanted = tuple(each["name"] for each in _objects(content, "outputs")) or known
    if not set(wanted) <= set(known) or len(set(wanted)) < len(wanted):
        raise Refusal(
            400,
            f"Outputs must be some of {', '.join(known)}, each once. Received: {', '.join(wanted)}",
        )
    return wanted


def _array(sent: Mapping[str, Any], spec: TensorSpec, booleans: bool) -> np.ndarray[Any, Any]:
    shape = _shape(sent)
    if sent.get("datatype") != _DATATYPES.get(spec.dtype, spec.dtype):
        raise Refusal(
            400,
            f"{spec.name} must have the datatype {_DATATYPES.get(spec.dtype, spec.dtype)}. "
            f"Received: {shown(sent.get('datatype'))}",
        )
    if not isinstance(sent.get("data"), list):
        raise Refusal(
            400, f'{spec.name} must have "data", a list. Received: {shown(sent.get("data"))}'
        )
    array = json_tensors.tensor(sent["data"], spec.dtype, booleans)
    # An empty list cannot tell the lengths of the axes after it.
    flat = array.ndim == 1 or not array.size
    if array.size != math.prod(shape) or not (flat or array.shape == shape):
        raise Refusal(
            400,
            f"The data of {spec.name} must have the shape {list(shape)}, or be flat. Received: "
            f"data of the shape {list(array.shape)}",
        )
    try:
        return array.reshape(shape)
    except ValueError:  # too many axes, or too long ones around one of no length
        raise Refusal(
            400, f"{spec.name} must have a shape that NumPy has. Received: {list(shape)}"
        ) from None


def _shape(sent: Mapping[str, Any]) -> tuple[int, ...]:
    shape = sent.get("shape")
    if not isinstance(shape, list) or not all(
        type(length) is int and 0 <= length < 2**63 for length in shape
    ):
        raise Refusal(
            400,
            f'{sent["name"]} must have a "shape", a list of whole numbers. Received: '
            f"{shown(shape)}",
        )
    return tuple(shape)


# ---------------------------------------------------------------------------------------- answers
def _described(spec: TensorSpec) -> dict[str, Any]:
    # The protocol has no sign for a shape of any rank: one axis of any length comes nearest.
    shape = (None,) if spec.shape is None else spec.shape
    return {
        "name": spec.name,
        "datatype": _DATATYPES.get(spec.dtype, spec.dtype),
        "shape": [-1 if length is None else length for length in shape],
    }


def _datatype_of(dtype: np.dtype[Any]) -> str:
    return "BYTES" if dtype.kind in "OSU" else _DATATYPES.get(dtype.name, dtype.name)


def _names(model: ServedModel) -> str:
    return ", ".join(model.signatures) or "none"
