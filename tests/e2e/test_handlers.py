"""The tables that say what handles a message."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from nanotf.parent import calls, inference
from nanotf.parent.auto import timed_fits
from nanotf.parent.fit import fit_call
from nanotf.parent.loop import loop_call
from nanotf.parent.map.item_run import ItemRun
from nanotf.pool.pool import Delivery
from nanotf.wire import messages
from nanotf.worker.inbox import Inbox

CALLS = (
    fit_call.FitCall,
    timed_fits.TimedFit,
    inference._EvaluateCall,
    inference._PredictCall,
    loop_call._LoopCall,
)
# Before a worker runs orders; and what comes as a `Delivery`, with its memory.
OF_STARTS = {messages.Fork, messages.Hello, messages.Setup, messages.Ready, messages.SetupFailed}
DELIVERED = {messages.Outputs, messages.Returned}


def _messages(direction: str) -> set[type]:
    found = {cls for _, cls in inspect.getmembers(messages, inspect.isclass)}
    return {cls for cls in found if direction in (inspect.getdoc(cls) or "")} - OF_STARTS


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_has_the_methods_that_its_table_names(kind: Any) -> None:
    assert issubclass(kind, calls.Call)
    for name in kind.HANDLERS.values():
        assert callable(getattr(kind, name))
    assert kind.HANDLERS.items() >= calls.Call.HANDLERS.items()


def test_every_message_to_the_parent_has_a_handler() -> None:
    handled = set().union(*(kind.HANDLERS for kind in CALLS), ItemRun._HANDLERS)
    assert _messages("Worker -> parent") - DELIVERED <= handled
    assert Delivery in handled


def test_every_message_to_a_worker_has_a_handler() -> None:
    # `Wrote` goes both ways.
    assert Inbox._ROUTES.keys() == _messages("Parent -> worker") | {messages.Wrote}
