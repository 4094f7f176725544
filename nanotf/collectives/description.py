"""Descriptions of calls, for other hosts and people, as `native/description.h` has them."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence

from nanotf.collectives.engine import Array

_SHOWN = 4  # tensors in a summary


@dataclasses.dataclass(frozen=True)
class CollectiveDescription:
    """A description of a collective call. Hosts raise if their descriptions differ."""

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
    def signature(self) -> int:
        """A 64-bit hash, of two checksums: one would miss too many differences."""
        details = "\n".join([self.name, *self.tensors]).encode()
        return zlib.crc32(details) << 32 | zlib.adler32(details)


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
