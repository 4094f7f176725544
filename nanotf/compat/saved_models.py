"""TensorFlow's and Keras's private names for SavedModels.

| name | versions seen | why |
| --- | --- | --- |
| `tf.__internal__.saved_model.parse_saved_model` | 2.14-2.21 | reads signatures, with their methods, without loading the model |
| `framework.convert_to_constants.convert_variables_to_constants_v2` | 2.14-2.21 | freezes a function |
"""

from __future__ import annotations

import pathlib
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import convert_to_constants

# A SavedModel's function that initializes tables. It is kept beside the signatures.
_INITIALIZER = "__saved_model_init_op"


def signature_definitions(folder: pathlib.Path) -> dict[str, Any]:
    """Returns the signatures of a SavedModel's folder, as TensorFlow's signature definitions by name.

    Raises:
        OSError: There is no SavedModel, or it is damaged.
        ValueError: It has no graph to be served.
    """
    content = tf.__internal__.saved_model.parse_saved_model(str(folder))
    graphs = [graph for graph in content.meta_graphs if "serve" in graph.meta_info_def.tags]
    if not graphs:
        raise ValueError(f"The SavedModel {folder} has no graph with the tag 'serve'.")
    found = dict(graphs[0].signature_def)
    found.pop(_INITIALIZER, None)
    return found


def frozen(function: Any) -> Any:
    """Returns a concrete function whose variables are constants.

    Its inputs are those of `function`, by the names of their tensors, and the resources that it
    captures beside variables, such as tables.
    """
    return convert_to_constants.convert_variables_to_constants_v2(function)
