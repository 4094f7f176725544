"""The rule of each operation: the states of its results by those of its inputs.

A rule need not say where the rows of a result lie. `graph_reader.Reader` finds the one axis whose
length is a multiple of the number of rows, a prime that no other length is a multiple of. A result
that should have rows, but has no such axis, or two, is unknown. So a rule only has to exclude what
shapes cannot show: rows in another order, and rows that meet each other along their own axis.

An operation without a rule has no known result: the layer runs whole, which is always right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, Protocol

import numpy as np

from nanotf.region.proof.states import (
    CHANGED,
    COUNT,
    COUNTED,
    EMPTY,
    EQUAL,
    HANDLE,
    LIST,
    NOTHING,
    PARTIAL,
    ROWS,
    WHOLE,
    Coupled,
    TensorState,
    add_powers,
    plain,
    product,
    total,
)


class RuleArguments(Protocol):
    """One operation, as its rule sees it.

    It notes of which inputs the rule has read the state or the value. Each other input must be
    equal on all workers, or be the shape of a result: what a rule does not name cannot have rows.
    An input of another kind than the rule takes has made the operation unknown before.
    """

    operation: Any
    inputs: Sequence[TensorState]
    rows: int  # the number of rows of the batch

    def value(self, place: int) -> Any:
        """Returns an input's value as an array.

        Raises `Coupled` if it is not constant, or depends on the number of rows.
        """

    def value_by_rows(self, place: int) -> tuple[Any, Any]:
        """Returns an input's value, and for each element whether the number of rows changes it.

        Raises `Coupled` if it is not constant.
        """

    def shape(self, place: int) -> list[int | None]:
        """Returns an input's shape. Raises `Coupled` if its rank is unknown."""

    def out_shape(self, place: int = 0) -> list[int | None]:
        """Returns a result's shape."""

    def ignores(self, place: int) -> None:
        """Notes that no result depends on the elements of an input."""


Rule = Callable[[RuleArguments], "TensorState | list[TensorState]"]
RULES: dict[str, Rule] = {}
# The kinds of states that the inputs of an operation may have. Whatever else an input is, the
# operation's results are unknown.
TAKES: dict[str, frozenset[str]] = {}
_DATA = (WHOLE, ROWS, PARTIAL, NOTHING)


def _rule(names: str, *more: str) -> Callable[[Rule], Rule]:
    """Registers the rule of operations, with kinds that they take besides `_DATA`."""

    def register(rule: Rule) -> Rule:
        for name in names.split():
            assert name not in RULES, name
            RULES[name] = rule
            TAKES[name] = frozenset((*_DATA, *more))
        return rule

    return register


def _attribute(step: RuleArguments, name: str) -> Any:
    return step.operation.get_attr(name)


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
        return bool(result.size >= 4)
    return bool(
        source.is_integer
        and result.is_integer
        and np.can_cast(source.as_numpy_dtype, result.as_numpy_dtype)
    )


def _is_real(step: RuleArguments) -> bool:
    """Returns False for whole numbers, whose quotients are rounded."""
    dtype = step.operation.outputs[0].dtype
    return bool(dtype.is_floating or dtype.is_complex)


# ------------------------------------------------------------------------------- element by element
@_rule(
    "Abs Acos Acosh Angle ApproximateEqual Asin Asinh AsString Atan Atan2 Atanh BesselI0 BesselI0e "
    "BesselI1 BesselI1e Betainc BitwiseAnd BitwiseOr BitwiseXor Bitcast Bucketize Ceil "
    "ClipByValue Complex ComplexAbs Cos Cosh Dawsn DecodeRaw Digamma Elu Equal Erf Erfc Erfinv Exp Expint Expm1 "
    "FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars FakeQuantWithMinMaxVarsPerChannel "
    "Floor FloorDiv FloorMod FresnelCos FresnelSin Greater GreaterEqual Igamma Igammac IgammaGradA Invert "
    "IsFinite IsInf IsNan LeftShift Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr "
    "Maximum Minimum Mod Ndtri NextAfter NotEqual OneHot OnesLike Polygamma Pow "
    "RGBToHSV HSVToRGB RegexFullMatch RegexReplace Relu Relu6 RightShift Rint Round Selu Sigmoid Sign Sin Sinh Softplus "
    "Softsign Spence StaticRegexFullMatch StaticRegexReplace StringJoin StringLength StringLower "
    "StringStrip StringToHashBucket StringToHashBucketFast StringToHashBucketStrong StringToNumber "
    "StringUpper Substr Tan Tanh TruncateDiv TruncateMod Xdivy Xlog1py Xlogy Zeta"
)
def _each(step: RuleArguments) -> TensorState:
    return plain(step.inputs)


