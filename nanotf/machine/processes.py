"""The programs that a process owns, as a supervisor or a launcher: their output, their end.

Everything happens in the owner's main thread: Linux ends processes started with
PR_SET_PDEATHSIG with the *thread* that started them.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from nanotf.machine import private_mounts
from nanotf.machine.own_exit import end_with_parent

_CHUNK = 2**16
_TAIL_BYTES = 2**14  # of standard error, for the text of a failure
_TAIL_CHARACTERS = 600  # so that the reason, 1,024 of the text, holds all of them
_BEGIN_CHARACTERS = 200  # of a last line that is longer
_CUT = " [...] "
_DRAIN_SECONDS = 5.0  # for output that a program has written before it ended


@dataclass
class OwnedProcess:
    """A program, the leader of a process group of its own."""

    name: str  # a job's host, for instance
    command: list[str]  # its words, for messages
    process: subprocess.Popen[bytes]  # with pipes for its output
    is_helper: bool = False  # it only helps another program, as by writing data for it
    _tail: bytearray = field(default_factory=bytearray)  # of standard error, at most `_TAIL_BYTES`

    @property
    def return_code(self) -> int | None:
        """The exit code, or minus the number of the signal that has ended it; None while it runs.

        The process stays a zombie until `reap`: its number cannot become somebody else's, nor that
        of its group.
        """
        if self.process.returncode is not None:
            return self.process.returncode
        try:
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            ended = os.waitid(os.P_PID, self.process.pid, flags)
        except ChildProcessError:  # the kernel has reaped it, since this process ignores SIGCHLD
            return self.process.poll()
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    @property
    def is_running(self) -> bool:
        """True until the process has ended."""
        return self.return_code is None

    @property
    def exit_code(self) -> int:
        """The exit code as shells report it: 128 + n after signal n. It has ended."""
        code = self.return_code
        assert code is not None, "it has ended"
        return 128 - code if code < 0 else code

    def send_signal(self, number: int) -> None:
        """Sends a signal to the leader, which may need its own processes to save something."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def kill_group(self) -> None:
        """Kills what is left of the group, as a container ends with its first process."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Kills what is left of the group, and lets the system forget the process."""
        self.kill_group()
        self.process.wait()

    def note_error(self, data: bytes) -> None:
        """Remembers the end of what it writes to standard error."""
        self._tail += data
        del self._tail[:-_TAIL_BYTES]

    def last_errors(self) -> str:
        """Returns the last lines that it wrote to standard error; whole ones, if they are short.

        Of a last line that is long, its begin and its end.
        """
        text = self._tail.decode(errors="replace").strip()
        if len(text) <= _TAIL_CHARACTERS:
            return text
        whole = text[-_TAIL_CHARACTERS:].partition("\n")[2]
        if whole:
            return whole
        line = text.rpartition("\n")[2]  # its begin names the error
        end = _TAIL_CHARACTERS - _BEGIN_CHARACTERS - len(_CUT)
        return f"{line[:_BEGIN_CHARACTERS]}{_CUT}{line[-end:]}"


def begin(
    command: Sequence[str],
    name: str,
    folder: str,
    environ: Mapping[str, str],
    *,
    is_helper: bool = False,
    places: Mapping[str, str] | None = None,
) -> OwnedProcess:
    """Starts a process that ends with this one, in a session of its own.

    Args:
        command: its words.
        name: as `OwnedProcess.name`.
        folder: its working directory.
        environ: its whole environment.
        is_helper: as `OwnedProcess.is_helper`.
        places: what it sees at other paths, as `private_mounts.enter`; None for nothing.
    """
    supervisor = os.getpid()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: _prepare(supervisor, places),
    )
    return OwnedProcess(name, list(command), process, is_helper)


