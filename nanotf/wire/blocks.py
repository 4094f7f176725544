"""Shared memory without names.

A block is an anonymous memory file whose descriptor is handed to the workers over the
control socket. Nothing appears in a file system, so nothing can be opened by a stranger
or stay behind after `kill -9`, and the size of `/dev/shm` sets no limit.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from typing import Any

import numpy as np

from nanotf.wire.memory_files import anonymous_file

ALIGNMENT = 64  # bytes; what Eigen and oneDNN want of a tensor's start


def aligned(nbytes: int) -> int:
    """Rounds a size in bytes up to the next multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Block:
    """A piece of memory that several processes map.

    Args:
        nbytes: int, size in bytes; 0 is rounded up, since nothing cannot be mapped.
        fd: int or None, a descriptor received from the process that created the block, which
            is closed when the block is mapped. `None` creates a new block, zero-filled, and
            keeps a descriptor to hand out until `close_fd`.

    The mapping lives as long as an array over it does, whatever happens to this object.
    """

    def __init__(self, nbytes: int, fd: int | None = None) -> None:
        self.nbytes = max(nbytes, ALIGNMENT)
        self.fd = anonymous_file(self.nbytes, fixed=True) if fd is None else fd
        self._closer = weakref.finalize(self, os.close, self.fd)
        try:
            self._map = mmap.mmap(self.fd, self.nbytes)
        except BaseException:
            self._closer()
            raise
        if fd is not None:
            self.close_fd()

    def array(self, offset: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        """A view of part of the block.

        Args:
            offset: int, in bytes from the block's start.
            shape: tuple of int.
            dtype: NumPy dtype or its name.

        Returns:
            A writable `numpy.ndarray` that shares the block's memory.
        """
        view: np.ndarray[Any, Any]
        view = np.ndarray(shape, dtype=dtype, buffer=self._map, offset=offset)
        return view

    def write(self, offset: int, array: np.ndarray[Any, Any]) -> None:
        """Copies a contiguous array to byte `offset`.

        While the descriptor is open, the kernel does it: it need not clear the pages that it
        allocates, as it must when they are touched through the mapping; that takes half the time.
        """
        if array.size == 0:
            return
        data = memoryview(array.reshape(-1).view(np.uint8).data)
        if not self._closer.alive:
            self._map[offset : offset + len(data)] = data
            return
        done = 0
        while done < len(data):
            done += os.pwrite(self.fd, data[done:], offset + done)

    def reserve(self, offset: int, nbytes: int) -> None:
        """Allocates memory for a part of the block, in a thread; the descriptor must be open.

        Pages that are allocated only when they are written make the first epoch's end slow.
        """
        if nbytes == 0 or not hasattr(os, "posix_fallocate"):
            return
        fd = os.dup(self.fd)

        def allocate() -> None:
            try:
                os.posix_fallocate(fd, offset, nbytes)
            except OSError:
                pass  # no memory: whoever needs the pages will say so
            finally:
                os.close(fd)

        threading.Thread(target=allocate, name="nanotf-reserve", daemon=True).start()

    def close_fd(self) -> None:
        """Closes the descriptor; the memory goes with the last view of it."""
        self._closer()

    def discard(self) -> None:
        """Gives the memory back at once; who still maps the block reads zeros from now on.

        A dataset that captured a tensor may live on in a worker until Python collects the
        cycle that it hangs in, and would keep a gigabyte with it.
        """
        if hasattr(mmap, "MADV_REMOVE"):
            self._map.madvise(mmap.MADV_REMOVE)
