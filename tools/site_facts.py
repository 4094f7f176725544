"""MkDocs hook: the site's addresses, and below each page the version and the date of the text.

Placeholders of pyproject.toml become no link.
"""

from __future__ import annotations

import os
import subprocess
import time
from typing import Any

import project_facts


def on_config(config: Any) -> Any:
    """Fills in what pyproject.toml, nanotf/__init__.py and git know."""
    urls = project_facts.addresses()
    if not project_facts.placeholders(urls):
        config.site_url = urls["Documentation"].rstrip("/") + "/"
        config.repo_url = urls["Source"]
    config.copyright = f"nanotf {project_facts.version()}, {_date()}"
    return config


def _date() -> str:
    """Returns the day of the last commit, or today's outside a clone."""
    given = (
        os.environ.get("SOURCE_DATE_EPOCH")
        or subprocess.run(
            ["git", "-C", project_facts.ROOT, "log", "-1", "--format=%ct"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
    )
    return time.strftime("%d %B %Y", time.gmtime(int(given) if given else None)).lstrip("0")
