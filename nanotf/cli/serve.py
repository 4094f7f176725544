"""`nanotf serve`: answers requests for a model over HTTP, and over gRPC if asked for."""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import signal
import sys
from typing import Any

from nanotf.cli import serve_folder
from nanotf.cli.parsers import number_or_auto
from nanotf.console import logger
from nanotf.errors import InvalidArgumentError, UnsupportedVersionError
from nanotf.machine import neighbours, topology
from nanotf.sagemaker.serving import code_requirements, container_settings
from nanotf.sagemaker.serving.container_settings import ContainerSettings

_EXTRA = ("httptools", "orjson", "uvloop")
_GRPC_EXTRA = ("grpc", "google.protobuf")
_MIB = 1 << 20
# Of options that a container's variables may set.
_DEFAULTS = {"host": "127.0.0.1", "num_processes": topology.AUTO, "max_batch": 32, "queue": 1000}


def add_command(commands: Any) -> None:
    """Adds `nanotf serve` to the commands of a parser."""
    serve = commands.add_parser(
        "serve",
        help="answer requests for a model over HTTP, with several pinned processes",
        usage="nanotf serve [options] MODEL",
        description="Serves a model: a SavedModel's folder, a folder of numbered versions, a "
        ".keras file, a model.tar.gz, or what nanotf.inference has saved. Speaks TensorFlow "
        "Serving's REST interface (/v1/models/...), SageMaker's (/invocations, /ping) and the Open "
        "Inference Protocol (/v2/...). A new version's folder is served as soon as it is whole. "
        "SIGTERM ends the server after the requests that it has.",
        allow_abbrev=False,
    )
    serve.add_argument("model", metavar="MODEL", nargs="?", help="what to serve")
    _add_models(serve)
    _add_address(serve)
    _add_workers(serve)
    _add_limits(serve)
    _add_operation(serve)
    serve.set_defaults(run=_serve)


def _add_models(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--name", help="the model's name in addresses; default that of its folder")
    serve.add_argument(
        "--models-dir", metavar="DIR", help="serve each folder in DIR as a model of its name"
    )
    serve.add_argument(
        "--config", metavar="FILE", help="serve the models of a TensorFlow Serving models.config"
    )
    serve.add_argument(
        "--code", metavar="DIR", help="a folder with inference.py; default MODEL/code"
    )
    serve.add_argument(
        "--unpacked",
        action="store_true",
        help="MODEL is a folder in which a model.tar.gz was unpacked, such as /opt/ml/model: it "
        "may hold several models, and all versions are served",
    )
    serve.add_argument(
        "--poll",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="look for new versions this often; 0 for never; default %(default)g",
    )


def _add_address(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--host", help="the address to listen on; default 127.0.0.1, in a SageMaker container all"
    )
    serve.add_argument("--port", type=int, help="0 for any that is free; default 8080")
    serve.add_argument(
        "--grpc-port",
        type=int,
        metavar="PORT",
        help="also answer gRPC here: TensorFlow Serving's services and the Open Inference "
        "Protocol's; 0 for any that is free; default none",
    )
    serve.add_argument(
        "--ready-file",
        metavar="FILE",
        help="write the ports and the process id here once it serves",
    )


def _add_workers(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "-n",
        "--num-processes",
        type=number_or_auto,
        metavar="N",
        help='the number of workers; "auto", the default, is one for each core, or for each '
        "--cores-per-process",
    )
    serve.add_argument(
        "--cores-per-process",
        type=int,
        metavar="N",
        help="cores of each worker; default equal shares",
    )
    serve.add_argument(
        "--engine",
        help="compute with this engine: tensorflow, frozen, xla, openvino, onnxruntime or litert; "
        "default that of the program, or tensorflow. `nanotf optimize` compares them",
    )
    serve.add_argument(
        "--install-requirements",
        action="store_true",
        help="install the packages of the model's code/requirements.txt beside it",
    )


def _add_limits(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--max-batch",
        type=int,
        metavar="ROWS",
        help="rows that a worker computes at once; default 32",
    )
    serve.add_argument(
        "--max-latency",
        type=float,
        metavar="MS",
        help="refuse requests that would wait longer, and keep batches to half of it; default none",
    )
    serve.add_argument(
        "--queue",
        type=int,
        metavar="N",
        help="requests that may wait; more are refused; default 1000",
    )
    serve.add_argument(
        "--queue-mb",
        type=int,
        default=1024,
        metavar="MIB",
        help="memory of the bodies that wait; default %(default)s",
    )
    serve.add_argument(
        "--max-body",
        type=int,
        metavar="MIB",
        help="the largest body of a request, also once it is inflated; default 100",
    )
    serve.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="give a request up after this time; default 60",
    )
    serve.add_argument(
        "--overload-status",
        type=int,
        default=429,
        choices=(429, 503),
        help="the status of a request that is refused; default %(default)s",
    )


