"""The archives of a job: model.tar.gz and output.tar.gz."""

from __future__ import annotations

import pathlib
import tarfile
from collections.abc import Iterable


def pack(folders: Iterable[pathlib.Path], archive: pathlib.Path) -> bool:
    """Packs the content of folders into one archive, in one step.

    Where two folders have a file of the same name, that of the later one is extracted last.

    Args:
        folders: one for each host; one that does not exist counts as empty.
        archive: the `.tar.gz`, which appears only when it is whole.

    Returns:
        False if the folders hold nothing. There is no archive then.
    """
    entries = [e for folder in folders if folder.is_dir() for e in sorted(folder.iterdir())]
    if not entries:
        return False
    part = archive.with_name(f".{archive.name}.part")
    try:
        with tarfile.open(part, "w:gz", compresslevel=6) as tar:
            for entry in entries:
                tar.add(entry, arcname=entry.name)
        part.replace(archive)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return True
