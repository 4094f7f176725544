"""Rules of look-ups, of lists of tensors and of variables."""

from __future__ import annotations

from nanotf.region.proof.rule_table import RuleArguments, attribute, is_equal, rule, summed
from nanotf.region.proof.states import (
    COUNT,
    COUNTED,
    EMPTY,
    EQUAL,
    HANDLE,
    LIST,
    ROWS,
    Coupled,
    TensorState,
    plain,
    product,
    total,
)


@rule("GatherV2 Gather")
def _gather(step: RuleArguments) -> TensorState:
    of, indices = step.inputs[:2]
    if step.operation.type == "Gather":
        axis, batch = 0, 0
    else:
        axis, batch = int(step.value(2)[0]), int(attribute(step, "batch_dims"))
    if not of.is_rows:
        return product(of, plain([indices]))
    axis %= len(step.shape(0))
    # Batch axes pair each row with its own indices; along others all rows meet all indices.
    if of.axis == axis or (indices.is_rows and (of.axis >= batch or indices.axis != of.axis)):
        raise Coupled("looks up rows of the batch")
    return product(of, plain([indices]))


@rule("GatherNd")
def _gather_nd(step: RuleArguments) -> TensorState:
    of, indices = step.inputs
    if of.is_rows and (indices.is_rows or of.axis < (step.shape(1)[-1] or len(step.shape(0)))):
        raise Coupled("looks up rows of the batch")
    return product(of, plain([indices]))


@rule("UnsortedSegmentSum ScatterNd TensorScatterAdd TensorScatterSub")
def _scatter(step: RuleArguments) -> TensorState:
    """Adds updates at indices: a sum over rows if these have rows."""
    kind = step.operation.type
    places = {"UnsortedSegmentSum": (1, 0), "ScatterNd": (0, 1)}.get(kind, (1, 2))
    indices, updates = (step.inputs[place] for place in places)
    if updates.is_rows and is_equal(indices) and kind != "ScatterNd":
        beside = len(step.shape(places[0])) - (kind != "UnsortedSegmentSum")
        if updates.axis >= beside:  # each row is added to by itself
            return total([updates, *(step.inputs[:1] if kind.startswith("Tensor") else ())])
    if any(d is not None and d % step.rows == 0 for d in step.out_shape()):
        raise Coupled("writes to places of rows")
    found = summed(product(plain([indices]), updates))
    return total([step.inputs[0], found]) if kind.startswith("Tensor") else found


@rule("DenseBincount")
def _bincount(step: RuleArguments) -> TensorState:
    state = plain(step.inputs)
    if state.is_rows and (step.inputs[0].axis or len(step.shape(0)) < 2):
        raise Coupled("counts values of all rows")
    return state


@rule("ResourceGather", HANDLE)
def _resource_gather(step: RuleArguments) -> TensorState:
    return plain(step.inputs[1:])


@rule("DataFormatVecPermute", COUNTED)
def _permute(step: RuleArguments) -> TensorState:
    if step.inputs[0].is_rows:
        raise Coupled("works along the rows")
    return step.inputs[0]


# ---------------------------------------------------------------------------------------------- lists
# A branch leaves values for its gradient, and nothing if the other branch was taken.
@rule("OptionalFromValue", COUNTED, LIST)
def _optional(step: RuleArguments) -> TensorState:
    return TensorState(LIST, of=step.inputs[0])


@rule("OptionalGetValue", LIST)
def _value_of_optional(step: RuleArguments) -> TensorState:
    found: TensorState = step.inputs[0].of
    return found


@rule("EmptyTensorList TensorListReserve OptionalNone")
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


@rule("TensorListFromTensor", COUNTED)
def _list_of(step: RuleArguments) -> TensorState:
    return TensorState(LIST, of=_element(step.inputs[0]))


@rule("TensorListSetItem TensorListPushBack", COUNTED, LIST)
def _put(step: RuleArguments) -> TensorState:
    item = step.inputs[2 if step.operation.type == "TensorListSetItem" else 1]
    return TensorState(LIST, of=total([_elements_of(step), item]))


@rule("TensorListGetItem", LIST)
def _get(step: RuleArguments) -> TensorState:
    return _elements_of(step)


@rule("TensorListPopBack", LIST)
def _pop(step: RuleArguments) -> list[TensorState]:
    return [step.inputs[0], _elements_of(step)]


@rule("TensorListStack TensorListGather", LIST)
def _stack(step: RuleArguments) -> TensorState:
    element = _elements_of(step)
    if step.operation.type == "TensorListGather" and not is_equal(step.inputs[1]):
        raise Coupled("takes elements of a list by rows")
    return element


@rule("TensorListScatterV2 TensorListScatter", COUNTED)
def _list_scatter(step: RuleArguments) -> TensorState:
    if not is_equal(step.inputs[1]):
        raise Coupled("puts elements into a list by rows")
    return TensorState(LIST, of=_element(step.inputs[0]))


@rule("TensorListResize", LIST)
def _resize(step: RuleArguments) -> TensorState:
    return step.inputs[0]


@rule("TensorListLength", LIST)
def _length(step: RuleArguments) -> TensorState:
    step.ignores(0)  # no rule makes a list whose length depends on the number of rows
    return EQUAL


@rule("TensorListElementShape", LIST)
def _element_shape(step: RuleArguments) -> TensorState:
    step.ignores(0)
    return COUNT


# ------------------------------------------------------------------------------------------ variables
@rule("VarIsInitializedOp VariableShape", HANDLE)
def _of_variable(step: RuleArguments) -> TensorState:
    return EQUAL
