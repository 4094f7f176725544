"""TensorFlow's engine with constants: the variables become part of the graph, which is optimized.

Its file is a SavedModel, too. It has `serving_default` alone.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar

from nanotf.compat.versions import require_tensorflow
from nanotf.errors import ConversionError
from nanotf.inference.engines.inference_engine import Arrays, converting
from nanotf.inference.engines.tensorflow_engine import TensorFlowEngine
from nanotf.inference.signature import DEFAULT, Signature


class FrozenEngine(TensorFlowEngine):
    """Freezes the function of `serving_default`."""

    name: ClassVar[str] = "frozen"
    keeps_signatures: ClassVar[bool] = False  # unlike its base class

    def convert(
        self,
        exported: pathlib.Path,
        folder: pathlib.Path,
        signature: Signature | None,
        precision: str,
        rows: Arrays | None,
    ) -> None:
        tf = require_tensorflow()
        assert signature is not None
        with converting(self.name):
            model = tf.saved_model.load(str(exported))
            frozen, results = _frozen(model.signatures[DEFAULT], signature)
            names = signature.input_names
            specs = {
                name: model.signatures[DEFAULT].structured_input_signature[1][name]
                for name in names
            }

            @tf.function(autograph=False)
            def serve(tensors: Mapping[str, Any]) -> dict[str, Any]:
                found = tf.nest.flatten(frozen(*[tensors[name] for name in names]))
                return dict(zip(results, found, strict=True))

            concrete = serve.get_concrete_function(specs)
            # An empty module: the function has no variables that one would have to keep.
            tf.saved_model.save(tf.Module(), str(folder), signatures={DEFAULT: concrete})


def _frozen(function: Any, signature: Signature) -> tuple[Any, list[str]]:
    """Freezes the function of a signature.

    Returns:
        A function of the inputs, in order; and the names of the outputs, in its order.
    """
    from nanotf.compat import saved_models  # imports TensorFlow

    tf = require_tensorflow()
    names, results = signature.input_names, [spec.name for spec in signature.outputs]
    specs = [function.structured_input_signature[1][name] for name in names]

    @tf.function(input_signature=specs, autograph=False)
    def in_order(*tensors: Any) -> list[Any]:
        found = function(**dict(zip(names, tensors, strict=True)))
        return [found[name] for name in results]

    frozen = saved_models.frozen(in_order.get_concrete_function())
    # The module that is saved has no resources: a table would be missing when it is loaded.
    if others := len(frozen.inputs) - len(names):
        raise ConversionError(
            "The engine 'frozen' takes models whose only state is variables. Received: a model "
            f"with {others} other resources, such as the look-up tables of text layers. Choose "
            "engine='tensorflow'."
        )
    return frozen, results
