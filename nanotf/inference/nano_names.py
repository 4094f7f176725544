"""`optimize`, `make` and `load` by the names of BigDL-Nano 2.4's `InferenceOptimizer`.

| BigDL-Nano | here |
| --- | --- |
| `InferenceOptimizer().optimize(model, x, ...)`, `summary` | `optimize`, `print` of its result |
| `get_best_model`, `get_model` | `OptimizeResult.best`, `program` |
| `trace`, `quantize` | `make` |
| `save`, `load` | `Program.save`, `load` |
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

from nanotf.compat.versions import require_tensorflow
from nanotf.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    UnavailableError,
    check_choice,
)
from nanotf.inference import optimizing, program
from nanotf.inference.engines.inference_engine import BF16, F32, INT8, usable_cores
from nanotf.inference.optimize_arguments import SearchOptions
from nanotf.inference.optimize_result import OptimizeResult
from nanotf.inference.program import TENSORFLOW, Program

_OPENVINO, _ONNXRUNTIME = "openvino", "onnxruntime"
ACCELERATORS = (None, _OPENVINO, _ONNXRUNTIME)
PRECISIONS = {"fp32": F32, "bf16": BF16, "int8": INT8}  # by BigDL-Nano's names
ORIGINAL = "original"
# By BigDL-Nano's names of methods, the engine and the precision.
METHODS = {
    ORIGINAL: (TENSORFLOW, F32),
    "openvino_fp32": (_OPENVINO, F32),
    "openvino_bf16": (_OPENVINO, BF16),
    "openvino_int8": (_OPENVINO, INT8),
    "onnxruntime_fp32": (_ONNXRUNTIME, F32),
    "onnxruntime_int8_qlinear": (_ONNXRUNTIME, INT8),
}
DIRECTIONS = ("max", "min")


class InferenceOptimizer:
    """Finds the fastest way to compute a model, by the names of BigDL-Nano.

    Attributes:
        optimized_model_dict: dict of a method's name to the `Candidate`; empty before `optimize`.

    Example:
        >>> opt = InferenceOptimizer()
        >>> opt.optimize(model, x=x_test[:100], thread_num=1)
        >>> program, option = opt.get_best_model()
    """

    def __init__(self) -> None:
        self.optimized_model_dict: dict[str, Any] = {}
        self._result: OptimizeResult | None = None

    def optimize(
        self,
        model: Any,
        x: Any,
        y: Any = None,
        validation_data: Any = None,
        batch_size: int = 1,
        metric: Any = None,
        direction: str = "max",
        thread_num: int | None = None,
        logging: bool = False,
        includes: Iterable[str] | None = None,
        excludes: Iterable[str] | None = None,
        output_filename: str | pathlib.Path | None = None,
        **others: Any,
    ) -> None:
        """Tries methods, and prints a table. See `nanotf.inference.optimize`.

        With a metric, a method in a lower precision is "ok" however much worse its metric is: pass
        `accuracy_criterion` to `get_best_model`.

        Args:
            model: Keras model.
            x: arrays, rows as the model takes them.
            y: their labels, for `metric`.
            validation_data: pair of rows and labels in place of `x` and `y`, or None.
            batch_size: int, default 1, number of rows of the measured calls.
            metric: Keras metric, or a function of labels and outputs; None measures none.
            direction: "max", the default, if a higher metric is better, else "min".
            thread_num: int or None, for all usable cores.
            logging: bool, whether to show the running step.
            includes: names of `METHODS` to try. None, the default, tries those in float32: lower
                precisions change results, so they are tried if they are named.
            excludes: names to leave out.
            output_filename: a file to which the table is written, too.

        Raises:
            InvalidArgumentError, InvalidArgumentTypeError: An argument cannot be used, or is one of
                BigDL-Nano's that has no meaning here.
        """
        _refuse(others)
        check_choice("direction", direction, DIRECTIONS)
        if validation_data is not None:
            x, y = _pair(validation_data)
        methods = _methods(includes, excludes)
        function = _metric(metric)
        options = SearchOptions(
            threads=usable_cores() if thread_num is None else thread_num,
            batch_sizes=(batch_size,),  # BigDL-Nano measures one size
            metric=function,
            # BigDL-Nano takes labels without a metric; `SearchOptions` refuses them.
            y=None if function is None else y,
            metric_loss=math.inf,  # `get_best_model` has the criterion
            higher_is_better=direction == "max",
            verbose="auto" if logging else 0,  # the table is printed in any case
        )
        result = optimizing.search(model, x, [METHODS[name] for name in methods], options)
        self._result = result
        by_pair = {(each.engine, each.precision): each for each in result.candidates}
        self.optimized_model_dict = {name: by_pair[METHODS[name]] for name in methods}
        self.summary()
        if output_filename is not None:
            pathlib.Path(output_filename).write_text(f"{result}\n", encoding="utf-8")

    def summary(self) -> None:
        """Prints the table of `optimize`.

        Raises:
            UnavailableError: `optimize` was not called.
        """
        print(self._found())

    def get_best_model(
        self,
        accelerator: str | None = None,
        precision: str | None = None,
        use_ipex: bool | None = None,
        accuracy_criterion: float | Mapping[str, Any] | None = None,
    ) -> tuple[Program, str]:
        """Returns the fastest program within the limits, and its method's name.

        Args:
            accelerator: "openvino", "onnxruntime" or None for any.
            precision: "fp32", "bf16", "int8" or None for any.
            use_ipex: None or False: there is none for TensorFlow.
            accuracy_criterion: how much worse the metric may be, relative to Keras's own: a number,
                or a dict with the key "relative". None for any, so the fastest may compute
                anything if it is in a lower precision.

        Raises:
            UnavailableError: `optimize` was not called, or no program is within the limits.
            InvalidArgumentError: An argument has another value.
        """
        if use_ipex:
            raise _meaningless("use_ipex", use_ipex, "It is of PyTorch.")
        check_choice_or_none("accelerator", accelerator, ACCELERATORS[1:])
        chosen, loss = _precision(precision), _relative(accuracy_criterion)
        found = self._found().best_candidate(engine=accelerator, precision=chosen, metric_loss=loss)
        name = next(name for name, each in self.optimized_model_dict.items() if each is found)
        return self.get_model(name), name

    def get_model(self, method_name: str) -> Program:
        """Returns the program of a method that was successful.

        Args:
            method_name: one of `optimized_model_dict`.

        Raises:
            UnavailableError: `optimize` was not called.
            InvalidArgumentError: The method was not tried, or not successful.
        """
        result = self._found()
        check_choice("method_name", method_name, tuple(self.optimized_model_dict))
        return result.program(*METHODS[method_name])

    def _found(self) -> OptimizeResult:
        if self._result is None:
            raise UnavailableError(
                "There is a result after `optimize`. Received: an InferenceOptimizer that was not "
                "used yet. Call optimize(model, x) first."
            )
        return self._result

    @staticmethod
    def trace(
        model: Any, accelerator: str | None = None, thread_num: int | None = None, **others: Any
    ) -> Program:
        """Converts a model in float32, see `nanotf.inference.make`.

        Args:
            model: Keras model.
            accelerator: "openvino", "onnxruntime", or None for TensorFlow.
            thread_num: int or None, for all usable cores.

        Raises:
            InvalidArgumentError: An argument cannot be used, or has no meaning here.
            NanoError: As `make`.
        """
        _refuse(others)
        return program.make(model, _engine(accelerator), F32, thread_num)

    @staticmethod
    def quantize(
        model: Any,
        x: Any = None,
        precision: str = "int8",
        accelerator: str | None = None,
        thread_num: int | None = None,
        sample_size: int = 100,
        **others: Any,
    ) -> Program:
        """Converts a model to a lower precision, see `nanotf.inference.make`.

        It does not compare results: `optimize` with a metric does.

        Args:
            model: Keras model.
            x: arrays, rows as the model takes them. int8 is calibrated with them.
            precision: "int8", the default, or "bf16".
            accelerator: "openvino" or "onnxruntime".
            thread_num: int or None, for all usable cores.
            sample_size: int, default 100, how many of the rows are used.

        Raises:
            InvalidArgumentError: An argument cannot be used, or has no meaning here.
            NanoError: As `make`.
        """
        _refuse(others)
        check_choice_or_none("accelerator", accelerator, ACCELERATORS[1:])
        if accelerator is None:
            raise InvalidArgumentError(
                "TensorFlow itself computes in the precision of the model. Received: "
                f"quantize(precision={precision!r}) with accelerator=None. Pass 'openvino' or "
                "'onnxruntime'."
            )
        rows = None if x is None else _first(x, sample_size)
        chosen = _precision(precision)
        assert chosen is not None
        return program.make(model, _engine(accelerator), chosen, thread_num, rows)

    @staticmethod
    def save(model: Program, path: str | pathlib.Path) -> None:
        """Writes a program's folder, see `Program.save`.

        Args:
            model: what `trace`, `quantize`, `get_model` or `get_best_model` has returned.

        Raises:
            InvalidArgumentTypeError: It is no `Program`.
        """
        if not isinstance(model, Program):
            raise InvalidArgumentTypeError(
                "`model` must be a program. Received: "
                f"{type(model).__name__}. Pass what `trace` or `get_best_model` has returned; a "
                "Keras model has a method `save` of its own."
            )
        model.save(path)

    @staticmethod
    def load(path: str | pathlib.Path, model: Any = None, **others: Any) -> Program:
        """Loads a program's folder, see `nanotf.inference.load`.

        Args:
            path: as `save` has got it.
            model: ignored: the folder has all that is needed.

        Raises:
            InvalidArgumentError: An argument has no meaning here.
            NanoError: As `nanotf.inference.load`.
        """
        _refuse(others)
        return program.load(path)


def check_choice_or_none(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Rejects a value that is neither None nor one of the choices."""
    if value is not None:
        check_choice(name, value, choices)


