"""Layers: `from nanotf.keras.layers import Embedding`."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from nanotf.compat import keras_layers, keras_models
from nanotf.compat.generation import generation
from nanotf.errors import InvalidArgumentError
from nanotf.keras.models import KerasTwin, in_place_of

__all__ = ["Embedding"]

_KerasEmbedding: Any = keras_models.embedding_class()
_SIGNATURE = inspect.signature(_KerasEmbedding.__init__)


class EmbeddingInPlace(_KerasEmbedding, metaclass=KerasTwin):  # type: ignore[misc]
    """The code of `Embedding`. In workers it replaces `Embedding`, also as a base of subclasses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            given = dict(_SIGNATURE.bind(self, *args, **kwargs).arguments)
        except TypeError:
            super().__init__(*args, **kwargs)  # raises Keras's own error
            raise
        given.pop("self")
        given.update(given.pop("kwargs", {}))
        patched = Embedding in in_place_of
        of_table, of_output = map(given.get, ("embeddings_regularizer", "activity_regularizer"))
        if of_table is not None and of_output is None:
            given["activity_regularizer"] = given.pop("embeddings_regularizer")
        # While TensorFlow is patched, both act as in Keras, so that working programs do not fail.
        elif of_table is not None and Embedding in type(self).__mro__ and not patched:
            raise InvalidArgumentError(
                "nanotf's Embedding applies embeddings_regularizer to the layer's output, like "
                "activity_regularizer, and takes only one of the two. Received: "
                f"embeddings_regularizer={of_table!r}, activity_regularizer={of_output!r}. "
                "Give one regularizer that is the sum of both."
            )
        super().__init__(**given)

    if generation().EMBEDDING_READS_WHOLE_TABLE:
        call = keras_layers.look_up(_KerasEmbedding.call)
        add_loss = keras_layers.of_variable_dtype(_KerasEmbedding.add_loss)

        def quantize(self, mode: Any = None, type_check: bool = True, **kwargs: Any) -> Any:
            """Quantizes as Keras does, whose type check would reject nanotf's own classes."""
            type_check = type_check and type(self) not in (Embedding, EmbeddingInPlace)
            return super().quantize(mode, type_check=type_check, **kwargs)


class Embedding(EmbeddingInPlace):
    """`tf.keras.layers.Embedding` that regularizes only the rows that are looked up.

    Keras applies `embeddings_regularizer` to the whole table, so its gradient is dense: with
    L2, it adds `l2 * sum(table ** 2)` to the loss. Here the regularizer is applied to the
    layer's output and divided by the batch's number of samples (`output.shape[0]`): with L2,
    `l2 * sum(output ** 2) / samples` is added. A row counts as often as it is looked up; other rows
    do not count. Padding counts, even if `mask_zero` masks it.
    The gradient is sparse (`tf.IndexedSlices`). (Keras 3 before 3.14 does not divide.)

    The regularizer becomes Keras's `activity_regularizer`: in the layer's attributes, in
    `get_config()`, and in saved models. Saved models name Keras's own class and load without
    nanotf. BigDL-Nano's `Embedding` does the same.

    Args:
        *args, **kwargs: as for `tf.keras.layers.Embedding`.

    Raises:
        InvalidArgumentError: Both `embeddings_regularizer` and `activity_regularizer` are given.
            (While TensorFlow is patched, both then act as in Keras, so that working programs do
            not fail.)

    Example:
        >>> layer = nanotf.keras.layers.Embedding(20_000, 128, embeddings_regularizer="l2")
    """

    if TYPE_CHECKING:  # the arguments that both Keras generations take

        def __init__(
            self,
            input_dim: int,
            output_dim: int,
            embeddings_initializer: Any = "uniform",
            embeddings_regularizer: Any = None,
            *,
            embeddings_constraint: Any = None,
            mask_zero: bool = False,
            **kwargs: Any,
        ) -> None: ...


# Keras 3 reads this signature to tell a layer's arguments apart.
_init: Any = EmbeddingInPlace.__init__
_init.__signature__ = _SIGNATURE
Embedding._nanotf_original = EmbeddingInPlace  # workers create this class
# Saved models name Keras's class: the configuration holds everything.
Embedding.__module__ = _KerasEmbedding.__module__
