"""TensorFlow's random numbers, tapes and tensor use in eager code (identical in 2.14 to 2.21).

| name | why |
| --- | --- |
| `tensorflow.python.eager.context.context()._seed`, `_rng`, `clear_kernel_cache`, `list_function_names`, `get_function_def` | the seed of `tf.random.set_seed` and the generator that seeds eager operations; TensorFlow can reset them but cannot report their state |
| `context._context`, `_context_handle` | whether TensorFlow has begun; each public name that tells begins it |
| `record.record_operation`, `stop_recording`, `should_record_backprop` | the operations that tapes record |
| `op_callbacks.add_op_callback` | the tensors that eager operations use |
| `ops.tensor_id`, `ops.uid` | the order in which tensors were made |
| `Context._thread_local_data` | every eager operation, call of a function and step of an iterator reads it |
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tensorflow.python.eager import context
from tensorflow.python.eager import record as recorder
from tensorflow.python.framework import op_callbacks, ops
from tensorflow.python.ops import gen_resource_variable_ops

from nanotf.compat import graphs
from nanotf.compat.random_states import LateRandom
from nanotf.wire.own_threads import OwnThread


def seeds() -> tuple[int, Any] | None:
    """Returns the seed given to `tf.random.set_seed` and the state of the operation seeds.

    None if no seed was given.
    """
    here = context.context()
    given, operations = here._seed, getattr(here, "_rng", None)  # `_rng` comes with the first seed
    return None if given is None or operations is None else (given, operations.getstate())


def has_begun() -> bool:
    """Returns True if TensorFlow has run an operation in this process, and so has its threads."""
    here = context._context
    return here is not None and here._context_handle is not None


_seeded: list[Any] = [None, 0]  # the generator that `tf.random.set_seed` made last; how often


def seeding() -> int:
    """Returns a number that changes whenever `tf.random.set_seed` is called, with any seed.

    The call starts all random operations anew, those of traced functions too.
    """
    made = getattr(context.context(), "_rng", None)
    if made is not _seeded[0]:
        _seeded[:] = made, _seeded[1] + 1
    return int(_seeded[1])


def forget_kernels() -> None:
    """Frees the kernels of eager operations, with the functions that they have instantiated.

    TensorFlow keeps one for each combination of attributes for as long as a process lives, and the
    operations that make a dataset have its functions as attributes. A kernel that is still needed
    is made anew. Does nothing if a function draws from a state in its kernel: it would begin anew.
    """
    here = context.context()
    for name in here.list_function_names():
        if any(map(graphs.draws, here.get_function_def(name).node_def)):
            return
    here.clear_kernel_cache()


def follow(taken: tuple[int, Any] | None, is_new: bool) -> None:
    """Sets what `seeds` returned in another process.

    Args:
        taken: the result of `seeds` there.
        is_new: whether that process has set a seed since, see `seeding`.
    """
    _set_seeds(taken)
    if is_new:
        context.context().clear_kernel_cache()


def made_outside(make: Callable[[], Any]) -> Any:
    """Returns what a function makes apart from any trace, tape or strategy: in another thread.

    TensorFlow traces a function twice if a variable is made in its first trace.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(make).result()


@contextlib.contextmanager
def initializing() -> Iterator[None]:
    """Gives variables that are made in this context their initial values at its end.

    Code that makes variables in the first trace of a `tf.function` leaves them so: what it assigns
    to them is part of that trace, which never runs, since TensorFlow traces the function again.
    """
    first: dict[int, list[Any]] = {}  # of each handle made here: itself, and its first value

    def note(
        op_type: str,
        inputs: Any,
        attributes: Any,
        outputs: Any,
        op_name: Any = None,  # TensorFlow passes the last two by name
        graph: Any = None,
    ) -> None:
        if op_type == "VarHandleOp":
            first[id(outputs[0])] = [outputs[0]]
        elif op_type.startswith("Assign") and id(inputs[0]) in first:
            first[id(inputs[0])].append(inputs[1])

    op_callbacks.add_op_callback(note)
    try:
        yield
    finally:
        op_callbacks.remove_op_callback(note)
    for handle, *values in first.values():
        if len(values) > 1:
            gen_resource_variable_ops.assign_variable_op(handle, values[0])


@contextlib.contextmanager
def seeded(number: int | None) -> Iterator[None]:
    """Gives the graphs that are made in this context a seed, as `tf.random.set_seed` would.

    The seeds of eager operations stay as they are.

    Args:
        number: the seed; None for graphs without one.
    """
    here = context.context()
    before, here._seed = here._seed, number
    try:
        yield
    finally:
        here._seed = before


@contextlib.contextmanager
def seeded_for_now(number: int) -> Iterator[None]:
    """Does what `tf.random.set_seed` does, in this context, and takes it back at its end.

    Kernels stay, so that functions traced in an earlier such context continue their sequences. A
    seed that code in this context sets stays, too.
    """
    here, made = context.context(), random.Random(number)
    before = here._seed, getattr(here, "_rng", None)
    here._seed, here._rng = number, made
    try:
        yield
    finally:
        if here._rng is made:
            here._seed, here._rng = before


