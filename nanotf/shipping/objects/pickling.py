"""Pickles functions, classes, arrays and tensors for another process.

Functions and classes that a worker cannot import, mostly those of `__main__`, are sent by value
(cloudpickle). Tensors are sent as their values, a `tf.function` as its Python function and its
options, which wrap the function again in the worker. Keras's objects need a `heap`.

An object that occurs in several places is a single object again after loading.
"""

from __future__ import annotations
import __future__

import ast
import contextlib
import copyreg
import dataclasses
import inspect
import io
import itertools
import linecache
import pathlib
import pickle
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle

from nanotf.compat import functions
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import ShippingError
from nanotf.region.decorators import is_tf_function
from nanotf.shipping.objects import user_modules

_DEEPEST, _MOST = 10, 1000  # steps of a path in an error, and parts of an object that are tried


def rebuild_function(python_function: Any, options: dict[str, Any]) -> Any:
    """Makes a `tf.function` from a `TensorPickler`'s description."""
    return functions.for_worker(python_function, options)


def bare(cls: Any, *content: Any) -> Any:
    """Makes an object of a class without the class's code: it has no attributes.

    Args:
        *content: of an immutable built-in class from which it is derived, such as a tuple's items.
    """
    own = (vars(base).get("__new__") for base in cls.__mro__)
    # The `__new__` that the class's own ones call at last.
    new = next(each for each in own if isinstance(each, types.BuiltinFunctionType))
    return new(cls, *content)


def _as_bare(obj: Any) -> Any:
    """Returns how pickle reduces an object, made without its class's code; else NotImplemented.

    The class's `__new__` may take arguments that pickle does not know. A class with its own
    `__getnewargs__` tells them.
    """
    cls: Any = type(obj)
    plain = object.__reduce_ex__, object.__reduce__
    if (cls.__reduce_ex__, cls.__reduce__) != plain or isinstance(obj, type):
        return NotImplemented
    names = ("__getnewargs__", "__getnewargs_ex__")
    if any(isinstance(getattr(cls, name, None), types.FunctionType) for name in names):
        return NotImplemented
    if not isinstance(cls.__new__, types.FunctionType) or cls in copyreg.dispatch_table:
        return NotImplemented
    _, (_, *content), *rest = obj.__reduce_ex__(4)
    return bare, (cls, *content), *rest


def _empty_cell() -> types.CellType:
    return types.CellType()


def _fill_cell(cell: types.CellType, values: tuple[Any, ...]) -> None:
    for value in values:
        cell.cell_contents = value


def _same(value: Any) -> Any:
    return value


def _rebuild_tensor(value: Any) -> Any:
    return require_tensorflow().constant(value)


def _rebuild_code(path: str, make: Any, args: tuple[Any, ...]) -> Any:
    return make(*args).replace(co_filename=path)


class TensorPickler(cloudpickle.Pickler):  # type: ignore[misc]
    """A cloudpickle that knows tensors and `tf.function`s.

    Args:
        buffer_callback: as in `pickle.Pickler`.
    """

    def __init__(self, file: io.BytesIO, buffer_callback: Any = None) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self._tf = require_tensorflow()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            original = user_modules.original_class(obj)
            if original is not obj:  # made by `accelerate`; workers make their own
                return _same, (original,)
            return self._by_name_or_value(obj)
        if isinstance(obj, types.FunctionType):
            reduced = self._by_name_or_value(obj)
            if isinstance(reduced, tuple):
                reduced[2][1]["__globals__"].update(_for_autograph(obj))
            return reduced
        if isinstance(obj, types.CodeType):
            # cloudpickle drops the file's name from 3.1.3 on, but AutoGraph needs it. A new string
            # object each time, as for other names, makes the bytes equal.
            path = "".join(obj.co_filename)
            return _rebuild_code, (path, *self.dispatch_table[types.CodeType](obj))
        if isinstance(obj, types.CellType):
            # Unlike with cloudpickle, functions that share a variable still share it afterwards.
            return _empty_cell, (), self.contents_of_cell(obj), None, None, _fill_cell
        if hasattr(obj, "numpy") and isinstance(obj, self._tf.Tensor):
            return _rebuild_tensor, (obj.numpy(),)
        if is_tf_function(obj):
            return rebuild_function, (obj.python_function, functions.options_of(obj))
        reduced = super().reducer_override(obj)
        return _as_bare(obj) if reduced is NotImplemented else reduced

    def for_trial(self) -> TensorPickler:
        """Returns another pickler of what this one takes, to find what cannot be pickled."""
        return TensorPickler(io.BytesIO(), lambda _: False)

    def contents_of_cell(self, cell: types.CellType) -> tuple[Any, ...]:
        """Returns a tuple of the value of a closure's variable, empty if it has none."""
        try:
            return (cell.cell_contents,)
        except ValueError:
            return ()

    def _function_getnewargs(self, func: types.FunctionType) -> tuple[Any, ...]:
        # Replaces cloudpickle's new cells, which functions would not share.
        code, base_globals, name, defaults, _ = super()._function_getnewargs(func)
        return code, base_globals, name, defaults, func.__closure__

    def _by_name_or_value(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        is_code = isinstance(obj, (type, types.FunctionType))
        # Code by name: refused here, before work starts, if a worker could not find its module.
        if reduced is NotImplemented and is_code and obj.__module__:
            user_modules.check_importable(obj.__module__)
        if isinstance(obj, type) and isinstance(reduced, tuple) and len(reduced) > 2:
            # cloudpickle drops it; a new string object, as for a code's file.
            reduced[2][0]["__qualname__"] = "".join(obj.__qualname__)
        return reduced


def _for_autograph(function: types.FunctionType) -> dict[str, Any]:
    """Returns globals that AutoGraph needs in the worker, besides those that a function refers to.

    It needs the module's features from `__future__`, which tell if annotations are evaluated, and
    what those name. It also needs the source of functions typed into a notebook.
    """
    flags = function.__code__.co_flags
    features = {name: getattr(__future__, name) for name in __future__.all_feature_names}
    found: dict[str, Any] = {n: f for n, f in features.items() if flags & f.compiler_flag}
    if function.__annotations__ and "annotations" not in found:
        names = _names_in_annotations(function)
        found.update({n: v for n, v in function.__globals__.items() if n in names})
    path = function.__code__.co_filename
    if path in linecache.cache and not pathlib.Path(path).is_file():
        found["__nanotf_source__"] = _SourceText(path, linecache.getlines(path))
    return found


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _names_in_annotations(function: types.FunctionType) -> set[str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):  # without its source AutoGraph does not convert it
        return set()
    first = next((node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)), None)
    if first is None:
        return set()
    arguments = [node for node in ast.walk(first.args) if isinstance(node, ast.arg)]
    given = [first.returns, *(node.annotation for node in arguments)]
    nodes = [node for each in given if each is not None for node in ast.walk(each)]
    return {node.id for node in nodes if isinstance(node, ast.Name)}


