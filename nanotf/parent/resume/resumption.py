"""`fit(resume="folder")`: where training continues, and what its checkpoints hold."""

from __future__ import annotations

import copy
import importlib
import pathlib
import platform
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import nanotf
from nanotf.compat import keras_optimizers
from nanotf.compat.chance import Chance
from nanotf.compat.versions import keras_module_name, require_tensorflow
from nanotf.console import say
from nanotf.errors import InvalidArgumentError
from nanotf.parent.callbacks import ParentCallbacks
from nanotf.parent.reading.shuffle_orders import OrderSeed
from nanotf.parent.resume import checks, store
from nanotf.parent.resume.callback_states import CallbackStates
from nanotf.parent.resume.encoding import Arrays, decode, encode, typed
from nanotf.parent.resume.moments import Moment, Values, write_all
from nanotf.parent.resume.store import Folder, Stored
from nanotf.report import call_report
from nanotf.report.stopwatch import Stopwatch
from nanotf.shipping.data.arrays import numpy_dtype
from nanotf.shipping.state import StateLayout
from nanotf.wire import files

Facts = dict[str, Any]
Content = tuple[dict[str, Any], Arrays]  # of a checkpoint: its manifest, and the arrays beside it


class Resumption:
    """The checkpoints of one `fit`.

    Args:
        path: the argument `resume`.
        call: `fit.fit_call.FitCall`, whose model and data are those of the first run.

    Attributes:
        moment: `Moment` where training continues, or None if it begins.
        is_finished: bool, whether the moment is the end of training.
        stops: bool, whether a callback had stopped training at the moment.
        order_seed: `OrderSeed`, of the first run.
        reading: random states when the first run began to read the moment's epoch, or None.

    Raises:
        InvalidArgumentError: The folder cannot be used, another run uses it, or it is of another
            model or other data.
    """

    def __init__(self, path: Any, call: Any) -> None:
        checks.check(call.model, call.arguments, call.data)
        self._folder = Folder(path)
        self._facts = _facts_of(call)
        self._epochs = call.arguments.epochs
        self.order_seed: OrderSeed = call.data.order_seed
        self.moment: Moment | None = None
        self.is_finished = self.stops = False
        self.reading: Any = None
        self._chance: Chance | None = None  # at the moment
        self._of_callbacks: dict[str, dict[str, Any]] = {}  # their states at the moment
        self._folder.lock()
        try:
            self._take_newest()
            if self.moment is not None and call.arguments.verbose != 0:
                say(self._continuation(self.moment, call.data.steps))
        except BaseException:
            self.release()  # the user may call `fit` again in this process
            raise
        if self.is_finished:  # there is nothing to write
            self.release()

    def release(self) -> None:
        """Lets other runs use the folder."""
        self._folder.release()

    def _continuation(self, moment: Moment, steps: int | None) -> str:
        """Describes where training continues."""
        folder = self._folder.path
        if self.is_finished or self.stops or moment.epoch >= self._epochs:
            end = ", where a callback stopped it" if self.stops else ""
            return (
                f"Nothing is left to train: {folder} holds the state after {moment.epoch} of "
                f"{self._epochs} epochs{end}."
            )
        return f"Training continues at {moment.place(self._epochs, steps)}, from {folder}."

    def _take_newest(self) -> None:
        """Takes the newest checkpoint from which this call can continue."""
        for stored in self._folder.newest_first():
            try:
                with files.doubting(stored.path):
                    if self._is_of_this_call(stored):
                        self._take(stored)
                        return
            except files.Damaged as damaged:
                store.warn_of_damage(stored.path, damaged)

    def _is_of_this_call(self, stored: Stored) -> bool:
        _check_facts(self._facts, stored)
        content = stored.manifest
        # Of an unfinished epoch the user asks for as well.
        begun = content["epoch"] + bool(content["step"])
        if self._epochs < begun:
            raise InvalidArgumentError(
                "A resumed fit needs at least the epochs that have begun. Received: "
                f"epochs={self._epochs}, and {stored.path} is in epoch {begun}. Pass "
                f"epochs={begun} or more, or another folder."
            )
        # For more epochs, the checkpoint before is of the last one's end.
        return not content["finished"] or content["stop"] or self._epochs <= content["epoch"]

    def _take(self, stored: Stored) -> None:
        content, arrays = stored.manifest, stored.arrays
        self.moment = Moment(
            content["epoch"],
            content["step"],
            _values(arrays, "variables", content["facts"]["variables"]),
            _values(arrays, "metrics", content["facts"]["metrics"]) if content["step"] else [],
            decode(content["logs"], arrays),
        )
        self.is_finished, self.stops = content["finished"], content["stop"]
        self.order_seed = OrderSeed(*content["order_seed"])
        self.reading = decode(content["reading"], arrays)
        self._chance = Chance(*decode(content["chance"], arrays))
        self._of_callbacks = decode(content["callbacks"], arrays)

    # --------------------------------------------------------------------- in the run
    def begin(self, callbacks: Sequence[Any]) -> None:
        """Restores callbacks and random numbers; called after `on_train_begin`."""
        self._states = CallbackStates(callbacks)
        self.restore_callbacks()
        self.restore_random()

    def restore_random(self) -> None:
        """Restores random numbers; again after data were opened, which may draw some."""
        if self._chance is not None:
            self._chance.restore()

    def restore_callbacks(self) -> None:
        """Restores the state of the callbacks at the moment where training continues."""
        # A copy: the callbacks change their lists, and may be restored again.
        self._states.restore(copy.deepcopy(self._of_callbacks))

    def capture(self, moment: Moment, stop: bool, finished: bool, reading: Any) -> Content:
        """Returns a checkpoint of this process now, for `write`.

        Args:
            moment: the state of training, as it is now.
            stop: whether a callback has stopped training.
            finished: whether all callbacks got the hook for the end of training.
            reading: random states when this process began to read the moment's epoch, or None.
        """
        arrays: Arrays = {f"variables/{i}": a for i, a in enumerate(moment.values)}
        arrays |= {f"metrics/{i}": a for i, a in enumerate(moment.metrics)}
        more = {
            "logs": moment.logs,
            "chance": tuple(Chance.capture()),
            "reading": reading,
            "callbacks": self._states.capture(),
        }
        manifest = {
            "versions": _versions(),
            "facts": self._facts,
            "order_seed": self.order_seed,
            "epoch": moment.epoch,
            "step": moment.step,
            "stop": stop,
            "finished": finished,
            **{name: encode(value, arrays, name) for name, value in more.items()},
        }
        return manifest, arrays

    def write(self, content: Content) -> pathlib.Path:
        """Writes a checkpoint; returns the folder of all of them.

        Raises:
            OSError: The disk is full, or the folder has gone.
        """
        self._folder.write(*content)
        return self._folder.path


