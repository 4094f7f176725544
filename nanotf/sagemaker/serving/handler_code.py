"""User code in the form of SageMaker's TensorFlow containers: `handler`, or two around the model.

    handler(data, context)             -> body, content type
    input_handler(data, context)       -> the body of a request to TensorFlow Serving's REST
    output_handler(response, context)  -> body, content type

Source: python_service.py and tfs_utils.py of aws/sagemaker-tensorflow-serving-container.
`handler` posts to the context's `rest_uri` itself, where `LocalRest` answers. What `input_handler`
returns is answered by the same code, without a connection.
"""

from __future__ import annotations

import dataclasses
import http.client
import io
import json
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

from nanotf.sagemaker.serving.attributes_header import ATTRIBUTES, TARGET, attributes_of
from nanotf.sagemaker.serving.local_rest import LocalRest, path_of
from nanotf.sagemaker.serving.model_code import SCRIPT_ERROR, BodyRules, ModelCode
from nanotf.sagemaker.serving.user_calls import answer_of, call, content_of
from nanotf.serving.interface import JSON, Request, Response, ServedModel

_NAMES = ("handler", "input_handler", "output_handler")


class Context(NamedTuple):
    """A request as handlers see it. The fields and their order are the containers'.

    The model's name, version and method are None unless the client names them.
    """

    model_name: str | None
    model_version: str | None
    method: str | None
    rest_uri: str
    grpc_port: str | None  # always None: nothing listens for gRPC in a worker
    channel: Any  # of gRPC; always None
    custom_attributes: str | None
    request_content_type: str
    accept_header: str
    content_length: int


@dataclasses.dataclass(frozen=True)
class HandlerResponse:
    """The argument of `output_handler`: of a response of requests the parts that handlers use."""

    status_code: int
    content: bytes
    headers: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """True if the model has answered."""
        return self.status_code < 400

    @property
    def reason(self) -> str:
        """The phrase of the status, such as "Not Found"; empty for a status without one."""
        return http.client.responses.get(self.status_code, "")

    @property
    def text(self) -> str:
        """The content as text."""
        return self.content.decode("utf-8", "replace")

    def json(self) -> Any:
        """Returns the value of the content."""
        return json.loads(self.content)

    def raise_for_status(self) -> None:
        """Raises `OSError`, of which that of requests is a subclass, if the model has refused."""
        if not self.ok:
            raise OSError(f"{self.status_code} {self.reason}: {self.text}")


class HandlerCode(ModelCode):
    """The handlers of a model.

    Args:
        module: the user's, with at least one of the handlers.
        model, rules: see `ModelCode`.
        rest: answers at the context's `rest_uri`.

    Raises:
        NotImplementedError: One of `input_handler` and `output_handler` is missing.
    """

    def __init__(
        self, module: types.ModuleType, model: ServedModel, rules: BodyRules, rest: LocalRest
    ) -> None:
        super().__init__(model, rules)
        self._rest = rest
        self._handler = getattr(module, "handler", None)
        self._input: Any = getattr(module, "input_handler", None)
        self._output: Any = getattr(module, "output_handler", None)
        if not self._handler and not (self._input and self._output):
            raise NotImplementedError(SCRIPT_ERROR)

    @staticmethod
    def is_in(module: types.ModuleType) -> bool:
        """Returns True if a module has handlers of this form."""
        return any(hasattr(module, name) for name in _NAMES)

    def answer(self, request: Request) -> Response:
        """Answers a request.

        Raises:
            Refusal: 500, a handler has raised an exception, or returned what is no answer.
        """
        context, data = self._context(request), io.BytesIO(request.body)
        if self._handler:  # as in the containers, it wins over the other two
            return answer_of("handler", call(self._handler, data, context))
        body = content_of("input_handler", call(self._input, data, context))
        path = path_of(self.model.name, context.model_version, context.method or "predict")
        found = self._rest.respond("POST", path, {"content-type": JSON}, body)
        headers = {"Content-Type": found.content_type, **dict(found.headers)}
        response = HandlerResponse(found.status, found.body, headers)
        return answer_of("output_handler", call(self._output, response, context))

    def _context(self, request: Request) -> Context:
        headers, given = request.headers, attributes_of(request.headers)
        version, method = given.get("tfs-model-version"), given.get("tfs-method")
        return Context(
            headers.get(TARGET) or given.get("tfs-model-name"),
            version,
            method,
            self._rest.uri(self.model.name, version, method or "predict"),
            None,
            None,
            headers.get(ATTRIBUTES),
            headers.get("content-type") or JSON,
            headers.get("accept") or JSON,
            len(request.body),
        )
