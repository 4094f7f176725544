"""The state of a process that its code depends on, beside its variables: where the program stands.

It travels with each order to a worker, which then behaves as the user's process does now: a folder,
an environment or a float type that changed since the workers started is no reason to start others.
A variable that TensorFlow reads at its import has no effect any more, as in the user's process.

`ROWS` is the list; each row is read in the user's process and written in the worker. What a `@nano`
function changes travels back the same way.

| private name | versions | why |
| --- | --- | --- |
| `tensorflow.python.framework.config.is_op_determinism_enabled`, `disable_op_determinism` | 2.14-2.21 | `enable_op_determinism` is public, and no name that tells whether it was called |
| `Context._optimizer_jit`, `_optimizer_experimental_options` | 2.14-2.21 | `tf.config.optimizer` adds options, and takes none back |
| `check_numerics_callback._state` and its attributes | 2.14-2.21 | `tf.debugging.enable_check_numerics` is public, and no name that tells whether it was called |
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import os
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nanotf.compat.versions import require_tensorflow

LIBRARIES = ("nanotf", "tensorflow", "keras", "tf_keras")
_STANDARD = os.path.join(sysconfig.get_path("stdlib"), "")  # noqa: PTH118, ends with a slash
_INSTALLED = {"site-packages", "dist-packages"}
_UMASK = re.compile(rb"^Umask:\s*([0-7]+)$", re.MULTILINE)  # in /proc/self/status, Linux 4.7 on
_CALLABLES = ("formatter", "override_repr")  # NumPy's print options that may not be pickled


@dataclasses.dataclass(frozen=True)
class Row:
    """A part of the state."""

    name: str
    read: Callable[[], Any]  # returns a value that can be pickled and compared
    write: Callable[[Any], Any]  # takes such a value
    traced: bool = False  # whether a trace of a function keeps it
    # Returns a function of which the result is equal as long as the value is, in less time than
    # that of `read`.
    marker: Callable[[], Callable[[], Any]] | None = None
    swaps: bool = False  # whether `write` returns the value before, in less time than `read`

    def marks(self, value: Any) -> Callable[[], Any]:
        """Returns the fastest function whose result changes with this value."""
        if self.swaps:
            return functools.partial(self.write, value)
        return self.read if self.marker is None else self.marker()


def _folder() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109, called at each order
    except FileNotFoundError:  # it was deleted
        return None


def _enter(folder: str | None) -> None:
    if folder is not None:
        with contextlib.suppress(OSError):  # another machine may not have it
            os.chdir(folder)


def _umask() -> int:
    with contextlib.suppress(OSError):
        status = os.open("/proc/self/status", os.O_RDONLY)
        try:
            found = _UMASK.search(os.read(status, 4096))
        finally:
            os.close(status)
        if found:
            return int(found[1], 8)
    mask = os.umask(0o077)  # for a moment, also for other threads
    os.umask(mask)
    return mask


def _environ_mark() -> Any:
    # CPython (3.10 to 3.14) keeps the encoded variables there: to decode all takes 20 us.
    found = getattr(os.environ, "_data", None)
    return found.copy() if isinstance(found, dict) else dict(os.environ)


def _set_environ(wanted: Mapping[str, str]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _of_numpy(name: str, get: str, put: str, unfit: Iterable[str] = ()) -> Row:
    """Returns the row of a setting of NumPy. Of a process without NumPy it is None.

    Args:
        get: the function that returns the setting as a dict.
        put: the function that takes it as keywords.
        unfit: keys to leave out.
    """
    before: dict[str, Any] | None = None  # in a worker whose parent has no NumPy

    def read() -> dict[str, Any] | None:
        function = getattr(sys.modules.get("numpy"), get, None)
        if function is None:
            return None
        return {key: value for key, value in function().items() if key not in unfit}

    def write(value: dict[str, Any] | None) -> None:
        nonlocal before
        import numpy as np

        before = before or read()
        getattr(np, put)(**(before or {} if value is None else value))

    # With the keys that may not be pickled.
    return Row(name, read, write, marker=lambda: getattr(sys.modules.get("numpy"), get, dict))


def _assign(items: list[str]) -> Callable[[Iterable[str]], None]:
    def write(value: Iterable[str]) -> None:
        items[:] = value

    return write


def _keras() -> Any:
    return require_tensorflow().keras


def _module(name: str) -> Callable[[], Any]:
    """Returns a function that imports a module of TensorFlow's, and from then on takes 50 ns."""
    return functools.cache(lambda: importlib.import_module(name))


_config = _module("tensorflow.python.framework.config")
_context = _module("tensorflow.python.eager.context")
_checks = _module("tensorflow.python.debug.lib.check_numerics_callback")
_keras_runs = _module("nanotf.compat.keras_runs")  # imports TensorFlow


def _is_deterministic() -> bool:
    return bool(_config().is_op_determinism_enabled())


