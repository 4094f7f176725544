"""MkDocs hook: turns each docs/notebooks/NAME.ipynb into a page.

A page has the text, the code and the outputs of a notebook, which tools/run_notebooks.py keeps in
the file, and a link to the file.
Other pages link to the .ipynb file, which readers of the repository can open; on the site such a
link leads to the page.
"""

from __future__ import annotations

import html
import json
import pathlib
import re
from typing import Any

from mkdocs.structure.files import File

FOLDER = "notebooks"
_EMPTY = re.compile(r"\n\s*\n")
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
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts += [_shown(output) for output in cell["outputs"]]
    title, _, rest = parts[0].partition("\n")
    link = f'<a href="../{name}" download>Download this notebook</a>'
    return "\n\n".join([title, link, rest.strip(), *parts[1:]]) + "\n"


def _shown(output: dict[str, Any]) -> str:
    """Writes an output as HTML: what was printed, a picture, or the HTML of an object."""
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "text/html" in data:
        shown = "".join(data["text/html"])
    elif "image/png" in data:
        encoded = "".join(data["image/png"]).replace("\n", "")
        shown = f'<img alt="output" src="data:image/png;base64,{encoded}">'
    else:
        shown = f"<pre>{html.escape(''.join(data['text/plain']).rstrip())}</pre>"
    # Markdown ends a block of HTML at an empty line.
    return f'<div class="nanotf-output">{_EMPTY.sub("&#10;&#10;", shown)}</div>'
