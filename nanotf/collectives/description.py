"""Descriptions of calls, for peers and people: `native/description.h` in pure Python."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence

from nanotf.collectives.engine import Array

_SHOWN = 4  # tensors in a summary


@dataclasses.dataclass(frozen=True)
class CollectiveDescription:
    """A description of a collective call. Ranks raise if their descriptions differ."""

    name: str  # such as "all_reduce(sum)"
    tensors: Sequence[str] = ()  # such as "float32[2, 3]"

    @property
    def summary(self) -> str:
        """One line for people, with only the first tensors."""
        if not self.tensors:
            return self.name
        count = len(self.tensors)
        more = f", ... ({count} tensors)" if count > _SHOWN else ""
        return f"{self.name} of {', '.join(self.tensors[:_SHOWN])}{more}"

    @property
    def details(self) -> bytes:
        """The full text for peers: a line for the name and one for each tensor."""
        return "\n".join([self.name, *self.tensors]).encode()

    @property
    def signature(self) -> int:
        """A 64-bit hash of the details, of two checksums: one would miss too many differences."""
        details = self.details
        return zlib.crc32(details) << 32 | zlib.adler32(details)

    def side(self, at: int) -> str:
        """Describes this call for people. Tensor `at`, if it exists, is the first that differs."""
        count = len(self.tensors)
        if count < 2:
            return self.summary
        more = f", tensor {at + 1}: {self.tensors[at]}" if at < count else ""
        return f"{self.name} of {count} tensors{more}"


def describe(
    name: str, arrays: Sequence[Array] = (), any_rows: bool = False
) -> CollectiveDescription:
    """Describes a call.

    Args:
        any_rows: whether ranks may differ in the first dimension.
    """
    tensors = []
    for array in arrays:
        dims = [str(dim) for dim in array.shape]
        if any_rows:
            dims[0] = "*"
        tensors.append(f"{array.dtype.name}[{', '.join(dims)}]")
    return CollectiveDescription(name, tensors)


def difference(first: bytes, rank: int, other: bytes) -> str:
    """Describes for people how the details of rank 0 and of another rank differ."""
    a, b = (CollectiveDescription(name, tensors) for name, *tensors in map(_lines, (first, other)))
    pairs = enumerate(zip(a.tensors, b.tensors, strict=False))
    both = min(len(a.tensors), len(b.tensors))
    at = next((number for number, (one, two) in pairs if one != two), both)
    return f"rank 0: {a.side(at)}; rank {rank}: {b.side(at)}"


def _lines(details: bytes) -> list[str]:
    return details.decode().split("\n")
