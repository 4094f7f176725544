"""The text of why a job failed, in the words of the SageMaker training toolkit."""

from __future__ import annotations

import pathlib
import signal
from collections.abc import Sequence

from nanotf.sagemaker.jobs import record
from nanotf.wire import files

_KILLED = 128 + signal.SIGKILL
_OUT_OF_MEMORY = "OutOfMemory: Process killed by SIGKILL (signal 9)"


def of_script(
    exit_code: int, errors: str | None, command: Sequence[str], host: str | None = None
) -> str:
    """Returns the text for a script that ended with an exit code other than 0.

    Args:
        exit_code: as shells report it: 128 + n after signal n.
        errors: the end of its standard error; None leaves it out.
        command: its words.
        host: the host that it ran on; None in jobs with one host.
    """
    lines = ["ExecuteUserScriptError:", f"ExitCode {exit_code}"]
    if errors is not None:
        lines.append(f'ErrorMessage "{errors}"')
    if exit_code == _KILLED:
        lines.append(f'ExtraInfo "{_OUT_OF_MEMORY}"')
    if host is not None:
        lines.append(f'Host "{host}"')
    return "\n".join([*lines, f'Command "{" ".join(command)}"']).strip()


def of_framework(traceback: str) -> str:
    """Returns the text for an error outside the script."""
    return f"Framework Error: \n{traceback}"


def write(path: pathlib.Path, text: str) -> str:
    """Writes `output/failure`, but for one that exists: the script's own says more.

    Returns:
        The reason: the first 1,024 characters of the file.
    """
    if path.is_file():
        text = path.read_text(encoding="utf-8", errors="replace")
    else:
        files.write_text(path, text)
    return text[: record.REASON_LENGTH]
