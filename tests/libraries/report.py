"""Runs a program under `nanotf run -n 2`, then tells what the last call has divided, as JSON."""

import atexit
import json
import sys

import nanotf
from nanotf.cli import main


def tell():
    report = nanotf.last_report()
    parts = [] if report is None else report.parts
    found = [[part.name, part.is_divided, part.why] for part in parts]
    print(json.dumps({"has_workers": report is not None, "parts": found}))


atexit.register(tell)
sys.exit(main(["run", "-n", "2", sys.argv[1]]))
