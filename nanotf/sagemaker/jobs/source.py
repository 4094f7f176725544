"""The user's code: copied into the job, so that later edits do not reach a running job.

The kinds of entry points are those of the SageMaker training toolkit: `*.py` runs as a program, or
as a module if `setup.py` is beside it; anything else runs as a shell command.
"""

from __future__ import annotations

import lzma
import pathlib
import shlex
import shutil
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nanotf.errors import InvalidArgumentError
from nanotf.machine.interpreter import nanotf_command
from nanotf.sagemaker.jobs import addresses

REQUIREMENTS = "requirements.txt"
_ARCHIVES = (".tar.gz", ".tgz")  # endings of their names
_IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", ".git")  # .git may be large


@dataclass(frozen=True)
class SourceCode:
    """The code of a job."""

    script: str  # the entry point: a path, relative to `folder` if there is one
    # A folder, or a `.tar.gz` (`.tgz`), that is copied as a whole. None copies the script alone.
    folder: str | None = None
    dependencies: tuple[str, ...] = ()  # files and folders that are copied beside the script

    def check(self) -> None:
        """Rejects code that is not there. Raises `InvalidArgumentError`."""
        if self.folder is None:
            _check_script(self._path(self.script), self.script)
        else:
            addresses.check(self.folder)
            folder = addresses.local_path(self.folder)
            if folder is not None and folder.is_dir():
                _check_script(folder / self.script, self.script)
        for dependency in self.dependencies:
            if not self._path(dependency).exists():
                raise InvalidArgumentError(
                    f"A dependency must be a file or a folder. Received: {dependency} (not there)."
                )

    @staticmethod
    def _path(text: str) -> pathlib.Path:
        path = addresses.local_path(text)
        if path is None:
            raise InvalidArgumentError(f"Code must be on this machine. Received: {text}.")
        return path

    @property
    def entry(self) -> str:
        """The entry point, relative to the copied code."""
        return self._path(self.script).name if self.folder is None else self.script

    def copy(self, code: pathlib.Path) -> None:
        """Copies the code into a folder.

        Raises:
            InvalidArgumentError: The archive does not hold the script.
        """
        code.mkdir(parents=True, exist_ok=True)
        if self.folder is None:
            shutil.copy2(self._path(self.script), code)
        else:
            self._copy_folder(self.folder, code)
        self.copy_dependencies(code)
        entry = code / self.entry
        _check_script(entry, self.script)
        entry.chmod(entry.stat().st_mode | 0o111)  # as the toolkit does; shells need it

    def copy_dependencies(self, folder: pathlib.Path) -> None:
        """Copies the dependencies into a folder that exists."""
        for dependency in self.dependencies:
            path = self._path(dependency)
            if path.is_dir():
                shutil.copytree(path, folder / path.name, ignore=_IGNORED, dirs_exist_ok=True)
            else:
                shutil.copy2(path, folder)

    def _copy_folder(self, folder: str, code: pathlib.Path) -> None:
        path = addresses.local_path(folder)
        if path is None:
            addresses.download(folder, code)
            found = [path for path in code.iterdir() if is_archive(path.name)]
            # A remote folder may hold archives of its own, which stay packed.
            for archive in found if is_archive(folder) else []:
                extract(archive, code, "source")
                archive.unlink()
        elif path.is_dir():
            shutil.copytree(path, code, ignore=_IGNORED, dirs_exist_ok=True, symlinks=True)
        else:
            extract(path, code, "source")


def is_archive(name: str) -> bool:
    """Returns True for a name or an address that ends as those of archives do."""
    return name.endswith(_ARCHIVES)


def extract(archive: pathlib.Path, folder: pathlib.Path, what: str) -> None:
    """Extracts a whole archive that reaches no other folder.

    Args:
        what: what it should be, for messages.

    Raises:
        InvalidArgumentError: It is damaged, no archive, or has a member outside the folder.
    """
    try:
        _check_to_the_end(archive)
        with tarfile.open(archive) as tar:
            # The filter rejects members outside the folder. Python 3.10 and 3.11 have it from
            # 3.10.12 and 3.11.4 on; older ones raise, rather than extract without it.
            tar.extractall(folder, filter="data")
    except (tarfile.TarError, TypeError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk, not of the archive
        raise InvalidArgumentError(
            f"The {what} must be a folder or a whole .tar.gz. Received: {archive} "
            f"({type(error).__name__}: {error})."
        ) from None


def _check_to_the_end(archive: pathlib.Path) -> None:
    """Reads an archive to its end, where its checksum is; raises what is wrong with it."""
    with tarfile.open(archive) as tar:
        for member in tar:
            # The filter "data" would only strip the slash.
            if pathlib.PurePosixPath(member.name).is_absolute():
                raise tarfile.TarError(f"the path {member.name} is absolute")
        # `tar` stops at its own end mark, before the checksum of gzip.
        stream: Any = tar.fileobj
        while stream.read(1 << 20):
            pass


def _check_script(path: pathlib.Path, name: str) -> None:
    if not path.is_file():
        kind = "a directory" if path.is_dir() else "no such file"
        raise InvalidArgumentError(
            f"The script must be a file. Received: {name} ({kind}: {path}). A script in a "
            "source directory is named relative to it."
        )


def shown(words: Sequence[str]) -> list[str]:
    """Returns a command as a person would write it."""
    own = nanotf_command(words[0])
    is_nanotf = list(words[: len(own)]) == own
    return [words[0], "-m", "nanotf", *words[len(own) :]] if is_nanotf else list(words)


def command(
    entry: str, code: pathlib.Path, python: str, arguments: Sequence[str], run: Sequence[str] | None
) -> list[str]:
    """Returns the command that runs an entry point, in the folder `code`.

    Args:
        entry: as `SourceCode.entry`.
        code: the copied code.
        python: the interpreter.
        arguments: those of the script.
        run: options of `nanotf run`, or None for plain Python.
    """
    launcher = [python] if run is None else [*nanotf_command(python), "run", *run]
    if not entry.endswith(".py"):
        # "./": the shell would search PATH for a bare name.
        return ["/bin/sh", "-c", f"./{shlex.join([entry, *arguments])}"]
    if (code / "setup.py").is_file():
        return [*launcher, "-m", entry.removesuffix(".py").replace("/", "."), *arguments]
    return [*launcher, entry, *arguments]
