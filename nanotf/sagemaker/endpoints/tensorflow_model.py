"""`TensorFlowModel`: a model that can be deployed, with SageMaker's arguments."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nanotf.console import logger, status
from nanotf.errors import InvalidArgumentError
from nanotf.machine import topology
from nanotf.sagemaker.argument_names import check_instance_type
from nanotf.sagemaker.endpoints import endpoint_start
from nanotf.sagemaker.endpoints import model_arguments as names
from nanotf.sagemaker.endpoints.endpoint_record import KIND, EndpointRequest
from nanotf.sagemaker.endpoints.model_source import ModelSource
from nanotf.sagemaker.endpoints.predictor import TensorFlowPredictor
from nanotf.sagemaker.endpoints.transformer import Transformer
from nanotf.sagemaker.jobs.source import SourceCode

_REMEDY = (
    "On another machine, install nanotf there and call deploy() or `nanotf serve`; in a SageMaker "
    "container, `nanotf serve` is the command."
)


class TensorFlowModel:
    """A trained model, and perhaps code that handles its requests.

    Arguments that only matter in the cloud (`role`, `framework_version`, `image_uri`, ...; see the
    guide) have no effect.

    Args:
        model_data: path or address of a `model.tar.gz`, a SavedModel's folder, a folder of
            versions, or a `.keras` file.
        role: without effect here.
        entry_point: path or None, a script with the functions handler, input_handler and
            output_handler, or model_fn, input_fn, predict_fn, output_fn, transform_fn. With
            `source_dir`, relative to it. Default: `code/inference.py` of the model, if any.
        source_dir: path or None, a folder or `.tar.gz` that replaces the model's `code/`.
        dependencies: sequence of paths, copied to the model's `code/lib/`; default none.
        env: mapping of variables of the server; default none.
        name: str or None, the first part of the names of endpoints; default "tensorflow-inference".
        predictor_cls: what `deploy` calls with an endpoint's name and a session; default
            `TensorFlowPredictor`.
        num_processes: int, "auto" or None, the server's workers; default as `nanotf serve`.
        **arguments: others of SageMaker's.

    Raises:
        InvalidArgumentError, InvalidArgumentTypeError: An argument cannot be used.
        UnavailableError: An argument asks for what nanotf does not have.
    """

    def __init__(
        self,
        model_data: str | os.PathLike[str],
        role: Any = None,
        entry_point: str | os.PathLike[str] | None = None,
        *,
        source_dir: str | os.PathLike[str] | None = None,
        dependencies: Sequence[str | os.PathLike[str]] | None = None,
        env: Mapping[str, Any] | None = None,
        name: str | None = None,
        predictor_cls: Callable[..., Any] | None = None,
        num_processes: int | str | None = None,
        **arguments: Any,
    ) -> None:
        if num_processes is not None:
            # So that `modernize` sees if its other name, `model_server_workers`, is given, too.
            arguments["num_processes"] = num_processes
        given = names.MODEL.modernize(arguments)
        workers = given.pop("num_processes", None)
        names.MODEL.check_unknown(given, inspect.signature(TensorFlowModel).parameters)
        self.model_data = os.fspath(model_data)
        self.entry_point = None if entry_point is None else os.fspath(entry_point)
        self.source_dir = None if source_dir is None else os.fspath(source_dir)
        self.dependencies = tuple(os.fspath(path) for path in dependencies or ())
        if self.entry_point is None and (self.source_dir or self.dependencies):
            raise InvalidArgumentError(
                "`source_dir` and `dependencies` belong to an entry point. Received: "
                f"source_dir={self.source_dir!r}, dependencies={list(self.dependencies)}, and no "
                'entry_point. Pass it, such as entry_point="inference.py".'
            )
        # Processes have variables of text; callers also pass numbers.
        self.env = {str(key): str(value) for key, value in (env or {}).items()}
        self.name = name
        self.endpoint_name: str | None = None
        self.num_processes = _checked(workers)
        self._predictor_cls = predictor_cls or TensorFlowPredictor

    def _source(self) -> ModelSource:
        if self.entry_point is None:
            return ModelSource(self.model_data)
        code = SourceCode(self.entry_point, self.source_dir, self.dependencies)
        return ModelSource(self.model_data, code)

    def deploy(
        self,
        initial_instance_count: int | None = None,
        instance_type: str | None = None,
        serializer: Any = None,
        deserializer: Any = None,
        *,
        endpoint_name: str | None = None,
        wait: bool = True,
        container_startup_health_check_timeout: float | None = None,
        port: int | None = None,
        output_path: str | os.PathLike[str] | None = None,
        **arguments: Any,
    ) -> Any:
        """Starts an endpoint: a server on this machine, which outlives this program.

        Args:
            initial_instance_count: int, default 1. Others log a line: one server has all workers.
            instance_type: "local", the default.
            serializer: of the predictor; default its own.
            deserializer: of the predictor; default its own.
            endpoint_name: str or None, default `name` and the time. The name of an endpoint that
                has ended can be used again.
            wait: bool, default True; returns once the endpoint answers.
            container_startup_health_check_timeout: float, seconds until it must answer; default
                600.
            port: int or None, where it listens on 127.0.0.1; 0 takes any free port. Default 8080,
                or any free port if another program has that one.
            output_path: path, default `NANOTF_ENDPOINTS`, else `./endpoints`: the folder of
                endpoints.
            **arguments: others of SageMaker's.

        Returns:
            What `predictor_cls` returns.

        Raises:
            InvalidArgumentError: The endpoint cannot start; no process was started.
            EndpointError: It has failed. The text ends with that of the server's log.
            UnavailableError: An argument asks for another machine, or for an update.
        """
        given = names.DEPLOY.modernize(arguments)
        known = [*inspect.signature(TensorFlowModel.deploy).parameters, *names.OF_MODEL]
        names.DEPLOY.check_unknown(given, known)
        check_instance_type(instance_type, _REMEDY)
        _tell_of_instances(initial_instance_count)
        timeout = container_startup_health_check_timeout
        name = endpoint_name or KIND.make_name(self.name or "tensorflow-inference")
        with status(f"starting the endpoint {name}"):
            endpoint = endpoint_start.start(
                name,
                self._source(),
                output=output_path,
                num_processes=self.num_processes,
                ports=endpoint_start.DEFAULT_PORTS if port is None else (port,),
                environment=self.env,
                start_seconds=EndpointRequest.start_seconds if timeout is None else timeout,
            )
            self.endpoint_name = name  # before the wait: Ctrl-C ends that, but not the endpoint
            if wait:
                endpoint_start.wait_for_service(endpoint)
        return self._predictor(name, output_path, serializer, deserializer)

    def _predictor(
        self,
        name: str,
        output_path: str | os.PathLike[str] | None,
        serializer: Any,
        deserializer: Any,
    ) -> Any:
        place: dict[str, Any] = {} if output_path is None else {"output_path": output_path}
        # As the SDK, a name and a session: a class of the user's need not take more.
        predictor = self._predictor_cls(name, None, **place)
        if serializer is not None:
            predictor.serializer = serializer
        if deserializer is not None:
            predictor.deserializer = deserializer
        return predictor

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
        volume_kms_key: Any = None,
        **arguments: Any,
    ) -> Transformer:
        """Returns what transforms files by this model: one `.out` for each.

        Args:
            instance_count, output_kms_key, tags, volume_kms_key: without effect here.
            instance_type: "local".
            strategy: "MultiRecord" (default) sends several records of a file in one request,
                "SingleRecord" each by itself. Records are what `split_type` divides a file into.
            assemble_with: None or "None" (default) joins the answers of a file as they are, "Line"
                puts each on a line.
            output_path: path of the folder of results; default a folder beside the data.
            accept: str or None, the MIME type of the answers; None lets the server choose.
            env: mapping of variables of the server, beside those of the model.
            max_concurrent_transforms: int or None, requests at a time; default the workers' cores.
            max_payload: float or None, megabytes of a request; default 6.
            **arguments: others of SageMaker's.

        Raises:
            InvalidArgumentError, InvalidArgumentTypeError: An argument cannot be used.
            UnavailableError: An argument asks for another machine.
        """
        given = names.TRANSFORMER.modernize(arguments)
        known = inspect.signature(TensorFlowModel.transformer).parameters
        names.TRANSFORMER.check_unknown(given, known)
        check_instance_type(instance_type, _REMEDY)
        return Transformer(
            self._source(),
            environment=self.env | {str(k): str(v) for k, v in (env or {}).items()},
            num_processes=self.num_processes,
            strategy=strategy,
            assemble_with=assemble_with,
            output_path=output_path,
            accept=accept,
            max_concurrent_transforms=max_concurrent_transforms,
            max_payload=max_payload,
        )


def _checked(workers: int | str | None) -> str | None:
    """Returns the number of workers as `-n` takes it."""
    if workers is None or workers == topology.AUTO:
        return workers
    try:
        return str(topology.check_num_processes(int(workers)))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"`num_processes` must be a whole number above 0, or {topology.AUTO!r}. Received: "
            f"num_processes={workers!r}."
        ) from error


def _tell_of_instances(count: int | None) -> None:
    if count not in (None, 1):
        logger.warning(
            "An endpoint on this machine is one server. Received: initial_instance_count=%s; "
            "num_processes of TensorFlowModel() sets the number of its workers.",
            count,
        )
