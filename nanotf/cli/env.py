"""`nanotf env`, and the code that `source nanotf-init` and `source nanotf-unset` evaluate."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from nanotf.cli import shell
from nanotf.cli.parsers import ArgumentError, Parser, add_json, explain, whole_number
from nanotf.console import say
from nanotf.machine import environment, shell_state, topology
from nanotf.machine.installed import find_installed

_INIT_ABOUT = """\
Exports the best known environment for TensorFlow on this machine, and prints it.
`source nanotf-unset` restores the previous environment. Works in bash and zsh.

Variables that you have set yourself are kept, and listed as yours. NANOTF_ENV records the
changes."""

_INIT_NOTES = """\
A script with arguments of its own must write `source nanotf-init --`. Without `--`, the
sourced file receives the script's arguments."""


class _NotHere(argparse.Action):
    """A short option that means something else in `nanotf doctor`, `env` and `run`."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Rejects the option."""
        parser.error(
            "-n is the number of processes in all commands, and this one takes none. "
            "Received: -n. Write --disable-onednn to switch oneDNN off"
        )


def init(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """Returns the code of `source nanotf-init`.

    Args:
        arguments: the arguments after the script's name.
        environ: the shell's environment.
    """
    parser = _script_parser("nanotf-init", _INIT_ABOUT, _INIT_NOTES)
    _add_options(parser)
    parser.add_argument("-n", action=_NotHere, nargs=0, help=argparse.SUPPRESS)
    parser.add_argument("-q", "--quiet", action="store_true", help="print only warnings")
    parser.add_argument(
        "-d", "--debug", action="store_true", help="print details of the detection on stderr"
    )
    parsed = _parse_script(parser, arguments)
    if parsed.help:
        return shell.say(parser.format_help().rstrip()) + "\n"
    machine = topology.describe_machine()
    if parsed.debug:
        found = {"python": sys.executable, "machine": machine, "installed": find_installed()}
        for name, value in {**found, "before": shell_state.read_state(environ)}.items():
            say(f"{name}: {value}", sys.stderr)  # the shell evaluates stdout
    code, made = shell.init_code(machine, environ, _options(parsed), quiet=parsed.quiet)
    _warn(made)
    return code


def unset(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """Returns the code of `source nanotf-unset`. Takes the arguments of `init`."""
    about = "Restores the environment variables that `source nanotf-init` has changed."
    parser = _script_parser("nanotf-unset", about, _INIT_NOTES.replace("-init", "-unset"))
    parser.add_argument("-q", "--quiet", action="store_true", help="print nothing")
    parsed = _parse_script(parser, arguments)
    if parsed.help:
        return shell.say(parser.format_help().rstrip()) + "\n"
    return shell.unset_code(environ, quiet=parsed.quiet)


def _script_parser(name: str, about: str, notes: str) -> Parser:
    # argparse's own --help would print to standard output, which the shell evaluates.
    parser = Parser(
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


def _parse_script(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    try:
        given = list(arguments)  # argparse calls a lone -- unrecognized (Python 3.11)
        return parser.parse_args(given[:-1] if given[-1:] == ["--"] else given)
    except ArgumentError as error:
        command = f"source {parser.prog}"
        hint = f"A script with arguments of its own must write: {command} --"
        raise ArgumentError(f"{explain(error, command, arguments, parser)} {hint}") from None


def add_command(commands: Any) -> None:
    """Adds `nanotf env` to the commands of a parser."""
    env = commands.add_parser(
        "env",
        help="print the environment variables that nanotf-init would set, or those of workers",
        description="Prints the environment variables that `source nanotf-init` would set, or "
        "with -n those of each worker. Changes nothing.",
        allow_abbrev=False,
    )
    add_json(env)
    env.add_argument(
        "-n",
        "--num-processes",
        type=whole_number,
        metavar="N",
        help="print the variables of N workers",
    )
    _add_options(env)
    env.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
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
    for found in [made, *(variables for _, variables in workers[:1])]:  # all workers warn alike
        _warn(found)
    return 0


def _as_json(
    made: environment.Environment,
    workers: Sequence[tuple[topology.Placement, environment.Environment]],
) -> dict[str, Any]:
    if not workers:
        return asdict(made)
    return {"workers": [{**asdict(place), **asdict(found)} for place, found in workers]}


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
        type=whole_number,
        metavar="N",
        help="use N cores in all; default: all usable cores",
    )


def _options(parsed: argparse.Namespace) -> shell_state.Options:
    return shell_state.Options(
        openmp=not parsed.disable_openmp,
        allocator=parsed.allocator or "auto",  # None if none of the three options is given
        onednn=not parsed.disable_onednn,
        perf=parsed.perf,
        cores=parsed.cores,
    )


def _warn(made: environment.Environment) -> None:
    for warning in made.warnings:
        say(f"warning: {warning}", sys.stderr)
