"""A worker of a server as the front's loop sees it."""

import asyncio
import types

import pytest

pytest.importorskip("httptools")

from nanotf.serving import worker_messages
from nanotf.serving.front.serving_worker import ServingWorker
from nanotf.serving.interface import Request, Response
from nanotf.serving.link import Link
from nanotf.serving.worker_messages import Loaded


def test_an_answer_that_came_before_the_end_counts(monkeypatch):
    monkeypatch.setattr(ServingWorker, "_run", lambda worker: None)  # no process
    told = []

    def gone(worker, said):
        told.append((said, worker.batch, worker.is_ready))

    async def script():
        worker = ServingWorker(None, types.SimpleNamespace(versions=()), lambda worker: None, gone)
        worker.loaded = [Loaded()]
        pending = types.SimpleNamespace(request=Request("i", "predict", b"a"))
        worker.ask(0, [pending], lambda seconds, answers: told.append(answers))
        theirs = Link(worker._theirs)
        worker_messages.next_question(theirs)
        worker_messages.answer_with(theirs, [(Response(200, b"b"), 1)], 0.5)
        theirs.close()
        worker._gone("It was killed.")

    asyncio.run(script())
    ((answer, rows),), last = told
    assert (answer.body, rows) == (b"b", 1)
    assert last == ("It was killed.", [], False)
