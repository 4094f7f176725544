"""`python -m nanotf` is the command `nanotf`."""

import sys

from nanotf.cli import main

sys.exit(main())
