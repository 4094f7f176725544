"""The text of why a job failed, in the words of the SageMaker training toolkit."""

from __future__ import annotations

import pathlib
import signal
from collections.abc import Sequence

from nanotf.errors import kills_for_memory
from nanotf.machine import cgroups
from nanotf.sagemaker.jobs import record
from nanotf.wire import files

_KILLED = 128 + signal.SIGKILL
_KILL = "Process killed by SIGKILL (signal 9)"
_COMMAND_LENGTH = 250  # so that the end of standard error keeps its place in the reason
_BEGIN_LENGTH = 300  # of a text that is longer than the reason may be
_CUT = "\n[...]\n"


def memory_kills() -> int:
    """Returns how many processes the kernel has ended for lack of memory.

    Those of this control group; where no group counts them, those of this machine.
    """
    kills = cgroups.memory_kills(pathlib.Path("/"))
    return kills_for_memory() if kills is None else kills


def of_script(
    exit_code: int,
    errors: str | None,
    command: Sequence[str],
    host: str | None = None,
    *,
    lacked_memory: bool = False,
) -> str:
    """Returns the text for a script that ended with an exit code other than 0.

    Args:
        exit_code: as shells report it: 128 + n after signal n.
        errors: the end of its standard error; None leaves it out.
        command: its words.
        host: the host that it ran on; None in jobs with one host.
        lacked_memory: whether the kernel has ended processes meanwhile, since memory ran out.
    """
    lines = ["ExecuteUserScriptError:", f"ExitCode {exit_code}"]
    if errors is not None:
        lines.append(f'ErrorMessage "{errors}"')
    if exit_code == _KILLED:  # the signal by which the kernel takes memory back
        lines.append(f'ExtraInfo "{"OutOfMemory: " if lacked_memory else ""}{_KILL}"')
    if host is not None:
        lines.append(f'Host "{host}"')
    shown = " ".join(command)
    if len(shown) > _COMMAND_LENGTH:
        shown = f"{shown[:_COMMAND_LENGTH]}..."
    return "\n".join([*lines, f'Command "{shown}"']).strip()


def of_framework(traceback: str) -> str:
    """Returns the text for an error outside the script."""
    return f"Framework Error: \n{traceback}"


def write(path: pathlib.Path, text: str) -> str:
    """Writes `output/failure`, but for one that exists: the script's own says more.

    Returns:
        The reason, see `reason_of`.
    """
    if path.is_file():
        text = path.read_text(encoding="utf-8", errors="replace")
    else:
        files.write_text(path, text)
    return reason_of(text)


def reason_of(text: str) -> str:
    """Returns at most 1,024 characters of a text: its beginning, and its end.

    A traceback says at its end what went wrong.
    """
    if len(text) <= record.REASON_LENGTH:
        return text
    return text[:_BEGIN_LENGTH] + _CUT + text[_BEGIN_LENGTH + len(_CUT) - record.REASON_LENGTH :]
