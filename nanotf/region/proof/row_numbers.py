"""Operations that may take the number of rows, and shapes made from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# Inputs that are shapes or lengths of the results, and nothing else: what the results' own shapes
# show may be made from the number of rows. So these must be known.
LENGTHS = {
    "AvgPool3DGrad": (0,), "AvgPoolGrad": (0,), "BroadcastTo": (1,), "Conv2DBackpropFilter": (1,), "Conv2DBackpropInput": (0,),
    "Conv3DBackpropFilterV2": (1,), "Conv3DBackpropInputV2": (0,),
    "DepthwiseConv2dNativeBackpropFilter": (1,), "DepthwiseConv2dNativeBackpropInput": (0,),
    "Fill": (0,), "Reshape": (1,), "ScatterNd": (2,), "StridedSliceGrad": (0,), "UnsortedSegmentSum": (2,),
}  # fmt: skip
# Inputs that describe the elements of a list, whose states are known. The number of elements is
# equal on all workers.
ELEMENT_SHAPES = {
    "EmptyTensorList": (0,), "TensorListFromTensor": (1,), "TensorListGather": (2,), "TensorListGetItem": (2,),
    "TensorListPopBack": (1,), "TensorListReserve": (0,), "TensorListScatter": (2,), "TensorListScatterV2": (2,),
    "TensorListStack": (1,),
}  # fmt: skip
# Operations that may take the number of rows, or a shape with it, whatever the number is: they
# compute sums and products, or copy. Two polynomials that agree for two large primes are one.
# `Minimum` and comparisons are none of them: code may tell a small number from the two large ones
# by them. `BroadcastGradientArgs` names the axes to sum over: more of them for one row, but such
# have the length 1.
_OF_NUMBERS = {
    "Add", "AddN", "AddV2", "BroadcastGradientArgs", "CheckNumerics", "ConcatOffset", "ConcatV2", "DivNoNan", "EnsureShape", "Identity",
    "IdentityN", "Mul", "MulNoNan", "Neg", "OnesLike", "OptionalFromValue", "Pack", "PreventGradient", "RealDiv",
    "Shape", "ShapeN", "Size", "Snapshot", "Square", "StopGradient", "Sub", "TensorListFromTensor",
    "TensorListPushBack", "TensorListSetItem", "ZerosLike",
}  # fmt: skip
# Operations that do so with one of their inputs, and choose or repeat its elements by the others.
_OF_ELEMENTS = {
    "BroadcastTo": 0, "ExpandDims": 0, "Fill": 1, "Gather": 0, "GatherV2": 0, "Prod": 0, "Reshape": 0, "Slice": 0,
    "Split": 1, "SplitV": 0, "Squeeze": 0, "StridedSlice": 0, "Sum": 0, "Tile": 0, "Transpose": 0, "Unpack": 0,
}  # fmt: skip
# Inputs by which a rule sees that all rows are taken, or how often something is repeated; the
# limit of a range, whose numbers stay unknown.
_SEEN_BY_RULES = {
    "Range": (0, 1), "Slice": (2,), "StridedSlice": (1, 2), "StridedSliceGrad": (1, 2), "Tile": (1,),
}  # fmt: skip


def follows_numbers(operation: Any, places: Sequence[int]) -> bool:
    """Returns True if a result follows one polynomial for any number of rows.

    A cast to bool, to fewer bits or to whole numbers gives the same to several of them.

    Args:
        places: of the inputs that are made from the number of rows.
    """
    kind = operation.type
    if kind == "Cast":
        return keeps_sums(operation)
    data = _OF_ELEMENTS.get(kind)
    return kind in _OF_NUMBERS or all(place == data for place in places)


def may_take_numbers(operation: Any, places: Sequence[int]) -> bool:
    """Returns True if an operation's rule knows what the number of rows does to its results."""
    kind = operation.type
    seen = {*LENGTHS.get(kind, ()), *ELEMENT_SHAPES.get(kind, ()), *_SEEN_BY_RULES.get(kind, ())}
    return follows_numbers(operation, [place for place in places if place not in seen])


def keeps_sums(operation: Any) -> bool:
    """Returns True for a cast of a sum that is the sum of the casts."""
    source, result = operation.inputs[0].dtype, operation.outputs[0].dtype
    if result.is_floating or result.is_complex:
        return bool(result.size >= 4)  # 16 bits would round each worker's part of a sum
    return bool(
        source.is_integer
        and result.is_integer
        and np.can_cast(source.as_numpy_dtype, result.as_numpy_dtype)
    )