def finished(call: Any) -> Any:
    """Gives the user's model and callbacks the end of a training; returns the history.

    Args:
        call: `FitCall`, of which a checkpoint holds the end.
    """
    a, model, resumption = call.arguments, call.model, call.resumption
    found = ParentCallbacks(a.callbacks, model, 0, a.epochs, call.data.steps)
    write_all(call.variables, call.progress.last.values)
    resumption.begin(found.list.callbacks)
    model.stop_training = resumption.stops
    times = Stopwatch(0, None).finish()
    hint = "The training was complete; its checkpoint has the result."
    model.history.nanotf = call_report.Report.of_one_process(times, hint)
    return model.history


def _versions() -> dict[str, str]:
    return {
        "nanotf": nanotf.__version__,
        "tensorflow": require_tensorflow().__version__,
        "keras": importlib.import_module(keras_module_name()).__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _values(arrays: Mapping[str, Any], kind: str, facts: Sequence[Any]) -> Values:
    return [typed(arrays[f"{kind}/{i}"], dtype) for i, (_, _, dtype) in enumerate(facts)]


# ------------------------------------------------------------------------------------ facts
def _facts_of(call: Any) -> Facts:
    """Returns what must be the same in a resumed run, ready for JSON."""
    optimizers = keras_optimizers.with_inner(keras_optimizers.optimizers_of(call.model))
    return {
        "optimizer": [type(optimizer).__name__ for optimizer in optimizers],
        "variables": _variables(call.layout),
        "metrics": _variables(call.metrics_layout),
        "data": call.data.facts(),
    }


def _variables(layout: StateLayout) -> list[list[Any]]:
    return [[v.name, list(v.value.shape), v.value.dtype] for v in layout.variables]


def _check_facts(ours: Facts, stored: Stored) -> None:
    """Raises `InvalidArgumentError` if a checkpoint is of another model or other data."""
    theirs = stored.manifest["facts"]
    if ours["optimizer"] != theirs["optimizer"]:
        _refuse(stored, "optimizer", theirs["optimizer"], ours["optimizer"])
    for kind, what in (("variables", "variable"), ("metrics", "variable of a metric")):
        found, known = ours[kind], theirs[kind]
        for number in range(max(len(found), len(known))):
            here = found[number] if number < len(found) else None
            there = known[number] if number < len(known) else None
            if here is None or there is None or _comparable(here) != _comparable(there):
                _refuse(stored, f"{what} number {number}", _text(there), _text(here))
    for name in {**theirs["data"], **ours["data"]}:
        here, there = ours["data"].get(name), theirs["data"].get(name)
        if here != there:
            _refuse(stored, name, there, here, "Pass the data and arguments of the first run")


def _refuse(
    stored: Stored, what: str, theirs: Any, ours: Any, remedy: str = "Make the model as before"
) -> None:
    raise InvalidArgumentError(
        "A resumed fit needs the model, the data and the arguments of its first run. Received: "
        f"{what} {ours}, and in {stored.path} it is {theirs}. {remedy}, or pass another folder."
    )


def _comparable(variable: Sequence[Any]) -> list[Any]:
    """Returns a variable's facts, without the numbers that Keras appends to names in a process."""
    name, shape, dtype = variable
    return [re.sub(r"_\d+(?![0-9A-Za-z])", "", name), shape, dtype]


def _text(variable: Sequence[Any] | None) -> str:
    if variable is None:
        return "missing"
    name, shape, dtype = variable
    return f"{name!r} of shape {tuple(shape)} and dtype {numpy_dtype(dtype)}"