# BigDL-Nano's other arguments, with what to do instead.
_OTHERS = {
    "input_spec": "The shapes are those of the rows, or of the model.",
    "latency_sample_num": "The number of calls is chosen by their time.",
    "device": "nanotf computes on CPUs.",
    "onnxruntime_session_options": "Pass `thread_num`.",
    "openvino_config": "Pass `thread_num`.",
    "logging": "Conversions show nothing.",
    "y": "Rows calibrate, labels do not: pass them to `optimize` with a metric.",
    "metric": "Pass it to `optimize`.",
    "accuracy_criterion": "Pass it to `get_best_model`.",
    "approach": "The approach is static.",
    "method": "Each engine has one method.",
    "conf": "There is no tuning.",
    "tuning_strategy": "There is no tuning.",
    "timeout": "There is no tuning.",
    "max_trials": "There is no tuning.",
    "batch": "Rows calibrate one by one.",
    "inputs": "They are those of the model.",
    "outputs": "They are those of the model.",
    "custom_objects": "A program needs no classes of Python.",
}
# Values besides None that ask for what nanotf does anyway.
_AS_HERE = {"device": "CPU", "logging": False, "approach": "static"}


def _refuse(others: Mapping[str, Any]) -> None:
    for name, value in others.items():
        if name not in _OTHERS:
            raise TypeError(f"InferenceOptimizer got an unexpected argument {name!r}")
        as_here = _AS_HERE.get(name)
        # Compared with its own kind alone: an array is compared element by element.
        is_as_here = value is None or (isinstance(value, type(as_here)) and value == as_here)
        if not is_as_here:
            raise _meaningless(name, value, _OTHERS[name])


