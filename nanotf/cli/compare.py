"""`nanotf compare script.py`: are the numbers of workers those of one process, and if not, where?

Runs the script alone and with workers, in float64, where rounding cannot hide a difference, and in
float32. If they part, it runs the script alone once more, in case it differs from itself, and once
with workers that compare each layer's parts with a call on all rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from nanotf.cli.parsers import add_script, whole_number
from nanotf.cli.shell import printable
from nanotf.errors import InvalidArgumentError, describe_exit
from nanotf.machine import topology
from nanotf.machine.interpreter import python_command

# Largest relative difference of equal programs after a few steps. Rounding can grow: an optimizer
# like Adam divides small gradients by small numbers.
ROUNDING = {"float64": 1e-8, "float32": 1e-3}


@dataclasses.dataclass(frozen=True)
class FirstDifference:
    """The first moment at which two runs differ."""

    where: str  # the moment, as `recording.note` names it
    what: str  # the number that differs most, or why the moments cannot be compared
    # The number's summaries in both runs, see `recording.summary`; empty without a number
    one: list[float]
    other: list[float]
    gap: float  # relative difference; infinite without a number


@dataclasses.dataclass(frozen=True)
class ScriptRun:
    """One run of the script."""

    lines: list[dict[str, Any]]  # what it has recorded
    failure: str  # how it ended, and the last line that it printed; empty if it exited with 0


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Runs a script several times."""

    script: str  # a path, or a module's name
    arguments: tuple[str, ...]  # the script's own
    number: int  # of workers
    steps: int  # that each `fit` runs
    is_module: bool
    folder: str  # for the records; the caller deletes it

    def run(self, number: int, dtype: str, **variables: str) -> ScriptRun:
        """Runs the script with a number of processes in a dtype."""
        from nanotf.region import recording  # imports NumPy

        handle, path = tempfile.mkstemp(dir=self.folder)  # exists even if nothing is recorded
        os.close(handle)
        options = {
            "number": number,
            "dtype": dtype,
            "steps": self.steps,
            "is_module": self.is_module,
        }
        command = python_command(
            "nanotf.cli.recorded", json.dumps(options), self.script, *self.arguments
        )
        done = subprocess.run(
            command,
            env={**os.environ, **variables, recording.FILE: path},  # workers inherit them
            stdin=subprocess.DEVNULL,  # nobody would see the question of a script that asks
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # the last line of both explains a failure
            text=True,
            errors="replace",  # a script may print any bytes
        )
        failure = ""
        if done.returncode:
            said = [line for line in done.stdout.splitlines() if line.strip()]
            last = said[-1] if said else "it printed nothing"
            failure = f"{describe_exit(done.returncode)[0]}: {last}"
        return ScriptRun(list(recording.read(path)), failure)

    def tell(self) -> Iterator[str | bool]:
        """Yields lines for people, and at the end whether the numbers are equal."""
        from nanotf.region import recording

        decided: bool | None = None
        for dtype in ROUNDING:
            alone, shared = self.run(1, dtype), self.run(self.number, dtype)
            if alone.failure:
                # Some scripts work in one of the dtypes only; the other one decides then.
                yield f"{dtype}: the script fails in one process: it {alone.failure}"
                continue
            if shared.failure:
                yield f"{dtype}: with {self.number} workers it {shared.failure}"
                yield False
                return
            if not alone.lines:
                yield "The script calls neither fit nor a @nano function: nothing to compare."
                yield False
                return
            part, largest = first_part(alone.lines, shared.lines, ROUNDING[dtype])
            if part is None:
                moments = f"{len(alone.lines)} moments"
                yield f"{dtype}: equal at {moments}, largest relative difference {largest:.0e}"
                decided = True if decided is None else decided
                continue
            decided = False
            yield f"{dtype}: {_told(part, 'alone', f'with {self.number} workers')}"
            # A script without a seed differs from itself: then no layer is to blame.
            again, _ = first_part(alone.lines, self.run(1, dtype).lines, ROUNDING[dtype])
            if again is not None:
                yield f"  Two runs alone differ, too: {_told(again, 'first', 'then')}"
                yield "  Seed the script: tf.keras.utils.set_random_seed(1)."
            else:
                checked = self.run(self.number, dtype, **{recording.CHECK_LAYERS: "1"})
                yield from _layers(checked.lines)
            # Rounding would blur the same difference in float32, after two more runs.
            break
        if decided is None:
            yield "The script ran in no dtype."
        yield bool(decided)


