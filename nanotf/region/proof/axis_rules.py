"""Rules of operations along axes: sums, orders, diagonals."""

from __future__ import annotations

from fractions import Fraction

from nanotf.region.proof.rule_table import RuleArguments, crosses, is_real, rule, summed
from nanotf.region.proof.states import (
    COUNTED,
    PARTIAL,
    Coupled,
    TensorState,
    add_powers,
    plain,
    total,
)


@rule("Sum", COUNTED)
def _sum(step: RuleArguments) -> TensorState:
    state = step.inputs[0]
    return (
        TensorState(PARTIAL, state.power)
        if state.is_rows and crosses(step, step.value(1))
        else state
    )


@rule("Mean")
def _mean(step: RuleArguments) -> TensorState:
    state = step.inputs[0] if is_real(step) else plain(step.inputs[:1])
    if state.is_rows and not is_real(step) and crosses(step, step.value(1)):
        raise Coupled("rounds a mean over rows")
    if state.is_rows and crosses(step, step.value(1)):
        return TensorState(PARTIAL, add_powers(state.power, Fraction(-1)))
    return state


@rule("BiasAddGrad")
def _bias_gradient(step: RuleArguments) -> TensorState:
    return summed(step.inputs[0])


@rule("L2Loss")
def _l2(step: RuleArguments) -> TensorState:
    state = step.inputs[0]
    if state.kind == PARTIAL:
        raise Coupled("squares a sum or mean over rows")
    return summed(state.to(None if state.power is None else state.power * 2))


@rule("All Any ArgMax ArgMin EuclideanNorm Max Min Prod")
def _reduce(step: RuleArguments) -> TensorState:
    found = plain(step.inputs[:1])
    if found.is_rows and crosses(step, step.value(1)):
        raise Coupled("reduces rows to one value")
    return found


@rule("Cumsum Cumprod CumulativeLogsumexp ReverseV2 Roll")
def _along(step: RuleArguments) -> TensorState:
    axes = step.value(2 if step.operation.type == "Roll" else 1)
    if step.inputs[0].is_rows and crosses(step, axes):
        raise Coupled("works along the rows")
    # A linear operation also keeps sums and means over rows.
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


@rule(" ".join(_LAST_AXES))
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
        # Labels have no axis of classes: their only one is that of the rows.
        axes = 0 if kind in _BESIDE_LABELS and len(step.shape(place)) == 1 else _LAST_AXES[kind]
        if state.is_rows and state.axis >= len(step.shape(place)) - axes:
            raise Coupled("works along the rows")
    return [found] * len(step.operation.outputs)


_BANDS = {"MatrixDiagV3": 1, "MatrixSetDiagV3": 2}  # the place of the diagonals' numbers
_PADDING = {"MatrixDiagV3": (4,), "MatrixDiagPartV3": (2,)}  # the place of the padding value


@rule(
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
