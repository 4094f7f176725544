"""Endpoints: real supervisors, and a server that stands for `nanotf serve`."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from processes import ROOT, SECONDS, run_python
from waiting import wait_until

from nanotf.errors import EndpointError, InvalidArgumentError
from nanotf.estimator import Predictor, TensorFlow, TensorFlowModel, TensorFlowPredictor, serving
from nanotf.estimator.deserializers import CSVDeserializer, NumpyDeserializer
from nanotf.estimator.serializers import CSVSerializer, JSONSerializer
from nanotf.sagemaker.detached import starting
from nanotf.sagemaker.endpoints import endpoint_command, endpoint_record, endpoint_start
from nanotf.sagemaker.endpoints.endpoint_record import EndpointFolder
from nanotf.sagemaker.endpoints.model_source import ModelSource

pytestmark = pytest.mark.own_pool

SERVER = pathlib.Path(__file__).with_name("model_server.py")


@pytest.fixture
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A folder whose endpoints run the server of the tests, and end with the test."""
    monkeypatch.setenv(endpoint_record.KIND.variable, str(tmp_path / "endpoints"))
    monkeypatch.setattr(
        endpoint_command,
        "server_command",
        lambda model, num_processes: [sys.executable, str(SERVER), str(model)],
    )
    yield tmp_path
    for endpoint in endpoint_record.find_all():
        owner = endpoint.read_state().owner
        if not endpoint.read_state().is_final:
            os.kill(owner.pid, signal.SIGKILL)
        wait_until(lambda owner=owner: not owner.is_alive(), f"{endpoint.name} ends")


def _model(folder: pathlib.Path, text: str = "") -> str:
    path = folder / "net.keras"
    path.write_text(text)
    return str(path)


def _deploy(folder: pathlib.Path, text: str = "", name: str = "a", **given: Any) -> Any:
    model = TensorFlowModel(_model(folder, text))
    return model.deploy(1, "local", endpoint_name=name, port=given.pop("port", 0), **given)


def _begin(folder: pathlib.Path, text: str, **given: Any) -> EndpointFolder:
    return endpoint_start.start("a", ModelSource(_model(folder, text)), ports=(0,), **given)


def test_deploy_predict_delete(folder: pathlib.Path) -> None:
    model = TensorFlowModel(_model(folder), env={"TEST_OF_ENDPOINTS": 7})
    predictor = model.deploy(1, "local", endpoint_name="a", port=0)
    found = predictor.predict({"instances": [[1.0, 2.0]]})
    assert json.loads(found["body"]) == {"instances": [[1.0, 2.0]]}
    assert found["headers"] == {
        "content-type": "application/json",
        "accept": "application/json",
        "x-amzn-sagemaker-custom-attributes": None,
    }
    assert found["environment"] == "7"
    described = endpoint_record.describe(endpoint_record.find("a"))
    assert (described["EndpointStatus"], described["ServerProcess"]) == ("InService", found["pid"])
    predictor.delete_endpoint()
    assert not psutil.pid_exists(found["pid"])
    assert endpoint_record.describe(endpoint_record.find("a"))["EndpointStatus"] == "Deleted"
    with pytest.raises(EndpointError, match="Received: a, whose status is Deleted"):
        predictor.predict({})
    with pytest.raises(InvalidArgumentError, match="Only an endpoint in progress can be stopped"):
        predictor.delete_predictor()


def test_requests_as_the_sdk_sends_them(folder: pathlib.Path) -> None:
    _deploy(folder)
    named = TensorFlowPredictor("a", model_name="m", model_version=3)
    attributes = "x-amzn-sagemaker-custom-attributes"
    assert named.predict([])["headers"][attributes] == "tfs-model-name=m,tfs-model-version=3"
    found = named.classify({"examples": [{"x": 1}]})
    assert found["headers"][attributes] == (
        "tfs-method=classify,tfs-model-name=m,tfs-model-version=3"
    )
    found = named.predict("x", {"ContentType": "text/plain", "CustomAttributes": "b"})
    assert found["headers"]["content-type"] == "text/plain"
    assert found["headers"][attributes].startswith("b,tfs-model-name=m")
    rows = Predictor("a", None, CSVSerializer(), CSVDeserializer())
    assert rows.predict([["a", 1], ["b", 2]]) == [["A", "1"], ["B", "2"]]
    named.serializer = CSVSerializer()
    with pytest.raises(InvalidArgumentError, match="The regress api requires json requests"):
        named.regress([1])


