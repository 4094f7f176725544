"""Shared memory without names.

A block is an anonymous memory file. The workers get its descriptor over the control
socket. Nothing appears in a file system, so no other process can open it and nothing stays
behind after `kill -9`. The size of `/dev/shm` sets no limit.

A server's front, which has no arrays, imports this. So NumPy is imported where an array is made.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nanotf.wire.memory_files import anonymous_file

if TYPE_CHECKING:
    import numpy as np

ALIGNMENT = 64  # bytes; Eigen and oneDNN want tensors to start at multiples of this
PAGE = 4096  # bytes; a block takes whole pages anyway


def aligned(nbytes: int, to: int = ALIGNMENT) -> int:
    """Rounds a size in bytes up to the next multiple of `to`."""
    return -(-nbytes // to) * to


class Block:
    """A piece of memory that several processes map.

    Args:
        nbytes: size in bytes; 0 is rounded up, since an empty file cannot be mapped.
        fd: a descriptor received from the process that created the block. It is closed when the
            block is mapped. None creates a new block, zero-filled, and keeps a descriptor to hand
            out until `close_fd`.

    The mapping lives as long as any array over it, even if this object is gone.
    """

    def __init__(self, nbytes: int, fd: int | None = None) -> None:
        self.nbytes = self.size_for(nbytes)
        self.fd = anonymous_file(self.nbytes, fixed=True) if fd is None else fd
        # Also closes the descriptor of a block that is dropped.
        self._closer = weakref.finalize(self, os.close, self.fd)
        try:
            self._map = mmap.mmap(self.fd, self.nbytes)
        except BaseException:
            self._closer()
            raise
        if fd is not None:
            self.close_fd()

    @staticmethod
    def size_for(nbytes: int) -> int:
        """Returns the size in bytes of a block that was asked for `nbytes`."""
        return max(nbytes, ALIGNMENT)

    def array(self, offset: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        """Returns a view of part of the block.

        Args:
            offset: in bytes from the block's start.
            dtype: NumPy dtype or its name.

        Returns:
            A writable array that shares the block's memory.
        """
        import numpy as np

        view: np.ndarray[Any, Any]
        view = np.ndarray(shape, dtype=dtype, buffer=self._map, offset=offset)
        return view

    def write(self, offset: int, array: np.ndarray[Any, Any]) -> None:
        """Copies a contiguous array to byte `offset`.

        While the descriptor is open, the kernel copies. It then need not clear newly allocated
        pages, as it must when the mapping touches them. That takes half the time.
        """
        if array.size == 0:
            return
        self.write_bytes(offset, memoryview(array.reshape(-1).view("uint8").data))

    def write_bytes(self, offset: int, data: bytes | memoryview) -> None:
        """Copies bytes to byte `offset`, as `write` does."""
        if not self._closer.alive:
            self._map[offset : offset + len(data)] = data
            return
        done = 0
        while done < len(data):  # Linux writes at most 2 GiB at once
            done += os.pwrite(self.fd, memoryview(data)[done:], offset + done)

    def view(self) -> memoryview:
        """Returns the block's memory, as bytes that can be written."""
        return memoryview(self._map)

    def reserve(self, offset: int, nbytes: int) -> None:
        """Allocates memory for a part of the block, in a thread. The descriptor must be open.

        Allocating pages only when they are written would slow down the end of the first epoch.
        """
        if nbytes == 0 or not hasattr(os, "posix_fallocate"):  # macOS has none
            return
        fd = os.dup(self.fd)  # the thread may outlive `close_fd`

        def allocate() -> None:
            try:
                os.posix_fallocate(fd, offset, nbytes)
            except OSError:
                pass  # no memory: the first write to the pages reports it
            finally:
                os.close(fd)

        threading.Thread(target=allocate, name="nanotf-reserve", daemon=True).start()

    def close_fd(self) -> None:
        """Closes the descriptor. The memory is freed with the last view of it."""
        self._closer()

    def discard(self) -> None:
        """Frees the memory at once. Processes that still map the block read zeros from now on.

        A dataset that captured a tensor may stay alive in a worker until Python collects its
        reference cycle, and would keep a gigabyte allocated.
        """
        if hasattr(mmap, "MADV_REMOVE"):  # only Linux has it
            self._map.madvise(mmap.MADV_REMOVE)


class Packing:
    """Arrays on their way into one block: one after another, each aligned."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.parts: list[tuple[int, np.ndarray[Any, Any]]] = []  # each with its offset in bytes

    def add(self, array: np.ndarray[Any, Any]) -> int:
        """Takes an array, of any strides; returns its offset in bytes."""
        offset = self.nbytes
        self.parts.append((offset, array))
        self.nbytes += aligned(array.nbytes)
        return offset

    def write(self, block: Block, start: int = 0) -> None:
        """Copies the arrays into a block, from byte `start` on."""
        for offset, array in self.parts:
            if array.flags.c_contiguous:
                block.write(start + offset, array)
            else:  # which `Block.write` cannot take
                block.array(start + offset, array.shape, array.dtype)[...] = array

    def moved(self, block: Block) -> Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]:
        """Returns a function that replaces an array by its read-only copy in a block.

        It returns other arrays than those that `write` has copied as they are.

        Args:
            block: the one that `write` got.
        """
        offsets = {_place(array): offset for offset, array in self.parts}

        def found(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            offset = offsets.get(_place(array))
            if offset is None:
                return array
            copy = block.array(offset, array.shape, array.dtype)
            copy.flags.writeable = False
            return copy

        return found

    def content(self) -> bytes:
        """Returns what `write` copies, where it is too little for a block."""
        return b"".join(a.tobytes().ljust(aligned(a.nbytes), b"\0") for _, a in self.parts)

    def block(self) -> Block:
        """Returns a new block with the arrays."""
        block = Block(self.nbytes)
        self.write(block)
        return block


def _place(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    """Returns an array's address and its size in bytes."""
    return array.__array_interface__["data"][0], array.nbytes


def private_view(fd: int, nbytes: int) -> np.ndarray[Any, Any]:
    """Returns the bytes of a block, of which this process gets a copy where it writes.

    Args:
        fd: the block's descriptor, which stays open.
        nbytes: the block's size in bytes.
    """
    import numpy as np

    mapped = mmap.mmap(fd, nbytes, access=mmap.ACCESS_COPY)
    view: np.ndarray[Any, Any] = np.ndarray((nbytes,), np.uint8, buffer=mapped)
    return view
