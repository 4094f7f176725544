"""Sends a `@nano` call to the workers: a function, its steps, and everything they refer to.

There are two pickles, so that a worker can reuse objects from an earlier call:

- the heap (`heap`): all models, layers, optimizers, metrics, losses, variables, checkpoints and
  datasets that the call refers to, and everything reachable from them. TensorFlow's graphs refer
  to these objects. A worker keeps them.
- the call: the function, all steps and `tf.function`s, with the values that they capture, and the
  arguments. A worker keeps only the `tf.function`s, with their graphs, for the next call with the
  same code (`Shipment.key`).

The call refers to an object of the heap by number. Values of variables are sent separately
(`state`).

The lists, dicts and other Python objects in the call's pickle are listed at its end. So both sides
can number them, and the function's changes to them can be sent back (`mutables`). The same holds
for objects in the attributes of the user's own models and layers, which are listed first.
"""

from __future__ import annotations

import collections
import contextlib
import copyreg
import dataclasses
import functools
import hashlib
import importlib
import inspect
import io
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from nanotf.errors import ShippingError
from nanotf.region.decorators import Step, is_tf_function
from nanotf.shipping.objects import heap, identities, mutables, pickling, user_modules
from nanotf.shipping.objects.attributes import Attributes, Changes
from nanotf.shipping.objects.packing import Packer, Pickled
from nanotf.wire.blocks import Block


@dataclasses.dataclass(frozen=True)
class Shipment:
    """A call in the form in which it is sent."""

    heap: bytes
    call: Pickled
    # Equal for calls of the same code, whatever data it refers to, so that a `tf.function` keeps
    # its graphs, as in one process.
    key: bytes
    grown: Grown | None = None  # not None if an earlier call has added variables to the objects


@dataclasses.dataclass(frozen=True)
class Grown:
    """The call that a call continues, see `Manifest.grow`."""

    key: bytes  # of its `Shipment`
    # For each object of the heap: the number of an object of that call's heap, and what leads to it
    # from there, see `_step`.
    paths: tuple[tuple[Any, ...], ...]


@dataclasses.dataclass(frozen=True)
class _Data:
    """Replaces data that the parent reads."""

    number: int


@functools.cache
def _is_made_here(cls: Any) -> bool:
    """Returns True if a worker makes its own objects of a class to replace the parent's."""
    return issubclass(cls, identities.data_classes())


class _Pickler(heap.HeapPickler):
    """Pickler of the objects that a call refers to; importable modules are sent by name."""

    def __init__(self, manifest: Manifest, file: io.BytesIO, **options: Any) -> None:
        super().__init__(file, **options)
        self._manifest = manifest

    def maker(self, obj: Any) -> Any:
        cls: Any = type(obj)
        if not _is_made_here(cls):
            return super().maker(obj)
        return _Data(self._manifest.add_data(obj))

    def attributes(self, obj: Any) -> dict[str, Any]:
        cls: Any = type(obj)
        return {} if _is_made_here(cls) else super().attributes(obj)

    def reducer_override(self, obj: Any) -> Any:
        if self._manifest.imports(obj):
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


class _Collector(_Pickler):
    """Pickler that finds steps, code and Python objects on the way."""

    def persistent_id(self, obj: Any) -> Any:
        found = super().persistent_id(obj)
        if found is None:
            if isinstance(obj, Step) or is_tf_function(obj):
                self._manifest.add_step(obj)
            if mutables.is_mutable(obj):
                self._manifest.mutables[id(obj)] = obj
        return found

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (types.ModuleType, types.FunctionType, type)):
            self._manifest.add_code(obj)
        return super().reducer_override(obj)


class _CallPickler(_Pickler):
    """Pickler of a call.

    Attributes:
        met: dict of int to object, by id, the manifest's mutables that were written.
    """

    def __init__(self, manifest: Manifest, file: io.BytesIO, **options: Any) -> None:
        super().__init__(manifest, file, known=manifest.known, **options)
        self.met: dict[int, Any] = {}

    def persistent_id(self, obj: Any) -> Any:
        found = super().persistent_id(obj)
        if found is None and id(obj) in self._manifest.mutables:
            self.met[id(obj)] = obj
        return found