def test_an_error_names_the_status_and_the_text(folder: pathlib.Path) -> None:
    predictor = Predictor(_deploy(folder).endpoint_name)
    with pytest.raises(EndpointError, match=r"status 400 from .*x: expected \(None, 2\)") as caught:
        predictor.predict(b"refuse")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.status, again.text) == (400, '{"error": "x: expected (None, 2)"}')


def test_a_predictor_of_an_address_in_threads(folder: pathlib.Path) -> None:
    _deploy(folder)
    url = endpoint_record.describe(endpoint_record.find("a"))["Url"]
    predictor = pickle.loads(pickle.dumps(TensorFlowPredictor(url)))
    found: list[Any] = []

    def ask(number: int) -> None:
        for _ in range(20):
            found.append((number, json.loads(predictor.predict(number)["body"])))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80 and all(sent == got for sent, got in found)
    with pytest.raises(InvalidArgumentError, match="an endpoint of this machine, which has a name"):
        predictor.delete_endpoint()


DEPLOY = """
import sys
from nanotf.sagemaker.detached import starting
from nanotf.sagemaker.endpoints import endpoint_command
endpoint_command.server_command = lambda model, n: [sys.executable, sys.argv[1], str(model)]
from nanotf.estimator import TensorFlowModel
TensorFlowModel("net.keras").deploy(endpoint_name="a", port=0)
"""


def test_an_endpoint_outlives_its_program_and_is_steered_by_commands(folder: pathlib.Path) -> None:
    _model(folder)
    (folder / "deploy.py").write_text(DEPLOY)
    run_python(folder, "deploy.py", SERVER)

    def nanotf(*words: str) -> str:
        return run_python(folder, "-m", "nanotf", "endpoints", *words)

    (listed,) = json.loads(nanotf("list", "--json"))
    assert (listed["name"], listed["status"]) == ("a", "InService")
    owner = psutil.Process(json.loads(nanotf("describe", "a"))["SupervisorProcess"])
    assert os.getsid(owner.pid) != os.getsid(0)
    assert owner.terminal() is None
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-m", "nanotf", "endpoints", "logs", "-f", "a"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as following:
        assert following.stdout is not None
        assert following.stdout.readline() == "serving net.keras\n"
        TensorFlowPredictor("a").predict({})
        assert following.stdout.readline() == "request /invocations 2\n"
        assert nanotf("stop", "a") == "nanotf: endpoint a: Deleted\n"
        following.communicate(timeout=SECONDS)
        assert following.returncode == 0
    assert nanotf("list").split()[:2] == ["a", "Deleted"]
    assert nanotf("logs", "a").startswith("serving net.keras\nrequest")


def test_a_killed_server_is_started_again_on_its_port(folder: pathlib.Path) -> None:
    predictor = _deploy(folder)
    before = predictor.predict({})["pid"]
    port = endpoint_record.find("a").read_state().port
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: endpoint_record.find("a").read_state().restarts, "the end is noticed")
    after = predictor.predict({})["pid"]  # waits for the server
    wait_until(lambda: endpoint_record.find("a").read_state().server == after, "it is recorded")
    state = endpoint_record.find("a").read_state()
    assert after != before
    left = psutil.Process(state.owner.pid).children()
    assert psutil.STATUS_ZOMBIE not in [child.status() for child in left]
    assert (state.port, state.server, state.restarts, state.status) == (port, after, 1, "InService")


