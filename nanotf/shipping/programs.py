"""A `@nano` call on its way to the workers: a function, its steps, and what they refer to.

Three kinds of pickles, so that a worker can go on with what an earlier call has left it:

- roots, one each: models, layers, optimizers, metrics, losses, variables, checkpoints, datasets.
  What has an identity, found wherever the call refers to it. Kept by a worker, with the program.
- program: the function and all steps and `tf.function`s, with what they capture. Kept by a
  worker, with their traced graphs.
- arguments: those of this call. Not kept.

In the program, the arguments, and inside of other roots, a root is a number. What is part of
another root, a layer or the optimizer of a model or one of its variables, travels as its place
there, so that both sides see one object. Values of variables travel apart (`state`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle

from nanotf.compat import keras_names
from nanotf.compat.versions import is_keras_3, require_tensorflow
from nanotf.errors import NanoError, ShippingError
from nanotf.shipping import models, pickling
from nanotf.shipping.blocks import Block, aligned
from nanotf.steps import Step, is_tf_function

_INLINE = 1 << 16  # bytes; smaller arrays travel inside of the pickle


# ----------------------------------------------------------------------------------- roots
def is_data(value: Any) -> bool:
    """Whether something yields the batches of a loop, and is read in the parent."""
    tf = require_tensorflow()
    return isinstance(value, (tf.data.Dataset, tf.data.Iterator, types.GeneratorType))


def is_root(value: Any) -> bool:
    """Whether something has an identity that must be kept."""
    tf = require_tensorflow()
    return isinstance(value, _root_classes(tf)) or is_data(value)


def _root_classes(tf: Any) -> tuple[type, ...]:
    keras = tf.keras
    found = [
        keras.layers.Layer,
        keras.metrics.Metric,
        keras.losses.Loss,
        keras.optimizers.Optimizer,
        tf.Variable,
        tf.train.Checkpoint,
    ]
    legacy = getattr(getattr(keras.optimizers, "legacy", None), "Optimizer", None)
    if isinstance(legacy, type):
        found.append(legacy)
    if is_keras_3():
        found += [keras.Variable, keras.random.SeedGenerator]
    return tuple(found)


def _is_variable(value: Any) -> bool:
    tf = require_tensorflow()
    return isinstance(value, (tf.Variable, tf.keras.Variable) if is_keras_3() else tf.Variable)


def parts_of(root: Any) -> dict[tuple[str, int], Any]:
    """What is part of a root, by its place: alike on both sides."""
    tf = require_tensorflow()
    kinds: dict[str, Sequence[Any]] = {}
    if isinstance(root, tf.keras.layers.Layer):
        kinds["layers"] = keras_names.layers_below(root)
        if isinstance(root, tf.keras.Model):
            kinds["optimizers"] = _with_inner(keras_names.optimizers_of(root))
            kinds["metrics"] = root.metrics
    elif isinstance(root, _optimizer_classes()):
        kinds["optimizers"] = _with_inner([root])[1:]
    variables = _own_variables(root)
    kinds["variables"] = variables
    kinds["values"] = [keras_names.tf_variable(v) for v in variables]
    return {
        (kind, place): part
        for kind, found in kinds.items()
        for place, part in enumerate(found)
        if part is not root
    }


def _optimizer_classes() -> tuple[type, ...]:
    keras = require_tensorflow().keras
    legacy = getattr(getattr(keras.optimizers, "legacy", None), "Optimizer", None)
    return (keras.optimizers.Optimizer, *([legacy] if isinstance(legacy, type) else []))


def _with_inner(optimizers: Sequence[Any]) -> list[Any]:
    found = []
    for optimizer in optimizers:
        while optimizer is not None:
            found.append(optimizer)
            optimizer = getattr(optimizer, "inner_optimizer", None)
    return found


def _own_variables(root: Any) -> list[Any]:
    """A root's variables as its own `variables` lists them, in the order of both sides."""
    tf = require_tensorflow()
    if _is_variable(root) or is_data(root):
        return []
    if isinstance(root, tf.train.Checkpoint):
        return [root.save_counter]
    if is_keras_3() and isinstance(root, tf.keras.random.SeedGenerator):
        return [root.state]
    found = getattr(root, "variables", [])
    return [v for v in (found() if callable(found) else found) if hasattr(v, "assign")]


