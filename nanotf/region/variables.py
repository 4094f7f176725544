"""Replaces the handles of variables while a region's code runs.

Code accesses a variable only through its handle, a tensor. A region gives each of its variables a
copy of the handle, made by `spread`, which refers to the same memory. All gradients through the
copy, from dense reads, look-ups, loops and functions alike, are summed over workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from nanotf.compat import keras_common, values, variable_handles
from nanotf.errors import ModelError
from nanotf.region import rows
from nanotf.region.rows import Exchange


def plain(variable: Any) -> Any:
    """Returns the plain variable behind a Keras, distributed or casting variable."""
    variable = keras_common.tf_variable(variable)
    if hasattr(variable, "_values"):
        variable = variable._values[0]  # a worker has one replica
    return values.behind(variable)


def used_by(layer: Any, others: Sequence[Any] = ()) -> list[Any]:
    """Returns the plain variables that a layer may train or its code reads, each once."""
    found = [plain(v) for v in (*keras_common.tf_variables(layer), *others)]
    # Others get no gradient, and a copied handle serves only to sum gradients.
    found = [v for v in found if v.trainable and (v.dtype.is_floating or v.dtype.is_complex)]
    return list({id(v): v for v in found}.values())


@contextlib.contextmanager
def used_by_rows(
    exchange: Exchange, layer: Any, variables: Sequence[Any], positions: Sequence[Any] = ()
) -> Iterator[None]:
    """Makes code in this context use variables for its own rows.

    Args:
        layer: the layer whose code it is.
        variables: plain `tf.Variable`s, all that the code reads and may train.
        positions: those of which all workers look up the same rows.

    Raises:
        ModelError: The code has read another variable.
    """
    # Tapes hear of them here, since the code inside reads only copies of their handles.
    variable_handles.note_use(variables)
    before = [variable_handles.handle_of(v) for v in variables]
    with variable_handles.in_function():
        copies: list[Any] = [None] * len(before)
        alike = {id(v) for v in positions}
        # One `spread` for each kind: it treats the indices of all its sparse gradients alike.
        for of_whole in (False, True):
            places = [i for i, v in enumerate(variables) if (id(v) in alike) is of_whole]
            made = rows.spread(exchange, [before[i] for i in places], of_whole) if places else []
            for place, copy in zip(places, made, strict=True):
                copies[place] = copy
        for copy, handle in zip(copies, before, strict=True):
            variable_handles.name_same(copy, handle)
    for variable, copy in zip(variables, copies, strict=True):
        variable_handles.set_handle(variable, copy)
    try:
        with variable_handles.VariableReads() as used:
            yield
    finally:
        for variable, handle in zip(variables, before, strict=True):
            variable_handles.set_handle(variable, handle)
    known = {id(v) for v in variables}
    others = [v for v in used.variables if id(plain(v)) not in known and plain(v).dtype.is_floating]
    if others:
        raise ModelError(
            "A layer whose call is divided must read only variables that it read when it was traced. "
            f"Received: {layer.name}, which now reads {others[0].name!r}. Make the variable "
            "an attribute of the layer, or wrap the layer: nanotf.whole(layer)."
        )