def first_part(
    one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]], rounding: float
) -> tuple[FirstDifference | None, float]:
    """Returns the first difference above rounding, or None; and the largest difference below it.

    Args:
        one, other: the records of two runs, see `recording.note`.
        rounding: the largest relative difference that counts as equal.
    """
    from nanotf.region import recording

    largest = 0.0
    for number in range(max(len(one), len(other))):
        if number >= min(len(one), len(other)):
            longer = one if len(one) > len(other) else other
            missing = longer[number]["where"]
            return FirstDifference(
                missing, "which only one of the runs reaches", [], [], float("inf")
            ), largest
        a, b = one[number], other[number]
        # Runs that take different ways have no numbers that belong together.
        if a["where"] != b["where"] or a["values"].keys() != b["values"].keys():
            text = f"where the other run has {b['where']!r}, with other names"
            return FirstDifference(a["where"], text, [], [], float("inf")), largest
        pairs = {name: (a["values"][name], b["values"][name]) for name in a["values"]}
        gaps = {name: recording.gap(*pair) for name, pair in pairs.items()}
        name = max(gaps, key=gaps.__getitem__, default=None)  # None at a moment without numbers
        if name is not None and gaps[name] > rounding:
            return FirstDifference(a["where"], name, *pairs[name], gaps[name]), largest
        largest = max([largest, *gaps.values()])
    return None, largest


def _told(part: FirstDifference, one: str, other: str) -> str:
    if not part.one:
        return f"they part at {part.where}, {part.what}"
    numbers = f"sum {part.one[1]:.9g} {one}, {part.other[1]:.9g} {other}"  # [0] is their scale
    return f"they part at {part.where}, in {part.what}: {numbers} (relative {part.gap:.0e})"


def _layers(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields the layers whose parts differed from a call on all rows."""
    # Backward, so that each layer's first record is kept.
    found = {line["layer"]: line for line in lines[::-1] if "layer" in line}
    for name, line in reversed(found.items()):
        yield (
            f"  Layer {name} computes other numbers on parts of a batch: {line['what']}, "
            f"{line['whole']:.9g} on all rows, {line['divided']:.9g} on each worker's."
        )
    if found:
        yield "  Wrap it: nanotf.whole(layer). Then report it: nanotf should have seen it."
    else:
        yield (
            "  Each layer by itself computes the same on parts of a batch. Look at what your code "
            "does outside layers: random numbers, the time, the process, files."
        )


def add_command(commands: Any) -> None:
    """Adds `nanotf compare`."""
    parser = commands.add_parser(
        "compare",
        help="run a script alone and with workers, and say if and where their numbers part",
        usage="nanotf compare [-h] [-n N] [--steps K] {script.py | -m MODULE} [arguments ...]",
        description="Runs a script in one process and with workers, in float64 and in float32, and "
        "compares losses, metrics and variables after each step, and what steps and @nano "
        "functions return. Says that they are equal, or at which step, in which number and in "
        "which layer they part. The script runs four to six times. Each fit ends after K steps; "
        "a loop of your own runs to its end. What the script prints is not shown. Exits with 0 if "
        "the numbers are equal, else with 1.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n",
        "--num-processes",
        type=whole_number,
        default=2,
        metavar="N",
        help="workers of each fit that names no number; default %(default)s",
    )
    parser.add_argument(
        "--steps",
        type=whole_number,
        default=8,
        metavar="K",
        help="steps of each fit; default %(default)s",
    )
    add_script(parser)
    parser.set_defaults(run=_compare)


def _compare(parsed: argparse.Namespace) -> int:
    if parsed.num_processes < 2 or parsed.steps < 1:
        raise InvalidArgumentError(
            "`nanotf compare` needs at least two workers and one step. Received: "
            f"-n {parsed.num_processes} --steps {parsed.steps}. Pass -n 2 --steps 8, the defaults."
        )
    if not parsed.is_module and not pathlib.Path(parsed.script).is_file():
        raise InvalidArgumentError(
            f"The script must be a Python file. Received: {printable(parsed.script)}. Pass a "
            "script's path."
        )
    topology.plan(parsed.num_processes)  # raises before the script runs, if cores are missing
    equal = False
    with tempfile.TemporaryDirectory(prefix="nanotf-compare-") as folder:
        comparison = Comparison(
            parsed.script,
            tuple(parsed.arguments),
            parsed.num_processes,
            parsed.steps,
            parsed.is_module,
            folder,
        )
        for told in comparison.tell():
            if isinstance(told, bool):
                equal = told
            else:
                print(printable(told), flush=True)  # the next line may be minutes away
    print("The numbers are equal." if equal else "The numbers are not equal.", flush=True)
    return 0 if equal else 1