@_rule("LookupTableFindV2", HANDLE)
def _find(step: RuleArguments) -> TensorState:
    return plain(step.inputs[1:])


@_rule("QuantizeAndDequantizeV2 QuantizeAndDequantizeV3 QuantizeAndDequantizeV4")
def _quantize(step: RuleArguments) -> TensorState:
    state = plain(step.inputs)
    if state.is_rows and not _attribute(step, "range_given"):
        raise Coupled("quantizes rows by the range of all")
    return state


@_rule(
    "CheckNumerics DebugIdentityV2 DebugIdentityV3 EnsureShape Identity OptimizationBarrier "
    "PreventGradient Snapshot StopGradient",
    *(CHANGED, COUNTED, HANDLE, LIST),
)
def _same(step: RuleArguments) -> TensorState:
    return step.inputs[0]


@_rule("IdentityN", CHANGED, COUNTED, HANDLE, LIST)
def _same_each(step: RuleArguments) -> list[TensorState]:
    return list(step.inputs)


@_rule("Conj Imag Neg Real", COUNTED)
def _linear(step: RuleArguments) -> TensorState:
    return step.inputs[0]


@_rule("LeakyRelu")
def _leaky(step: RuleArguments) -> TensorState:
    return plain(step.inputs)  # linear by a factor that depends on the sign


@_rule("Cast", CHANGED, COUNTED)
def _cast(step: RuleArguments) -> TensorState:
    return step.inputs[0] if keeps_sums(step.operation) else plain(step.inputs)


@_rule("ZerosLike", COUNTED, LIST)
def _zeros(step: RuleArguments) -> TensorState:
    state = step.inputs[0]
    if state.kind == LIST:
        return TensorState(
            LIST, of=state.of.to(None) if state.of.kind in (WHOLE, ROWS, PARTIAL) else state.of
        )
    return TensorState(WHOLE if state.kind == PARTIAL else state.kind, None)


@_rule("Add AddN AddV2 Sub BiasAdd", COUNTED, LIST)
def _add(step: RuleArguments) -> TensorState:
    return total(step.inputs)


@_rule("Select SelectV2")
def _select(step: RuleArguments) -> TensorState:
    chosen = total(step.inputs[1:])
    if step.inputs[0].is_rows and chosen.kind == PARTIAL:
        raise Coupled("chooses between sums over rows by rows")
    return product(plain(step.inputs[:1]), chosen)


@_rule("Mul MulNoNan Multiply")
def _mul(step: RuleArguments) -> TensorState:
    return product(step.inputs[0], step.inputs[1])


@_rule("Div DivNoNan RealDiv")
def _div(step: RuleArguments) -> TensorState:
    if not _is_real(step):
        return plain(step.inputs)
    return product(step.inputs[0], step.inputs[1], sign=-1)


@_rule("Square SquaredDifference Sqrt Rsqrt Inv Reciprocal")
def _powers(step: RuleArguments) -> TensorState:
    state = total(step.inputs if _is_real(step) else [plain(step.inputs)])
    factor = {
        "Sqrt": Fraction(1, 2),
        "Rsqrt": Fraction(-1, 2),
        "Inv": Fraction(-1),
        "Reciprocal": Fraction(-1),
    }
    power = factor.get(step.operation.type, Fraction(2))
    if state.kind not in (WHOLE, ROWS):
        raise Coupled("uses a sum or mean over rows")
    return state.to(None if state.power is None and power > 0 else (state.power or 0) * power)


_GRADIENTS = {  # gradients of element-wise functions, linear in the input at this place
    "EluGrad": 0, "LeakyReluGrad": 0, "Relu6Grad": 0, "ReluGrad": 0, "SeluGrad": 0,
    "SoftplusGrad": 0, "SoftsignGrad": 0, "InvGrad": 1, "ReciprocalGrad": 1, "RsqrtGrad": 1,
    "SigmoidGrad": 1, "SqrtGrad": 1, "TanhGrad": 1, "FakeQuantWithMinMaxArgsGradient": 0,
}  # fmt: skip


@_rule(" ".join(_GRADIENTS))
def _gradient(step: RuleArguments) -> TensorState:
    place = _GRADIENTS[step.operation.type]
    if len({state.axis for state in step.inputs if state.is_rows}) > 1:
        raise Coupled("combines rows along different axes")
    return product(plain([step.inputs[1 - place]]), step.inputs[place])


