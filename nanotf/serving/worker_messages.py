"""The messages between the front and a worker.

    front                                        worker
      |  options, with the order to serve  ->      |   loads the versions
      |  <- the place of a version                 |   each time before it loads one
      |  <- Loaded for each version                |
      |  the place of a version, requests  ->      |   as long as the link is open
      |  <- answers, and how long they took        |

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from nanotf.serving.interface import Interface, Request, Response
from nanotf.serving.link import Link
from nanotf.serving.repository.model_sources import ModelVersion


@dataclasses.dataclass(frozen=True)
class WorkerOptions:
    """The orders for a worker of a server."""

    versions: tuple[ModelVersion, ...]
    interfaces: tuple[Interface, ...]
    engine: str | None  # a name of `nanotf.inference`; None as each model's files ask
    threads: int  # for engines that have threads of their own
    folder: pathlib.Path  # the server's own, see `ModelVersion.place_in`
    most_rows: int  # that a model computes at once
    most_bytes: int  # of a request's body, once it is inflated


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A version of a model that a worker has loaded, or has tried to."""

    error: str = ""  # why it cannot be served; then the rest means nothing
    described: Mapping[str, bytes] = dataclasses.field(default_factory=dict)  # by interface
    # The signatures whose rows may depend on each other, each with the reason.
    kept_together: Mapping[str, str] = dataclasses.field(default_factory=dict)


# ------------------------------------------------------------------------------- in the front
def ask(link: Link, place: int, requests: Sequence[Request]) -> None:
    """Sends requests.

    Args:
        place: of the version among `WorkerOptions.versions`.
    """
    heads = [(each.interface, each.verb, each.headers) for each in requests]
    link.send((place, heads), [each.body for each in requests])


def answers(link: Link) -> tuple[float, list[tuple[Response, int]]]:
    """Receives the answers to the requests that were sent last.

    Returns:
        The seconds that the worker took, and each answer with the rows of its request.
    """
    (seconds, heads), bodies = link.receive()
    return seconds, [
        (Response(status, bytes(body), kind, headers), rows)  # copied: the link reuses its memory
        for (status, kind, headers, rows), body in zip(heads, bodies, strict=True)
    ]


# -------------------------------------------------------------------------------- in a worker
def next_question(link: Link) -> tuple[int, list[Request]]:
    """Waits for requests; returns the place of their version, and them."""
    (place, heads), bodies = link.receive()
    return place, [
        Request(interface, verb, bytes(body), headers)  # copied: the link reuses its memory
        for (interface, verb, headers), body in zip(heads, bodies, strict=True)
    ]


def answer_with(link: Link, given: Sequence[tuple[Response, int]], seconds: float) -> None:
    """Sends answers."""
    heads: list[Any] = [(a.status, a.content_type, a.headers, rows) for a, rows in given]
    link.send((seconds, heads), [a.body for a, _ in given])
