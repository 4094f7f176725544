"""Sends objects whole, for `nanotf.map`: the receiver gets copies of everything, values included.

Functions, arguments, items and results travel alike. A Keras model arrives built, compiled and
with the state of its optimizer. Large arrays lie in a shared block next to the pickle.
"""

from __future__ import annotations

import dataclasses
import io
import types
from collections.abc import Mapping
from typing import Any

from nanotf.errors import ShippingError
from nanotf.shipping import heap, objects, user_modules
from nanotf.shipping.packing import Packer, Pickled
from nanotf.shipping.results import Pickler
from nanotf.wire.blocks import Block


@dataclasses.dataclass(frozen=True)
class Whole:
    """An object in the form in which it is sent.

    Args:
        value: `Pickled`.
    """

    value: Pickled


class _Pickler(Pickler):
    """Pickler of a whole object; sends modules with models among their globals by value."""

    def __init__(
        self, file: io.BytesIO, packer: Packer, modules: user_modules.ModulesByValue
    ) -> None:
        super().__init__(file, packer.add)
        self._modules = modules
        self._seen: set[types.ModuleType] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, objects.data_classes()):
            raise ShippingError(
                "A dataset, an iterator or a generator stays in the process that made it. "
                f"Received: an object of class {type(obj).__name__}. Make it inside the function, "
                "from arrays or file names."
            )
        if isinstance(obj, (type, types.FunctionType)):
            self._take_module_of(obj)
        return super().reducer_override(obj)

    def _take_module_of(self, obj: Any) -> None:
        module = user_modules.module_of(obj)
        if module is None or module in self._seen:
            return
        self._seen.add(module)
        if user_modules.root_in(module) is not None:
            self._modules.take(module)


def dump(parts: Mapping[str, Any], packer: Packer, by_value: Any = None) -> Whole:
    """Pickles objects together, whole, so that what they share stays shared.

    Args:
        parts: mapping of each object's name in errors to the object.
        packer: `Packer`, which takes the arrays.
        by_value: function or None; its module is sent by value, so that the receiver sees the
            globals as they are now.

    Raises:
        ShippingError: Something in them cannot be sent; names the first object that cannot.
    """
    since, modules = len(packer), user_modules.ModulesByValue()
    try:
        if by_value is not None:
            _take_module_of_function(by_value, modules)
        data, _ = heap.dump(parts, lambda file: _Pickler(file, packer, modules))
    finally:
        modules.release()
    return Whole(Pickled(data, packer.places(since)))


def _take_module_of_function(function: Any, modules: user_modules.ModulesByValue) -> None:
    function = user_modules.unwrapped(function)
    module = user_modules.module_of(function)
    if isinstance(function, types.FunctionType) and module and user_modules.is_users(module):
        modules.take(module)


def load(
    whole: Whole, block: Block | None, *, in_place: bool = False, is_checked: bool = True
) -> list[Any]:
    """Undoes `dump`; returns a list of the objects.

    Args:
        whole: `Whole`.
        block: `Block` or None, holds the arrays.
        in_place: bool, default False. True makes the arrays read-only views of the block, which
            lives as long as they do; otherwise they are copies.
        is_checked: bool, default True, as in `heap.load`.
    """
    pickled, buffers = whole.value, list[Any]()
    if block is not None:
        buffers = [*(pickled.views(block) if in_place else pickled.arrays(block))]
    return heap.load(heap.Unpickler(io.BytesIO(pickled.body), buffers), is_checked)
