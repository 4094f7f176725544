"""What a `@nano` function returns, on its way home.

An object of the user's is sent as its number, and is that object again; what the function has made
is sent with the values of its variables.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from nanotf.compat.versions import require_tensorflow
from nanotf.errors import NanoError, ShippingError
from nanotf.shipping import objects, pickling
from nanotf.shipping.blocks import Block
from nanotf.shipping.packing import Packer, Pickled
from nanotf.shipping.programs import RootPickler, RootUnpickler, VariableRecipe, recipe_of_root


def dump_result(value: Any, roots: Sequence[Any], packer: Packer) -> Pickled:
    """Pickles what a `@nano` function returns, in a worker.

    A root, or a part of one, is the user's own object again in the parent.

    Raises:
        ShippingError: It cannot be sent back.
    """
    numbers: dict[int, Any] = {}
    for index, root in enumerate(roots):
        for place, part in objects.parts_of(root).items():
            numbers.setdefault(id(part), ("part", index, place))
    numbers.update({id(root): ("root", index) for index, root in enumerate(roots)})
    file = io.BytesIO()
    try:
        pickling.dump(_ResultPickler(file, numbers, packer), value)
    except ShippingError as error:
        raise ShippingError(
            "What a @nano function returns must be picklable to come back from its worker. "
            f"Received: {type(value).__qualname__}. {error}"
        ) from error
    return Pickled(file.getvalue(), packer.places(0))


class _ResultPickler(RootPickler):
    """Sends objects that the function has made with the values of their variables."""

    def reducer_override(self, obj: Any) -> Any:
        tf = require_tensorflow()
        local = tf.distribute.get_strategy().experimental_local_results
        if isinstance(obj, tf.distribute.DistributedValues) and not isinstance(obj, tf.Variable):
            return _same, (local(obj)[0],)
        if isinstance(obj, tf.Variable):
            return _filled_variable, (recipe_of_root(obj), local(obj)[0].numpy())
        if isinstance(obj, (tf.keras.layers.Layer, tf.keras.metrics.Metric)):
            values = [local(v)[0].numpy() for v in objects.variables_of(obj)]
            return _filled, (super().reducer_override(obj), values)
        return super().reducer_override(obj)


def _same(value: Any) -> Any:
    return value


def _filled_variable(recipe: VariableRecipe, value: Any) -> Any:
    made = recipe.make()
    made.assign(value)
    return made


def _filled(reduced: Any, values: Sequence[Any]) -> Any:
    make, args = reduced
    made = make(*args)
    for variable, value in zip(objects.variables_of(made), values, strict=False):
        variable.assign(value)
    return made


def load_result(pickled: Pickled, block: Block | None, roots: Sequence[Any]) -> Any:
    """Undoes `dump_result`, in the parent; `roots` are the user's objects."""

    def find(kind: str, index: int, place: Any = None) -> Any:
        return roots[index] if kind == "root" else objects.parts_of(roots[index])[place]

    buffers = [] if block is None else pickled.arrays(block)
    unpickler = RootUnpickler(io.BytesIO(pickled.body), buffers=buffers)
    unpickler.find = find
    try:
        return unpickler.load()
    except Exception as error:
        raise NanoError(
            "What a @nano function returned could not be unpickled in your process. Received: "
            f"{type(error).__name__}: {error}"
        ) from error
