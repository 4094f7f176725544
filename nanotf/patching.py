"""`nanotf.patch_tensorflow()`: models that others make take `num_processes`, without a new import.

Two things are changed, and put back by `unpatch_tensorflow()`:

1. `__new__` of Keras's `Model`. Whoever makes a model, the user, a library that has imported
   its names long ago, `tf.keras.applications`, `load_model`, gets one of nanotf's class for it.
2. The public names of Keras's classes, in all modules that have them (`tf.keras`,
   `tf.keras.models`, `keras` where `tf.keras` is the same generation), become nanotf's, so that a
   class that is defined from now on derives from nanotf's. `isinstance` and `issubclass` mean
   the same as before: see `models.in_place_of`.

Models that exist already are not touched, and those that were made in between keep what they
have. Saved models name Keras's classes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from nanotf import models, processor
from nanotf.compat import keras_names
from nanotf.compat.versions import check_keras, keras_module_name, require_tensorflow
from nanotf.precision import check_precision

_keras_new: Any = None  # what `vars(Model)` had for `__new__`, while patched
_policy_before: tuple[Any] | None = None  # the global dtype policy, while nanotf's is set


def patch_tensorflow(precision: str = "float32") -> None:
    """Makes every Keras model that is made from now on take `num_processes`.

    Patching twice is the same as once; the second call's `precision` counts.

    Args:
        precision: str, default "float32", which leaves Keras's global dtype policy as it is.
            "mixed_bfloat16" sets it: layers that are made from now on compute in bfloat16, and
            keep their variables in float32.

    Raises:
        InvalidArgumentError: There is no such precision.
        UnsupportedVersionError: The installed Keras is one that trains wrongly.

    Example:
        >>> nanotf.patch_tensorflow()
        >>> model = tf.keras.applications.MobileNetV2()
        >>> model.compile("sgd", "sparse_categorical_crossentropy")
        >>> model.fit(images, labels, num_processes=4)
    """
    global _keras_new
    check_precision(precision)
    check_keras()
    if _keras_new is None:
        keras_model = keras_names.model_class()
        _keras_new = vars(keras_model)["__new__"]
        keras_model.__new__ = models.accelerated_new(keras_model.__new__)
        replacements = _replacements()
        models.in_place_of.update({ours: keras for keras, ours in replacements.items()})
        _rename(replacements)
    _set_policy(precision)


def unpatch_tensorflow() -> None:
    """Undoes `patch_tensorflow`. Does nothing where nothing is patched.

    The global dtype policy of before is put back, unless it was changed since.
    """
    global _keras_new
    _set_policy("float32")
    if _keras_new is not None:
        keras_names.model_class().__new__ = _keras_new
        _keras_new = None
        _rename(models.in_place_of)
        models.in_place_of.clear()


def is_patched() -> bool:
    """Whether `patch_tensorflow` is in force."""
    return _keras_new is not None


def _replacements() -> dict[type, type]:
    """nanotf's class for each public class of Keras's that it replaces."""
    # The place for nanotf's Embedding and SparseAdam: a class that is listed here takes the
    # public names of the other. A class that is no model also needs an `isinstance` that still
    # means Keras's, see `models._Kind`.
    return {
        keras_names.model_class(): models.Model,
        keras_names.sequential_class(): models.Sequential,
    }


def _rename(replacements: Mapping[type, type]) -> None:
    """Puts classes in the place of others under all their public names."""
    for names in _public_namespaces():
        for name, value in list(names.items()):
            if isinstance(value, type) and value in replacements:
                names[name] = replacements[value]


def _public_namespaces() -> Iterator[dict[str, Any]]:
    """The names of Keras's public modules, as far as they were imported.

    They are changed as dicts: `tf.keras` itself is a lazy loader with a copy of its module's
    names, which would also add whatever is set to its `__all__`.
    """
    loader = require_tensorflow().keras
    loader.models  # noqa: B018 - it has loaded, and copied the names
    yield vars(loader)
    # `from tensorflow.keras.models import Model` makes modules of these names, with names of
    # their own, when it is first run.
    importlib.import_module("tensorflow.keras.models")
    for name, module in list(sys.modules.items()):
        path = name.split(".")
        public = path[0] == keras_module_name() and "src" not in path
        if module is not None and (public or path[:2] == ["tensorflow", "keras"]):
            yield vars(module)


def _set_policy(precision: str) -> None:
    global _policy_before
    policies = require_tensorflow().keras.mixed_precision
    if precision == "mixed_bfloat16":
        if policies.global_policy().name != precision:
            _policy_before = (keras_names.global_policy(),)
            policies.set_global_policy(precision)
        processor.warn_of_slow_bfloat16("precision='mixed_bfloat16'")
    elif _policy_before is not None:
        (before,), _policy_before = _policy_before, None
        if policies.global_policy().name == "mixed_bfloat16":  # otherwise set by the user since
            policies.set_global_policy(before)
