"""Owns a job until it has ended: `python -m nanotf.sagemaker.jobs.supervisor FOLDER`.

Detached (see `detached.detached_supervisor`), so a job outlives the terminal.

    Starting      it takes the job over from the launching process, which waits for that
    Downloading   remote data, checkpoints and packages
    Training      the script; its output goes to the logs, metrics are found in it
    Uploading     archives of the model and of other output

SIGTERM asks it to stop the job: the script gets SIGTERM, and SIGKILL after the `stop_seconds` of
the request (120 by default). A download or an upload ends at once.

`commands` lists the variables that it sets for the script.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace

from nanotf.errors import JobError, NanoError
from nanotf.machine import processes
from nanotf.machine.processes import OwnedProcess
from nanotf.sagemaker.detached.detached_supervisor import DetachedSupervisor, detach
from nanotf.sagemaker.detached.folders import now
from nanotf.sagemaker.jobs import (
    addresses,
    commands,
    container_base,
    data_channels,
    failure,
    metrics,
    packages,
    record,
    results,
    source,
)
from nanotf.sagemaker.jobs.record import JobFolder, JobRequest, JobState

_PAUSE = 1.0  # seconds between looks at ended processes and deadlines, without output
_AGENT_SECONDS = 60.0  # for other hosts to end after the first one
_FOLLOW_SECONDS = 5.0  # for other hosts to end by themselves after one of them has failed
_CHECKPOINTS = "checkpoints"


class _Stop(BaseException):  # not an Exception: libraries that upload catch and retry those
    """The job is asked to stop while its script does not run."""


class JobSupervisor(DetachedSupervisor[JobState]):
    """The owner of a job."""

    def __init__(self, job: JobFolder) -> None:
        super().__init__(job)
        self._job = job
        self._request: JobRequest = job.read_request()
        self._stop_reason: str | None = None  # set by the signal handler, read by the main thread
        self._is_stoppable = False  # a signal ends at once what the main thread does
        self._programs: list[OwnedProcess] = []
        self._failed: OwnedProcess | None = None  # the first one that failed by itself
        self._failed_at = 0.0
        self._pipes: list[list[str]] = []  # modules that feed, with arguments
        self._memory_kills = failure.memory_kills()  # before the scripts
        self._finder = metrics.Finder(self._request.metrics)

    def run(self) -> None:
        """Runs the job to its end. The final state is written in any case."""
        try:
            try:
                with self._stoppable():
                    if self._stop_reason is not None:  # the signal came before this line
                        raise _Stop
                    python = self._prepare()
                self._train(python)
            except _Stop:
                pass
            self._finish()
        except BaseException as error:
            # Before `_fail`, which may wait for room on the disk while they would run on.
            for program in self._programs:
                program.kill_group()
            is_explained = isinstance(error, NanoError)
            text = str(error) if is_explained else failure.of_framework(traceback.format_exc())
            self._fail(text)
            raise

    def _on_signal(self, *_: object) -> None:
        self._stop_reason = self._stop_reason or record.STOPPED  # `max_run` may be over already
        # An exception ends a download or pip at once. Scripts are ended by `_watch`, which waits.
        if self._is_stoppable:
            self._is_stoppable = False  # once
            raise _Stop

    @contextlib.contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Lets a signal end what is done in this context, by `_Stop`."""
        self._is_stoppable = True
        try:
            yield
        finally:
            self._is_stoppable = False

    # ------------------------------------------------------------------------- the state
    def _end_as(self, status: str, phase: str, reason: str | None) -> None:
        """Writes the final state."""
        self._end(
            replace(self._state, status=status, phase=phase, failure_reason=reason, ended=now())
        )

    def _note_waiting(self, text: str | None) -> None:
        self._become(waiting=text)

    def _fail(self, text: str, beside_log: str | None = None) -> None:
        """Ends the job as failed, by this text unless the script has said why it fails.

        Args:
            beside_log: the text without what the script's log ends with; None if the log says
                nothing of the failure.
        """
        path = self._job.tree(self._request.host_names[0]).failure
        try:
            reason = self._with_room(path.name, lambda: failure.write(path, text))
        except OSError as error:
            reason = failure.reason_of(f"{text}\n(output/failure: {error})")
        if reason == failure.reason_of(text):  # else the script's own, which the log need not have
            self._state = replace(self._state, failure_beside_log=beside_log)
        self._end_as(record.FAILED, record.FAILED, reason)

    # ------------------------------------------------------------------------- Downloading
    def _prepare(self) -> str:
        """Provides data, checkpoints and packages. Returns the Python of the script."""
        self._become(phase="Downloading")
        downloads = self._job.path / "downloads"
        for host in self._request.host_names:
            tree = self._job.tree(host)
            for channel in self._request.channels:
                data = self._with_room(
                    f"data of channel {channel.name}",
                    functools.partial(data_channels.provide, channel, tree, downloads),
                )
                # The first host's script reads the data of all hosts.
                if channel.is_pipe and host == self._request.host_names[0]:
                    self._pipes.append(data_channels.feeder_arguments(channel, data, tree))
            self._with_room(
                "folder of checkpoints",
                functools.partial(self._provide_checkpoints, tree.checkpoints),
            )
        requirements = self._job.code / source.REQUIREMENTS
        # As the toolkit: a shell script installs what it needs by itself.
        if self._request.source.entry.endswith(".py") and requirements.is_file():
            return packages.install(requirements, self._job.path / "packages")
        return sys.executable

    def _provide_checkpoints(self, place: pathlib.Path) -> None:
        address = self._request.checkpoints
        folder = self._job.path / _CHECKPOINTS if address is None else addresses.local_path(address)
        if folder is None:
            assert address is not None
            folder = self._job.path / _CHECKPOINTS
            if not folder.exists() and addresses.exists(address):  # once, for all hosts
                addresses.download(address, folder)
        folder.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)  # of a try on a full disk
        place.symlink_to(folder, target_is_directory=True)

    # ------------------------------------------------------------------------- Training
    def _train(self, python: str) -> None:
        self._become(phase="Training", started=now())
        guard = processes.Guard()
        try:
            with (
                container_base.provided(self._job, self._request) as places,
                processes.Output(self._write_line).woken_by_signals() as output,
            ):
                for program in commands.begin(
                    self._job, self._request, python, self._pipes, places
                ):
                    guard.add(program)
                    self._programs.append(program)
                    output.add(program)
                self._watch(output)
                guard.dismiss()  # not after an exception: then the guard kills what is left
                output.drain()
        finally:
            self._logs.close()

    def _watch(self, output: processes.Output) -> None:
        """Reads output until all scripts have ended; stops them at a signal or a deadline."""
        scripts = [program for program in self._programs if not program.is_helper]
        # `killed_at`: the moment to come at which scripts that were asked to end are killed.
        started, killed_at, is_killed = time.monotonic(), None, False
        limit = self._request.max_run
        deadline = None if limit is None else started + limit
        while any(script.is_running for script in scripts):
            # After the last output only a signal (SIGCHLD) ends the wait, so it is kept short.
            output.read(_PAUSE if output.is_open else 0.05)
            self._catch_up()
            moment = time.monotonic()
            if deadline is not None and moment > deadline and self._stop_reason is None:
                self._stop_reason = "MaxRuntimeExceeded"
            if killed_at is None:
                self._note_failure()
                grace = self._end_of_others(scripts)
                killed_at = None if grace is None else moment + grace
            elif moment > killed_at:
                is_killed = True
                for script in scripts:
                    script.kill_group()
            else:  # a rank of another host may have failed, and the first one has followed
                self._note_failure()
        if not is_killed:  # a script may have failed after the last look
            self._note_failure()
        for program in self._programs:  # what the scripts have left, and the feeders
            program.reap()

    def _note_failure(self) -> None:
        """Remembers the first program that failed. Later ones may be its consequences.

        A signal ends each wait for output when a program ends, so a look finds one as a rule. The
        first host's script comes last: it fails when another host does, while another host that
        ends with it has an exit code of 0 (NANOTF_OWN_EXIT_CODE).
        """
        failed = [p for p in self._programs if not p.is_running and p.exit_code != 0]
        if self._failed is not None:  # a feeder fails when its reader has
            failed = [p for p in failed if self._is_first(self._failed) and not p.is_helper]
        if failed and self._stop_reason is None:
            self._failed, self._failed_at = min(failed, key=self._is_first), time.monotonic()

    def _is_first(self, program: OwnedProcess) -> bool:
        """Returns True for the script of the first host, which is the job."""
        return program.name == self._request.host_names[0] and not program.is_helper

    def _end_of_others(self, scripts: Sequence[OwnedProcess]) -> float | None:
        """Asks the scripts to end, if it is time. Returns the seconds until they are killed."""
        if self._stop_reason is not None:
            self._become(status=record.STOPPING, phase=record.STOPPING)
        elif self._failed is None or self._is_first(self._failed):
            # The first host's script is the job. The others notice its end by themselves.
            return None if scripts[0].is_running else _AGENT_SECONDS
        elif not self._failed.is_helper and time.monotonic() < self._failed_at + _FOLLOW_SECONDS:
            return None  # a host that is about to end with it has a code of its own
        for script in scripts:
            script.send_signal(signal.SIGTERM)
        return self._request.stop_seconds

    def _write_line(self, program: OwnedProcess, line: bytes, _is_error: bool) -> None:
        """Writes a line to the log of its host, and the metrics in it."""
        self._logs.write(self._job.log(program.name), line)
        for name, value in self._finder.find(line.decode(errors="replace")):
            self._write_metric(program.name, name, value)

    def _write_metric(self, host: str, name: str, value: float) -> None:
        found = {"name": name, "value": value, "time": now(), "host": host}
        self._logs.write(self._job.metrics, f"{json.dumps(found)}\n".encode())

    # ------------------------------------------------------------------------- Uploading
    def _finish(self) -> None:
        scripts = [program for program in self._programs if not program.is_helper]
        codes = {script.name: script.exit_code for script in scripts}
        stopping = {} if self._stop_reason is None else {"status": record.STOPPING}
        self._become(phase=record.UPLOADING, exit_codes=codes, **stopping)
        lost = self._deliver()  # before the final state: whoever reads that finds the results
        failed = self._failed
        if failed is not None:
            host = failed.name if len(scripts) > 1 else None
            describe = functools.partial(
                failure.of_script,
                failed.exit_code,
                command=failed.command,
                host=host,
                lacked_memory=failure.memory_kills() > self._memory_kills,
            )
            text, beside_log = describe(failed.last_errors()), describe(None)
            self._fail(text, beside_log)
        elif lost is not None:
            self._fail(lost)
        elif self._stop_reason is not None:
            self._end_as(record.STOPPED, self._stop_reason, None)
        else:
            with contextlib.suppress(OSError):  # a full disk; nothing depends on it
                self._job.tree(self._request.host_names[0]).success.touch()
            self._end_as(record.COMPLETED, record.COMPLETED, None)

    def _deliver(self) -> str | None:
        """Packs and uploads the results. Returns why they are not where they should be."""
        checkpoints = self._job.path / _CHECKPOINTS
        try:
            with self._stoppable():
                results.pack(self._job, self._request, self._with_room)
                for name in results.upload(self._job, self._request, checkpoints, self._with_room):
                    self._become(uploaded=[*self._state.uploaded, name])
        except _Stop:
            # The final status tells of the stop, and `uploaded` of what had arrived.
            return None
        except JobError as error:
            traceback.print_exc()  # the reason may have no room for it
            return str(error)
        return None


def main(arguments: Sequence[str]) -> int:
    """Detaches a supervisor, see `detached_supervisor.detach`."""
    return detach(arguments, lambda folder: JobSupervisor(JobFolder(folder)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
