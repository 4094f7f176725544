"""A `@nano` call on its way to the workers: a function, its steps, and what they refer to.

Two kinds of pickles, so that a worker can go on with what an earlier call has left it:

- roots, one each: models, layers, optimizers, metrics, losses, variables, checkpoints, datasets.
  What TensorFlow's graphs know, found wherever the call refers to it. Kept by a worker.
- the call: the function and all steps and `tf.function`s, with what they capture, and the
  arguments. Of these a worker keeps the `tf.function`s, with their graphs, for the next call whose
  code is the same (`Shipment.key`).

In the call, and inside of other roots, a root is a number. What is part of another root, a layer
or the optimizer of a model or one of its variables, travels as its place there, so that both sides
see one object. Values of variables travel apart (`state`).

The lists, dicts and other objects of Python's in the call's pickle are listed at its end, so that
both sides know them by number, too: what the function has changed comes home (`mutables`).
"""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import hashlib
import importlib
import inspect
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from nanotf.compat import keras_optimizers
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import ShippingError
from nanotf.region.decorators import Step, is_tf_function
from nanotf.shipping import classes, models, mutables, objects, pickling, summaries, user_modules
from nanotf.shipping.packing import Packer, Pickled
from nanotf.wire.blocks import Block


@dataclasses.dataclass(frozen=True)
class Shipment:
    """A call, as it is sent.

    Args:
        roots: tuple of bytes, one pickle for each root.
        call: `Pickled`.
        key: bytes, the same for calls of the same code: data that it refers to make no difference,
            as in one process, where a `tf.function` keeps its graphs.
    """

    roots: tuple[bytes, ...]
    call: Pickled
    key: bytes


@dataclasses.dataclass(frozen=True)
class _Part:
    """A root that is part of another."""

    container: int
    place: tuple[str, int]


@dataclasses.dataclass(frozen=True)
class _Sharing:
    """A functional model that shares layers with other roots.

    Args:
        model: the model, with layers of its own in their places.
        shared: dict of str to `_Part`, by the layers' names.
    """

    model: Any
    shared: dict[str, _Part]


@dataclasses.dataclass(frozen=True)
class _Data:
    """A root that the parent reads."""

    number: int


@dataclasses.dataclass(frozen=True)
class VariableRecipe:
    """What makes a variable of TensorFlow's own or, with `keras`, of Keras 3."""

    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    name: str
    keras: bool
    synchronization: int = 0
    aggregation: int = 0

    def make(self) -> Any:
        tf = require_tensorflow()
        zeros = tf.zeros(self.shape, self.dtype)
        if self.keras:
            return tf.keras.Variable(zeros, trainable=self.trainable, name=self.name)
        return tf.Variable(
            zeros,
            trainable=self.trainable,
            name=self.name,
            synchronization=tf.VariableSynchronization(self.synchronization),
            aggregation=tf.VariableAggregation(self.aggregation),
        )


class RootPickler(pickling.Pickler):
    """Writes roots, and steps where they are known, as numbers."""

    def __init__(
        self,
        file: io.BytesIO,
        numbers: Mapping[int, Any],
        packer: Packer | None = None,
        manifest: Manifest | None = None,
    ) -> None:
        super().__init__(file, packer.add if packer is not None else None)
        self._numbers = numbers
        self._manifest = manifest
        self.met: dict[int, Any] = {}  # of the manifest's mutables those that were written, by id

    def persistent_id(self, obj: Any) -> Any:
        if self._manifest is not None and id(obj) in self._manifest.mutables:
            self.met[id(obj)] = obj
        return self._numbers.get(id(obj))

    def reducer_override(self, obj: Any) -> Any:
        if self._manifest is not None and self._manifest.imports(obj):
            return importlib.import_module, (obj.__name__,)
        reduced = super().reducer_override(obj)
        keras = require_tensorflow().keras
        # In Keras 2 a metric is a layer.
        if isinstance(obj, keras.layers.Layer) and not isinstance(obj, keras.metrics.Metric):
            return _built, (*reduced, models.BuiltState.of(obj))
        return reduced


