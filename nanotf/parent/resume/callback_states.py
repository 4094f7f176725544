"""The state that callbacks collect in training, such as `wait` and `best` of `EarlyStopping`.

Keras's callbacks have no method that returns their state. What training has changed in a callback's
attributes is its state; the attributes that it has not changed are the user's arguments.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nanotf.compat import keras_common
from nanotf.console import logger
from nanotf.parent.resume.encoding import mark_of

States = dict[str, dict[str, Any]]  # by callback, then by attribute

# Set by Keras for each `fit`.
_NOT_STATE = frozenset({"model", "_model", "params", "validation_data"})


class CallbackStates:
    """The states of callbacks, relative to their attributes when training began.

    Args:
        callbacks: sequence of Keras callbacks, after their `on_train_begin`.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._named = dict(_named(callbacks))
        self._warned: set[str] = set()
        self._begin = {
            key: {name: _noted(value) for name, value in attributes_of(callback)}
            for key, callback in self._named.items()
        }

    def capture(self) -> States:
        """Returns what has changed in each callback."""
        return {key: dict(self._changed(key)) for key in self._named}

    def _changed(self, key: str) -> Iterator[tuple[str, Any]]:
        callback = self._named[key]
        for name, value in attributes_of(callback):
            mark, (before, then) = mark_of(value), self._begin[key].get(name, (None, None))
            if mark is not None and mark != before:
                yield name, value
            # Of an object that cannot be encoded, only its replacement by another is noticed.
            elif mark is None and value is not then:
                self._warn(key, callback, name)

    def _warn(self, key: str, callback: Any, name: str) -> None:
        """Warns once of state of a user's callback that a checkpoint cannot hold."""
        if keras_common.is_keras_own(type(callback)) or f"{key}.{name}" in self._warned:
            return
        self._warned.add(f"{key}.{name}")
        logger.warning(
            "Checkpoints hold callbacks' numbers, strings, lists, dicts and arrays, but not "
            "%s.%s, an object of class %s. A resumed fit begins without it.",
            type(callback).__name__,
            name,
            type(getattr(callback, name)).__name__,
        )

    def restore(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Sets the attributes from what `capture` returned, of the callbacks that exist here."""
        for key, state in states.items():
            for name, value in state.items():
                if key in self._named:
                    setattr(self._named[key], name, value)


def _noted(value: Any) -> tuple[str | None, Any]:
    """Returns a value's mark; and the value, if it has none, so that nothing takes its place."""
    mark = mark_of(value)
    return mark, value if mark is None else None


def _named(callbacks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Names each callback by its class, and by its number among those of the class."""
    counts: collections.Counter[str] = collections.Counter()
    for callback in callbacks:
        name = type(callback).__name__
        yield f"{name}.{counts[name]}", callback
        counts[name] += 1


def attributes_of(callback: Any) -> list[tuple[str, Any]]:
    """Returns the attributes of a callback, without those that Keras sets for each call."""
    return [(name, value) for name, value in vars(callback).items() if name not in _NOT_STATE]
