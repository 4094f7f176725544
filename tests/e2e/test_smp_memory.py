"""`nanotf.smp` trains in less memory."""

from __future__ import annotations

import json
import os
import pathlib

import pytest
from processes import run_python

PROGRAM = pathlib.Path(__file__).with_name("microbatch_memory.py")
PARENT = pathlib.Path(__file__).with_name("parent_memory.py")
FEW_ADDRESSES = """
import pathlib, resource
import tensorflow as tf
from nanotf.compat import values
kept = tf.fill([1000], 7)
(size,) = [line for line in pathlib.Path("/proc/self/status").open() if line.startswith("VmSize")]
most = (int(size.split()[1]) << 10) + (300 << 20)
resource.setrlimit(resource.RLIMIT_AS, (most, most))
values.return_freed(2 << 30)
print(int(kept[-1]))
"""


def test_sixteen_microbatches_need_less_memory_than_one(tmp_path: pathlib.Path) -> None:
    """Only one microbatch's activations exist at a time."""
    peaks = json.loads(run_python(tmp_path, PROGRAM))
    assert peaks["1"] > 100 * 2**20, peaks  # the activations of the whole batch
    assert peaks["16"] < 0.5 * peaks["1"], peaks


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two cores")
def test_the_parent_of_ranks_holds_no_weights(tmp_path: pathlib.Path) -> None:
    """Weights and slots lie in shared memory, where the ranks have read and written them."""
    found = json.loads(run_python(tmp_path, PARENT))
    weights, (before, *after) = found["weights"], found["private"]
    assert all(each < before - 0.5 * weights for each in after), found


@pytest.mark.thorough
def test_freed_memory_is_returned_where_addresses_are_few(tmp_path: pathlib.Path) -> None:
    """`ulimit -v` leaves as few. TensorFlow's allocator waits for some, 10 seconds."""
    assert run_python(tmp_path, "-c", FEW_ADDRESSES) == "7\n"