def _set_deterministic(wanted: bool) -> None:
    config = _config()
    (config.enable_op_determinism if wanted else config.disable_op_determinism)()


def _graph_options() -> tuple[bool | None, dict[str, Any]]:
    here = _context().context()
    return here._optimizer_jit, dict(here._optimizer_experimental_options)


def _set_graph_options(wanted: tuple[bool | None, dict[str, Any]]) -> None:
    here = _context().context()
    here.optimizer_jit, options = wanted
    here._optimizer_experimental_options.clear()
    here.set_optimizer_experimental_options(options)


def _checks_of_numbers() -> tuple[int, int] | None:
    found = getattr(_checks()._state, "check_numerics_callback", None)
    return found and (found._stack_height_limit, found._path_length_limit)


def _set_checks_of_numbers(wanted: tuple[int, int] | None) -> None:
    debugging = require_tensorflow().debugging
    debugging.disable_check_numerics()
    if wanted is not None:
        debugging.enable_check_numerics(*wanted)


def _of_backend(name: str) -> Row:
    """Returns the row of a setting of `tf.keras.backend`, `floatx()` and `set_floatx()` for one."""
    return Row(
        name.replace("_", " "),
        lambda: getattr(_keras().backend, name)(),
        lambda value: getattr(_keras().backend, f"set_{name}")(value),
        traced=True,
        marker=lambda: getattr(_keras().backend, name),
    )


