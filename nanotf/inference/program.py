"""Programs: trained models, converted to an engine, that are called, saved and loaded.

make(model, "openvino")     Keras model -> SavedModel -> the engine's files -> `Program`
load("folder")              a program's folder -> `Program`; anything else as `make` does
"""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from nanotf.errors import InvalidArgumentError, check_integer
from nanotf.inference import program_folder, row_ranges, saved_model, structure
from nanotf.inference.engines import engine_table
from nanotf.inference.engines.inference_engine import F32, Arrays, InferenceEngine, usable_cores
from nanotf.inference.program_folder import FILES, Description
from nanotf.inference.signature import DEFAULT, Signature

if TYPE_CHECKING:
    from nanotf.inference.exported import Exported

TENSORFLOW = "tensorflow"  # the default engine: it computes every model


class Program:
    """A model that an engine computes. `make` and `load` return it.

    One thread at a time may use it. A pickle of it names its folder, which must then still exist.

    Args:
        folder: of a program, or a SavedModel's folder.
        description: what the folder holds.
        threads: how many threads are to compute.
        state: of the folder, see `program_folder.state_of`. Read before the description and the
            files: workers then refuse a program that has replaced them meanwhile.

    Attributes:
        folder: `pathlib.Path`, absolute, what it was loaded from.
        engine: str, the engine's name.
        precision: str, "f32", "bf16" or "int8".
        threads: int. The engines "tensorflow", "frozen" and "xla" leave it alone: TensorFlow's
            threads are those of the process (`tf.config.threading`).
        signatures: dict of str to `Signature`: the functions that `run` computes.
        state: tuple of int, another one when the folder is replaced.

    Raises:
        ConversionError: The engine cannot load the files.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        description: Description,
        threads: int,
        state: tuple[int, ...],
    ) -> None:
        self.folder, self.state = folder, state
        self.engine, self.precision = description.engine, description.precision
        self.signatures, self.threads = description.signatures, threads
        self._inputs, self._outputs = description.inputs, description.outputs
        self._together = description.together
        engine = engine_table.check_engine(self.engine, self.precision)
        files = folder / FILES if program_folder.is_program(folder) else folder
        known = self._together or {}
        # An empty reason is a proof; a missing one is not: nobody has looked yet.
        apart = [name for name in self.signatures if known.get(name) == ""]
        self._runner = engine.load(files, self.signatures, threads, self.precision, apart)

    def __repr__(self) -> str:
        return f"<nanotf.inference.Program {self.engine} {self.precision} of {self.folder}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return load, (str(self.folder), self.engine, self.threads)

    def __call__(self, x: Any) -> Any:
        """Computes the model's result for one batch.

        Args:
            x: as the Keras model takes it: an array, a list of arrays, or a dict of arrays by the
                names of the inputs. Of shape `(rows, ...)`. Of a SavedModel that nanotf has not
                made, a dict, or the only array.

        Returns:
            What the model returns: an array, a list, a tuple or a dict, of `np.ndarray`. Of a
            SavedModel that nanotf has not made, a dict.

        Raises:
            InvalidArgumentError, InvalidArgumentTypeError: The input does not fit the model.
        """
        return self._result(self.run(self._named(x)))

    def run(
        self, inputs: Mapping[str, Any], signature: str = DEFAULT
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Computes the outputs of a signature, by name, for one batch.

        Args:
            inputs: arrays by the names of the inputs, of shape `(rows, ...)`.
            signature: a key of `signatures`.

        Raises:
            InvalidArgumentError, InvalidArgumentTypeError: The inputs do not fit the signature.
        """
        return self.run_checked(self._signature(signature).checked(inputs), signature)

    def run_checked(self, inputs: Arrays, signature: str) -> dict[str, np.ndarray[Any, Any]]:
        """Computes the outputs for inputs that `Signature.checked` has returned."""
        return self._runner.run(inputs, signature)

    def predict(
        self,
        x: Any,
        batch_size: int = 32,
        num_processes: int | None = None,
        cores_per_process: int | None = None,
    ) -> Any:
        """Computes the model's result for many rows, in batches.

        With `num_processes`, worker processes with cores of their own compute ranges of the rows,
        each on all of its cores. They map the rows, and send results through shared memory. They
        load the program once, and stay warm for the next call.

        Args:
            x: as `__call__` takes it, with any number of rows.
            batch_size: rows that are computed at once.
            num_processes: None computes in this process.
            cores_per_process: None divides the usable cores.

        Returns:
            As `__call__` returns it, for all rows.

        Raises:
            InvalidArgumentError, InvalidArgumentTypeError: An argument cannot be used, or the
                inputs or outputs of the model do not all have rows.
            PlacementError: There are fewer cores than the workers need.
            WorkerError: A worker failed.
        """
        size = check_integer("batch_size", batch_size, "Pass a number of rows")
        inputs = self._signature(DEFAULT).checked(self._named(x))
        rows = self._rows_of(inputs)
        # No rows cannot be divided, and need no workers.
        if num_processes is None or rows == 0:
            found = row_ranges.in_batches(self, inputs, range(rows), size)
        else:
            found = row_ranges.on_workers(
                # Not `threads`: a worker computes on all of its cores.
                (_open_same, (str(self.folder), self.engine, self.state)),
                inputs,
                rows,
                size,
                num_processes,
                cores_per_process,
            )
        return self._result(found)

    def reason_to_keep_together(self, signature: str = DEFAULT) -> str:
        """Returns why each request's rows must be computed by themselves; empty if rows are apart.

        Rows are apart if each row of the outputs is proved to depend on the same row of the inputs
        alone. Then the rows of several requests may be computed at once.
        """
        # Of a SavedModel that was loaded as it is. The proof takes as long as the load.
        if self._together is None:
            self._together = _reasons(self.folder)
        return self._together[signature]

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the program's folder in one step; a program that is there is replaced.

        Args:
            path: a folder that does not exist, is empty, or holds another program and nothing else.
                For the folder that the program was loaded from, nothing is written.

        Raises:
            InvalidArgumentError: There is something that nanotf has not written.
            OSError: The disk is full or not writable.
        """
        place = pathlib.Path(path).absolute()
        own = program_folder.is_program(self.folder)
        if own and place.exists() and place.samefile(self.folder):  # by another name, too
            return
        with program_folder.written(place) as folder:
            shutil.copytree(self.folder / FILES if own else self.folder, folder / FILES)
            program_folder.write_description(folder, self._description())

    def _description(self) -> Description:
        return Description(
            self.engine,
            self.precision,
            self.signatures,
            self._inputs,
            self._outputs,
            self._together or _reasons(self.folder),
        )

    def _signature(self, name: str) -> Signature:
        try:
            return self.signatures[name]
        except KeyError:
            raise InvalidArgumentError(
                f"The program has the signatures {', '.join(self.signatures)}. Received: "
                f"signature={name!r}. Pass one of them to `run`."
            ) from None

    def _named(self, x: Any) -> dict[str, Any]:
        """Returns the input of `__call__` by names."""
        if self._inputs is not None:
            return structure.flatten(self._inputs, x)
        names = self._signature(DEFAULT).input_names
        return structure.flatten({structure.DICT: {name: name for name in names}}, x)

    def _rows_of(self, inputs: Arrays) -> int:
        lengths = {name: len(array) if array.ndim else 0 for name, array in inputs.items()}
        if not self._signature(DEFAULT).has_rows or len(set(lengths.values())) != 1:
            raise InvalidArgumentError(
                "`predict` divides the rows of models whose inputs and outputs all have any number "
                f"of rows, the same for each input. Received: {lengths}, for "
                f"{self._signature(DEFAULT)}. Call the program itself."
            )
        return next(iter(lengths.values()))

    def _result(self, found: Mapping[str, np.ndarray[Any, Any]]) -> Any:
        return dict(found) if self._outputs is None else structure.build(self._outputs, found)


def make(
    model: Any,
    engine: str = TENSORFLOW,
    precision: str = F32,
    threads: int | None = None,
    rows: Any = None,
    folder: str | pathlib.Path | None = None,
) -> Program:
    """Converts a model to an engine, and loads it.

    Args:
        model: a Keras model that was called, a `.keras` or `.h5` file, a `tf.Module` with
            signatures, or the path of a SavedModel's folder.
        engine: "tensorflow", "frozen" or "xla"; "openvino", "onnxruntime" or "litert" of the extras
            of these names.
        precision: "f32", "bf16" or "int8", as far as the engine has it.
        threads: None for as many as this process has cores. TensorFlow's engines leave it alone.
        rows: inputs as the model takes them, or None. Needed to calibrate int8. The dtypes of the
            inputs of a subclassed model of Keras 3, which forgets them.
        folder: where the program is written, see `Program.save`. None for a temporary folder, which
            is deleted with the program.

    Returns:
        The program, loaded from that folder.

    Raises:
        InvalidArgumentError, InvalidArgumentTypeError: An argument cannot be used.
        UnsupportedVersionError: A package is missing; tells how to install it.
        ModelError: The model was not built yet.
        ConversionError: The engine cannot convert this model.

    Example:
        >>> program = nanotf.inference.make(model, "openvino")
        >>> program.predict(x, num_processes=2)
    """
    chosen = engine_table.check_engine(engine, precision)
    engine_table.check_rows(chosen, precision, rows)
    count = _check_threads(threads)
    if folder is not None:
        path = pathlib.Path(folder).absolute()
        with program_folder.written(path) as made:
            description = _convert(model, chosen, precision, rows, made)
            state = program_folder.state_of(made)
        # Loaded under its last name: workers open the folder by it.
        return Program(path, description, count, state)
    temporary = pathlib.Path(tempfile.mkdtemp(prefix="nanotf-program-"))
    try:
        description = _convert(model, chosen, precision, rows, temporary)
        program = Program(temporary, description, count, program_folder.state_of(temporary))
    except BaseException:  # an interrupt, too, leaves no folder behind
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    weakref.finalize(program, _remove, temporary, os.getpid())
    return program


def _remove(folder: pathlib.Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a fork
        shutil.rmtree(folder, ignore_errors=True)


def _check_threads(threads: int | None) -> int:
    if threads is None:
        return usable_cores()
    return check_integer("threads", threads, "Pass a number of threads")


def _convert(
    model: Any, engine: InferenceEngine, precision: str, rows: Any, folder: pathlib.Path
) -> Description:
    """Writes a program to an empty folder."""
    from nanotf.inference import exported  # imports TensorFlow, which other engines do without

    with tempfile.TemporaryDirectory(prefix="nanotf-exported-") as temporary:
        found = exported.export(model, pathlib.Path(temporary) / "model", rows)
        signatures = _kept(found.signatures, engine)
        together = _reasons(found.folder)  # the files of other engines have no graph to prove from
        default = signatures.get(DEFAULT)
        samples = None
        # Else the rows have given the dtypes of a subclassed model's inputs; they are not checked.
        if rows is not None and default is not None and engine.calibrates:
            samples = default.checked(structure.flatten(_inputs_of(found), rows))
        (folder / FILES).mkdir()
        engine.convert(found.folder, folder / FILES, default, precision, samples)
    structures = found.inputs, found.outputs
    description = Description(engine.name, precision, signatures, *structures, together)
    # Last: a folder with it is a program's.
    program_folder.write_description(folder, description)
    return description


def _reasons(saved: pathlib.Path) -> dict[str, str]:
    from nanotf.inference import row_proof  # imports TensorFlow, see `_convert`

    return row_proof.reasons(saved)


def _kept(signatures: dict[str, Signature], engine: InferenceEngine) -> dict[str, Signature]:
    if engine.keeps_signatures:
        return signatures
    if DEFAULT not in signatures:
        raise InvalidArgumentError(
            f"The engine {engine.name!r} converts the signature {DEFAULT}. Received: a SavedModel "
            f"with {', '.join(signatures) or 'none'}. Choose engine={TENSORFLOW!r}."
        )
    return {DEFAULT: signatures[DEFAULT]}


def _inputs_of(found: Exported) -> Any:
    if found.inputs is not None:
        return found.inputs
    return {structure.DICT: {name: name for name in found.signatures[DEFAULT].input_names}}


def load(
    path: str | pathlib.Path, engine: str | None = None, threads: int | None = None
) -> Program:
    """Loads a program's folder; or makes a program of a SavedModel's folder or a Keras file.

    Args:
        path: a folder that `Program.save` or `make` has written, a SavedModel's folder, or a
            `.keras` or `.h5` file.
        engine: None for that of the program's folder, and "tensorflow" for everything else. A
            program's folder has one engine.
        threads: as in `make`.

    Raises:
        InvalidArgumentError: There is nothing of that kind, or the program has another engine.
        Damaged: program.json is not what nanotf has written.
        UnsupportedVersionError: A package is missing; tells how to install it.
        ConversionError: The engine cannot convert or load the model.
    """
    folder, count = pathlib.Path(path).absolute(), _check_threads(threads)
    if not is_loaded_as_it_is(folder, engine):
        return make(folder, engine or TENSORFLOW, threads=threads)
    state = program_folder.state_of(folder)
    if not program_folder.is_program(folder):
        # As it is: TensorFlow's engine has nothing to convert.
        signatures = saved_model.read_signatures(folder)
        description = Description(TENSORFLOW, F32, signatures, None, None)
        return Program(folder, description, count, state)
    description = program_folder.read_description(folder)
    if engine not in (None, description.engine):
        raise InvalidArgumentError(
            f"A program's folder has one engine, {description.engine!r}. Received: "
            f"engine={engine!r}. Make the program again, with that engine."
        )
    return Program(folder, description, count, state)


def is_loaded_as_it_is(path: pathlib.Path, engine: str | None) -> bool:
    """Returns True for what `load` need not convert: a program, or a SavedModel for TensorFlow."""
    if program_folder.is_program(path):
        return True
    return saved_model.is_saved_model(path) and engine in (None, TENSORFLOW)


def _open_same(folder: str, engine: str, state: tuple[int, ...]) -> Program:
    """Loads the program that another process has, to be computed on all cores of this one."""
    program = load(folder, engine)
    # Half of the rows from another model would be worse than an error.
    if program.state != state:
        raise InvalidArgumentError(
            "A program's folder must stay as it was when the program was loaded. Received: "
            f"{folder}, which has changed since. Load the program again."
        )
    return program
