"""One `fit(num_processes="auto")`: its beginning in this process, and the call for its rest."""

from __future__ import annotations

import dataclasses
from typing import Any

from nanotf.compat import keras_models
from nanotf.compat.generation import generation
from nanotf.parent.auto.choice import Auto, Choice
from nanotf.parent.auto.first_epochs import HandedOver
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
        self._resumes = options.resume is not None
        self._auto = Auto(call.model, call.given, where, tune, self._resumes)
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
        self.is_open = chosen is None
        return chosen or Choice()

    def watched(self) -> KerasCall:
        """Returns the call that trains in this process and is watched."""
        if self._resumes:
            return self._call
        a, base = self._auto.arguments, keras_models.callback_list_class()
        given = a.callbacks.callbacks if isinstance(a.callbacks, base) else a.callbacks
        verbose = generation().auto_verbose() if a.verbose == "auto" else a.verbose
        self._list = self.watch.watched(base)(
            given,
            add_history=True,
            add_progbar=verbose != 0,
            model=self._call.model,
            verbose=verbose,
            epochs=a.epochs,
            steps=self._steps,
        )
        return self._with(callbacks=self._list, verbose=0)

    def rest(self, over: HandedOver) -> tuple[KerasCall, FitOptions]:
        """Returns the call that trains the rest, and its options."""
        if self._resumes or over.choice.number == 1:
            return self.rest_here(over)
        options = dataclasses.replace(self._options, begins_at=over.epoch)
        return self._with(callbacks=self._list, verbose=0), options

    def rest_here(self, over: HandedOver) -> tuple[KerasCall, FitOptions]:
        """Returns the call that trains the rest in this process, and its options."""
        if self._resumes:  # from the checkpoint of the epoch before
            return self._call, self._options
        return self._with(callbacks=self._list, verbose=0, initial_epoch=over.epoch), self._options

    def _with(self, **changes: Any) -> KerasCall:
        assert self._call.given is not None
        return self._call.with_arguments({**self._call.given, **changes})

    def end(self) -> None:
        """Ends a call that this process has trained to its end."""
        self._auto.end()
