"""MkDocs hook: turns each docs/notebooks/NAME.ipynb into a page.

The notebooks are committed without outputs. A page has their text and code, and a link to the file.
Other pages link to the .ipynb file, which readers of the repository can open; on the site such a
link leads to the page.
"""

from __future__ import annotations

import json
import pathlib
import re
from typing import Any

from mkdocs.structure.files import File

FOLDER = "notebooks"
_LINK = re.compile(rf"(\((?:\.\./)*(?:{FOLDER}/)?\w+)\.ipynb((?:#[\w-]+)?\))")


def on_files(files: Any, config: Any) -> Any:
    """Adds a page for each notebook."""
    for path in sorted(pathlib.Path(config.docs_dir, FOLDER).glob("*.ipynb")):
        content = page(json.loads(path.read_text(encoding="utf-8")), path.name)
        files.append(File.generated(config, f"{FOLDER}/{path.stem}.md", content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Makes links to notebooks lead to their pages."""
    return _LINK.sub(r"\1.md\2", markdown)


def page(notebook: dict[str, Any], name: str) -> str:
    """Writes a notebook as Markdown.

    Args:
        notebook: dict, the parsed file.
        name: str, its file name.

    Returns:
        The text of the page. The link to the file stands below the title.
    """
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
    title, _, rest = parts[0].partition("\n")
    link = f'<a href="../{name}" download>Download this notebook</a>'
    return "\n\n".join([title, link, rest.strip(), *parts[1:]]) + "\n"
