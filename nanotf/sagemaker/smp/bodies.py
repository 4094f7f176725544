"""Microbatches' bodies: the user's function, traced in one thread for each microbatch.

A pipeline's schedule starts the forward pass of a microbatch before the gradients of an earlier
one. The user's function does both, one after the other. So a thread traces it for each microbatch,
and stops where it calls the model. Only one thread runs at a time: the others wait in a queue. All
add operations to one graph.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nanotf.compat import variable_handles
from nanotf.errors import JobError
from nanotf.sagemaker.smp.step_seeds import SeedStream, drawing_from

_local = threading.local()  # `body`: the body that runs in this thread


class _StepFailed(BaseException):
    """Ends a thread whose step has failed elsewhere; no `Exception`, so that no code catches it."""


@dataclass(frozen=True)
class BodyCall:
    """A call of a model, in a body."""

    model: Any
    whole: Callable[..., Any]  # calls the model uncut, with `args` and `kwargs`
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Body:
    """The trace of one microbatch.

    Args:
        args, kwargs: those of the microbatch.
        graph: the `tf.Graph` that gets the operations.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        graph: Any,
        seeds: SeedStream,
    ) -> None:
        self._function, self._args, self._kwargs = function, args, kwargs
        self._graph, self.seeds = graph, seeds
        seeds.continues_in(graph)
        # None says that the function has ended, and among the answers, that the step has failed.
        self._requests: queue.SimpleQueue[BodyCall | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        # What the function itself reads, outside its calls of models.
        self.reads = variable_handles.VariableReads()
        self._error: BaseException | None = None  # raised in the thread that waits for this one
        # A thread of its own would begin with an empty context.
        context = contextvars.copy_context()
        self._thread = threading.Thread(
            target=context.run, args=(self._run,), name="nanotf-smp-body", daemon=True
        )
        self.result: Any = None

    def start(self) -> BodyCall | None:
        """Runs the function until it calls a model, or ends: then None."""
        self._thread.start()
        return self._next()

    def resume(self, answer: Callable[[], Any]) -> BodyCall | None:
        """Continues the function after its call of a model. Returns as `start` does.

        Args:
            answer: gives the model's results; called in the function's thread.
        """
        self._answers.put(answer)
        return self._next()

    def stop(self) -> None:
        """Ends the thread, if it waits."""
        if self._thread.ident is not None:  # it was started
            self._answers.put(None)
            self._thread.join()

    def call(self, call: BodyCall) -> Any:
        """Hands a call of a model over, and returns its results; called in the thread."""
        self._requests.put(call)
        answer = self._answers.get()
        if answer is None:
            raise _StepFailed
        with self.reads.paused():
            return answer()  # here, since a tape records the operations of its own thread

    def _next(self) -> BodyCall | None:
        request = self._requests.get()
        if self._error is not None:
            raise self._error
        return request

    def _run(self) -> None:
        _local.body = self
        try:
            # TensorFlow has a default graph for each thread.
            with self._graph.as_default(), drawing_from(self.seeds), self.reads:
                self.result = self._function(*self._args, **self._kwargs)
        except _StepFailed:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._requests.put(None)


def current() -> Body:
    """Returns the body that runs in this thread. Raises `JobError` if there is none."""
    body: Body | None = getattr(_local, "body", None)
    if body is None:
        raise JobError(
            "A model in several partitions is called in the function decorated by smp.step itself. "
            "Received: a call in another thread, or one that is not part of a step."
        )
    return body
