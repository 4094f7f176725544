"""A divided call of a layer: each worker computes its own rows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.compat import (
    eager_context,
    keras_build,
    keras_common,
    keras_layers,
    keras_models,
)
from nanotf.compat.generation import generation
from nanotf.errors import InvalidArgumentError, ModelError
from nanotf.region import compiled, declared, ledger, recording, rows, scope, variables
from nanotf.region.proof.verdicts import (
    Along,
    Verdict,
    layer_subject,
    noting,
    users_layers,
    verdict_of,
    warn_of_whole,
)
from nanotf.region.rows import Division
from nanotf.wire.parts import Part


class Region:
    """One divided call.

    Args:
        division: of the batch.
        layer: the layer that is called.
        draws, statistics: see `Verdict`.

    Attributes:
        graph: the graph that contains the call; None for an eager call.
    """

    def __init__(
        self, division: Division, layer: Any, draws: Sequence[bool], statistics: Sequence[bool]
    ) -> None:
        self.exchange = division.exchange
        self.division = division
        self.layer = layer
        self.graph = scope.graph_here()
        self.recomputes = False  # whether a gradient function reruns the code inside
        self._draws, self._statistics = iter(draws), iter(statistics)
        self._inside: set[int] = set()  # keys of tensors that the code inside has made or received
        self._spread: dict[int, Any] = {}  # tensors from outside, as used inside

    # ------------------------------------------------------------- tensors behind the call
    def admit(self, tensors: Any) -> None:
        """Registers tensors that belong to the code inside."""
        self._inside.update(map(eager_context.key_of, filter(tf.is_tensor, tensors)))

    def inside(self, tensor: Any) -> Any:
        """Returns a tensor as operations inside use it; one from outside enters by `spread`."""
        key = eager_context.key_of(tensor)
        # Only a tensor that may get a gradient has to enter: `spread` sums the gradient.
        if key in self._inside or not tensor.dtype.is_floating:
            return tensor
        if not eager_context.may_have_gradient(tensor):
            return tensor
        if key not in self._spread:
            with scope.entered(None):
                self._spread[key] = self.spread(tensor)
        return self._spread[key]

    # ------------------------------------------------------------------------ random numbers
    def is_left(self) -> bool:
        """Returns True outside the call's graph, as in code that makes a variable."""
        return self.graph is not None and scope.graph_here() is None

    def draws_rows(self) -> bool:
        """Returns True if the numbers drawn now have rows."""
        return bool(self._known(self._draws, "draws random numbers"))

    def is_over_rows(self) -> bool:
        """Returns True if the statistics computed now are over rows of the batch."""
        return bool(self._known(self._statistics, "computes statistics"))

    def _known(self, found: Iterator[Any], what: str) -> Any:
        for each in found:
            return each
        if getattr(self.layer, keras_layers.DECLARED, None) == keras_layers.BY_ROWS:
            raise ModelError(
                "A layer that nanotf.by_rows declares must be a function of its arguments and "
                f"weights. Received: {self.layer.name}, which {what}. Leave nanotf.by_rows out."
            )
        raise ModelError(
            "A layer whose call is divided must do what it did when it was traced. Received: "
            f"{self.layer.name}, which {what} more often. Wrap the layer: nanotf.whole(layer)."
        )

    # ------------------------------------------------------------------------- in and out
    def enter(self, leaf: Any) -> Any:
        """Converts an argument of the call to the value that its code gets."""
        if not is_data(leaf):
            is_tensor = isinstance(leaf, tf.Tensor) and not hasattr(leaf, "assign")
            return self.spread(leaf) if is_tensor and leaf.dtype.is_floating else leaf
        if isinstance(leaf, (tf.SparseTensor, tf.RaggedTensor)):
            return self.division.take(leaf)
        whole = tf.convert_to_tensor(leaf)
        if rows.rows_of(leaf) is not None:  # `whole` may be another object
            whole._nanotf_rows = rows.rows_of(leaf)
        if not self.division.has_rows(whole):
            return self.spread(whole) if whole.dtype.is_floating else whole
        own = self.division.take(whole)
        mask = keras_layers.mask_of(leaf)
        if mask is not None:
            keras_layers.set_mask(own, self.division.take(tf.convert_to_tensor(mask)))
        return own

    @contextlib.contextmanager
    def checking(self) -> Iterator[None]:
        """Raises if an eager call uses a non-argument tensor that may need a gradient."""
        if self.graph is not None:
            yield
            return
        with eager_context.earlier_inputs() as found:
            yield
        for key, tensor in found.items():
            if key not in self._inside and eager_context.may_have_gradient(tensor):
                raise ModelError(
                    "A layer whose call is divided must get the tensors trained through it as "
                    f"arguments, or be called in a tf.function. Received: {self.layer.name}, which "
                    f"uses a tensor of shape {tuple(tensor.shape)} from an attribute or the code "
                    "around it. Pass it to the call, or wrap the layer: nanotf.whole(layer)."
                )

    def spread(self, whole: Any) -> Any:
        """Returns a whole tensor for use in the region's code."""
        return rows.spread(self.exchange, [whole])[0]

    def leave(self, leaf: Any, factor: Any) -> Any:
        """Converts an output of the call to the value for code outside.

        Args:
            leaf: value that the layer returned.
            factor: the number of its rows per row of the batch, `Along` another axis, "mean",
                "sum", or None for a value that is equal on all workers.
        """
        if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            per_row = factor if isinstance(factor, int) else 1
            join = self._join_ragged if isinstance(leaf, tf.RaggedTensor) else self._join_sparse
            whole = join(leaf, per_row)
            whole._nanotf_rows = rows.Rows(self.division, leaf, per_row)
            return whole
        if not isinstance(leaf, tf.Tensor) or hasattr(leaf, "assign"):
            return leaf
        if isinstance(factor, Along):
            return self._join_along(leaf, factor.axis)
        if factor == "sum":
            return self.division.sum(leaf)
        if factor in ("mean", None):
            combine = self.division.alike if factor is None else self.division.mean
            return combine(leaf) if leaf.dtype.is_floating else leaf
        whole = self.division.join(leaf, factor)
        mask = keras_layers.mask_of(leaf)
        if mask is not None:
            keras_layers.set_mask(whole, self.division.join(mask, factor))
        return whole

    def _join_along(self, own: Any, axis: int) -> Any:
        """Joins rows along another axis than the first."""
        first = [axis, *(other for other in range(own.shape.rank) if other != axis)]
        return tf.transpose(self.division.join(tf.transpose(own, first)), np.argsort(first))

    def _join_ragged(self, own: Any, factor: int) -> Any:
        lengths = self.division.gathered(own.row_lengths(), factor)
        return tf.RaggedTensor.from_row_lengths(self._join_any(own.values), lengths)

    def _join_sparse(self, own: Any, factor: int) -> Any:
        division, shape = self.division, own.dense_shape
        first = tf.tensor_scatter_nd_update(
            tf.zeros_like(shape), [[0]], [factor * tf.cast(division.start, tf.int64)]
        )
        shape = tf.tensor_scatter_nd_update(shape, [[0]], [factor * tf.cast(division.n, tf.int64)])
        indices = self._join_any(own.indices + first)
        return tf.SparseTensor(indices, self._join_any(own.values), shape)

    def _join_any(self, own: Any) -> Any:
        """Joins parts of any length, without a fixed number of rows per row of the batch."""
        counted = (
            own
            if self.division.is_full
            else own[: tf.where(self.division.count > 0, tf.shape(own)[0], 0)]  # no padding row
        )
        exchange = self.exchange

        @rows.with_gradient
        def join(counted: Any) -> Any:
            # Only the gradient reads them; without one a graph does not gather them.
            lengths = exchange.gather_rows(tf.shape(counted)[:1], if_read=True)
            first = tf.reduce_sum(lengths[: exchange.rank])
            own_length = lengths[exchange.rank]
            whole = exchange.gather_rows(counted, if_read=True)
            return whole, lambda d: rows.dense(d)[first : first + own_length]

        return join(counted)

    def leave_losses(self, before: set[int], factors: Sequence[Any]) -> None:
        """Converts losses that the call gave to `add_loss` to losses of the batch."""
        each = iter(factors)
        for found in keras_layers.lists_of_losses(self.layer):
            for place, loss in enumerate(list(found)):
                if isinstance(loss, tf.Tensor) and id(loss) not in before:
                    found[place] = self.leave(loss, self._known(each, "adds losses"))


