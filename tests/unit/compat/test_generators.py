"""`compat.generators`: a dataset of a generator does not slow its process down."""

import subprocess
import sys

_PROGRAM = """
import resource, sys
import numpy as np, tensorflow as tf
from nanotf.compat.generators import from_generator

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        np.ones(2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def read(made):
    assert [int(n) for n in made] == [1, 2]

spec = tf.TensorSpec([], tf.int64)
if sys.argv[1] == "plain":
    read(tf.data.Dataset.from_generator(lambda: [1, 2], output_signature=spec))
else:
    read(from_generator(lambda: [1, 2], spec))
pages()
print(pages())
"""


def _new_pages(which: str) -> int:
    command = [sys.executable, "-c", _PROGRAM, which]
    return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def test_memory_is_used_again() -> None:
    """20 arrays of 8 MiB would need thousands of pages if each got fresh ones."""
    assert _new_pages("ours") < 1000
