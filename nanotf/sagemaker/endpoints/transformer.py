"""Batch transform: the files of a folder, each through a model, each into an `.out` file.

An endpoint serves the model as long as the transform takes. Source: CreateTransformJob of
SageMaker's API, and `sagemaker.transformer.Transformer` of the SDK.
"""

from __future__ import annotations

import collections
import contextlib
import inspect
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from nanotf.console import status
from nanotf.errors import InvalidArgumentError, UnavailableError, check_choice, check_integer
from nanotf.machine import topology
from nanotf.pool import interrupts
from nanotf.sagemaker.endpoints import endpoint_start
from nanotf.sagemaker.endpoints import model_arguments as names
from nanotf.sagemaker.endpoints.deserializers import BytesDeserializer
from nanotf.sagemaker.endpoints.endpoint_record import KIND, EndpointFolder
from nanotf.sagemaker.endpoints.model_source import ModelSource
from nanotf.sagemaker.endpoints.predictor import Predictor
from nanotf.sagemaker.endpoints.serializers import IdentitySerializer
from nanotf.sagemaker.jobs import addresses
from nanotf.wire import files

STRATEGIES = ("MultiRecord", "SingleRecord")
ASSEMBLERS = ("None", "Line")
SPLITS = ("None", "Line")
_MEGABYTES = 6.0  # of a request, SageMaker's default
_SUFFIX = ".out"


