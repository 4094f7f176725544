"""`nanotf.patch_tensorflow()`: all models take `num_processes`, without a changed import.

It changes these things, and `unpatch_tensorflow()` restores them:

1. `__new__` of Keras's `Model`. Every new model gets nanotf's class, whoever creates it:
   the user, a library with earlier imports, `tf.keras.applications`, `load_model`.
2. The public names of Keras's classes, in all modules that have them (`tf.keras`,
   `tf.keras.models`, `keras` if `tf.keras` is the same generation). They refer to nanotf's
   classes, so classes defined from now on derive from nanotf's. `isinstance` and `issubclass`
   mean the same as before: see `models.in_place_of`.
3. Only with `sparse=True`: `__init__` and the names of Keras's `Embedding` and `Adam`. Every new
   object is of nanotf's class, also from `compile("adam")` and `load_model`.
4. Only with `strategies=True`: `__new__` of `tf.distribute`'s strategies, see `one_replica`.

Existing models are not touched. Models created while patched keep nanotf's class. Saved models
name Keras's classes.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from nanotf.compat import keras_models, keras_optimizers
from nanotf.compat.generation import generation
from nanotf.compat.versions import check_keras, keras_module_name, require_tensorflow
from nanotf.keras import models
from nanotf.machine import processor
from nanotf.parent.defaults import check_precision

_keras_inits: dict[type, Any] = {}  # the replaced `__init__` of each Keras class


@dataclasses.dataclass
class _Patch:
    """The state of the patch."""

    keras_new: Any = None  # `vars(Model)["__new__"]` from before, while Keras is patched
    policy_before: tuple[Any] | None = None  # the global dtype policy, while nanotf's is set


_patch = _Patch()


def patch_tensorflow(
    precision: str = "float32", sparse: bool = False, strategies: bool = False
) -> None:
    """Makes every Keras model created from now on take `num_processes`.

    A second call only replaces the arguments of the first.

    Models compute the same as without the patch, except with `sparse=True`.

    Args:
        precision: str, default "float32", which leaves Keras's global dtype policy as it is.
            "mixed_bfloat16" sets it: layers created from now on compute in bfloat16, and
            keep their variables in float32.
        sparse: bool, default False, which leaves Keras's `Embedding` and `Adam` alone. True
            replaces them with nanotf's, too, and results differ from Keras's: an
            `embeddings_regularizer` is applied to the layer's output (see
            `nanotf.keras.layers.Embedding`), and rows of an embedding that a batch does not touch
            are not updated (see `nanotf.optimizers.SparseAdam`). With dense gradients and
            without such a regularizer, results are Keras's.
        strategies: bool, default False, which leaves `tf.distribute` alone. True makes
            `MirroredStrategy()`, `MultiWorkerMirroredStrategy()`, `OneDeviceStrategy()` and
            `CentralStorageStrategy()` return a strategy of one replica whose scope changes
            nothing, whatever devices and `TF_CONFIG` say. Where TensorFlow sees GPUs, they stay
            TensorFlow's. `nanotf run -n N` sets it.

    Raises:
        InvalidArgumentError: The precision is unknown.
        UnsupportedVersionError: The installed Keras is known to train wrongly.

    Example:
        >>> nanotf.patch_tensorflow()
        >>> model = tf.keras.applications.MobileNetV2()
        >>> model.compile("sgd", "sparse_categorical_crossentropy")
        >>> model.fit(images, labels, num_processes=4)
    """
    check_precision(precision)
    check_keras()
    if _patch.keras_new is None:
        keras_model = keras_models.model_class()
        _patch.keras_new = vars(keras_model)["__new__"]
        keras_model.__new__ = models.accelerated_new(keras_model.__new__)
        _replace({keras_model: models.Model, keras_models.sequential_class(): models.Sequential})
    if sparse and not _keras_inits:
        for keras_class, ours in _sparse_replacements().items():
            _keras_inits[keras_class] = vars(keras_class)["__init__"]
            keras_class.__init__ = _made_as(keras_class, ours)  # type: ignore[misc]
        _replace(_sparse_replacements())
    elif not sparse:
        _leave_sparse()
    _set_strategies(strategies)
    _set_policy(precision)


def unpatch_tensorflow(precision: str | None = None) -> None:
    """Undoes `patch_tensorflow`. Does nothing if nothing is patched.

    Args:
        precision: str or None, one of `defaults.PRECISIONS`, Keras's global dtype policy from now
            on. None, the default, restores the previous policy, unless it was changed since.

    Raises:
        InvalidArgumentError: The precision is unknown.
    """
    if precision is not None:
        check_precision(precision)
    _set_policy("float32")
    _set_strategies(False)
    _leave_sparse()
    if _patch.keras_new is not None:
        keras_models.model_class().__new__ = _patch.keras_new
        _patch.keras_new = None
        _rename(models.in_place_of)
        models.in_place_of.clear()
    if precision is not None:
        require_tensorflow().keras.mixed_precision.set_global_policy(precision)


def is_patched() -> bool:
    """Returns True if `patch_tensorflow` is in force."""
    return _patch.keras_new is not None


def _sparse_replacements() -> dict[type, type]:
    from nanotf.keras import (
        layers,
        optimizers,  # few programs need these
    )

    return {
        keras_models.embedding_class(): layers.Embedding,
        keras_optimizers.adam_class(): optimizers.Adam,
    }


def _made_as(keras_class: Any, ours: Any) -> Any:
    """Returns an `__init__` for a Keras class that turns its objects into nanotf's objects."""
    stock = keras_class.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if type(self) is not keras_class:
            stock(self, *args, **kwargs)
            return
        object.__setattr__(self, "__class__", ours)
        ours.__init__(self, *args, **kwargs)

    __init__.__signature__ = inspect.signature(stock)  # type: ignore[attr-defined]
    return __init__


