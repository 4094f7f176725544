"""The C interface of the library (`native/shm.h`, `records.h`) and checks that it is usable."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

from nanotf.collectives import layout
from nanotf.errors import NanoError

LIBRARY = Path(__file__).with_name("_shm.so")
OPS_LIBRARY = Path(__file__).with_name("_ops.so")
REMEDY = (
    "`python -m nanotf.collectives.build` builds it, with a C++ compiler or `pip install ziglang`."
)

# NanotfType and NanotfReduction of `native/shm.h`.
TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3, "int32": 4, "int64": 5}
REDUCTIONS = {"sum": 0, "min": 1, "max": 2}


class NanotfConfig(ctypes.Structure):
    """`NanotfConfig`."""

    _fields_ = [
        ("nonce", ctypes.c_uint64),
        ("size", ctypes.c_uint64),
        ("chunk_bytes", ctypes.c_uint64),
        ("nodes", ctypes.c_uint64),
        ("symmetric_bytes", ctypes.c_uint64),
        ("spin_seconds", ctypes.c_double),
        ("deadline_seconds", ctypes.c_double),
    ]


class Fragment(ctypes.Structure):
    """`NanotfFragment`."""

    _fields_ = [
        ("source", ctypes.c_void_p),  # `in` in C, a keyword of Python
        ("out", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
    ]


class NanotfCall(ctypes.Structure):
    """`NanotfCall`."""

    _fields_ = [
        ("key", ctypes.c_uint32),
        ("name", ctypes.c_char_p),
        ("type", ctypes.c_char_p),
        ("shapes", ctypes.POINTER(ctypes.c_int64)),  # per tensor: rank, then sizes; -1 for any
        ("count", ctypes.c_int64),
        ("follows", ctypes.c_uint32),  # 1: this rank has joined
        ("kind", ctypes.c_uint32),
    ]


class NanotfOffer(ctypes.Structure):
    """`NanotfOffer`."""

    _fields_ = [
        ("key", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("type", ctypes.c_uint32),
        ("reduction", ctypes.c_uint32),
        ("bytes", ctypes.c_uint64),
    ]


class NanotfScan(ctypes.Structure):
    """`NanotfScan`."""

    _fields_ = [
        ("limit", ctypes.c_uint64),  # given: corrupt TFRecords that may still be skipped
        ("searched", ctypes.c_uint64),  # given and returned: bytes known to have no newline
        ("records", ctypes.c_uint64),  # returned, like all below: spans written
        ("skipped", ctypes.c_uint64),
        ("consumed", ctypes.c_uint64),  # bytes of complete records
        ("fault_at", ctypes.c_uint64),  # offset of the faulty record
        ("fault", ctypes.c_uint32),
    ]


# NanotfAllocate. ctypes takes the GIL for the call, which the collective has released.
Allocate = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.POINTER(ctypes.c_void_p)
)


@functools.cache
def load() -> ctypes.CDLL:
    """Loads the library and declares the types of its functions."""
    # Unlike PyDLL it releases the GIL: this rank's other threads run while a collective waits.
    library = ctypes.CDLL(os.fspath(LIBRARY))
    call, failure = ctypes.POINTER(NanotfCall), ctypes.POINTER(layout.RawFailure)
    handle, address, size = ctypes.c_int64, ctypes.c_void_p, ctypes.c_uint64
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "attach": (handle, [ctypes.POINTER(NanotfConfig), ctypes.c_int, ctypes.c_int, failure]),
        "all_reduce": (
            ctypes.c_int,
            [
                handle,
                call,
                ctypes.c_int,
                ctypes.c_int,
                ctypes.POINTER(Fragment),
                handle,
                failure,
            ],
        ),
        "reduce_scatter": (
            ctypes.c_int,
            [
                handle,
                call,
                ctypes.c_int,
                ctypes.POINTER(Fragment),
                handle,
                address,
                size,
                failure,
            ],
        ),
        "gather_parts": (
            ctypes.c_int,
            [handle, call, address, size, size, ctypes.POINTER(Fragment), handle, failure],
        ),
        "drop_values": (ctypes.c_int, [handle, handle]),
        "all_gather": (
            ctypes.c_int,
            [handle, call, address, size, size, Allocate, address, failure],
        ),
        "broadcast": (ctypes.c_int, [handle, call, ctypes.c_int, address, address, size, failure]),
        "barrier": (ctypes.c_int, [handle, call, failure]),
        "join": (ctypes.c_int, [handle]),
        "next": (
            ctypes.c_int,
            [handle, ctypes.c_int, ctypes.POINTER(NanotfOffer), failure],
        ),
        "times": (ctypes.c_int, [handle, ctypes.POINTER(ctypes.c_int64)]),
        "begin_steps": (ctypes.c_int, [handle, ctypes.POINTER(ctypes.c_int64)]),
        "stamp": (ctypes.c_int, [handle, failure]),
        "abort": (ctypes.c_int, [handle, ctypes.c_char_p]),
        "failures": (ctypes.c_int64, [handle, failure]),
        "close": (ctypes.c_int, [handle]),
        "layout_of": (None, [size, size, size, ctypes.POINTER(layout.Layout)]),
        "vectors": (ctypes.c_char_p, []),
        "scan_records": (
            None,
            [ctypes.c_int, address, size, ctypes.POINTER(size), size, ctypes.POINTER(NanotfScan)],
        ),
        "crc32c": (ctypes.c_uint32, [address, size, ctypes.c_int]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"nanotf_{name}")
        # Otherwise ctypes would pass and return C ints, and cut handles and sizes to 32 bits.
        function.restype, function.argtypes = result, arguments
    return library


def layout_of(size: int, chunk_bytes: int, nodes: int = 1) -> layout.Layout:
    """Describes the memory of a group; arguments as in `GroupSpec`."""
    found = layout.Layout()
    load().nanotf_layout_of(size, chunk_bytes, nodes, found)
    return found


def native_status() -> tuple[bool, str]:
    """Returns whether the library is usable, and the reason. Takes about 1 ms.

    Only a worker finds out if TensorFlow can load the ops; see `group.load_ops`.
    """
    for path in (LIBRARY, OPS_LIBRARY):
        if not path.exists():
            return False, f"{path.name} was not built"
    try:
        if layout_of(2, 4096).magic != layout.MAGIC:  # the same for any size
            return False, f"{LIBRARY.name} is from another version; rebuild it"
        return True, f"{LIBRARY.name}, {load().nanotf_vectors().decode()}"
    except (OSError, AttributeError) as error:  # AttributeError: it lacks a function
        return False, f"{LIBRARY.name} cannot be loaded: {error}"


def check_available(use: str, otherwise: str = "") -> None:
    """Raises `NanoError` if the native library cannot be used here.

    Args:
        use: what needs it, as the beginning of a sentence: "Several workers need".
        otherwise: what to do instead, a sentence.
    """
    available, reason = native_status()
    if not available:
        raise NanoError(
            f"{use} nanotf's native library. Received: {reason}. {REMEDY} {otherwise}".rstrip()
        )