class _Met:
    """List of the objects that a pickler has met when it reaches this object."""

    def __init__(self, pickler: _CallPickler) -> None:
        self._pickler = pickler

    def __reduce__(self) -> Any:
        return list, (list(self._pickler.met.values()),)


class _KeyPickler(_CallPickler):
    """Pickler of code and the objects that it refers to, without data."""

    def persistent_id(self, obj: Any) -> Any:
        if id(obj) in self._manifest.mutables and mutables.is_data(obj):
            return "data"
        return super().persistent_id(obj)

    def contents_of_cell(self, cell: types.CellType) -> tuple[Any, ...]:
        return tuple(map(_without_data, super().contents_of_cell(cell)))

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if mutables.is_instance(obj):
            attributes = _without_data(mutables.attributes_of(obj)) or {}
            return copyreg.__newobj__, (type(obj),), attributes  # type: ignore[attr-defined]
        state = reduced[2] if isinstance(reduced, tuple) and len(reduced) > 2 else None
        # A library's function has the globals of the receiver's module.
        if isinstance(state, tuple) and isinstance(obj, types.FunctionType):
            state[1]["__globals__"] = _without_data(state[1]["__globals__"])
        return reduced


def _without_data(value: Any) -> Any:
    if mutables.is_data(value):
        return None
    if type(value) is not dict:
        return value
    return {name: _without_data(item) for name, item in value.items()}