@dataclasses.dataclass(frozen=True)
class _SourceText:
    """Source text without a file, which `inspect` finds wherever this is unpickled."""

    path: str
    lines: list[str]

    def __reduce__(self) -> Any:
        return _remember_source, (self.path, self.lines)


def _remember_source(path: str, lines: list[str]) -> _SourceText:
    # Without a modification time, linecache never looks for it on disk.
    linecache.cache[path] = (sum(map(len, lines)), None, lines, path)
    return _SourceText(path, lines)


def dumps(obj: Any) -> bytes:
    """Pickles an object for the workers.

    Args:
        obj: anything described at the top of this module.

    Returns:
        What `loads` takes in a worker.

    Raises:
        ShippingError: Something in it cannot be sent; the message names it.
    """
    file = io.BytesIO()
    dump(TensorPickler(file), obj)
    return file.getvalue()


def dump(pickler: TensorPickler, obj: Any, holder: Callable[[], str] = str) -> None:
    """Pickles an object; raises `ShippingError` as `dumps` does.

    Args:
        holder: returns the name of the object whose attributes it is, for the error; "" if it is
            none's.
    """
    try:
        pickler.dump(obj)
    except ShippingError:
        raise
    except Exception as error:
        path, culprit = _culprit(pickler, obj)
        cls, where = type(culprit), " of ".join(filter(None, (path and f"`{path}`", holder())))
        received = ", ".join(
            filter(None, (where, f"an object of class {cls.__module__}.{cls.__qualname__}"))
        )
        raise ShippingError(
            "Everything that a call refers to must be picklable to reach another process. "
            f"Received: {received}, and {type(error).__name__}: {str(error)[:500]}. "
            "Keep open files, sockets, threads and the like out of models, losses, metrics and "
            "the functions that they use: open them where they are used."
        ) from error


def _culprit(pickler: TensorPickler, obj: Any) -> tuple[str, Any]:
    """Returns the path to the innermost part of an object that cannot be pickled, and the part."""
    path = ""
    for _ in range(_DEEPEST):
        parts = itertools.islice(_parts(obj), _MOST)
        found = next(((name, part) for name, part in parts if not _travels(pickler, part)), None)
        if found is None:
            break
        path, obj = path + found[0], found[1]
    return path.lstrip("."), obj


def _travels(pickler: TensorPickler, part: Any) -> bool:
    try:
        pickler.for_trial().dump(part)
    except Exception:
        return False
    return True


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yields what an object refers to, with the words that follow the object's own."""
    if isinstance(obj, (list, tuple, set, frozenset)):
        yield from ((f"[{place}]", item) for place, item in enumerate(obj))
        return
    if isinstance(obj, types.FunctionType):
        found = {name: obj.__globals__.get(name) for name in obj.__code__.co_names}
        found |= inspect.getclosurevars(obj).nonlocals
    elif isinstance(obj, types.MethodType):
        found = {"__self__": obj.__self__}
    else:
        found = obj if isinstance(obj, dict) else getattr(obj, "__dict__", {})
    for name, item in dict(found).items():
        yield (f".{name}" if str(name).isidentifier() else f"[{name!r}]"), item


def loads(data: bytes) -> Any:
    """Undoes `dumps`, in a worker."""
    return pickle.loads(data)


@contextlib.contextmanager
def naming(what: str) -> Iterator[None]:
    """Names the user's argument in a `ShippingError` that is raised inside."""
    try:
        yield
    except ShippingError as error:
        raise named(what, error) from error.__cause__


def named(what: str, error: ShippingError) -> ShippingError:
    """Returns an error that names the user's argument."""
    return ShippingError(f"{what} cannot be sent. {error}")
