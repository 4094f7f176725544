"""A Keras that cannot be imported, as with KERAS_BACKEND=jax where JAX is missing."""

from __future__ import annotations

import sys

import pytest

from nanotf.compat import versions
from nanotf.errors import UnsupportedVersionError


class _TensorFlow:
    @property
    def keras(self) -> object:
        raise ImportError("Keras cannot be imported. Check that it is installed.")


def test_the_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    monkeypatch.setitem(sys.modules, "keras", None)
    monkeypatch.setattr(versions, "require_tensorflow", _TensorFlow)
    with pytest.raises(UnsupportedVersionError, match=r"KERAS_BACKEND='jax'. Set.*=tensorflow"):
        versions.keras_module_name.__wrapped__()