class Manifest:
    """Everything that a call refers to.

    Args:
        function: the user's function.
        call: its arguments.

    Attributes:
        numbered: list of the objects in the heap.
        known: dict of int to tuple of str and int, by id, the reference to each of them in a call.
        data: list of the objects among them that the parent reads.
        mutables: dict of int to object, by id, all objects met whose contents can be sent back:
            the user's objects, and temporary ones made by pickling.
        held: int, the number of objects in the heap whose contents can be sent back.
        shipped: list of objects: the heap's `held` ones, then, once the call is pickled, those of
            `mutables` in its pickle.

    Raises:
        ShippingError: Something cannot be sent; names the argument and the reason.
    """

    def __init__(self, function: Callable[..., Any], call: inspect.BoundArguments) -> None:
        self.data: list[Any] = []
        self.steps: list[Any] = []
        self.mutables: dict[int, Any] = {}
        self.shipped: list[Any] = []
        self._function, self._call = function, call
        self._modules = user_modules.ModulesByValue()
        self._taken: list[types.ModuleType] = []
        self._step_ids: set[int] = set()
        with self._by_value():
            self._take_module(function)
            found = self._collect()
            self._heap, pickler = heap.dump(
                {"The call": found}, lambda file: _Collector(self, file)
            )
        self.numbered: list[Any] = pickler.numbered
        held = mutables.held_by(self.numbered)
        self.held = len(held)
        self.known = {id(obj): ("held", place) for place, obj in enumerate(held)}
        self.known.update((id(obj), ("object", n)) for n, obj in enumerate(self.numbered))
        self.shipped = held

    def _collect(self) -> list[Any]:
        """Returns the objects of the heap that the call itself refers to."""
        title = getattr(self._function, "__qualname__", repr(self._function))
        collector = _Collector(self, io.BytesIO(), buffer_callback=lambda _: False)
        with pickling.naming(f"The function {title}"):
            pickling.dump(collector, self._function)
        for name, value in self._call.arguments.items():  # one by one, so that an error names it
            with pickling.naming(f"The argument `{name}` of {title}"):
                pickling.dump(collector, value)
        return collector.numbered

    def add_data(self, data: Any) -> int:
        """Adds data found by a pickler; returns their number."""
        place = next((i for i, known in enumerate(self.data) if known is data), len(self.data))
        self.data[place:] = [data, *self.data[place + 1 :]]
        return place

    def add_step(self, step: Any) -> None:
        """Adds a step or a `tf.function` found by a pickler."""
        if id(step) not in self._step_ids:
            self._step_ids.add(id(step))
            self.steps.append(step)
            self._take_module(step)

    # ------------------------------------------------------------------- functions by value
    @contextlib.contextmanager
    def _by_value(self) -> Iterator[None]:
        """Sends modules taken before or in this context by value, with their contents."""
        try:
            for module in self._taken:
                self._modules.take(module)
            yield
        finally:
            self._modules.release()

    def _take_module(self, function: Any) -> None:
        function = user_modules.unwrapped(function)
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        if module is not None and user_modules.is_users(module):
            self._take(module)

    def _take(self, module: types.ModuleType) -> None:
        if module not in self._taken:
            self._taken.append(module)
        self._modules.take(module)

    def add_code(self, found: Any) -> None:
        """Takes the module of code found by a pickler, if the module holds a root.

        Raises:
            ShippingError: A pickler found the module itself.
        """
        module = user_modules.module_of(found)
        if module is None or self._modules.is_users_wish(module):
            return
        root = self._modules.root_of(module)
        if root is None:
            return
        if module is found:
            raise ShippingError(
                "A @nano function must refer to another module's models, variables and data by its "
                "own names, since a worker that imports the module has others. Received: module "
                f"{module.__name__!r}, which leads to {root}. Write `from {module.__name__} import "
                "...` for what the function needs of it, or pass that as an argument."
            )
        self._take(module)

    def imports(self, found: Any) -> bool:
        """Returns True for a module that a worker imports, even if its package was taken."""
        if not isinstance(found, types.ModuleType) or self._modules.is_users_wish(found):
            return False
        return sys.modules.get(found.__name__) is found

    # ------------------------------------------------------------------------------ pickles
    def ship(self) -> tuple[Shipment, Packer]:
        """Makes the pickles; the packer holds their arrays."""
        function, call = self._function, self._call
        packer, in_key, file = Packer(), io.BytesIO(), io.BytesIO()
        with self._by_value():
            code = function, self.steps
            pickling.dump(_KeyPickler(self, in_key), code)
            pickler = _CallPickler(self, file, buffer_callback=packer.take)
            pickling.dump(pickler, (code, (call.args, call.kwargs), _Met(pickler)))
            self.shipped = [*self.shipped[: self.held], *pickler.met.values()]
        key = hashlib.sha256()
        for part in (self._heap, in_key.getvalue(), str(_changed[self._heap_key()]).encode()):
            key.update(hashlib.sha256(part).digest())
        pickled = Pickled(file.getvalue(), packer.places())
        self._key = key.digest()
        return Shipment(self._heap, pickled, self._key, _grown.get(self._key)), packer

    def grow(self, numbers: Iterable[int]) -> None:
        """Lets workers use their objects in the next call, to which this one has added others.

        An optimizer gets its variables in the first step. Without this, all functions of the next
        call would be traced again.

        Args:
            numbers: those of the objects that have others as attributes now.
        """
        again = Manifest(self._function, self._call)
        shipment, _ = again.ship()
        paths = {id(obj): (number,) for number, obj in enumerate(self.numbered)}
        for number in numbers:
            _find_paths(self.numbered[number], (number,), paths)
        found = tuple(paths.get(id(obj), ()) for obj in again.numbered)
        if all(found):  # else a worker would not find all of its own
            _grown[shipment.key] = Grown(self._key, found)
        while len(_grown) > _GROWN_KEPT:
            del _grown[next(iter(_grown))]

    def forget(self) -> None:
        """Makes workers drop their kept objects, which no longer match the heap."""
        _changed[self._heap_key()] += 1

    def _heap_key(self) -> bytes:
        return hashlib.sha256(self._heap).digest()


_changed: collections.Counter[bytes] = collections.Counter()  # by heap, see `Manifest.forget`
_grown: dict[bytes, Grown] = {}  # by key, see `Manifest.grow`; the oldest first
_GROWN_KEPT = 8
_LONGEST_PATH = 6


def _step(obj: Any, key: Any) -> Any:
    """Returns an item of a list or tuple by its place, another object's attribute by its name."""
    return list(obj)[key] if isinstance(key, int) else vars(obj)[key]


def _find_paths(obj: Any, path: tuple[Any, ...], paths: dict[int, tuple[Any, ...]]) -> None:
    """Adds the paths to the objects that one refers to, by id, through attributes and lists."""
    if len(path) > _LONGEST_PATH:
        return
    if isinstance(obj, (list, tuple)):
        inside: Iterable[tuple[Any, Any]] = enumerate(obj)
    else:
        inside = sorted(getattr(obj, "__dict__", {}).items())
    for key, value in inside:
        is_inside = isinstance(value, (list, tuple)) or heap.is_sent_apart(value)
        if is_inside and id(value) not in paths:
            paths[id(value)] = (*path, key)
            _find_paths(value, (*path, key), paths)


