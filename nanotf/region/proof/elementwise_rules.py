"""Rules of operations that compute element by element, and of their gradients."""

from __future__ import annotations

from fractions import Fraction

from nanotf.region.proof.row_numbers import keeps_sums
from nanotf.region.proof.rule_table import RuleArguments, attribute, is_real, rule, summed
from nanotf.region.proof.states import (
    CHANGED,
    COUNTED,
    HANDLE,
    LIST,
    PARTIAL,
    ROWS,
    WHOLE,
    Coupled,
    TensorState,
    plain,
    product,
    total,
)


@rule(
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


@rule("LookupTableFindV2", HANDLE)
def _find(step: RuleArguments) -> TensorState:
    return plain(step.inputs[1:])


@rule("QuantizeAndDequantizeV2 QuantizeAndDequantizeV3 QuantizeAndDequantizeV4")
def _quantize(step: RuleArguments) -> TensorState:
    state = plain(step.inputs)
    if state.is_rows and not attribute(step, "range_given"):
        raise Coupled("quantizes rows by the range of all")
    return state


@rule(
    "CheckNumerics DebugIdentityV2 DebugIdentityV3 EnsureShape Identity OptimizationBarrier "
    "PreventGradient Snapshot StopGradient",
    *(CHANGED, COUNTED, HANDLE, LIST),
)
def _same(step: RuleArguments) -> TensorState:
    return step.inputs[0]


@rule("IdentityN", CHANGED, COUNTED, HANDLE, LIST)
def _same_each(step: RuleArguments) -> list[TensorState]:
    return list(step.inputs)


@rule("Conj Imag Neg Real", COUNTED)
def _linear(step: RuleArguments) -> TensorState:
    return step.inputs[0]


@rule("LeakyRelu")
def _leaky(step: RuleArguments) -> TensorState:
    return plain(step.inputs)  # linear by a factor that depends on the sign


@rule("Cast", CHANGED, COUNTED)
def _cast(step: RuleArguments) -> TensorState:
    return step.inputs[0] if keeps_sums(step.operation) else plain(step.inputs)


@rule("ZerosLike", COUNTED, LIST)
def _zeros(step: RuleArguments) -> TensorState:
    state = step.inputs[0]
    if state.kind == LIST:
        return TensorState(
            LIST, of=state.of.to(None) if state.of.kind in (WHOLE, ROWS, PARTIAL) else state.of
        )
    return TensorState(WHOLE if state.kind == PARTIAL else state.kind, None)  # zeros sum to zeros


@rule("Add AddN AddV2 Sub BiasAdd", COUNTED, LIST)
def _add(step: RuleArguments) -> TensorState:
    return total(step.inputs)


@rule("Select SelectV2")
def _select(step: RuleArguments) -> TensorState:
    chosen = total(step.inputs[1:])
    if step.inputs[0].is_rows and chosen.kind == PARTIAL:
        raise Coupled("chooses between sums over rows by rows")
    return product(plain(step.inputs[:1]), chosen)


@rule("Mul MulNoNan Multiply")
def _mul(step: RuleArguments) -> TensorState:
    return product(step.inputs[0], step.inputs[1])


@rule("Div DivNoNan RealDiv")
def _div(step: RuleArguments) -> TensorState:
    if not is_real(step):
        return plain(step.inputs)
    return product(step.inputs[0], step.inputs[1], sign=-1)


@rule("Square SquaredDifference Sqrt Rsqrt Inv Reciprocal")
def _powers(step: RuleArguments) -> TensorState:
    state = total(step.inputs if is_real(step) else [plain(step.inputs)])
    factor = {
        "Sqrt": Fraction(1, 2),
        "Rsqrt": Fraction(-1, 2),
        "Inv": Fraction(-1),
        "Reciprocal": Fraction(-1),
    }
    power = factor.get(step.operation.type, Fraction(2))
    if state.kind not in (WHOLE, ROWS):
        raise Coupled("uses a sum or mean over rows")
    # Zeros stay zeros, but a negative power of them does not.
    return state.to(None if state.power is None and power > 0 else (state.power or 0) * power)


_GRADIENTS = {  # gradients of element-wise functions, linear in the input at this place
    "EluGrad": 0, "LeakyReluGrad": 0, "Relu6Grad": 0, "ReluGrad": 0, "SeluGrad": 0,
    "SoftplusGrad": 0, "SoftsignGrad": 0, "InvGrad": 1, "ReciprocalGrad": 1, "RsqrtGrad": 1,
    "SigmoidGrad": 1, "SqrtGrad": 1, "TanhGrad": 1, "FakeQuantWithMinMaxArgsGradient": 0,
}  # fmt: skip


@rule(" ".join(_GRADIENTS))
def _gradient(step: RuleArguments) -> TensorState:
    place = _GRADIENTS[step.operation.type]
    if len({state.axis for state in step.inputs if state.is_rows}) > 1:
        raise Coupled("combines rows along different axes")
    return product(plain([step.inputs[1 - place]]), step.inputs[place])


@rule(
    "ClipByValueGrad QuantizeAndDequantizeV4Grad FakeQuantWithMinMaxVarsGradient FakeQuantWithMinMaxVarsPerChannelGradient"
)
def _gradient_with_limits(step: RuleArguments) -> list[TensorState]:
    of_input = product(plain(step.inputs[1:]), step.inputs[0])
    # The others are gradients of the limits, which all rows share.
    return [of_input] + [summed(of_input)] * (len(step.operation.outputs) - 1)


# Rules of operations that repeat an input along the axes of another.
BROADCASTING = (_each, _add, _select, _mul, _div, _powers)
