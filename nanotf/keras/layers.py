"""Layers: `from nanotf.keras.layers import Embedding`."""

from __future__ import annotations

import inspect
from typing import Any

from nanotf.compat import keras_names
from nanotf.compat.versions import is_keras_3
from nanotf.errors import InvalidArgumentError

__all__ = ["Embedding"]

_KerasEmbedding: Any = keras_names.embedding_class()


class Embedding(_KerasEmbedding):  # type: ignore[misc]
    """`tf.keras.layers.Embedding` whose regularizer is about the rows that are looked up.

    Keras applies `embeddings_regularizer` to the whole table, whose gradient is dense then: with
    L2, it adds `l2 * sum(table ** 2)` to the loss. Here the regularizer is applied to the
    layer's output and divided by the batch's number of samples (`output.shape[0]`): with L2,
    `l2 * sum(output ** 2) / samples` is added. A row counts as often as it is looked up, one that
    is not looked up does not count, and padding counts, too, also where `mask_zero` masks it.
    The gradient is sparse (`tf.IndexedSlices`).

    That is Keras's `activity_regularizer`, which the regularizer is from then on: in the layer's
    attributes, in `get_config()`, and in saved models, which name Keras's own class and load
    without nanotf. BigDL-Nano's `Embedding` does the same.

    Args:
        *args, **kwargs: as for `tf.keras.layers.Embedding`.

    Raises:
        InvalidArgumentError: There is both an `embeddings_regularizer` and an
            `activity_regularizer`.

    Example:
        >>> layer = nanotf.keras.layers.Embedding(20_000, 128, embeddings_regularizer="l2")
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        signature = inspect.signature(_KerasEmbedding.__init__)
        try:
            given = dict(signature.bind(self, *args, **kwargs).arguments)
        except TypeError:
            super().__init__(*args, **kwargs)  # raises it in Keras's words
            raise
        given.pop("self")
        given.update(given.pop("kwargs", {}))
        of_table = given.pop("embeddings_regularizer", None)
        of_output = given.get("activity_regularizer")
        if of_table is not None:
            if of_output is not None:
                raise InvalidArgumentError(
                    "nanotf's Embedding applies embeddings_regularizer to the layer's output, as "
                    "activity_regularizer is, and there can be one of them. Received: "
                    f"embeddings_regularizer={of_table!r}, activity_regularizer={of_output!r}. "
                    "Give one regularizer that is the sum of both."
                )
            given["activity_regularizer"] = of_table
        super().__init__(**given)

    if is_keras_3():
        call = keras_names.look_up(_KerasEmbedding.call)

        def quantize(self, mode: Any = None, type_check: bool = True, **kwargs: Any) -> Any:
            """As in Keras, which would take this for a layer of another kind."""
            type_check = type_check and type(self) is not Embedding
            return super().quantize(mode, type_check=type_check, **kwargs)


# Saved models name Keras's class, and workers rebuild Keras's own: all is in the configuration.
Embedding._nanotf_original = _KerasEmbedding
Embedding.__module__ = _KerasEmbedding.__module__
