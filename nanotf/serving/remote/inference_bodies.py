"""Reads and writes the Open Inference Protocol's tensors in gRPC's messages, in a worker."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from nanotf.inference.signature import DEFAULT, STRING, TensorSpec
from nanotf.serving import open_tensors
from nanotf.serving.common_rows import common_rows
from nanotf.serving.interface import Decoded, Refusal, ServedModel
from nanotf.serving.remote.inference_messages import message_class

Array = np.ndarray[Any, Any]

# By datatype, the field of the tensor's contents; FP16 and BF16 have none.
_FIELDS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_PACKED = ("FP32", "FP64")  # whose field is bytes in an answer
_LENGTH = struct.Struct("<I")  # before each text in raw contents


@dataclasses.dataclass(frozen=True)
class RemoteForm:
    """`Decoded.form` of these requests."""

    identifier: str
    outputs: tuple[str, ...]  # names, in order
    is_raw: bool  # whether the client sends, and so reads, raw contents


def decode(request: Any, model: ServedModel) -> Decoded:
    """Reads a `ModelInferRequest`.

    Raises:
        Refusal: It cannot be used. Status 400.
        NanoError: See `Signature.checked`.
    """
    signature = open_tensors.signature_of(model)
    specs = open_tensors.specs_of(signature, [each.name for each in request.inputs])
    raw = request.raw_input_contents
    if raw and len(raw) != len(specs):
        raise Refusal(
            400, f"raw_input_contents must have {len(specs)} elements. Received: {len(raw)}"
        )
    arrays = {
        spec.name: _array(sent, spec, raw[place] if raw else None)
        for place, (sent, spec) in enumerate(zip(request.inputs, specs, strict=True))
    }
    inputs = signature.checked(arrays)
    wanted = open_tensors.wanted_outputs(signature, [each.name for each in request.outputs])
    form = RemoteForm(request.id, wanted, bool(raw))
    return Decoded(DEFAULT, inputs, common_rows(signature, inputs), form)


def encode(form: RemoteForm, outputs: Mapping[str, Array], model: ServedModel) -> Any:
    """Makes a `ModelInferResponse`: with raw contents if the request had such, or must have them.

    Raises:
        Refusal: The protocol has no datatype for an output. Status 400.
    """
    answer = message_class("ModelInferResponse")(
        model_name=model.name, model_version=str(model.version), id=form.identifier
    )
    datatypes = {name: _datatype(name, outputs[name]) for name in form.outputs}
    is_raw = form.is_raw or not set(datatypes.values()) <= set(_FIELDS)
    for name, datatype in datatypes.items():
        array = outputs[name]
        tensor = answer.outputs.add(name=name, datatype=datatype, shape=array.shape)
        if is_raw:
            answer.raw_output_contents.append(_raw(array))
        elif datatype in _PACKED:
            setattr(tensor.contents, _FIELDS[datatype], _raw(array))
        else:
            values = _texts(array) if datatype == "BYTES" else array.ravel().tolist()
            getattr(tensor.contents, _FIELDS[datatype]).extend(values)
    return answer


# --------------------------------------------------------------------------------------- requests
def _array(sent: Any, spec: TensorSpec, raw: bytes | None) -> Array:
    open_tensors.check_datatype(spec, sent.datatype)
    shape = tuple(sent.shape)
    if min(shape, default=0) < 0:
        raise Refusal(400, f"{spec.name} must have a shape. Received: {list(shape)}")
    array = _values(sent, spec) if raw is None else _raw_values(raw, spec)
    if array.size != math.prod(shape):
        raise Refusal(
            400,
            f"The data of {spec.name} must have the shape {list(shape)}. Received: {array.size} "
            "values",
        )
    return open_tensors.reshaped(array, shape, spec.name)


def _values(sent: Any, spec: TensorSpec) -> Array:
    field = _FIELDS.get(sent.datatype)
    if field is None:
        raise Refusal(400, f"{spec.name} must come in raw_input_contents: it is {sent.datatype}.")
    values = getattr(sent.contents, field)
    if spec.dtype == STRING:
        return _objects(list(values))
    wide = {"int_contents": "int32", "uint_contents": "uint32"}.get(field, spec.dtype)
    return np.fromiter(values, np.dtype(wide), len(values))  # `Signature.checked` narrows it


def _raw_values(raw: bytes, spec: TensorSpec) -> Array:
    if spec.dtype == STRING:
        return _objects(list(_raw_texts(raw, spec.name)))
    wanted = np.dtype(spec.dtype)  # bfloat16, too: TensorFlow has told NumPy of it
    if len(raw) % wanted.itemsize:
        raise Refusal(
            400,
            f"The raw contents of {spec.name} must be elements of {wanted.itemsize} bytes. "
            f"Received: {len(raw)} bytes",
        )
    if wanted.kind == "b":  # a byte of another value than 0 and 1 would be no boolean
        return np.frombuffer(raw, np.uint8).astype(bool)
    # Raw contents are little-endian, whatever the machine.
    array: Array = np.frombuffer(raw, wanted.newbyteorder("<") if wanted.kind in "iuf" else wanted)
    return array.astype(wanted, copy=False)


def _raw_texts(raw: bytes, name: str) -> Iterator[bytes]:
    at = 0
    while at < len(raw):
        begin = at + _LENGTH.size
        at = begin + _LENGTH.unpack_from(raw, at)[0] if begin <= len(raw) else len(raw) + 1
        if at > len(raw):
            raise Refusal(
                400,
                f"The raw contents of {name} must be texts, each after its length in four bytes. "
                "Received: contents that end too early",
            )
        yield raw[begin:at]


def _objects(values: list[bytes]) -> Array:
    array: Array = np.empty(len(values), object)
    array[:] = values
    return array


# ---------------------------------------------------------------------------------------- answers
def _datatype(name: str, array: Array) -> str:
    found = open_tensors.datatype_of(array.dtype)
    if found not in open_tensors.DATATYPES.values():
        raise Refusal(400, f"{name} must be of a type of the protocol. Received: {found}")
    return found


def _raw(array: Array) -> bytes:
    if array.dtype.kind in "OSU":
        return b"".join(_LENGTH.pack(len(text)) + text for text in _texts(array))
    if array.dtype.kind in "iuf":
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return array.tobytes()


def _texts(array: Array) -> list[bytes]:
    return [v.encode() if isinstance(v, str) else bytes(v) for v in array.ravel().tolist()]
