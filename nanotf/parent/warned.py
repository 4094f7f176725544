"""Warnings of workers, given by this process, unless it has given the same itself.

Keras warns while it builds and traces a model. A part of that happens here, and all of it in each
worker, of which the first one's warnings arrive.
"""

from __future__ import annotations

import collections
import functools
import logging
import sys
import warnings
from typing import Any

from nanotf.console import LIBRARIES
from nanotf.wire import messages

_KEPT = 256  # of the latest; an older one may be given twice
_given: collections.deque[tuple[str, str]] = collections.deque(maxlen=_KEPT)  # logger and text


def _note(record: logging.LogRecord) -> bool:
    if record.levelno >= logging.WARNING:
        _given.append((record.name, record.getMessage()))
    return True  # a filter that only listens


@functools.cache
def listen() -> None:
    """Begins to note what the loggers of Keras and TensorFlow say."""
    for each in LIBRARIES.values():
        each.addFilter(_note)


def give(message: messages.Warned | messages.Logged) -> None:
    """Gives a worker's warning."""
    if isinstance(message, messages.Logged):
        if (message.logger, message.text) not in _given:
            LIBRARIES[message.logger].log(message.level, "%s", message.text)
        return
    # Python's own note of what it has shown: once for each text and line, unless filters say else.
    warnings.warn_explicit(
        message.text,
        message.category,
        message.file,
        message.line,
        registry=_registry_of(message.file),
    )


def _registry_of(file: str) -> dict[Any, Any]:
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == file:
            found: dict[Any, Any] = vars(module).setdefault("__warningregistry__", {})
            return found
    return {}  # the module is not loaded here, so that nothing is noted
