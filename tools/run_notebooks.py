#!/usr/bin/env python3
"""Runs the tutorials in docs/notebooks, and keeps their outputs in the files.

Usage: run_notebooks.py [NAME.ipynb ...]

The repository's pages and the site show these outputs. Each file also keeps a digest of its cells,
by which a test notices outputs of other cells.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import sys
from typing import Any

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "docs/notebooks"
_TYPES = ("text/html", "image/png", "text/plain")


def digest(notebook: dict[str, Any]) -> str:
    """Returns the digest of a parsed notebook's cells, without their outputs."""
    cells = [[cell["cell_type"], "".join(cell["source"])] for cell in notebook["cells"]]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()[:16]


def kept(output: dict[str, Any]) -> dict[str, Any]:
    """Returns an output with what a page shows of it: the last state of lines drawn again."""
    if output["output_type"] == "stream":
        lines = "".join(output["text"]).split("\n")
        text = "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)
        return {**output, "text": text}
    data = output["data"]
    richest = next(kind for kind in _TYPES if kind in data)
    return {
        "output_type": "display_data",
        "data": {kind: data[kind] for kind in {richest, "text/plain"} if kind in data},
        "metadata": {},
    }


def run(path: pathlib.Path) -> None:
    """Runs a notebook, and writes it with its outputs."""
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    for cell in notebook["cells"]:
        cell["metadata"].pop("execution", None)
        if cell["cell_type"] == "code":
            cell["execution_count"] = None
            cell["outputs"] = [nbformat.from_dict(kept(each)) for each in cell["outputs"]]
    notebook["metadata"]["nanotf"] = {"outputs_of": digest(notebook)}
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
