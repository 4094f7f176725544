"""The estimator: SageMaker's constructor, `fit`, `attach`, `deploy`, on this machine."""

from __future__ import annotations

import inspect
import os
import pathlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanotf.console import say
from nanotf.errors import InvalidArgumentError
from nanotf.sagemaker.endpoints import model_arguments
from nanotf.sagemaker.endpoints.tensorflow_model import TensorFlowModel
from nanotf.sagemaker.endpoints.transformer import Transformer
from nanotf.sagemaker.estimator import estimator_arguments as names
from nanotf.sagemaker.estimator.training_inputs import as_channels
from nanotf.sagemaker.estimator.training_job import TrainingJob
from nanotf.sagemaker.jobs import addresses, launch, record
from nanotf.sagemaker.jobs import hyperparameters as texts
from nanotf.sagemaker.jobs.data_channels import DataChannel
from nanotf.sagemaker.jobs.metrics import Metric
from nanotf.sagemaker.jobs.record import JobFolder, JobRequest
from nanotf.sagemaker.jobs.source import SourceCode

_CHECKPOINTS_OF_CONTAINER = "/opt/ml/checkpoints"  # where a script finds a folder of its job anyway


class TensorFlow:
    """Runs a training script as jobs on this machine, with the arguments of SageMaker's estimator.

    Arguments that only matter in the cloud (`role`, `image_uri`, ...; see the guide) have no
    effect, and a line says so. `framework_version` is compared with the installed TensorFlow. Names
    of the SDK's version 1 (`train_instance_count`, ...) work.

    Args:
        entry_point: str, the script. With `source_dir`, relative to it.
        source_dir: str or None, a folder or `.tar.gz` that becomes the code; None copies the
            script alone.
        dependencies: sequence of paths that are copied beside the script; default none.
        hyperparameters: mapping of name and value; the script's arguments. Default none.
        model_dir: str, None or False, the hyperparameter `model_dir`. None passes a folder of the
            job, False passes no such hyperparameter.
        output_path: path or address, default `NANOTF_JOBS`, else `./jobs`. A path is the folder of
            jobs. A remote one (`s3://`) receives the archives.
        base_job_name: str or None, the first part of jobs' names; default that of the script.
        instance_count: int, default 1; more simulate as many hosts on this machine.
        instance_type: "local".
        distribution: mapping or None. "mpi" and "smdistributed"'s "dataparallel" become ranks on
            each host, which run the whole script (`nanotf run --ranks`); every other kind
            becomes synchronous workers, as `{"nanotf": {"processes_per_host": n}}` does.
        num_processes: int, "auto" or None, workers on each host. Default as `distribution` says;
            without both the script runs in plain Python.
        max_run: float or None, seconds after which the script is stopped; default no limit.
        input_mode: "File" (default), "FastFile" or "Pipe".
        metric_definitions: sequence of dicts with "Name" and "Regex"; default none.
        environment: mapping of variables for the script; default none.
        checkpoint_s3_uri: path, address or None; where checkpoints are kept. With None, as
            `checkpoint_local_path` says.
        checkpoint_local_path: str or None, the folder where checkpoints are kept without
            `checkpoint_s3_uri`. With None or "/opt/ml/checkpoints", a folder of the job. The script
            finds its checkpoints by `nanotf.job().checkpoint_dir`.
        model_uri: path, address or None; an earlier model, as a channel of each job.
        model_channel_name: str, default "model", the channel's name.
        **arguments: others of SageMaker's.

    Raises:
        InvalidArgumentError, InvalidArgumentTypeError: An argument cannot be used.
        UnavailableError: An argument asks for another machine, or for what nanotf does not have.
    """

    def __init__(
        self,
        *,
        entry_point: str | os.PathLike[str],
        source_dir: str | os.PathLike[str] | None = None,
        dependencies: Sequence[str | os.PathLike[str]] | None = None,
        hyperparameters: Mapping[str, Any] | None = None,
        model_dir: str | bool | None = None,
        output_path: str | os.PathLike[str] | None = None,
        base_job_name: str | None = None,
        num_processes: int | str | None = None,
        environment: Mapping[str, str] | None = None,
        input_mode: str = "File",
        checkpoint_s3_uri: str | os.PathLike[str] | None = None,
        checkpoint_local_path: str | None = None,
        model_uri: str | os.PathLike[str] | None = None,
        model_channel_name: str = "model",
        **arguments: Any,
    ) -> None:
        given = names.NAMES.modernize(arguments)
        self.instance_count = names.take_checked(given)
        self.instance_type: str = given.pop("instance_type", "local")
        self.max_run: float | None = given.pop("max_run", None)
        self.metric_definitions = list(given.pop("metric_definitions", None) or ())
        distribution = given.pop("distribution", None)
        # After all that is used was taken out: the rest has no effect, or is misspelled.
        names.NAMES.check_unknown(given, inspect.signature(TensorFlow).parameters)
        names.check_instance_type(self.instance_type)
        self._metrics = tuple(_metric(each) for each in self.metric_definitions)
        self._workers = names.read_distribution(distribution, self.instance_count)
        self.distribution = dict(distribution or {})
        self.entry_point = os.fspath(entry_point)
        self.source_dir = None if source_dir is None else os.fspath(source_dir)
        self.dependencies = tuple(os.fspath(path) for path in dependencies or ())
        self._hyperparameters = dict(hyperparameters or {})
        texts.encode(self._hyperparameters)  # rejects values here rather than in `fit`
        self.model_dir = model_dir
        self.output_path = None if output_path is None else os.fspath(output_path)
        self.base_job_name = base_job_name
        self.num_processes = num_processes
        self.environment = dict(environment or {})
        self.input_mode = input_mode
        self.checkpoint_s3_uri = checkpoint_s3_uri
        self.checkpoint_local_path = checkpoint_local_path
        self.model_uri = None if model_uri is None else os.fspath(model_uri)
        self.model_channel_name = model_channel_name
        self.jobs: list[TrainingJob] = []
        self.latest_training_job: TrainingJob | None = None

    # ---------------------------------------------------------------- hyperparameters
    def hyperparameters(self) -> dict[str, Any]:
        """Returns the hyperparameters of the next job."""
        return dict(self._hyperparameters)

    def set_hyperparameters(self, **values: Any) -> None:
        """Sets hyperparameters of the next job."""
        texts.encode(values)
        self._hyperparameters.update(values)

    # ---------------------------------------------------------------- jobs
    def fit(
        self,
        inputs: Any = None,
        wait: bool = True,
        logs: bool | str = True,
        job_name: str | None = None,
        experiment_config: Any = None,  # the SDK's order: scripts may pass it by position
        run_tensorboard_locally: bool = False,
    ) -> str | None:
        """Runs the script as a job.

        Args:
            inputs: None, one source for the channel "training", or a dict of channel names and
                sources: paths, `file://`, `s3://`, or `TrainingInput`.
            wait: bool, default True; waits for the job's end.
            logs: bool or str, default True; prints the log while it waits. "All" is True, "None"
                is False.
            job_name: str or None, default `base_job_name` and the time.
            experiment_config: without effect here.
            run_tensorboard_locally: bool, default False; prints the command of TensorBoard for the
                job, which the SDK's version 1 started.

        Returns:
            "Completed", or "Stopped" after `stop` or `max_run`, with a warning. None if it does not
            wait.

        Raises:
            InvalidArgumentError: The job cannot run; no process was started.
            JobError: The job has failed.
        """
        name = job_name or record.KIND.make_name(self.base_job_name or self._stem())
        job = launch.start(self._request(name, inputs), self._folder())
        self.latest_training_job = TrainingJob(job)
        self.jobs.append(self.latest_training_job)
        if run_tensorboard_locally:
            # On standard error: standard output has the job's log.
            say(f"to follow the job: tensorboard --logdir {shlex.quote(str(job.path))}", sys.stderr)
        return self.latest_training_job.wait(logs=logs) if wait else None

    def _stem(self) -> str:
        return pathlib.PurePath(self.entry_point).stem

    def _folder(self) -> pathlib.Path:
        """Returns the folder of jobs. Those with a remote output are in the default one."""
        path = None if self.output_path is None else addresses.local_path(self.output_path)
        return record.KIND.folder(path)

    def _request(self, name: str, inputs: Any) -> JobRequest:
        output = self.output_path
        is_remote = output is not None and addresses.local_path(output) is None
        number = self.num_processes
        return JobRequest(
            name=name,
            source=SourceCode(self.entry_point, self.source_dir, self.dependencies),
            hyperparameters=self._all_hyperparameters(name),
            channels=self._channels(inputs),
            # The argument counts before what `distribution` says.
            num_processes=self._workers.num_processes if number is None else str(number),
            ranks=self._workers.are_ranks,
            instances=self.instance_count,
            metrics=self._metrics,
            max_run=self.max_run,
            environment=self.environment,
            checkpoints=self._checkpoints(),
            upload=output if is_remote else None,
        )

    def _channels(self, inputs: Any) -> tuple[DataChannel, ...]:
        channels = as_channels(inputs, self.input_mode)
        if self.model_uri is None:
            return channels
        if any(channel.name == self.model_channel_name for channel in channels):
            raise InvalidArgumentError(
                "Each channel must have a name of its own. Received: "
                f"{self.model_channel_name!r} in `inputs` and as `model_channel_name`."
            )
        return (*channels, DataChannel(self.model_channel_name, self.model_uri))

    def _all_hyperparameters(self, name: str) -> dict[str, Any]:
        values = self._hyperparameters | self._workers.hyperparameters
        if self.model_dir is False or "model_dir" in values:
            return values
        default = _default_model_dir(JobFolder(self._folder() / name), self._workers.is_mpi)
        return values | {"model_dir": str(self.model_dir or default)}

    def _checkpoints(self) -> str | None:
        """Returns where checkpoints are kept: the address, or else a path of the user's own."""
        local = self.checkpoint_local_path
        if self.checkpoint_s3_uri is not None:
            return os.fspath(self.checkpoint_s3_uri)
        return None if local == _CHECKPOINTS_OF_CONTAINER else local

    @classmethod
    def attach(
        cls,
        training_job_name: str,
        sagemaker_session: Any = None,
        model_channel_name: str = "model",
        *,
        output_path: str | os.PathLike[str] | None = None,
        wait: bool = True,
    ) -> TensorFlow:
        """Returns an estimator for a job that any process has started.

        Args:
            training_job_name: str, the name that the job got from `fit` or `nanotf train`.
            sagemaker_session, model_channel_name: without effect here.
            output_path: path, default `NANOTF_JOBS`, else `./jobs`: the folder of jobs.
            wait: bool, default True, as in SageMaker: prints the log until the job has ended.

        Raises:
            InvalidArgumentError: There is no such job.
            JobError: The job has failed, and `wait` is True.
        """
        path = None if output_path is None else addresses.local_path(os.fspath(output_path))
        job = record.find(training_job_name, path)
        request = job.read_request()
        estimator = cls(**_arguments_of(job, request))
        # Not every kind of `distribution` leaves its name in the request.
        estimator._workers = replace(estimator._workers, are_ranks=request.ranks)
        estimator.latest_training_job = TrainingJob(job)
        estimator.jobs.append(estimator.latest_training_job)
        if wait:
            estimator.latest_training_job.wait(logs=True)
        return estimator

    # ---------------------------------------------------------------- results
    def _latest(self) -> TrainingJob:
        if self.latest_training_job is None:
            raise InvalidArgumentError(
                "An estimator has results after fit() or attach(). Received: no job yet."
            )
        return self.latest_training_job

    @property
    def model_data(self) -> str | None:
        """The address of the latest job's `model.tar.gz`; None if it has made none."""
        return self._latest().model_data

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The latest job's metrics: dicts with `name`, `value`, `time` and `host`."""
        return self._latest().metrics

    def logs(self) -> None:
        """Prints the latest job's log until the job has ended."""
        self._latest().wait(logs=True)

    # ---------------------------------------------------------------- serving
    def create_model(self, role: Any = None, **arguments: Any) -> TensorFlowModel:
        """Returns the model that the latest job has made.

        Args:
            role: without effect here.
            **arguments: those of `TensorFlowModel` but `model_data`.

        Raises:
            InvalidArgumentError: There is no job, it has not ended, or it has made no model.
        """
        job = self._latest()
        status = job.describe()["TrainingJobStatus"]
        # A job that was stopped has packed what was saved by then, which need not be a model.
        if status != record.COMPLETED or job.model_data is None:
            lack = "" if status != record.COMPLETED else " and which has saved nothing"
            raise InvalidArgumentError(
                "A model comes from a completed job that has saved one in SM_MODEL_DIR or "
                f"`model_dir`. Received: {job.name}, whose status is {status}{lack}."
            )
        arguments.setdefault("name", self.base_job_name or self._stem())
        return TensorFlowModel(job.model_data, role, **arguments)

    def deploy(
        self,
        initial_instance_count: int | None = None,
        instance_type: str | None = None,
        serializer: Any = None,
        deserializer: Any = None,
        *,
        endpoint_name: str | None = None,
        wait: bool = True,
        model_name: str | None = None,
        **arguments: Any,
    ) -> Any:
        """Serves the model of the latest job: `create_model`, then `TensorFlowModel.deploy`.

        Args:
            initial_instance_count, instance_type, serializer, deserializer, endpoint_name, wait: as
                in `TensorFlowModel.deploy`.
            model_name: str or None, as `name` of `TensorFlowModel`.
            **arguments: others of `TensorFlowModel` (`entry_point`, `source_dir`, `dependencies`,
                `env`, `num_processes`, ...) and of its `deploy`.

        Returns:
            A `TensorFlowPredictor`.

        Raises:
            InvalidArgumentError: as `create_model`, or the endpoint cannot start.
            EndpointError: The endpoint has failed.
        """
        of_model, given = _divided(arguments, model_name)
        return self.create_model(**of_model).deploy(
            initial_instance_count,
            instance_type,
            serializer,
            deserializer,
            endpoint_name=endpoint_name,
            wait=wait,
            **given,
        )

    def transformer(
        self,
        instance_count: int = 1,
        instance_type: str = "local",
        strategy: str | None = None,
        assemble_with: str | None = None,
        output_path: str | os.PathLike[str] | None = None,
        output_kms_key: Any = None,
        accept: str | None = None,
        env: Mapping[str, Any] | None = None,
        max_concurrent_transforms: int | None = None,
        max_payload: float | None = None,
        tags: Any = None,
        role: Any = None,
        model_server_workers: int | str | None = None,
        volume_kms_key: Any = None,
        entry_point: str | os.PathLike[str] | None = None,
        *,
        model_name: str | None = None,
        **arguments: Any,
    ) -> Transformer:
        """Returns what transforms files by the model of the latest job.

        Args:
            instance_count, output_kms_key, tags, role, volume_kms_key: without effect here.
            instance_type, strategy, assemble_with, output_path, accept, env,
                max_concurrent_transforms, max_payload: as in `TensorFlowModel.transformer`.
            model_server_workers: int, "auto" or None, as `num_processes` of `TensorFlowModel`.
            entry_point: path or None, as in `TensorFlowModel`.
            model_name: str or None, as `name` of `TensorFlowModel`.
            **arguments: others of `TensorFlowModel` (`source_dir`, `dependencies`, ...) and of its
                `transformer`.

        Raises:
            InvalidArgumentError: as `create_model`.
        """
        if entry_point is not None:
            arguments["entry_point"] = entry_point
        if model_server_workers is not None:
            arguments["model_server_workers"] = model_server_workers
        of_model, given = _divided(arguments, model_name)
        return self.create_model(role, **of_model).transformer(
            instance_count,
            instance_type,
            strategy,
            assemble_with,
            output_path,
            output_kms_key,
            accept,
            env,
            max_concurrent_transforms,
            max_payload,
            tags,
            volume_kms_key,
            **given,
        )


