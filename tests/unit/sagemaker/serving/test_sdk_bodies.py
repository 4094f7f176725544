"""Bodies that the serializers of SageMaker's SDK 2.257.7 have made of [[1, 2.5], [3, 4]].

`csv_row` is of [1, 2.5]. The others are called after the serializer and its argument.
"""

from __future__ import annotations

import base64
import json
import pathlib

import pytest
from hosting_fakes import double, invoke, value

BODIES = json.loads(pathlib.Path(__file__).with_name("sdk_bodies.json").read_text())


@pytest.mark.parametrize("name", BODIES)
def test_serializers(name: str) -> None:
    body = BODIES[name]
    found = value(invoke(double(), base64.b64decode(body["body"]), body["content_type"]))
    (rows,) = found.values()
    assert rows == [[2.0, 5.0], [6.0, 8.0]][: 1 if name == "csv_row" else 2]