@_rule(
    "ClipByValueGrad QuantizeAndDequantizeV4Grad FakeQuantWithMinMaxVarsGradient FakeQuantWithMinMaxVarsPerChannelGradient"
)
def _gradient_with_limits(step: RuleArguments) -> list[TensorState]:
    of_input = product(plain(step.inputs[1:]), step.inputs[0])
    return [of_input] + [_summed(of_input)] * (len(step.operation.outputs) - 1)


# Rules of operations that repeat an input along the axes of another.
BROADCASTING = (_each, _add, _select, _mul, _div, _powers)


# --------------------------------------------------------------------------------------- along axes
def _summed(state: TensorState) -> TensorState:
    """Returns the state of a sum over all axes."""
    return TensorState(PARTIAL, state.power) if state.is_rows else state


def _normalized(axes: Any, rank: int) -> list[int]:
    return [int(axis) % rank for axis in np.ravel(axes)]


def _crosses(step: RuleArguments, axes: Any, place: int = 0) -> bool:
    """Returns True if some of the axes are the one along which an input's rows lie."""
    state = step.inputs[place]
    return state.is_rows and state.axis in _normalized(axes, len(step.shape(place)))


@_rule("Sum", COUNTED)
def _sum(step: RuleArguments) -> TensorState:
    state = step.inputs[0]
    return (
        TensorState(PARTIAL, state.power)
        if state.is_rows and _crosses(step, step.value(1))
        else state
    )


@_rule("Mean")
def _mean(step: RuleArguments) -> TensorState:
    state = step.inputs[0] if _is_real(step) else plain(step.inputs[:1])
    if state.is_rows and not _is_real(step) and _crosses(step, step.value(1)):
        raise Coupled("rounds a mean over rows")
    if state.is_rows and _crosses(step, step.value(1)):
        return TensorState(PARTIAL, add_powers(state.power, Fraction(-1)))
    return state


@_rule("BiasAddGrad")
def _bias_gradient(step: RuleArguments) -> TensorState:
    return _summed(step.inputs[0])


@_rule("L2Loss")
def _l2(step: RuleArguments) -> TensorState:
    state = step.inputs[0]
    if state.kind == PARTIAL:
        raise Coupled("squares a sum or mean over rows")
    return _summed(state.to(None if state.power is None else state.power * 2))


@_rule("All Any ArgMax ArgMin EuclideanNorm Max Min Prod")
def _reduce(step: RuleArguments) -> TensorState:
    found = plain(step.inputs[:1])
    if found.is_rows and _crosses(step, step.value(1)):
        raise Coupled("reduces rows to one value")
    return found


@_rule("Cumsum Cumprod CumulativeLogsumexp ReverseV2 Roll")
def _along(step: RuleArguments) -> TensorState:
    axes = step.value(2 if step.operation.type == "Roll" else 1)
    if step.inputs[0].is_rows and _crosses(step, axes):
        raise Coupled("works along the rows")
    is_linear = step.operation.type in ("Cumsum", "ReverseV2", "Roll")
    return step.inputs[0] if is_linear else plain(step.inputs[:1])


_LAST_AXES = {  # operations on the last axes, each with their number
    "LogSoftmax": 1, "Softmax": 1, "TopKV2": 1, "NthElement": 1, "SparseSoftmaxCrossEntropyWithLogits": 1,
    "SoftmaxCrossEntropyWithLogits": 1, "InTopK": 1, "InTopKV2": 1, "FFT": 1, "IFFT": 1,
    "FFT2D": 2, "IFFT2D": 2, "FFT3D": 3, "IFFT3D": 3, "RFFT": 1, "IRFFT": 1, "RFFT2D": 2, "IRFFT2D": 2,
    "Cholesky": 2, "CholeskyGrad": 2, "LogMatrixDeterminant": 2, "MatrixDeterminant": 2,
    "MatrixInverse": 2, "MatrixSquareRoot": 2, "MatrixSolve": 2, "MatrixTriangularSolve": 2,
    "Qr": 2, "SelfAdjointEigV2": 2, "Svd": 2, "MatrixExponential": 2,
}  # fmt: skip
_BESIDE_LABELS = ("SparseSoftmaxCrossEntropyWithLogits", "InTopK", "InTopKV2")


@_rule(" ".join(_LAST_AXES))
def _last_axes(step: RuleArguments) -> list[TensorState]:
    kind = step.operation.type
    data = (
        2
        if kind in ("MatrixSolve", "MatrixTriangularSolve", "CholeskyGrad")
        or "CrossEntropy" in kind
        or kind in _BESIDE_LABELS
        else 1
    )
    found = plain(step.inputs[:data])
    for place, state in enumerate(step.inputs[:data]):
        axes = 0 if kind in _BESIDE_LABELS and len(step.shape(place)) == 1 else _LAST_AXES[kind]
        if state.is_rows and state.axis >= len(step.shape(place)) - axes:
            raise Coupled("works along the rows")
    return [found] * len(step.operation.outputs)


