"""Predictors: send data to an endpoint, and read its answers, with the names of SageMaker's SDK.

Source: `sagemaker.predictor.Predictor` and `sagemaker.tensorflow.TensorFlowPredictor` of version 2
of the SDK; the headers are those of its local mode (`sagemaker.local.local_session`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from nanotf.errors import (
    EndpointError,
    InvalidArgumentError,
    InvalidArgumentTypeError,
    UnavailableError,
    meant,
)
from nanotf.sagemaker.detached.owner import Owner
from nanotf.sagemaker.endpoints import endpoint_record as record
from nanotf.sagemaker.endpoints import endpoint_start
from nanotf.sagemaker.endpoints.deserializers import BytesDeserializer, JSONDeserializer
from nanotf.sagemaker.endpoints.endpoint_record import KIND, EndpointFolder
from nanotf.sagemaker.endpoints.http_client import HttpAnswer, HttpClient, NotReached
from nanotf.sagemaker.endpoints.serializers import IdentitySerializer, JSONSerializer

_PATH = "/invocations"
_PAUSE = 0.1  # seconds between two looks at an endpoint whose server is started again
_RESTART_SECONDS = 60.0  # for which a request waits for that
# Arguments of the API call InvokeEndpoint, and the header of each; None for no effect here.
_HEADERS = {
    "ContentType": "Content-Type",
    "Accept": "Accept",
    "CustomAttributes": "X-Amzn-SageMaker-Custom-Attributes",
    "TargetModel": "X-Amzn-SageMaker-Target-Model",
    "TargetVariant": "X-Amzn-SageMaker-Target-Variant",
    "InferenceId": "X-Amzn-SageMaker-Inference-Id",
    "TargetContainerHostname": None,
    "EnableExplanations": None,
    "InferenceComponentName": None,
    "SessionId": None,
}


class _Found(NamedTuple):
    """The server of an endpoint, as long as the endpoint's state stays as it is."""

    stamp: tuple[int, ...]
    owner: Owner
    client: HttpClient


