"""Runs a script as `nanotf run` does and records its numbers; a child of `nanotf compare`.

    python -m nanotf.cli.recorded OPTIONS script.py arguments ...

OPTIONS is a JSON object: `number` of processes, `dtype`, `steps` per `fit`, `is_module`.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from typing import Any

from nanotf.cli.run import Script
from nanotf.parent import defaults
from nanotf.region import recording


def main(options: dict[str, Any], name: str, arguments: tuple[str, ...]) -> None:
    """Runs the script; its exceptions propagate."""
    number = options["number"]
    script = Script(
        name,
        arguments,
        num_processes=number if number > 1 else None,
        is_module=options["is_module"],
    )
    ready = script.prepare()
    if not isinstance(ready, Script):
        raise SystemExit(ready)  # ranks have run it, or another host has
    defaults.alone = number == 1  # even where the script itself asks for workers
    import tensorflow as tf

    tf.keras.backend.set_floatx(options["dtype"])
    _record_fits(options["steps"])
    ready.run()


def _record_fits(steps: int) -> None:
    """Makes `fit` record its first steps, and end after them."""
    import tensorflow as tf

    from nanotf.compat import keras_models, keras_optimizers
    from nanotf.keras.models import Accelerated

    stock, fits = Accelerated.fit, 0
    # Of `callbacks` among the arguments without `self`: scripts may pass them by position.
    place = [*inspect.signature(keras_models.model_class().fit).parameters].index("callbacks") - 1

    class Recorder(tf.keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number, self.steps = number, 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.steps == steps:
                return
            self.steps += 1
            variables = keras_optimizers.training_variables(self.model)
            # Several may have one name.
            values = {
                f"variable {place}, {getattr(v, 'path', v.name)}": v
                for place, v in enumerate(variables)
            }
            named = {f"{name} in logs": value for name, value in (logs or {}).items()}
            recording.note(f"step {self.steps} of fit {self.number}", {**named, **values})
            self.model.stop_training |= self.steps == steps  # the script may have set it

    @functools.wraps(stock)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal fits
        fits += 1
        given = args[place] if len(args) > place else kwargs.get("callbacks")
        recorder = Recorder(fits)
        if isinstance(given, tf.keras.callbacks.CallbackList):  # Keras uses it as it is
            given.append(recorder)
            return stock(self, *args, **kwargs)
        listed = list(given) if isinstance(given, (list, tuple)) else [given] if given else []
        if len(args) > place:
            args = (*args[:place], [*listed, recorder], *args[place + 1 :])
        else:
            kwargs["callbacks"] = [*listed, recorder]
        return stock(self, *args, **kwargs)

    Accelerated.fit = fit  # type: ignore[method-assign]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2], tuple(sys.argv[3:]))
