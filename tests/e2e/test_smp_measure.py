"""Times of the pieces of a traced call, for `auto_partition`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

from nanotf import smp
from nanotf.sagemaker.smp import cut, piece_times, runtime
from nanotf.sagemaker.smp.trace import TracedCall, trace

L = tf.keras.layers


@pytest.fixture(autouse=True)
def _begins_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(runtime._here, "config", None)
    smp.init({"partitions": 1})
    yield


def _traced(model: Any, rows: int | None) -> TracedCall:
    def call(x: Any) -> Any:
        return model(x, training=True)

    spec = tf.TensorSpec([rows, *model.input_shape[1:]])
    return trace(call, [spec], lambda make, **options: make(**options))


def _layers(traced: TracedCall) -> list[list[Any]]:
    """Returns the operations of each layer, without those that belong to no piece."""
    free = cut.everywhere(traced)
    operations = {op.name: op for op in traced.operations if op.name not in free}
    found = [[operations[name] for name in names if name in operations] for names in traced.layers]
    return [each for each in found if each]


@pytest.mark.both_generations
def test_layers_run_by_themselves() -> None:
    """Loops, random numbers, statistics that are updated; variables keep their values."""
    layers = [L.LSTM(4, return_sequences=True), L.GRU(4), L.Dropout(0.2), L.BatchNormalization()]
    model = tf.keras.Sequential([tf.keras.Input((5, 3)), *layers, L.Dense(2)])
    before = model.get_weights()
    traced = _traced(model, rows=8)
    pieces = _layers(traced)
    found = piece_times.seconds(traced, pieces, cut.everywhere(traced))
    assert found is not None
    assert len(found) == len(pieces) >= 5  # some versions of Keras trace a call's checks apart
    assert all(seconds > 0 for seconds in found)
    for mine, old in zip(model.get_weights(), before, strict=True):
        assert mine.tolist() == old.tolist()


def test_unknown_shapes_are_not_measured() -> None:
    model = tf.keras.Sequential([tf.keras.Input((3,)), L.Dense(4), L.Dense(2)])
    traced = _traced(model, rows=None)
    assert piece_times.seconds(traced, _layers(traced), cut.everywhere(traced)) is None
