"""Calls functions of a user's `inference.py`, and makes answers of what they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nanotf.console import logger
from nanotf.serving.interface import Refusal, Response


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function to answer a request.

    Raises:
        Refusal: 500 with the text of the exception that it raised. The log gets the traceback, and
            the client does not.
    """
    try:
        return function(*arguments)
    except Exception as error:
        # What `model_fn` has returned may be an object without a name.
        name = getattr(function, "__name__", type(function).__name__)
        logger.error("%s of the model's code raised an exception.", name, exc_info=True)
        raise Refusal(500, str(error)) from None


def answer_of(name: str, result: Any) -> Response:
    """Makes an answer of what a function has returned.

    Args:
        name: of the function, for the error.
        result: a tuple of the body, as text or bytes, and its content type.

    Raises:
        Refusal: 500, it is something else.
    """
    if not isinstance(result, tuple) or len(result) != 2:
        raise Refusal(
            500,
            f"{name} must return the body and its content type. Received: "
            f"{type(result).__name__}. Return them as a tuple.",
        )
    body, content_type = result
    return Response(200, content_of(name, body), str(content_type))


def content_of(name: str, body: Any) -> bytes:
    """Returns a body that a function has returned as bytes.

    Args:
        name: of the function, for the error.

    Raises:
        Refusal: 500, it is neither text nor bytes.
    """
    if isinstance(body, str):
        return body.encode()
    if isinstance(body, (bytes, bytearray, memoryview)):
        return bytes(body)
    raise Refusal(
        500,
        f"{name} must return text or bytes. Received: {type(body).__name__}. Encode it, such as "
        "with json.dumps.",
    )
