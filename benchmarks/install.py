"""Measures the README's way to install nanotf: `python -m benchmarks.install [--help]`.

`pip install '.[cpu,examples]'` in a new virtual environment, from a copy of this clone without what
was built there: the seconds, downloads and the build of the native library included, and the size
of the files of each distribution, as pip records them.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks import report

ROOT = pathlib.Path(__file__).resolve().parents[1]
EXTRAS = "cpu,examples"
# Runs in the new environment. A file that pip lists and that is gone has no size.
SIZES = """
import importlib.metadata, json
sizes = {}
for each in importlib.metadata.distributions():
    paths = [path.locate() for path in each.files or ()]
    sizes[each.name] = sum(path.stat().st_size for path in paths if path.is_file())
print(json.dumps(sizes))
"""


def measure(folder: pathlib.Path, extras: str) -> dict[str, Any]:
    """Installs nanotf in a folder.

    Returns:
        A dict of `environment` (s, to make the virtual environment), `seconds` (of the
        installation) and `sizes` (bytes by the name of each distribution that it brought).

    Raises:
        subprocess.CalledProcessError: The installation failed.
    """
    clone, venv = folder / "clone", folder / "venv"
    subprocess.run(["git", "clone", "--quiet", "--no-local", ROOT, clone], check=True)
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    made = time.monotonic()
    python, outside = str(venv / "bin/python"), {"PYTHONPATH", "PYTHONHOME"}
    kept = {name: value for name, value in os.environ.items() if name not in outside}

    def sizes() -> dict[str, int]:
        found = subprocess.check_output([python, "-c", SIZES], env=kept, cwd=folder, text=True)
        return dict(json.loads(found))

    before = sizes()
    begin = time.monotonic()
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, f"{clone}[{extras}]"], env=kept, cwd=folder, check=True)
    seconds = time.monotonic() - begin
    brought = {name: size for name, size in sizes().items() if name not in before}
    return {"environment": made - began, "seconds": seconds, "sizes": brought}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.install", description=__doc__)
    parser.add_argument("--extras", default=EXTRAS, help=f"of nanotf, default {EXTRAS}")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(pathlib.Path(folder), options.extras)
    print(json.dumps(result) if options.json else report.install(result))


if __name__ == "__main__":
    main()
