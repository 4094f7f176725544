"""A function whose values depend on the number of rows in a way of its own is never divided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from nanotf.region.proof import traces, verdicts

WIDTH = 3


def number_of(x: Any) -> Any:
    return tf.shape(x)[0]


def real_number_of(x: Any) -> Any:
    return tf.cast(number_of(x), x.dtype)


def why_whole(function: Callable[[Any], Any], shape: tuple[int, ...] = (WIDTH,)) -> str:
    """Returns why a function of rows is not divided; empty if it is."""
    argument = traces.Argument(shape, tf.float32, True)
    subject = verdicts.Subject(function, lambda x: (function(x), {}), "function")
    return verdicts.prove(subject, [argument], ((argument,), {}), (4, 8)).whole


def listed(x: Any) -> Any:
    return tf.TensorArray(tf.float32, number_of(x), element_shape=[WIDTH])


def length_of_list(x: Any) -> Any:
    """Returns the length of a list, which a `TensorArray` knows from its code."""
    made = tf.raw_ops.TensorListReserve(
        element_shape=[WIDTH], num_elements=number_of(x), element_dtype=tf.float32
    )
    return tf.raw_ops.TensorListLength(input_handle=made)


def as_blocks(x: Any) -> Any:
    """Puts four images for each row together, which `batch_to_space` takes for parts of others."""
    images = tf.reshape(x, (-1, 1, 1, 1))
    return tf.reshape(tf.batch_to_space(images, [2, 2], [[0, 0], [0, 0]]), (-1, 4))


WHOLE: dict[str, Callable[[Any], Any]] = {
    "compared with a number": lambda x: tf.cast(
        tf.cast(x, tf.int32) < number_of(x) + 1, tf.float32
    ),
    "length of a list": lambda x: x * tf.cast(length_of_list(x), x.dtype),
    "mean of a list": lambda x: x + tf.reduce_mean(listed(x).write(0, tf.ones([WIDTH])).stack(), 0),
    "branch on few rows": lambda x: tf.cond(number_of(x) < 32, lambda: x, lambda: -x),
    "function with a limit": lambda x: x * tf.tanh(real_number_of(x)),
    "odd number": lambda x: x * tf.cast(number_of(x) % 2, x.dtype),
    "at most three": lambda x: x * tf.cast(tf.minimum(number_of(x), 3), x.dtype),
    "more than one row": lambda x: x * tf.cast(tf.cast(number_of(x) - 1, tf.bool), x.dtype),
    "axis by the number": lambda x: tf.cumsum(x, number_of(x) % 2),
    "constant up to the number": lambda x: x * tf.reduce_sum(tf.ones([5])[: number_of(x)]),
    "zeros of rows and a weight": lambda x: (
        x + tf.reduce_sum(tf.zeros_like(x), 0) + tf.ones([WIDTH])
    ),
    "a sum as a truth": lambda x: tf.cast(
        tf.cast(tf.reduce_sum(tf.cast(x, tf.int32), 0), tf.bool), tf.float32
    ),
    "whole mean": lambda x: tf.reduce_mean(tf.cast(x, tf.int32), 0),
    "clamped to a number": lambda x: tf.reduce_sum(
        tf.minimum(tf.maximum(tf.sort(x, 0), 5.0), 5.0), 1
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_functions_that_count_rows(name: str) -> None:
    assert why_whole(WHOLE[name]) != ""


def test_blocks_of_several_images_a_row() -> None:
    assert why_whole(as_blocks, (4,)) != ""


APART: dict[str, Callable[[Any], Any]] = {
    "mean by hand": lambda x: tf.reduce_sum(x, 0) / real_number_of(x),
    "zeros for each row": lambda x: tf.concat([x, tf.zeros([number_of(x), 2])], 1),
    "a token for each row": lambda x: tf.concat(
        [tf.tile(tf.ones((1, 2)), [number_of(x), 1]), x], 1
    ),
    "slice of all rows": lambda x: x[: number_of(x), 1:],
    "list of columns": lambda x: tf.TensorArray(tf.float32, WIDTH).unstack(tf.transpose(x)).read(0),
    "reshaped by the number": lambda x: tf.reshape(x * 2.0, [number_of(x), WIDTH, 1]),
}


@pytest.mark.parametrize("name", APART)
def test_functions_of_each_row(name: str) -> None:
    """Sums, products and shapes made from the number of rows keep a function divided."""
    assert why_whole(APART[name]) == ""


def test_advice() -> None:
    """The reason names the operation and the line that couple rows."""

    def centred(x: Any) -> Any:
        return x - tf.reduce_mean(x, 0)

    said = why_whole(centred)
    line = centred.__code__.co_firstlineno + 1
    assert said.startswith("Sub (")
    assert f"test_numbers_in_proofs.py, line {line} combines rows" in said