class Predictor:
    """Sends data to an endpoint of this machine, or to a server at an address.

    Several threads may use it; each has its own connection, which stays open. It can be pickled.

    Args:
        endpoint_name: str, the name of an endpoint, or "http://host:port" of any server with
            SageMaker's interface, such as `nanotf serve`.
        sagemaker_session: without effect here.
        serializer: makes the body of a request; default `IdentitySerializer`.
        deserializer: reads an answer; default `BytesDeserializer`.
        component_name: without effect here.
        output_path: path, default `NANOTF_ENDPOINTS`, else `./endpoints`: the folder of endpoints.

    Raises:
        InvalidArgumentError: No endpoint can have this name.
    """

    def __init__(
        self,
        endpoint_name: str,
        sagemaker_session: Any = None,
        serializer: Any = None,
        deserializer: Any = None,
        component_name: str | None = None,
        *,
        output_path: str | os.PathLike[str] | None = None,
    ) -> None:
        self.endpoint_name = endpoint_name
        self.sagemaker_session, self.component_name = sagemaker_session, component_name
        self.serializer = IdentitySerializer() if serializer is None else serializer
        self.deserializer = BytesDeserializer() if deserializer is None else deserializer
        # A later change of the current folder does not lose the endpoint.
        self._endpoint: EndpointFolder | None = None
        self._server: HttpClient | None = None
        self._found: _Found | None = None
        if "://" in endpoint_name:
            self._server = HttpClient(endpoint_name)
        else:
            KIND.check_name(endpoint_name)
            self._endpoint = EndpointFolder(KIND.folder(output_path) / endpoint_name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.endpoint_name!r})"

    @property
    def endpoint(self) -> str:
        """The same as `endpoint_name`, by its name of version 1 of the SDK."""
        return self.endpoint_name

    @property
    def content_type(self) -> str:
        """The MIME type of requests."""
        kind: str = self.serializer.CONTENT_TYPE
        return kind

    @property
    def accept(self) -> tuple[str, ...]:
        """The MIME types of answers that the deserializer can read."""
        kinds = self.deserializer.ACCEPT
        return (kinds,) if isinstance(kinds, str) else tuple(kinds)

    # ------------------------------------------------------------------------ requests
    def predict(
        self,
        data: Any,
        initial_args: Mapping[str, str | None] | None = None,
        target_model: str | None = None,
        target_variant: str | None = None,
        inference_id: str | None = None,
        custom_attributes: str | None = None,
        component_name: str | None = None,
    ) -> Any:
        """Returns the answer to a request.

        While the server is busy (status 429 or 503 with `Retry-After`), and while the endpoint
        starts it again after it has died, the request waits, up to 60 s each.

        Args:
            data: what the serializer takes.
            initial_args: mapping or None, arguments of the API call InvokeEndpoint, such as
                {"ContentType": "text/csv"}. None as a value sends no such header.
            target_model: str or None, one of several models of a server.
            target_variant, inference_id: str or None, passed on as headers.
            custom_attributes: str or None, passed on as a header, such as "tfs-method=classify".
            component_name: without effect here.

        Returns:
            What the deserializer returns.

        Raises:
            EndpointError: The endpoint is not in service, or refuses the request.
            InvalidArgumentError, InvalidArgumentTypeError: The data cannot be sent.
        """
        arguments = dict(initial_args or {})
        arguments |= {
            name: value
            for name, value in (
                ("TargetModel", target_model),
                ("TargetVariant", target_variant),
                ("InferenceId", inference_id),
                ("CustomAttributes", custom_attributes),
            )
            if value
        }
        arguments.setdefault("ContentType", self.content_type)
        arguments.setdefault("Accept", ", ".join(self.accept))
        headers = self._headers(arguments)
        answer = self._post(_body(self.serializer.serialize(data)), headers)
        return self.deserializer.deserialize(answer.stream(), answer.content_type)

    def _headers(self, arguments: dict[str, str | None]) -> dict[str, str]:
        if arguments.pop("EndpointName", self.endpoint_name) != self.endpoint_name:
            raise InvalidArgumentError(
                "`initial_args` cannot name another endpoint than the predictor's. Received an "
                f"EndpointName other than {self.endpoint_name!r}. Make another predictor."
            )
        for name in arguments:
            if name not in _HEADERS:
                right = meant(name, _HEADERS)
                raise InvalidArgumentTypeError(
                    f"`initial_args` takes {', '.join(_HEADERS)}. Received: {name}."
                    + (f" Did you mean `{right}`?" if right else "")
                )
        found = [(_HEADERS[name], value) for name, value in arguments.items()]
        return {name: value for name, value in found if name is not None and value is not None}

    def _post(self, body: bytes, headers: Mapping[str, str]) -> HttpAnswer:
        deadline = time.monotonic() + _RESTART_SECONDS
        while True:
            client = self._reached()
            try:
                return client.post(_PATH, body, headers)
            except NotReached as error:
                if self._endpoint is None or time.monotonic() > deadline:
                    raise EndpointError(
                        f"A server must listen at the address. Received: {error}. Start it, or "
                        "look at its log."
                    ) from error
                self._found = None  # the state says what has become of it
            time.sleep(_PAUSE)

    def _reached(self) -> HttpClient:
        """Returns the client of the server; of an endpoint that is in service.

        The state is looked at before each request: another endpoint's server may have got the port
        since the last one.
        """
        if self._server is not None:
            return self._server
        assert self._endpoint is not None
        endpoint = record.find(self._endpoint.name, self._endpoint.path.parent)
        stamp, found = endpoint.state_stamp(), self._found  # several threads set `_found`
        # A supervisor that was killed has written no state, but its server has ended with it.
        if found is None or found.stamp != stamp or not found.owner.is_alive():
            state = endpoint.read_state()
            if state.status != record.IN_SERVICE or state.url is None:
                why = f": {state.failure_reason}" if state.failure_reason else ""
                raise EndpointError(
                    "An endpoint must be in service to answer. Received: "
                    f"{endpoint.name}, whose status is {state.status}{why}. `nanotf endpoints "
                    f"describe {endpoint.name}` says more."
                )
            self._found = found = _Found(stamp, state.owner, HttpClient(state.url))
        return found.client

    # ------------------------------------------------------------------------ the endpoint
    def delete_endpoint(self, delete_endpoint_config: bool = True) -> None:
        """Stops the endpoint, and waits until its server has ended. Its folder stays.

        Args:
            delete_endpoint_config: without effect here.

        Raises:
            InvalidArgumentError: The predictor has an address, or the endpoint has ended.
            EndpointError: Its supervisor does not react.
        """
        if self._endpoint is None:
            raise InvalidArgumentError(
                "A predictor deletes an endpoint of this machine, which has a name. Received: the "
                f"address {self.endpoint_name}. Stop that server where it runs."
            )
        endpoint_start.stop_and_wait(record.find(self._endpoint.name, self._endpoint.path.parent))

    def delete_predictor(self, wait: bool = False) -> None:
        """Does the same as `delete_endpoint`."""
        self.delete_endpoint()

    def delete_model(self) -> None:
        """Does nothing: the model belongs to the endpoint, in whose folder it stays."""

    def update_endpoint(self, *_: Any, **__: Any) -> None:
        """Raises `UnavailableError`, as an endpoint keeps its model."""
        raise UnavailableError(
            "An endpoint keeps its model and its workers. Received: a call of update_endpoint(). "
            "Deploy another endpoint, then delete this one."
        )


