"""What a `@nano` function returns, on its way home.

An object of the user's is sent as its number, and is that object again; what the function has made
is sent with the values of its variables.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nanotf.compat import keras_names
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import NanoError, ShippingError
from nanotf.shipping import objects, pickling
from nanotf.shipping.packing import Packer, Pickled
from nanotf.shipping.programs import RootPickler, RootUnpickler, VariableRecipe, recipe_of_root
from nanotf.wire.blocks import Block


def numbers_of(
    roots: Sequence[Any], kinds: Collection[str] | None = None, mutables: Sequence[Any] = ()
) -> dict[int, Any]:
    """What stands for the user's objects in a result: roots, their parts of these kinds, others."""
    numbers: dict[int, Any] = {id(value): ("mutable", i) for i, value in enumerate(mutables)}
    for index, root in enumerate(roots):
        for place, part in objects.parts_of(root).items():
            if kinds is None or place[0] in kinds:
                numbers.setdefault(id(part), ("part", index, place))
    numbers.update({id(root): ("root", index) for index, root in enumerate(roots)})
    return numbers


def dump_result(
    value: Any, changed: Mapping[int, Any], numbers: Mapping[int, Any], packer: Packer
) -> Pickled:
    """Pickles what a `@nano` function returns and has changed, in a worker.

    Args:
        value: any object.
        changed: dict of int to contents, see `mutables.Snapshot.changed`.
        numbers: `numbers_of` the user's objects, each of which is itself again in the parent.
        packer: `Packer`, which takes the arrays.

    Raises:
        ShippingError: It cannot be sent back.
    """
    file, since = io.BytesIO(), len(packer)
    try:
        pickling.dump(_ResultPickler(file, numbers, packer), (value, changed))
    except ShippingError as error:
        what, received = _what_cannot_be_sent(value, changed, numbers)
        raise ShippingError(
            f"What a @nano function {what} must be picklable to come back from its worker. "
            f"Received: {received}. {error}"
        ) from error
    return Pickled(file.getvalue(), packer.places(since))


def _what_cannot_be_sent(
    value: Any, changed: Mapping[int, Any], numbers: Mapping[int, Any]
) -> tuple[str, str]:
    for contents in changed.values():
        try:
            pickling.dump(_ResultPickler(io.BytesIO(), numbers, Packer()), contents)
        except ShippingError:
            return "leaves in an object of its caller's", repr(contents)[:200]
    return "returns", type(value).__qualname__


def dump_built(built: Any, numbers: Mapping[int, Any], packer: Packer) -> Pickled:
    """Pickles `jobs.Built`: objects without the values of their variables, which it has apart."""
    file, since = io.BytesIO(), len(packer)
    pickling.dump(RootPickler(file, numbers, packer), built)
    return Pickled(file.getvalue(), packer.places(since))


class _ResultPickler(RootPickler):
    """Sends objects that the function has made with the values of their variables."""

    def reducer_override(self, obj: Any) -> Any:
        tf = require_tensorflow()
        local = tf.distribute.get_strategy().experimental_local_results
        if isinstance(obj, tf.distribute.DistributedValues) and not isinstance(obj, tf.Variable):
            return _same, (local(obj)[0],)
        if isinstance(obj, tf.Variable):
            return _filled_variable, (recipe_of_root(obj), local(obj)[0].numpy())
        if isinstance(obj, tf.keras.metrics.Metric) and any(map(_is_part, obj.variables)):
            raise ShippingError(
                "A metric that is made under a strategy's scope holds a part of its sums on each "
                f"worker. Received: the metric {obj.name!r}. Return its result()."
            )
        if isinstance(obj, (tf.keras.layers.Layer, tf.keras.metrics.Metric)):
            values = [local(v)[0].numpy() for v in objects.variables_of(obj)]
            return _filled, (super().reducer_override(obj), values)
        return super().reducer_override(obj)


def _is_part(variable: Any) -> bool:
    distributed = require_tensorflow().distribute.DistributedValues
    return isinstance(keras_names.tf_variable(variable), distributed)


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


def load_result(
    pickled: Pickled, block: Block | None, roots: Sequence[Any], mutables: Sequence[Any] = ()
) -> Any:
    """Undoes `dump_result`, in the parent; `roots` and `mutables` are the user's objects."""

    def find(kind: str, index: int, place: Any = None) -> Any:
        if kind == "mutable":
            return mutables[index]
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
