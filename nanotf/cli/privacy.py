"""Hides the private parts of a report: home directory, secrets, names of hosts."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nanotf.machine.shell_state import STATE_VARIABLE

HIDDEN = "(set, not shown)"

# Names and beginnings of names of the variables that change how nanotf, TensorFlow or Keras runs.
_SHOWN = (
    *("CUDA_VISIBLE_DEVICES", "GLIBC_TUNABLES", "GOMP_", "KERAS_", "KMP_", "LD_PRELOAD"),
    *("MALLOC_CONF", "MKL_", "NANOTF_", "OMP_", "TCMALLOC_", "TF_", "XLA_FLAGS"),
)
# Terraform's variables also begin with TF_. They may hold passwords; TensorFlow ignores them.
_TERRAFORM = ("TF_CLI_", "TF_CLOUD_", "TF_HTTP_", "TF_TOKEN_", "TF_VAR_")
# TF_CONFIG names the hosts of a cluster.
_SECRET = re.compile("^TF_CONFIG$|KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)


def shown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that matter, sorted by name; `HIDDEN` replaces possible secrets.

    `NANOTF_ENV` is left out, since it repeats the others.
    """
    return {
        name: HIDDEN if _SECRET.search(name) else value
        for name, value in sorted(environ.items())
        if name.startswith(_SHOWN) and not name.startswith((*_TERRAFORM, STATE_VARIABLE))
    }


def home_directories() -> tuple[str, ...]:
    """Returns the paths of the user's home directory; empty if none is worth shortening.

    A home directory on a file server is often a link, and paths of programs then follow it.
    """
    try:
        home = pathlib.Path.home()
        paths = {home, home.resolve()}
    except (RuntimeError, OSError):  # a user without an entry in the password database
        return ()
    return tuple(sorted(str(path) for path in paths if path != pathlib.Path(path.anchor)))


def shorten_home(value: Any, homes: Sequence[str]) -> Any:
    """Replaces the home directory by ~ in each text of nested dicts and sequences.

    Returns plain dicts and lists, as JSON has them.

    Args:
        value: any plain value.
        homes: sequence of str, the paths of the home directory.
    """
    if isinstance(value, dict):
        return {key: shorten_home(item, homes) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shorten_home(item, homes) for item in value]
    if isinstance(value, str):
        for home in homes:
            value = re.sub(rf"(?<![\w.~/-]){re.escape(home)}(?![\w.-])", "~", value)
    return value
