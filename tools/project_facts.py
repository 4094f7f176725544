"""Facts of the project, each from its only place: the addresses, the version.

The addresses are in pyproject.toml, under `[project.urls]`. README.md and the pages name files of
the repository instead, so they stay true wherever it is.
"""

from __future__ import annotations

import pathlib
import re
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parents[1]
_URLS = re.compile(r"^\[project\.urls\]\n(.*?)(?=^\[|\Z)", re.MULTILINE | re.DOTALL)
_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
# Reserved for documents, so nobody's: https://www.rfc-editor.org/rfc/rfc2606
_RESERVED = re.compile(r"(^|\.)(example(\.(com|net|org))?|invalid|test|localhost)$")


def addresses() -> dict[str, str]:
    """Returns the addresses of pyproject.toml, by name: "Source", "Documentation", ..."""
    section = _URLS.search((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert section is not None, "pyproject.toml has no [project.urls]"
    return dict(re.findall(r'^(\w+) = "([^"]*)"$', section[1], re.MULTILINE))


def placeholders(urls: dict[str, str]) -> dict[str, str]:
    """Returns those addresses whose host belongs to nobody."""
    return {
        name: url
        for name, url in urls.items()
        if _RESERVED.search(urllib.parse.urlsplit(url).hostname or "localhost")
    }


def version() -> str:
    """Returns the version, without importing nanotf."""
    found = _VERSION.search((ROOT / "nanotf/__init__.py").read_text(encoding="utf-8"))
    assert found is not None, "nanotf/__init__.py has no __version__"
    return found[1]
