"""Classes and attributes of models, as Keras and the user see them."""

from __future__ import annotations

from typing import Any

_KERAS_PACKAGES = ("keras", "tf_keras", "tensorflow", "nanotf")


def original_class(cls: type) -> type:
    """Returns the user's or Keras's class behind a class that `accelerate` made."""
    original: type = vars(cls).get("_nanotf_original", cls)
    return original


def is_foreign(value: Any) -> bool:
    """Returns True if Keras in another process would not know a class or function."""
    package = (getattr(value, "__module__", None) or "").split(".")[0]
    return package not in _KERAS_PACKAGES
