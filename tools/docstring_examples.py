"""Griffe extension: reads the heading "Example" of nanotf's docstrings as Google's "Examples".

Griffe takes "Example:" for an admonition, whose text is Markdown: `>>>` would become quotations.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_HEADING = re.compile(r"^(\s*)Example:$", re.MULTILINE)


class DocstringExamples(griffe.Extension):
    """Renames the heading in each docstring when it is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Renames it in one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = _HEADING.sub(r"\1Examples:", obj.docstring.value)
