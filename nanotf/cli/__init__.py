"""The command line: `nanotf doctor`, `env`, `run`, `compare`, `train`, `jobs`, `serve`,
`endpoints`, `tune`, `optimize`.

A thin parser over library functions.

Called by users' shells, and by `nanotf-init` to get the variables to export.
May import everything below it.

Exit codes: 0 done, 1 `doctor` found an error, `compare` a difference or `optimize` no engine, 2
wrong arguments or a request that this machine cannot meet. `run` exits with the script's own code;
`train` and `jobs wait` with 0 after a completed job, with the script's code after a failed one, and
with 3 after a stopped one.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from nanotf import __version__
from nanotf.cli import compare, doctor, endpoints, env, jobs, optimize, serve, train
from nanotf.cli.parsers import (
    ArgumentError,
    Parser,
    add_json,
    add_script,
    explain,
    number_or_auto,
    whole_number,
)
from nanotf.cli.picture import count
from nanotf.cli.report_text import render
from nanotf.cli.run import Script
from nanotf.console import say
from nanotf.errors import NanoError
from nanotf.parent.auto import choice_cache
from nanotf.parent.defaults import PRECISIONS, TUNE, tune
from nanotf.wire import files

_Done = TypeVar("_Done")

BROKEN_PIPE = 128 + signal.SIGPIPE  # the code that shells report after the reader has exited
INTERRUPTED = 128 + signal.SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `nanotf`.

    Args:
        arguments: the command line after the program's name; None for `sys.argv[1:]`.

    Returns:
        The exit code. The script of `nanotf run` may end the process before.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # The sourced scripts call these. Their options are parsed separately from `nanotf env`'s.
    scripts = {"init": env.init, "unset": env.unset}
    if arguments[:2] == ["env", "--shell"] and arguments[2:3] and arguments[2] in scripts:
        function = scripts[arguments[2]]
        return _report(lambda: _write_code(function(arguments[3:], os.environ)))
    done = _report(lambda: _nanotf(arguments))
    if isinstance(done, Script):
        done.run()  # any exception is the script's own, even a `NanoError`
        return 0
    return done


def _report(command: Callable[[], _Done]) -> _Done | int:
    try:
        done = command()
        if sys.stdout is not None:  # None if the parent process has closed it
            sys.stdout.flush()  # else it fails at Python's exit, where nobody catches it
        return done
    except BrokenPipeError:  # for instance in `nanotf doctor | head`
        _drop_output()
        return BROKEN_PIPE
    except KeyboardInterrupt:  # where nanotf's code was interrupted helps nobody
        return INTERRUPTED
    except OSError as error:
        if error.errno not in files.FULL:  # any other shows its traceback
            raise
        _drop_output()
        say(f"the output cannot be written: {error.strerror}", sys.stderr)
        return 1
    except (NanoError, ArgumentError) as error:
        say(error, sys.stderr)
        return 2


def _drop_output() -> None:
    """Redirects stdout to /dev/null: Python flushes it once more when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write_code(code: str) -> int:
    # Old values may be any bytes; they are restored unchanged.
    sys.stdout.buffer.write(os.fsencode(code))
    sys.stdout.buffer.flush()
    return 0


def _nanotf(arguments: Sequence[str]) -> int | Script:
    parser = Parser(
        prog="nanotf",
        description="Trains and serves TensorFlow and Keras models with several CPU processes.",
        epilog="`nanotf COMMAND --help` lists the options of a command. `source nanotf-init` sets "
        "the environment of a shell.",
    )
    parser.add_argument(
        "--version", action="version", version=f"nanotf {__version__}", help="print the version"
    )
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", parser_class=Parser
    )
    _add_doctor(commands)
    env.add_command(commands)
    _add_run(commands)
    compare.add_command(commands)
    train.add_command(commands)
    jobs.add_command(commands)
    serve.add_command(commands)
    endpoints.add_command(commands)
    _add_tune(commands)
    optimize.add_command(commands)
    try:
        parsed = parser.parse_args(arguments)
    except ArgumentError as error:
        # A command that is misspelled is looked for among the words of all commands.
        named = list(arguments[:1]) if arguments[:1] and arguments[0] in commands.choices else []
        command = " ".join(["nanotf", *named])
        of_command = commands.choices[named[0]] if named else parser
        text = explain(error, command, arguments[len(named) :], of_command)
        if not named and any(pathlib.Path(argument).is_file() for argument in arguments):
            text += " To run a script, write `nanotf run` before it and its options."
        raise ArgumentError(text) from None
    if parsed.command is None:
        parser.print_help()
        return 0
    done: int | Script = parsed.run(parsed)
    return done


def _add_doctor(commands: Any) -> None:
    # `RawDescriptionHelpFormatter` does not wrap the epilog.
    keys = "\n".join(
        textwrap.fill(about, 96, initial_indent=f"  {key:<13}", subsequent_indent=" " * 15)
        for key, about in doctor.KEYS.items()
    )
    parser = commands.add_parser(
        "doctor",
        help="show this machine, how nanotf would use it, problems found, and how to fix each",
        description="Shows this machine, the cores that nanotf may use, the programs that use them "
        "now,\nthe TensorFlow build, the environment, problems found, and how to fix each. Prints "
        "one\nblock that you can copy into an issue. Changes nothing. Exits with 1 if something "
        "does\nnot work.",
        epilog=f"keys of the JSON object:\n{keys}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # a new option could make an abbreviation in a script ambiguous
    )
    add_json(parser)
    parser.add_argument(
        "-n",
        "--num-processes",
        type=whole_number,
        metavar="N",
        help="show the cores of N workers; default 2, or 1 if there is 1 core",
    )
    parser.add_argument(
        "--test",
        action="store_true",
        help="train with 2 workers, compare with 1 process, and check sums over workers",
    )
    parser.set_defaults(run=_doctor)


