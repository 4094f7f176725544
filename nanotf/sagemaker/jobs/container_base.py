"""`/opt/ml` of a script: the tree of its host, by private mounts or by a link.

Scripts of containers name `/opt/ml`. A job's script, with all that it starts, finds the tree of its
host there, and no other process does (`machine.private_mounts`). It also finds its hosts by their
names, as in a container, where `/etc/hosts` has them.

Where the kernel refuses such mounts, `/opt/ml` becomes a link to the first host's tree while the
job runs, if nothing is there. Otherwise a job whose code names `/opt/ml` is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence

from nanotf.errors import InvalidArgumentError, JobError, NanoError
from nanotf.machine import private_mounts
from nanotf.machine.interpreter import python_command
from nanotf.sagemaker.detached.folders import may_pass
from nanotf.sagemaker.jobs import addresses
from nanotf.sagemaker.jobs.record import JobFolder, JobRequest
from nanotf.sagemaker.jobs.tree import CONTAINER_BASE

_NAMED = re.compile(re.escape(CONTAINER_BASE).encode() + rb"(?![\w.-])")
_CODE_BYTES = 2**20  # of each file that are searched: code is shorter
_TRY_SECONDS = 120.0  # a new interpreter, on a busy machine
_HOSTS = "/etc/hosts"
_REMEDY = (
    "Let the script use SM_MODEL_DIR and the other SM_* variables, or let the kernel allow user "
    "namespaces (sysctl user.max_user_namespaces; on Ubuntu also "
    "kernel.apparmor_restrict_unprivileged_userns=0)"
)


def prepare(job: JobFolder, request: JobRequest) -> None:
    """Writes the names of a job's hosts, and refuses code that names `/opt/ml` in vain.

    Args:
        job: its code is there.

    Raises:
        InvalidArgumentError: The code names `/opt/ml`, which cannot be the job's here.
    """
    # Real hosts have names and addresses of their own, which `nanotf run` looks up in the script.
    if request.hosts is None and pathlib.Path(_HOSTS).is_file():
        lines = [f"{address}\t{name}" for name, address in request.host_addresses.items()]
        known = pathlib.Path(_HOSTS).read_text(encoding="utf-8", errors="replace")
        job.names_of_hosts.write_text("\n".join([*lines, known]), encoding="utf-8")
    named = _where_named(job, request)
    # If mounts are refused, `provided` then yields none, and the script misses nothing.
    if named is None:
        return
    refusal = _hidden(job, request) or _ask_kernel({CONTAINER_BASE: str(job.path)})
    if refusal is not None and (hurdle := _hurdle_of_link()) is not None:
        raise InvalidArgumentError(_text(named, refusal, hurdle))


@contextlib.contextmanager
def provided(job: JobFolder, request: JobRequest) -> Iterator[dict[str, dict[str, str]]]:
    """Prepares `/opt/ml` for the scripts of a job. Called by its supervisor, which has one thread.

    Yields:
        For each host what `private_mounts.enter` gets; nothing if that is not possible here.

    Raises:
        JobError: The code names `/opt/ml`, which cannot be the job's. `prepare` did not find that.
    """
    places = {host: _places(job, host) for host in request.host_names}
    first = places[request.host_names[0]]
    # One host tells for all: their places differ only in the folders of this job.
    refusal = _hidden(job, request) or private_mounts.try_out(first)
    if refusal is None:
        yield places
        return
    named, hurdle = _where_named(job, request), _hurdle_of_link()
    if named is None:
        yield {}
        return
    if hurdle is not None:
        raise JobError(_text(named, refusal, hurdle))
    with _link(first[CONTAINER_BASE]):
        yield {}


def _places(job: JobFolder, host: str) -> dict[str, str]:
    places = {CONTAINER_BASE: str(job.tree(host).base)}
    return places | ({_HOSTS: str(job.names_of_hosts)} if job.names_of_hosts.is_file() else {})


def _text(named: str, refusal: str, hurdle: str) -> str:
    return (
        f"A script that names {CONTAINER_BASE} needs the job's folder there. Received: {named} "
        f"names it, but a private mount is not possible ({refusal}), nor is a link ({hurdle}). "
        f"{_REMEDY}."
    )


def _where_named(job: JobFolder, request: JobRequest) -> str | None:
    """Returns what names `/opt/ml`: a file of the code, an argument, or a variable."""
    for folder, _, names in os.walk(job.code):
        for name in sorted(names):
            path = pathlib.Path(folder, name)
            if path.is_file():  # a copied link may lead nowhere
                with path.open("rb") as file:
                    if _NAMED.search(file.read(_CODE_BYTES)):
                        return str(path.relative_to(job.code))
    values = json.dumps([request.hyperparameters, request.environment])
    values = values.replace(str(job.path), "")  # the estimator's own `model_dir`
    return "a hyperparameter or a variable" if _NAMED.search(values.encode()) else None


def _hidden(job: JobFolder, request: JobRequest) -> str | None:
    """Returns why a mount would hide a path of the job; None if it hides none."""
    base = _real(pathlib.Path(CONTAINER_BASE))
    texts = [str(job.path), sys.prefix, *(channel.source for channel in request.channels)]
    texts += [] if request.checkpoints is None else [request.checkpoints]
    for path in map(addresses.local_path, texts):
        if path is not None and base in (_real(path), *_real(path).parents):
            return f"it would hide {path}, which the job needs"
    return None


def _real(path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(os.path.realpath(path))  # `resolve` raises for links in a circle


def _ask_kernel(places: dict[str, str]) -> str | None:
    """Tries mounts in a new process: this one may have threads. Returns why they do not work."""
    module, argument = "nanotf.sagemaker.jobs.container_base", json.dumps(places)
    try:
        command = python_command(module, argument, standard_first=True)
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TRY_SECONDS, check=True
        )
    except (NanoError, OSError, subprocess.SubprocessError) as error:
        return str(error)
    return done.stdout.strip() or None


# ------------------------------------------------------------------------------- the link
def _hurdle_of_link() -> str | None:
    """Returns why `/opt/ml` cannot be a link of this job; None if it can."""
    place = pathlib.Path(CONTAINER_BASE)
    if place.is_symlink():
        owner = place.readlink().parent.parent  # <job>/hosts/<host>
        if not (owner / "state.json").is_file():
            return f"{place} is a link of somebody else's"
        try:
            if not JobFolder(owner).read_state().is_final:
                return f"{place} is a link of the job {owner.name}, which runs"
        except JobError as error:
            if may_pass(error):
                return f"{place} is a link of the job {owner.name}, which may run: {error}"
    elif place.exists():
        return f"{place} exists and is not the job's"
    if not os.access(place.parent, os.W_OK | os.X_OK):
        return f"no permission to make {place}"
    return None


@contextlib.contextmanager
def _link(base: str) -> Iterator[None]:
    place = pathlib.Path(CONTAINER_BASE)
    if place.is_symlink():  # of a job that was killed
        place.unlink()
    place.symlink_to(base, target_is_directory=True)
    try:
        yield
    finally:
        # Not what somebody has put there since.
        if place.is_symlink() and str(place.readlink()) == base:
            place.unlink()


def main(arguments: Sequence[str]) -> int:
    """Tries mounts in this process, and prints why they are not possible."""
    print(private_mounts.why_not(json.loads(arguments[0])) or "")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
