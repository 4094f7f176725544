"""Fixtures of tests with real TensorFlow and real workers: `e2e` and `programs`.

The Keras generation is fixed when TensorFlow is imported, so a run tests one of them:

    pytest tests/e2e                            TensorFlow's default: Keras 3 from 2.16 on
    TF_USE_LEGACY_KERAS=1 pytest tests/e2e      tf_keras

`make test` runs a sample of both, `make test-all` all tests.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest

import nanotf
from nanotf.pool import backends, transports, warm

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Less than the limit of a test (pyproject.toml), so that a hanging job prints its stacks first.
os.environ.setdefault("NANOTF_STALL_SECONDS", "200")


def pytest_report_header() -> str:
    import tensorflow as tf

    package = tf.keras.Model.__module__.split(".")[0]
    version = importlib.import_module(package).__version__
    return f"tensorflow {tf.__version__}, tf.keras is {package} {version}"


def is_real(path: pathlib.Path) -> bool:
    """Returns True if a test file uses real workers."""
    return path.parent.name in ("e2e", "programs")


def _why_not() -> str | None:
    """Returns the reason why these tests cannot run here, if there is one."""
    if os.environ.get("TF_USE_LEGACY_KERAS") == "1" and not importlib.util.find_spec("tf_keras"):
        return "TF_USE_LEGACY_KERAS=1, and tf_keras is not installed"
    try:
        nanotf.plan(2)
    except nanotf.errors.PlacementError as error:
        return f"two workers need two cores: {error}"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_not()
    if reason is not None:
        for item in items:
            if is_real(item.path):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def pool_of_module(request: pytest.FixtureRequest) -> None:
    """Two warm workers; none for a module marked `own_pool`."""
    if request.node.get_closest_marker("own_pool"):
        warm.end_pool()
    elif _why_not() is None:
        with warm.pool_for(backends.plan(None, 2, None, None), transports.DEFAULT_TRANSPORT):
            pass


@pytest.fixture(autouse=True, scope="session")
def _iterators_end_at_once() -> Iterator[None]:
    """Turns tf.data's autotuner off in this process, for the runs of plain Keras.

    Dropping an iterator waits for the autotuner's sleep, which lasts as long as the iterator has
    lived: seconds at every epoch's end, and a minute in a garbage collection after a module.
    """
    import tensorflow as tf

    stock = tf.data.Dataset.__iter__

    def __iter__(self: Any) -> Any:
        options = tf.data.Options()
        options.autotune.enabled = False
        return stock(self.with_options(options))

    tf.data.Dataset.__iter__ = __iter__
    yield
    tf.data.Dataset.__iter__ = stock


@pytest.fixture(autouse=True)
def _keras_as_new() -> Iterator[None]:
    """Restores Keras's global settings after a test that changed them."""
    import tensorflow as tf

    yield
    tf.keras.backend.set_floatx("float32")
    tf.keras.mixed_precision.set_global_policy("float32")


@pytest.fixture
def float64() -> None:
    """Makes the test compute in float64; the next test is back at float32."""
    import tensorflow as tf

    tf.keras.backend.set_floatx("float64")
    tf.keras.mixed_precision.set_global_policy("float64")
