"""Finds the user's code that lies beside a model.

An archive `model.tar.gz` holds `code/inference.py` at its root, and models below, at any depth:

    code/inference.py, code/requirements.txt, code/lib/...
    export/Servo/1/saved_model.pb
"""

from __future__ import annotations

import pathlib

CODE = "code"
SCRIPT = "inference.py"


def find_code(folder: pathlib.Path, root: pathlib.Path) -> pathlib.Path | None:
    """Returns the folder of the code that belongs to a model.

    Args:
        folder: the model's: a version's folder, or a `.keras` file.
        root: the folder that is served, such as an unpacked archive. No folder above is searched.

    Returns:
        The nearest `code` that holds an `inference.py`, from the model's folder up to the root; or
        None.
    """
    folder, root = folder.absolute(), root.absolute()
    places = [folder, *folder.parents]
    for place in places[: places.index(root) + 1] if root in places else [folder]:
        if (place / CODE / SCRIPT).is_file():
            return place / CODE
    return None
