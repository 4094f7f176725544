"""The command line: `nanotf doctor`, `env`, `run`, `tune`. A thin parser over library functions.

Called by users' shells, and by `nanotf-init` to get the variables to export.
May import everything below it.

Exit codes: 0 done, 1 `doctor` found an error, 2 wrong arguments or a request that this machine
cannot meet. `run` exits with the script's own code.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import shlex
import signal
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NoReturn, TypeVar

from nanotf import __version__
from nanotf.cli import doctor, shell
from nanotf.cli.picture import count
from nanotf.cli.report_text import render
from nanotf.cli.run import Script
from nanotf.console import say
from nanotf.errors import NanoError
from nanotf.machine import environment, shell_state, topology
from nanotf.machine.installed import find_installed
from nanotf.parent import auto_cache
from nanotf.parent.defaults import PRECISIONS

_Done = TypeVar("_Done")

_INIT_ABOUT = """\
Exports the best known environment for TensorFlow on this machine, and prints it.
`source nanotf-unset` restores the previous environment. Works in bash and zsh.

Variables that you have set yourself are kept, and listed as yours. NANOTF_ENV records the
changes."""

_INIT_NOTES = """\
A script with arguments of its own must write `source nanotf-init --`. Without `--`, the
sourced file receives the script's arguments."""


class _ArgumentError(Exception):
    """The command line is wrong; its text is one line without the final period."""


DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
BROKEN_PIPE = 128 + signal.SIGPIPE  # the code that shells report after the reader has exited