def _body(data: Any) -> bytes:
    """Returns bytes of what a serializer has made."""
    if hasattr(data, "read"):
        data = data.read()
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, bytes | bytearray | memoryview):
        return bytes(data)
    raise InvalidArgumentTypeError(
        f"A serializer must return text, bytes or a file. Received: {type(data).__name__}. Choose "
        "the serializer of the data, such as JSONSerializer()."
    )


class TensorFlowPredictor(Predictor):
    """Sends data to a TensorFlow model: by default JSON, as TensorFlow Serving's REST takes it.

    Args:
        endpoint_name: str, the name of an endpoint, or "http://host:port".
        sagemaker_session: without effect here.
        serializer: makes the body of a request; default `JSONSerializer`.
        deserializer: reads an answer; default `JSONDeserializer`.
        model_name: str or None, one of several models of the endpoint; None for its default.
        model_version: int, str or None, a version of it; None for the latest.
        component_name: without effect here.
        output_path: path, default `NANOTF_ENDPOINTS`, else `./endpoints`: the folder of endpoints.

    Raises:
        InvalidArgumentError: No endpoint can have this name.
    """

    def __init__(
        self,
        endpoint_name: str,
        sagemaker_session: Any = None,
        serializer: Any = None,
        deserializer: Any = None,
        model_name: str | None = None,
        model_version: str | int | None = None,
        component_name: str | None = None,
        *,
        output_path: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(
            endpoint_name,
            sagemaker_session,
            JSONSerializer() if serializer is None else serializer,
            JSONDeserializer() if deserializer is None else deserializer,
            component_name,
            output_path=output_path,
        )
        named = {"tfs-model-name": model_name, "tfs-model-version": model_version}
        self._attributes = [f"{name}={value}" for name, value in named.items() if value is not None]

    def predict(
        self,
        data: Any,
        initial_args: Mapping[str, str | None] | None = None,
        target_model: str | None = None,
        target_variant: str | None = None,
        inference_id: str | None = None,
        custom_attributes: str | None = None,
        component_name: str | None = None,
    ) -> Any:
        """Returns the answer to a request, see `Predictor.predict`."""
        # Joined here: `Predictor.predict` lets its argument replace what `initial_args` has.
        given = custom_attributes or (initial_args or {}).get("CustomAttributes")
        attributes = ",".join(filter(None, [given, *self._attributes]))
        return super().predict(
            data, initial_args, target_model, target_variant, inference_id, attributes
        )

    def classify(self, data: Any) -> Any:
        """Returns the classes of examples, by a signature of that method.

        Args:
            data: mapping with "examples", as TensorFlow Serving's REST takes them.

        Raises:
            InvalidArgumentError: The serializer makes no JSON.
            EndpointError: As `predict`.
        """
        return self._by_method(data, "classify")

    def regress(self, data: Any) -> Any:
        """Returns the values of examples, by a signature of that method.

        Args:
            data: mapping with "examples", as TensorFlow Serving's REST takes them.

        Raises:
            InvalidArgumentError: The serializer makes no JSON.
            EndpointError: As `predict`.
        """
        return self._by_method(data, "regress")

    def _by_method(self, data: Any, method: str) -> Any:
        if self.content_type != "application/json":
            raise InvalidArgumentError(
                f"The {method} api requires json requests. Received: the content type "
                f"{self.content_type}. Use JSONSerializer()."
            )
        return self.predict(data, custom_attributes=f"tfs-method={method}")
