"""Rules of products with sums in them: matrices, convolutions, images, normalization."""

from __future__ import annotations

from nanotf.region.proof.rule_table import RuleArguments, attribute, rule, summed
from nanotf.region.proof.states import EQUAL, WHOLE, Coupled, TensorState, plain, product


def _labels(terms: str, rank: int) -> list[str]:
    """Returns the label of each axis of an operand; those of an ellipsis are counted from its end."""
    before, dots, after = terms.partition("...")
    hidden = rank - len(before) - len(after) if dots else 0
    return [*before, *(f"...{place}" for place in range(hidden, 0, -1)), *after]


def _check_equation(step: RuleArguments) -> None:
    """Raises `Coupled` if operands' rows have different labels: each row meets all rows then."""
    operands = attribute(step, "equation").decode().replace(" ", "").partition("->")[0].split(",")
    found = {
        _labels(terms, len(step.shape(place)))[state.axis]
        for place, (terms, state) in enumerate(zip(operands, step.inputs, strict=True))
        if state.is_rows
    }
    if len(found) > 1:
        raise Coupled("multiplies each row by all rows of the batch")


@rule("MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum XlaEinsum")
def _contract(step: RuleArguments) -> TensorState:
    # The shapes of the other operations show it: two axes of a product have rows then.
    if step.operation.type in ("Einsum", "XlaEinsum"):
        _check_equation(step)
    found = step.inputs[0]
    for state in step.inputs[1:]:
        found = product(found, state)
    keeps = any(d is not None and d % step.rows == 0 for d in step.out_shape())
    return found if keeps else summed(found)


@rule(
    "Conv1D Conv2D Conv3D Conv DepthwiseConv2dNative Conv2DTranspose Conv2DBackpropInput "
    "Conv3DBackpropInputV2 DepthwiseConv2dNativeBackpropInput"
)
def _convolve(step: RuleArguments) -> TensorState:
    by_shape = "BackpropInput" in step.operation.type
    images, filters = (2, 1) if by_shape else (0, 1)  # a gradient's first input is a shape
    if step.inputs[filters].kind != WHOLE or (
        step.inputs[images].is_rows and step.inputs[images].axis
    ):
        raise Coupled("has filters made from rows, or rows along another axis than the first")
    return product(step.inputs[images], step.inputs[filters])


@rule("Conv2DBackpropFilter Conv3DBackpropFilterV2 DepthwiseConv2dNativeBackpropFilter")
def _filter_gradient(step: RuleArguments) -> TensorState:
    if any(state.is_rows and state.axis for state in (step.inputs[0], step.inputs[2])):
        raise Coupled("works along the rows")
    return summed(product(step.inputs[0], step.inputs[2]))


@rule("Dilation2D")
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


@rule(" ".join(_IMAGES))
def _images(step: RuleArguments) -> TensorState:
    places = _IMAGES[step.operation.type]
    colors = step.operation.type.startswith("Adjust")
    for place in places:
        if step.inputs[place].is_rows and (
            step.inputs[place].axis or (colors and len(step.shape(place)) < 4)
        ):
            raise Coupled("works along the rows")
    if step.operation.type in _LIKE_IMAGES:
        if step.inputs[1].is_rows and step.inputs[1].axis:
            raise Coupled("takes its shape from rows along another axis than the first")
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
    if not attribute(step, "is_training"):
        return False
    channels = 1 if attribute(step, "data_format").startswith(b"NC") else len(step.shape(place)) - 1
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


@rule("FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3")
def _normalize(step: RuleArguments) -> list[TensorState]:
    if _normalizes_rows(step, 0):
        return _by_shape(step, plain(step.inputs))
    return [plain(step.inputs)] + [EQUAL] * (len(step.operation.outputs) - 1)


@rule("FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3")
def _normalize_gradient(step: RuleArguments) -> list[TensorState]:
    if _normalizes_rows(step, 1):
        return _by_shape(step, product(plain(step.inputs[1:]), step.inputs[0]))
    found = product(plain(step.inputs[1:]), step.inputs[0])
    # After that of the data the gradients of scale and offset, then unused ones.
    return [found] + [summed(found)] * 2 + [EQUAL] * (len(step.operation.outputs) - 3)
