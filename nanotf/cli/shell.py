"""Lines for bash and zsh that `source nanotf-init` and `source nanotf-unset` evaluate.

The scripts only run `nanotf env --shell init` (or `unset`) and evaluate its output if it
succeeds. So either all of a shell's changes apply or none.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from nanotf.console import prefixed
from nanotf.errors import InvalidArgumentError
from nanotf.machine.cpus import Machine
from nanotf.machine.environment import Environment, initialised, shell_environment
from nanotf.machine.installed import Installed
from nanotf.machine.shell_state import STATE_VARIABLE, Options, read_state


def init_code(
    machine: Machine,
    environ: Mapping[str, str],
    options: Options,
    installed: Installed | None = None,
    *,
    quiet: bool = False,
) -> tuple[str, Environment]:
    """Returns the lines that export the best known configuration.

    Args:
        environ: the shell's environment.
        installed: None looks for it on this machine.
        quiet: True prints no table.

    Returns:
        The lines, and the `Environment` that they create.

    Raises:
        PlacementError: The machine has fewer cores than the options ask for.
    """
    found = shell_environment(machine, environ, options, installed)
    state = initialised(environ, options, found)[STATE_VARIABLE]
    # First restores the variables that only an earlier `nanotf-init` with other options has set.
    lines = [line for name, line in _restoring(environ) if name not in found.variables]
    lines += [_assign(name, value) for name, value in found.variables.items()]
    lines.append(_assign(STATE_VARIABLE, state))
    if not quiet:
        lines.append(say(prefixed(f"{machine.explain()}.") + f"\n{table(found)}"))
    return "\n".join(lines) + "\n", found


def unset_code(environ: Mapping[str, str], *, quiet: bool = False) -> str:
    """Returns the lines that restore the environment from before `nanotf-init`.

    A variable changed since then belongs to the user, and stays.

    Raises:
        InvalidArgumentError: `NANOTF_ENV` is not what `nanotf-init` wrote.
    """
    if STATE_VARIABLE not in environ:
        return "" if quiet else say(prefixed("nanotf-init has set nothing here.")) + "\n"
    state = read_state(environ)
    if state is None:
        raise InvalidArgumentError(
            f"{STATE_VARIABLE} must hold what nanotf-init wrote. Received: "
            f"{STATE_VARIABLE}={environ[STATE_VARIABLE]!r}. Unset it, and the variables that "
            "`nanotf env` lists."
        )
    restored = dict(_restoring(environ))
    lines = [*restored.values(), f"unset {STATE_VARIABLE}"]
    changed = [name for name in state.values if name not in restored]
    if not quiet:
        text = f"restored {', '.join(restored) or 'nothing'}."
        if changed:
            text += f" Changed by you since, and left alone: {', '.join(changed)}."
        lines.append(say(prefixed(text)))
    return "\n".join(lines) + "\n"


def table(environment: Environment) -> str:
    """Writes an environment as a table for people."""
    rows = [(name, value, "") for name, value in environment.variables.items()]
    rows += [(name, value, "  (yours, kept)") for name, value in environment.kept.items()]
    width = max((len(name) for name, _, _ in rows), default=0)
    return "\n".join(
        f"  {name:{width}}  {printable(value)}{note}" for name, value, note in sorted(rows)
    )


def printable(value: str) -> str:
    """Writes a user's value on one line, even if it has line ends and control characters."""
    return value if value.isprintable() else ascii(value)  # surrogates of odd bytes are not


def say(text: str) -> str:
    """Returns a line that prints a text in bash and zsh."""
    return f"printf '%s\\n' {shlex.quote(text)}"  # zsh's echo interprets backslashes


def _restoring(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns (name, line) for each variable that still has its value from `nanotf-init`."""
    state = read_state(environ)
    lines = []
    for name, before in state.before.items() if state else ():
        if state and environ.get(name) == state.values[name]:
            lines.append((name, f"unset {name}" if before is None else _assign(name, before)))
    return lines


def _assign(name: str, value: str) -> str:
    return f"export {name}={shlex.quote(value)}"
