"""Lists, dicts, sets and tables of TensorFlow and Keras that pickle cannot handle.

| private name | versions | why |
| --- | --- | --- |
| `tensorflow.python.trackable.data_structures`: `ListWrapper`, `_DictWrapper` (`OF_WRAPPERS`), `_TupleWrapper` | 2.14-2.21 | pickling needs their contents and their records of tracking |
| `Trackable._self_update_uid` | 2.14-2.21 | a checkpoint does not restore an object that a later one has restored |
| `StaticHashTable._initializer`, `MutableHashTable._default_value` | 2.14-2.21 | needed to copy a table |
| `tensorflow.python.util.tf_export.get_canonical_name_for_symbol`, `get_symbol_from_name` | 2.14-2.21 | TensorFlow's dispatching functions are pickled by their public names |
"""

from __future__ import annotations

from typing import Any

from tensorflow.python.ops import lookup_ops
from tensorflow.python.trackable import data_structures
from tensorflow.python.util import tf_export

from nanotf.compat.keras_common import is_keras_own

_RESTORED = "_self_update_uid"
# The attributes of a `_DictWrapper` itself. As a proxy it also shows those of the wrapped dict.
OF_WRAPPERS = (
    "_self_attribute_sentinel",
    "_self_external_modification",
    "_self_extra_variables",
    "_self_last_wrapped_dict_snapshot",
    "_self_name_based_restores",
    "_self_non_string_key",
    "_self_saveable_object_factories",
    "_self_setattr_tracking",
    "_self_trainable",
    "_self_unconditional_checkpoint_dependencies",
    "_self_unconditional_deferred_dependencies",
    "_self_unconditional_dependency_names",
    _RESTORED,
)


def described(value: Any) -> tuple[Any, ...] | None:
    """Returns a container's `reducer_override` tuple, None for any other object."""
    if isinstance(value, data_structures._DictWrapper):
        attributes = as_new({n: getattr(value, n) for n in OF_WRAPPERS if hasattr(value, n)})
        state = value.__wrapped__, attributes
        return data_structures._DictWrapper, (), state, None, None, _fill_proxy
    if isinstance(value, data_structures._TupleWrapper):
        return data_structures._TupleWrapper, (value.__wrapped__,)
    cls = type(value)
    is_list = isinstance(value, data_structures.ListWrapper)
    if is_list or (isinstance(value, (list, dict, set)) and is_keras_own(cls)):
        items = dict(value.items()) if isinstance(value, dict) else list(value)
        return _bare, (cls,), (items, as_new(vars(value))), None, None, _fill
    if isinstance(value, lookup_ops.StaticHashTable):
        return cls, (value._initializer, value._default_value)
    if isinstance(value, lookup_ops.MutableHashTable):
        dtypes = value.key_dtype, value.value_dtype
        return _table, (cls, dtypes, value._default_value, value.export())
    return None


def as_new(attributes: dict[str, Any]) -> dict[str, Any]:
    """Resets the restore number in an object's attributes: it is valid only in this process."""
    return {**attributes, _RESTORED: -1} if _RESTORED in attributes else attributes


def is_tracking(value: Any) -> bool:
    """Returns True for TensorFlow's and Keras's tracking lists, dicts and sets."""
    cls = type(value)
    if not isinstance(value, (list, dict, set)) or cls in (list, dict, set):
        return False
    return is_keras_own(cls) or cls.__module__.startswith("tensorflow.")


def _table(cls: Any, dtypes: tuple[Any, Any], default: Any, content: tuple[Any, Any]) -> Any:
    table = cls(*dtypes, default)
    table.insert(*content)
    return table


def _bare(cls: Any) -> Any:
    return cls.__new__(cls)  # no `__init__`, which would wrap and track the items


def _fill(container: Any, state: tuple[Any, dict[str, Any]]) -> None:
    """Adds items without the container's own methods, which would track them again."""
    items, attributes = state
    vars(container).update(attributes)
    if isinstance(container, list):
        list.extend(container, items)
    elif isinstance(container, dict):
        dict.update(container, items)
    else:
        set.update(container, items)


def _fill_proxy(proxy: Any, state: tuple[Any, dict[str, Any]]) -> None:
    proxy.__wrapped__, attributes = state
    for name, value in attributes.items():
        setattr(proxy, name, value)  # the proxy itself keeps names that begin with "_self_"


def public_name(function: Any) -> str | None:
    """Returns a TensorFlow function's public name for `by_public_name`, None if it has none."""
    name = tf_export.get_canonical_name_for_symbol(function, add_prefix_to_v1_names=True)
    # TensorFlow looks through decorators, so another function may have the name.
    return name if name and tf_export.get_symbol_from_name(name) is function else None


def by_public_name(name: str) -> Any:
    """Returns the TensorFlow function with a public name."""
    return tf_export.get_symbol_from_name(name)
