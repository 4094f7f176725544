"""The public API as type checkers and editors see it.

TensorFlow has no types, and `fit` takes the arguments of the installed Keras and nanotf's. They are
spelled out here: Keras 3's, those that Keras 2 alone takes, then nanotf's.
tests/packaging/test_types.py compares them with the signatures at run time.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, overload

import keras
import tensorflow as tf
from typing_extensions import Self

from nanotf.keras import layers as layers
from nanotf.keras import optimizers as optimizers
from nanotf.report.call_report import Report

__all__ = [
    "Model",
    "Sequential",
    "layers",
    "nano",
    "nano_bf16",
    "nano_multiprocessing",
    "nano_multiprocessing_loss",
    "optimizers",
]

_F = TypeVar("_F", bound=Callable[..., Any])
_P = ParamSpec("_P")

class _History(tf.keras.callbacks.History):  # type: ignore[misc]
    history: dict[str, list[Any]]
    epoch: list[int]
    params: dict[str, Any]
    model: Any
    nanotf: Report

# One class at run time, but TensorFlow's type stubs declare their own.
class Model(tf.keras.Model[Any, Any], keras.Model):  # type: ignore[misc]
    @overload
    def __init__(
        self, inputs: Any, outputs: Any, name: str | None = None, *, trainable: bool = True
    ) -> None: ...
    @overload
    def __init__(
        self,
        *,
        name: str | None = None,
        trainable: bool = True,
        dtype: Any = None,
        activity_regularizer: Any = None,
        autocast: bool = True,
    ) -> None: ...
    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Creates a Keras model whose `fit`, `evaluate` and `predict` take `num_processes`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...
    # Subclasses define these with arguments of their own choice.
    def build(self, *args: Any, **kwargs: Any) -> Any: ...
    def call(self, *args: Any, **kwargs: Any) -> Any: ...
    def train_step(self, *args: Any, **kwargs: Any) -> Any: ...
    def test_step(self, *args: Any, **kwargs: Any) -> Any: ...
    def predict_step(self, *args: Any, **kwargs: Any) -> Any: ...
    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        run_eagerly: bool | None = False,
        steps_per_execution: int | Literal["auto"] | None = 1,
        jit_compile: bool | Literal["auto"] | None = "auto",
        auto_scale_loss: bool = True,
    ) -> None: ...
    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool | str = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
        max_queue_size: int = 10,
        workers: int = 1,
        use_multiprocessing: bool = False,
        *,
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
    ) -> _History: ...
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        *,
        return_dict: bool = False,
        max_queue_size: int = 10,
        workers: int = 1,
        use_multiprocessing: bool = False,
        num_processes: int | None = None,
        transport: Literal["shm", "grpc"] | None = None,
        cores_per_process: int | None = None,
        cores: Sequence[int] | None = None,
        backend: Literal["local", "multiprocessing", "ray", "hosts"] | None = None,
        read_processes: int | Literal["auto"] | None = None,
    ) -> Any: ...
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        callbacks: Any = None,
        max_queue_size: int = 10,
        workers: int = 1,
        use_multiprocessing: bool = False,
        *,
        num_processes: int | None = None,
        transport: Literal["shm", "grpc"] | None = None,
        cores_per_process: int | None = None,
        cores: Sequence[int] | None = None,
        backend: Literal["local", "multiprocessing", "ray", "hosts"] | None = None,
        read_processes: int | Literal["auto"] | None = None,
    ) -> Any: ...

class Sequential(Model, keras.Sequential):  # type: ignore[misc]
    def __init__(
        self, layers: Any = None, *, trainable: bool = True, name: str | None = None
    ) -> None: ...

def nano(
    num_processes: int | None = None,
    transport: Literal["shm", "grpc"] | None = None,
    cores_per_process: int | None = None,
    cores: Sequence[int] | None = None,
    max_restarts: int = 0,
    backend: Literal["local", "multiprocessing", "ray", "hosts"] | None = None,
) -> Callable[[_F], _F]: ...
@overload
def nano_multiprocessing(function: _F) -> _F: ...
@overload
def nano_multiprocessing(function: None = None) -> Callable[[_F], _F]: ...
@overload
def nano_bf16(function: _F) -> _F: ...
@overload
def nano_bf16(function: None = None) -> Callable[[_F], _F]: ...
@overload
def nano_multiprocessing_loss(function: Callable[_P, Any], /) -> Callable[_P, Any]: ...
@overload
def nano_multiprocessing_loss(
    function: None = None, /, **kwargs: Any
) -> Callable[[Callable[_P, Any]], Callable[_P, Any]]: ...
