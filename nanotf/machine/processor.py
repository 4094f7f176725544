"""The processor's features, from `/proc/cpuinfo`."""

from __future__ import annotations

import os
import pathlib
import re
from dataclasses import dataclass

from nanotf.console import warn_once
from nanotf.machine.cgroups import read_text

# Flags as Linux names them, in the order in which they are shown.
_SHOWN = {
    "avx2": "AVX2",
    "fma": "FMA",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_tile": "AMX",
    "amx_bf16": "AMX BF16",
}


@dataclass(frozen=True)
class Processor:
    """A processor."""

    name: str = ""  # the vendor's name for it; empty if unknown
    flags: frozenset[str] = frozenset()  # its features, as Linux names them

    @property
    def has_bfloat16(self) -> bool:
        """Returns True if it multiplies bfloat16 numbers without converting them first."""
        return not self.flags.isdisjoint(("avx512_bf16", "amx_bf16"))

    def features(self) -> tuple[str, ...]:
        """Returns the features that matter to training, by their usual names."""
        return tuple(text for flag, text in _SHOWN.items() if flag in self.flags)


def read_processor(root: pathlib.Path = pathlib.Path("/")) -> Processor:
    """Reads `/proc/cpuinfo`.

    Args:
        root: the directory that holds `proc`, default `/`; another one in tests.
    """
    text = read_text(root / "proc/cpuinfo") or ""
    name = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.*)$", text, re.MULTILINE)
    return Processor(name[1] if name else "", frozenset(flags[1].split() if flags else ()))


def warn_of_slow_bfloat16(what: str) -> None:
    """Warns, once per process, that this processor is slower in bfloat16 than in float32.

    Does not warn in a worker, since its parent has warned, nor if the processor's features are
    unknown.

    Args:
        what: names the computation in bfloat16.
    """
    if "NANOTF_RANK" in os.environ:
        return
    found = read_processor()
    if found.flags and not found.has_bfloat16:
        warn_once(
            "This processor has no bfloat16 instructions (AVX-512 BF16 or AMX): %s saves memory "
            "here, but is slower than float32.",
            what,
        )