class Transformer:
    """Transforms files by a model. `TensorFlowModel.transformer` makes it.

    Args:
        source: the model.
        environment: mapping of variables of the server.
        num_processes: workers of the server, as `-n` takes them.
        strategy, assemble_with, output_path, accept, max_concurrent_transforms, max_payload: as in
            `TensorFlowModel.transformer`.

    Raises:
        InvalidArgumentError, InvalidArgumentTypeError: An argument cannot be used.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        environment: Mapping[str, str],
        num_processes: str | None,
        strategy: str | None,
        assemble_with: str | None,
        output_path: str | os.PathLike[str] | None,
        accept: str | None,
        max_concurrent_transforms: int | None,
        max_payload: float | None,
    ) -> None:
        self._source, self._environment = source, environment
        self._num_processes, self._accept = num_processes, accept
        check_choice("strategy", strategy or STRATEGIES[0], STRATEGIES)
        check_choice("assemble_with", assemble_with or ASSEMBLERS[0], ASSEMBLERS)
        self._is_single = strategy == "SingleRecord"
        self._is_by_line = assemble_with == "Line"
        self.output_path = None if output_path is None else os.fspath(output_path)
        self._threads = check_integer(
            "max_concurrent_transforms",
            max_concurrent_transforms or topology.usable_count(),
            "Pass the number of requests at a time",
        )
        megabytes = _MEGABYTES if max_payload is None else max_payload
        if not megabytes > 0:
            raise InvalidArgumentError(
                f"`max_payload` must be a number of megabytes above 0. Received: {max_payload}."
            )
        self._limit = int(megabytes * 1_000_000)

    def transform(
        self,
        data: str | os.PathLike[str],
        data_type: str = "S3Prefix",
        content_type: str | None = None,
        compression_type: str | None = None,
        split_type: str | None = None,
        **arguments: Any,
    ) -> None:
        """Transforms files: `a/b.csv` becomes `a/b.csv.out` in the folder of results.

        Args:
            data: path or address of a file, or of a folder, whose files are taken at any depth.
            data_type: "S3Prefix"; manifests are not supported.
            content_type: str or None, the MIME type of the files; None sends none.
            compression_type: None; compressed files are not supported.
            split_type: None or "None" (default) sends a file as one record; "Line" makes each line
                a record.
            **arguments: others of SageMaker's.

        Raises:
            InvalidArgumentError: There are no such files, or a record is too large.
            EndpointError: The server has failed, or refuses a request.
        """
        given = names.TRANSFORM.modernize(
            arguments | {"compression_type": _given(compression_type)}
        )
        known = inspect.signature(Transformer.transform).parameters
        names.TRANSFORM.check_unknown(given, known)
        check_choice("split_type", split_type or SPLITS[0], SPLITS)
        if data_type != "S3Prefix":
            raise UnavailableError(
                "nanotf reads folders and files, no manifests. Received: "
                f"data_type={data_type!r}. Pass a folder, with data_type='S3Prefix'."
            )
        with contextlib.ExitStack() as stack:
            base, sources = _sources(os.fspath(data), stack)
            predictor = stack.enter_context(self._server())
            for source in sources:
                place = self._place(base) / source.relative_to(base)
                requests = self._requests(source, split_type == "Line")
                answers = self._answers(predictor, requests, content_type)
                _write(place.with_name(place.name + _SUFFIX), answers)

    @contextlib.contextmanager
    def _server(self) -> Iterator[Predictor]:
        """Serves the model in this context. After a failure, the endpoint's folder has its log."""
        name = KIND.make_name("transform")
        with contextlib.ExitStack() as stack:
            with status(f"starting the endpoint {name}"):
                with interrupts.deferred():  # a server that nobody knows would run on
                    endpoint = endpoint_start.start(
                        name,
                        self._source,
                        num_processes=self._num_processes,
                        ports=(0,),  # any free one: 8080 is for the user's endpoints
                        environment=self._environment,
                    )
                    stack.callback(_stop, endpoint)
                endpoint_start.wait_for_service(endpoint)
            deserializer = BytesDeserializer("*/*" if self._accept is None else self._accept)
            yield Predictor(name, None, IdentitySerializer(), deserializer)
        shutil.rmtree(endpoint.path)

    def _place(self, base: pathlib.Path) -> pathlib.Path:
        """Returns the folder of results."""
        if self.output_path is None:
            return base.with_name(f"{base.name}{_SUFFIX}")
        place = addresses.local_path(self.output_path)
        if place is None:
            raise UnavailableError(
                "A transform writes to a folder of this machine. Received: "
                f"output_path={self.output_path!r}. Pass a folder, and upload it afterwards."
            )
        return place

    def _requests(self, file: pathlib.Path, is_by_line: bool) -> Iterator[bytes]:
        """Yields the bodies of the requests for a file."""
        if not is_by_line:
            yield self._fitting(file.read_bytes(), f"the file {file}")
            return
        parts: list[bytes] = []
        size = 0
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                record = self._fitting(line.rstrip(b"\r\n"), f"line {number} of {file}")
                if parts and (self._is_single or size + len(record) + 1 > self._limit):
                    yield b"\n".join(parts)
                    parts, size = [], 0
                if record:  # an empty line is none
                    parts.append(record)
                    size += len(record) + 1
        if parts:
            yield b"\n".join(parts)

    def _fitting(self, record: bytes, what: str) -> bytes:
        if len(record) > self._limit:
            raise InvalidArgumentError(
                f"A record must not be larger than `max_payload`, {self._limit / 1e6:g} MB. "
                f"Received: {what}, {len(record) / 1e6:.1f} MB. Pass a larger max_payload, or "
                'split_type="Line".'
            )
        return record

    def _answers(
        self, predictor: Predictor, requests: Iterator[bytes], content_type: str | None
    ) -> Iterator[bytes]:
        """Yields the answers to requests, in their order."""
        given = {"ContentType": content_type}

        def ask(body: bytes) -> bytes:
            answer: bytes = predictor.predict(body, given)
            # An answer may end with a line end already, as CSV does.
            return answer.rstrip(b"\n") + b"\n" if self._is_by_line else answer

        waiting: collections.deque[Future[bytes]] = collections.deque()
        with ThreadPoolExecutor(self._threads) as threads:
            try:
                for body in requests:
                    waiting.append(threads.submit(ask, body))
                    if len(waiting) > self._threads:  # no more bodies are in memory at a time
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                # After an error the end of `with` would wait for requests that nobody needs.
                threads.shutdown(cancel_futures=True)


def _stop(endpoint: EndpointFolder) -> None:
    if not endpoint.read_state().is_final:  # one that has failed cannot be stopped
        endpoint_start.stop_and_wait(endpoint)


def _given(compression: str | None) -> str | None:
    return None if compression == "None" else compression  # the SDK takes both words


def _sources(data: str, stack: contextlib.ExitStack) -> tuple[pathlib.Path, Sequence[pathlib.Path]]:
    """Returns the folder of the data, and the files in it. Remote ones are copied first."""
    path = addresses.local_path(data)
    if path is None:
        temporary = tempfile.TemporaryDirectory(prefix="nanotf-transform-")
        path = pathlib.Path(stack.enter_context(temporary))
        addresses.download(data, path)
    if path.is_file():
        return path.parent, [path]
    found = sorted(file for file in path.rglob("*") if file.is_file())
    if not found:
        raise InvalidArgumentError(f"The data must have files. Received: {data}, which has none.")
    return path, found


def _write(target: pathlib.Path, parts: Iterator[bytes]) -> None:
    """Writes a file in one step."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with files.new_file(target) as file:
        file.writelines(parts)
