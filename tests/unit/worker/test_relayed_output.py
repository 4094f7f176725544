"""Output of rank 0, relayed to the user."""

from __future__ import annotations

import threading

from nanotf.worker.output import _Relay


def test_a_destructor_that_prints_while_its_thread_prints() -> None:
    """Python may collect objects whenever it creates new ones, even during a `send`."""
    sent: list[str] = []

    def send(text: str) -> None:
        if not sent:
            sent.append("")
            relay.write("closed\n")
        sent.append(text)

    relay = _Relay(send, is_terminal=False)
    printing = threading.Thread(target=relay.write, args=("step\n",), daemon=True)
    printing.start()
    printing.join(30)
    assert not printing.is_alive()
    assert sent == ["", "closed\n", "step\n"]
