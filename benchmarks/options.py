"""Options of `python -m benchmarks`."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import shutil
from collections.abc import Callable, Iterable, Sequence

from benchmarks.contestants import CONTESTANTS
from benchmarks.models import MODELS, OPTIMIZERS

PARTS = (
    "models",
    "start-up",
    "collectives",
    "hosts",
    "records",
    "items",
    "readers",
    "partitions",
    "serving",
    "memory",
)
QUICK_PARTS = ("models", "collectives", "memory")
DEFAULT_OUTPUT = pathlib.Path(__file__).resolve().parent / "results"


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a run.

    Args:
        models: tuple of str, keys of `MODELS`.
        contestants: tuple of str, of `CONTESTANTS`, and "peer" if there is an interpreter.
        parts: tuple of str, of `PARTS`.
        num_processes: int, at least 2.
        optimizer: str, one of `OPTIMIZERS`, "" for each model's own.
        batch_size: int, 0 for each model's own.
        rounds: int.
        epoch_seconds: float, approximate length of an epoch of plain Keras.
        quick: bool, whether to shorten the other parts, too.
        output: path of a directory.
        peer_python: str, path of an interpreter, or "".
    """

    models: tuple[str, ...] = tuple(MODELS)
    contestants: tuple[str, ...] = CONTESTANTS
    parts: tuple[str, ...] = PARTS
    num_processes: int = 2
    optimizer: str = ""
    batch_size: int = 0
    rounds: int = 5
    epoch_seconds: float = 1.0
    quick: bool = False
    output: pathlib.Path = DEFAULT_OUTPUT
    peer_python: str = ""


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Parses the command line; an invalid one ends the program with a one-line error."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Trains models with plain Keras, nanotf and others, interleaved, and compares.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--models", type=names(MODELS), metavar="A,B", help=f"of {', '.join(MODELS)}; all")
    add(
        "--contestants",
        type=names(CONTESTANTS),
        metavar="A,B",
        help=f"of {', '.join(CONTESTANTS)}; all",
    )
    add(
        "--parts",
        type=names(PARTS),
        metavar="A,B",
        help=f"of {', '.join(PARTS)}; all, quick: {', '.join(QUICK_PARTS)}",
    )
    add("--num-processes", type=whole(2), default=2, metavar="N", help="default 2")
    add("--optimizer", choices=OPTIMIZERS, help="of all; default: each model's own")
    add("--batch-size", type=whole(2), metavar="N", help="of all; default: each model's own")
    add("--rounds", type=whole(1), metavar="N", help="of each model; default 5, quick 2")
    add("--quick", action="store_true", help="shorter and fewer rounds; rough figures")
    add(
        "--output",
        type=pathlib.Path,
        default=DEFAULT_OUTPUT,
        metavar="DIR",
        help="for results.json, report.txt, chart.png and logs; default benchmarks/results",
    )
    add(
        "--peer-python",
        type=_interpreter,
        metavar="PATH",
        help="an interpreter that has BigDL-Nano, which gets a column",
    )
    given = parser.parse_args(arguments)
    if given.output.exists() and not given.output.is_dir():
        parser.error(f"--output must be a directory. Received: {given.output}, which is a file.")
    if given.batch_size is not None and given.batch_size < given.num_processes:
        parser.error(
            "--batch-size must be at least --num-processes, so that every process has a row. "
            f"Received: --batch-size {given.batch_size} --num-processes {given.num_processes}."
        )
    contestants = given.contestants or CONTESTANTS
    return Options(
        models=given.models or tuple(MODELS),
        contestants=(*contestants, "peer") if given.peer_python else contestants,
        parts=given.parts or (QUICK_PARTS if given.quick else PARTS),
        num_processes=given.num_processes,
        optimizer=given.optimizer or "",
        batch_size=given.batch_size or 0,
        rounds=given.rounds or (2 if given.quick else 5),
        epoch_seconds=0.6 if given.quick else 1.0,
        quick=given.quick,
        output=given.output.resolve(),
        peer_python=given.peer_python or "",
    )


def names(known: Iterable[str]) -> Callable[[str], tuple[str, ...]]:
    """Returns an argparse type: known names, separated by commas."""
    choices = tuple(known)

    def parse_names(text: str) -> tuple[str, ...]:
        given = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        unknown = [name for name in given if name not in choices]
        if unknown or not given:
            what = f"unknown: {', '.join(unknown)}" if unknown else "no name given"
            raise argparse.ArgumentTypeError(f"{what}. Choose from {', '.join(choices)}.")
        # In the benchmark's order, whatever order the user gave.
        return tuple(choice for choice in choices if choice in given)

    return parse_names


def whole(least: int) -> Callable[[str], int]:
    """Returns an argparse type: a whole number of at least `least`."""

    def parse_whole(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(
                f"must be a whole number of at least {least}. Received: {text!r}."
            )
        return int(text)

    return parse_whole


def _interpreter(text: str) -> str:
    found = shutil.which(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be a Python interpreter. Received: {text!r}.")
    return str(pathlib.Path(found).absolute())
