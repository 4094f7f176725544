"""The tensors and the metadata of the Open Inference Protocol over REST, and what gRPC shares.

Source: `specification/protocol/inference_rest.md` of kserve/open-inference-protocol.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nanotf.inference.signature import DEFAULT, STRING, Signature, TensorSpec
from nanotf.serving import json_tensors
from nanotf.serving.common_rows import common_rows
from nanotf.serving.interface import Decoded, Refusal, Response, ServedModel
from nanotf.serving.json_text import shown

DATATYPES = {
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


def decode(content: Mapping[str, Any], model: ServedModel) -> Decoded:
    """Reads the object that is a request's body.

    Args:
        content: of the body.
        model: that is asked.

    Raises:
        Refusal: It cannot be used. Status 400, or 501 for a type that JSON cannot express.
        NanoError: See `Signature.checked`.
    """
    signature = signature_of(model)
    sent = _objects(content, "inputs")
    specs = specs_of(signature, [each["name"] for each in sent])
    arrays = {spec.name: _array(each, spec) for each, spec in zip(sent, specs, strict=True)}
    inputs = signature.checked(arrays)
    wanted = wanted_outputs(signature, [each["name"] for each in _objects(content, "outputs")])
    form = InferenceForm(_identifier(content), wanted)
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
            {"name": name, "shape": array.shape, "datatype": datatype_of(array.dtype)}
        )
        texts.append(head[:-1] + b',"data":' + data + b"}")
    body = orjson.dumps(fields)[:-1] + b',"outputs":[' + b",".join(texts) + b"]}"
    return Response(200, body, headers=() if all_finite else (json_tensors.NONFINITE,))


# ----------------------------------------------------------------- of JSON's tensors and gRPC's
def signature_of(model: ServedModel) -> Signature:
    """Returns the signature that requests are for.

    Raises:
        Refusal: The model has none of its name. Status 400.
    """
    signature = model.signatures.get(DEFAULT)
    if signature is None:
        raise Refusal(
            400, f"The model must have the signature {DEFAULT}. Received: {_names(model)}"
        )
    return signature


def specs_of(signature: Signature, names: Sequence[str]) -> list[TensorSpec]:
    """Returns the inputs of these names.

    Raises:
        Refusal: There is no such input, or it comes twice. Status 400.
    """
    specs = {spec.name: spec for spec in signature.inputs}
    for place, name in enumerate(names):
        if name not in specs or name in names[:place]:
            raise Refusal(
                400, f"Each of the inputs {', '.join(specs)} must be sent once. Received: {name}"
            )
    return [specs[name] for name in names]


def wanted_outputs(signature: Signature, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the outputs that a client wants: those of these names, or all.

    Raises:
        Refusal: There is no such output, or it comes twice. Status 400.
    """
    known = tuple(spec.name for spec in signature.outputs)
    wanted = tuple(names) or known
    if not set(wanted) <= set(known) or len(set(wanted)) < len(wanted):
        raise Refusal(
            400,
            f"Outputs must be some of {', '.join(known)}, each once. Received: {', '.join(wanted)}",
        )
    return wanted


def check_datatype(spec: TensorSpec, sent: object) -> None:
    """Raises Refusal if a tensor's datatype is not that of the input. Status 400."""
    wanted = DATATYPES.get(spec.dtype, spec.dtype)
    if sent != wanted:
        raise Refusal(400, f"{spec.name} must have the datatype {wanted}. Received: {shown(sent)}")


def reshaped(
    array: np.ndarray[Any, Any], shape: tuple[int, ...], name: str
) -> np.ndarray[Any, Any]:
    """Returns an array in the shape that was sent, which has its size.

    Raises:
        Refusal: NumPy has no such shape. Status 400.
    """
    try:
        return array.reshape(shape)
    except ValueError:  # too many axes, or too long ones around one of no length
        raise Refusal(
            400, f"{name} must have a shape that NumPy has. Received: {list(shape)}"
        ) from None


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


def _array(sent: Mapping[str, Any], spec: TensorSpec) -> np.ndarray[Any, Any]:
    shape = _shape(sent)
    check_datatype(spec, sent.get("datatype"))
    if not isinstance(sent.get("data"), list):
        raise Refusal(
            400, f'{spec.name} must have "data", a list. Received: {shown(sent.get("data"))}'
        )
    array = json_tensors.tensor(sent["data"], spec.dtype)
    # An empty list cannot tell the lengths of the axes after it.
    flat = array.ndim == 1 or not array.size
    if array.size != math.prod(shape) or not (flat or array.shape == shape):
        raise Refusal(
            400,
            f"The data of {spec.name} must have the shape {list(shape)}, or be flat. Received: "
            f"data of the shape {list(array.shape)}",
        )
    return reshaped(array, shape, spec.name)


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
        "datatype": DATATYPES.get(spec.dtype, spec.dtype),
        "shape": [-1 if length is None else length for length in shape],
    }


def datatype_of(dtype: np.dtype[Any]) -> str:
    """Returns the protocol's name of a type."""
    return "BYTES" if dtype.kind in "OSU" else DATATYPES.get(dtype.name, dtype.name)


def _names(model: ServedModel) -> str:
    return ", ".join(model.signatures) or "none"
