"""Memory that is returned to the system."""

from __future__ import annotations

import ctypes
import mmap
import sys

_DONT_NEED = getattr(mmap, "MADV_DONTNEED", None) if sys.platform == "linux" else None


def can_drop(nbytes: int) -> bool:
    """Returns True if `drop` does anything for so many bytes."""
    return _DONT_NEED is not None and nbytes > mmap.PAGESIZE


def drop(address: int, nbytes: int) -> None:
    """Returns the pages between two addresses to the system. What was in them is lost.

    See `madvise(2)`, `MADV_DONTNEED`.
    """
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    system = ctypes.CDLL(None).madvise
    system.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    system(begin, max(0, end - begin), _DONT_NEED)


def return_unused() -> None:
    """Returns what this process has freed and glibc's allocator keeps; see `malloc_trim(3)`.

    glibc asks the system for each block of more than 32 MiB anew, and returns it. It keeps smaller
    ones: an end of the heap, or a gap, is returned by this call alone.
    """
    system = ctypes.CDLL(None)
    if hasattr(system, "malloc_trim"):
        system.malloc_trim(ctypes.c_size_t(0))
