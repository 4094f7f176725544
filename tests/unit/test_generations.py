"""The modules of both Keras generations define the same names, with the same signatures."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest

from nanotf.compat import keras2, keras3
from nanotf.compat.generation import Generation

CONSTANTS = set(Generation.__annotations__)
FUNCTIONS = {name: f for name, f in vars(Generation).items() if inspect.isfunction(f)}
ACTIONS = {name for name in FUNCTIONS if not name.startswith("_")}


@pytest.mark.parametrize("module", [keras2, keras3])
def test_a_generation_defines_the_interface_and_nothing_else(module: ModuleType) -> None:
    own = {
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    }
    assert {name for name in own if not name.startswith("_")} == ACTIONS
    assert vars(module).keys() >= CONSTANTS
    for name in ACTIONS:
        declared = list(inspect.signature(FUNCTIONS[name]).parameters)[1:]
        assert list(inspect.signature(getattr(module, name)).parameters) == declared, name


def test_constants_of_generations_are_of_one_type() -> None:
    def types(module: Any) -> dict[str, type]:
        return {name: type(getattr(module, name)) for name in CONSTANTS}

    assert types(keras2) == types(keras3)
