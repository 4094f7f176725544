"""Horovod's reductions, and the compression of what they exchange. Imports no TensorFlow."""

from __future__ import annotations

from typing import Any

from nanotf.errors import InvalidArgumentError, UnavailableError


class Reduction:
    """A reduction over ranks.

    Args:
        name: Horovod's name.
        collective: the name of the group's reduction; None if nanotf lacks it.
    """

    def __init__(self, name: str, collective: str | None) -> None:
        self.name, self.collective = name, collective

    def __repr__(self) -> str:
        return f"hvd.{self.name}"


Average = Reduction("Average", "sum")  # a sum, divided on each rank
Sum = Reduction("Sum", "sum")
Min = Reduction("Min", "min")
Max = Reduction("Max", "max")
# Scripts name them in defaults and branches, so they exist; `chosen` refuses them.
Adasum = Reduction("Adasum", None)
Product = Reduction("Product", None)


def chosen(op: Any, average: bool | None = None) -> Reduction:
    """Returns the reduction that arguments ask for.

    Args:
        op: one of the above; None for `Average`.
        average: the older argument: False means `Sum`.

    Raises:
        InvalidArgumentError: Both arguments are given, or `op` is no reduction.
        UnavailableError: nanotf lacks it.
    """
    if average is not None:
        if op is not None:
            raise InvalidArgumentError(
                "Only one of op and average may be given. Received: "
                f"op={op!r}, average={average!r}. Leave average out."
            )
        return Average if average else Sum  # `average=False` is how old scripts ask for a sum
    if op is None:
        return Average
    if not isinstance(op, Reduction):
        raise InvalidArgumentError(
            f"op must be hvd.Average, hvd.Sum, hvd.Min or hvd.Max. Received: op={op!r}."
        )
    if op.collective is None:
        raise UnavailableError(
            f"nanotf reduces by hvd.Average, hvd.Sum, hvd.Min and hvd.Max. Received: op={op!r}. "
            "Use hvd.Average, with the learning rate for the global batch."
        )
    return op


class Compressor:
    """A way to exchange numbers as they are.

    Attributes:
        dtype: the name of the type that floats are exchanged in; None for their own.
    """

    dtype: str | None = None


class Fp16Compressor(Compressor):
    """A way to exchange floats in 16 bits. They are summed in 32, and rounded once."""

    dtype = "float16"


class Compression:
    """The ways to exchange tensors, as values of the argument `compression`."""

    none = Compressor
    fp16 = Fp16Compressor