def test_a_server_that_cannot_be_started_again(folder: pathlib.Path) -> None:
    predictor = _deploy(folder, "once")
    os.kill(predictor.predict({})["pid"], signal.SIGKILL)
    wait_until(lambda: endpoint_record.find("a").read_state().is_final, "the endpoint fails")
    with pytest.raises(EndpointError, match=r"(?s)status is Failed: .*6 ends.*the model is gone"):
        predictor.predict({})


def test_a_failed_start_shows_the_log(folder: pathlib.Path) -> None:
    with pytest.raises(EndpointError, match=r"(?s)exited with code 1.*loading.*no SavedModel bund"):
        _deploy(folder, "fail")
    _deploy(folder)  # the name of an endpoint that has ended is free
    assert endpoint_record.find("a").read_state().status == "InService"


def test_a_server_that_never_answers(folder: pathlib.Path) -> None:
    with pytest.raises(EndpointError, match=r"no answer to /ping within 0.5 s"):
        _deploy(folder, "silent", container_startup_health_check_timeout=0.5)


def test_a_stop_during_the_start(folder: pathlib.Path) -> None:
    endpoint = _begin(folder, "silent")
    with pytest.raises(
        EndpointError, match=r"must be in service to answer. Received: a, whose sta"
    ):
        Predictor("a").predict(b"")
    endpoint_start.stop_and_wait(endpoint)
    with pytest.raises(EndpointError, match="which was stopped"):
        endpoint_start.wait_for_service(endpoint)


