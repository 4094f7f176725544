"""Owns an endpoint: `python -m nanotf.sagemaker.endpoints.endpoint_supervisor FOLDER`.

Detached (see `detached.detached_supervisor`), so an endpoint outlives the terminal.

    Creating     the server starts; it writes the ready file once it answers
    InService    it answers. One that ends is started again, on the same port
    Deleting     SIGTERM came: the server gets SIGTERM, and SIGKILL after `stop_seconds`

A server that ends before it has ever answered is not started again, but on the request's next port
if another program has taken this one. One that ends too often within ten minutes is not, either.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import http.client
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace

from nanotf.console import say
from nanotf.errors import describe_exit
from nanotf.machine import processes
from nanotf.machine.processes import OwnedProcess
from nanotf.sagemaker.detached.detached_supervisor import DetachedSupervisor, detach
from nanotf.sagemaker.detached.folders import now
from nanotf.sagemaker.endpoints import endpoint_record as record
from nanotf.sagemaker.endpoints.endpoint_command import listening
from nanotf.sagemaker.endpoints.endpoint_record import HOST, EndpointFolder, EndpointState
from nanotf.wire import files, log_files, ports

_PAUSE = 1.0  # seconds between two looks at a server that answers
_PING_SECONDS = 5.0
_SHORT_PAUSE = 0.05  # at one that does not yet, or that is to end
_MAX_ENDS = 5  # of servers that had answered, within the next time
_WINDOW = 600.0  # seconds
_FIRST_DELAY = 0.5  # seconds before the second restart in that time; doubled for each later one
_SCARCE = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, *files.FULL)
_REFUSED_PAUSE = 10.0  # seconds after the system has refused a process
_LOG_BYTES = 64 << 20  # of a server's log; the part before is in another file of that size
_TAIL = 2000  # characters of the log in the reason of a failure


class EndpointSupervisor(DetachedSupervisor[EndpointState]):
    """The owner of an endpoint."""

    def __init__(self, endpoint: EndpointFolder) -> None:
        super().__init__(endpoint, _LOG_BYTES)
        self._endpoint = endpoint
        self._request = endpoint.read_request()
        self._is_stopping = False  # set by the signal handler, read by the main thread
        self._is_late = False  # the server has not answered in time
        self._ends: collections.deque[float] = collections.deque()  # moments of the last ends

    def _on_signal(self, *_: object) -> None:
        self._is_stopping = True

    def run(self) -> None:
        """Keeps the endpoint in service. The final state is written in any case."""
        try:
            with processes.Output(self._write_line).woken_by_signals() as output:
                reason = self._serve(output)
        except BaseException:  # whatever it is, clients must find a final state
            self._end(self._endpoint.failed(self._state, traceback.format_exc(), now()))
            raise
        finally:
            self._logs.close()
        if reason is not None:
            self._end(self._endpoint.failed(self._state, reason, now()))
        else:
            ended = replace(self._state, status=record.DELETED, server=None, ended=now())
            self._end(ended)

    def _write_line(self, _: OwnedProcess, line: bytes, _is_error: bool) -> None:
        self._logs.write(self._endpoint.server_log, line)

    # ------------------------------------------------------------------------ servers
    def _serve(self, output: processes.Output) -> str | None:
        """Runs servers until the endpoint is stopped. Returns the reason if it has failed."""
        left = list(self._request.ports)
        port = _next_of(left)
        while not self._is_stopping:
            try:
                end = self._run_server(port, output)
            except OSError as error:  # no memory, no descriptors
                end = f"could not be started: {error}"
                if self._state.port is not None and error.errno in _SCARCE:
                    say(f"a server {end}. The supervisor tries again.", sys.stderr)
                    self._become(server=None)  # it may have run
                    self._sleep(output, _REFUSED_PAUSE)
                    continue
            if self._is_stopping:
                break
            if self._state.port is None:
                # The number of a port says nothing of why a server ended; that another program
                # listens there does.
                if not left or not port or self._is_late or ports.is_free(port):
                    return self._of_start(end)
                port = _next_of(left)
                continue
            port = self._state.port  # clients know this one
            if not self._may_restart():
                return self._of_ends(end)
            self._become(server=None, restarts=self._state.restarts + 1)
            self._delay(output)
        return None

    def _run_server(self, port: int, output: processes.Output) -> str:
        """Runs a server until it has ended. Returns how it has ended."""
        ready = self._endpoint.ready_file
        ready.unlink(missing_ok=True)  # that of the server before
        guard = processes.Guard()
        try:
            server = processes.begin(
                listening(self._request.command, port, ready),
                "server",
                str(self._endpoint.path),
                {**os.environ, "PYTHONUNBUFFERED": "1", **self._request.environment},
            )
            try:
                guard.add(server)
                output.add(server)
                self._watch(server, output)
            finally:
                server.reap()
                output.drain()
        finally:
            guard.dismiss()  # last: until here it kills what is left if this process is killed
        return describe_exit(server.return_code)[0]

    def _watch(self, server: OwnedProcess, output: processes.Output) -> None:
        is_ready, self._is_late = False, False
        deadline = time.monotonic() + self._request.start_seconds
        killing_at: float | None = None
        while server.is_running:
            # A signal (SIGCHLD) ends the wait when the server ends, but nothing when it is ready.
            is_quiet = is_ready and killing_at is None and output.is_open
            output.read(_PAUSE if is_quiet else _SHORT_PAUSE)
            self._catch_up()
            moment = time.monotonic()
            if killing_at is not None:
                if moment > killing_at:
                    server.kill_group()
            elif self._is_stopping or self._is_late:
                killing_at = moment + self._end_server(server)
            elif self._state.server is None:  # also once it answers, until its disk has room
                is_ready = self._note_ready() or is_ready
                is_ready = is_ready or (moment > deadline and self._answers())
                self._is_late = not is_ready and moment > deadline

    def _end_server(self, server: OwnedProcess) -> float:
        """Asks the server to end. Returns the seconds until it is killed."""
        if self._is_stopping:
            self._become(status=record.DELETING)
        server.send_signal(signal.SIGTERM)  # it answers what has come, and ends its workers
        return self._request.stop_seconds

    def _note_ready(self) -> bool:
        """Notes that the server answers, if it does."""
        with contextlib.suppress(OSError):  # not there yet, or its disk does not answer
            found = files.read_json(self._endpoint.ready_file)
            with files.doubting(self._endpoint.ready_file):
                port, pid = int(found["port"]), int(found["pid"])
            self._become(status=record.IN_SERVICE, port=port, server=pid)
            return True
        return False

    def _answers(self) -> bool:
        """Returns True if a server that was started again answers, whatever its disk takes."""
        if self._state.port is None:
            return False
        connection = http.client.HTTPConnection(HOST, self._state.port, timeout=_PING_SECONDS)
        with (
            contextlib.closing(connection),
            contextlib.suppress(OSError, http.client.HTTPException),
        ):
            connection.request("GET", "/ping")
            return connection.getresponse().status == http.HTTPStatus.OK
        return False

    # ------------------------------------------------------------------------ ends
    def _may_restart(self) -> bool:
        moment = time.monotonic()
        self._ends.append(moment)
        while self._ends[0] < moment - _WINDOW:
            self._ends.popleft()
        return len(self._ends) <= _MAX_ENDS

    def _delay(self, output: processes.Output) -> None:
        """Waits before a restart, longer each time: what ends servers may need time to go away."""
        again = len(self._ends) - 2
        self._sleep(output, _FIRST_DELAY * 2**again if again >= 0 else 0.0)

    def _sleep(self, output: processes.Output, seconds: float) -> None:
        """Waits, unless the endpoint is stopped."""
        until = time.monotonic() + seconds
        while not self._is_stopping and (left := until - time.monotonic()) > 0:
            output.read(left)

    def _of_start(self, end: str) -> str:
        received = f"one that {end}"
        if self._is_late:
            received = f"no answer to /ping within {self._request.start_seconds:g} s"
        return f"The server must start. Received: {received}. {self._log_tail()}"

    def _of_ends(self, end: str) -> str:
        return (
            f"The server must not end more than {_MAX_ENDS} times within {_WINDOW:.0f} s. "
            f"Received: {len(self._ends)} ends; the last one {end}. {self._log_tail()}"
        )

    def _log_tail(self) -> str:
        said = log_files.last_lines(self._endpoint.server_log, _TAIL)
        return f"The end of its log:\n{said}" if said else "It has printed nothing."


def _next_of(left: list[int]) -> int:
    """Takes the first port on which a server may be able to listen."""
    port = left.pop(0)
    # The last port is tried in any case: its server says by itself why it cannot listen.
    while left and port and not ports.is_free(port):
        port = left.pop(0)
    return port


def main(arguments: Sequence[str]) -> int:
    """Detaches a supervisor, see `detached_supervisor.detach`."""
    return detach(arguments, lambda folder: EndpointSupervisor(EndpointFolder(folder)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
