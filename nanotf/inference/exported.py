"""Makes a SavedModel of a Keras model, a Keras file or a `tf.Module`. It imports TensorFlow.

Every engine converts from a SavedModel: OpenVINO and LiteRT convert more models from there than
from Keras, and it is the same for both Keras generations.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import pathlib
from typing import Any

import numpy as np

from nanotf.compat import keras_models
from nanotf.compat.generation import generation
from nanotf.compat.versions import require_tensorflow
from nanotf.errors import (
    InvalidArgumentError,
    InvalidArgumentTypeError,
    ModelError,
    UnavailableError,
)
from nanotf.inference import structure
from nanotf.inference.program_folder import is_program
from nanotf.inference.saved_model import is_saved_model, read_signatures
from nanotf.inference.signature import DEFAULT, Signature


@dataclasses.dataclass(frozen=True)
class Exported:
    """A SavedModel, and how it is called."""

    folder: pathlib.Path
    signatures: dict[str, Signature]
    # The structures of the arguments and results of `DEFAULT`, see `structure.describe`. None if
    # only the names are known: then they are dicts.
    inputs: Any = None
    outputs: Any = None


def export(model: Any, folder: pathlib.Path, rows: Any = None) -> Exported:
    """Makes a SavedModel.

    The inputs and outputs have the names that they have in Keras: those of the input layers and of
    the layers that make the outputs; the keys where a model takes or returns dicts; else "input_0",
    "output_0" and so on.

    Args:
        model: a Keras model, a `tf.Module` with signatures, or the path of a SavedModel's folder
            or of a file that Keras has saved.
        folder: does not exist yet, or is empty. A SavedModel's folder is not copied to it.
        rows: as the model takes them, or None. A subclassed model of Keras 3 forgets the dtypes of
            its inputs: they are those of `rows`, else the model's floating-point type.

    Raises:
        InvalidArgumentError, InvalidArgumentTypeError: It is no such model.
        ModelError: The model was not built yet.
        UnavailableError: It takes ragged or sparse tensors.
    """
    if isinstance(model, (str, pathlib.Path)):
        path = pathlib.Path(model)
        if is_saved_model(path):
            return Exported(path, read_signatures(path))
        model = _load_keras(path)
    tf = require_tensorflow()
    if isinstance(model, tf.keras.Model):
        return _export_keras(model, folder, rows)
    # `Trackable` is the class of what `tf.saved_model.load` returns; it is no `tf.Module`.
    if isinstance(model, (tf.Module, tf.__internal__.tracking.Trackable)):
        return _export_module(model, folder)
    raise InvalidArgumentTypeError(
        "`model` must be a Keras model, a tf.Module with signatures, or the path of a SavedModel's "
        f"folder or of a file that Keras has saved. Received: {type(model).__name__}."
    )


def _load_keras(path: pathlib.Path) -> Any:
    if not path.is_file():
        became = "a folder without a SavedModel" if path.is_dir() else "not there"
        if is_program(path):
            became = "a program's folder, with an engine already: `load` takes it"
        raise InvalidArgumentError(
            "A model must be the path of a SavedModel's folder, or of a file that Keras has saved. "
            f"Received: {str(path)!r}, which is {became}."
        )
    return require_tensorflow().keras.models.load_model(path, compile=False)


def _export_module(module: Any, folder: pathlib.Path) -> Exported:
    # What `tf.saved_model.load` returns has its signatures; TensorFlow finds those of others.
    given = getattr(module, "signatures", None)
    require_tensorflow().saved_model.save(module, str(folder), signatures=given and dict(given))
    signatures = read_signatures(folder)
    if not signatures:
        raise InvalidArgumentError(
            "A tf.Module must have a function with a signature. Received: "
            f"{type(module).__name__} with none. Give one of its methods "
            "@tf.function(input_signature=[...]), or pass the folder of a SavedModel."
        )
    return Exported(folder, signatures)


# ------------------------------------------------------------------------------------- Keras
def _export_keras(model: Any, folder: pathlib.Path, rows: Any) -> Exported:
    tf = require_tensorflow()
    inputs, found = structure.describe(_specs_of(model, rows), lambda spec: spec.name, "input")
    names = structure.names(inputs)
    specs = {name: _with_rows(spec, name) for name, spec in zip(names, found, strict=True)}
    own = _output_names(model)
    outputs: list[Any] = []
    # AutoGraph is for the model's code, not for ours.
    as_it_is = tf.autograph.experimental.do_not_convert

    @as_it_is
    def named(result: Any) -> dict[str, Any]:
        left = iter(own)
        shape, leaves = structure.describe(result, lambda _: next(left, None), "output")
        outputs[:] = [shape]  # a structure, not a tensor: it does not depend on the trace
        return dict(zip(structure.names(shape), leaves, strict=True))

    build = as_it_is(structure.build)

    @tf.function
    def serve(tensors: Any) -> Any:
        return named(model(build(inputs, tensors), training=False))

    # `add_endpoint` takes a `tf.function` only if it was traced before.
    serve.get_concrete_function(specs)
    archive = tf.keras.export.ExportArchive()
    # Keras finds an endpoint's variables by itself, not the tables of text layers.
    archive.track(model)
    archive.add_endpoint(DEFAULT, serve)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints what it has written
        archive.write_out(str(folder))
    (result,) = outputs
    signature = _ordered(read_signatures(folder)[DEFAULT], names, structure.names(result))
    return Exported(folder, {DEFAULT: signature}, inputs, result)


def _specs_of(model: Any, rows: Any) -> Any:
    """Returns a nested structure of a model's input: of `tf.TensorSpec` or of Keras's tensors."""
    if _knows_layers(model):
        if not model.built or not model.inputs:
            raise _unbuilt(model)
        is_functional = isinstance(model, keras_models.functional_class())
        if is_functional:
            return model.input  # as it was given to `Model`: the keys of dicts are kept
        # A Sequential model has no nested inputs.
        return model.inputs[0] if len(model.inputs) == 1 else model.inputs
    if rows is not None:  # before what Keras knows: Keras 3 keeps shapes, not dtypes
        return require_tensorflow().nest.map_structure(_spec_of_rows, rows)
    specs = generation().called_with(model)
    if specs is None:
        raise _unbuilt(model)
    return specs


def _knows_layers(model: Any) -> bool:
    return isinstance(model, (keras_models.functional_class(), keras_models.sequential_class()))


def _unbuilt(model: Any) -> ModelError:
    return ModelError(
        "A model must have been called, so that the shapes of its inputs are known. Received: "
        f"the model {model.name!r}, which was not. Call it on a batch, such as model(x[:1])."
    )


def _spec_of_rows(rows: Any) -> Any:
    tf = require_tensorflow()
    tensor = tf.convert_to_tensor(rows if hasattr(rows, "dtype") else np.asarray(rows))
    return tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype)


def _with_rows(spec: Any, name: str) -> Any:
    """Returns the `tf.TensorSpec` of an input, with any number of rows."""
    tf = require_tensorflow()
    if getattr(spec, "sparse", False) or getattr(spec, "ragged", False) or _is_composite(spec):
        raise UnavailableError(
            "Programs take dense tensors. Received: a model with the ragged or sparse input "
            f"{name!r}. Wrap it in a model that makes it of dense ones."
        )
    # Keras 3 keeps the number of rows of the batch that a Sequential model was built with.
    shape = (None, *spec.shape[1:]) if len(spec.shape) else ()
    # TensorFlow names the signature's input after the spec.
    return tf.TensorSpec(shape, spec.dtype, name)


def _is_composite(spec: Any) -> bool:
    """Returns True for the specs of ragged and sparse tensors, and Keras 2's tensors of them."""
    tf = require_tensorflow()
    spec = getattr(spec, "type_spec", spec)
    return isinstance(spec, tf.TypeSpec) and not isinstance(spec, tf.TensorSpec)


def _output_names(model: Any) -> list[str]:
    """Returns the names of the layers that make a model's outputs, in order; empty if unknown."""
    if not _knows_layers(model):
        return []  # the code of a subclassed model decides what it returns
    found = getattr(model, "output_names", None)
    if found is None and len(model.outputs) == 1:  # Keras 3's Sequential
        found = [model.layers[-1].name]
    return list(found or ())


def _ordered(signature: Signature, inputs: list[str], outputs: list[str]) -> Signature:
    """Returns a signature in Keras's order: a SavedModel has it in none."""
    by_input = {spec.name: spec for spec in signature.inputs}
    by_output = {spec.name: spec for spec in signature.outputs}
    return Signature(
        tuple(by_input[name] for name in inputs),
        tuple(by_output[name] for name in outputs),
        signature.method,
    )