def _meaningless(name: str, value: Any, remedy: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"`{name}` of BigDL-Nano has no meaning here. Received: {name}={value!r}. {remedy}"
    )


def _methods(includes: Iterable[str] | None, excludes: Iterable[str] | None) -> list[str]:
    known = tuple(METHODS)
    for name in (*(includes or ()), *(excludes or ())):
        check_choice("includes or excludes", name, known)
    wanted = [name for name in known if METHODS[name][1] == F32] if includes is None else includes
    chosen = {ORIGINAL, *wanted} - set(excludes or ())  # BigDL-Nano always tries it
    return [name for name in known if name in chosen]  # simple ones first, which win ties


def _pair(validation_data: Any) -> tuple[Any, Any]:
    if not isinstance(validation_data, (tuple, list)) or len(validation_data) != 2:
        raise InvalidArgumentTypeError(
            "`validation_data` must be a pair of rows and labels. Received: "
            f"{type(validation_data).__name__}. Pass (x_val, y_val)."
        )
    x, y = validation_data
    return x, y


def _metric(metric: Any) -> Any:
    """Returns the function of labels and outputs that a Keras metric is used as."""
    tf = require_tensorflow()
    if not isinstance(metric, tf.keras.metrics.Metric):
        return metric

    def measured(y: Any, outputs: Any) -> float:
        metric.reset_state()  # one object measures all candidates
        metric.update_state(y, outputs)
        return float(metric.result())

    return measured


def _first(x: Any, count: int) -> Any:
    return require_tensorflow().nest.map_structure(lambda rows: rows[:count], x)


def _engine(accelerator: str | None) -> str:
    check_choice_or_none("accelerator", accelerator, ACCELERATORS[1:])
    return TENSORFLOW if accelerator is None else accelerator


def _precision(precision: str | None) -> str | None:
    check_choice_or_none("precision", precision, tuple(PRECISIONS))
    return None if precision is None else PRECISIONS[precision]


def _relative(criterion: Any) -> float | None:
    if isinstance(criterion, Mapping):
        # "absolute" is refused: limits are relative here. `optimize` has got the direction.
        if set(criterion) - {"higher_is_better"} != {"relative"}:
            raise InvalidArgumentError(
                "`accuracy_criterion` must be a number or have the key 'relative'. Received: "
                f"accuracy_criterion={dict(criterion)!r}. Pass {{'relative': 0.01}}; the direction "
                "is that of `optimize`."
            )
        criterion = criterion["relative"]
    return None if criterion is None else float(criterion)