def _divided(
    arguments: Mapping[str, Any], model_name: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the arguments of `TensorFlowModel`, and those of its method."""
    # Under present names first: `model_server_workers` is the SDK's for `num_processes`.
    given = model_arguments.MODEL.modernize(arguments)
    of_model = {name: given.pop(name) for name in list(given) if model_arguments.of_model(name)}
    if model_name is not None:
        of_model["name"] = model_name
    return of_model, given


def _metric(definition: Any) -> Metric:
    if not isinstance(definition, Mapping) or set(definition) != {"Name", "Regex"}:
        raise InvalidArgumentError(
            "A metric definition must be a dict with Name and Regex, for instance "
            f'{{"Name": "acc", "Regex": "acc: ([0-9.]+)"}}. Received: {definition!r}.'
        )
    metric = Metric(definition["Name"], definition["Regex"])
    metric.check()
    return metric


def _default_model_dir(job: JobFolder, is_mpi: bool) -> pathlib.Path:
    # As SageMaker's local mode: a folder that all hosts share; with MPI, the folder `model`.
    first = job.tree("algo-1")
    return first.model if is_mpi else first.shared_model


def _arguments_of(job: JobFolder, request: JobRequest) -> dict[str, Any]:
    """Returns the constructor's arguments that make a job's request again, but for `ranks`."""
    values = request.hyperparameters
    # Without the platform's: `distribution` makes them again.
    given = texts.of_script(values)
    # Nor the job's own folder, which `fit` chose: another job has another one.
    own = _default_model_dir(job, bool(values.get("sagemaker_mpi_enabled"))).resolve()
    model_dir = given.get("model_dir")
    if isinstance(model_dir, str) and pathlib.Path(model_dir).resolve() == own:
        del given["model_dir"]
    return {
        "entry_point": request.source.script,
        "source_dir": request.source.folder,
        "dependencies": request.source.dependencies,
        "hyperparameters": given,
        "model_dir": None if "model_dir" in values else False,
        "output_path": request.upload or str(job.path.parent),
        "distribution": _distribution_of(values),
        "num_processes": request.num_processes,
        "instance_count": request.instances,
        "max_run": request.max_run,
        "metric_definitions": [{"Name": m.name, "Regex": m.regex} for m in request.metrics],
        "environment": request.environment,
        "checkpoint_s3_uri": request.checkpoints,
    }


def _distribution_of(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: {"enabled": True}
        for name in ("parameter_server", "multi_worker_mirrored_strategy")
        if values.get(f"sagemaker_{name}_enabled")
    }
    if values.get("sagemaker_mpi_enabled"):
        found["mpi"] = {
            "enabled": True,
            "processes_per_host": values["sagemaker_mpi_num_of_processes_per_host"],
            "custom_mpi_options": values["sagemaker_mpi_custom_mpi_options"],
        }
    return found
