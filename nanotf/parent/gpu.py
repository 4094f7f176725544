"""`fit(num_processes=...)` on a machine with GPUs: one process, `tf.distribute.MirroredStrategy`.

Several processes would compete for the same GPUs, and TensorFlow's own strategy for several
GPUs in one process is fast. The user's model was not made under that strategy, so a copy trains.
After every epoch the user's model gets the copy's state, and the user's callbacks run on the
user's model, as they do with workers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from nanotf import console
from nanotf.compat import keras_compiling, keras_models
from nanotf.compat.eager_context import FirstUse
from nanotf.compat.versions import require_tensorflow
from nanotf.parent import defaults, model_copy, one_process
from nanotf.parent.callbacks import ParentCallbacks
from nanotf.parent.keras_call import KerasCall
from nanotf.parent.reading import read_ahead
from nanotf.shipping import orders


def devices() -> list[str]:
    """Returns the names of the logical GPUs that TensorFlow sees."""
    return [device.name for device in require_tensorflow().config.list_logical_devices("GPU")]


def run_here(model: Any, method: str, given: Mapping[str, Any], num_processes: int) -> Any:
    """Runs `evaluate` or `predict` as Keras does, in this process.

    Args:
        model: a Keras model.
        method: "evaluate" or "predict".
        given: the method's arguments by name, without nanotf's own.
        num_processes: the user's argument; only reported.

    Returns:
        The result of Keras's method.
    """
    console.say(
        f"TensorFlow sees {len(devices())} GPU(s); {method}(num_processes={num_processes}) "
        "falls back to Keras's own, in this process."
    )
    # Keras opens the data a second time here, and looks at the first batches again.
    read_ahead.reopen(*given.values())
    return getattr(model, method)(**given)


def fit(
    call: Any,
    given: Mapping[str, Any],
    num_processes: int,
    names: list[str],
) -> Any:
    """Trains a model on GPUs in this process.

    Args:
        call: `model_call.ModelCall`, of a compiled and built Keras model.
        given: the arguments of Keras's `fit` that were given.
        num_processes: the user's argument; only reported.
        names: the devices, see `devices`.

    Returns:
        The `keras.callbacks.History` of the user's model.
    """
    tf = require_tensorflow()
    console.say(
        f"TensorFlow sees {len(names)} GPU(s); num_processes={num_processes} falls back "
        "to tf.distribute.MirroredStrategy over them, in this process."
    )
    strategy = tf.distribute.MirroredStrategy(names)
    # The copy's initializers draw random numbers; those of the user's program stay the same.
    with keras_compiling.kept_random_states(), strategy.scope():
        theirs = model_copy.copy_of(call)
    model, replica = call.model, theirs[0]
    ours = model, call.held
    model_copy.copy_state(ours, theirs)
    arguments = dict(given)
    callbacks = ParentCallbacks(
        arguments.pop("callbacks", None),
        model,
        arguments.pop("verbose", "auto"),
        arguments.get("epochs", 1),
        arguments.get("steps_per_epoch"),
    )
    model.stop_training = False
    relay = _relay(ours, theirs, callbacks)
    arguments |= {"callbacks": [relay], "verbose": 0}  # the user's list has the bar
    read_ahead.reopen(*arguments.values())
    # The copy of a model of Keras 2 has not noted its strategy.
    call = KerasCall.of(replica, keras_models.keras_method(replica, "fit"), (), arguments)
    with defaults.no_default(), strategy.scope():
        model.history.nanotf = one_process.fit(call).nanotf
    return model.history


def _relay(ours: model_copy.Side, theirs: model_copy.Side, callbacks: ParentCallbacks) -> Any:
    """Returns a callback for the copy that passes its hooks on to the user's callbacks."""
    model, replica = ours[0], theirs[0]

    def hook_of(name: str) -> Any:
        def hook(_: Any, *arguments: Any, **named: Any) -> None:
            index, logs = orders.index_and_logs(name, *arguments, **named)
            home = FirstUse(functools.partial(model_copy.copy_state, theirs, ours))
            with home.awaited():
                callbacks.call(name, index, logs)
                if name not in orders.BATCH_HOOKS:
                    home.note()  # even if no callback has looked at the model
            if home.has_acted:
                model_copy.copy_state(ours, theirs)
            if model.stop_training:  # the user's callbacks set it on the user's model
                replica.stop_training = True

        return hook

    names = {"on_train_begin", *callbacks.events, *callbacks.waits}
    body = {name: hook_of(name) for name in names}
    return type("Relay", (require_tensorflow().keras.callbacks.Callback,), body)()
