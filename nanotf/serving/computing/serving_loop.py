"""A server's worker: it loads the models, then answers what the front sends.

See `worker_messages` for what it says to the front.
"""

from __future__ import annotations

import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from nanotf.console import logger
from nanotf.serving.computing.answering import Answering
from nanotf.serving.computing.loaded_model import LoadedModel
from nanotf.serving.computing.warm_up import warm_up
from nanotf.serving.interface import Interface
from nanotf.serving.link import Link, LinkClosed
from nanotf.serving.worker_messages import Loaded, WorkerOptions, answer_with, next_question

# As tensorflow/serving's http_server.cc maps them.
_STATUS = {
    tf.errors.InvalidArgumentError: 400,
    tf.errors.FailedPreconditionError: 400,
    tf.errors.OutOfRangeError: 400,
    tf.errors.UnauthenticatedError: 401,
    tf.errors.PermissionDeniedError: 403,
    tf.errors.NotFoundError: 404,
    tf.errors.AlreadyExistsError: 409,
    tf.errors.AbortedError: 409,
    tf.errors.ResourceExhaustedError: 429,
    tf.errors.CancelledError: 499,
    tf.errors.UnimplementedError: 501,
    tf.errors.UnavailableError: 503,
    tf.errors.DeadlineExceededError: 504,
}
_TEXT = 1000  # characters of an exception's text that a client gets


def serve(options: WorkerOptions, sock: socket.socket) -> None:
    """Serves until the front closes the link.

    Args:
        sock: the link's.
    """
    link = Link(sock)
    interfaces = {each.name: each for each in options.interfaces}
    answering = Answering(interfaces, options.most_rows, options.most_bytes, status_of)
    models = [LoadedModel(each, options) for each in options.versions]
    is_open = _is_open_after(lambda: _load(link, models, interfaces, options))
    while is_open:
        is_open = _is_open_after(lambda: _answer_next(link, models, answering))


def _is_open_after(step: Callable[[], None]) -> bool:
    """Returns False if the front has closed the link."""
    try:
        step()
    except LinkClosed:
        return False
    return True


def _load(
    link: Link,
    models: Sequence[LoadedModel],
    interfaces: Mapping[str, Interface],
    options: WorkerOptions,
) -> None:
    loaded = []
    for place, model in enumerate(models):
        link.send(place)  # the front blames this version if nothing follows
        loaded.append(_loaded(model, interfaces, options))
    link.send(loaded)


def _loaded(
    model: LoadedModel, interfaces: Mapping[str, Interface], options: WorkerOptions
) -> Loaded:
    try:
        own = [each.name for each in interfaces.values() if each.begin(model)]
        if not own:
            model.load()
            warm_up(model, options.most_rows, options.most_bytes)
        described = {name: each.describe(model) for name, each in interfaces.items()}
    except Exception as error:
        logger.warning(
            "Version %d of %s cannot be served:\n%s",
            model.version,
            model.name,
            traceback.format_exc(),
        )
        return Loaded(error=f"{type(error).__name__}: {error}"[:_TEXT])
    return Loaded("", described, dict(model.kept_together))


def _answer_next(link: Link, models: Sequence[LoadedModel], answering: Answering) -> None:
    place, requests = next_question(link)
    begin = time.perf_counter()
    answers = answering.answer(models[place], requests)
    answer_with(link, answers, time.perf_counter() - begin)


def status_of(error: Exception) -> tuple[int, str]:
    """Returns the HTTP status for an exception of a model, and the text for the client."""
    status = next((s for kind, s in _STATUS.items() if isinstance(error, kind)), 500)
    text = error.message if isinstance(error, tf.errors.OpError) else str(error)
    return status, str(text)[:_TEXT] or type(error).__name__  # some have no text
