"""The results of a job: its archives, on this disk and at the address that receives them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator

from nanotf.errors import JobError, NanoError
from nanotf.sagemaker.jobs import addresses, archives
from nanotf.sagemaker.jobs.record import JobFolder, JobRequest


def pack(job: JobFolder, request: JobRequest, with_room: Callable[..., object]) -> None:
    """Makes the archives of what the scripts have saved.

    Args:
        with_room: takes a name and an action that needs room on the disk.

    Raises:
        JobError: They cannot be written.
    """
    trees = [job.tree(host) for host in request.host_names]
    for archive, folders in (
        (job.model, archives.model_folders(job, request)),
        (job.output, [tree.output_data for tree in trees]),
    ):
        try:
            with_room(archive.name, lambda a=archive, f=folders: archives.pack(f, a))
        except OSError as error:
            kept = ", ".join(str(folder) for folder in folders)
            raise JobError(
                f"A job packs its results when its script has ended. Received: {error}, for "
                f"{archive}. The results are kept in {kept}."
            ) from error


def upload(
    job: JobFolder, request: JobRequest, checkpoints: pathlib.Path, with_room: Callable[..., object]
) -> Iterator[str]:
    """Sends the archives and the checkpoints to their addresses, and yields the name of each.

    Args:
        checkpoints: the job's folder of checkpoints, for those with a remote address.
        with_room: as for `pack`: an address may be on a disk, too.

    Raises:
        JobError: An address does not take them.
    """
    for source, address in _sent(job, request, checkpoints):
        try:
            with_room(source.name, lambda s=source, a=address: addresses.upload(s, a))
        except Exception as error:  # of the storage's own package
            why = str(error) if isinstance(error, NanoError) else f"{type(error).__name__}: {error}"
            raise JobError(
                f"The results of a job must reach their address. Received: {address}: "
                f"{why.rstrip('.')}. They are kept in {source}: copy them from there."
            ) from error
        yield source.name  # recorded by the caller: from now on the address counts


def _sent(
    job: JobFolder, request: JobRequest, checkpoints: pathlib.Path
) -> Iterator[tuple[pathlib.Path, str]]:
    for archive in (job.model, job.output):
        if request.upload is not None and archive.exists():
            yield archive, addresses.join(request.upload, request.name, "output", archive.name)
    place = request.checkpoints
    # A job that was stopped early has none.
    if place is not None and addresses.local_path(place) is None and checkpoints.is_dir():
        yield checkpoints, place
