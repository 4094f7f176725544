"""What a `tf.function` was made with (seen alike in 2.15 to 2.21).

| name | why |
| --- | --- |
| `Function._autograph`, `_reduce_retracing`, `_experimental_autograph_options`, `_jit_compile` | the arguments of `tf.function`, which has no other way to tell them |
"""

from __future__ import annotations

from typing import Any

from nanotf.compat.versions import require_tensorflow


def options_of(function: Any) -> dict[str, Any]:
    """The arguments of `tf.function` that a function was made with, those that are not the defaults."""
    found = {
        "input_signature": function.input_signature,
        "autograph": function._autograph,
        "reduce_retracing": function._reduce_retracing,
        "jit_compile": function._jit_compile,
        "experimental_autograph_options": function._experimental_autograph_options,
    }
    defaults = {"autograph": True, "reduce_retracing": False}
    return {name: value for name, value in found.items() if value is not defaults.get(name)}


_COMPILES = "_nanotf_compiles"


def for_worker(python_function: Any, options: dict[str, Any]) -> Any:
    """Makes a `tf.function` of which not all is compiled by XLA, which knows no exchange.

    Args:
        python_function: what it calls.
        options: dict, the `options_of` another.
    """
    inside = {name: value for name, value in options.items() if name != "jit_compile"}
    made = require_tensorflow().function(python_function, **inside)
    setattr(made, _COMPILES, bool(options.get("jit_compile")))
    return made


def compiles(function: Any) -> bool:
    """Whether XLA compiles what the layers do that a function of `for_worker` calls."""
    return getattr(function, _COMPILES, False)
