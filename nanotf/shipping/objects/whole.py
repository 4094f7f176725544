"""Sends objects whole: the receiver gets copies of everything, values included.

Functions, arguments, items and results of `nanotf.map` travel so, and the results of `@nano`
functions. A Keras model arrives built, compiled and with the state of its optimizer. Large arrays
lie in a shared block next to the pickle. An object that the receiver knows is sent as its number,
and becomes that object again.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nanotf.compat import keras_common, values
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import ShippingError
from nanotf.shipping.objects import heap, identities, user_modules
from nanotf.shipping.objects.packing import Packer, Pickled
from nanotf.wire.blocks import Block

# The receiver's objects, by kind, in the order of both sides.
Known = Mapping[str, Sequence[Any]]


class WholePickler(heap.HeapPickler):
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
        has_value = isinstance(obj, require_tensorflow().Variable) and identities.has_value(obj)
        return {**found, heap.VALUE: values.array_of(obj)} if has_value else found

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, require_tensorflow().distribute.DistributedValues):
            return _same, (_here(obj),)
        return super().reducer_override(obj)


def _here(value: Any) -> Any:
    return require_tensorflow().distribute.get_strategy().experimental_local_results(value)[0]


def _is_part(variable: Any) -> bool:
    distributed = require_tensorflow().distribute.DistributedValues
    return isinstance(keras_common.tf_variable(variable), distributed)


def _same(value: Any) -> Any:
    return value


class _ItemPickler(WholePickler):
    """Pickler of items and their results, which have no data in common with other processes."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, identities.data_classes()):
            raise ShippingError(
                "A dataset, an iterator or a generator stays in the process that made it. "
                f"Received: an object of class {type(obj).__name__}. Make it inside the function, "
                "from arrays or file names."
            )
        if type(obj) is np.ndarray and not (obj.dtype.hasobject or _exports_bytes(obj)):
            # NumPy would copy it into the pickle, and it would arrive writable.
            raw = np.ascontiguousarray(obj).reshape(-1).view(np.uint8)
            return _of_bytes, (raw, obj.dtype, obj.shape)
        return super().reducer_override(obj)


def _exports_bytes(array: Any) -> bool:
    try:
        return bool(pickle.PickleBuffer(array).raw().nbytes == array.nbytes)
    except (BufferError, ValueError):  # strides, dates, types of other packages
        return False


def _of_bytes(raw: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    return raw.view(dtype).reshape(shape)


def dump(
    parts: Mapping[str, Any], packer: Packer, known: Known | None = None, by_value: Any = None
) -> Pickled:
    """Pickles objects together, whole, so that what they share stays shared.

    Args:
        parts: the objects, by their names in errors.
        packer: takes the arrays.
        known: objects that the receiver knows, for results of a `@nano` function; None for items of
            `nanotf.map` and their results.
        by_value: a function whose module is sent by value, so that the receiver sees the globals as
            they are now; or None.

    Raises:
        ShippingError: Something in them cannot be sent; names the first object that cannot.
    """
    since = len(packer.parts)
    with user_modules.ModulesByValue() as modules:
        if by_value is not None:
            _take_module_of(by_value, modules)
        if known is None:
            data, _ = heap.dump(parts, lambda f: _ItemPickler(f, packer.take, modules=modules))
        else:
            data, _ = heap.dump(parts, lambda f: WholePickler(f, packer.take, _ids_of(known)))
    return Pickled(data, packer.places(since))


class ItemDumper:
    """Pickles items, or their results, one after another, each as `dump` does.

    To make a pickler takes longer than to pickle a number, so the next item gets the same one.
    """

    def __init__(self) -> None:
        self._made: tuple[io.BytesIO, _ItemPickler, Packer] | None = None
        self._modules = user_modules.ModulesByValue()

    def dump(self, name: str, item: Any) -> tuple[Pickled, Packer]:
        """Pickles an item.

        Args:
            name: stands for the item in errors.

        Returns:
            The pickle, and what has its arrays.

        Raises:
            ShippingError: Something in it cannot be sent.
        """
        file, pickler, packer = self._made or _item_pickler()
        self._made = None  # whatever is raised
        with self._modules as pickler.modules:
            heap.dump_with(pickler, file, {name: item})
        if pickler.is_new() and not packer.parts:
            self._made = file, pickler, packer
        data = file.getvalue()
        pickler.clear_memo()
        file.seek(0)
        file.truncate()
        return Pickled(data, packer.places()), packer


def _item_pickler() -> tuple[io.BytesIO, _ItemPickler, Packer]:
    file, packer = io.BytesIO(), Packer()
    return file, _ItemPickler(file, packer.take), packer


def _take_module_of(function: Any, modules: user_modules.ModulesByValue) -> None:
    function = user_modules.unwrapped(function)
    module = user_modules.module_of(function)
    if isinstance(function, types.FunctionType) and module and user_modules.is_users(module):
        modules.take(module)


def _ids_of(known: Known) -> dict[int, tuple[str, int]]:
    places = ((kind, i, obj) for kind, found in known.items() for i, obj in enumerate(found))
    return {id(obj): (kind, i) for kind, i, obj in places}


def load(
    pickled: Pickled,
    block: Block | None,
    known: Known | None = None,
    *,
    in_place: bool = False,
    is_checked: bool = True,
    put: Callable[[Sequence[Any]], None] = lambda _: None,
) -> list[Any]:
    """Undoes `dump`; returns a list of the objects.

    Args:
        block: holds the arrays; None if there are none.
        known: as in `dump`, the receiver's own.
        in_place: makes the arrays read-only views of the block, which lives as long as they do;
            otherwise they are copies.
        is_checked, put: as in `heap.load`. Results are not checked: better one with an odd
            attribute than none.
    """
    buffers = list[Any]()
    if block is not None:
        buffers = [*(pickled.views(block) if in_place else pickled.arrays(block))]
    if known is None and (plain := heap.plain_part(pickled.body)) is not None:
        parts = [pickle.loads(plain, buffers=buffers)]
        put(parts)
        return parts
    return heap.load(heap.Unpickler(io.BytesIO(pickled.body), buffers, known), is_checked, put)