def _built(make: Any, args: Any, state: models.BuiltState) -> Any:
    made = make(*args)
    state.put(made)
    return made


class _Met:
    """What a pickler has met by the time that it comes here, as a list."""

    def __init__(self, pickler: RootPickler) -> None:
        self._pickler = pickler

    def __reduce__(self) -> Any:
        return list, (list(self._pickler.met.values()),)


class _KeyPickler(RootPickler):
    """Writes code and what it refers to, without data."""

    def persistent_id(self, obj: Any) -> Any:
        is_mutable = self._manifest is not None and id(obj) in self._manifest.mutables
        if is_mutable and mutables.is_data(obj):
            return "data"
        return super().persistent_id(obj)

    def contents_of_cell(self, cell: types.CellType) -> tuple[Any, ...]:
        return tuple(map(_without_data, super().contents_of_cell(cell)))

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented and mutables.is_instance(obj):
            attributes = _without_data(mutables.attributes_of(obj)) or {}
            return copyreg.__newobj__, (type(obj),), attributes  # type: ignore[attr-defined]
        if isinstance(obj, types.FunctionType) and isinstance(reduced, tuple):
            state = reduced[2][1]
            state["__globals__"] = _without_data(state["__globals__"])
        return reduced


def _without_data(value: Any) -> Any:
    if mutables.is_data(value):
        return None
    if type(value) is not dict:
        return value
    return {name: _without_data(item) for name, item in value.items()}