def _add_operation(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "--start-timeout",
        type=float,
        metavar="SECONDS",
        help="end with code 2 if no version can be served by then; default 300",
    )
    serve.add_argument(
        "--load-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="refuse a version that a worker has not loaded after this time; default %(default)g",
    )
    serve.add_argument(
        "--drain-delay",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="after SIGTERM, still take requests for this time, while /ping says that the server "
        "ends; default %(default)g",
    )
    serve.add_argument(
        "--access-log", action="store_true", help="write a line for each answer to stderr"
    )
    serve.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="of the access log; default %(default)s",
    )


def _complete(parsed: argparse.Namespace, settings: ContainerSettings) -> None:
    """Gives options that are not there the values of a container's variables, or the defaults."""
    has_models = (parsed.model, parsed.models_dir, parsed.config) != (None, None, None)
    if not has_models and settings.folder.is_dir():
        parsed.model, parsed.unpacked = str(settings.folder), True
        parsed.host = parsed.host or "0.0.0.0"  # as SageMaker needs of a container
    found = {
        "port": settings.port,
        "num_processes": settings.workers,
        "cores_per_process": settings.threads,
        "max_batch": settings.max_batch,
        "queue": settings.queue,
        "max_body": settings.max_body // _MIB,
        "timeout": settings.timeout,
        "start_timeout": settings.start_timeout,
    }
    # An option goes before a container's variable, and that before the default.
    for name, value in {**_DEFAULTS, **{n: v for n, v in found.items() if v is not None}}.items():
        if getattr(parsed, name) is None:
            setattr(parsed, name, value)


def _serve(parsed: argparse.Namespace) -> int:
    _check_extra(_EXTRA, "`nanotf serve`", "serve")
    if parsed.grpc_port is not None:
        _check_extra(_GRPC_EXTRA, "--grpc-port", "grpc")
    settings = container_settings.from_environment(os.environ)
    _complete(parsed, settings)
    _check(parsed, settings)
    # Until the server handles it: the folder must not stay.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with serve_folder.private_folder() as folder:
            return _run(parsed, settings, folder)
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(parsed: argparse.Namespace, settings: ContainerSettings, folder: pathlib.Path) -> int:
    from nanotf.sagemaker.serving.invocations import Invocations
    from nanotf.serving.front import server
    from nanotf.serving.front.dispatcher import ServerLimits
    from nanotf.serving.open_inference import OpenInference
    from nanotf.serving.repository.added_models import AddedModels
    from nanotf.serving.tensorflow_rest import TensorflowRest

    plan, added = _plan(parsed), AddedModels(folder)
    most = parsed.max_body * _MIB
    invocations = Invocations(multi_model=settings.multi_model, accept=settings.accept, most=most)
    latency = parsed.max_latency
    limits = ServerLimits(
        most_rows=parsed.max_batch,
        most_waiting=parsed.queue,
        most_waiting_bytes=parsed.queue_mb * _MIB,
        max_latency=None if latency is None else latency / 1000,  # the option is in ms
        timeout=parsed.timeout,
        overload_status=parsed.overload_status,
    )
    options = server.ServerOptions(
        repository=_repository(parsed, settings, folder, added),
        added=added,
        interfaces=(
            TensorflowRest(),
            invocations,
            OpenInference(),
            *_remote_interfaces(parsed),
        ),
        plan=plan,
        limits=limits,
        most_bytes=most,
        folder=folder,
        engine=parsed.engine,
        host=parsed.host,
        port=parsed.port,
        grpc_port=parsed.grpc_port,
        poll=parsed.poll,
        start_timeout=parsed.start_timeout,
        load_timeout=parsed.load_timeout,
        drain_delay=parsed.drain_delay,
        ready_file=None if parsed.ready_file is None else pathlib.Path(parsed.ready_file),
        access_log=parsed.log_format if parsed.access_log else None,
    )
    return server.serve(options)


