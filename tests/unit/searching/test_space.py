"""The space of a search, without TensorFlow."""

from __future__ import annotations

from typing import Any

import optuna
import pytest

from nanotf.errors import InvalidArgumentError, InvalidArgumentTypeError
from nanotf.searching.space import distributions, suggest


def test_short_forms() -> None:
    known = optuna.distributions
    given = known.IntDistribution(1, 9, step=4)
    found = distributions(
        {
            "units": (8, 64),
            "dropout": (0, 0.5),
            "rate": (1e-4, 1e-1, "log"),
            "batch": (8, 512, "log"),
            "name": ["relu", None],
            "layers": given,
        }
    )
    assert found == {
        "units": known.IntDistribution(8, 64),
        "dropout": known.FloatDistribution(0, 0.5),
        "rate": known.FloatDistribution(1e-4, 1e-1, log=True),
        "batch": known.IntDistribution(8, 512, log=True),
        "name": known.CategoricalDistribution(["relu", None]),
        "layers": given,
    }
    parameters = suggest(optuna.create_study().ask(), found)
    assert list(parameters) == list(found)
    assert parameters["layers"] in (1, 5, 9)


@pytest.mark.parametrize(
    ("space", "kind", "text"),
    [
        ([("units", (1, 2))], InvalidArgumentTypeError, "`space` must be a dict"),
        ({}, InvalidArgumentError, "must have a parameter"),
        ({3: (1, 2)}, InvalidArgumentTypeError, "must be strings"),
        ({"units": 32}, InvalidArgumentTypeError, r"space\['units'\]=32"),
        ({"units": {1, 2}}, InvalidArgumentTypeError, "a list of choices"),
        ({"units": (1, 2, "linear")}, InvalidArgumentError, "'log'"),
        ({"units": (1, 2, 3)}, InvalidArgumentError, "logarithmic"),
        ({"units": ("a", "b")}, InvalidArgumentError, r"pair \(low, high\)"),
        ({"units": (True, False)}, InvalidArgumentError, r"pair \(low, high\)"),
        ({"units": (64, 8)}, InvalidArgumentError, "Optuna says"),
        ({"rate": (0.0, 1.0, "log")}, InvalidArgumentError, "Optuna says"),
        ({"layer": []}, InvalidArgumentError, "must have an element"),
        ({"layer": [object()]}, InvalidArgumentError, "which a study can store"),
    ],
)
def test_other_forms_are_refused(space: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        distributions(space)
