"""The arguments that a `tf.function` was made with (identical in 2.14 to 2.21).

| name | why |
| --- | --- |
| `Function._autograph`, `_reduce_retracing`, `_experimental_autograph_options`, `_jit_compile` | the arguments of `tf.function`; no public name returns them |
| `Function._clone` | a `tf.function` of the same arguments without traces |
| `control_flow_util.GraphOrParentsInXlaContext` | whether a graph is traced to be compiled; a graph does not know its function |
"""

from __future__ import annotations

from typing import Any

from nanotf.compat.versions import require_tensorflow


def options_of(function: Any) -> dict[str, Any]:
    """Returns the arguments that a `tf.function` was made with, except defaults."""
    found = {
        "input_signature": function.input_signature,
        "autograph": function._autograph,
        "reduce_retracing": function._reduce_retracing,
        "jit_compile": function._jit_compile,
        "experimental_autograph_options": function._experimental_autograph_options,
    }
    defaults = {"autograph": True, "reduce_retracing": False}  # of all others: None
    return {name: value for name, value in found.items() if value is not defaults.get(name)}


def anew(function: Any) -> Any:
    """Returns a `tf.function` that was made with the same arguments, and not yet traced."""
    return function._clone(None)  # None: of the same Python function


def is_for_xla(graph: Any) -> bool:
    """Returns True for a graph that is traced for XLA: in a function with `jit_compile=True`."""
    from tensorflow.python.ops import control_flow_util

    return bool(control_flow_util.GraphOrParentsInXlaContext(graph))


_COMPILES = "_nanotf_compiles"  # attribute of functions of `for_worker`
_VERSION = "_nanotf_dividing_version"  # attribute of a compiled one; keeps the version's traces


def for_worker(python_function: Any, options: dict[str, Any]) -> Any:
    """Makes a `tf.function` that XLA does not compile as a whole, since XLA cannot run collectives.

    Args:
        python_function: the function that it calls.
        options: what `options_of` returned for another `tf.function`.
    """
    inside = {name: value for name, value in options.items() if name != "jit_compile"}
    made = require_tensorflow().function(python_function, **inside)
    setattr(made, _COMPILES, bool(options.get("jit_compile")))
    return made


def compiles(function: Any) -> bool:
    """Returns True if XLA compiles the layers that a function of `for_worker` calls."""
    return getattr(function, _COMPILES, False)


def dividing_version(function: Any) -> Any:
    """Returns a `tf.function` for code whose calls of layers are divided.

    Args:
        function: a `tf.function`, made in this process.

    Returns:
        The function itself, or one of `for_worker` in its place if XLA would compile all of it.
    """
    if not function._jit_compile:
        return function
    version = getattr(function, _VERSION, None)
    if version is None:
        version = for_worker(function.python_function, options_of(function))
        setattr(function, _VERSION, version)
    return version