class _Collector(pickling.Pickler):
    """Writes nothing that is used, and finds roots and steps on the way."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(io.BytesIO(), lambda _: False)
        self._manifest = manifest

    def persistent_id(self, obj: Any) -> Any:
        if self._manifest.top is not obj and objects.is_root(obj):
            self._manifest.add_root(obj)
            return 0
        if isinstance(obj, Step) or is_tf_function(obj):
            self._manifest.add_step(obj)
        if mutables.is_mutable(obj):
            self._manifest.mutables[id(obj)] = obj
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (types.ModuleType, types.FunctionType, type)):
            self._manifest.add_code(obj)
        if self._manifest.imports(obj):
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


class Manifest:
    """Everything that a call refers to.

    Args:
        function: the user's function.
        call: `inspect.BoundArguments`, the arguments of the call.

    Attributes:
        roots: list of objects.
        data: list of those among them that are read in the parent.
        mutables: dict of int to object, by id, what was met whose contents can come home; next to
            the user's objects what pickling has made and thrown away.
        shipped: list of objects, those among them that the call's pickle has, once it is made.

    Raises:
        ShippingError: Something cannot be sent; names the argument and says why.
    """

    def __init__(self, function: Callable[..., Any], call: inspect.BoundArguments) -> None:
        self.roots: list[Any] = []
        self.steps: list[Any] = []
        self.mutables: dict[int, Any] = {}
        self.shipped: list[Any] = []
        self.top: Any = None
        self._function, self._call = function, call
        self._modules = user_modules.ModulesByValue()
        self._taken: list[types.ModuleType] = []
        self._holds: dict[types.ModuleType, str | None] = {}  # modules, and roots in them
        self._ids: dict[int, int] = {}
        self._step_ids: set[int] = set()
        title = getattr(function, "__qualname__", repr(function))
        with self._by_value():
            self._take_module(function)
            with pickling.naming(f"The function {title}"):
                self._collect(function)
            for name, value in call.arguments.items():
                with pickling.naming(f"The argument `{name}` of {title}"):
                    self._collect(value)
        self.data = [root for root in self.roots if objects.is_data(root)]
        self._parts = [objects.parts_of(root) for root in self.roots]
        self._containers = self._find_containers()
        self._shared = self._find_shared()

    def _collect(self, value: Any) -> None:
        done = len(self.roots)
        pickling.dump(_Collector(self), value)
        while done < len(self.roots):  # what roots refer to
            root = self.roots[done]
            done += 1
            if _is_opaque(root):
                continue
            self.top = root
            with pickling.naming(f"An object of class {type(root).__name__}"):
                pickling.dump(_Collector(self), recipe_of_root(root))
        self.top = None

    def add_root(self, root: Any) -> None:
        """Takes a root that was found."""
        if id(root) not in self._ids:
            self._ids[id(root)] = len(self.roots)
            self.roots.append(root)

    def add_step(self, step: Any) -> None:
        """Takes a step or a `tf.function` that was found."""
        if id(step) not in self._step_ids:
            self._step_ids.add(id(step))
            self.steps.append(step)
            self._take_module(step)

    # ------------------------------------------------------------------- functions by value
    @contextlib.contextmanager
    def _by_value(self) -> Iterator[None]:
        """Modules that were taken, or are in this context, travel with what they hold."""
        try:
            for module in self._taken:
                self._modules.take(module)
            yield
        finally:
            self._modules.release()

    def _take_module(self, function: Any) -> None:
        function = user_modules.unwrapped(function)
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        if module is not None and classes.is_foreign(function):
            self._take(module)

    def _take(self, module: types.ModuleType) -> None:
        if module not in self._taken:
            self._taken.append(module)
        self._modules.take(module)

    def add_code(self, found: Any) -> None:
        """Takes the module of code that was found, if there is a root in it.

        Raises:
            ShippingError: What was found is such a module itself.
        """
        module = user_modules.module_of(found)
        if module is None or self._modules.is_users_wish(module):
            return
        if module not in self._holds:
            self._holds[module] = user_modules.root_in(module)
        root = self._holds[module]
        if root is None:
            return
        if module is found:
            raise ShippingError(
                "A @nano function refers to models, variables and data of another module by names "
                "of its own, since a worker that imports the module has others. Received: module "
                f"{module.__name__!r}, which leads to {root}. Write `from {module.__name__} import "
                "...` for what the function needs of it, or pass that as an argument."
            )
        self._take(module)

    def imports(self, found: Any) -> bool:
        """Whether something is a module that a worker imports, be its package taken or not."""
        if not isinstance(found, types.ModuleType) or self._modules.is_users_wish(found):
            return False
        return sys.modules.get(found.__name__) is found

    # ------------------------------------------------------------------------------ pickles
    def _find_containers(self) -> dict[int, _Part]:
        """The roots that are part of others: the largest container counts."""
        found: dict[int, tuple[int, _Part]] = {}
        for index, (root, parts) in enumerate(zip(self.roots, self._parts, strict=True)):
            for place, part in parts.items():
                inner = self._ids.get(id(part))
                if inner is None or inner == index:
                    continue
                if any(outer is root for outer in self._parts[inner].values()):
                    continue
                if inner not in found or len(parts) > found[inner][0]:
                    found[inner] = (len(parts), _Part(index, place))
        return {inner: part for inner, (_, part) in found.items()}

    def _find_shared(self) -> dict[int, dict[str, _Part]]:
        """The layers, by name, that a functional model shares with a larger root."""
        found: dict[int, dict[str, _Part]] = {}
        owners: dict[int, _Part] = {}
        by_size = sorted(range(len(self.roots)), key=lambda i: len(self._parts[i]), reverse=True)
        for index in by_size:
            if index in self._containers:
                continue
            if models.is_graph(self.roots[index]):
                inner = {layer.name: owners.get(id(layer)) for layer in self.roots[index].layers}
                found[index] = {name: part for name, part in inner.items() if part is not None}
            for place, part in self._parts[index].items():
                if place[0] == "layers":
                    owners.setdefault(id(part), _Part(index, place))
        return {index: shared for index, shared in found.items() if shared}

    def check_shared(self) -> None:
        """Raises `ShippingError` where two roots share variables in a way that cannot be sent."""
        owners: dict[int, int] = {}
        for index, root in enumerate(self.roots):
            if index in self._containers:
                continue
            shared = self._shared.get(index, {})
            layers = [layer for layer in root.layers if layer.name in shared] if shared else []
            elsewhere = {id(v) for layer in layers for v in objects.variables_of(layer)}
            for variable in objects.variables_of(root):
                if id(variable) in elsewhere:
                    continue
                other = owners.setdefault(id(variable), index)
                if other != index:
                    names = [getattr(self.roots[i], "name", i) for i in (other, index)]
                    raise ShippingError(
                        "Models that share layers can be sent together if one contains the other, "
                        "or if the smaller is made of inputs and outputs and is not compiled. "
                        f"Received: {names[0]!r} and {names[1]!r}, which share the "
                        f"variable {variable.name!r}. Pass the model that contains both, and "
                        "take the other from its layers inside of the function."
                    )

    def ship(self) -> tuple[Shipment, Packer]:
        """Makes the pickles; the packer holds their arrays."""
        function, call = self._function, self._call
        packer = Packer()
        numbers: dict[int, Any] = {id(root): ("root", i) for i, root in enumerate(self.roots)}
        with self._by_value():
            roots = tuple(self._root(i, numbers) for i in range(len(self.roots)))
            code, in_key, file = (function, self.steps), io.BytesIO(), io.BytesIO()
            pickling.dump(_KeyPickler(in_key, numbers, None, self), code)
            pickler = RootPickler(file, numbers, packer, self)
            pickling.dump(pickler, (code, (call.args, call.kwargs), _Met(pickler)))
            self.shipped = list(pickler.met.values())
        key = hashlib.sha256()
        for part in (*roots, in_key.getvalue()):
            key.update(hashlib.sha256(part).digest())
        return Shipment(roots, Pickled(file.getvalue(), packer.places(0)), key.digest()), packer

    def _root(self, index: int, numbers: Mapping[int, Any]) -> bytes:
        if index in self._containers:
            return pickle.dumps(self._containers[index])
        root = self.roots[index]
        if objects.is_data(root):
            return pickle.dumps(_Data(next(i for i, d in enumerate(self.data) if d is root)))
        # The parts of a root stand in its own recipe as they are.
        inside = {id(root), *map(id, self._parts[index].values())}
        others = {key: value for key, value in numbers.items() if key not in inside}
        with pickling.naming(f"An object of class {type(root).__name__}"):
            file, recipe = io.BytesIO(), recipe_of_root(root)
            if index in self._shared:
                recipe = _Sharing(root, self._shared[index])
            pickling.dump(RootPickler(file, others, None, self), recipe)
            return file.getvalue()


def _is_opaque(root: Any) -> bool:
    """Whether a root refers to no other: Keras's own ways to describe it would be costly here."""
    keras = require_tensorflow().keras
    return objects.is_data(root) or isinstance(
        root, (keras.layers.Layer, *keras_optimizers.optimizer_classes())
    )


