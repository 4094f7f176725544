"""The content types of SageMaker's requests and answers, and the headers that name them."""

from __future__ import annotations

from email.message import Message

from nanotf.serving.interface import JSON, Refusal

JSON_LINES = "application/jsonlines"
CSV = "text/csv"
NPY = "application/x-npy"
NPZ = "application/x-npz"
# JSON and JSON lines are told apart by what a body holds, as in SageMaker's containers.
JSON_TYPES = (JSON, JSON_LINES, "application/jsons")
ANSWERS = (JSON, JSON_LINES, CSV, NPY, NPZ)


def content_type(header: str | None) -> tuple[str, str]:
    """Returns the type that a header names, in lower case, and the charset of its text.

    The type is empty for a header that is missing or malformed.
    """
    # `email` reads parameters, which may be in quotes.
    message = Message()
    message["Content-Type"] = header or ""
    found = (header or "").partition(";")[0].strip().lower()
    return found, message.get_content_charset("utf-8")


def unsupported(kind: str) -> Refusal:
    """Returns the refusal of a content type."""
    return Refusal(415, f"Unsupported Media Type: {kind or 'Unknown'}")


def answer_type(accept: str | None, default: str = JSON) -> str:
    """Returns the type of an answer.

    Args:
        accept: the header; None if there is none.
        default: the type for a client that takes any.

    Raises:
        Refusal: 406, the client takes none of `ANSWERS`.
    """
    for wanted in _by_preference(accept or "*/*"):
        if wanted == "*/*":
            return default
        group, _, kind = wanted.partition("/")
        fitting = [each for each in ANSWERS if each.startswith(f"{group}/")]
        if kind == "*" and fitting:
            return default if default in fitting else fitting[0]
        if wanted in ANSWERS:
            return wanted
    raise Refusal(
        406, f"The answer can be one of {', '.join(ANSWERS)}. Received: Accept: {accept!r:.200}."
    )


def _by_preference(accept: str) -> list[str]:
    """Returns the types of a header that are wanted, best first (RFC 9110, 12.5.1)."""
    found = []
    for each in accept.split(","):
        wanted, *parameters = (part.strip().lower() for part in each.split(";"))
        weights = [part.removeprefix("q=") for part in parameters if part.startswith("q=")]
        try:
            weight = float(weights[0]) if weights else 1.0
        except ValueError:  # a weight that is no number: the other types still count
            continue
        if wanted and weight > 0:
            found.append((weight, wanted))
    # Types of equal weight keep their order: `sorted` is stable.
    return [wanted for _, wanted in sorted(found, key=lambda each: -each[0])]


def decoded(body: bytes, charset: str) -> str:
    """Returns a body as text, without a byte order mark.

    Raises:
        Refusal: 415, the charset is unknown; 400, the body is not in it.
    """
    try:
        return body.decode("utf-8-sig" if charset in ("utf-8", "utf8") else charset)
    except LookupError:
        raise Refusal(415, f"Unsupported Media Type: text with charset {charset!r}") from None
    except UnicodeError as error:
        raise Refusal(400, f"The body must be text in {charset}: {error}") from None
