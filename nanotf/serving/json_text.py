"""JSON as model servers speak it: with the tokens NaN, Infinity and -Infinity.

orjson reads and writes (extra `serve`). It refuses the tokens, so that the standard library reads
the few texts that have them. Nothing here imports NumPy: the front uses it, too.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from nanotf.serving.interface import Refusal

_SHOWN = 256  # characters of a value in the text of an error; TensorFlow Serving shows as many
_LONGEST_INTEGER = 20  # digits and sign of -2**63, and digits of 2**64
_HALF_OF_A_PAIR = re.compile(r"\\u[dD][89a-fA-F]")  # alone it is no character of UTF-8
_WHITE = b" \t\r\n"


def parse(body: bytes) -> Any:
    """Reads a JSON text in UTF-8.

    Whole numbers of more than 64 bits become floats.

    Raises:
        Refusal: It is no JSON, is nested too deeply, or holds a number or a text that cannot be
            represented. Status 400.
    """
    import orjson

    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:  # or it has one of the tokens
        return _parse_slowly(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """Reads a JSON text that must be an object.

    Raises:
        Refusal: See `parse`; or it is another value. Status 400.
    """
    value = parse(body)
    if not isinstance(value, dict):
        raise Refusal(400, f"JSON Value: {shown(value)} Is not object")
    return value


def shown(value: Any) -> str:
    """Returns a value as JSON for the text of an error, shortened."""
    text = ""
    # Piece by piece: a value may be large, and nested too deeply for `json.dumps`.
    for piece in json.JSONEncoder(ensure_ascii=False).iterencode(value):
        text += piece
        if len(text) > _SHOWN:
            return text[:_SHOWN] + "..."
    return text


def error_text(text: str) -> bytes:
    """Returns the JSON object by which the servers report an error."""
    return b'{ "error": ' + json.dumps(text).encode() + b" }"


def _parse_slowly(body: bytes) -> Any:
    if not body.strip(_WHITE):
        raise Refusal(400, "JSON Parse error: The document is empty")
    try:
        text = body.decode("utf-8-sig")  # skips a byte order mark, which orjson refuses
    except UnicodeDecodeError as error:
        raise _unreadable("Invalid encoding in string.", error.start) from None
    try:
        value = json.loads(text, parse_float=_finite, parse_int=_integer)
        if _HALF_OF_A_PAIR.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        offset = len(text[: error.pos].encode())
        raise _unreadable("Invalid value.", offset, f" ({error.msg})") from None
    except UnicodeEncodeError:
        raise Refusal(400, "JSON Parse error: The surrogate pair in string is invalid.") from None
    except RecursionError:
        raise Refusal(
            400, "JSON Parse error: The value is nested too deeply. Send arrays of fewer axes."
        ) from None
    return value


def _unreadable(why: str, offset: int, more: str = "") -> Refusal:
    return Refusal(400, f"JSON Parse error: {why} at offset: {offset}{more}")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise Refusal(400, "JSON Parse error: Number too big to be stored in double.")
    return number


def _integer(text: str) -> int | float:
    if len(text) <= _LONGEST_INTEGER:  # `int` of a long text takes quadratic time
        number = int(text)
        if -(2**63) <= number < 2**64:
            return number
    return _finite(text)