def restore_seeds(taken: tuple[int, Any] | None) -> None:
    """Restores what `seeds` returned.

    If the state changes, cached kernels are dropped, as `tf.random.set_seed` does. A cached kernel
    that got the same seeds again would continue its old sequence.
    """
    if taken != seeds():
        _set_seeds(taken)
        context.context().clear_kernel_cache()


def _set_seeds(taken: tuple[int, Any] | None) -> None:
    here = context.context()
    generator = getattr(here, "_rng", None) or random.Random()  # the same, for `seeding`
    here._seed, here._rng = None, None
    if taken is not None:
        here._seed, here._rng = taken[0], generator
        here._rng.setstate(taken[1])


def seed(number: int, is_new: bool) -> None:
    """Sets TensorFlow's seed. Keeps cached kernels if it can, since to make them again takes long.

    Kernels are cached by their seeds: a new seed finds none, and one that was used before finds
    kernels in the middle of their sequences.

    Args:
        number: below 2**63.
        is_new: whether this process has not had the seed before.
    """
    here = context.context()
    here._seed, here._rng = number, LateRandom(number)
    if not is_new:
        here.clear_kernel_cache()


def record(name: str, outputs: Any, inputs: Any, gradient: Any) -> None:
    """Records on the active tapes that `outputs` are computed from `inputs`.

    Args:
        name: of the operation.
        outputs, inputs: lists of tensors.
        gradient: takes the outputs' gradients and returns the inputs'.
    """
    recorder.record_operation(name, outputs, inputs, gradient)


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Stops all tapes from recording in this context."""
    with recorder.stop_recording():
        yield


def may_have_gradient(tensor: Any) -> bool:
    """Returns True if code may ask for the gradient with respect to a tensor.

    In a graph, any tensor but a constant may have one; in eager code, any tensor that a tape
    watches.
    """
    if isinstance(tensor, ops.EagerTensor):
        return bool(recorder.should_record_backprop([tensor]))
    return bool(tensor.op.type != "Const")


def key_of(tensor: Any) -> int:
    """Returns a number unique to a tensor in this process; later tensors have greater numbers."""
    return int(ops.tensor_id(tensor))


@contextlib.contextmanager
def earlier_inputs() -> Iterator[dict[int, Any]]:
    """Collects earlier floating-point tensors that eager operations in this context use.

    Yields:
        A dict of `key_of` to tensor, filled as operations run.
    """
    now, used = ops.uid(), dict[int, Any]()

    def note(
        op_type: str,
        inputs: Any,
        attributes: Any,
        outputs: Any,
        op_name: Any = None,  # TensorFlow passes the last two by name
        graph: Any = None,
    ) -> None:
        for tensor in inputs:
            is_value = isinstance(tensor, ops.EagerTensor) and tensor.dtype.is_floating
            if is_value and key_of(tensor) < now:
                used[key_of(tensor)] = tensor

    op_callbacks.add_op_callback(note)
    try:
        yield used
    finally:
        op_callbacks.remove_op_callback(note)


class FirstUse:
    """An action that precedes the first use of TensorFlow, on any thread of the user's.

    Args:
        act: takes and returns nothing; may use TensorFlow. Other threads wait for its end.

    Attributes:
        has_acted: bool.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self.has_acted = False
        self._act = act
        self._error: BaseException | None = None

    def note(self) -> None:
        """Acts, if the present thread is the user's and no other has been here."""
        # A thread that TensorFlow has made, one of `py_function`, serves a thread that was here.
        if isinstance(threading.current_thread(), (OwnThread, threading._DummyThread)):
            return
        with _turns:
            if not self.has_acted:
                self.has_acted = True  # before, since the action comes here itself
                try:
                    self._act()
                except BaseException as error:
                    self._error = error
                    raise

    @contextlib.contextmanager
    def awaited(self) -> Iterator[FirstUse]:
        """Acts at the first use of TensorFlow in this context.

        Raises:
            BaseException: That of `act`, even if the code in this context has caught it.
        """
        here: Any = context.context()
        with _turns:
            if not _awaited:
                kind: type = type(here)
                here.__class__ = _watched(kind)
            _awaited.append(self)
        try:
            yield self
        finally:
            with _turns:
                _awaited.remove(self)
                if not _awaited:
                    here.__class__ = type(here).__mro__[1]
        if self._error is not None:
            raise self._error


_awaited: list[FirstUse] = []  # of calls in several threads, or of one within another
# One for all: an action uses TensorFlow, and so may begin another's.
_turns = threading.RLock()


@functools.cache
def _watched(kind: Any) -> Any:
    """Returns a class of contexts that call `FirstUse.note` before each use."""

    class WatchedContext(kind):  # type: ignore[misc]
        @property
        def _thread_local_data(self) -> Any:
            for each in tuple(_awaited):  # without the lock: another thread may remove its own
                each.note()
            return vars(self)["_thread_local_data"]

    return WatchedContext
