"""Keras models whose `fit`, `evaluate` and `predict` take `num_processes`."""

from __future__ import annotations

import abc
import contextvars
import functools
import inspect
import os
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from nanotf.compat import keras_common, keras_models, keras_steps, run_ahead
from nanotf.errors import InvalidArgumentTypeError
from nanotf.tracebacks import raising_at_the_call

_KerasModel: Any = keras_models.model_class()
_KerasSequential: Any = keras_models.sequential_class()
_KerasFunctional: Any = keras_models.functional_class()


# By a model's id and the method: nanotf's arguments of the call of a class's own method, for the
# method beneath it. The user's code may call other models meanwhile.
_passed: contextvars.ContextVar[Mapping[tuple[int, str], Mapping[str, Any]]]
_passed = contextvars.ContextVar("passed", default=types.MappingProxyType({}))


def _taking_ours(name: str, own: Any) -> Any:
    """Returns a class's own method that takes nanotf's arguments, too, and passes them beneath."""
    signature = _joined_signature(vars(Accelerated)[name], own)
    ours = signature.parameters.keys() - inspect.signature(own).parameters.keys()

    @functools.wraps(own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = {each: kwargs.pop(each) for each in ours & kwargs.keys()}
        token = _passed.set({**_passed.get(), (id(self), name): given})
        try:
            return own(self, *args, **kwargs)
        finally:
            _passed.reset(token)

    method.__signature__ = signature  # type: ignore[attr-defined]
    return method


def _taking_passed(ours: Any) -> Any:
    """Decorates a method of `Accelerated`, which gets what `_taking_ours` passes."""

    @raising_at_the_call
    @functools.wraps(ours)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        passed = _passed.get().get((id(self), ours.__name__), {})
        return ours(self, *args, **{**passed, **kwargs})

    return method


class Copied:
    """Pickling and copying of a nanotf model, mixed in before all other classes."""

    def __reduce__(self) -> Any:
        reduced: Any = super().__reduce__()
        if len(reduced) > 2:
            return reduced
        rebuild, arguments = reduced
        # Keras 3 returns a method of the model's class. Pickle looks the class up by its name, so
        # it must be Keras's or the user's own.
        cls = getattr(rebuild, "__self__", None)
        if cls is not None and "_nanotf_original" in vars(cls):
            rebuild = getattr(vars(cls)["_nanotf_original"], rebuild.__name__)
        return _unpickled, (rebuild, arguments)

    def __deepcopy__(self, memo: Any) -> Any:
        keras_deepcopy = getattr(super(), "__deepcopy__", None)  # Keras 2 has one
        if keras_deepcopy is not None:
            return accelerate(keras_deepcopy(memo))
        rebuild, arguments = self.__reduce__()
        return rebuild(*arguments)


class Accelerated:
    """The methods that nanotf adds to a Keras model.

    Mixed in between the user's classes and Keras's: a user's `fit` runs as in one process, and
    calls this one as `super().fit`.
    """

    train_function: Any
    test_function: Any

    @_taking_passed
    def fit(
        self,
        *args: Any,
        num_processes: int | Literal["auto"] | None = None,
        transport: Literal["shm", "grpc"] | None = None,
        cores_per_process: int | None = None,
        cores: Sequence[int] | None = None,
        sharding: Literal["auto", "data", "parent"] | None = None,
        max_restarts: int = 0,
        backend: Literal["local", "multiprocessing", "ray", "hosts"] | None = None,
        tune: Sequence[Literal["jit_compile", "bf16"]] | None = None,
        resume: str | os.PathLike[str] | None = None,
        read_processes: int | Literal["auto"] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Trains the model, on several core-pinned processes if asked.

        Args:
            *args: as in Keras's `fit`.
            num_processes: int, "auto" or None, default None. None or 1 trains in this process, as
                Keras does. N > 1 trains on N workers, each pinned to its own cores; `batch_size`
                stays the size of the global batch. "auto" trains the first epoch in this process
                and times its steps. It tries numbers of workers before the next epoch if that is
                expected to take no longer than a tenth of what they can save, at best, of the time
                that is left: left * (1 - 1 / n) / 10 with n workers, their start included. Then the
                fastest trains the rest. A call like one that was measured has the fastest from its
                first epoch on. With `resume`, the first such call trains in this process alone.
            transport: "shm", "grpc" or None, default None, which is "shm". Workers exchange
                gradients through shared memory or through TensorFlow's gRPC.
            cores_per_process: int or None, default None, the number of cores of each worker. None
                divides the usable cores equally.
            cores: sequence of int or None, default None, the logical CPUs to divide between the
                workers. None takes all usable cores, except those of other nanotf pools on this
                machine if enough are left.
            sharding: "auto", "data", "parent" or None, default None, which is "auto": the process
                that reads a `tf.data.Dataset`. "parent" reads it once, in this process. With
                "data", every worker reads it and keeps its own rows. "auto" chooses.
            max_restarts: int, default 0, the number of times that training restarts by itself from
                the last completed epoch, with new workers, after a worker died or got stuck.
                Nothing restarts without workers, or if a worker dies before training has begun.
            backend: "local", "multiprocessing", "ray", "hosts" or None, default None, which is
                "hosts" under `nanotf run` on several hosts, else "local". With "local" (also
                called "multiprocessing") this process starts the workers on this machine. With
                "ray", they run on this machine or on nodes of a cluster, on CPUs that Ray holds.
                With "hosts", the hosts of the run start them.
            tune: sequence of str or None, default None, settings that "auto" also measures, in a
                tenth of the time that is left at most, and uses for the rest of this call if they
                are faster. "jit_compile" tries the other value than the model's. "bf16" makes
                layers compute in bfloat16, which changes the numbers.
            resume: path or None, default None, a folder for checkpoints, also without workers.
                `fit` writes one after each epoch, and one at SIGTERM, before the process ends. The
                same call in a new process, with any number of workers, continues there, in the
                middle of an epoch too, and ends with the result of an undisturbed run. Shuffled
                arrays have the order that they have with workers.
            read_processes: int, "auto" or None, default None, with or without `num_processes`. None
                reads a `PyDataset` or `Sequence` in this process. K > 0 calls its `__getitem__` in
                K processes, ahead of its use, with the same order of batches. "auto" starts with
                one, and adds others while training waits for data.
            **kwargs: as in Keras's `fit`.

        Returns:
            A `keras.callbacks.History`. Its attribute `nanotf` is a `Report` of where the time
            went. The model and its optimizer end in the same state as after a single-process `fit`.

        Raises:
            nanotf.errors.InvalidArgumentError: An argument has a value that cannot be used. Raised
                before any process starts.
            nanotf.errors.InvalidArgumentTypeError: An argument has a type that cannot be used.
                Raised before any process starts.
            nanotf.errors.PlacementError: There are not enough cores.
            nanotf.errors.ModelError: Workers cannot train the model in its present state.
            nanotf.errors.ShippingError: The model or its data cannot be sent to the workers.
            nanotf.errors.WorkerError: A worker raised an exception; the error also has that
                exception's class. Its subclasses `WorkerDied` and `WorkerStuck` report a worker
                that ended, or that made no progress for longer than the timeout.
        """
        # The parent's side, not needed in a worker.
        from nanotf.parent import training
        from nanotf.parent.fit.fit_options import FitOptions
        from nanotf.parent.keras_call import KerasCall
        from nanotf.parent.where import Where

        call = KerasCall.of(self, super().fit, args, kwargs, Accelerated.fit)  # type: ignore[misc]
        options = FitOptions.of(sharding, max_restarts, resume)
        where = Where.of(None, transport, cores_per_process, cores, backend)
        with call.silence():
            return training.fit(call, num_processes, where, options, tune, read_processes)

    @_taking_passed
    def evaluate(
        self,
        *args: Any,
        num_processes: int | None = None,
        transport: Literal["shm", "grpc"] | None = None,
        cores_per_process: int | None = None,
        cores: Sequence[int] | None = None,
        backend: Literal["local", "multiprocessing", "ray", "hosts"] | None = None,
        read_processes: int | Literal["auto"] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Computes loss and metrics, on several core-pinned processes if asked.

        Args:
            *args: as in Keras's `evaluate`.
            num_processes, transport, cores_per_process, cores, backend, read_processes: as in
                `fit`.
            **kwargs: as in Keras's `evaluate`.

        Returns:
            The result of Keras's `evaluate`: a float, a list or a dict of them.

        Raises:
            nanotf.errors.NanoError: As in `fit`.
        """
        from nanotf.parent import inference
        from nanotf.parent.keras_call import KerasCall
        from nanotf.parent.where import Where

        call = KerasCall.of(self, super().evaluate, args, kwargs, Accelerated.evaluate)  # type: ignore[misc]
        where = Where.of(num_processes, transport, cores_per_process, cores, backend)
        with call.silence():
            return inference.evaluate(call, where, read_processes)

    @_taking_passed
    def predict(
        self,
        *args: Any,
        num_processes: int | None = None,
        transport: Literal["shm", "grpc"] | None = None,
        cores_per_process: int | None = None,
        cores: Sequence[int] | None = None,
        backend: Literal["local", "multiprocessing", "ray", "hosts"] | None = None,
        read_processes: int | Literal["auto"] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Computes the model's outputs, on several core-pinned processes if asked.

        Args:
            *args: as in Keras's `predict`.
            num_processes, transport, cores_per_process, cores, backend, read_processes: as in
                `fit`.
            **kwargs: as in Keras's `predict`.

        Returns:
            The result of Keras's `predict`: NumPy arrays in the structure of the outputs.

        Raises:
            nanotf.errors.NanoError: As in `fit`.
        """
        from nanotf.parent import inference
        from nanotf.parent.keras_call import KerasCall
        from nanotf.parent.where import Where

        call = KerasCall.of(self, super().predict, args, kwargs, Accelerated.predict)  # type: ignore[misc]
        where = Where.of(num_processes, transport, cores_per_process, cores, backend)
        with call.silence():
            return inference.predict(call, where, read_processes)

    def make_train_function(self, force: bool = False) -> Any:
        """Makes Keras's function, but steps may run ahead, and no epoch waits for its iterator."""
        super().make_train_function(force=force)  # type: ignore[misc]
        if not hasattr(self.train_function, "_nanotf_held"):  # else it was made before
            self.train_function = keras_steps.keeping(run_ahead.ahead_of_loop(self))
        return self.train_function

    def make_test_function(self, force: bool = False) -> Any:
        """Makes Keras's function, but no epoch waits for the end of its iterator."""
        super().make_test_function(force=force)  # type: ignore[misc]
        self.test_function = keras_steps.keeping(self.test_function)
        return self.test_function


def _joined_signature(ours: Any, keras_method: Any) -> inspect.Signature:
    """Returns the signature of a Keras method with the keywords of the method that extends it."""
    signature = inspect.signature(keras_method)
    parameters = list(signature.parameters.values())
    end = len(parameters) - (parameters[-1].kind is inspect.Parameter.VAR_KEYWORD)
    parameters[end:end] = [
        parameter
        for name, parameter in inspect.signature(ours).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name not in signature.parameters
    ]
    return signature.replace(parameters=parameters)


_EXTENDED = ("fit", "evaluate", "predict")

# `inspect.signature` and `help` show the arguments of the Keras in use and nanotf's.
for _name in _EXTENDED:
    _ours, _theirs = getattr(Accelerated, _name), getattr(_KerasModel, _name)
    _ours.__signature__ = _joined_signature(_ours, _theirs)
    _texts = (inspect.getdoc(_ours), f"Keras's `{_name}`:", inspect.getdoc(_theirs))
    _ours.__doc__ = "\n\n".join(filter(None, _texts))


# Keras's classes by the nanotf classes that have taken their public names; see `patching`.
in_place_of: dict[type, type] = {}


class KerasTwin(abc.ABCMeta):
    """The metaclass of all nanotf classes that take the names of Keras's.

    `isinstance(x, tf.keras.Model)` still tests for Keras's models while the name is nanotf's.

    Derived from `ABCMeta`, so that a user's model class can be abstract, as in Keras.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        if type.__instancecheck__(cls, instance):
            return True
        return cls in in_place_of and isinstance(instance, in_place_of[cls])

    def __subclasscheck__(cls, subclass: type) -> bool:
        if type.__subclasscheck__(cls, subclass):
            return True
        return cls in in_place_of and issubclass(subclass, in_place_of[cls])


class Model(Copied, Accelerated, _KerasModel, metaclass=KerasTwin):  # type: ignore[misc]
    """`tf.keras.Model` whose `fit`, `evaluate` and `predict` take `num_processes`.

    Functional (`Model(inputs, outputs)`) and subclassed models work as in Keras.
    """

    _nanotf_functional: type  # see `keras_models.make_functional`

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if _is_functional_call(args, kwargs) and cls is Model:
            return _KerasModel.__new__(Functional)
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if _is_functional_call(args, kwargs):  # a subclass that passes inputs and outputs on
            keras_models.make_functional(type(self))
        super().__init__(*args, **kwargs)


class Functional(Model, _KerasFunctional):  # type: ignore[misc]
    """The class of `nanotf.keras.Model(inputs, outputs)`."""

    # Keras compares this signature to tell a functional model from a subclassed one.
    __init__ = _KerasFunctional.__init__


Model._nanotf_functional = Functional


class Sequential(Model, _KerasSequential):  # type: ignore[misc]
    """`tf.keras.Sequential` whose `fit`, `evaluate` and `predict` take `num_processes`."""

    __init__ = _KerasSequential.__init__


for _cls, _original in ((Functional, _KerasFunctional), (Sequential, _KerasSequential)):
    # Saved models name Keras's class, so they load without nanotf, and workers rebuild Keras's own
    # class.
    _cls._nanotf_original = _original
    _cls.__module__ = _original.__module__


def _is_functional_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return (
        len(args) == 2
        or (len(args) == 1 and "outputs" in kwargs)
        or ("inputs" in kwargs and "outputs" in kwargs)
    )


@functools.cache
def _metaclass(stock: Any) -> Any:
    """Returns a metaclass whose classes have `Accelerated` right before Keras's own bases."""

    def mro(cls: Any) -> Any:
        order = [base for base in stock.mro(cls) if base is not Accelerated]
        place = next(place for place, base in enumerate(order) if keras_common.is_keras_own(base))
        return [*order[:place], Accelerated, *order[place:]]

    return type(stock.__name__, (stock,), {"mro": mro})


@functools.cache
def _accelerated_class(cls: Any) -> type:
    body = {"__module__": cls.__module__, "__init__": cls.__init__, "_nanotf_original": cls}
    for name in _EXTENDED:
        if keras_models.is_overridden(cls, name):
            body[name] = _taking_ours(name, getattr(cls, name))
    stock: Any = type(cls)
    made: type = _metaclass(stock)(cls.__name__, (Copied, Accelerated, cls), body)
    keras_models.save_as(made, cls)
    return made


def accelerated_new(keras_new: Any) -> Any:
    """Makes a `__new__` for Keras's `Model` that makes models take `num_processes`.

    Args:
        keras_new: callable, the `__new__` of Keras's `Model`.

    Returns:
        A callable. For any class, be it the user's, a library's or Keras's own, it creates an
        object of nanotf's version of the class, which derives from the given class.
    """
    ours = {_KerasModel: Model, _KerasFunctional: Functional, _KerasSequential: Sequential}

    @functools.wraps(keras_new)
    def __new__(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # For a functional call, Keras makes a Functional, and so calls this once more.
        functional = cls is _KerasModel and _is_functional_call(args, kwargs)
        if issubclass(cls, Accelerated) or functional:
            return keras_new(cls, *args, **kwargs)
        return keras_new(ours.get(cls) or _accelerated_class(cls), *args, **kwargs)

    return __new__


def _unpickled(rebuild: Any, arguments: Any) -> Any:
    return accelerate(rebuild(*arguments))


def accelerate(model: Any) -> Any:
    """Gives an existing model the methods of `nanotf.keras.Model`.

    Args:
        model: a Keras model, for instance from `tf.keras.applications`.

    Returns:
        The same object.

    Raises:
        InvalidArgumentTypeError: It is not a Keras model.
    """
    if not isinstance(model, _KerasModel):
        raise InvalidArgumentTypeError(
            "accelerate() takes a tf.keras model. "
            f"Received: an object of class {type(model).__module__}.{type(model).__qualname__}. "
            "If it is a model of another Keras generation, see TF_USE_LEGACY_KERAS."
        )
    if not isinstance(model, Accelerated):
        cls: Any = type(model)
        object.__setattr__(model, "__class__", _accelerated_class(cls))
    return model
