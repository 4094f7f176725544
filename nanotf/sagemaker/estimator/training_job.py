"""A job of an estimator, as `latest_training_job` and `jobs` hold it."""

from __future__ import annotations

import sys
from typing import Any

from nanotf.console import logger, say
from nanotf.errors import JobError
from nanotf.sagemaker.detached import following
from nanotf.sagemaker.jobs import follow, metrics, record
from nanotf.sagemaker.jobs.record import JobFolder


class TrainingJob:
    """A job, running or ended. It can be read from any process; `attach` finds it.

    Args:
        folder: `nanotf.sagemaker.jobs.record.JobFolder`.
    """

    def __init__(self, folder: JobFolder) -> None:
        self._folder = folder

    def __repr__(self) -> str:
        return f"TrainingJob(name={self.name!r}, path={str(self._folder.path)!r})"

    @property
    def name(self) -> str:
        """The job's name."""
        return self._folder.name

    @property
    def job_name(self) -> str:
        """Another name of `name`."""
        return self.name

    @property
    def path(self) -> str:
        """The job's folder: code, data, logs, results."""
        return str(self._folder.path)

    def describe(self) -> dict[str, Any]:
        """Returns the job with the keys of SageMaker's DescribeTrainingJob."""
        return follow.describe(self._folder)

    def logs(self) -> str:
        """Returns the log so far."""
        return follow.LogReader(self._folder).read()

    def wait(self, logs: bool | str = True) -> str:
        """Waits until the job has ended. Warns if it was stopped, as SageMaker's SDK does.

        Args:
            logs: bool or str, default True. Prints the log, from its beginning, unless it is False
                or "None".

        Returns:
            "Completed", or "Stopped".

        Raises:
            JobError: The job has failed.
        """
        # Version 2 of the SDK has the words "All" and "None" for True and False.
        shown = logs not in (False, None, "None", "none")
        state = follow.wait(self._folder, following.print_to(sys.stdout) if shown else None)
        if state.status == record.FAILED:
            raise JobError(
                f"The script of a job must end with exit code 0. Received: job {self.name} failed: "
                f"{state.failure_reason}\nIts folder: {self._folder.path}"
            )
        if state.status == record.COMPLETED and self.model_data is None:  # perhaps in `model_dir`
            told = follow.told_of_model(self._folder)
            if told:
                say(f"job {self.name} completed{told}", sys.stderr)
        if state.status == record.STOPPED:
            logger.warning(
                "Job %s was stopped before its script had ended (%s). Its archives hold what the "
                "script had saved by then. Its folder: %s",
                self.name,
                state.phase,
                self._folder.path,
            )
        return state.status

    def stop(self) -> None:
        """Asks the job to stop: SIGTERM to its script, SIGKILL after 120 s. Does not wait.

        Raises:
            InvalidArgumentError: The job has ended, or is being stopped already.
            JobError: It runs on another machine, or its supervisor does not react.
        """
        follow.stop(self._folder)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The metrics found so far: dicts with `name`, `value`, `time` and `host`."""
        return metrics.read(self._folder.metrics)

    @property
    def model_data(self) -> str | None:
        """The address of `model.tar.gz`; None if there is none yet."""
        return follow.model_data(self._folder)
