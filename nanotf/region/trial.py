"""Tries a layer before it is first divided, to find out if it treats rows independently.

A user's layer runs on four random rows, then on the first row, then on the other three. The
results show which outputs have rows and what the others are: a mean over rows, a sum, or equal for
any rows. If an output is none of these, rows depend on each other, and the layer runs whole on
every worker. Layers made only of Keras's own are known and not tried.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from nanotf.compat import eager_context, handles, keras_names
from nanotf.console import logger
from nanotf.region import scope, trial_values
from nanotf.region.rows import Division

_PARTS = ((0, 4), (0, 1), (1, 4))  # all rows, and two parts of them
_RELATIVE, _ABSOLUTE = 1e-3, 1e-4  # for 32-bit and 64-bit numbers
_OF_16_BITS = 5e-2


@dataclasses.dataclass(frozen=True)
class Along:
    """The place of an output's rows that are not along its first axis, as in stacked states.

    Args:
        axis: int, at least 1.
    """

    axis: int


@dataclasses.dataclass(frozen=True)
class Facts:
    """The results of a trial.

    Args:
        runs_whole: bool, whether the layer cannot be divided.
        factors: tuple, per output the number of its rows per row of the batch, `Along` another
            axis, "mean", "sum", or None for a value equal on all workers. None instead of a tuple
            if shapes tell.
        losses: str, "mean" or "sum", the kind of the losses that the layer gives to `add_loss`.
        draws: tuple of bool, one per draw of random numbers in the call, in order, whether it has
            rows; None if shapes tell.
        variables: tuple of the trainable `tf.Variable`s that the call reads.
        assigned: tuple of pairs of a `tf.Variable` that the call assigns and the kind of its
            change, "mean" or "sum" over rows. Omits variables whose change is equal for any rows.
        reads_behind: bool, whether it uses tensors that are not arguments.
        leaves_notes: bool, whether it leaves tensors in attributes, see `noting`. Then `factors`
            has their factors after those of the outputs.
        runs_whole_in_graphs: bool, whether a graph has shown that the layer has other outputs in
            graphs than in the trial.
    """

    runs_whole: bool = False
    factors: tuple[Any, ...] | None = ()
    losses: str = "mean"
    draws: tuple[bool, ...] | None = None
    variables: tuple[Any, ...] = ()
    assigned: tuple[tuple[Any, str], ...] = ()
    reads_behind: bool = False
    leaves_notes: bool = False
    runs_whole_in_graphs: bool = False

    @property
    def runs_whole_here(self) -> bool:
        return self.runs_whole or (self.runs_whole_in_graphs and scope.graph_here() is not None)


def users_layers(layer: Any) -> list[Any]:
    """Returns the layers with user classes among a layer and the layers inside it."""
    return [v for v in keras_names.flat_layers(layer) if not keras_names.is_keras_own(type(v))]


def noting(layer: Any, stock: Any) -> Any:
    """Makes a call return its outputs and the tensors it leaves in attributes of users' layers.

    Returns:
        A function that returns a tuple of the outputs and a dict of tensors, by the layer's place
        among `users_layers` and the attribute.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        layers = users_layers(layer)
        before = [keras_names.users_attributes(v) for v in layers]
        out = stock(*args, **kwargs)
        notes = {
            (place, name): value
            for place, (v, known) in enumerate(zip(layers, before, strict=True))
            for name, value in keras_names.users_attributes(v).items()
            if value is not known.get(name) and isinstance(value, tf.Tensor)
        }
        return out, notes

    return call


class Trial:
    """A call in a trial. Its random numbers are known, and it records how many are drawn.

    Args:
        first: int, the first row that it is called on.
        end: int, the row after the last one.

    Attributes:
        lengths: list of int or None, first dimensions of the random numbers drawn.
    """

    def __init__(self, first: int, end: int) -> None:
        self.first, self.end = first, end
        self.lengths: list[int | None] = []

    def draw(self, shape: Any, dtype: Any) -> Any:
        """Returns fixed values for random numbers of a shape: a row's are equal in each call.

        They decrease from row to row, so that a layer that sorts rows by them reorders the rows.
        """
        found = [int(d) for d in np.ravel(tf.get_static_value(tf.convert_to_tensor(shape)))]
        self.lengths.append(found[0] if found else None)
        length = found[0] if found else 1
        first = self.first if length == self.end - self.first else 0
        levels = 0.5 / (1 + np.arange(first, first + length))
        levels = levels.reshape([-1, *[1] * (len(found) - 1)] if found else [])
        return tf.cast(tf.broadcast_to(levels, found), dtype)


_known: weakref.WeakKeyDictionary[Any, dict[Any, Facts]] = weakref.WeakKeyDictionary()
_warned: weakref.WeakSet[Any] = weakref.WeakSet()  # layers of which a warning was given