def recipe_of_root(root: Any) -> Any:
    """What is pickled for a root."""
    tf = require_tensorflow()
    if isinstance(root, tf.Variable):
        return VariableRecipe(
            tuple(root.shape),
            root.dtype.name,
            bool(root.trainable),
            root.name.split(":")[0],
            keras=False,
            synchronization=root.synchronization.value,
            aggregation=root.aggregation.value,
        )
    if isinstance(root, generation().variable_classes()):
        return VariableRecipe(
            tuple(root.shape), root.dtype, bool(root.trainable), root.name, keras=True
        )
    if isinstance(root, generation().seed_generator_classes()):
        return _Made(type(root), (root.get_config(),), "from_config")
    if summaries.is_writer(root):
        options = {"flush_millis": summaries.FLUSH_MILLISECONDS}
        return _Made(_writer, (summaries.relay_of(root).directory,), None, options)
    if isinstance(root, tf.train.Checkpoint):
        tracked = {n: v for n, v in vars(root).items() if not n.startswith("_")}
        return _Made(type(root), (), None, tracked)
    return root


def _writer(directory: str, **options: Any) -> Any:
    return require_tensorflow().summary.create_file_writer(directory, **options)


@dataclasses.dataclass(frozen=True)
class _Made:
    """What a class makes of arguments."""

    cls: Any
    args: tuple[Any, ...]
    method: str | None = None
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def make(self) -> Any:
        maker = self.cls if self.method is None else getattr(self.cls, self.method)
        return maker(*self.args, **self.kwargs)


