"""Requests for a model become answers. One that cannot be used, or that fails, fails no other."""

from __future__ import annotations

import functools
import gzip
import io
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from nanotf.console import logger
from nanotf.errors import NanoError
from nanotf.serving.computing import batches
from nanotf.serving.computing.loaded_model import LoadedModel
from nanotf.serving.interface import ENCODING, Decoded, Interface, Refusal, Request, Response

_GZIP = ("gzip", "x-gzip")  # RFC 9110, 8.4.1.3: the second is another name
_Made = TypeVar("_Made")


class Answering:
    """Answers requests.

    Args:
        interfaces: by name.
        most_rows: that a model computes at once.
        most_bytes: of a body that a client has compressed.
        status_of: returns the status and the text for an exception of a model.
    """

    def __init__(
        self,
        interfaces: Mapping[str, Interface],
        most_rows: int,
        most_bytes: int,
        status_of: Callable[[Exception], tuple[int, str]],
    ) -> None:
        self._interfaces = interfaces
        self._most_rows, self._most_bytes = most_rows, most_bytes
        self._status_of = status_of

    def answer(self, model: LoadedModel, requests: Sequence[Request]) -> list[tuple[Response, int]]:
        """Returns the answer to each request, and how many rows it had."""
        found: dict[int, tuple[Response, int]] = {}
        decoded: list[tuple[int, Decoded]] = []
        for place, request in enumerate(requests):
            begun = self._guarded(request, functools.partial(self._begin, model, request))
            if isinstance(begun, Response):
                found[place] = begun, 1  # not 0: `Costs.add` divides by the rows
            else:
                decoded.append((place, begun))
        for group in batches.groups(decoded, model.has_rows_apart):
            answers = self._computed(model, requests, group)
            for (place, each), answer in zip(group, answers, strict=True):
                found[place] = answer, each.rows or 1
        return [found[place] for place in range(len(requests))]

    def _begin(self, model: LoadedModel, request: Request) -> Response | Decoded:
        interface = self._interfaces[request.interface]
        request = self._inflated(request)
        answer = interface.answer(request, model)
        return interface.decode(request, model) if answer is None else answer

    def _computed(
        self, model: LoadedModel, requests: Sequence[Request], group: list[tuple[int, Decoded]]
    ) -> list[Response]:
        try:
            is_apart = model.has_rows_apart(group[0][1].signature)
            most = self._most_rows if is_apart else None
            outputs = batches.computed([decoded for _, decoded in group], most, model.run)
        except Exception as error:
            if len(group) == 1 and not isinstance(error, batches.RowsLost):
                place, _ = group[0]
                return [self._failed(requests[place], error)]
            # Each by itself, whole: only those that the model refuses fail.
            return [self._alone(model, requests[place], decoded) for place, decoded in group]
        return [
            self._encoded(model, requests[place], decoded, each)
            for (place, decoded), each in zip(group, outputs, strict=True)
        ]

    def _alone(self, model: LoadedModel, request: Request, decoded: Decoded) -> Response:
        try:
            outputs = self._outputs(model, decoded)
        except Exception as error:
            return self._failed(request, error)
        return self._encoded(model, request, decoded, outputs)

    def _outputs(self, model: LoadedModel, decoded: Decoded) -> batches.Arrays:
        if model.has_rows_apart(decoded.signature):
            try:
                return batches.computed([decoded], self._most_rows, model.run)[0]
            except batches.RowsLost:  # only the whole request gives what the model means
                pass
        return model.run(decoded.inputs, decoded.signature)

    def _encoded(
        self, model: LoadedModel, request: Request, decoded: Decoded, outputs: batches.Arrays
    ) -> Response:
        encode = self._interfaces[request.interface].encode
        return self._guarded(request, functools.partial(encode, decoded, outputs, model))

    def _guarded(self, request: Request, make: Callable[[], _Made]) -> _Made | Response:
        """Returns what a function makes, or the answer to a request that it refuses."""
        try:
            return make()
        except Refusal as refusal:
            return self._refused(request, refusal)
        except NanoError as error:  # of the request's content, as `Signature.checked` raises
            return self._refused(request, Refusal(400, str(error)))
        except Exception as error:
            return self._failed(request, error)

    def _failed(self, request: Request, error: Exception) -> Response:
        status, text = self._status_of(error)
        if status >= 500:  # most others are clients' faults, and could fill the log
            logger.warning("A request has failed:\n%s", traceback.format_exc())
        return self._refused(request, Refusal(status, text))

    def _refused(self, request: Request, refusal: Refusal) -> Response:
        return self._interfaces[request.interface].refuse(refusal)

    def _inflated(self, request: Request) -> Request:
        """Returns a request whose body is not compressed."""
        encoding = request.headers.get(ENCODING, "").strip().lower()
        if encoding in ("", "identity"):
            return request
        if encoding not in _GZIP:
            raise Refusal(415, f"A body may be compressed by gzip. Received: {encoding}.")
        return replace(request, body=_gunzipped(request.body, self._most_bytes))


def _gunzipped(body: bytes, most: int) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(body)) as file:
            found = file.read(most + 1)  # one more shows that there is more
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise Refusal(400, f"The body must be whole and compressed by gzip: {error}") from None
    if len(found) > most:
        raise Refusal(413, f"A body must have at most {most} bytes once it is inflated.")
    return found
