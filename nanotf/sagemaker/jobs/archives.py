"""The archives of a job: model.tar.gz and output.tar.gz."""

from __future__ import annotations

import pathlib
import tarfile
from collections.abc import Iterable

from nanotf.sagemaker.jobs import addresses
from nanotf.sagemaker.jobs.record import JobFolder, JobRequest
from nanotf.sagemaker.jobs.tree import CONTAINER_BASE
from nanotf.wire import files


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
    with (
        files.new_file(archive) as file,
        tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as tar,
    ):
        for entry in entries:
            tar.add(entry, arcname=entry.name)
    return True


def model_folders(job: JobFolder, request: JobRequest) -> list[pathlib.Path]:
    """Returns what is packed as the model: SM_MODEL_DIR of each host, else a `model_dir` inside."""
    folders = [job.tree(host).model for host in request.host_names]
    if any(folder.is_dir() and any(folder.iterdir()) for folder in folders):
        return folders
    # Scripts for local mode of SageMaker's SDK may save in `model_dir` alone.
    folder = model_dir(job, request)
    return [folder] if isinstance(folder, pathlib.Path) and _is_inside(folder, job) else folders


def model_dir(job: JobFolder, request: JobRequest) -> pathlib.Path | str | None:
    """Returns the hyperparameter `model_dir`: a path as this process sees it, or an address.

    None if there is none.
    """
    value = request.hyperparameters.get("model_dir")
    if not isinstance(value, str) or not value:
        return None
    if addresses.local_path(value) is None:
        return value
    first = job.tree(request.host_names[0])
    path = first.code / value.removeprefix("file://")  # the script's working directory
    if path.is_relative_to(CONTAINER_BASE):  # a private mount, which this process does not see
        path = first.base / path.relative_to(CONTAINER_BASE)
    return path


def _is_inside(folder: pathlib.Path, job: JobFolder) -> bool:
    """Returns True for a folder in the job that does not hold its code, records or logs."""
    folder, root = folder.resolve(), job.path.resolve()
    own = (job.code.resolve(), job.logs.resolve(), *(root / "hosts").glob("*/input"))
    return folder.is_relative_to(root) and not any(each.is_relative_to(folder) for each in own)