_BANDS = {"MatrixDiagV3": 1, "MatrixSetDiagV3": 2}  # the place of the diagonals' numbers
_PADDING = {"MatrixDiagV3": (4,), "MatrixDiagPartV3": (2,)}


@_rule(
    "MatrixBandPart MatrixDiagV3 MatrixDiagPartV3 MatrixSetDiagV3 MatrixDiag MatrixDiagPart MatrixSetDiag"
)
def _diagonals(step: RuleArguments) -> TensorState:
    kind = step.operation.type
    diagonal = {"MatrixDiagV3": 0, "MatrixDiag": 0}.get(kind, 1)
    data = [0, 1] if kind.startswith("MatrixSetDiag") else [0]
    for place in data:
        state = step.inputs[place]
        if state.is_rows:
            # Several diagonals lie along an axis of their own.
            several = kind in _BANDS and len(set(step.value(_BANDS[kind]))) > 1
            axes = 1 if place == diagonal and not several else 2
            if state.axis >= len(step.shape(place)) - axes:
                raise Coupled("works along the rows")
    return total([step.inputs[place] for place in (*data, *_PADDING.get(kind, ()))])


# --------------------------------------------------------------------------- products with sums in them
def _labels(terms: str, rank: int) -> list[str]:
    """Returns the label of each axis of an operand; those of an ellipsis are counted from its end."""
    before, dots, after = terms.partition("...")
    hidden = rank - len(before) - len(after) if dots else 0
    return [*before, *(f"...{place}" for place in range(hidden, 0, -1)), *after]


def _check_equation(step: RuleArguments) -> None:
    """Raises `Coupled` if operands' rows have different labels: each row meets all rows then."""
    operands = _attribute(step, "equation").decode().replace(" ", "").partition("->")[0].split(",")
    found = {
        _labels(terms, len(step.shape(place)))[state.axis]
        for place, (terms, state) in enumerate(zip(operands, step.inputs, strict=True))
        if state.is_rows
    }
    if len(found) > 1:
        raise Coupled("multiplies each row by all rows of the batch")


@_rule("MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum XlaEinsum")
def _contract(step: RuleArguments) -> TensorState:
    # The shapes of the other operations show it: two axes of a product have rows then.
    if step.operation.type in ("Einsum", "XlaEinsum"):
        _check_equation(step)
    found = step.inputs[0]
    for state in step.inputs[1:]:
        found = product(found, state)
    keeps = any(d is not None and d % step.rows == 0 for d in step.out_shape())
    return found if keeps else _summed(found)


@_rule(
    "Conv1D Conv2D Conv3D Conv DepthwiseConv2dNative Conv2DTranspose Conv2DBackpropInput "
    "Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput"
)
def _convolve(step: RuleArguments) -> TensorState:
    by_shape = "BackpropInput" in step.operation.type
    images, filters = (2, 1) if by_shape else (0, 1)
    if step.inputs[filters].kind != WHOLE or (
        step.inputs[images].is_rows and step.inputs[images].axis
    ):
        raise Coupled("has filters made from rows, or rows along another axis than the first")
    return product(step.inputs[images], step.inputs[filters])


@_rule("Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter")
def _filter_gradient(step: RuleArguments) -> TensorState:
    if any(state.is_rows and state.axis for state in (step.inputs[0], step.inputs[2])):
        raise Coupled("works along the rows")
    return _summed(product(step.inputs[0], step.inputs[2]))


@_rule("Dilation2D")
def _dilate(step: RuleArguments) -> TensorState:
    if step.inputs[1].is_rows or (step.inputs[0].is_rows and step.inputs[0].axis):
        raise Coupled("has filters made from rows, or rows along another axis than the first")
    return plain(step.inputs)