def facts_of(
    layer: Any,
    stock: Any,
    args: Any,
    kwargs: Any,
    division: Division,
    is_data: Callable[[Any], bool],
) -> Facts:
    """Returns the results of a layer's trial; layers made only of Keras's own need no trial.

    Args:
        layer: the layer.
        stock: the stock `__call__`.
        args, kwargs: its arguments.
        division: `Division` of the batch.
        is_data: callable, whether a leaf may have rows.
    """
    if keras_names.is_known(layer):
        return Facts(factors=None)
    leaves = tf.nest.flatten((args, kwargs))
    key = tuple(_kind(leaf, is_data) for leaf in leaves)
    known = _known.setdefault(layer, {})
    if key not in known:
        with tf.init_scope(), keras_names.kept_random_states():
            known[key] = _try(layer, stock, leaves, (args, kwargs), division, is_data)
        if known[key].runs_whole:
            warn_of_whole(
                layer, "its rows depend on each other, or it cannot be called on some of them."
            )
    return known[key]


def set_whole_in_graphs(layer: Any, facts: Facts) -> None:
    """Makes later calls with the same kinds of arguments, in graphs, run undivided at once."""
    for key, found in _known[layer].items():
        if found is facts:
            _known[layer][key] = dataclasses.replace(facts, runs_whole_in_graphs=True)


def warn_of_whole(layer: Any, why: str) -> None:
    """Warns once per layer that it runs undivided.

    Args:
        layer: the layer.
        why: str, the rest of the sentence.
    """
    if layer not in _warned:
        _warned.add(layer)
        logger.warning("%s runs undivided, on all rows, in every worker: %s", layer.name, why)


def _kind(leaf: Any, is_data: Callable[[Any], bool]) -> Any:
    if is_data(leaf):
        return str(tf.TensorShape(leaf.shape)[1:]), str(leaf.dtype)
    if isinstance(leaf, (bool, int, float, str, type(None))):
        return leaf
    return str(type(leaf))


def _try(
    layer: Any,
    stock: Any,
    leaves: Sequence[Any],
    like: Any,
    division: Division,
    is_data: Callable[[Any], bool],
) -> Facts:
    random = np.random.default_rng(0)
    made = [trial_values.value_for(leaf, division, is_data, random) for leaf in leaves]
    if any(value is None and has_rows for value, has_rows in made):
        return Facts(runs_whole=True)
    variables = keras_names.all_variables(layer)
    before = [v.numpy() for v in variables]
    # A weight that starts with zeros would hide the value that it multiplies.
    moved = [
        value + 0.1 * random.normal(size=value.shape)
        if v.trainable and v.dtype.is_floating
        else value
        for v, value in zip(variables, before, strict=True)
    ]
    results, left = [], []
    layers = users_layers(layer)
    attributes = [keras_names.users_attributes(v) for v in layers]

    def called_on(made: Sequence[tuple[Any, bool]]) -> Any:
        facts = []
        for first, end in _PARTS:
            _assign(variables, moved)
            facts.append(_call(layer, stock, made, like, first, end)[:-1])
        return _compared(facts)

    try:
        with eager_context.compared_integers() as compared:
            for first, end in _PARTS:
                _assign(variables, moved)
                with handles.watching() as used, eager_context.earlier_inputs() as behind:
                    results.append(_call(layer, stock, made, like, first, end))
                left.append([v.numpy() for v in variables])
        differs = _differs_on(compared, made, called_on, _compared([r for *r, _ in results]))
    except Exception as error:
        logger.info("%s cannot be tried: %r", layer.name, error)
        return Facts(runs_whole=True)
    finally:
        _assign(variables, before)
        for users, values in zip(layers, attributes, strict=True):
            _forget_notes(users, values)
    facts = _compared([result for *result, _ in results])
    kinds = [_kind_of_change(*parts) for parts in zip(moved, *left, strict=True)]
    if facts.runs_whole or differs or "coupled" in kinds:
        return Facts(runs_whole=True)
    assigned = tuple((v, kind) for v, kind in zip(variables, kinds, strict=True) if kind)
    return dataclasses.replace(
        facts,
        variables=tuple(used()),
        assigned=assigned,
        reads_behind=bool(behind),
        leaves_notes=any(len(notes) for *_, notes in results),
    )


def _differs_on(
    compared: set[int],
    made: Sequence[tuple[Any, bool]],
    called_on: Callable[[Any], Facts],
    facts: Facts,
) -> bool:
    """Returns True if other integers than the trial's first can make rows depend on each other.

    A loss may leave out the places of one label, and then is no mean over rows any more.

    Args:
        compared: set of int, the numbers that the layer compares with.
        made: sequence, the values of the first calls, of `trial_values.value_for`.
        called_on: callable of other values, tries the layer on these.
        facts: `Facts` of the first calls.
    """
    compared = compared - {0, 1}  # the first values have these
    if len(compared) > trial_values.MOST and trial_values.takes_integers(made):
        return True  # too many to try
    for other in trial_values.with_compared(made, compared):
        try:
            found = called_on(other)
        except Exception:  # the layer does not take this number in this place
            continue
        if found.runs_whole or (found.factors, found.losses) != (facts.factors, facts.losses):
            return True
    return False


