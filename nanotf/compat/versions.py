"""The installed TensorFlow and Keras, and checks that they train correctly."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from typing import Any

from nanotf.console import status
from nanotf.errors import UnsupportedVersionError

OLDEST_KERAS_3 = (3, 10)
TESTED_TENSORFLOW = (2, 14), (2, 21)  # the oldest and the newest


def parse_version(text: str) -> tuple[int, ...]:
    """Returns the leading numbers of a version: (3, 10, 0) for "3.10.0rc1"."""
    numbers: list[int] = []
    for part in text.split("."):
        digits = ""
        for character in part:
            if not character.isdigit():
                break
            digits += character
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


@functools.cache  # which also keeps AutoGraph from converting the machinery of imports
def require_tensorflow() -> Any:
    """Imports TensorFlow; returns the module.

    Raises:
        UnsupportedVersionError: No TensorFlow is installed.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise UnsupportedVersionError(
            "nanotf.keras needs an installed TensorFlow. Received: no module "
            "named 'tensorflow'. Install exactly one of: pip install 'nanotf[cpu]' "
            "(tensorflow-cpu), 'nanotf[intel]' (intel-tensorflow 2.14, Python up to 3.11) or "
            "'nanotf[gpu]' (tensorflow with CUDA)."
        )
    return importlib.import_module("tensorflow")


def import_visibly() -> None:
    """Imports TensorFlow and Keras, and tells the user so if that takes seconds.

    For calls in programs that may not have imported them. An import of nanotf prints nothing.
    """
    imported = sys.modules.keys()
    if "tensorflow" not in imported or not {"keras", "tf_keras"} & imported:
        with status("importing TensorFlow"):
            keras_module_name()


@functools.cache
def keras_module_name() -> str:
    """Returns the package that `tf.keras` comes from: "keras" or "tf_keras".

    Raises:
        UnsupportedVersionError: It cannot be imported.
    """
    tf = require_tensorflow()
    try:
        return str(tf.keras.Model.__module__.split(".")[0])
    except ImportError as error:
        why = keras_import_error() or error
        # Not from it: the chain of TensorFlow's and Keras's imports says no more.
        raise UnsupportedVersionError(
            "nanotf trains models of Keras on TensorFlow. Received: Keras cannot be imported: "
            f"{type(why).__name__}: {why}, with KERAS_BACKEND="
            f"{os.environ.get('KERAS_BACKEND', '')!r}. Set KERAS_BACKEND=tensorflow, or install "
            "keras."
        ) from None


def keras_import_error() -> ImportError | None:
    """Returns why Keras cannot be imported, which TensorFlow hides."""
    try:
        importlib.import_module("keras")
    except ImportError as error:
        return error
    return None


@functools.cache
def keras_version() -> tuple[int, ...]:
    """Returns the version of the package that `tf.keras` comes from."""
    return parse_version(importlib.import_module(keras_module_name()).__version__)


def is_keras_3() -> bool:
    """Returns True if `tf.keras` is Keras 3."""
    return keras_version() >= (3,)


def check_keras() -> None:
    """Rejects Keras versions that train incorrectly under a distribution strategy.

    Raises:
        UnsupportedVersionError: `tf.keras` is Keras 3 before 3.10: 3.3 never reduces
            gradients, 3.6 and 3.7 do not scale the loss, 3.8 reports wrong metrics.
    """
    version = keras_version()
    if (3,) <= version < OLDEST_KERAS_3:
        raise UnsupportedVersionError(
            "Keras 3 before 3.10 trains incorrectly with several workers, and raises no error. "
            f"Received: keras=={'.'.join(map(str, version))}. Upgrade with "
            "`pip install -U 'keras>=3.10'`, or use the legacy generation: "
            "`pip install --no-deps tf_keras` and TF_USE_LEGACY_KERAS=1."
        )


def check_backend() -> None:
    """Rejects a Keras that does not run on TensorFlow.

    Raises:
        UnsupportedVersionError: Keras 3 runs on another backend, or TensorFlow or Keras is missing.
    """
    if is_keras_3():
        backend = importlib.import_module("keras").backend.backend()
        if backend != "tensorflow":
            raise UnsupportedVersionError(
                "nanotf supports Keras only with the TensorFlow backend. Received: "
                f"keras.backend.backend()={backend!r}. Set KERAS_BACKEND=tensorflow."
            )