def test_a_server_that_ignores_sigterm(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = EndpointFolder.write_request

    def with_little_time(self: EndpointFolder, request: Any) -> None:
        object.__setattr__(request, "stop_seconds", 0.5)
        write(self, request)

    monkeypatch.setattr(EndpointFolder, "write_request", with_little_time)
    predictor = _deploy(folder, "stubborn")
    server = predictor.predict({})["pid"]
    predictor.delete_endpoint()
    assert not psutil.pid_exists(server)


def test_a_killed_supervisor(folder: pathlib.Path) -> None:
    """The endpoint has failed, and its server has ended, too."""
    predictor = _deploy(folder)
    server = predictor.predict({})["pid"]
    os.kill(endpoint_record.find("a").read_state().owner.pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(server), "the server ends")
    with pytest.raises(EndpointError, match=r"supervisor of the endpoint .* ended without record"):
        TensorFlowPredictor("a").predict({})


def test_two_deploys_at_the_same_time(folder: pathlib.Path) -> None:
    """One gets a port that both want; of two with one name, one is refused."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        wanted = free.getsockname()[1]
    started, refused = [], []

    def deploy(name: str) -> None:
        try:
            endpoint = endpoint_start.start(
                name, ModelSource(str(folder / "net.keras")), ports=(wanted, 0)
            )
            endpoint_start.wait_for_service(endpoint)
            started.append(endpoint)
        except InvalidArgumentError as error:
            refused.append(str(error))

    _model(folder)
    threads = [threading.Thread(target=deploy, args=(name,)) for name in ("a", "a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(endpoint.name for endpoint in started) == ["a", "b"]
    assert len(refused) == 1 and "The name of an endpoint must be new. Received: a" in refused[0]
    ports = [endpoint.read_state().port for endpoint in started]
    assert wanted in ports and len(set(ports)) == 2


def test_a_full_disk_leaves_nothing(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patches:
        patches.setattr(shutil, "copy2", full)
        with pytest.raises(EndpointError, match=r"room on the disk.*No space left on device"):
            _deploy(folder)
    assert list((folder / "endpoints").iterdir()) == []


def test_an_entry_point_is_packed_with_the_model(folder: pathlib.Path) -> None:
    saved, code, library = folder / "saved", folder / "code", folder / "library"
    for path in (saved, code, library):
        path.mkdir()
    (saved / "saved_model.pb").touch()
    (code / "serve.py").write_text("handler = 1")
    (code / "beside.py").touch()
    (library / "helper.py").touch()
    model = TensorFlowModel(saved, entry_point="serve.py", source_dir=code, dependencies=[library])
    model.deploy(endpoint_name="a", port=0)
    archive = endpoint_record.find("a").path / "model.tar.gz"
    with tarfile.open(archive) as tar:
        names = {member.name for member in tar if member.isfile()}
        script = tar.extractfile("code/inference.py")
        assert script is not None and script.read() == b"handler = 1"
    assert names == {
        "1/saved_model.pb",
        "code/inference.py",
        "code/beside.py",
        "code/lib/library/helper.py",
    }
    # The archive of one model is the data of another, whose code replaces the first one's.
    other = folder / "other.py"
    other.write_text("handler = 2")
    serving.Model(archive, entry_point=other).deploy(endpoint_name="b", port=0)
    with tarfile.open(endpoint_record.find("b").path / "model.tar.gz") as tar:
        script = tar.extractfile("code/inference.py")
        assert script is not None and script.read() == b"handler = 2"
        assert tar.getmember("code/lib/library/helper.py").isfile()


TRAIN = """
import os, pathlib
pathlib.Path(os.environ["SM_MODEL_DIR"], "net.keras").write_text("")
"""


def test_an_estimator_deploys_what_its_job_has_made(folder: pathlib.Path) -> None:
    (folder / "train.py").write_text(TRAIN)
    estimator = TensorFlow(
        entry_point=str(folder / "train.py"), output_path=str(folder / "jobs"), model_dir=False
    )
    with pytest.raises(InvalidArgumentError, match=r"after fit\(\) or attach\(\)"):
        estimator.deploy()
    estimator.fit(logs=False)
    predictor = estimator.deploy(
        1,
        "local",
        serializer=JSONSerializer("application/x-test"),
        deserializer=NumpyDeserializer(),
        port=0,
        env={"A": "b"},
        role="r",
        tags=[],
    )
    assert predictor.endpoint_name.startswith("train-20")
    endpoint = endpoint_record.find(predictor.endpoint_name)
    assert endpoint.read_request().environment == {"A": "b"}
    with tarfile.open(endpoint.read_request().model) as tar:
        assert tar.getnames() == ["net.keras"]
    assert "application/x-test" in str(predictor.predict({}))


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("given", "options", "wanted"),
    [
        ({}, {}, "A,1\nB,2\n"),
        (
            {"strategy": "SingleRecord", "assemble_with": "Line"},
            {"split_type": "Line"},
            "A,1\nB,2\n",
        ),
        ({"assemble_with": "Line"}, {"split_type": "Line"}, "A,1\nB,2\n"),
        ({"strategy": "SingleRecord"}, {"split_type": "Line"}, "A,1B,2"),
    ],
)
def test_a_transform_writes_one_file_for_each(
    given: dict[str, Any], options: dict[str, Any], wanted: str, folder: pathlib.Path
) -> None:
    data = folder / "data"
    (data / "sub").mkdir(parents=True)
    (data / "a.csv").write_text("a,1\nb,2\n")
    (data / "sub" / "b.csv").write_text("c,3\n")
    transformer = TensorFlowModel(_model(folder)).transformer(
        1, "local", output_path=folder / "results", **given
    )
    transformer.transform(data, content_type="text/csv", **options)
    assert (folder / "results/a.csv.out").read_text() == wanted
    assert (folder / "results/sub/b.csv.out").read_text().startswith("C,3")
    assert list(endpoint_record.find_all()) == []  # its endpoint is gone


@pytest.mark.parametrize("moment", ["start_supervisor", "wait_for_service"])
def test_ctrl_c_while_a_transform_starts_its_server(
    moment: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No server runs on: nobody knows it."""
    place = {"start_supervisor": starting, "wait_for_service": endpoint_start}[moment]
    stock = getattr(place, moment)

    def interrupted(*given: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        stock(*given)

    monkeypatch.setattr(place, moment, interrupted)
    (folder / "data").mkdir()
    (folder / "data" / "a.csv").write_text("a,1\n")
    transformer = TensorFlowModel(_model(folder)).transformer(1, "local")
    with pytest.raises(KeyboardInterrupt):
        transformer.transform(folder / "data", content_type="text/csv")
    (endpoint,) = endpoint_record.find_all()
    assert endpoint.read_state().is_final
