"""The parts of a report that its reader must not see: home directory, secrets, names of hosts."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping
from typing import Any

from nanotf.machine.shell_state import STATE_VARIABLE

HIDDEN = "(set, not shown)"

# Names and beginnings of names of the variables that change how nanotf, TensorFlow or Keras runs.
_SHOWN = (
    *("CUDA_VISIBLE_DEVICES", "GLIBC_TUNABLES", "GOMP_", "KERAS_", "KMP_", "LD_PRELOAD"),
    *("MALLOC_CONF", "MKL_", "NANOTF_", "OMP_", "TCMALLOC_", "TF_", "XLA_FLAGS"),
)
# Terraform's variables begin with TF_, too. They hold passwords, and mean nothing to TensorFlow.
_TERRAFORM = ("TF_CLI_", "TF_CLOUD_", "TF_HTTP_", "TF_TOKEN_", "TF_VAR_")
# TF_CONFIG names the hosts of a cluster.
_SECRET = re.compile("^TF_CONFIG$|KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH")


def shown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that matter, sorted by name; `HIDDEN` replaces what may be a secret.

    `NANOTF_ENV` is left out, since it repeats the others.
    """
    return {
        name: HIDDEN if _SECRET.search(name) else value
        for name, value in sorted(environ.items())
        if name.startswith(_SHOWN) and not name.startswith((*_TERRAFORM, STATE_VARIABLE))
    }


def home_directory() -> str | None:
    """Returns the user's home directory, or None if there is none worth shortening."""
    try:
        home = pathlib.Path.home()
    except RuntimeError:  # a user without an entry in the password database
        return None
    return None if home == pathlib.Path(home.anchor) else str(home)


def shorten_home(value: Any, home: str | None) -> Any:
    """Replaces the home directory by ~ in each text of nested dicts and sequences.

    Returns plain dicts and lists, as JSON has them.

    Args:
        value: any plain value.
        home: str or None, the home directory; None replaces nothing.
    """
    if isinstance(value, dict):
        return {key: shorten_home(item, home) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [shorten_home(item, home) for item in value]
    if isinstance(value, str) and home is not None:
        return re.sub(rf"(?<![\w.~/-]){re.escape(home)}(?![\w.-])", "~", value)
    return value
