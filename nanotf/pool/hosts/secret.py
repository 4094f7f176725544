"""The secret that all hosts of a run share.

1. NANOTF_SECRET, if it is set.
2. In a SageMaker job: a digest of the files that the platform gives to all containers of the job.
   They are as secret as the description of the job, and the job's network is private.
3. Otherwise a random secret in the user's home, made when it is first needed, which hosts with a
   common home directory share, as in most Slurm clusters.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import secrets
from collections.abc import Mapping

from nanotf.errors import NanoError

SECRET_VARIABLE = "NANOTF_SECRET"
_LENGTH = 32
_SHORTEST = 8  # characters of NANOTF_SECRET


def secret_of(environ: Mapping[str, str]) -> bytes:
    """Returns the secret of this run.

    Raises:
        NanoError: NANOTF_SECRET is too short, or the file with the secret cannot be used.
    """
    given = environ.get(SECRET_VARIABLE)
    if given is not None:
        if len(given) < _SHORTEST:
            raise NanoError(
                f"{SECRET_VARIABLE} must have at least {_SHORTEST} characters. Received: "
                f"{len(given)}. Make one: `export {SECRET_VARIABLE}=$(openssl rand -hex 16)`, and "
                "set it to the same value on all hosts."
            )
        # The inverse of how Python decodes variables: bytes that are not UTF-8 work, too.
        return hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
    arn = environ.get("TRAINING_JOB_ARN")
    if arn:
        return _of_job(arn, environ)
    home = pathlib.Path(environ.get("XDG_CONFIG_HOME") or pathlib.Path.home() / ".config")
    return _of_home(home / "nanotf" / "secret")


def _of_job(arn: str, environ: Mapping[str, str]) -> bytes:
    base = pathlib.Path(environ.get("SAGEMAKER_BASE_DIR") or "/opt/ml")
    digest = hashlib.sha256(arn.encode())
    for name in ("hyperparameters.json", "inputdataconfig.json"):
        with contextlib.suppress(OSError):
            digest.update((base / "input" / "config" / name).read_bytes())
    return digest.digest()


def _of_home(path: pathlib.Path) -> bytes:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        own = path.with_name(f"secret-{secrets.token_hex(8)}")
        fd = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(fd, "wb") as file:  # noqa: PTH123, a descriptor with the right mode
            file.write(secrets.token_bytes(_LENGTH))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(own, path)  # atomic: the first host's secret stays
        own.unlink()
        found = path.read_bytes()
        readable = path.stat().st_mode & 0o077
    except OSError as error:
        raise NanoError(
            "The hosts of a run need a common secret: NANOTF_SECRET, or a file in your home that "
            f"all of them share. Received: {type(error).__name__}: {error}. Set {SECRET_VARIABLE} "
            "to the same value on all hosts."
        ) from error
    if readable or len(found) != _LENGTH:
        raise NanoError(
            "Only you may read the secret of your runs, and it has 32 bytes. Received: "
            f"{path} with mode {path.stat().st_mode & 0o777:o} and {len(found)} bytes. Delete the "
            "file; nanotf makes a new one."
        )
    return found
