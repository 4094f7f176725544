"""The model of an endpoint, and the code that is packed with it.

Without code, the endpoint gets a copy: of an archive, a folder, or a `.keras` file. With an
entry point it gets `model.tar.gz`, in SageMaker's layout:

    VERSION/saved_model.pb ..., NAME/VERSION/..., or *.keras      what was there
    code/inference.py, code/...                                   the entry point, `source_dir`
    code/lib/                                                     the dependencies

Source: "Deploying to TensorFlow Serving Endpoints" of the SDK's documentation, and
sagemaker.utils.repack_model.
"""

from __future__ import annotations

import pathlib
import shutil
import tempfile
from dataclasses import dataclass

from nanotf.errors import InvalidArgumentError
from nanotf.sagemaker.jobs import addresses, archives, source
from nanotf.sagemaker.jobs.source import SourceCode
from nanotf.serving.repository.model_layouts import SCRIPT

_ARCHIVE = "model.tar.gz"


@dataclass(frozen=True)
class ModelSource:
    """The model that an endpoint is to serve."""

    model_data: str  # a path or an address: an archive, a folder, or a `.keras` file
    code: SourceCode | None = None  # the entry point with its folder and dependencies

    def check(self, folder: pathlib.Path) -> None:
        """Rejects what `place` cannot copy into a folder.

        Args:
            folder: the endpoint's, which need not exist yet.

        Raises:
            InvalidArgumentError: The model or the code is not there, or holds the folder.
        """
        addresses.check(self.model_data)
        _check_outside(self.model_data, folder)
        if self.code is not None:
            self.code.check()
            for each in filter(None, (self.code.folder, *self.code.dependencies)):
                _check_outside(each, folder)

    def place(self, folder: pathlib.Path) -> pathlib.Path:
        """Copies the model into an endpoint's folder.

        Returns:
            What the server is to serve.

        Raises:
            InvalidArgumentError: An archive is damaged, or the code lacks the entry point.
            OSError: The disk is full.
        """
        # On the endpoint's own disk: a large model may not fit into the system's temporary folder.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".model-") as temporary:
            model = self._local(pathlib.Path(temporary) / "downloads")
            if self.code is None:
                return _copied(model, folder)
            content = pathlib.Path(temporary) / "content"
            content.mkdir()
            _unpack(model, content)
            _add_code(self.code, content / "code")
            archives.pack([content], folder / _ARCHIVE)
        return folder / _ARCHIVE

    def _local(self, downloads: pathlib.Path) -> pathlib.Path:
        """Returns the model on this machine."""
        path = addresses.local_path(self.model_data)
        if path is not None:
            return path
        addresses.download(self.model_data, downloads)
        found = list(downloads.iterdir())
        # The address of a file, too, gives a folder, with that file alone.
        return found[0] if len(found) == 1 and found[0].is_file() else downloads


def _check_outside(address: str, folder: pathlib.Path) -> None:
    """Rejects a folder that would be copied into itself."""
    path = addresses.local_path(address)
    if path is not None and folder.resolve().is_relative_to(path.resolve()):
        raise InvalidArgumentError(
            "What an endpoint copies must not hold the endpoint's own folder. Received: "
            f"{address}, which holds {folder}. Pass another output_path, or set NANOTF_ENDPOINTS."
        )


def _copied(model: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    if model.is_dir():
        place = folder / "model" / (model.name or "model")
        shutil.copytree(model, place)
        return place
    place = folder / (_ARCHIVE if source.is_archive(model.name) else model.name)
    shutil.copy2(model, place)
    return place


def _unpack(model: pathlib.Path, content: pathlib.Path) -> None:
    """Puts a model into a folder, in the layout of an archive."""
    if source.is_archive(model.name):
        source.extract(model, content, "model")
    elif model.is_file():
        shutil.copy2(model, content)
    else:
        # A SavedModel itself has no version yet, which the layout asks for.
        from nanotf.inference.saved_model import is_saved_model  # NumPy, for a command that copies

        place = content / "1" if is_saved_model(model) else content
        shutil.copytree(model, place, dirs_exist_ok=True)


def _add_code(code: SourceCode, place: pathlib.Path) -> None:
    if code.folder is not None:
        shutil.rmtree(place, ignore_errors=True)  # `source_dir` replaces what the archive has
    SourceCode(code.script, code.folder).copy(place)  # without dependencies: they go to `lib`
    entry, script = place / code.entry, place / SCRIPT
    if entry != script:
        if code.folder is not None and script.exists():
            raise InvalidArgumentError(
                f"The entry point becomes {SCRIPT} of the model. Received: "
                f"entry_point={code.script!r}, and {code.folder} has another {SCRIPT}. Rename one."
            )
        shutil.move(entry, script)
    if code.dependencies:
        library = place / "lib"
        library.mkdir(exist_ok=True)  # `source_dir` may have one
        code.copy_dependencies(library)
