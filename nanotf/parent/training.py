"""`fit` of a nanotf model: chooses the way to train, by the arguments that nanotf adds.

fit
  auto/               chooses how many workers train, if asked, also between two epochs
  call_readers        starts processes that read, if asked
  fit/with_workers    several workers, or GPUs
  fit/fit_here        this process, with checkpoints
  one_process         this process, as Keras does
"""

from __future__ import annotations

import dataclasses
from typing import Any

from nanotf.compat import keras_steps
from nanotf.errors import InvalidArgumentError, UndividedError
from nanotf.machine import topology
from nanotf.parent import call_readers, defaults, one_process
from nanotf.parent.auto import choice_of_settings
from nanotf.parent.auto.auto_call import AutoCall
from nanotf.parent.auto.choice import Choice
from nanotf.parent.auto.first_epochs import HandedOver
from nanotf.parent.fit import fit_here, with_workers
from nanotf.parent.fit.fit_options import FitOptions
from nanotf.parent.keras_call import KerasCall
from nanotf.parent.where import Where
from nanotf.pool import backends


def fit(
    call: KerasCall,
    num_processes: Any,
    where: Where,
    options: FitOptions,
    tune: Any = None,
    read_processes: Any = None,
) -> Any:
    """Trains a model.

    Args:
        call: the call of Keras's `fit`.
        num_processes, tune, read_processes: as the user passed them to `Model.fit`.
        where: the place of workers, without their number.
        options: the other arguments that nanotf adds.

    Returns:
        The `keras.callbacks.History` of the user's model.

    Raises:
        NanoError: As in `Model.fit`.
        Exception: What Keras raises.
    """
    reads = call_readers.check(read_processes)
    wanted = defaults.num_processes(num_processes)
    tune = defaults.tune(tune, wanted)
    hint = 'num_processes="auto" measures whether they would be faster.'
    auto, choice = None, Choice(wanted)
    if isinstance(wanted, str) and wanted == topology.AUTO:
        backends.check_can_measure(where.backend)
        hint = 'num_processes="auto" has chosen one process.'
        choice = Choice()
        try:
            if call.given is not None:
                auto = AutoCall(call, where, options, tune)
                choice = auto.begin()
        except UndividedError as error:
            if num_processes is not None:
                raise
            # The user asked for nothing: `nanotf run` has this default, and scripts run unchanged.
            with_workers.warn_undivided(error)
            auto = None
    if reads is not None and options.resume is not None:
        raise InvalidArgumentError(
            "A run that reads with reader processes cannot be resumed yet. Received: "
            f"read_processes={read_processes!r} and resume={options.resume!r}. Leave one of them "
            "out."
        )

    def train(
        call: KerasCall,
        options: FitOptions,
        choice: Choice,
        watch: Any = None,
    ) -> Any:
        sized = where.sized(choice.number)

        def alone(here: KerasCall) -> Any:
            if options.resume is None or here.given is None:
                return one_process.fit(here, hint)
            return fit_here.fit(here, hint, options, watch)

        with (
            choice_of_settings.applied(call.model, choice.settings),
            call_readers.attached(reads, call, sized, options.max_restarts) as read,
            keras_steps.letting_go(call.model),
        ):
            if not sized.has_workers:
                history = alone(read.call)
            elif read.call.given is None:
                history = call()  # raises Keras's own error
            else:
                # Not if the user asks for workers, who gets the error; nor for a rest, see below.
                from_begin = num_processes is None and options.begins_at is None
                otherwise = alone if from_begin else None
                placed = sized.avoiding(read.cores)
                history = with_workers.fit(read.call, placed, options, otherwise)
        if choice.settings or reads is not None:
            history.nanotf = dataclasses.replace(
                history.nanotf,
                tuned=choice.settings,
                tuned_losses=choice.losses,
                read_processes=read.number,
            )
        return history

    if auto is None or not auto.is_open:
        return train(call, options, choice)
    over: HandedOver | None = None
    try:
        history = train(auto.watched(), options, Choice(), auto.watch)
    except HandedOver as handed:
        over = handed.with_traceback(None)  # whose frames would keep the data of Keras's loop
    if over is None:
        auto.end()
        return history
    try:
        return train(*auto.rest(over.epoch, over.choice.number), over.choice)
    except UndividedError as error:  # before any process started
        with_workers.warn_undivided(error)
        return train(*auto.rest(over.epoch, 1), Choice())
