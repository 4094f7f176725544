"""Hyperparameters as JSON text, as arguments of a script, and as typed values.

The rules are those of the SageMaker training toolkit (its mapping.py, its params.py, and
read_hyperparameters of its environment.py). In `hyperparameters.json` each value is JSON text:
`{"epochs": "10", "opt": "\\"adam\\""}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from nanotf.console import logger
from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError

PLATFORM_PREFIX = "sagemaker_"
# These configure the container and are neither arguments nor framework parameters.
PLATFORM_NAMES = frozenset(
    {
        "sagemaker_program",
        "sagemaker_submit_directory",
        "sagemaker_enable_cloudwatch_metrics",
        "sagemaker_region",
        "sagemaker_container_log_level",
        "sagemaker_job_name",
        "default_user_module_name",
        "_tuning_objective_metric",
        "sagemaker_s3_output",
    }
)


def encode(values: Mapping[str, Any]) -> dict[str, str]:
    """Writes each value as JSON text.

    Raises:
        InvalidArgumentTypeError: JSON cannot hold a value.
    """
    encoded = {}
    for name, value in values.items():
        try:
            encoded[str(name)] = json.dumps(value)
        except (TypeError, ValueError):
            raise InvalidArgumentTypeError(
                "A hyperparameter must be a number, a text, a boolean, None, or lists and dicts "
                f"of these. Received: {name}={value!r}. Convert it, for instance with "
                "float() or str()."
            ) from None
    return encoded


def decode(texts: Mapping[str, Any]) -> dict[str, Any]:
    """Reads values from JSON text. A text that is no JSON is the value itself."""
    return {name: parse(text) for name, text in texts.items()}


def parse(text: Any) -> Any:
    """Reads one value: JSON, or else the text itself."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):  # the last for a thousand brackets
        return text


def parse_options(options: Iterable[str]) -> dict[str, Any]:
    """Reads the options `-p name=value` of the command line, so that scripts get what was typed.

    A number that prints otherwise, such as 1.10 or 12e3, stays a text. SageMaker passes 1.1 and
    12000.0; a warning says so.

    Raises:
        InvalidArgumentError: A text has no name or no "=", or two have the same name.
    """
    values: dict[str, Any] = {}
    for option in options:
        name, equals, text = option.partition("=")
        if not name or not equals:
            raise InvalidArgumentError(
                f"A hyperparameter must be written as name=value. Received: -p {option}."
            )
        if name in values:
            raise InvalidArgumentError(
                f"A hyperparameter must be given once. Received: -p {name}= twice."
            )
        values[name] = _typed(text)
    _warn_of_numbers(values)
    return values


def _typed(text: str) -> Any:
    value = parse(text)
    # True is an int, but `true` is to become a boolean.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return text if is_number and str(value) != text else value


def _warn_of_numbers(values: Mapping[str, Any]) -> None:
    """Warns about texts that SageMaker reads as numbers."""
    found = [
        f"{name}={value} (SageMaker passes {number})"
        for name, value in values.items()
        if isinstance(value, str)
        and isinstance(number := parse(value), int | float)
        and not isinstance(number, bool)
    ]
    if found:
        logger.warning(
            "A script receives the value of -p as it was typed. Received: %s. Type what SageMaker "
            "passes to have the same here and there.",
            ", ".join(found),
        )


def is_platform(name: str) -> bool:
    """Returns True for a hyperparameter that drives the platform rather than the script."""
    return name in PLATFORM_NAMES or name.startswith(PLATFORM_PREFIX)


def of_script(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the hyperparameters that a script receives as arguments."""
    return {name: value for name, value in values.items() if not is_platform(name)}


def of_framework(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the hyperparameters that drive the framework: `SM_FRAMEWORK_PARAMS`."""
    return {n: v for n, v in values.items() if is_platform(n) and n not in PLATFORM_NAMES}


def to_arguments(values: Mapping[str, Any]) -> list[str]:
    """Writes hyperparameters as arguments of a script.

    Sorted by name. A name of one letter gets one dash, others get two. Each value is one
    argument: a dict as "k=v,k2=v2" sorted by key, None as "", anything else as its `str`.
    """
    arguments = []
    for name in sorted(values):
        dashes = "--" if len(name) > 1 else "-"
        # An empty name becomes an empty word, as in the toolkit.
        arguments += [f"{dashes}{name}" if name else "", _argument(values[name])]
    return arguments


def _argument(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{key}={item}" for key, item in sorted(value.items()))
    return "" if value is None else str(value)


def warn_of_booleans(values: Mapping[str, Any]) -> None:
    """Warns about booleans: a script receives the text, and argparse's `bool` misreads "False"."""
    found = [
        f"{name}={value}"
        for name, value in of_script(values).items()
        if isinstance(value, bool) or value in _BOOLEAN_TEXTS
    ]
    if found:
        logger.warning(
            "A script receives a boolean hyperparameter as the text True or False, and argparse's "
            'type=bool makes True of the text "False". Received: %s. Pass 0 or 1 with type=int, '
            "or read nanotf.job().hyperparameters.",
            ", ".join(found),
        )


_BOOLEAN_TEXTS = ("True", "False")  # Python's words, no JSON: -p x=True stays a text