_IMAGES = {  # operations on each image of a batch, with the places of inputs that are images
    "AvgPool": (0,), "AvgPool3D": (0,), "AvgPool3DGrad": (1,), "AvgPoolGrad": (1,),
    "AdjustContrastv2": (0,), "AdjustHue": (0,), "AdjustSaturation": (0,),
    "DepthToSpace": (0,), "ExtractImagePatches": (0,), "ExtractVolumePatches": (0,),
    "ImageProjectiveTransformV2": (1, 0), "ImageProjectiveTransformV3": (1, 0),
    "LRN": (0,), "LRNGrad": (0, 1, 2), "MaxPool": (0,), "MaxPool3D": (0,),
    "MaxPool3DGrad": (0, 1, 2), "MaxPool3DGradGrad": (0, 1, 2), "MaxPoolGrad": (0, 1, 2),
    "MaxPoolGradGrad": (0, 1, 2), "MaxPoolGradGradV2": (0, 1, 2), "MaxPoolGradV2": (0, 1, 2), "MaxPoolV2": (0,),
    "ResizeArea": (0,), "ResizeBicubic": (0,), "ResizeBicubicGrad": (0,), "ResizeBilinear": (0,),
    "ResizeBilinearGrad": (0,), "ResizeNearestNeighbor": (0,), "ResizeNearestNeighborGrad": (0,),
    "ScaleAndTranslate": (0,), "ScaleAndTranslateGrad": (0,), "SpaceToDepth": (0,),
}  # fmt: skip
_NOT_LINEAR = (
    "LRN",
    "MaxPool",
    "MaxPool3D",
    "MaxPoolV2",
    "LRNGrad",
    "AdjustContrastv2",
    "AdjustHue",
    "AdjustSaturation",
)


# Gradients that take the original images, their second input, for its shape alone.
_LIKE_IMAGES = ("ResizeBicubicGrad", "ResizeBilinearGrad", "ScaleAndTranslateGrad")


@_rule(" ".join(_IMAGES))
def _images(step: RuleArguments) -> TensorState:
    places = _IMAGES[step.operation.type]
    colors = step.operation.type.startswith("Adjust")
    for place in places:
        if step.inputs[place].is_rows and (
            step.inputs[place].axis or (colors and len(step.shape(place)) < 4)
        ):
            raise Coupled("works along the rows")
    if step.operation.type in _LIKE_IMAGES:
        step.ignores(1)
    images = [step.inputs[place] for place in places]
    if step.operation.type in _NOT_LINEAR:
        return plain(images)
    # The result is linear in the last image: in gradients of pools, the upstream gradient.
    found = images[-1]
    for state in images[:-1]:
        found = product(plain([state]), found)
    return found


def _normalizes_rows(step: RuleArguments, place: int) -> bool:
    """Returns True for statistics of each row by itself: the rows are the channels."""
    if not _attribute(step, "is_training"):
        return False
    channels = (
        1 if _attribute(step, "data_format").startswith(b"NC") else len(step.shape(place)) - 1
    )
    state = step.inputs[place]
    if not (state.is_rows and state.axis == channels) and state != EQUAL:
        raise Coupled("computes statistics of the batch")
    return state.is_rows


def _by_shape(step: RuleArguments, state: TensorState) -> list[TensorState]:
    """Returns the state for results that have rows, `EQUAL` for the others.

    One without a known shape is memory for the gradient, which kernels for CPUs leave empty.
    """
    shapes = [() if t.shape.rank is None else t.shape for t in step.operation.outputs]
    have_rows = [any(d and d % step.rows == 0 for d in shape) for shape in shapes]
    return [state if has_rows else EQUAL for has_rows in have_rows]


@_rule("FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3")
def _normalize(step: RuleArguments) -> list[TensorState]:
    if _normalizes_rows(step, 0):
        return _by_shape(step, plain(step.inputs))
    return [plain(step.inputs)] + [EQUAL] * (len(step.operation.outputs) - 1)


@_rule("FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3")
def _normalize_gradient(step: RuleArguments) -> list[TensorState]:
    if _normalizes_rows(step, 1):
        return _by_shape(step, product(plain(step.inputs[1:]), step.inputs[0]))
    found = product(plain(step.inputs[1:]), step.inputs[0])
    return [found] + [_summed(found)] * 2 + [EQUAL] * (len(step.operation.outputs) - 3)


# -------------------------------------------------------------------------------------------- shapes
@_rule("Shape ShapeN Size", CHANGED, COUNTED, HANDLE, LIST)
def _shape(step: RuleArguments) -> list[TensorState]:
    return [EQUAL if state.kind in (WHOLE, PARTIAL) else COUNT for state in step.inputs]


@_rule("Rank", CHANGED, COUNTED, HANDLE, LIST)
def _rank(step: RuleArguments) -> TensorState:
    step.ignores(0)
    return EQUAL


@_rule("Fill BroadcastTo", COUNTED)
def _broadcast(step: RuleArguments) -> TensorState:
    state = step.inputs[1 if step.operation.type == "Fill" else 0]
    if state.is_rows or state.kind == PARTIAL:
        return state  # with a second axis of rows, it is unknown
    has_rows = any(d is not None and d % step.rows == 0 for d in step.out_shape())
    return TensorState(ROWS, state.power, each=0) if has_rows and state.kind == WHOLE else state