def is_data(leaf: Any) -> bool:
    """Returns True if a leaf of a call's arguments may have rows."""
    if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        return True
    is_tensor = isinstance(leaf, tf.Tensor) and not hasattr(leaf, "assign")
    if not is_tensor and not isinstance(leaf, np.ndarray):
        return False
    rank = len(leaf.shape) if isinstance(leaf, np.ndarray) else leaf.shape.rank
    return rank not in (0, None) or rows.rows_of(leaf) is not None


def divide(layer: Any, stock: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `layer(*args, **kwargs)` so that each worker computes its own rows.

    A call that cannot be divided runs whole, and the calls of layers in it are divided instead.

    Args:
        layer: a Keras layer or model; its call is the outermost.
        stock: the stock `__call__`.
        args, kwargs: its arguments.
    """
    declaration = getattr(layer, keras_layers.DECLARED, None)
    if declaration == keras_layers.WHOLE:
        ledger.note(layer, Part(layer.name, False, "as nanotf.whole declares"))
        with scope.dividing(None):
            return stock(layer, *args, **kwargs)
    division = _division_for(layer, stock, args, kwargs)
    if division is None:
        return stock(layer, *args, **kwargs)
    subject = layer_subject(layer, stock)
    verdict = verdict_of(subject, args, kwargs, division, is_data)
    if recording.checks_layers() and any(inner.weights for inner in _inside(layer)):
        verdict = Verdict("its layers are compared one by one")
    elif not verdict.whole:
        ledger.note(layer, Part(layer.name, True, operations=verdict.operations))
        divided = functools.partial(_divided, layer, stock, division, verdict)
        # A check calls the layer more than once.
        calls_alike = not (verdict.draws or verdict.assigned or verdict.statistics)
        if recording.checks_layers() and calls_alike:
            whole, found = functools.partial(stock, layer), declared.recorded
            declared.check(layer, whole, divided, args, kwargs, found)
        return divided(args, kwargs)
    # Only here: a layer whose graph shows that its rows are apart needs no comparison.
    if declaration == keras_layers.BY_ROWS:
        scope.wholes += 1  # layers around it run whole because of it, and need not warn
        why = "as nanotf.by_rows declares"
        ledger.note(layer, Part(layer.name, True, why, verdict.operations))
        trained = tuple(map(keras_common.tf_variable, layer.trainable_variables))
        # No proof says what the layer reads and leaves, so its call looks for both.
        verdict = Verdict(factors=None, variables=trained, reads_behind=True, leaves_notes=True)
        divided = functools.partial(_divided, layer, stock, division, verdict)
        declared.check(layer, functools.partial(stock, layer), divided, args, kwargs)
        return divided(args, kwargs)
    before = scope.wholes
    with ledger.around(layer, Part(layer.name, False, verdict.whole, verdict.operations)):
        out = stock(layer, *args, **kwargs)
    if scope.wholes == before:  # no layer inside is the reason
        warn_of_whole(subject, verdict)
    scope.wholes += 1
    return out


def _inside(layer: Any) -> list[Any]:
    return [inner for inner in keras_common.flat_layers(layer) if inner is not layer]


def _divided(
    layer: Any, stock: Any, division: Division, verdict: Verdict, args: Any, kwargs: Any
) -> Any:
    region = Region(division, layer, verdict.draws, verdict.statistics)
    out = _on_own_rows(region, verdict, stock, args, kwargs)
    return _with_notes(layer, *out) if verdict.leaves_notes else out


def _on_own_rows(region: Region, verdict: Verdict, stock: Any, args: Any, kwargs: Any) -> Any:
    """Calls the region's layer on this worker's rows; returns its outputs for the whole batch."""
    layer, division = region.layer, region.division
    held = [(v, kind, v.read_value()) for v, kind in verdict.assigned]
    before = {id(loss) for found in keras_layers.lists_of_losses(layer) for loss in found}
    args, kwargs = tf.nest.map_structure(region.enter, (args, kwargs))
    # Operations get the components of a ragged or sparse argument.
    region.admit(tf.nest.flatten((args, kwargs), expand_composites=True))
    used = variables.used_by(layer, verdict.variables)
    checking = region.checking() if verdict.reads_behind else contextlib.nullcontext()
    call = noting(layer, stock) if verdict.leaves_notes else functools.partial(stock, layer)
    with (
        variables.used_by_rows(division.exchange, layer, used, verdict.positions),
        scope.entered(region),
        checking,
    ):
        if scope.compiles and region.graph is not None:
            out = compiled.call(layer, call, args, kwargs)
        else:
            out = call(*args, **kwargs)
    region.leave_losses(before, verdict.losses)
    # All workers began with one value; the batch's change is the sum, or the mean, of theirs.
    for variable, kind, value in held:
        combine = division.mean if kind == "mean" else division.sum
        variable.assign(value + combine(variable.read_value() - value))
    flat = tf.nest.flatten(out)
    factors = _declared_factors(layer, flat) if verdict.factors is None else verdict.factors
    if len(flat) != len(factors):
        raise InvalidArgumentError(
            "A layer that is divided must return as many tensors outside a tf.function as inside "
            f"one. Received: {layer.name}, which returned {len(flat)}, and {len(factors)} "
            "in a graph. Wrap it: nanotf.whole(layer)."
        )
    left = [region.leave(*pair) for pair in zip(flat, factors, strict=True)]
    return tf.nest.pack_sequence_as(out, left)


def _declared_factors(layer: Any, outputs: Sequence[Any]) -> list[int]:
    for output in outputs:
        if not tf.is_tensor(output) or output.shape.rank == 0:
            kind = "a scalar" if tf.is_tensor(output) else f"a {type(output).__qualname__}"
            raise ModelError(
                "A layer that nanotf.by_rows declares must return tensors with rows along their "
                f"first axis. Received: {layer.name}, which returns {kind}. Leave nanotf.by_rows "
                "out."
            )
    return [1] * len(outputs)


def _with_notes(layer: Any, out: Any, notes: dict[tuple[int, str], Any]) -> Any:
    """Leaves tensors in attributes, as the call of `noting` did; returns the call's outputs."""
    layers = users_layers(layer)
    for (place, name), value in notes.items():
        vars(layers[place])[name] = value
    return out


def _division_for(
    layer: Any, stock: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Division | None:
    """Returns the division of a layer's call, None if it is undivided. Builds an unbuilt model."""
    leaves = tf.nest.flatten((args, kwargs))
    data = [leaf for leaf in leaves if is_data(leaf)]
    if not data or generation().is_symbolic(leaves):
        return None
    if layer.built and not layer.weights and not any(map(rows.rows_of, data)):
        return None  # there is nothing to gain
    division = _division_of(scope.exchange, data[0])
    if division is not None and not layer.built and isinstance(layer, keras_models.model_class()):
        with scope.dividing(None):
            keras_build.build_symbolically(layer, stock, args, kwargs, is_data)
    return division if layer.built else None  # its first call builds it, from the whole batch


def _division_of(exchange: Any, first: Any) -> Division | None:
    """Returns the division of a batch by the rows of `first`, None if there are none."""
    joined = rows.rows_of(first)
    if joined is not None and joined.factor == 1:
        return joined.division
    n = first.shape[0]
    if n is None:
        is_ragged = isinstance(first, tf.RaggedTensor)
        return Division(exchange, first.nrows(tf.int32) if is_ragged else tf.shape(first)[0])
    return Division(exchange, int(n)) if n else None  # an empty batch has no row to pad with
