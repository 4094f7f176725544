"""The state of a process that has not imported NumPy, such as a server's front."""

import subprocess
import sys

CODE = """
import sys
from nanotf.compat.process_state import ProcessState
plain = ProcessState.capture(early=True)
assert "numpy" not in sys.modules
import numpy as np  # from here on a worker of that process
fresh = np.geterr()
plain.restore()
np.seterr(all="raise")
plain.restore()
assert np.geterr() == fresh
np.seterr(all="raise")
later = ProcessState.capture(early=True)
np.seterr(all="ignore")
later.restore()
assert np.geterr()["over"] == "raise"
"""


def test_workers_find_numpy_as_it_is_at_its_import() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)
