"""One `fit(num_processes="auto")`: its beginning in this process, and the call for its rest."""

from __future__ import annotations

import dataclasses
from typing import Any

from nanotf.compat import keras_models
from nanotf.compat.generation import generation
from nanotf.parent.auto.choice import Auto, Choice
from nanotf.parent.callbacks import list_of
from nanotf.parent.fit.fit_options import FitOptions
from nanotf.parent.keras_call import KerasCall
from nanotf.parent.reading.fit_data import FitData
from nanotf.parent.where import Where


class AutoCall:
    """A call whose number of processes is chosen before it or between its epochs.

    Args:
        call: its arguments are known by name.
        tune: names of `defaults.TUNE`, each once.

    Raises:
        NanoError: An argument cannot be used.
    """

    def __init__(
        self, call: KerasCall, where: Where, options: FitOptions, tune: tuple[str, ...]
    ) -> None:
        assert call.given is not None
        self._call, self._options = call, options
        self._auto = Auto(call.model, call.given, where, tune, options.resume is not None)
        self.watch = self._auto.watch
        self.is_open = False  # whether the choice will be made between two epochs

    def begin(self) -> Choice:
        """Returns what trains the call, or its first epochs."""
        if (chosen := self._auto.without_data()) is not None:
            return chosen
        a = self._auto.arguments
        generation().check_compiled(self._call.model, "fit")
        # Keras counts the steps; it opens the validation data itself.
        data = FitData(self._call.model, dataclasses.replace(a, validation_data=None), 1)
        self._steps = data.steps
        chosen = self._auto.at_once(data)
        if chosen is None and isinstance(a.callbacks, keras_models.callback_list_class()):
            # It may be of the user's own class, whose methods no other list would call.
            self._auto.say(
                "one process, not measured: its steps are timed by a callback list of nanotf's "
                "own, and `callbacks` is a CallbackList. Pass a list of callbacks."
            )
            return Choice()
        self.is_open = chosen is None
        return chosen or Choice()

    def watched(self) -> KerasCall:
        """Returns the call that trains in this process and is watched."""
        if self._options.resume is not None:  # `fit_here` makes the list
            return self._call
        a, base = self._auto.arguments, keras_models.callback_list_class()
        self._list = list_of(
            self.watch.watched(base),
            a.callbacks,
            self._call.model,
            a.verbose,
            a.epochs,
            self._steps,
        )
        return self._with(callbacks=self._list, verbose=0)  # the list has the bar

    def rest(self, epoch: int, number: int) -> tuple[KerasCall, FitOptions]:
        """Returns the call that trains the rest, and its options.

        Args:
            epoch: with which the rest begins.
            number: of processes.
        """
        if number == 1:
            begun = self._with(callbacks=self._list, verbose=0, initial_epoch=epoch)
            return begun, self._options
        options = dataclasses.replace(self._options, begins_at=epoch)
        return self._with(callbacks=self._list, verbose=0), options

    def _with(self, **changes: Any) -> KerasCall:
        assert self._call.given is not None
        return self._call.with_arguments({**self._call.given, **changes})

    def end(self) -> None:
        """Ends a call that this process has trained to its end."""
        self._auto.end()
