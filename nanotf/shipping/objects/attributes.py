"""Sends home the attributes that a call has changed in the objects of the heap.

A layer that a `@nano` function builds gets variables, a model that it compiles gets losses, and its
own objects get whatever it sets. All of these are attributes. The worker compares those after the
call with those before it, and the user's objects get the changed ones, which refer to the user's
own objects where these have numbers, else to new ones.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nanotf.compat.generation import generation
from nanotf.shipping.objects import heap, mutables, outlines

Changes = Mapping[int, tuple[dict[str, Any], tuple[str, ...]]]  # new values, names that are gone


class Attributes:
    """The attributes of objects at one moment.

    Args:
        numbered: the heap's objects, by number.
        apart: ids of those that replace others of the sender's; their attributes stay here.
    """

    def __init__(self, numbered: Sequence[Any], apart: Collection[int]) -> None:
        ours = [obj if id(obj) not in apart else None for obj in numbered]
        self._all = [{} if obj is None else heap.attributes_of(obj) for obj in ours]
        # Some are made anew each time, such as lists without what is valid only in this process.
        self._set = [dict(getattr(obj, "__dict__", {})) for obj in ours]
        self._kinds = outlines.kinds_of(numbered, self._all)

    def changed_since(self, before: Attributes) -> Changes:
        """Returns the attributes that have changed, by number."""
        found = {}
        for number, now in enumerate(self._all):
            new = {name: now[name] for name in now if self._differs(before, number, name)}
            gone = tuple(name for name in before._all[number] if name not in now)
            if new or gone:
                found[number] = new, gone
        return found

    def _differs(self, before: Attributes, number: int, name: str) -> bool:
        if name == heap.VALUE:
            old = before._all[number].get(name)
            # Pickled, a NaN equals itself.
            return pickle.dumps(self._all[number][name]) != pickle.dumps(old)
        kinds, then = self._kinds[number], before._kinds[number]
        if kinds[name] != then.get(name):
            return True
        value = self._set[number].get(name)
        is_same = value is before._set[number].get(name) or value is not self._all[number][name]
        return not is_same and type(value) not in outlines.ATOMS


def put(numbered: Sequence[Any], changes: Changes) -> None:
    """Gives the user's objects the attributes that have changed."""
    for number, (new, gone) in changes.items():
        for name in gone:
            vars(numbered[number]).pop(name, None)
        heap.set_attributes(numbered[number], new)
    generation().restore_identities([numbered[number] for number in changes])


def are_keras_own(numbered: Sequence[Any], changes: Changes) -> bool:
    """Returns True if all workers have made the same changes: Keras, not the user's code, has."""
    return not any(
        mutables.users_attributes(numbered[number]).keys() & {*new, *gone}
        for number, (new, gone) in changes.items()
        if mutables.is_users(numbered[number])
    )
