"""The variables by which SageMaker configures a container that serves.

SageMaker starts a container as `docker run IMAGE serve`. `nanotf serve` without a model then serves
the folder that these variables name, on all interfaces.

| variable | if not set | meaning here |
| --- | --- | --- |
| SAGEMAKER_BIND_TO_PORT | 8080 | port |
| SAGEMAKER_BASE_DIR | /opt/ml | holds the folder `model`, or `models` |
| SAGEMAKER_MULTI_MODEL | false | models come and go by POST and DELETE of `/models` |
| SAGEMAKER_TFS_DEFAULT_MODEL_NAME | | the default model |
| SAGEMAKER_MODEL_SERVER_WORKERS | | workers |
| SAGEMAKER_TFS_INSTANCE_COUNT | | workers, if the above is not set |
| SAGEMAKER_TFS_INTRA_OP_PARALLELISM | 0 | threads of a worker; 0 for nanotf's choice |
| SAGEMAKER_TFS_ENABLE_BATCHING | false | true: the next two count; false: nanotf's own batches |
| SAGEMAKER_TFS_MAX_BATCH_SIZE | 8 | rows of a batch |
| SAGEMAKER_TFS_MAX_ENQUEUED_BATCHES | | batches of that many rows that may wait |
| SAGEMAKER_MODEL_SERVER_TIMEOUT | 60 | s that a request may take |
| SAGEMAKER_TFS_WAIT_TIME_SECONDS | 300 | s until the models are loaded |
| SAGEMAKER_STARTUP_TIMEOUT | | the same, if the above is not set |
| SAGEMAKER_MAX_PAYLOAD_IN_MB | 100 | MiB of a body |
| SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT | application/json | answers for a client that takes any |
| SAGEMAKER_PROGRAM | inference.py | the user's code; must be this |

An empty variable counts as unset. Not read, since nothing here is configured by them: the variables
of nginx and gunicorn; SAGEMAKER_TFS_INTER_OP_PARALLELISM; SAGEMAKER_TFS_BATCH_TIMEOUT_MICROS, since
no batch waits for a timer; SAGEMAKER_TFS_NUM_BATCH_THREADS, since each worker computes one batch.
Sources: README and `serve.py` of aws/sagemaker-tensorflow-serving-container; `parameters.py` of
aws/sagemaker-inference-toolkit.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping

from nanotf.errors import InvalidArgumentError
from nanotf.sagemaker.serving.media_types import ANSWERS
from nanotf.serving.interface import JSON
from nanotf.serving.repository.model_layouts import SCRIPT

_LAST_PORT = 65535
_MIB = 2**20
_BATCH = 8  # rows, TensorFlow Serving's default in these containers


@dataclasses.dataclass(frozen=True)
class ContainerSettings:
    """A server's settings; None for the server's own default."""

    folder: pathlib.Path  # that is served
    port: int
    multi_model: bool
    default_model: str | None
    workers: int | None
    threads: int | None  # of a worker
    max_batch: int | None  # rows
    queue: int | None  # rows that may wait
    timeout: float  # s, of a request
    start_timeout: float  # s, until the models are loaded
    max_body: int  # bytes
    accept: str  # the type of an answer for a client that takes any


def from_environment(environ: Mapping[str, str]) -> ContainerSettings:
    """Reads the settings of a container.

    Args:
        environ: its environment.

    Raises:
        InvalidArgumentError: A variable has a value that cannot be used.
    """
    given = {name: value for name, value in environ.items() if value}
    multi_model = _boolean(given, "SAGEMAKER_MULTI_MODEL")
    base = pathlib.Path(given.get("SAGEMAKER_BASE_DIR", "/opt/ml"))
    max_batch, queue = _batches(given)
    _check_choice(given, "SAGEMAKER_PROGRAM", (SCRIPT,))
    _check_choice(given, "SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT", ANSWERS)
    start = ("SAGEMAKER_TFS_WAIT_TIME_SECONDS", "SAGEMAKER_STARTUP_TIMEOUT")
    workers = ("SAGEMAKER_MODEL_SERVER_WORKERS", "SAGEMAKER_TFS_INSTANCE_COUNT")
    return ContainerSettings(
        folder=base / ("models" if multi_model else "model"),
        port=_number(given, "SAGEMAKER_BIND_TO_PORT", most=_LAST_PORT) or 8080,
        multi_model=multi_model,
        default_model=given.get("SAGEMAKER_TFS_DEFAULT_MODEL_NAME"),
        workers=_first(given, workers),
        threads=_number(given, "SAGEMAKER_TFS_INTRA_OP_PARALLELISM", least=0) or None,
        max_batch=max_batch,
        queue=queue,
        timeout=float(_number(given, "SAGEMAKER_MODEL_SERVER_TIMEOUT") or 60),
        start_timeout=float(_first(given, start) or 300),
        max_body=(_number(given, "SAGEMAKER_MAX_PAYLOAD_IN_MB") or 100) * _MIB,
        accept=given.get("SAGEMAKER_DEFAULT_INVOCATIONS_ACCEPT", JSON),
    )


def _batches(given: Mapping[str, str]) -> tuple[int | None, int | None]:
    """Returns the rows of a batch and of the queue."""
    size = _number(given, "SAGEMAKER_TFS_MAX_BATCH_SIZE") or _BATCH
    waiting = _number(given, "SAGEMAKER_TFS_MAX_ENQUEUED_BATCHES")
    # After both are read: a wrong number is refused even where it does not count.
    if not _boolean(given, "SAGEMAKER_TFS_ENABLE_BATCHING"):
        return None, None
    return size, waiting and waiting * size  # the variable counts batches, the queue rows


def _boolean(given: Mapping[str, str], name: str) -> bool:
    text = given.get(name, "false").lower()
    if text not in ("true", "false"):
        raise InvalidArgumentError(f"{name} must be 'true' or 'false'. Received: {given[name]!r}.")
    return text == "true"


def _number(
    given: Mapping[str, str], name: str, least: int = 1, most: int | None = None
) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    # `int` would also take "+8", "1_000" and the digits of other scripts.
    number = int(text) if text.isascii() and text.isdigit() else -1
    if number < least or (most is not None and number > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise InvalidArgumentError(f"{name} must be a number {limits}. Received: {text!r}.")
    return number


def _first(given: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    numbers = [_number(given, name) for name in names]  # all are checked
    return next((number for number in numbers if number is not None), None)


def _check_choice(given: Mapping[str, str], name: str, choices: tuple[str, ...]) -> None:
    if name in given and given[name] not in choices:
        raise InvalidArgumentError(
            f"{name} must be one of {', '.join(choices)}. Received: {given[name]!r}. Change or "
            "unset it."
        )
