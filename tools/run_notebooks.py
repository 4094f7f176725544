#!/usr/bin/env python3
"""Runs the tutorials in docs/notebooks, and keeps their outputs in the files.

Usage: run_notebooks.py [NAME.ipynb ...]

The repository's pages and the site show these outputs. Each file also keeps a digest of its code,
by which a test notices outputs of other code.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
import sys
from typing import Any

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "docs/notebooks"
_TYPES = ("text/html", "image/png", "text/plain")
_ADDRESS = re.compile(r"^<.* at 0x[0-9a-f]+>$")


def digest(notebook: dict[str, Any]) -> str:
    """Returns the digest of the code of a parsed notebook."""
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()[:16]


def kept(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the outputs of a cell with what a page shows of them.

    Pieces of one stream are joined, and of lines that are drawn again the last state stays. An
    object that shows only its address shows nothing.
    """
    found: list[dict[str, Any]] = []
    for output in outputs:
        if output["output_type"] != "stream":
            data = output["data"]
            richest = next(kind for kind in _TYPES if kind in data)
            if not _ADDRESS.search("".join(data[richest])):
                shown = {"data": {richest: data[richest]}, "metadata": {}}
                found.append({"output_type": "display_data", **shown})
            continue
        if not found or found[-1].get("name") != output["name"]:
            found.append({"output_type": "stream", "name": output["name"], "text": ""})
        found[-1]["text"] += "".join(output["text"])
    for stream in found:
        if "text" in stream:
            lines = stream["text"].split("\n")
            stream["text"] = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)
    return found


def run(path: pathlib.Path) -> None:
    """Runs a notebook, and writes it with its outputs."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    about = dict(notebook["metadata"])  # without the versions that a run adds
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    for cell in notebook["cells"]:
        cell["metadata"].pop("execution", None)
        if cell["cell_type"] == "code":
            cell["execution_count"] = None
            cell["outputs"] = [nbformat.from_dict(each) for each in kept(cell["outputs"])]
    about["language_info"] = {"name": "python"}
    notebook["metadata"] = nbformat.from_dict({**about, "nanotf": {"outputs_of": digest(notebook)}})
    nbformat.write(notebook, path)


def main() -> int:
    """Runs the notebooks of the command line, or all."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    for path in map(pathlib.Path, sys.argv[1:] or sorted(FOLDER.glob("*.ipynb"))):
        print(path.name, flush=True)
        run(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
