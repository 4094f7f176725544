"""Sends the result of a `@nano` function back to the parent.

A user's object is sent as its number, and becomes that object again. An object that the function
has made is sent with the values of its variables.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from nanotf.compat import keras_names, values
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import NanoError, ShippingError
from nanotf.shipping import heap, objects
from nanotf.shipping.packing import Packer, Pickled
from nanotf.wire.blocks import Block

# The user's objects, by kind, in the order of both sides; None for objects without an original.
Known = Mapping[str, Sequence[Any]]


def dump_result(parts: Mapping[str, Any], known: Known, packer: Packer) -> Pickled:
    """Pickles the results and changes of a `@nano` function, in a worker.

    Args:
        parts: mapping of a verb, such as "return", to the object that the function returns or
            changes.
        known: the user's objects. Each becomes itself again in the parent.
        packer: `Packer`, which takes the arrays.

    Returns:
        `Pickled`, of the parts' values.

    Raises:
        ShippingError: An object cannot be sent back.
    """
    since, ids = len(packer), _ids_of(known)
    named = {f"What a @nano function {does}": part for does, part in parts.items()}
    data, _ = heap.dump(named, lambda file: Pickler(file, packer.add, ids))
    return Pickled(data, packer.places(since))


def _ids_of(known: Known) -> dict[int, tuple[str, int]]:
    places = ((kind, i, obj) for kind, found in known.items() for i, obj in enumerate(found))
    return {id(obj): (kind, i) for kind, i, obj in places if obj is not None}


class Pickler(heap.Pickler):
    """Pickler that sends the values of variables with the objects that the receiver lacks."""

    def maker(self, obj: Any) -> Any:
        tf = require_tensorflow()
        if isinstance(obj, tf.keras.metrics.Metric) and any(map(_is_part, obj.variables)):
            raise ShippingError(
                "A metric that was made under a strategy's scope cannot be returned: each worker "
                f"holds a part of its sums. Received: the metric {obj.name!r}. Return its result()."
            )
        return super().maker(obj)

    def attributes(self, obj: Any) -> dict[str, Any]:
        found = super().attributes(obj)
        has_value = isinstance(obj, require_tensorflow().Variable) and objects.has_value(obj)
        return {**found, heap.VALUE: values.read(obj).numpy()} if has_value else found

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, require_tensorflow().distribute.DistributedValues):
            return _same, (_here(obj),)
        return super().reducer_override(obj)


def _here(value: Any) -> Any:
    return require_tensorflow().distribute.get_strategy().experimental_local_results(value)[0]


def _is_part(variable: Any) -> bool:
    distributed = require_tensorflow().distribute.DistributedValues
    return isinstance(keras_names.tf_variable(variable), distributed)


def _same(value: Any) -> Any:
    return value


def load_result(pickled: Pickled, block: Block | None, known: Known) -> list[Any]:
    """Undoes `dump_result`, in the parent."""
    buffers = [] if block is None else pickled.arrays(block)
    unpickler = heap.Unpickler(io.BytesIO(pickled.body), buffers, known)
    try:
        # Not checked: better a result with an odd attribute than a run without a result.
        return heap.load(unpickler, is_checked=False)
    except Exception as error:
        raise NanoError(
            "The result of a @nano function could not be unpickled in your process. Received: "
            f"{type(error).__name__}: {error}"
        ) from error
