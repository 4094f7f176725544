"""`nanotf optimize MODEL`: finds the engine that computes a model fastest, and still the same."""

from __future__ import annotations

import argparse
import os
import pathlib
from typing import Any

from nanotf.cli.parsers import whole_number
from nanotf.console import say
from nanotf.errors import InvalidArgumentError

_NUMPY = (".npy", ".npz")


def add_command(commands: Any) -> None:
    """Adds `nanotf optimize` to the commands of a parser."""
    optimize = commands.add_parser(
        "optimize",
        help="find the engine that computes a trained model fastest on this machine",
        usage="nanotf optimize MODEL --rows FILE [options]",
        description="Converts a model to each engine that is installed, compares its outputs with "
        "those of Keras, and measures it, in processes of its own. Prints a table. An engine that "
        "crashes, or computes something else, is named and not chosen.",
        allow_abbrev=False,
    )
    optimize.add_argument(
        "model", help="a .keras or .h5 file, or the folder of a SavedModel", metavar="MODEL"
    )
    optimize.add_argument(
        "--rows",
        required=True,
        metavar="FILE",
        help="rows of the model's input, some hundred: a .npy file, or a .npz file with an array "
        "for each input by its name",
    )
    optimize.add_argument(
        "--engines",
        type=_names,
        metavar="NAMES",
        help="the engines to try, separated by commas; default all",
    )
    optimize.add_argument(
        "--precision",
        type=_names,
        default=("f32",),
        metavar="NAMES",
        help="the precisions to try, separated by commas: f32, bf16; default f32. bf16 also needs "
        "a larger --tolerance",
    )
    optimize.add_argument(
        "--tolerance",
        type=float,
        metavar="T",
        help="the largest difference of an output, relative to its largest number; default 0.001",
    )
    optimize.add_argument(
        "--batch-sizes",
        type=_numbers,
        default=(1, 32),
        metavar="N,N",
        help="numbers of rows to measure, separated by commas; default 1,32",
    )
    optimize.add_argument(
        "--threads",
        type=whole_number,
        default=1,
        metavar="N",
        help="the cores of a process; default %(default)s",
    )
    optimize.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="the limit for each conversion, and for each measurement; default 120",
    )
    optimize.add_argument(
        "-o", "--output", metavar="FOLDER", help="write the best program to this folder"
    )
    optimize.set_defaults(run=_optimize)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in text.split(",") if name)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(whole_number, text.split(",")))


def _optimize(parsed: argparse.Namespace) -> int:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # the table is what users want to see
    from nanotf.inference import optimizing, program_folder  # import NumPy

    if parsed.output is not None:  # before a search that takes minutes
        program_folder.check_place(pathlib.Path(parsed.output).absolute())
    options = {  # None leaves the default to `optimizing.optimize`
        "engines": parsed.engines,
        "tolerance": parsed.tolerance,
        "seconds": parsed.seconds,
    }
    result = optimizing.optimize(
        parsed.model,
        _rows(parsed.rows),
        precisions=parsed.precision,
        batch_sizes=parsed.batch_sizes,
        threads=parsed.threads,
        **{name: value for name, value in options.items() if value is not None},
    )
    print(result)
    if all(each.status != "ok" for each in result.candidates):  # the table says why
        return 1
    if parsed.output is not None:
        result.save(parsed.output)
        say(f"Wrote the program {result.best_candidate().name} to {parsed.output}.")
    return 0


def _rows(name: str) -> Any:
    """Reads the rows of a file, which must not hold pickles: they can run code."""
    import numpy as np

    path = pathlib.Path(name)
    if path.suffix not in _NUMPY or not path.is_file():
        raise InvalidArgumentError(
            f"--rows must name a file {' or '.join(_NUMPY)}. Received: {name!r}. Write one by "
            "numpy.save('rows.npy', x)."
        )
    try:
        found = np.load(path, allow_pickle=False)
        # `dict` reads each array of an archive, so that one of objects is refused here.
        return found if path.suffix == ".npy" else dict(found)
    except ValueError as error:
        raise InvalidArgumentError(
            f"--rows must hold arrays of numbers or texts. Received: {name!r}: {error}. Write text "
            "with a dtype such as 'U20', not as objects."
        ) from None