def _kind_of_change(before: Any, whole: Any, one: Any, three: Any) -> str | None:
    """Classifies the change of a variable's value; see `_kind_of_number`."""
    if not np.issubdtype(np.asarray(before).dtype, np.number):
        return None if _close(one, whole) and _close(three, whole) else "coupled"
    return _kind_of_number(*(np.asarray(after - before) for after in (whole, one, three)))


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(tf.cast(value, variable.dtype))


def _call(
    layer: Any, stock: Any, made: Sequence[tuple[Any, bool]], like: Any, first: int, end: int
) -> Any:
    """Calls on some rows. Returns outputs with notes, losses, lengths of draws, and the notes."""
    leaves = [_tensor(v[first:end] if has_rows else v) for v, has_rows in made]
    args, kwargs = tf.nest.pack_sequence_as(like, leaves)
    running = Trial(first, end)
    with scope.trying(running), contextlib.redirect_stdout(io.StringIO()):
        found = noting(layer, stock)(layer, *args, **kwargs)
        out = [np.asarray(v) for v in tf.nest.flatten(found)]
        losses = [
            float(loss)
            for found in keras_names.lists_of_losses(layer)
            for loss in found
            if isinstance(loss, tf.Tensor) and hasattr(loss, "numpy")
        ]
    return out, losses, running.lengths, found[1]


def _forget_notes(layer: Any, before: dict[str, Any]) -> None:
    """Restores attributes where a trial has left numbers, texts or tensors in a layer."""
    for name, value in keras_names.users_attributes(layer).items():
        if value is not before.get(name) and isinstance(value, (int, float, str, tf.Tensor)):
            if name in before:
                vars(layer)[name] = before[name]
            else:
                del vars(layer)[name]


def _tensor(value: Any) -> Any:
    """Copies an array to a tensor, so that it counts as made in the trial."""
    return tf.constant(value) if isinstance(value, np.ndarray) else value


def _compared(results: Sequence[Any]) -> Facts:
    (whole, losses, lengths), (one, losses_1, lengths_1), (three, losses_3, lengths_3) = results
    if not len(whole) == len(one) == len(three) or not len(losses) == len(losses_1) == len(
        losses_3
    ):
        return Facts(runs_whole=True)
    factors = [_factor(*parts) for parts in zip(whole, one, three, strict=True)]
    kinds = {
        _kind_of_number(*map(np.asarray, parts))
        for parts in zip(losses, losses_1, losses_3, strict=True)
    }
    kinds.discard(None)
    if "coupled" in factors or "coupled" in kinds or len(kinds) > 1:
        return Facts(runs_whole=True)
    if not len(lengths) == len(lengths_1) == len(lengths_3):
        return Facts(runs_whole=True)
    draws = [parts == (4, 1, 3) for parts in zip(lengths, lengths_1, lengths_3, strict=True)]
    return Facts(False, tuple(factors), str(kinds.pop()) if kinds else "mean", tuple(draws))


def _factor(whole: Any, one: Any, three: Any) -> Any:
    rows = one.shape[0] if one.ndim else 0
    if rows and whole.shape[0] == 4 * rows and three.shape[0] == 3 * rows:
        return rows if _close(np.concatenate([one, three]), whole) else "coupled"
    axis = _other_axis(whole.shape, one.shape, three.shape)
    if axis is not None:
        return Along(axis) if _close(np.concatenate([one, three], axis), whole) else "coupled"
    return _kind_of_number(whole, one, three)


def _other_axis(whole: Any, one: Any, three: Any) -> int | None:
    """Returns the only axis in which shapes differ if it has a place for each row, else None."""
    if not len(whole) == len(one) == len(three):
        return None
    sizes = list(zip(whole, one, three, strict=True))
    axes = [axis for axis, size in enumerate(sizes) if len(set(size)) > 1]
    return axes[0] if len(axes) == 1 and sizes[axes[0]] == (4, 1, 3) else None


def _kind_of_number(whole: Any, one: Any, three: Any) -> str | None:
    if not whole.shape == one.shape == three.shape:
        return "coupled"
    if _close(one, whole) and _close(three, whole):
        return None
    if np.issubdtype(whole.dtype, np.floating) and _close((one + 3 * three) / 4, whole):
        return "mean"
    return "sum" if _close(one + three, whole) else "coupled"


def _close(a: Any, b: Any) -> bool:
    if not np.issubdtype(a.dtype, np.number):
        return bool(np.array_equal(a, b))
    coarse = a.dtype.itemsize == 2
    relative, absolute = (_OF_16_BITS, _OF_16_BITS) if coarse else (_RELATIVE, _ABSOLUTE)
    wide = np.float64
    return bool(np.allclose(a.astype(wide), b.astype(wide), relative, absolute, equal_nan=True))