def variables_of(root: Any) -> list[Any]:
    """All variables whose values travel with a root.

    Returns:
        A list of `tf.Variable` in a fixed order.
    """
    tf = require_tensorflow()
    if isinstance(root, tf.keras.Model):
        return keras_names.training_variables(root) + keras_names.metric_variables(root)
    if isinstance(root, _optimizer_classes()):
        return keras_names.optimizer_variables(root)
    if _is_variable(root):
        return [keras_names.tf_variable(root)]
    own = [keras_names.tf_variable(v) for v in _own_variables(root)]
    return [v for v in own if v.shape.is_fully_defined()]


def can_be_trained(root: Any) -> bool:
    """Whether a root is a layer, an optimizer or a variable."""
    tf = require_tensorflow()
    return _is_variable(root) or isinstance(root, (tf.keras.layers.Layer, *_optimizer_classes()))


Place = tuple[int, tuple[str, int] | None]  # a root, or a part of one
VariablePlace = tuple[int, int]  # a root, and a place in its variables


def optimizers_in(roots: Sequence[Any]) -> dict[Place, Any]:
    """All optimizers among roots and their parts, each once."""
    found: dict[int, tuple[Place, Any]] = {}
    for index, root in enumerate(roots):
        if isinstance(root, _optimizer_classes()):
            found.setdefault(id(root), ((index, None), root))
        elif isinstance(root, require_tensorflow().keras.Model):
            for place, part in parts_of(root).items():
                if place[0] == "optimizers":
                    found.setdefault(id(part), ((index, place), part))
    inner = {id(getattr(o, "inner_optimizer", None)) for _, o in found.values()}
    return {place: o for place, o in found.values() if id(o) not in inner}


def built_optimizers(roots: Sequence[Any]) -> dict[Place, tuple[VariablePlace, ...] | None]:
    """What the built optimizers were built with.

    Returns:
        A dict of an optimizer's place to the places of variables; None for an optimizer that
        was built with others than the roots have.
    """
    places: dict[int, VariablePlace] = {}
    for index, root in enumerate(roots):
        for place, variable in enumerate(variables_of(root)):
            places.setdefault(id(variable), (index, place))
    candidates = distinct_variables(roots)
    result: dict[Place, tuple[VariablePlace, ...] | None] = {}
    for at, optimizer in optimizers_in(roots).items():
        found = [places.get(id(v)) for v in keras_names.built_with(optimizer, candidates)]
        if found:
            known = tuple(place for place in found if place is not None)
            result[at] = known if len(known) == len(found) else None
    return result


def build_optimizers(
    roots: Sequence[Any], built: Mapping[Place, tuple[VariablePlace, ...] | None]
) -> None:
    """Builds the optimizers that are not built yet as `built_optimizers` says."""
    done = built_optimizers(roots)
    optimizers = optimizers_in(roots)
    for at, places in built.items():
        if at not in done and places is not None:
            variables = [variables_of(roots[index])[place] for index, place in places]
            keras_names.build_for(optimizers[at], as_owned(roots, variables))


