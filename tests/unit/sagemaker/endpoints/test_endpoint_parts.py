"""Endpoints without a server: requests that are refused, records, a full disk, arguments."""

from __future__ import annotations

import dataclasses
import errno
import http.server
import json
import logging
import os
import pathlib
import tarfile
import threading
from typing import Any

import pytest

from nanotf.cli import main
from nanotf.errors import (
    EndpointError,
    InvalidArgumentError,
    InvalidArgumentTypeError,
    NanoError,
    UnavailableError,
)
from nanotf.estimator import Predictor, TensorFlow, TensorFlowModel, TensorFlowPredictor
from nanotf.sagemaker.detached import detached_supervisor, starting
from nanotf.sagemaker.detached.owner import Owner
from nanotf.sagemaker.endpoints import (
    endpoint_command,
    endpoint_record,
    endpoint_start,
    endpoint_supervisor,
    model_arguments,
)
from nanotf.sagemaker.endpoints.endpoint_record import EndpointFolder
from nanotf.sagemaker.endpoints.endpoint_supervisor import EndpointSupervisor
from nanotf.sagemaker.endpoints.model_source import ModelSource
from nanotf.sagemaker.jobs.source import SourceCode
from nanotf.wire import files


def _full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def model(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model; endpoints get no supervisor."""
    monkeypatch.setattr(starting, "start_supervisor", lambda *_: None)
    monkeypatch.setenv(endpoint_record.KIND.variable, str(tmp_path / "endpoints"))
    (tmp_path / "net.keras").write_text("model")
    return str(tmp_path / "net.keras")


@pytest.fixture
def endpoint(model: str) -> EndpointFolder:
    return endpoint_start.start("a", ModelSource(model))


def test_the_request_of_an_endpoint(model: str, tmp_path: pathlib.Path) -> None:
    TensorFlowModel(model, env={"A": 1}, num_processes=3).deploy(endpoint_name="a", wait=False)
    endpoint = endpoint_record.find("a")
    request = endpoint.read_request()
    assert request.command[-5:] == ("nanotf", "serve", request.model, "-n", "3")
    assert (request.ports, request.environment, request.name) == ((8080, 0), {"A": "1"}, "a")
    assert pathlib.Path(request.model) == endpoint.path / "net.keras"
    assert pathlib.Path(request.model).read_text() == "model"
    assert endpoint.path.stat().st_mode & 0o777 == 0o700
    state = endpoint.read_state()
    assert (state.status, state.url, state.owner) == ("Creating", None, Owner.this_process())
    assert [path.name for path in (tmp_path / "endpoints").iterdir()] == ["a"]


def test_the_servers_command(tmp_path: pathlib.Path) -> None:
    command = endpoint_command.server_command(tmp_path, None)
    assert command[-3:] == ["nanotf", "serve", str(tmp_path)]
    told = endpoint_command.listening(command, 80, tmp_path / "ready.json")
    assert told[len(command) :] == [
        *("--host", "127.0.0.1"),
        *("--port", "80"),
        *("--ready-file", str(tmp_path / "ready.json")),
    ]


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"endpoint_name": "a b"}, InvalidArgumentError, "An endpoint's name must have 1 to 63"),
        ({"instance_type": "ml.c5.large"}, UnavailableError, "must be 'local'.*ml.c5.large"),
        ({"update_endpoint": True}, UnavailableError, "Deploy another endpoint"),
        ({"endpoint_nam": "a"}, InvalidArgumentTypeError, "Did you mean `endpoint_name`"),
        ({"port": 70000}, InvalidArgumentError, "from 0 to 65535. Received: port=70000"),
        ({"port": "80"}, InvalidArgumentError, "Received: port='80'"),
        (
            {"container_startup_health_check_timeout": 0},
            InvalidArgumentError,
            "seconds above 0. Received: 0",
        ),
    ],
)
def test_arguments_of_deploy(
    given: dict[str, Any], kind: type, text: str, model: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(NanoError, match=text) as caught:
        TensorFlowModel(model).deploy(**given)
    assert caught.type is kind
    assert not (tmp_path / "endpoints").exists()


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"entry_pont": "a.py"}, InvalidArgumentTypeError, "Did you mean `entry_point`"),
        ({"source_dir": "x"}, InvalidArgumentError, "belong to an entry point"),
        ({"num_processes": 0}, InvalidArgumentError, "Received: num_processes=0"),
        ({"num_processes": "two"}, InvalidArgumentError, "Received: num_processes='two'"),
        (
            {"num_processes": 2, "model_server_workers": 3},
            InvalidArgumentTypeError,
            "Received: model_server_workers and num_processes, which name the same. Leave out mo",
        ),
        ({"git_config": {"repo": "x"}}, UnavailableError, "does not support `git_config`"),
    ],
)
def test_arguments_of_a_model(given: dict[str, Any], kind: type, text: str) -> None:
    with pytest.raises(NanoError, match=text) as caught:
        TensorFlowModel("model.tar.gz", **given)
    assert caught.type is kind


def test_names_that_matter_in_the_cloud_alone(model: str, caplog: pytest.LogCaptureFixture) -> None:
    of_model = dict.fromkeys(model_arguments.MODEL.without_effect, "x")
    of_deploy = dict.fromkeys(model_arguments.DEPLOY.without_effect, "x")
    with caplog.at_level(logging.WARNING, "nanotf"):
        made = TensorFlowModel(model, model_server_workers=2, **of_model)
        made.deploy(2, "local", endpoint_name="a", wait=False, update_endpoint=False, **of_deploy)
    assert made.num_processes == "2"
    said = [record.getMessage().split(".")[0] for record in caplog.records]
    told = [text for text in said if text.startswith("Without effect on this machine: the arg")]
    assert [text.rpartition(" ")[2] for text in told] == ["TensorFlowModel()", "deploy()"]
    assert [text for text in said if text not in told] == [
        "Arguments of TensorFlowModel() were renamed: model_server_workers is now num_processes",
        "An endpoint on this machine is one server",
    ]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (ModelSource("/no/such"), "data must exist. Received: /no/such"),
        (ModelSource(__file__, SourceCode("/no/such.py")), "The script must be a file"),
        (ModelSource(__file__, SourceCode(__file__, None, ("/no/such",))), "A dependency must be"),
    ],
)
def test_models_that_are_not_there(source: ModelSource, text: str, model: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        endpoint_start.start("a", source)
    assert list(endpoint_record.find_all()) == []


@pytest.mark.parametrize("is_link", [False, True])
@pytest.mark.parametrize("part", ["model", "source_dir", "dependency"])
def test_nothing_is_copied_into_itself(
    part: str, is_link: bool, model: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "saved_model.pb").touch()
    (folder / "inference.py").touch()
    monkeypatch.chdir(folder)
    monkeypatch.delenv(endpoint_record.KIND.variable)
    (tmp_path / "link").symlink_to(folder)
    given = str(tmp_path / "link") if is_link else "."
    source = {
        "model": ModelSource(given),
        "source_dir": ModelSource(model, SourceCode("inference.py", given)),
        "dependency": ModelSource(model, SourceCode("inference.py", None, (given,))),
    }[part]
    with pytest.raises(InvalidArgumentError, match=r"must not hold the endpoint's own folder"):
        endpoint_start.start("a", source)
    assert sorted(path.name for path in folder.iterdir()) == ["1", "inference.py"]
    endpoint_start.start("a", source, output=tmp_path / "elsewhere")


def test_a_damaged_archive(model: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "model.tar.gz").write_bytes(b"\x1f\x8bno archive")
    source = ModelSource(str(tmp_path / "model.tar.gz"), SourceCode(__file__))
    with pytest.raises(InvalidArgumentError, match=r"The model must be a folder or a whole .tar"):
        endpoint_start.start("a", source)
    assert list((tmp_path / "endpoints").iterdir()) == []


def test_two_scripts_for_one_name(model: str, tmp_path: pathlib.Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    for name in ("inference.py", "serve.py"):
        (code / name).touch()
    source = ModelSource(model, SourceCode("serve.py", str(code)))
    with pytest.raises(InvalidArgumentError, match=r"has another inference.py"):
        endpoint_start.start("a", source)


def test_a_folder_is_copied_with_its_name(model: str, tmp_path: pathlib.Path) -> None:
    """The name is that of the served model."""
    versions = tmp_path / "mnist" / "3"
    versions.mkdir(parents=True)
    (versions / "saved_model.pb").touch()
    endpoint = endpoint_start.start("a", ModelSource(str(versions.parent)))
    assert endpoint.read_request().model == str(endpoint.path / "model/mnist")
    assert (endpoint.path / "model/mnist/3/saved_model.pb").is_file()
    (versions / "saved_model.pb").rename(versions / "saved_model.pbtxt")
    packed = ModelSource(str(versions), SourceCode(__file__))  # a SavedModel without a version
    with tarfile.open(packed.place(tmp_path)) as tar:
        assert "1/saved_model.pbtxt" in tar.getnames()
    (versions / "saved_model.pbtxt").rename(versions / "saved_model.pb")
    packed = ModelSource(str(versions.parent), SourceCode(__file__))
    with tarfile.open(packed.place(tmp_path)) as tar:
        names = {member.name for member in tar if member.isfile()}
    assert names == {"3/saved_model.pb", "code/inference.py"}


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"owner": {}}', '{"owner": 1}', "\x00"])
def test_damaged_records(
    content: str, endpoint: EndpointFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, read in {
        "state.json": endpoint.read_state,
        "request.json": endpoint.read_request,
    }.items():
        (endpoint.path / name).write_text(content)
        with pytest.raises(EndpointError, match=rf"record of an endpoint .*Received: .*{name}"):
            read()
    assert main(["endpoints", "list"]) == 0
    assert "warning: The record of an endpoint" in capsys.readouterr().err
    with pytest.raises(EndpointError, match="The record of an endpoint"):  # nothing is removed
        endpoint_start.start("a", ModelSource(__file__))


def test_the_final_state_waits_for_room(
    endpoint: EndpointFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    owner, tries = EndpointSupervisor(endpoint), []
    write = EndpointFolder.write_state

    def full_at_first(self: EndpointFolder, state: Any) -> None:
        tries.append(state)
        if len(tries) < 3:
            _full()
        write(self, state)

    owner._on_signal()  # it is stopped before its server begins
    monkeypatch.setattr(detached_supervisor, "_PAUSE", 0.0)
    monkeypatch.setattr(EndpointFolder, "write_state", full_at_first)
    owner.run()
    assert len(tries) == 3
    assert endpoint.read_state().status == "Deleted"
    said = capsys.readouterr().err
    assert said.count("the state of the endpoint cannot be written now") == 1


class _Watched:
    """A server that runs for some looks of its supervisor."""

    def __init__(self, looks: int) -> None:
        self._looks = looks

    @property
    def is_running(self) -> bool:
        self._looks -= 1
        return self._looks >= 0


class _Silent:
    is_open = True

    @staticmethod
    def read(_: float) -> None:
        """Nothing has printed."""


def test_a_state_is_written_once_there_is_room(
    endpoint: EndpointFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    owner, write, tries = EndpointSupervisor(endpoint), EndpointFolder.write_state, []

    def full_at_first(self: EndpointFolder, state: Any) -> None:
        tries.append(state)
        if len(tries) < 4:
            _full()
        write(self, state)

    files.write_json(endpoint.ready_file, {"port": 1234, "pid": os.getpid()})
    monkeypatch.setattr(EndpointFolder, "write_state", full_at_first)
    owner._watch(_Watched(6), _Silent())  # type: ignore[arg-type]
    state = endpoint.read_state()
    assert (state.status, state.port, len(tries)) == ("InService", 1234, 4)
    assert capsys.readouterr().err.count("state of the endpoint cannot be written now") == 1


def test_a_restart_that_the_system_refuses_is_tried_again(
    endpoint: EndpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, starts = EndpointSupervisor(endpoint), []
    owner._become(status="InService", port=1234, server=os.getpid())

    def begin(*_: Any, **__: Any) -> Any:
        state = endpoint.read_state()
        starts.append(state.restarts)
        assert state.server is None or len(starts) == 1  # the next one's start is noted
        if len(starts) > 7:  # more than the ends that are too many
            owner._on_signal()
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(endpoint_supervisor, "_REFUSED_PAUSE", 0.0)
    monkeypatch.setattr(endpoint_supervisor.processes, "begin", begin)
    owner.run()
    assert starts == [0] * 8
    assert endpoint.read_state().status == "Deleted"


class _Pinged(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing is told."""


def test_a_restart_that_can_never_be_counts_as_an_end(
    endpoint: EndpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = dataclasses.replace(endpoint.read_request(), command=("/no/such/program",))
    endpoint.write_request(request)
    owner = EndpointSupervisor(endpoint)
    owner._become(status="InService", port=1234)
    monkeypatch.setattr(endpoint_supervisor, "_FIRST_DELAY", 0.0)
    owner.run()
    assert "6 ends; the last one could not be started" in str(endpoint.read_state().failure_reason)


@pytest.mark.parametrize("status", [200, 502])
def test_a_server_that_answers_is_not_late_for_its_disk(
    status: int, endpoint: EndpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was started again, and has no room for its ready file."""
    endpoint.write_request(dataclasses.replace(endpoint.read_request(), start_seconds=0.0))
    owner = EndpointSupervisor(endpoint)
    monkeypatch.setattr(_Pinged, "status", status)
    ended: list[Any] = []
    monkeypatch.setattr(owner, "_end_server", lambda server: ended.append(server) or 60.0)
    with http.server.HTTPServer(("127.0.0.1", 0), _Pinged) as server:
        owner._become(status="InService", port=server.server_port)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            owner._watch(_Watched(6), _Silent())  # type: ignore[arg-type]
        finally:
            server.shutdown()
            thread.join()
    assert (len(ended), owner._is_late) == ((0, False) if status == 200 else (1, True))


def test_a_command_that_does_not_exist(endpoint: EndpointFolder) -> None:
    request = dataclasses.replace(endpoint.read_request(), command=("/no/such/program",))
    endpoint.write_request(request)
    EndpointSupervisor(endpoint).run()
    assert "/no/such/program" in str(endpoint.read_state().failure_reason)


def test_a_name_in_use(endpoint: EndpointFolder, model: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"must be new. Received: a, whose status is Cr"):
        endpoint_start.start("a", ModelSource(model))


def test_predictors_without_an_endpoint(model: str) -> None:
    with pytest.raises(InvalidArgumentError, match="An endpoint's name must have"):
        Predictor("a_b")
    with pytest.raises(InvalidArgumentError, match=r"must exist. Received: x, which is not in"):
        TensorFlowPredictor("x").predict({})
    with pytest.raises(UnavailableError, match=r"call of update_endpoint\(\)"):
        Predictor("x").update_endpoint()
    with pytest.raises(InvalidArgumentTypeError, match=r"Did you mean `ContentType`"):
        Predictor("x").predict(b"", {"ContentTyp": "a"})
    with pytest.raises(InvalidArgumentError, match="cannot name another endpoint"):
        Predictor("x").predict(b"", {"EndpointName": "y"})
    with pytest.raises(InvalidArgumentTypeError, match="must return text, bytes or a file"):
        Predictor("x").predict({"a": 1})


def test_commands(endpoint: EndpointFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["endpoints", "list"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["a", "Creating"]
    assert main(["endpoints", "describe", "a"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert (described["EndpointName"], described["EndpointStatus"]) == ("a", "Creating")
    assert main(["endpoints", "describe", "b"]) == 2
    assert "`nanotf endpoints list` shows the endpoints there" in capsys.readouterr().err
    assert main(["endpoints", "list", "--output", str(endpoint.path)]) == 0
    assert capsys.readouterr().out.startswith("No endpoints in ")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"strategy": "Multi"}, "`strategy` must be one of 'MultiRecord', 'SingleRecord'"),
        ({"assemble_with": "Lines"}, "`assemble_with` must be one of"),
        ({"max_payload": 0}, "megabytes above 0"),
        ({"max_concurrent_transforms": -1}, "at least 1"),
        ({"acept": "x"}, "Did you mean `accept`"),
    ],
)
def test_arguments_of_a_transformer(given: dict[str, Any], text: str) -> None:
    with pytest.raises(NanoError, match=text):
        TensorFlowModel("model.tar.gz").transformer(**given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"split_type": "RecordIO"}, "`split_type` must be one of 'None', 'Line'"),
        ({"data_type": "ManifestFile"}, "no manifests"),
        ({"compression_type": "Gzip"}, "Decompress the files first"),
        ({"join_source": "Input"}, "Join input and output yourself"),
        ({"content_typ": "x"}, "Did you mean `content_type`"),
        ({}, "The data must have files"),
    ],
)
def test_transforms_that_are_refused(
    given: dict[str, Any], text: str, tmp_path: pathlib.Path
) -> None:
    transformer = TensorFlowModel("model.tar.gz").transformer()
    with pytest.raises(NanoError, match=text):
        transformer.transform(tmp_path, **given)


def test_an_estimator_divides_the_arguments_of_its_transformer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    estimator, of_model = TensorFlow(entry_point="train.py"), {}

    def create(_: TensorFlow, role: Any, **given: Any) -> TensorFlowModel:
        of_model.update(given, role=role)
        return TensorFlowModel("model.tar.gz", role, **given)

    monkeypatch.setattr(TensorFlow, "create_model", create)
    # In the order of the SDK.
    first = (2, "local", "SingleRecord", "Line", "out", "key", "text/csv", {"A": 1}, 3, 5, ["tag"])
    made = estimator.transformer(
        *first, "role", 4, "volume key", "inference.py", model_name="mine", source_dir="code"
    )
    assert of_model == {
        "entry_point": "inference.py",
        "num_processes": 4,
        "name": "mine",
        "role": "role",
        "source_dir": "code",
    }
    assert (made._accept, made._environment, made._threads) == ("text/csv", {"A": "1"}, 3)
    assert (made._limit, made._num_processes, made.output_path) == (5_000_000, "4", "out")
    assert made._source.code == SourceCode("inference.py", "code")
    with pytest.raises(InvalidArgumentTypeError, match="Did you mean `max_payload`"):
        estimator.transformer(max_paylod=1)


def test_an_estimator_without_a_job() -> None:
    with pytest.raises(InvalidArgumentError, match=r"after fit\(\) or attach\(\)"):
        TensorFlow(entry_point="train.py").deploy(1, "local")
