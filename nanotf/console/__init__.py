"""Everything that nanotf writes to the user's terminal or log without being asked.

- `lines.py`: lines that stay, by `say` and `logger`.
- `progress_rows.py`: rows that change while something takes time: `status`, and `ItemBar` for the
  items of a call.
- `screen.py`: shows rows, at the bottom of a terminal or as lines of a log.

Any folder may call it. It imports none of them.
"""

from nanotf.console.lines import (
    LIBRARIES,
    PREFIX,
    STREAMS,
    Quiet,
    logger,
    pass_on,
    prefixed,
    say,
    warn_once,
)
from nanotf.console.progress_rows import ItemBar, silent, status

__all__ = [
    "LIBRARIES",
    "PREFIX",
    "STREAMS",
    "ItemBar",
    "Quiet",
    "logger",
    "pass_on",
    "prefixed",
    "say",
    "silent",
    "status",
    "warn_once",
]