class Guard:
    """A process that kills programs, with all their children, once this process is killed.

    The kernel ends only the programs themselves. Creating this object forks the process, which
    waits for the end of a pipe that nobody else holds.
    """

    def __init__(self) -> None:
        # Programs inherit neither end (PEP 446), so the pipe ends with this process.
        waits, self._pipe = os.pipe()
        try:
            self._pid = os.fork()
        except OSError:
            os.close(waits)
            os.close(self._pipe)
            raise
        if self._pid:
            os.close(waits)
            return
        try:
            os.close(self._pipe)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            self._stand(waits)
        finally:
            os._exit(0)

    @staticmethod
    def _stand(waits: int) -> None:
        with open(waits, "rb") as pipe:
            groups = [int(line) for line in pipe]
        # A 0 is from `dismiss`. As a process group, it would be the guard's own.
        for group in groups if 0 not in groups else ():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)

    def add(self, program: OwnedProcess) -> None:
        """Guards a program."""
        os.write(self._pipe, b"%d\n" % program.process.pid)

    def dismiss(self) -> None:
        """Ends it: the programs have ended."""
        with contextlib.suppress(BrokenPipeError):  # somebody has killed it
            os.write(self._pipe, b"0\n")
        os.close(self._pipe)
        os.waitpid(self._pid, 0)  # a supervisor of many programs in turn must leave no zombies


def _prepare(supervisor: int, places: Mapping[str, str] | None) -> None:
    """Acts in the new process, before it becomes the program."""
    if places is not None:
        private_mounts.enter(places)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    end_with_parent(supervisor)  # last: the kernel forgets the wish with a change of credentials


class Output:
    """Reads the output of programs, as it comes.

    Args:
        write: takes a program, a line with its line end, and True for a line of standard error;
            called for each whole line.
    """

    def __init__(self, write: Callable[[OwnedProcess, bytes, bool], None]) -> None:
        self._write = write
        self._selector = selectors.DefaultSelector()
        self._rests: dict[IO[bytes], bytes] = {}

    def add(self, program: OwnedProcess) -> None:
        """Begins to read a program's output."""
        for stream in (program.process.stdout, program.process.stderr):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, program)
            self._rests[stream] = b""

    @contextlib.contextmanager
    def woken_by_signals(self) -> Iterator[Output]:
        """Lets a signal, also one that comes just before it, end `read`. Closes this at the end."""
        wake, write_end = os.pipe()
        for fd in (wake, write_end):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self._selector.register(wake, selectors.EVENT_READ, None)
        try:
            yield self
        finally:
            signal.set_wakeup_fd(-1)
            self.close()
            for fd in (wake, write_end):
                os.close(fd)

    @property
    def is_open(self) -> bool:
        """True while a program may still write."""
        return bool(self._rests)

    def read(self, seconds: float) -> None:
        """Waits for output, or at most some seconds, and passes on what there is."""
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(key.fd, _CHUNK)
            else:
                self._pass_on(key.fileobj, key.data)  # type: ignore[arg-type]

    def _pass_on(self, stream: IO[bytes], program: OwnedProcess) -> None:
        try:
            data = os.read(stream.fileno(), _CHUNK)
        except BlockingIOError:
            return
        is_error = stream is program.process.stderr
        if is_error:
            program.note_error(data)
        *lines, rest = (self._rests[stream] + data).split(b"\n")
        for line in lines:
            self._write(program, line + b"\n", is_error)
        if rest and not data:
            self._write(program, rest + b"\n", is_error)
        elif len(rest) > _CHUNK:
            # A progress bar may write megabytes without a line end. It is cut where it begins anew:
            # a number must not be cut.
            whole = rest.rfind(b"\r") if rest.rfind(b"\r") > 0 else len(rest)
            self._write(program, rest[:whole] + b"\n", is_error)
            rest = rest[whole:]
        self._rests[stream] = rest
        if not data:
            self._close(stream)

    def _close(self, stream: IO[bytes]) -> None:
        self._selector.unregister(stream)
        del self._rests[stream]
        stream.close()

    def drain(self) -> None:
        """Reads what ended programs have left. A process that escaped may hold a pipe open."""
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self.is_open and time.monotonic() < deadline:
            self.read(0.1)
        for stream in list(self._rests):
            self._close(stream)

    def close(self) -> None:
        """Ends reading."""
        self._selector.close()
