"""The models and versions that a server is to serve, read from disk.

Called by the front, which imports no TensorFlow.

- `repository.py`: looks at the disk each second, and says which versions are wanted.
- `model_sources.py`: the types: `Source`, `VersionPolicy`, `ModelVersion`, `Wanted`.
- `model_layouts.py`: finds the models that MODEL of a command line, or `--models-dir`, stands for.
- `model_archive.py`: unpacks `model.tar.gz`.
- `models_config.py`: reads the file of models that TensorFlow Serving reads.
- `model_files.py`: what makes a folder or file a model, and which parts it lacks.
- `wire_format.py`: the outline of protobuf messages and of TensorFlow's bundles of variables.
- `stamps.py`: values that differ once files have changed.
"""

from nanotf.serving.repository.model_layouts import ModelsFolder, sources_of
from nanotf.serving.repository.model_sources import (
    ALL,
    LATEST,
    ModelVersion,
    Source,
    VersionPolicy,
    Wanted,
)
from nanotf.serving.repository.models_config import ConfigFile
from nanotf.serving.repository.repository import Repository

__all__ = [
    "ALL",
    "LATEST",
    "ConfigFile",
    "ModelVersion",
    "ModelsFolder",
    "Repository",
    "Source",
    "VersionPolicy",
    "Wanted",
    "sources_of",
]