@_rule("Range", COUNTED)
def _range(step: RuleArguments) -> TensorState:
    states = list(step.inputs)
    if all(map(_is_equal, states)):
        return EQUAL
    length = step.out_shape()[0]
    if _is_real(step) or not length or length % step.rows:
        # Such as a range in steps of 5000, which has one number for few rows.
        raise Coupled("makes a range that is not as long as the rows")
    return COUNT


@_rule("Tile", COUNTED)
def _tile(step: RuleArguments) -> TensorState:
    state = step.inputs[0]
    if state.is_rows and step.value(1)[state.axis] != 1:
        raise Coupled("repeats the rows")
    if state.kind == WHOLE:
        repeats = [int(n) for n in step.value_by_rows(1)[0]]  # the result's shape shows them
        if any(n % step.rows == 0 for n in repeats):
            return TensorState(ROWS, state.power, each=0)
    return state


@_rule("ExpandDims Transpose ConjugateTranspose", COUNTED)
def _move(step: RuleArguments) -> TensorState:
    return step.inputs[0]


@_rule("Squeeze", COUNTED)
def _squeeze(step: RuleArguments) -> TensorState:
    state = step.inputs[0]
    if state.is_rows and not _attribute(step, "squeeze_dims"):
        raise Coupled("removes the axis of the rows if there is one row")
    return state


@_rule("Reshape", COUNTED)
def _reshape(step: RuleArguments) -> TensorState:
    state = step.inputs[0]
    if not state.is_rows:
        return state
    before, after = step.shape(0), step.out_shape()
    if None in before or None in after:
        raise Coupled("reshapes to an unknown shape")
    sizes: Any = (before, after)
    outer = math.prod(sizes[0][: state.axis])
    axis = next((i for i, d in enumerate(after) if d and d % step.rows == 0), None)
    if axis is None:
        raise Coupled("reshapes rows away")
    outer_after = math.prod(sizes[1][:axis])
    each_after = after[axis] // step.rows  # type: ignore[operator]
    # The elements of the whole tensor are ordered as (a, rows, b), each of a and b of any shape.
    if state.strided and state.each > 1:
        outer *= state.each
    if outer_after == outer:
        return TensorState(ROWS, state.power, each=each_after)
    if outer == outer_after * each_after:
        return TensorState(ROWS, state.power, each=each_after, strided=True)
    raise Coupled("reshapes the rows into others")


@_rule("Pack", COUNTED)
def _pack(step: RuleArguments) -> TensorState:
    return total(step.inputs)


@_rule("Unpack Split SplitV", COUNTED)
def _split(step: RuleArguments) -> list[TensorState]:
    place = 1 if step.operation.type == "Split" else 0
    axis = (
        _attribute(step, "axis")
        if step.operation.type == "Unpack"
        else step.value(0 if place else 2)
    )
    if step.inputs[place].is_rows and _crosses(step, axis, place):
        raise Coupled("splits the rows")
    return [step.inputs[place]] * len(step.operation.outputs)


@_rule("ConcatV2", COUNTED)
def _concat(step: RuleArguments) -> TensorState:
    last = len(step.inputs) - 1
    axis = step.value(last)
    if any(_crosses(step, axis, place) for place in range(last)):
        raise Coupled("puts rows after rows")
    return total(step.inputs[:last])


def _keeps_all(step: RuleArguments, state: TensorState) -> bool:
    """Returns True if the result has as many rows as the input."""
    length = step.rows * state.each
    return length in step.out_shape() and step.shape(0)[state.axis] == length


def _is_equal(state: TensorState) -> bool:
    return state.kind == WHOLE and not state.power


def _entry_of(step: RuleArguments, axis: int, rank: int) -> int | None:
    """Returns the place of an axis in the begin, end and strides of a slice; None if it has none."""
    masks = [_attribute(step, name) for name in ("ellipsis_mask", "new_axis_mask")]
    places = range(len(step.value(3)))
    dots, new = ([place for place in places if mask >> place & 1] for mask in masks)
    new = [place for place in new if place not in dots]
    at = 0
    for place in places:
        if place in dots:
            at += rank - (len(places) - len(dots) - len(new))
        elif place not in new:
            if at == axis:
                return place
            at += 1
    return None