class _NotHere(argparse.Action):
    """A short option that means something else in `nanotf doctor`, `env` and `run`."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Rejects the option."""
        parser.error(
            "-n is the number of processes in all commands, and this one takes none. "
            "Received: -n. Write --disable-onednn to switch oneDNN off"
        )


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of printing its usage: sourced scripts print one clear line."""

    def error(self, message: str) -> NoReturn:
        raise _ArgumentError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `nanotf`.

    Args:
        arguments: sequence of str, default `sys.argv[1:]`.

    Returns:
        The exit code.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # The sourced scripts call these. Their options are parsed separately from `nanotf env`'s.
    scripts = {"init": _init, "unset": _unset}
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
            sys.stdout.flush()
        return done
    except BrokenPipeError:  # for instance in `nanotf doctor | head`
        _drop_output()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        _drop_output()
        say(f"the output cannot be written: {error.strerror}", sys.stderr)
        return 1
    except (NanoError, _ArgumentError) as error:
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


# -------------------------------------------------------------------- the sourced scripts
def _init(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    parser = _script_parser("nanotf-init", _INIT_ABOUT, _INIT_NOTES)
    _add_options(parser)
    parser.add_argument("-n", action=_NotHere, nargs=0, help=argparse.SUPPRESS)
    parser.add_argument("-q", "--quiet", action="store_true", help="print only warnings")
    parser.add_argument("-d", "--debug", action="store_true", help="print what was found on stderr")
    parsed = _parse_script(parser, arguments)
    if parsed.help:
        return shell.say(parser.format_help().rstrip()) + "\n"
    machine = topology.describe_machine()
    if parsed.debug:
        found = {"python": sys.executable, "machine": machine, "installed": find_installed()}
        for name, value in {**found, "before": shell_state.read_state(environ)}.items():
            say(f"{name}: {value}", sys.stderr)
    code, made = shell.init_code(machine, environ, _options(parsed), quiet=parsed.quiet)
    _warn(made)
    return code


def _unset(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    about = "Restores the environment variables that `source nanotf-init` has changed."
    parser = _script_parser("nanotf-unset", about, _INIT_NOTES.replace("-init", "-unset"))
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing")
    parsed = _parse_script(parser, arguments)
    if parsed.help:
        return shell.say(parser.format_help().rstrip()) + "\n"
    return shell.unset_code(environ, quiet=parsed.quiet)


def _script_parser(name: str, about: str, notes: str) -> _Parser:
    # argparse's own --help would print to standard output, which the shell evaluates.
    parser = _Parser(
        prog=name,
        usage=f"source {name} [options]",
        description=about,
        epilog=notes,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="print this and change nothing")
    return parser


def _parse_script(parser: _Parser, arguments: Sequence[str]) -> argparse.Namespace:
    try:
        given = list(arguments)
        return parser.parse_args(given[:-1] if given[-1:] == ["--"] else given)
    except _ArgumentError as error:
        command = f"source {parser.prog}"
        hint = f"A script with arguments of its own must write: {command} --"
        raise _ArgumentError(f"{_explained(error, command, arguments)} {hint}") from None


def _explained(error: _ArgumentError, command: str, arguments: Sequence[str]) -> str:
    """Writes an error of the command line as rule, received arguments, remedy."""
    text = f"{error}"
    text = text[:1].upper() + text[1:]
    if "Received: " not in text:
        text += f". Received: {shell.printable(shlex.join([*command.split(), *arguments]))}"
    return f"{text}. See `{command} --help`."


# ------------------------------------------------------------------------- nanotf ...
def _nanotf(arguments: Sequence[str]) -> int | Script:
    parser = _Parser(
        prog="nanotf",
        description="Trains TensorFlow and Keras models with several processes on the CPU.",
        epilog="`nanotf COMMAND --help` lists the options of a command. `source nanotf-init` sets "
        "the environment of a shell.",
    )
    parser.add_argument(
        "--version", action="version", version=f"nanotf {__version__}", help="print the version"
    )
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", title="commands", parser_class=_Parser
    )
    _add_doctor(commands)
    _add_env(commands)
    _add_run(commands)
    _add_tune(commands)
    try:
        parsed = parser.parse_args(arguments)
    except _ArgumentError as error:
        named = list(arguments[:1]) if arguments[:1] and arguments[0] in commands.choices else []
        command = " ".join(["nanotf", *named])
        raise _ArgumentError(_explained(error, command, arguments[len(named) :])) from None
    if parsed.command is None:
        parser.print_help()
        return 0
    done: int | Script = parsed.run(parsed)
    return done


def _add_doctor(commands: Any) -> None:
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
        allow_abbrev=False,
    )
    parser.add_argument(
        "--json", action="store_true", help="print the same as one JSON object, and nothing else"
    )
    parser.add_argument(
        "-n",
        "--num-processes",
        type=_whole_number,
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
    print(json.dumps(report, indent=2) if parsed.json else render(report))
    return 1 if doctor.has_errors(report) else 0


def _whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number. Received: {text!r}") from None


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="run an unchanged script or module; every fit uses several processes",
        usage="nanotf run [-h] [-n N] [--precision PRECISION] [--sparse] "
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
        type=_processes,
        metavar="N",
        help='run every fit that names no number with N workers; "auto" measures for each fit '
        "which number is fastest",
    )
    run.add_argument(
        "--precision",
        choices=PRECISIONS,
        default=PRECISIONS[0],
        help="compute in this precision, as nanotf.patch_tensorflow(precision) does; "
        "default %(default)s",
    )
    run.add_argument(
        "--sparse",
        action="store_true",
        help="replace Keras's Embedding and Adam, as nanotf.patch_tensorflow(sparse=True) does",
    )
    run.add_argument(
        "-m",
        dest="is_module",
        action="store_true",
        help="the next argument names a module or package, as in `python -m`",
    )
    run.add_argument("script", help="the Python file, or with -m the module")
    run.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the script's own arguments (sys.argv)"
    )
    run.set_defaults(run=_run)


def _processes(text: str) -> int | str:
    if text == topology.AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be a whole number, or {topology.AUTO!r}. Received: {text!r}"
        ) from None


def _run(parsed: argparse.Namespace) -> Script:
    script = Script(
        name=parsed.script,
        arguments=tuple(parsed.arguments),
        is_module=parsed.is_module,
        num_processes=parsed.num_processes,
        precision=parsed.precision,
        sparse=parsed.sparse,
    )
    script.prepare()
    return script


def _add_env(commands: Any) -> None:
    env = commands.add_parser(
        "env",
        help="print the environment variables that nanotf-init would set, or those of workers",
        description="Prints the environment variables that `source nanotf-init` would set, or "
        "with -n those of each worker. Changes nothing.",
        allow_abbrev=False,
    )
    env.add_argument(
        "--json", action="store_true", help="print the same as one JSON object, and nothing else"
    )
    env.add_argument(
        "-n",
        "--num-processes",
        type=_whole_number,
        metavar="N",
        help="print the variables of N workers",
    )
    _add_options(env)
    env.set_defaults(run=_env)


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
        say(f"Forgot {count(auto_cache.clear(), 'measurement')} of {auto_cache.path()}.")
        return 0
    file, entries = auto_cache.path(), auto_cache.entries()
    print(f"{count(len(entries), 'measurement')} in {file}")
    for entry in entries.values():
        steps = ", ".join(
            f"{m['num_processes']}: " + ("too slow" if m["step"] is None else _ms(m["step"]))
            for m in entry["measured"]
        )
        print(f"  {entry['date']}  {entry['model']}: ms per step by processes: {steps}")
    return 0


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"


def _env(parsed: argparse.Namespace) -> int:
    options, machine = _options(parsed), topology.describe_machine()
    if parsed.num_processes is None:
        made = environment.shell_environment(machine, os.environ, options)
        title, workers = f"{machine.explain()}.", []
    else:
        topology.check_num_processes(parsed.num_processes)
        # The workers use these options, as if `nanotf-init` had been sourced with them.
        before = environment.shell_environment(machine, os.environ, options)
        environ = environment.initialised(os.environ, options, before)
        plan = topology.plan(
            parsed.num_processes, machine=machine, max_cores=shell_state.cores_cap(environ)
        )
        workers = [(p, environment.worker_environment(p, environ)) for p in plan.placements]
        title, made = f"{machine.explain()}.", environment.Environment()
    if parsed.json:
        print(json.dumps(_as_json(made, workers), indent=2))
        return 0
    print(title)
    if not workers:
        print(shell.table(made))
    for placement, variables in workers:
        where = "" if placement.numa_node is None else f", NUMA node {placement.numa_node}"
        print(f"worker {placement.rank}: cores {list(placement.cores)}{where}")
        print(shell.table(variables))
    for found in [made, *(variables for _, variables in workers[:1])]:
        _warn(found)
    return 0


def _as_json(
    made: environment.Environment,
    workers: Sequence[tuple[topology.Placement, environment.Environment]],
) -> dict[str, Any]:
    if not workers:
        return asdict(made)
    return {"workers": [{**asdict(place), **asdict(found)} for place, found in workers]}


# ------------------------------------------------------------------------- shared
def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "-o",
        "--disable-openmp",
        action="store_true",
        help="set no OMP_* and KMP_* variables, preload no libiomp5",
    )
    allocators = parser.add_mutually_exclusive_group()
    for short, name in (("-j", "jemalloc"), ("-t", "tcmalloc")):
        allocators.add_argument(
            short,
            f"--enable-{name}",
            dest="allocator",
            action="store_const",
            const=name,
            help=f"preload {name}; warn if it is missing"
            + (" (the default if it is installed)" if name == "tcmalloc" else ""),
        )
    allocators.add_argument(
        "-c",
        "--disable-allocator",
        dest="allocator",
        action="store_const",
        const="none",
        help="preload no allocator",
    )
    add("-p", "--perf", action="store_true", help=environment.PERF_HELP)
    add("--disable-onednn", action="store_true", help="set TF_ENABLE_ONEDNN_OPTS=0 instead of 1")
    add(
        "-r",
        "--cores",
        type=_whole_number,
        metavar="N",
        help="use N cores in all; default all usable ones",
    )


def _options(parsed: argparse.Namespace) -> shell_state.Options:
    return shell_state.Options(
        openmp=not parsed.disable_openmp,
        allocator=parsed.allocator or "auto",
        onednn=not parsed.disable_onednn,
        perf=parsed.perf,
        cores=parsed.cores,
    )


def _warn(made: environment.Environment) -> None:
    for warning in made.warnings:
        say(f"warning: {warning}", sys.stderr)
