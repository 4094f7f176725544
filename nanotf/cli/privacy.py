"""Hides the private parts of a report: home directory, secrets, names of hosts."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from nanotf.machine.shell_state import STATE_VARIABLE

HIDDEN = "(set, not shown)"

# Beginnings of the names of variables that change how nanotf, TensorFlow or Keras runs.
_NAMED = (
    *("CUDA_VISIBLE_DEVICES", "GLIBC_TUNABLES", "GOMP_", "KERAS_", "KMP_", "LD_PRELOAD"),
    *("MALLOC_CONF", "MKL_", "NANOTF_", "OMP_", "TCMALLOC_", "TF_", "XLA_FLAGS"),
)
# Those of them whose values hold numbers, choices and paths. Of all others only names are shown:
# whoever made them up may have put a host's name or a password into one.
_SHOWN = re.compile(
    "CUDA_VISIBLE_DEVICES|GLIBC_TUNABLES|KERAS_BACKEND|LD_PRELOAD|MALLOC_CONF|XLA_FLAGS"
    "|(GOMP|KMP|OMP)_[A-Z_]+|MKL_(NUM_THREADS|DYNAMIC|CBWR|ENABLE_INSTRUCTIONS)"
    "|TCMALLOC_(RELEASE_RATE|LARGE_ALLOC_REPORT_THRESHOLD|MAX_TOTAL_THREAD_CACHE_BYTES)"
    "|NANOTF_(IDLE_SECONDS|JOBS|JOIN_SECONDS|NATIVE|PORT|RANK|STALL_SECONDS|START|VECTORS)"
    "|TF_(CPP_[A-Z_]+|CUDNN_DETERMINISTIC|DETERMINISTIC_OPS|DISABLE_MKL|ENABLE_ONEDNN_OPTS"
    "|ENABLE_ZENDNN_OPTS|FORCE_GPU_ALLOW_GROWTH|GPU_ALLOCATOR|GPU_THREAD_MODE"
    "|NUM_INTEROP_THREADS|NUM_INTRAOP_THREADS|ONEDNN_[A-Z_]+|USE_LEGACY_KERAS|XLA_FLAGS)"
)
# Terraform's variables also begin with TF_; TensorFlow ignores them.
_TERRAFORM = ("TF_CLI_", "TF_CLOUD_", "TF_HTTP_", "TF_TOKEN_", "TF_VAR_")
_USER_OF_ADDRESS = re.compile(r"(?<=://)[^/\s]*@")


def shown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that matter, sorted by name; `HIDDEN` replaces most values.

    `NANOTF_ENV` is left out, since it repeats the others.
    """
    return {
        name: value if _SHOWN.fullmatch(name) else HIDDEN
        for name, value in sorted(environ.items())
        if name.startswith(_NAMED) and not name.startswith((*_TERRAFORM, STATE_VARIABLE))
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
    # In some containers the home directory is /, with which all paths begin.
    return tuple(sorted(str(path) for path in paths if path != pathlib.Path(path.anchor)))


def redacted(value: Any, homes: Sequence[str]) -> Any:
    """Replaces the home directory by ~, and drops users from addresses, in nested dicts and lists.

    Returns plain dicts and lists, as JSON has them.

    Args:
        value: a value that JSON can hold; tuples are allowed.
        homes: the paths of the home directory, see `home_directories`.
    """
    if isinstance(value, dict):
        return {key: redacted(item, homes) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item, homes) for item in value]
    if isinstance(value, str):
        value = _USER_OF_ADDRESS.sub("", value)
        for home in homes:
            # A home /home/ann is no part of /srv/home/ann or /home/anna.
            value = re.sub(rf"(?<![\w.~/-]){re.escape(home)}(?![\w.-])", "~", value)
    return value