def as_owned(roots: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """The variables of the installed Keras that hold these `tf.Variable`s."""
    owners: dict[int, Any] = {}
    for root in roots:
        own = [root] if _is_variable(root) else _own_variables(root)
        owners.update({id(keras_names.tf_variable(v)): v for v in own})
    return [owners.get(id(variable), variable) for variable in variables]


def distinct_variables(roots: Sequence[Any]) -> list[Any]:
    """The variables of all roots, each once, in a fixed order."""
    found = {id(v): v for root in roots for v in variables_of(root)}
    return list(found.values())


def moving_variables(roots: Sequence[Any]) -> list[Any]:
    """Moving statistics that differ between ranks though TensorFlow does not know it."""
    layers = [root for root in roots if isinstance(root, require_tensorflow().keras.layers.Layer)]
    return [v for layer in layers for v in keras_names.moving_variables(layer)]


def seed_variables(roots: Sequence[Any]) -> list[Any]:
    """The seeds of random layers, and of generators of seeds."""
    tf = require_tensorflow()
    layers = [root for root in roots if isinstance(root, tf.keras.layers.Layer)]
    found = [v for layer in layers for v in keras_names.seed_variables(layer)]
    if is_keras_3():
        generators = [r for r in roots if isinstance(r, tf.keras.random.SeedGenerator)]
        found += [keras_names.tf_variable(generator.state) for generator in generators]
    return found


# ----------------------------------------------------------------------------- out and back
@dataclasses.dataclass(frozen=True)
class Pickled:
    """A pickle whose large arrays lie in a block.

    Args:
        body: bytes.
        buffers: tuple of tuples of int, the offset and size in bytes of each in the block.
    """

    body: bytes
    buffers: tuple[tuple[int, int], ...]

    def arrays(self, block: Block) -> list[bytearray]:
        """The buffers, copied out of the block."""
        return [
            bytearray(block.array(offset, (nbytes,), "u1").data) for offset, nbytes in self.buffers
        ]


@dataclasses.dataclass(frozen=True)
class Shipment:
    """A call, as it is sent.

    Args:
        roots: tuple of bytes, one pickle for each root.
        program: `Pickled`.
        arguments: `Pickled`.
    """

    roots: tuple[bytes, ...]
    program: Pickled
    arguments: Pickled


@dataclasses.dataclass(frozen=True)
class _Part:
    """A root that is part of another."""

    container: int
    place: tuple[str, int]


@dataclasses.dataclass(frozen=True)
class _Data:
    """A root that the parent reads."""

    number: int


@dataclasses.dataclass(frozen=True)
class _Variable:
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


class Packer:
    """Puts arrays that belong to pickles one after another into a block."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._buffers: list[tuple[int, memoryview]] = []

    def add(self, buffer: pickle.PickleBuffer) -> bool:
        """Takes a buffer of a pickle; says whether it stays inside of the pickle."""
        try:
            raw = buffer.raw()
        except BufferError:  # an array that is not contiguous
            return True
        if raw.nbytes < _INLINE:
            return True
        self._buffers.append((self.nbytes, raw))
        self.nbytes += aligned(raw.nbytes)
        return False

    def places(self, since: int) -> tuple[tuple[int, int], ...]:
        """Offset and size of the buffers from number `since` on."""
        return tuple((offset, raw.nbytes) for offset, raw in self._buffers[since:])

    def __len__(self) -> int:
        return len(self._buffers)

    def write(self, block: Block) -> None:
        """Copies all into a block of `nbytes`."""
        for offset, raw in self._buffers:
            block.array(offset, (raw.nbytes,), "u1")[...] = memoryview(raw).cast("B")


class _Pickler(pickling.Pickler):
    """Writes roots, and steps where they are known, as numbers."""

    def __init__(
        self,
        file: io.BytesIO,
        numbers: Mapping[int, Any],
        packer: Packer | None = None,
    ) -> None:
        super().__init__(file, packer.add if packer is not None else None)
        self._numbers = numbers

    def persistent_id(self, obj: Any) -> Any:
        return self._numbers.get(id(obj))


class _Collector(pickling.Pickler):
    """Writes nothing that is used, and finds roots and steps on the way."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(io.BytesIO(), lambda _: False)
        self._manifest = manifest

    def persistent_id(self, obj: Any) -> Any:
        if self._manifest.top is not obj and is_root(obj):
            self._manifest.add_root(obj)
            return 0
        if isinstance(obj, Step) or is_tf_function(obj):
            self._manifest.add_step(obj)
        return None


class Manifest:
    """Everything that a call refers to.

    Args:
        function: the user's function.
        arguments: dict of str to object, the call's arguments by parameter, to name them.
        args, kwargs: the same, as they are passed.

    Attributes:
        roots: list of objects.
        data: list of those among them that are read in the parent.

    Raises:
        ShippingError: Something cannot be sent; names the argument and says why.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self.roots: list[Any] = []
        self.steps: list[Any] = []
        self.top: Any = None
        self.names: set[str] = set()  # that the code of the function and its steps refers to
        self._call = (function, args, kwargs)
        self._modules: list[Any] = []
        self._ids: dict[int, int] = {}
        self._step_ids: set[int] = set()
        title = getattr(function, "__qualname__", repr(function))
        with self._by_value():
            self._take_module(function)
            with pickling.naming(f"The function {title}"):
                self._collect(function)
            for name, value in arguments.items():
                with pickling.naming(f"The argument `{name}` of {title}"):
                    self._collect(value)
        self.data = [root for root in self.roots if is_data(root)]
        self._containers = self._find_containers()

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
                pickling.dump(_Collector(self), _recipe(root))
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
        """Functions of modules that are noted in this context travel with their globals.

        A worker that imported the module would get models and optimizers of its own.
        """
        try:
            yield
        finally:
            while self._modules:
                cloudpickle.unregister_pickle_by_value(self._modules.pop())

    def _take_module(self, function: Any) -> None:
        function = getattr(function, "function", function)
        function = getattr(function, "python_function", function)
        code = getattr(function, "__code__", None)
        if code is not None:
            self.names |= _names_in(code)
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        if module is None or models.is_foreign(function) is False:
            return
        if (
            module.__name__ == "__main__"
            or module.__name__ in cloudpickle.list_registry_pickle_by_value()
        ):
            return
        cloudpickle.register_pickle_by_value(module)
        self._modules.append(module)

    # ------------------------------------------------------------------------------ pickles
    def _find_containers(self) -> dict[int, _Part]:
        """The roots that are part of others: the largest container counts."""
        found: dict[int, tuple[int, _Part]] = {}
        for index, root in enumerate(self.roots):
            parts = parts_of(root)
            for place, part in parts.items():
                inner = self._ids.get(id(part))
                if inner is None or inner == index or _contains(self.roots[inner], root):
                    continue
                if inner not in found or len(parts) > found[inner][0]:
                    found[inner] = (len(parts), _Part(index, place))
        return {inner: part for inner, (_, part) in found.items()}

    def check_shared(self) -> None:
        """Raises `ShippingError` where two roots share variables, and neither holds the other."""
        owners: dict[int, int] = {}
        for index, root in enumerate(self.roots):
            if index in self._containers:
                continue
            for variable in variables_of(root):
                other = owners.setdefault(id(variable), index)
                if other != index:
                    names = [getattr(self.roots[i], "name", i) for i in (other, index)]
                    raise ShippingError(
                        "Models that share layers can be sent together only if one contains the "
                        f"other. Received: {names[0]!r} and {names[1]!r}, which share the "
                        f"variable {variable.name!r}. Pass the model that contains both, and "
                        "take the other from its layers inside of the function."
                    )

    def ship(self) -> tuple[Shipment, Packer]:
        """Makes the pickles; the packer holds their arrays."""
        function, args, kwargs = self._call
        packer = Packer()
        numbers: dict[int, Any] = {id(root): ("root", i) for i, root in enumerate(self.roots)}
        with self._by_value():
            for step in [function, *self.steps]:
                self._take_module(step)
            roots = tuple(self._root(i, numbers) for i in range(len(self.roots)))
            program = _pickled((function, self.steps), numbers, packer)
            steps = {id(step): ("step", i) for i, step in enumerate(self.steps)}
            arguments = _pickled((args, kwargs), {**numbers, **steps}, packer)
        return Shipment(roots, program, arguments), packer

    def _root(self, index: int, numbers: Mapping[int, Any]) -> bytes:
        if index in self._containers:
            return pickle.dumps(self._containers[index])
        root = self.roots[index]
        if is_data(root):
            return pickle.dumps(_Data(next(i for i, d in enumerate(self.data) if d is root)))
        # The parts of a root stand in its own recipe as they are.
        inside = {id(root), *map(id, parts_of(root).values())}
        others = {key: value for key, value in numbers.items() if key not in inside}
        with pickling.naming(f"An object of class {type(root).__name__}"):
            return _pickled(_recipe(root), others, None).body


def _is_opaque(root: Any) -> bool:
    """Whether a root refers to no other: Keras's own ways to describe it would be costly here."""
    keras = require_tensorflow().keras
    return is_data(root) or isinstance(root, (keras.layers.Layer, *_optimizer_classes()))


def _contains(outer: Any, inner: Any) -> bool:
    return any(part is inner for part in parts_of(outer).values())


def _recipe(root: Any) -> Any:
    """What is pickled for a root."""
    tf = require_tensorflow()
    if isinstance(root, tf.Variable):
        return _Variable(
            tuple(root.shape),
            root.dtype.name,
            bool(root.trainable),
            root.name.split(":")[0],
            keras=False,
            synchronization=root.synchronization.value,
            aggregation=root.aggregation.value,
        )
    if is_keras_3() and isinstance(root, tf.keras.Variable):
        return _Variable(tuple(root.shape), root.dtype, bool(root.trainable), root.name, keras=True)
    if is_keras_3() and isinstance(root, tf.keras.random.SeedGenerator):
        return _Made(type(root), (root.get_config(),), "from_config")
    if isinstance(root, tf.train.Checkpoint):
        tracked = {n: v for n, v in vars(root).items() if not n.startswith("_")}
        return _Made(type(root), (), None, tracked)
    return root


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


def _pickled(value: Any, numbers: Mapping[int, Any], packer: Packer | None) -> Pickled:
    file = io.BytesIO()
    since = 0 if packer is None else len(packer)
    pickling.dump(_Pickler(file, numbers, packer), value)
    return Pickled(file.getvalue(), () if packer is None else packer.places(since))


def _names_in(code: types.CodeType) -> set[str]:
    """The names that a function's code, and that of the functions in it, refers to."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names


# --------------------------------------------------------------------------- in a worker
class Program:
    """A function, its steps and its roots, in a worker.

    Args:
        shipment: `Shipment`.
        block: `Block` or None, that holds the arrays of the pickles.
        open_data: callable of a number, makes what a root that the parent reads is here.

    Attributes:
        function: the user's function.
        roots: list of objects.
    """

    def __init__(
        self, shipment: Shipment, block: Block | None, open_data: Callable[[int], Any]
    ) -> None:
        self._bodies = shipment.roots
        self._open_data = open_data
        self._made: dict[int, Any] = {}
        self._steps: list[Any] = []
        self.roots = [self._root(i) for i in range(len(shipment.roots))]
        self.function, self._steps = self._load(shipment.program, block)

    def arguments(self, pickled: Pickled, block: Block | None) -> Any:
        """The arguments of a call: a tuple and a dict."""
        return self._load(pickled, block)

    def _load(self, pickled: Pickled, block: Block | None) -> Any:
        buffers = [] if block is None else pickled.arrays(block)
        unpickler = _Unpickler(io.BytesIO(pickled.body), buffers=buffers)
        unpickler.find = self._find
        return unpickler.load()

    def _find(self, kind: str, number: int) -> Any:
        return self._steps[number] if kind == "step" else self._root(number)

    def _root(self, index: int) -> Any:
        if index not in self._made:
            made = self._load(Pickled(self._bodies[index], ()), None)
            if isinstance(made, _Part):
                made = parts_of(self._root(made.container))[made.place]
            elif isinstance(made, _Data):
                made = self._open_data(made.number)
            elif isinstance(made, (_Variable, _Made)):
                made = made.make()
            self._made[index] = made
        return self._made[index]


class _Unpickler(pickle.Unpickler):
    find: Callable[[str, int], Any]

    def persistent_load(self, pid: Any) -> Any:
        return self.find(*pid)


# ------------------------------------------------------------------------------- the result
def dump_result(value: Any, roots: Sequence[Any], packer: Packer) -> Pickled:
    """Pickles what a `@nano` function returns, in a worker.

    A root, or a part of one, is the user's own object again in the parent.

    Raises:
        ShippingError: It cannot be sent back.
    """
    numbers: dict[int, Any] = {}
    for index, root in enumerate(roots):
        for place, part in parts_of(root).items():
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


class _ResultPickler(_Pickler):
    """Sends objects that the function has made with the values of their variables."""

    def reducer_override(self, obj: Any) -> Any:
        tf = require_tensorflow()
        local = tf.distribute.get_strategy().experimental_local_results
        if isinstance(obj, tf.distribute.DistributedValues) and not isinstance(obj, tf.Variable):
            return _same, (local(obj)[0],)
        if isinstance(obj, tf.Variable):
            return _filled_variable, (_recipe(obj), local(obj)[0].numpy())
        if isinstance(obj, (tf.keras.layers.Layer, tf.keras.metrics.Metric)):
            values = [local(v)[0].numpy() for v in variables_of(obj)]
            return _filled, (super().reducer_override(obj), values)
        return super().reducer_override(obj)


def _same(value: Any) -> Any:
    return value


def _filled_variable(recipe: _Variable, value: Any) -> Any:
    made = recipe.make()
    made.assign(value)
    return made


def _filled(reduced: Any, values: Sequence[Any]) -> Any:
    make, args = reduced
    made = make(*args)
    for variable, value in zip(variables_of(made), values, strict=False):
        variable.assign(value)
    return made


def load_result(pickled: Pickled, block: Block | None, roots: Sequence[Any]) -> Any:
    """Undoes `dump_result`, in the parent; `roots` are the user's objects."""

    def find(kind: str, index: int, place: Any = None) -> Any:
        return roots[index] if kind == "root" else parts_of(roots[index])[place]

    buffers = [] if block is None else pickled.arrays(block)
    unpickler = _Unpickler(io.BytesIO(pickled.body), buffers=buffers)
    unpickler.find = find
    try:
        return unpickler.load()
    except Exception as error:
        raise NanoError(
            "What a @nano function returned could not be unpickled in your process. Received: "
            f"{type(error).__name__}: {error}"
        ) from error