# --------------------------------------------------------------------------- in a worker
class ShippedProgram:
    """A function, its steps and its objects, in a worker.

    The objects of the heap and the `tf.function`s, with their graphs, outlive a call. Each call
    loads everything else again with the parent's contents.

    Args:
        open_data: returns the replacement for data that the parent reads, by their number.

    Attributes:
        function: the user's function; set by `begin`.
        args, kwargs: its arguments.
        mutables: list of objects, see `Manifest.shipped`.
        graphs: list of the `tf.function`s that outlive a call.
        numbered: list of the objects of the heap.
    """

    function: Callable[..., Any]

    def __init__(self, shipment: Shipment, open_data: Callable[[int], Any]) -> None:
        self.graphs: list[Any] = []
        unpickler = _HeapUnpickler(io.BytesIO(shipment.heap), open_data)
        heap.load(unpickler)
        self._data = unpickler.data
        self._take(unpickler.numbered)

    def _take(self, numbered: list[Any]) -> None:
        self.numbered = numbered
        self._held = mutables.held_by(numbered)
        self._attributes: Attributes | None = None  # when the last call ended

    def note_attributes(self) -> None:
        """Notes the attributes of the heap's objects, before a call."""
        if self._attributes is None:
            self._attributes = self._now()

    def changed_attributes(self) -> Changes:
        """Returns what has changed since `note_attributes`, after a call."""
        before, self._attributes = self._attributes, self._now()
        assert before is not None
        return self._attributes.changed_since(before)

    def _now(self) -> Attributes:
        return Attributes(self.numbered, set(map(id, self._data)))

    def grow(self, grown: Grown) -> None:
        """Numbers the objects as the parent does after a call that has added some."""
        start = self.numbered
        self._take([functools.reduce(_step, path, start[number]) for number, *path in grown.paths])

    def begin(self, pickled: Pickled, block: Block | None) -> None:
        """Begins a call.

        Args:
            pickled: the call.
            block: holds its arrays; None if it has none.
        """
        fresh: list[Any] = []  # Python functions: a pickle always has them in the same order

        def rebuild(python_function: Any, options: dict[str, Any]) -> Any:
            fresh.append(python_function)
            if len(fresh) > len(self.graphs):
                self.graphs.append(pickling.rebuild_function(python_function, options))
            return self.graphs[len(fresh) - 1]

        buffers = [] if block is None else pickled.arrays(block)
        known = {"object": self.numbered, "held": self._held}
        unpickler = _CallUnpickler(io.BytesIO(pickled.body), buffers, known)
        unpickler.rebuild = rebuild
        code, arguments, met = unpickler.load()
        self.mutables = [*self._held, *met]
        self.function, _ = code
        self.args, self.kwargs = arguments
        for graph, python_function in zip(self.graphs, fresh, strict=True):
            _refer_alike(graph.python_function, python_function)


class _HeapUnpickler(heap.Unpickler):
    """Unpickler of the objects that a call refers to.

    Attributes:
        data: list of the replacements for data that the parent reads.
    """

    def __init__(self, file: io.BytesIO, open_data: Callable[[int], Any]) -> None:
        super().__init__(file)
        self.data: list[Any] = []
        self._open_data = open_data

    def make(self, maker: Any) -> Any:
        if not isinstance(maker, _Data):
            return super().make(maker)
        self.data.append(self._open_data(maker.number))
        return self.data[-1]


class _CallUnpickler(heap.Unpickler):
    rebuild: Callable[..., Any]

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return self.rebuild if found is pickling.rebuild_function else found


def _refer_alike(kept: Any, fresh: Any) -> None:
    """Makes a kept function refer to the current call's objects, in case it is traced again."""
    if kept is fresh or not isinstance(kept, types.FunctionType):
        return
    kept.__globals__.update(fresh.__globals__)
    for cell, other in zip(kept.__closure__ or (), fresh.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            cell.cell_contents = other.cell_contents
