"""Reads and writes the messages of TensorFlow Serving's services, in a worker."""

from __future__ import annotations

from typing import Any

from nanotf.inference.signature import CLASSIFY, DEFAULT, REGRESS
from nanotf.serving import tensorflow_examples
from nanotf.serving.common_rows import common_rows
from nanotf.serving.interface import Decoded, Refusal, Response, ServedModel
from nanotf.serving.remote import tensor_protos
from nanotf.serving.remote.remote_interface import message_answer, parsed
from nanotf.serving.remote.serving_messages import METADATA_FIELD, SIGNATURES_TYPE, message_class
from nanotf.serving.tensorflow_examples import Examples
from nanotf.serving.tensorflow_predict import Arrays

_REQUESTS = {"classify": "ClassificationRequest", "regress": "RegressionRequest"}
_VERBS = {CLASSIFY: "classify", REGRESS: "regress"}


def metadata(model: ServedModel) -> bytes:
    """Returns a `GetModelMetadataResponse`."""
    signatures = message_class("SignatureDefMap")()
    for name, signature in model.signatures.items():
        found = signatures.signature_def[name]
        found.method_name = signature.method
        for specs, infos in (
            (signature.inputs, found.inputs),
            (signature.outputs, found.outputs),
        ):
            for spec in specs:
                tensor_protos.fill_info(infos[spec.name], spec)
    answer = message_class("GetModelMetadataResponse")()
    _fill_spec(answer.model_spec, model, "")
    described = answer.metadata[METADATA_FIELD]
    described.type_url, described.value = SIGNATURES_TYPE, signatures.SerializeToString()
    return bytes(answer.SerializeToString())


# --------------------------------------------------------------------------------------- requests
def decode_predict(body: bytes, model: ServedModel, most: int) -> Decoded:
    """Reads a `PredictRequest`.

    Args:
        most: bytes of an input.

    Returns:
        The content. Its form is the names of the outputs that the client wants.

    Raises:
        Refusal: It cannot be used. Status 400.
        NanoError: See `Signature.checked`.
    """
    request = parsed(message_class("PredictRequest"), body)
    name = request.model_spec.signature_name or DEFAULT
    signature = model.signatures.get(name)
    if signature is None:
        raise Refusal(400, f'Serving signature key "{name}" not found.')
    known = {spec.name for spec in signature.outputs}
    wanted = tuple(dict.fromkeys(request.output_filter))
    for each in wanted:
        if each not in known:
            raise Refusal(
                400,
                f"output tensor alias not found in signature: {each} Outputs expected to be in "
                f"the set {{{','.join(sorted(known))}}}.",
            )
    if len(wanted) < len(request.output_filter):
        raise Refusal(400, "duplicate output tensor alias in output_filter")
    arrays = {key: tensor_protos.array_of(request.inputs[key], key, most) for key in request.inputs}
    inputs = signature.checked(arrays)
    return Decoded(name, inputs, common_rows(signature, inputs), wanted or tuple(known))


def decode_examples(body: bytes, model: ServedModel, verb: str) -> Decoded:
    """Reads a `ClassificationRequest` or a `RegressionRequest`.

    Raises:
        Refusal, NanoError: See `tensorflow_examples.decode`.
    """
    request = parsed(message_class(_REQUESTS[verb]), body)
    name = request.model_spec.signature_name or DEFAULT
    return tensorflow_examples.decoded(name, _examples(request.input), model.signatures, verb)


def _examples(sent: Any) -> list[bytes]:
    """Returns the protos of examples in an `Input`, as the model gets them."""
    kind, context = sent.WhichOneof("choice"), b""
    if kind == "example_list":
        examples = list(sent.example_list.examples)
    elif kind == "example_list_with_context":
        examples = list(sent.example_list_with_context.examples)
        # Concatenated messages are merged: a feature of the example replaces one of the context.
        context = sent.example_list_with_context.context
    else:
        examples = []
    if not examples:
        raise Refusal(400, "Input is empty.")
    return [context + example for example in examples]


# ---------------------------------------------------------------------------------------- answers
def encode(decoded: Decoded, outputs: Arrays, model: ServedModel) -> Response:
    """Makes the answer to what `decode_predict` or `decode_examples` has read.

    Raises:
        Refusal: The outputs have no such form. Status 400.
    """
    if not isinstance(decoded.form, Examples):
        answer = message_class("PredictResponse")()
        for name in decoded.form:
            tensor_protos.fill(answer.outputs[name], outputs[name])
    elif decoded.form.verb == "classify":
        answer = message_class("ClassificationResponse")()
        _fill_classes(answer.result, outputs, decoded.form.count)
    else:
        answer = message_class("RegressionResponse")()
        _fill_values(answer.result, outputs, decoded.form.count)
    _fill_spec(answer.model_spec, model, decoded.signature)
    return message_answer(answer)


def multi_inference(body: bytes, model: ServedModel) -> Response:
    """Answers a `MultiInferenceRequest`: the same examples for several signatures.

    Raises:
        Refusal: It cannot be used. Status 400.
        NanoError: See `Signature.checked`.
        Exception: What the model raises.
    """
    request = parsed(message_class("MultiInferenceRequest"), body)
    examples = _examples(request.input)
    answer = message_class("MultiInferenceResponse")()
    for task in request.tasks:
        verb = _VERBS.get(task.method_name)
        if verb is None:
            raise Refusal(501, f"Unsupported signature method_name: {task.method_name}")
        name = task.model_spec.signature_name or DEFAULT
        decoded = tensorflow_examples.decoded(name, examples, model.signatures, verb)
        outputs = model.run(decoded.inputs, name)
        result = answer.results.add()
        _fill_spec(result.model_spec, model, name)
        if verb == "classify":
            _fill_classes(result.classification_result, outputs, len(examples))
        else:
            _fill_values(result.regression_result, outputs, len(examples))
    return message_answer(answer)


def _fill_spec(spec: Any, model: ServedModel, signature: str) -> None:
    spec.name, spec.signature_name = model.name, signature
    spec.version.value = model.version


def _fill_classes(result: Any, outputs: Arrays, count: int) -> None:
    labels, scores = tensorflow_examples.classifications(outputs, count)
    for names, numbers in zip(labels.tolist(), scores.tolist(), strict=True):
        classes = result.classifications.add().classes
        for name, number in zip(names, numbers, strict=True):
            classes.add(label=_label(name), score=number)


def _label(name: Any) -> str:
    try:
        return name.decode() if isinstance(name, bytes) else str(name)
    except UnicodeDecodeError:
        raise Refusal(400, "Labels must be UTF-8, as the protocol's field is.") from None


def _fill_values(result: Any, outputs: Arrays, count: int) -> None:
    for value in tensorflow_examples.regressions(outputs, count).tolist():
        result.regressions.add(value=value)
