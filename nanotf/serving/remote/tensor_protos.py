"""Arrays as TensorFlow's `TensorProto`. This imports TensorFlow: a worker's part."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.inference.signature import TensorSpec
from nanotf.serving.interface import Refusal

Array = np.ndarray[Any, Any]

# By NumPy's name of a type, the field of its values, as `Tensor::AsProtoField` writes them: clients
# read `response.outputs["y"].float_val`. Source: core/framework/tensor.proto.
_PACKED = {
    "float32": "float_val",
    "float64": "double_val",
    "complex64": "scomplex_val",
    "complex128": "dcomplex_val",
}
_NUMBERS = {
    **dict.fromkeys(("int8", "int16", "int32", "uint8", "uint16"), "int_val"),
    "int64": "int64_val",
    "uint32": "uint32_val",
    "uint64": "uint64_val",
    "bool": "bool_val",
}
_HALVES = ("float16", "bfloat16")


@functools.cache
def _tensor_class() -> Any:
    return type(tf.make_tensor_proto(0))


def array_of(content: bytes, name: str, most: int) -> Array:
    """Reads a `TensorProto`.

    Args:
        content: the message.
        name: of the input, for messages.
        most: bytes of the array. A message may state a large shape and one value to repeat.

    Returns:
        Texts are an array of bytes objects.

    Raises:
        Refusal: It is no tensor. Status 400.
    """
    from google.protobuf.message import DecodeError

    try:
        tensor = _tensor_class().FromString(content)
        dtype = tf.as_dtype(tensor.dtype)
        shape = [dim.size for dim in tensor.tensor_shape.dim]
        if tensor.tensor_shape.unknown_rank or min(shape, default=0) < 0:
            raise Refusal(400, f"{name} must have a known shape. Received: {shape}")
        if math.prod(shape) * np.dtype(dtype.as_numpy_dtype).itemsize > most:
            raise Refusal(400, f"{name} must have at most {most} bytes. Received: shape {shape}")
        array = tf.make_ndarray(tensor)
    except (DecodeError, TypeError, ValueError, OverflowError) as error:
        raise Refusal(
            400, f"{name} must be a tensor of a type of numbers or texts: {error}"
        ) from None
    return np.asarray(array)


def fill(tensor: Any, array: Array) -> None:
    """Writes an array into a `TensorProto` of `serving_messages`.

    Raises:
        Refusal: The protocol has no field for values of its type. Status 400.
    """
    name = array.dtype.name
    tensor.tensor_shape.SetInParent()  # a scalar's, too, which sets no dim
    for length in array.shape:
        tensor.tensor_shape.dim.add(size=length)
    if array.dtype.kind in "OSU":
        tensor.dtype = tf.string.as_datatype_enum
        tensor.string_val.extend(_text(value) for value in array.ravel().tolist())
        return
    if name in _PACKED:
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        setattr(tensor, _PACKED[name], little.tobytes())
    elif name in _NUMBERS:
        getattr(tensor, _NUMBERS[name]).extend(array.ravel().tolist())
    elif name in _HALVES:
        bits = np.ascontiguousarray(array).view(np.uint16)
        tensor.half_val.extend(bits.ravel().tolist())
    else:
        raise Refusal(400, f"Outputs must be of a type of numbers or texts. Received: {name}")
    tensor.dtype = tf.as_dtype(array.dtype).as_datatype_enum


def fill_info(info: Any, spec: TensorSpec) -> None:
    """Writes what a signature says of a tensor into a `TensorInfo` of `serving_messages`."""
    info.name = spec.name
    info.dtype = tf.as_dtype(spec.dtype).as_datatype_enum
    info.tensor_shape.unknown_rank = spec.shape is None
    for length in spec.shape or ():
        info.tensor_shape.dim.add(size=-1 if length is None else length)


def _text(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