def _leave_sparse() -> None:
    """Restores Keras's `Embedding` and `Adam`."""
    if _keras_inits:
        for keras_class, stock in _keras_inits.items():
            keras_class.__init__ = stock  # type: ignore[misc]
        _keras_inits.clear()
        back = {ours: keras for keras, ours in _sparse_replacements().items()}
        _rename(back)
        for ours in back:
            del models.in_place_of[ours]


def _replace(replacements: Mapping[type, type]) -> None:
    """Gives nanotf's classes the public names of Keras's."""
    models.in_place_of.update({ours: keras for keras, ours in replacements.items()})
    _rename(replacements)


def _rename(replacements: Mapping[type, type]) -> None:
    """Replaces classes with others under all their public names."""
    for names in _public_namespaces():
        for name, value in list(names.items()):
            if isinstance(value, type) and value in replacements:
                names[name] = replacements[value]


def _public_namespaces() -> Iterator[dict[str, Any]]:
    """Yields the namespaces of Keras's public modules that have been imported.

    Callers change the dicts: `tf.keras` itself is a lazy loader with a copy of its module's
    names, and setting an attribute would also add it to the loader's `__all__`.
    """
    loader = require_tensorflow().keras
    loader.models  # noqa: B018 - loads the module and copies its names
    yield vars(loader)
    # The first `from tensorflow.keras.models import Model` would otherwise create modules with
    # their own copies of the names later.
    for name in ("layers", "models", "optimizers"):
        importlib.import_module(f"tensorflow.keras.{name}")
    for name, module in list(sys.modules.items()):
        path = name.split(".")
        public = path[0] == keras_module_name() and "src" not in path
        if module is not None and (public or path[:2] == ["tensorflow", "keras"]):
            yield vars(module)


def _set_strategies(wanted: bool) -> None:
    from nanotf.compat import one_replica  # imports TensorFlow

    if wanted:
        one_replica.replace()
    else:
        one_replica.restore()


def _set_policy(precision: str) -> None:
    policies = require_tensorflow().keras.mixed_precision
    if precision == "mixed_bfloat16":
        if policies.global_policy().name != precision:
            _patch.policy_before = (generation().global_policy(),)
            policies.set_global_policy(precision)
        processor.warn_of_slow_bfloat16("precision='mixed_bfloat16'")
    elif _patch.policy_before is not None:
        (before,), _patch.policy_before = _patch.policy_before, None
        if policies.global_policy().name == "mixed_bfloat16":  # otherwise the user changed it
            policies.set_global_policy(before)
