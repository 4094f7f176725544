"""What a `tf.function` was made with (seen alike in 2.15 to 2.21).

| name | why |
| --- | --- |
| `Function._autograph`, `_reduce_retracing`, `_experimental_autograph_options` | the arguments of `tf.function`, which has no other way to tell them |
"""

from __future__ import annotations

from typing import Any


def options_of(function: Any) -> dict[str, Any]:
    """The arguments of `tf.function` that a function was made with, those that are not the defaults.

    Without `jit_compile`: XLA compiles no exchange between workers.
    """
    found = {
        "input_signature": function.input_signature,
        "autograph": function._autograph,
        "reduce_retracing": function._reduce_retracing,
        "experimental_autograph_options": function._experimental_autograph_options,
    }
    defaults = {"input_signature": None, "autograph": True, "reduce_retracing": False}
    return {name: value for name, value in found.items() if value is not defaults.get(name)}