# Everything here works before TensorFlow is imported.
_EARLY = (
    Row("environ", lambda: dict(os.environ), _set_environ, marker=lambda: _environ_mark),
    Row("folder", _folder, _enter),
    Row("umask", _umask, os.umask, swaps=True),
    Row("sys.path", lambda: list(sys.path), lambda value: _assign(sys.path)(value)),
    Row("sys.argv", lambda: list(sys.argv), lambda value: _assign(sys.argv)(value)),
    Row("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    _of_numpy("NumPy's errors", "geterr", "seterr"),
    _of_numpy("NumPy's print options", "get_printoptions", "set_printoptions", unfit=_CALLABLES),
)
ROWS = (
    *_EARLY,
    _of_backend("floatx"),
    _of_backend("epsilon"),
    _of_backend("image_data_format"),
    Row(
        "dtype policy",
        lambda: _keras().mixed_precision.global_policy().name,
        lambda value: _keras().mixed_precision.set_global_policy(value),
        traced=True,
    ),
    Row(
        "limits of a run",
        lambda: _keras_runs().run_limits(),
        lambda value: _keras_runs().set_run_limits(*value),
        traced=True,
    ),
    Row("deterministic operations", _is_deterministic, _set_deterministic, traced=True),
    Row("graph options", _graph_options, _set_graph_options, traced=True),
    Row("checks of numbers", _checks_of_numbers, _set_checks_of_numbers, traced=True),
    Row(
        "eager functions",
        lambda: require_tensorflow().config.functions_run_eagerly(),
        lambda value: require_tensorflow().config.run_functions_eagerly(value),
        traced=True,
        marker=lambda: require_tensorflow().config.functions_run_eagerly,
    ),
)
_BY_NAME = {row.name: row for row in ROWS}


@dataclasses.dataclass(frozen=True)
class ProcessState:
    """The state of a process, to be restored in another."""

    values: dict[str, Any]  # by the name of a `Row`
    # The user's modules, by name: the file of each, and a number that is another one when the
    # module was loaded anew.
    modules: dict[str, tuple[str, int]] = dataclasses.field(default_factory=dict)

    @classmethod
    def capture(cls, *, early: bool = False) -> ProcessState:
        """Returns the state of this process.

        Args:
            early: whether to omit what only an imported TensorFlow has.
        """
        return cls(
            {row.name: row.read() for row in (_EARLY if early else ROWS)}, _numbered_modules()
        )

    def with_environ(self, environ: Mapping[str, str]) -> ProcessState:
        """Returns the same state with other environment variables."""
        return dataclasses.replace(self, values={**self.values, "environ": dict(environ)})

    def with_paths(self, paths: Iterable[str]) -> ProcessState:
        """Returns the same state with more paths to import from, after its own."""
        ours = self.values["sys.path"]
        joined = [*ours, *(path for path in paths if path not in ours)]
        return dataclasses.replace(self, values={**self.values, "sys.path": joined})

    def begin(self) -> None:
        """Restores the state for the first time in a new worker.

        Variables that differ now were set for this worker, or belong to its machine. They stay.
        """
        wanted = self.values["environ"]
        names = {n for n in {*os.environ, *wanted} if os.environ.get(n) != wanted.get(n)}
        _own.update({name: os.environ.get(name) for name in names})
        self.restore()

    def restore(self) -> None:
        """Restores the state in this process, a worker."""
        self.restorer()()
        _forget_modules(self.modules)

    def restorer(self) -> Callable[[], None]:
        """Returns a function that restores the state, but for modules, again and again."""
        environ = {**self.values["environ"], **_own}
        environ = {name: value for name, value in environ.items() if value is not None}
        values = {**self.values, "environ": environ}
        rows = [(_BY_NAME[name], value) for name, value in values.items()]
        marks = [row.marks(value) for row, value in rows]
        before: list[Any] | None = None

        def restore() -> None:
            # Most items of `nanotf.map` change nothing, and may take less time than to read it all.
            nonlocal before
            if [mark() for mark in marks] == before:
                return
            for row, value in rows:
                if row.swaps or row.read() != value:
                    row.write(value)
            before = [mark() for mark in marks]

        return restore

    def changes(self) -> dict[str, Any]:
        """Returns what this process, a worker, has changed since, for `adopt`."""
        found = {row.name: row.read() for row in ROWS}
        before, now = self.values["environ"], found.pop("environ")
        environ = {n: now.get(n) for n in {*before, *now} if before.get(n) != now.get(n)}
        changed = {name: value for name, value in found.items() if self.values[name] != value}
        return {**changed, "environ": environ} if environ else changed


def read(name: str) -> Any:
    """Returns a part of this process's state, by the name of a `Row`."""
    return _BY_NAME[name].read()


def adopt(changes: Mapping[str, Any]) -> None:
    """Makes changes of a worker's state in this process, see `ProcessState.changes`."""
    for name, value in changes.items():
        if name == "environ":
            wanted = {**os.environ, **value}
            value = {n: text for n, text in wanted.items() if text is not None}
        _BY_NAME[name].write(value)


def trace_key() -> tuple[Any, ...]:
    """Returns what traced functions of this worker keep of its state, to be compared."""
    return *(row.read() for row in ROWS if row.traced), _modules.forgotten


# ------------------------------------------------------------------------------------- modules
# In a worker.
_own: dict[str, str | None] = {}  # its environment variables that are not the parent's


@dataclasses.dataclass
class _Modules:
    """The modules of this process, as it has last looked at them."""

    told: dict[str, tuple[str, int]]  # in a worker: the parent's modules, by the last order
    forgotten: int = 0  # in a worker: how often a module was dropped
    seen: tuple[int, str, Any] = (0, "", None)  # the size of `sys.modules`, and its last item
    users: Mapping[str, types.ModuleType] = dataclasses.field(default_factory=dict)


_modules = _Modules({})

# In a user's process.
_specs: dict[str, tuple[Any, int]] = {}  # by name: the module's spec, and its number
_numbers = itertools.count()


@functools.cache
def is_users_file(path: str) -> bool:
    """Returns True if a module's file is the user's own, not an installed library's."""
    # Of thousands of modules, in the first call: `pathlib` would take longer than the call's start.
    return not path.startswith(_STANDARD) and _INSTALLED.isdisjoint(path.split("/"))


def is_module(value: Any) -> bool:
    """Returns True for a module, and not for what only says that it is one.

    `isinstance` believes `__class__`. A library that cffi has loaded is in `sys.modules`, says so,
    and has neither a `__dict__` nor a file; mlflow imports one.
    """
    return issubclass(type(value), types.ModuleType)


def file_of(module: Any) -> str | None:
    """Returns the file of a module, or None."""
    # A lazy module imports itself when an attribute is read.
    file = object.__getattribute__(module, "__dict__").get("__file__")
    return file if isinstance(file, str) else None


def _is_users(name: str, module: Any) -> bool:
    if name == "__main__" or name.partition(".")[0] in LIBRARIES:
        return False
    file = file_of(module) if is_module(module) else None
    return file is not None and is_users_file(file)


def users_modules() -> Mapping[str, types.ModuleType]:
    """Returns the user's modules of this process, but the script, by name, in the order of import."""
    last = next(reversed(sys.modules))  # a module that is loaded becomes the last
    size, name, module = len(sys.modules), last, sys.modules.get(last)
    if (size, name) != _modules.seen[:2] or module is not _modules.seen[2]:
        _modules.users = {n: m for n, m in list(sys.modules.items()) if _is_users(n, m)}
        _modules.seen = size, name, module
    return _modules.users


def _numbered_modules() -> dict[str, tuple[str, int]]:
    found = {}
    for name, module in users_modules().items():
        spec = object.__getattribute__(module, "__dict__").get("__spec__")
        if name not in _specs or _specs[name][0] is not spec:  # `reload` makes another one
            _specs[name] = spec, next(_numbers)
        found[name] = file_of(module) or "", _specs[name][1]
    return found


def _forget_modules(now: Mapping[str, tuple[str, int]]) -> None:
    """Drops modules that the parent has loaded anew, or from another file."""
    for name in {*_modules.told, *now}:
        module = sys.modules.get(name)
        if module is None or _modules.told.get(name) == now.get(name):
            continue
        # Loaded here before any order told of it, from the same file.
        if name not in _modules.told and file_of(module) == now[name][0]:
            continue
        del sys.modules[name]
        _modules.forgotten += 1
    _modules.told = dict(now)
