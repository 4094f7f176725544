"""Finds the engine that computes a model fastest on this machine, and still computes the same.

optimize(model, x)                       in the user's process
  exported.export                        model -> a SavedModel, once
  Keras                                  the outputs that are expected
  candidate_runs.convert                 for each engine and precision, in a process of its own
  candidate_runs.measure                 for each that was converted, in another process
  optimize_result.OptimizeResult         what became of each; the fastest that is right
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from nanotf import console
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import (
    InvalidArgumentError,
    UnsupportedVersionError,
    WorkerDied,
    WorkerError,
)
from nanotf.inference import candidate_runs, exported, optimize_arguments, structure
from nanotf.inference.candidate_runs import Arrays, Conversion, MeasuredProgram, Measurement
from nanotf.inference.engines import engine_table
from nanotf.inference.engines.inference_engine import F32
from nanotf.inference.exported import Exported
from nanotf.inference.optimize_arguments import (
    AUTO,
    BATCH_SIZES,
    METRIC_LOSS,
    SECONDS,
    TOLERANCE,
    SearchOptions,
)
from nanotf.inference.optimize_result import (
    CRASHED,
    DIFFERS,
    FAILED,
    MISSING,
    PASSED,
    SLOW,
    WORSE,
    Candidate,
    OptimizeResult,
    folder_of,
    loss_of,
)
from nanotf.inference.signature import DEFAULT
from nanotf.parent.map import mapping

_REASON = 240  # characters; converters quote whole graphs


def optimize(
    model: Any,
    x: Any,
    *,
    engines: str | Sequence[str] = AUTO,
    precisions: Sequence[str] = (F32,),
    tolerance: float = TOLERANCE,
    threads: int = 1,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    metric: Callable[[Any, Any], Any] | None = None,
    y: Any = None,
    metric_loss: float = METRIC_LOSS,
    higher_is_better: bool = True,
    seconds: float = SECONDS,
    verbose: Any = AUTO,
) -> OptimizeResult:
    """Tries the engines with a model, and measures those that compute what Keras does.

    Each engine converts the model, and computes, in processes of its own, which are pinned to
    `threads` cores: one that crashes, hangs or fails does not end the search. Its outputs for `x`
    are compared with those of Keras in this process; of a SavedModel or a `tf.Module`, with those
    of TensorFlow. What differs is not chosen, however fast. A neighbor on the machine disturbs the
    times: times within 5 % are a tie.

    Args:
        model: as in `make`: a Keras model that was called, a `.keras` or `.h5` file, a `tf.Module`
            with signatures, or the path of a SavedModel's folder.
        x: rows as the model takes them, some hundred of those that it will see. int8 is calibrated
            with them.
        engines: "auto", the default, for all; or names: "tensorflow", "frozen", "xla", "openvino",
            "onnxruntime", "litert".
        precisions: "f32", the default, and those that may be used instead: "bf16", "int8". An
            engine without a precision is not tried with it.
        tolerance: float, default 1e-3: the largest difference of an output, relative to the largest
            number of that output. bf16 and int8 must keep to the metric instead, if there is one.
        threads: int, default 1, of each process: as many as each worker of a server will have.
        batch_sizes: sequence of int, default (1, 32): numbers of rows of the measured calls.
        metric: `metric(y, outputs)` returns a number for the outputs that the model returns for
            `x`. int8 needs one.
        y: the labels of the rows, the first argument of `metric`.
        metric_loss: float, default 0.01: how much smaller the metric may be, relative to that of
            Keras's own outputs. `math.inf` leaves the choice to `OptimizeResult.best`.
        higher_is_better: bool, default True; False for a metric that is an error.
        seconds: float, default 120. Limit for the conversion of each candidate, and again for its
            measurement.
        verbose: "auto", the default, 1 or 2 show the running step; 0 shows nothing.

    Returns:
        `OptimizeResult`: `print` shows the table, `best()` returns the fastest program.

    Raises:
        InvalidArgumentError, InvalidArgumentTypeError: An argument cannot be used; the model does
            not take `x`, or its outputs have no rows.
        ModelError: The model was not built yet.
        PlacementError: There are fewer cores than `threads`.

    Example:
        >>> result = nanotf.inference.optimize(model, x[:200], batch_sizes=(1, 16))
        >>> print(result)
        >>> result.best(batch_size=1).save("program")
    """
    options = SearchOptions(
        tolerance,
        threads,
        batch_sizes,
        metric,
        y,
        metric_loss,
        higher_is_better,
        seconds,
        verbose,
    )
    return search(model, x, optimize_arguments.candidates(engines, precisions), options)


def search(
    model: Any, x: Any, pairs: Sequence[tuple[str, str]], options: SearchOptions
) -> OptimizeResult:
    """Tries pairs of an engine and a precision with a model; see `optimize`.

    Args:
        pairs: the simplest first, which is the best of those that are equally fast.
    """
    optimize_arguments.check_int8([precision for _, precision in pairs], options.metric)
    folder = tempfile.TemporaryDirectory(prefix="nanotf-optimize-")  # the result deletes it
    with console.silent(options.verbose == 0):
        with console.status("exporting the model"):
            # Once, for the export and for the expected outputs.
            model = _loaded(model)
            found = exported.export(model, pathlib.Path(folder.name) / "exported", x)
            rows = _rows(found, x)
            keras = _function_of(model, found)
            expected = _expected(keras, rows, max(options.batch_sizes))
            # `expected` does not have them: rows may depend on the other rows of their batch.
            of_batches = {
                size: keras(candidate_runs.some_rows(rows, range(size)))
                for size in options.batch_sizes
            }
        wanted = _metric_of(options, found, expected)
        running = _Search(
            found, pathlib.Path(folder.name), rows, expected, of_batches, wanted, options
        )
        return OptimizeResult(running.run(pairs), folder, options, wanted)


# ------------------------------------------------------------------------------- expected outputs
def _loaded(model: Any) -> Any:
    """Returns the Keras model of a file, anything else as it is."""
    if isinstance(model, (str, pathlib.Path)) and pathlib.Path(model).is_file():
        return require_tensorflow().keras.models.load_model(model, compile=False)
    return model


def _rows(found: Exported, x: Any) -> dict[str, np.ndarray[Any, Any]]:
    if DEFAULT not in found.signatures:
        raise InvalidArgumentError(
            f"`optimize` measures the signature {DEFAULT}. Received: a model with "
            f"{', '.join(found.signatures) or 'none'}."
        )
    signature = found.signatures[DEFAULT]
    # A SavedModel that nanotf has not made is called by names.
    shape = found.inputs
    if shape is None:
        shape = {structure.DICT: {name: name for name in signature.input_names}}
    rows = signature.checked(structure.flatten(shape, x))
    counts = {name: len(array) if array.ndim else 0 for name, array in rows.items()}
    if not signature.has_rows or len(set(counts.values())) != 1 or 0 in counts.values():
        raise InvalidArgumentError(
            "`optimize` measures batches: the inputs and outputs of the model must have any number "
            f"of rows, and `x` the same number for each input, at least 1. Received: {counts}, for "
            f"{signature}."
        )
    return rows


def _function_of(model: Any, found: Exported) -> Callable[[Arrays], Arrays]:
    """Returns what Keras computes, or TensorFlow if there is no Keras model, by name."""
    tf = require_tensorflow()
    function: Callable[[Any], Any]
    if isinstance(model, tf.keras.Model):
        function = _by_keras(model, found)
    else:
        loaded = tf.saved_model.load(str(found.folder))
        signature = loaded.signatures[DEFAULT]

        def function(batch: Any, _: Any = loaded) -> Any:  # it keeps the signature's variables
            return signature(**batch)

    def outputs(batch: Arrays) -> Arrays:
        computed = function({name: tf.constant(array) for name, array in batch.items()})
        return {name: np.asarray(tensor) for name, tensor in computed.items()}

    return outputs


def _expected(function: Callable[[Arrays], Arrays], rows: Arrays, size: int) -> Arrays:
    """Returns the outputs of all rows, in batches."""
    count = candidate_runs.number_of_rows(rows)
    outputs = []
    for begin in range(0, count, size):
        places = range(begin, min(begin + size, count))
        outputs.append(function(candidate_runs.some_rows(rows, places)))
    return {name: np.concatenate([each[name] for each in outputs]) for name in outputs[0]}


def _by_keras(model: Any, found: Exported) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def call(batch: dict[str, Any]) -> dict[str, Any]:
        result = model(structure.build(found.inputs, batch), training=False)
        return structure.flatten(found.outputs, result)

    return call


# ------------------------------------------------------------------------------------- the search
@dataclasses.dataclass(frozen=True)
class _Search:
    """A search, in two rounds."""

    model: Exported
    folder: pathlib.Path
    rows: Arrays
    expected: Arrays
    of_batches: dict[int, Arrays]  # see `candidate_runs.measure`
    metric: float | None  # of the expected outputs
    options: SearchOptions

    def run(self, pairs: Sequence[tuple[str, str]]) -> list[Candidate]:
        """Returns the candidates, in the order of the pairs."""
        found = {pair: self._missing(*pair) for pair in pairs}
        self._convert(found)
        self._measure(found)
        return [each for each in found.values() if each is not None]

    def _missing(self, engine: str, precision: str) -> Candidate | None:
        try:
            engine_table.check_engine(engine, precision)
        except UnsupportedVersionError as error:
            # The table shows the command alone; the error has the rest.
            said = str(error).partition("Install it: ")[2] or str(error)
            return Candidate(engine, precision, MISSING, said.rstrip("."), error=error)
        return None

    def _convert(self, found: dict[tuple[str, str], Candidate | None]) -> None:
        open_pairs = [pair for pair, each in found.items() if each is None]
        items = [
            Conversion(
                engine_table.ENGINES[engine],
                precision,
                self.model,
                folder_of(self.folder, engine, precision),
                self.options.threads,
                self.options.seconds,
            )
            for engine, precision in open_pairs
        ]
        results = self._each("converting to", candidate_runs.convert, items, {"rows": self.rows})
        for pair, result in zip(open_pairs, results, strict=True):
            if isinstance(result, BaseException):
                found[pair] = _failed(*pair, result, self.options.seconds)
            else:
                # For now: its measurement decides.
                found[pair] = Candidate(*pair, PASSED, convert_seconds=result)

    def _measure(self, found: dict[tuple[str, str], Candidate | None]) -> None:
        converted = [(p, each) for p, each in found.items() if each and each.status == PASSED]
        items = [
            Measurement(
                # The object: a worker's table has not those that users have added.
                engine_table.ENGINES[each.engine],
                each.precision,
                folder_of(self.folder, each.engine, each.precision),
                self.options.threads,
                tuple(self.options.batch_sizes),
                self.options.seconds,
                self.metric is not None,  # without one the outputs of all rows need not be sent
            )
            for _, each in converted
        ]
        shared = {
            "rows": self.rows,
            "expected": self.expected,
            "of_batches": self.of_batches,
        }
        results = self._each("measuring", candidate_runs.measure, items, shared)
        for (pair, each), result in zip(converted, results, strict=True):
            if isinstance(result, BaseException):
                found[pair] = _failed(*pair, result, self.options.seconds)
            else:
                found[pair] = self._judged(each, result)

    def _each(
        self, verb: str, function: Callable[..., Any], items: Sequence[Any], shared: dict[str, Any]
    ) -> Iterator[Any]:
        """Yields the result of each item, or the exception with which it ended."""
        if not items:
            return
        with mapping.imap(
            function,
            items,
            num_processes=1,  # one after the other: two at once would disturb each other's times
            cores_per_process=self.options.threads,
            shared=shared,
            on_error="return",  # a candidate that crashes does not end the search
            ordered=True,
            recycle_after=1,  # an engine leaves threads, memory and settings to what runs next
            memory_limit=None,
            output="keep",  # converters print pages; an error has them as `printed`
        ) as results:
            for item in items:
                with console.status(f"{verb} {item.engine.name} {item.precision}"):
                    yield next(results)

    def _status(
        self, precision: str, measured: MeasuredProgram, metric: float | None
    ) -> tuple[str, str]:
        """Returns a candidate's status and the reason for it."""
        options = self.options
        # A lower precision changes all numbers: the metric says whether it matters.
        if precision != F32 and metric is not None and self.metric is not None:
            if loss_of(metric, self.metric, options.higher_is_better) > options.metric_loss:
                return WORSE, f"its metric is {metric:.4g}, that of Keras {self.metric:.4g}"
            return PASSED, ""
        if not measured.relative_difference <= options.tolerance:
            return DIFFERS, (
                f"by {measured.relative_difference:.1e} of the largest output; the tolerance is "
                f"{options.tolerance:.1e}"
            )
        return PASSED, ""

    def _judged(self, candidate: Candidate, measured: MeasuredProgram) -> Candidate:
        metric = _metric_of(self.options, self.model, measured.outputs)
        status, reason = self._status(candidate.precision, measured, metric)
        folder = folder_of(self.folder, candidate.engine, candidate.precision)
        # Of all files: some engines keep weights beside the model.
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        return dataclasses.replace(
            candidate,
            status=status,
            reason=reason,
            milliseconds=measured.milliseconds,
            max_difference=measured.max_difference,
            relative_difference=measured.relative_difference,
            load_seconds=measured.load_seconds,
            megabytes=size / 1e6,
            metric=metric,
        )


def _metric_of(options: SearchOptions, model: Exported, outputs: Arrays | None) -> float | None:
    if options.metric is None or outputs is None:
        return None
    found = outputs if model.outputs is None else structure.build(model.outputs, outputs)
    return float(options.metric(options.y, found))


def _failed(engine: str, precision: str, error: BaseException, seconds: float) -> Candidate:
    """Returns a candidate whose process ended with an exception, or died."""
    if isinstance(error, WorkerDied):
        if error.signal == candidate_runs.TIME_LIMIT:
            reason = f"it took longer than {seconds:g} s"
            return Candidate(engine, precision, SLOW, reason, error=error)
        return Candidate(engine, precision, CRASHED, _line(error.message), error=error)
    # A `WorkerError` has the worker's traceback in its text; the table shows the cause alone.
    original = error.original if isinstance(error, WorkerError) else None
    return Candidate(engine, precision, FAILED, _line(str(original or error)), error=error)


def _line(text: str) -> str:
    """Returns the beginning of a text; `Candidate.error` has the whole."""
    return textwrap.shorten(text.strip().partition("\n")[0], _REASON, placeholder=" ...")