def _remote_interfaces(parsed: argparse.Namespace) -> tuple[Any, ...]:
    if parsed.grpc_port is None:
        return ()
    from nanotf.serving.remote.inference_service import InferenceService
    from nanotf.serving.remote.prediction_service import PredictionService

    return PredictionService(most=parsed.max_body * _MIB), InferenceService()


def _repository(
    parsed: argparse.Namespace, settings: ContainerSettings, folder: pathlib.Path, added: Any
) -> Any:
    from nanotf.serving.repository.model_layouts import ModelsFolder, sources_of
    from nanotf.serving.repository.models_config import ConfigFile
    from nanotf.serving.repository.repository import Repository

    code = None if parsed.code is None else pathlib.Path(parsed.code)
    sources: list[Any] = []
    catalogs: list[Any] = []
    # A multi-model container starts empty: requests add its models.
    if settings.multi_model:
        _tell_of_unserved(parsed.model, settings)
    elif parsed.model is not None:
        sources = sources_of(
            parsed.model, parsed.name, folder=folder, code=code, unpacked=parsed.unpacked
        )
    if parsed.models_dir is not None:
        catalogs.append(ModelsFolder(parsed.models_dir))
    if parsed.config is not None:
        catalogs.append(ConfigFile(parsed.config))
    # The versions of a model share their code.
    for place in {source.code for source in sources if source.code is not None}:
        code_requirements.prepare(place, allowed=parsed.install_requirements)
    return Repository(sources, [*catalogs, added], settings.default_model)


def _tell_of_unserved(model: str | None, settings: ContainerSettings) -> None:
    # One command line may be that of all containers: SageMaker's own folders are no news.
    if model is not None and pathlib.Path(model).absolute().parent != settings.folder.parent:
        logger.warning(
            "With SAGEMAKER_MULTI_MODEL=true requests to /models add the models. Received: "
            "MODEL=%r, which is not served. Unset the variable, or use --models-dir.",
            model,
        )


def _plan(parsed: argparse.Namespace) -> topology.Plan:
    number, share = parsed.num_processes, parsed.cores_per_process
    if number == topology.AUTO:
        cores = topology.check_cores_per_process(share) or 1
        # With fewer cores than one worker needs, the plan says so.
        return neighbours.plan(max(1, topology.usable_count() // cores), share)
    return neighbours.plan(number, share)


def _check_extra(names: tuple[str, ...], what: str, extra: str) -> None:
    missing = [name for name in names if not _is_installed(name)]
    if missing:
        raise UnsupportedVersionError(
            f"{what} needs {', '.join(names)}. Received: a Python without "
            f"{', '.join(missing)}. Install them: pip install 'nanotf[{extra}]'."
        )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package that the module is in
        return False


def _check(parsed: argparse.Namespace, settings: ContainerSettings) -> None:
    """Rejects numbers that no server can use."""
    has_models = (parsed.model, parsed.models_dir, parsed.config) != (None, None, None)
    if not has_models and not settings.multi_model:
        raise InvalidArgumentError(
            "A server needs models. Received: no MODEL. Name one, or use --models-dir or --config."
        )
    for option, port in {"--port": parsed.port, "--grpc-port": parsed.grpc_port}.items():
        if port is not None and not 0 <= port < 1 << 16:
            raise InvalidArgumentError(f"{option} must be from 0 to 65535. Received: {port}.")
    at_least = {
        "--max-batch": (parsed.max_batch, 1),
        "--queue": (parsed.queue, 1),
        "--queue-mb": (parsed.queue_mb, 1),
        "--max-body": (parsed.max_body, 1),
        "--poll": (parsed.poll, 0),
        "--drain-delay": (parsed.drain_delay, 0),
    }
    for option, (value, least) in at_least.items():
        if not value >= least:  # true for NaN, too
            raise InvalidArgumentError(f"{option} must be at least {least}. Received: {value}.")
    above_zero = {
        "--timeout": parsed.timeout,
        "--max-latency": parsed.max_latency,
        "--start-timeout": parsed.start_timeout,
        "--load-timeout": parsed.load_timeout,
    }
    for option, value in above_zero.items():
        if value is not None and not value > 0:  # NaN is refused, too
            raise InvalidArgumentError(f"{option} must be above 0. Received: {value:g}.")
