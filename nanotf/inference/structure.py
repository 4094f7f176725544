"""The structure of what a Keras model takes and returns: arrays in lists, tuples and dicts.

A structure is a value of JSON: the name of an array, or `{"list": [...]}`, `{"tuple": [...]}`,
`{"dict": {...}}` of structures. So a program's folder can hold it, and nothing here needs
TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError

LIST, TUPLE, DICT = "list", "tuple", "dict"


def describe(
    value: Any, name_of: Callable[[Any], str | None], prefix: str
) -> tuple[Any, list[Any]]:
    """Returns the structure of a value, and its leaves in order.

    A leaf below a dict is named by the keys and indices that lead to it, joined by "_"; every other
    leaf by `name_of`. What has no name, is `prefix` with a number. Equal names get a number, too.

    Args:
        value: nested lists, tuples and mappings.
        name_of: returns a leaf's own name, or None. It is called once a leaf, in order.
        prefix: such as "output".

    Raises:
        InvalidArgumentTypeError: A mapping has keys that are no strings.
    """
    leaves: list[Any] = []
    taken: dict[str, None] = {}  # two layers or keys may lead to one name, such as "a_b"

    def structure_of(each: Any, path: tuple[str, ...], in_dict: bool) -> Any:
        if isinstance(each, Mapping):
            found = {key: structure_of(each[key], (*path, key), True) for key in _keys_of(each)}
            return {DICT: found}
        if isinstance(each, (list, tuple)):
            parts = [structure_of(e, (*path, str(i)), in_dict) for i, e in enumerate(each)]
            return {LIST if isinstance(each, list) else TUPLE: parts}
        # For leaves of dicts, too: names of layers are taken in order, one for each leaf.
        own = name_of(each)
        wanted = "_".join(path) if in_dict else own or f"{prefix}_{len(leaves)}"
        name = _free_name(wanted, taken)
        taken[name] = None
        leaves.append(each)
        return name

    return structure_of(value, (), False), leaves


def _keys_of(mapping: Mapping[Any, Any]) -> list[str]:
    if odd := [key for key in mapping if not isinstance(key, str)]:
        raise InvalidArgumentTypeError(
            "The keys of a model's inputs and outputs must be strings: they become names. "
            f"Received: the key {odd[0]!r}. Wrap the model in one that renames it."
        )
    return list(mapping)


def _free_name(wanted: str, taken: Mapping[str, None]) -> str:
    name, number = wanted, 0
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    return name


def names(structure: Any) -> list[str]:
    """Returns the names of the arrays of a structure, in order."""
    return list(_names(structure))


def _names(structure: Any) -> Iterator[str]:
    if isinstance(structure, str):
        yield structure
    else:
        (parts,) = structure.values()
        for each in parts.values() if isinstance(parts, Mapping) else parts:
            yield from _names(each)


def build(structure: Any, values: Mapping[str, Any]) -> Any:
    """Returns the nested value of a structure.

    Args:
        structure: as `describe` returns it.
        values: the leaves, by name.
    """
    if isinstance(structure, str):
        return values[structure]
    ((kind, parts),) = structure.items()
    if kind == DICT:
        return {key: build(each, values) for key, each in parts.items()}
    built = [build(each, values) for each in parts]
    return built if kind == LIST else tuple(built)


def flatten(structure: Any, value: Any) -> dict[str, Any]:
    """Returns the leaves of a value by name, as Keras would take them.

    Where a structure has arrays by keys or in a list, the other form is accepted as well: a list in
    the order of the keys, a dict by the names of the arrays.

    Args:
        structure: as `describe` returns it.
        value: what a user passed.

    Raises:
        InvalidArgumentError: The value has another structure.
    """
    found: dict[str, Any] = {}
    _flatten(structure, value, found)
    return found


def _flatten(structure: Any, value: Any, found: dict[str, Any]) -> None:
    if isinstance(structure, str):
        found[structure] = _leaf(structure, value)
        return
    ((_, parts),) = structure.items()
    # Both forms become a dict, so that a user's list and a user's dict fit either.
    if isinstance(parts, Mapping):
        wanted = dict(parts)
    else:
        wanted = {_label(part, index): part for index, part in enumerate(parts)}
    if isinstance(value, Mapping):
        if set(value) != set(wanted):
            raise _unlike(structure, ", ".join(map(repr, value)) or "an empty dict")
        pairs = [(part, value[key]) for key, part in wanted.items()]
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        if len(value) != len(wanted):
            raise _unlike(structure, f"a {type(value).__name__} of {len(value)}")
        pairs = list(zip(wanted.values(), value, strict=True))
    elif len(wanted) == 1:  # Keras takes the only input by itself
        pairs = [(part, value) for part in wanted.values()]
    else:
        raise _unlike(structure, type(value).__name__)
    for part, each in pairs:
        _flatten(part, each, found)


def _label(part: Any, index: int) -> str:
    """Returns the key by which a dict may have what a structure has in a list."""
    return part if isinstance(part, str) else str(index)


def _leaf(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        if set(value) != {name}:  # Keras takes the only input in a dict by its name
            raise _unlike(name, ", ".join(map(repr, value)) or "an empty dict")
        return value[name]
    # Keras takes the only input in a list, too. Lists of numbers are the input itself.
    if isinstance(value, (list, tuple)) and len(value) == 1 and hasattr(value[0], "shape"):
        return value[0]
    return value


def _unlike(structure: Any, received: str) -> InvalidArgumentError:
    wanted = ", ".join(names(structure))
    return InvalidArgumentError(
        f"The inputs must be like those of the model: {wanted}. Received: {received}. Pass arrays "
        "in that order, or by name."
    )
