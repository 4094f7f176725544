"""Keeps a model as it was when Keras's step functions were traced, for workers that trace later.

Keras makes a step function at a model's first `fit`, `evaluate` or `predict` after `compile`, and
TensorFlow traces it for each kind of batch. Numbers that Python code read then stay in the trace:
`model.beta = 2.0` between two calls of `fit` changes nothing until the next `compile`. Workers
trace their own functions, some of them later than the first call: new workers, for example.

Python code that a step runs (`tf.py_function`, `tf.numpy_function`) reads what is there at each
step. Workers of such a model get it as it is, and trace it anew.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from nanotf.compat import keras_compiling
from nanotf.compat.generation import generation

_numbers = itertools.count(1)
_TRACED = "_nanotf_traced"  # attribute of a step function: dict of text to `TracedModel`


@dataclasses.dataclass
class TracedModel:
    """A model as it was when a step function was traced for batches of one kind."""

    heap: bytes  # the model, pickled by `shipping.objects.heap.dump_model`
    numbered: list[Any]  # the objects that are sent by number
    trainable: list[Any]  # the variables that were trained
    # Another one for each set of Keras's functions. Random operations in them count what they have
    # drawn, so workers reuse the functions of one set only. 0 if steps run eagerly.
    number: int = 0
    runs_python: bool | None = None  # whether the steps run Python code; None if unknown
    # After `on_train_begin`, see `keras_models.plain_attributes`; None until a call has got there
    attributes: tuple[dict[str, Any], ...] | None = None
    # `summary_state.WriterState` of the writers that its steps write with
    summaries: dict[str, Any] = dataclasses.field(default_factory=dict)

    def holds_for(self, now: TracedModel) -> bool:
        """Returns True if workers may have this model instead of the model as it is now.

        It must have the same variables in the same order. Python code that steps run reads objects
        as they are now: unless it is known that there is none, only an unchanged model will do.
        """
        if self.runs_python is not False and self.heap != now.heap:
            return False
        return _ids(self.numbered) == _ids(now.numbered) and _ids(self.trainable) == _ids(
            now.trainable
        )


def traced(
    model: Any, heap: bytes, numbered: list[Any], specs_by_step: dict[str, Any]
) -> TracedModel:
    """Returns the model as its step functions were traced, or else as it is, which is noted.

    Args:
        model: the user's model.
        heap, numbered: of `shipping.objects.heap.dump_model`, now.
        specs_by_step: nested structure of `tf.TensorSpec`, a batch as Keras sees it, by the name of
            a step that the call runs ("train", "test", "predict"). The first names the call.
    """
    now = TracedModel(heap, numbered, generation().trainable_variables(model))
    found = None
    for step, specs in specs_by_step.items():
        function = None if model.run_eagerly else keras_compiling.step_function(model, step)
        if not hasattr(function, "__dict__"):  # steps run eagerly, or nothing can be noted on it
            return now
        by_kind = vars(function).setdefault(_TRACED, {})
        known = by_kind.get(repr(specs))
        if known is None or not known.holds_for(now):
            known = by_kind[repr(specs)] = found or now
        found = found or known
    found = found or now
    found.number = found.number or _number_for(model, found)
    return found


def _number_for(model: Any, new: TracedModel) -> int:
    functions = [getattr(model, f"{step}_function", None) for step in ("train", "test", "predict")]
    for function in functions:
        for known in getattr(function, _TRACED, {}).values():
            if known.number and known.heap == new.heap:
                return int(known.number)
    return next(_numbers)


def is_traced(model: Any, specs_by_step: dict[str, Any]) -> bool:
    """Returns True if a call has traced the first of the steps; see `traced`."""
    step, specs = next(iter(specs_by_step.items()))
    function = keras_compiling.step_function(model, step)
    return repr(specs) in getattr(function, _TRACED, {})


def _ids(objects: list[Any]) -> list[int]:
    return list(map(id, objects))
