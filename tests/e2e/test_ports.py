"""Transport "grpc": listening ports, and ports taken before their use."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from typing import Any

import psutil
import pytest
from parity import digits, small_cnn
from processes import SECONDS

import nanotf
from nanotf.errors import WorkerError
from nanotf.machine import topology
from nanotf.pool import warm
from nanotf.pool.starts import SetupError

pytestmark = pytest.mark.own_pool

TAKEN = """
import socket
from nanotf.region.strategy import WorkerStrategy
from nanotf.wire.ports import PortTaken, free_port, is_free

assert is_free(free_port())
with socket.socket() as taken:
    taken.bind(("0.0.0.0", 0))
    taken.listen()
    port = taken.getsockname()[1]
    assert not is_free(port)
    try:
        WorkerStrategy(0, 2, cluster=(f"127.0.0.1:{port}", "127.0.0.1:1"))
    except PortTaken as error:
        assert f"TCP port {port} was taken" in str(error)
        print("RESULT taken")
"""


@pytest.mark.thorough
def test_a_port_that_another_program_takes() -> None:
    run = subprocess.run(
        [sys.executable, "-c", TAKEN], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert "RESULT taken" in run.stdout.splitlines(), run.stderr[-2000:]


def test_listening_ports_are_named_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """TensorFlow binds all interfaces; the warning names the ports that actually listen."""
    x, y = digits(50)
    warm.end_pool()
    with caplog.at_level(logging.WARNING, logger="nanotf"):
        for _ in range(2):
            small_cnn().fit(x, y, batch_size=50, verbose=0, num_processes=2, transport="grpc")
    # Again for new ports, if another process took one meanwhile.
    *others, text = [t for t in map(logging.LogRecord.getMessage, caplog.records) if "listens" in t]
    assert text not in others
    said = re.search(r"TCP ports (\d+), (\d+)", text)
    assert said is not None
    listening = [
        connection.laddr
        for pid in nanotf.worker_pids()
        for connection in psutil.Process(pid).net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert {address.port for address in listening} == {int(port) for port in said.groups()}
    assert {address.ip for address in listening} <= {"0.0.0.0", "::"}
    warm.end_pool()


def _failing_pool(failures: int, retry: bool, made: list[int]) -> Any:
    def make(plan: Any, transport: str) -> str:
        made.append(len(made))
        if len(made) <= failures:
            error = SetupError("no port")
            error.retry = retry
            raise error
        return "a pool"

    return make


@pytest.mark.parametrize(
    ("failures", "retry", "tries"), [(2, True, 3), (9, True, 3), (1, False, 1)]
)
def test_workers_start_again_with_other_ports(
    monkeypatch: pytest.MonkeyPatch, failures: int, retry: bool, tries: int
) -> None:
    made: list[int] = []
    monkeypatch.setattr(warm, "Pool", _failing_pool(failures, retry, made))
    plan = topology.Plan(())
    if failures < tries:
        assert warm._start(plan, "grpc") == "a pool"
    else:
        with pytest.raises(WorkerError, match="no port"):
            warm._start(plan, "grpc")
    assert len(made) == tries
