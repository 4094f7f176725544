"""The configuration of smp, with the original's keys, defaults, rules and texts of errors."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError, UnavailableError

VARIABLE = "SM_HP_MP_PARAMETERS"  # SageMaker sets it to a job's hyperparameter mp_parameters
CHOICES = {
    "pipeline": ("interleaved", "simple", "_only_forward"),
    "placement_strategy": ("cluster", "spread"),
    "optimize": ("memory", "speed"),
    "auto_partition": (True, False),
    "contiguous": (True, False),
    "horovod": (True, False),
    "load_partition": (True, False),
    "xla": (True, False),
    "ddp": (True, False),
    "deterministic_server": (True, False),
}
POSITIVE = ("partitions", "microbatches", "active_microbatches")
_UNAVAILABLE = {  # True is refused
    "horovod": "StepOutput.accumulate() averages over the copies of the model, so a script needs "
    "neither this key nor hvd.allreduce. Leave out both",
    "load_partition": "A model is divided anew in each run. Leave it out",
}
_WITHOUT_EFFECT = (
    ("contiguous", True, "each partition is one piece of the model's call"),
    ("partition_file", None, "a model is divided anew in each run"),
    ("xla", False, "tf.function(jit_compile=True) in the model's call compiles that part"),
    ("ddp", False, "StepOutput.accumulate() averages over the copies of the model"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """A checked configuration; `check` makes it."""

    partitions: int  # of the model
    microbatches: int = 1  # of a batch
    pipeline: str = "interleaved"  # or "simple" (see `schedule`), or "_only_forward"
    placement_strategy: str = "cluster"  # or "spread"; see `rank_groups`
    optimize: str = "memory"  # or "speed"; sets the default of `memory_weight` alone
    auto_partition: bool = True  # False requires `default_partition`
    # The partition of operations outside `smp.partition`; without effect with `auto_partition`.
    default_partition: int | None = None
    contiguous: bool = True  # False has no effect
    # 0.0 balances computing times, 1.0 the bytes of variables. The default with
    # `optimize="speed"` is 0.2.
    memory_weight: float = 0.8
    active_microbatches: int = 0  # the most in flight; `check` sets the default, `partitions + 2`
    horovod: bool = False  # True is refused
    load_partition: bool = False  # True is refused
    partition_file: str | None = None  # has no effect
    xla: bool = False  # True has no effect
    ddp: bool = False  # True has no effect
    deterministic_server: bool = False  # the order of a step is always that of `schedule`

    def without_effect(self) -> list[str]:
        """Returns a line for each key whose value has no effect here."""
        return [
            f"smp.init: {key}={getattr(self, key)!r} has no effect: {reason}."
            for key, plain, reason in _WITHOUT_EFFECT
            if getattr(self, key) != plain
        ]


def load(given: Any, environ: Mapping[str, str]) -> Config:
    """Returns the configuration of `smp.init`.

    Args:
        given: a dict, or None to read `SM_HP_MP_PARAMETERS` (JSON).
        environ: environment variables.

    Raises:
        InvalidArgumentError, InvalidArgumentTypeError: It breaks a rule.
        UnavailableError: It asks for something that nanotf does not have.
    """
    if given is not None:
        return check(given)
    text = environ.get(VARIABLE)
    if text is None:
        raise InvalidArgumentError(
            "smp.init() needs a configuration. Received: config=None, and no environment variable "
            f'{VARIABLE}. Pass smp.init({{"partitions": 1, "microbatches": 4}}), or set the '
            "variable to such a dict in JSON."
        )
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidArgumentError(
            f"{VARIABLE} must hold a dict in JSON. Received: {VARIABLE}={text!r} ({error})."
        ) from None
    return check(found)


def check(given: Any) -> Config:
    """Checks a configuration; see `load`."""
    if not isinstance(given, Mapping):
        raise InvalidArgumentTypeError(
            f"smp's configuration must be a dict. Received: config={given!r}."
        )
    known = [field.name for field in dataclasses.fields(Config)]
    for key in given:
        if key not in known:
            raise InvalidArgumentError(
                f"smp's configuration has the keys {', '.join(known)}. Received: the key {key!r}."
            )
    if "partitions" not in given:
        raise InvalidArgumentError(
            f"smp's configuration must contain 'partitions'. Received: {dict(given)!r}."
        )
    _check_values(given)
    filled = dict(given)
    filled.setdefault("active_microbatches", given["partitions"] + 2)
    filled.setdefault("memory_weight", 0.2 if given.get("optimize") == "speed" else 0.8)
    return Config(**filled)


def _check_values(given: Mapping[str, Any]) -> None:
    for key in POSITIVE:
        if key in given and (not is_int(given[key]) or given[key] < 1):
            raise InvalidArgumentError(
                f"The number of {key} must be a positive integer. Received: {key}={given[key]!r}."
            )
    for key, values in CHOICES.items():
        wrong = key in given and (
            # 1 and 0 equal True and False, but are not accepted for them.
            given[key] not in values or isinstance(values[0], bool) != isinstance(given[key], bool)
        )
        if wrong:
            raise InvalidArgumentError(
                f"{key} must be a value in: {list(values)}. Received: {key}={given[key]!r}."
            )
    file = given.get("partition_file")
    if file is not None and not isinstance(file, str):
        raise InvalidArgumentTypeError(
            f"'partition_file' must be a str. Received: partition_file={file!r}."
        )
    _check_default_partition(given)
    weight = given.get("memory_weight", 0.8)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight <= 1:
        raise InvalidArgumentError(
            f"memory_weight must be between 0.0 and 1.0! Received: memory_weight={weight!r}."
        )
    for key, remedy in _UNAVAILABLE.items():
        if given.get(key):
            raise UnavailableError(
                f"nanotf.smp has no support for {key}. Received: {key}={given[key]!r}. {remedy}."
            )


def _check_default_partition(given: Mapping[str, Any]) -> None:
    default, partitions = given.get("default_partition"), given["partitions"]
    if default is None:
        if not given.get("auto_partition", True):
            raise InvalidArgumentError(
                "default_partition must be supplied if auto_partition is set to False! "
                "Received: default_partition=None."
            )
    elif not is_int(default) or default < 0 or default >= partitions:
        raise InvalidArgumentError(
            "default_partition must be an integer of 0 or more, and must be less than the number "
            f"of partitions! Received: default_partition={default!r}, partitions={partitions}."
        )


def is_int(value: Any) -> bool:
    """Returns True for an int that is no bool."""
    return isinstance(value, int) and not isinstance(value, bool)