def _check_slice(step: RuleArguments, axis: int, rank: int, length: int) -> None:
    """Raises `Coupled` unless a slice keeps all rows, for any number of them, and cuts them alike.

    A begin or an end outside the axis is clamped, so that a shape does not show it.
    """
    entry = _entry_of(step, axis, rank)
    for place, name in ((1, "begin_mask"), (2, "end_mask")):
        is_open = entry is None or _attribute(step, name) >> entry & 1
        if is_open and _is_equal(step.inputs[place]):
            continue
        value, varies = step.value_by_rows(place)
        if not is_open:
            is_all = (
                varies[entry] and value[entry] == length
                if name == "end_mask"
                else value[entry] == 0
            )
            if not is_all:
                raise Coupled("takes some of the rows")
            varies[entry] = False
        if varies.any():
            raise Coupled("takes a part that depends on the number of rows")


@_rule("StridedSlice Slice Pad PadV2 MirrorPad MirrorPadGrad", COUNTED)
def _slice(step: RuleArguments) -> TensorState:
    state, kind = step.inputs[0], step.operation.type
    padding = step.inputs[2] if kind == "PadV2" else None  # of a sum, workers would add it each
    if padding is not None and padding.power is not None:
        plain([state, padding])
    if state.kind == COUNTED:
        return plain(step.inputs[1:]) and COUNT
    if not state.is_rows:
        return state
    if not _keeps_all(step, state) or (kind == "StridedSlice" and min(step.value(3)) < 0):
        raise Coupled("takes some of the rows, or adds others")
    if kind == "StridedSlice":
        _check_slice(step, state.axis, len(step.shape(0)), step.rows * state.each)
    if kind == "Slice" and not _is_equal(step.inputs[2]):
        _, varies = step.value_by_rows(2)
        varies[state.axis] = False
        if varies.any():
            raise Coupled("takes a part that depends on the number of rows")
    return state


@_rule("StridedSliceGrad", COUNTED)
def _slice_gradient(step: RuleArguments) -> TensorState:
    state = step.inputs[4]
    if state.is_rows and (step.rows * state.each not in step.out_shape() or min(step.value(3)) < 0):
        raise Coupled("takes some of the rows")
    if state.is_rows:
        shape, length = step.out_shape(), step.rows * state.each
        _check_slice(step, shape.index(length), len(shape), length)
    return state


@_rule("SpaceToBatchND BatchToSpaceND")
def _blocks(step: RuleArguments) -> TensorState:
    state = step.inputs[0]
    if not state.is_rows:
        return state
    if state.axis:
        raise Coupled("works along the rows")
    # The places in a block come first, then the rows, in the result and in the input that has them.
    is_first = state.strided or state.each == 1
    each = (step.out_shape()[0] or 0) // step.rows
    if not is_first or not each:
        raise Coupled("mixes several rows for each row of the batch")
    return TensorState(ROWS, state.power, each=each, strided=True)


@_rule("ReverseSequence")
def _reverse_sequence(step: RuleArguments) -> TensorState:
    if _crosses(step, _attribute(step, "seq_dim")):
        raise Coupled("works along the rows")
    lengths = step.inputs[1]
    if lengths.is_rows and (lengths.each > 1 or not _crosses(step, _attribute(step, "batch_dim"))):
        raise Coupled("works along the rows")
    return product(plain([lengths]), step.inputs[0])


# ------------------------------------------------------------------------------------------- look-ups
@_rule("GatherV2 Gather")
def _gather(step: RuleArguments) -> TensorState:
    of, indices = step.inputs[:2]
    if step.operation.type == "Gather":
        axis, batch = 0, 0
    else:
        axis, batch = int(step.value(2)[0]), int(_attribute(step, "batch_dims"))
    if not of.is_rows:
        return product(of, plain([indices]))
    axis %= len(step.shape(0))
    if of.axis == axis or (indices.is_rows and (of.axis >= batch or indices.axis != of.axis)):
        raise Coupled("looks up rows of the batch")
    return product(of, plain([indices]))


@_rule("GatherNd")
def _gather_nd(step: RuleArguments) -> TensorState:
    of, indices = step.inputs
    if of.is_rows and (indices.is_rows or of.axis < (step.shape(1)[-1] or len(step.shape(0)))):
        raise Coupled("looks up rows of the batch")
    return product(of, plain([indices]))


