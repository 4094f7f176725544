"""Facts about the installed TensorFlow.

As a script, prints one line of JSON; `nanotf doctor` compares the lines of two environments. It
runs in its own process because TensorFlow takes seconds to import and may crash on a processor that
it was not built for.

| name | versions seen | why |
| --- | --- | --- |
| `tensorflow.python.util._pywrap_util_port.IsMklEnabled` | TensorFlow 2.14-2.21 | tells if its kernels use oneDNN in this process |
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import pathlib
import time
from typing import Any

import psutil

from nanotf.compat import versions
from nanotf.errors import UnsupportedVersionError

_TURNS = 10  # of a convolution; the first is traced


def build_facts() -> dict[str, Any]:
    """Returns versions and build features, by name."""
    allowed = _allowed_cpus(0)  # OpenMP may bind the main thread, too
    tf = versions.require_tensorflow()
    gpus = tf.config.list_physical_devices("GPU")
    # Otherwise the next operation would take nearly all memory of the GPUs.
    tf.config.set_visible_devices([], "GPU")
    tf.linalg.matmul(tf.ones((512, 512)), tf.ones((512, 512)))  # starts all threads
    threads = [_allowed_cpus(thread.id) for thread in psutil.Process().threads()]
    return {
        "tensorflow": tf.__version__,
        **_of_keras(),
        "onednn": uses_onednn(),
        "threads": len(threads),
        "bound_threads": sum(cpus < allowed for cpus in threads),
        "allocator": allocator(),
        "gpus": len(gpus),
        **_convolutions(),
    }


def _convolutions() -> dict[str, float]:
    """Returns the seconds that the same convolution takes in each precision."""
    tf = versions.require_tensorflow()

    def made(dtype: str) -> Any:
        images, kernel = tf.ones((8, 32, 32, 32), dtype), tf.ones((3, 3, 32, 64), dtype)
        return tf.function(lambda: tf.nn.relu(tf.nn.conv2d(images, kernel, 1, "SAME")))

    functions = {dtype: made(dtype) for dtype in ("float32", "bfloat16")}
    seconds = dict.fromkeys(functions, math.inf)
    for _ in range(_TURNS):  # in turns: other programs slow down both
        for dtype, function in functions.items():
            begin = time.perf_counter()
            function()
            seconds[dtype] = min(seconds[dtype], time.perf_counter() - begin)
    return seconds


def _of_keras() -> dict[str, str]:
    try:
        package = versions.keras_module_name()
    except UnsupportedVersionError as error:
        why = versions.keras_import_error() or error
        backend = os.environ.get("KERAS_BACKEND", "")
        return {"backend": backend, "error": f"Keras cannot be imported: {why}"}
    keras = importlib.import_module(package)
    return {"keras": f"{package} {keras.__version__}", "backend": keras.backend.backend()}


def _allowed_cpus(thread: int) -> set[int]:
    if not hasattr(os, "sched_getaffinity"):
        return set()
    try:
        return os.sched_getaffinity(thread)
    except ProcessLookupError:  # it has just ended
        return _allowed_cpus(0)


def allocator() -> str:
    """Returns the path of the library whose `malloc` this process calls; empty if unknown."""
    address = ctypes.cast(ctypes.CDLL(None).malloc, ctypes.c_void_p).value
    try:
        lines = pathlib.Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for fields in (line.split(maxsplit=5) for line in lines):
        begin, end = (int(number, 16) for number in fields[0].split("-"))
        if begin <= (address or 0) < end and len(fields) == 6:
            return fields[5]
    return ""


def uses_onednn() -> bool:
    """Returns True if TensorFlow is built with oneDNN and it is not switched off."""
    port = importlib.import_module("tensorflow.python.util._pywrap_util_port")
    return bool(port.IsMklEnabled())


if __name__ == "__main__":
    print(json.dumps(build_facts()))