# --------------------------------------------------------------------------- in a worker
class Program:
    """A function, its steps and its roots, in a worker.

    Roots and what `tf.function` has made, with its graphs, outlive a call. All else is loaded
    anew for each, as the parent has it: a list that the last call has filled is empty again.

    Args:
        shipment: `Shipment`.
        open_data: callable of a number, makes what a root that the parent reads is here.

    Attributes:
        function: the user's function; once `begin` was called.
        args, kwargs: what it is called with.
        mutables: list of objects, as `Manifest.shipped`.
        graphs: list of the `tf.function`s that outlive a call.
        roots: list of objects.
    """

    function: Callable[..., Any]

    def __init__(self, shipment: Shipment, open_data: Callable[[int], Any]) -> None:
        self._bodies = shipment.roots
        self._open_data = open_data
        self._made: dict[int, Any] = {}
        self.graphs: list[Any] = []
        self.roots = [self._root(i) for i in range(len(shipment.roots))]

    def begin(self, pickled: Pickled, block: Block | None) -> None:
        """Begins a call.

        Args:
            pickled: `Pickled`, the call.
            block: `Block` or None, that holds its arrays.
        """
        fresh: list[Any] = []  # Python functions: a pickle always asks for them in one order

        def rebuild(python_function: Any, options: dict[str, Any]) -> Any:
            fresh.append(python_function)
            if len(fresh) > len(self.graphs):
                self.graphs.append(pickling.rebuild_function(python_function, options))
            return self.graphs[len(fresh) - 1]

        code, arguments, self.mutables = self._load(pickled, block, rebuild)
        self.function, _ = code
        self.args, self.kwargs = arguments
        for graph, python_function in zip(self.graphs, fresh, strict=True):
            _refer_alike(graph.python_function, python_function)

    def _load(
        self,
        pickled: Pickled,
        block: Block | None,
        rebuild: Callable[..., Any] = pickling.rebuild_function,
    ) -> Any:
        buffers = [] if block is None else pickled.arrays(block)
        unpickler = RootUnpickler(io.BytesIO(pickled.body), buffers=buffers)
        unpickler.find, unpickler.rebuild = lambda _, number: self._root(number), rebuild
        return unpickler.load()

    def _root(self, index: int) -> Any:
        if index not in self._made:
            made = self._load(Pickled(self._bodies[index], ()), None)
            if isinstance(made, _Part):
                made = self._part(made)
            elif isinstance(made, _Sharing):
                shared = {name: self._part(part) for name, part in made.shared.items()}
                made = models.with_layers(made.model, shared)
            elif isinstance(made, _Data):
                made = self._open_data(made.number)
            elif isinstance(made, (VariableRecipe, _Made)):
                made = made.make()
            self._made[index] = made
        return self._made[index]

    def _part(self, part: _Part) -> Any:
        return objects.parts_of(self._root(part.container))[part.place]


def _refer_alike(kept: Any, fresh: Any) -> None:
    """Lets a function that was kept, if it is traced again, see what this call's code sees."""
    if kept is fresh or not isinstance(kept, types.FunctionType):
        return
    kept.__globals__.update(fresh.__globals__)
    for cell, other in zip(kept.__closure__ or (), fresh.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            cell.cell_contents = other.cell_contents


class RootUnpickler(pickle.Unpickler):
    find: Callable[[str, int], Any]
    rebuild: Callable[..., Any] = staticmethod(pickling.rebuild_function)

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return self.rebuild if found is pickling.rebuild_function else found

    def persistent_load(self, pid: Any) -> Any:
        return self.find(*pid)