@_rule("UnsortedSegmentSum ScatterNd TensorScatterAdd TensorScatterSub")
def _scatter(step: RuleArguments) -> TensorState:
    """Adds updates at indices: a sum over rows if these have rows."""
    kind = step.operation.type
    places = {"UnsortedSegmentSum": (1, 0), "ScatterNd": (0, 1)}.get(kind, (1, 2))
    indices, updates = (step.inputs[place] for place in places)
    if updates.is_rows and _is_equal(indices) and kind != "ScatterNd":
        beside = len(step.shape(places[0])) - (kind != "UnsortedSegmentSum")
        if updates.axis >= beside:  # each row is added to by itself
            return total([updates, *(step.inputs[:1] if kind.startswith("Tensor") else ())])
    if any(d is not None and d % step.rows == 0 for d in step.out_shape()):
        raise Coupled("writes to places of rows")
    found = _summed(product(plain([indices]), updates))
    return total([step.inputs[0], found]) if kind.startswith("Tensor") else found


@_rule("DenseBincount")
def _bincount(step: RuleArguments) -> TensorState:
    state = plain(step.inputs)
    if state.is_rows and (step.inputs[0].axis or len(step.shape(0)) < 2):
        raise Coupled("counts values of all rows")
    return state


@_rule("ResourceGather", HANDLE)
def _resource_gather(step: RuleArguments) -> TensorState:
    return plain(step.inputs[1:])


@_rule("DataFormatVecPermute", COUNTED)
def _permute(step: RuleArguments) -> TensorState:
    if step.inputs[0].is_rows:
        raise Coupled("works along the rows")
    return step.inputs[0]


# ---------------------------------------------------------------------------------------------- lists
# A branch leaves values for its gradient, and nothing if the other branch was taken.
@_rule("OptionalFromValue", COUNTED, LIST)
def _optional(step: RuleArguments) -> TensorState:
    return TensorState(LIST, of=step.inputs[0])


@_rule("OptionalGetValue", LIST)
def _value_of_optional(step: RuleArguments) -> TensorState:
    found: TensorState = step.inputs[0].of
    return found


@_rule("EmptyTensorList TensorListReserve OptionalNone")
def _empty(step: RuleArguments) -> TensorState:
    return TensorState(LIST, of=EMPTY)


def _element(state: TensorState) -> TensorState:
    """Returns the state of an element of a list that a tensor is split into."""
    if state.is_rows:
        if state.axis == 0:
            raise Coupled("makes a list of the rows")
        return TensorState(ROWS, state.power, state.axis - 1, state.each, state.strided)
    if state.kind == COUNTED:  # it may be as long as the batch, or as what its numbers say
        raise Coupled("makes a list of numbers made from the number of rows")
    return state


def _elements_of(step: RuleArguments, place: int = 0) -> TensorState:
    state = step.inputs[place]
    if state.kind != LIST:
        raise Coupled("uses a list that another operation made")
    element: TensorState = state.of
    return element


@_rule("TensorListFromTensor", COUNTED)
def _list_of(step: RuleArguments) -> TensorState:
    return TensorState(LIST, of=_element(step.inputs[0]))


@_rule("TensorListSetItem TensorListPushBack", COUNTED, LIST)
def _put(step: RuleArguments) -> TensorState:
    item = step.inputs[2 if step.operation.type == "TensorListSetItem" else 1]
    return TensorState(LIST, of=total([_elements_of(step), item]))


@_rule("TensorListGetItem", LIST)
def _get(step: RuleArguments) -> TensorState:
    return _elements_of(step)


@_rule("TensorListPopBack", LIST)
def _pop(step: RuleArguments) -> list[TensorState]:
    return [step.inputs[0], _elements_of(step)]


@_rule("TensorListStack TensorListGather", LIST)
def _stack(step: RuleArguments) -> TensorState:
    element = _elements_of(step)
    if step.operation.type == "TensorListGather" and not _is_equal(step.inputs[1]):
        raise Coupled("takes elements of a list by rows")
    return element


@_rule("TensorListScatterV2 TensorListScatter", COUNTED)
def _list_scatter(step: RuleArguments) -> TensorState:
    if not _is_equal(step.inputs[1]):
        raise Coupled("puts elements into a list by rows")
    return TensorState(LIST, of=_element(step.inputs[0]))


@_rule("TensorListResize", LIST)
def _resize(step: RuleArguments) -> TensorState:
    return step.inputs[0]


@_rule("TensorListLength", LIST)
def _length(step: RuleArguments) -> TensorState:
    step.ignores(0)  # no rule makes a list whose length depends on the number of rows
    return EQUAL


@_rule("TensorListElementShape", LIST)
def _element_shape(step: RuleArguments) -> TensorState:
    step.ignores(0)
    return COUNT


# ------------------------------------------------------------------------------------------ variables
@_rule("VarIsInitializedOp VariableShape", HANDLE)
def _of_variable(step: RuleArguments) -> TensorState:
    return EQUAL