def _doctor(parsed: argparse.Namespace) -> int:
    report = doctor.examine(parsed.num_processes, test=parsed.test)
    if parsed.json:
        print(json.dumps(report, indent=2))
    else:
        _print(render(report))
    return 1 if doctor.has_errors(report) else 0


def _print(text: str) -> None:
    """Prints a text. Escapes characters that stdout cannot encode, such as those of a path."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # None for a `StringIO`
    print(text.encode(encoding, "backslashreplace").decode(encoding))


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="run an unchanged script or module; every fit uses several processes",
        usage="nanotf run [-h] [-n N] [--ranks | --smp] [--hosts HOSTS] [--tune SETTINGS] "
        "[--precision PRECISION] [--sparse] "
        "{script.py | -m MODULE} [arguments ...]",
        description="Calls nanotf.patch_tensorflow(), then runs a script as "
        "`python script.py arguments ...` would, or a module as `python -m MODULE arguments ...` "
        "would. Its Keras models accept num_processes. With -n, every fit without num_processes "
        "uses N processes. TensorFlow is imported before the script begins, so set its "
        "environment variables, such as TF_USE_LEGACY_KERAS, in the shell. Exits with the "
        "script's own code.",
        allow_abbrev=False,
    )
    run.add_argument(
        "-n",
        "--num-processes",
        type=number_or_auto,
        metavar="N",
        help='run every fit that names no number with N workers; "auto" measures for each fit '
        "which number is fastest",
    )
    as_ranks = run.add_mutually_exclusive_group()
    as_ranks.add_argument(
        "--ranks",
        action="store_true",
        help="N processes run the script, each as a rank: of Horovod, whose API is nanotf.hvd, or "
        "of the strategies of tf.distribute that the script makes; rank 0 prints",
    )
    as_ranks.add_argument(
        "--smp",
        action="store_true",
        help="model parallelism: as --ranks, for nanotf.smp, and all ranks print; also without "
        "this flag if SM_HP_MP_PARAMETERS asks for several partitions",
    )
    run.add_argument(
        "--hosts",
        metavar="H1:N,H2:N",
        help="use workers of several hosts: run the same command on each; the first runs the "
        "script, the others lend it N workers. With --ranks, each host runs N ranks. "
        '"auto", the default, asks SageMaker, Slurm, MPI and TF_CONFIG',
    )
    run.add_argument(
        "--tune",
        type=lambda text: tuple(text.split(",")),  # `_run` checks the names
        metavar="SETTINGS",
        help="with -n auto: also measure these settings, separated by commas, and use those that "
        f"are faster: {', '.join(TUNE)}",
    )
    run.add_argument(
        "--precision",
        choices=PRECISIONS,
        default=PRECISIONS[0],  # leaves Keras's global policy as it is
        help="compute in this precision, as nanotf.patch_tensorflow(precision) does; "
        "default %(default)s",
    )
    run.add_argument(
        "--sparse",
        action="store_true",
        help="replace Keras's Embedding and Adam, as nanotf.patch_tensorflow(sparse=True) does",
    )
    add_script(run)
    run.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int | Script:
    script = Script(
        name=parsed.script,
        arguments=tuple(parsed.arguments),
        is_module=parsed.is_module,
        num_processes=parsed.num_processes,
        precision=parsed.precision,
        sparse=parsed.sparse,
        hosts=parsed.hosts,
        ranks=parsed.ranks,
        smp=parsed.smp,
        tune=() if parsed.tune is None else tune(parsed.tune, parsed.num_processes),
    )
    return script.prepare()


def _add_tune(commands: Any) -> None:
    tune = commands.add_parser(
        "tune",
        help='show or delete the measurements of num_processes="auto"',
        description='Shows the measurements that fit(num_processes="auto") has stored: for each '
        "model the time of a step by the number of processes.",
        allow_abbrev=False,
    )
    tune.add_argument(
        "--clear", action="store_true", help="delete them; the next fit measures again"
    )
    tune.set_defaults(run=_tune)


def _tune(parsed: argparse.Namespace) -> int:
    if parsed.clear:
        say(f"Forgot {count(choice_cache.clear(), 'measurement')} of {choice_cache.path()}.")
        return 0
    file, entries = choice_cache.path(), choice_cache.entries()
    print(f"{count(len(entries), 'measurement')} in {file}")
    for entry in entries.values():
        steps = ", ".join(
            f"{m['num_processes']}{_setting(m)}: "
            + ("too slow" if m["step"] is None else _ms(m["step"]))
            for m in entry["measured"]
        )
        print(f"  {entry['date']}  {entry['model']}: ms per step by processes: {steps}")
    return 0


def _setting(measured: dict[str, Any]) -> str:
    return f" with {measured['setting']}" if measured.get("setting") else ""


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"
