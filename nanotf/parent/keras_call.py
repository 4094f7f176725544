"""A call of one of Keras's methods, as the user made it."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import reprlib
from collections.abc import Mapping
from typing import Any

from nanotf import console
from nanotf.compat import keras_common
from nanotf.errors import InvalidArgumentTypeError, meant


@dataclasses.dataclass(frozen=True)
class KerasCall:
    """A call of `fit`, `evaluate` or `predict`, without the arguments that nanotf adds."""

    model: Any
    method: Any  # Keras's, bound to the model
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    given: dict[str, Any] | None  # all arguments by name; None if the method would reject them

    @classmethod
    def of(cls, model: Any, method: Any, args: Any, kwargs: Any, face: Any = None) -> KerasCall:
        """Binds the arguments to their names, without Keras's defaults.

        Args:
            face: the method that the user has called; None for `method`.

        Raises:
            InvalidArgumentTypeError: A name is almost that of an argument.
        """
        _check_names(method, face or method, kwargs)
        try:
            given = dict(inspect.signature(method).bind(*args, **kwargs).arguments)
        except TypeError:
            return cls(model, method, args, kwargs, None)
        # Keyword arguments that the method collects, and then rejects with its own error.
        unknown = given.pop("kwargs", None)
        return cls(model, method, args, kwargs, None if unknown else given)

    def silence(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context without a status if the user wants no output: `verbose=0`."""
        return console.silent((self.given or {}).get("verbose") == 0)

    def with_arguments(self, given: Mapping[str, Any]) -> KerasCall:
        """Returns the call with other arguments, all by name."""
        return dataclasses.replace(self, args=(), kwargs=given, given=dict(given))

    def warn_of_bypass(self) -> None:
        """Warns if other code has replaced Keras's method, which workers do not call."""
        if module := keras_common.replacing_module(self.method):
            console.warn_once(
                "Workers bypass the code by which %s has replaced Keras's `%s`, so it logs nothing "
                "of this call. Call nanotf.patch_tensorflow() before that code is installed, or "
                "start the script by `nanotf run`.",
                module.partition(".")[0],
                self.method.__name__,
            )

    def __call__(self) -> Any:
        """Calls Keras's method; it raises Keras's own errors."""
        return self.method(*self.args, **self.kwargs)


def _check_names(method: Any, face: Any, kwargs: Mapping[str, Any]) -> None:
    known = inspect.signature(method).parameters.keys()
    ours = inspect.signature(face).parameters.keys()
    for name in kwargs:
        if name in known:
            continue
        if right := meant(name, [*known, *ours]):  # Keras rejects any other
            raise InvalidArgumentTypeError(
                f"`{method.__name__}` takes only its own arguments. Received: "
                f"{name}={reprlib.repr(kwargs[name])}. Did you mean `{right}`?"
            )
