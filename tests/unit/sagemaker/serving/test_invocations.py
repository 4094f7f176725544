"""The paths of SageMaker's hosting interface, and the headers that choose a model."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest
from hosting_fakes import JSON, HostServer, double, error, value

from nanotf.serving.interface import RoutedRequest

ROWS = '{"instances": [[1, 2]]}'
DOUBLED = {"predictions": [[2.0, 4.0]]}


def _two() -> HostServer:
    return HostServer(double(), dataclasses.replace(double(), name="other model", version=7))


def test_ping_is_empty_and_says_if_all_models_are_served() -> None:
    server = HostServer(double())
    for ready, status in ((True, 200), (False, 502)):
        server.ready = ready
        answer = server.ask("GET", "/ping")
        assert answer is not None
        assert (answer.status, answer.body, answer.content_type) == (status, b"", "")


@pytest.mark.parametrize("path", ["/", "/v1/models/half:predict", "/v2", "/pings", "", "x"])
def test_other_paths_belong_to_others(path: str) -> None:
    assert HostServer(double()).ask("GET", path) is None


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/invocations"),
        ("POST", "/ping"),
        ("POST", "/invocations/x"),
        ("GET", "/models/half/invoke"),
        ("GET", "/models/a/b/c"),
        ("POST", "/models//invoke"),
        ("GET", "/models/"),
        ("PUT", "/models/half"),
    ],
)
def test_paths_of_the_interface_that_do_not_exist(method: str, path: str) -> None:
    assert error(HostServer(double()).ask(method, path)) == (404, "Not Found")


def test_invocation_of_the_default_model() -> None:
    assert value(HostServer(double()).invoke(ROWS)) == DOUBLED
    answer = HostServer(double()).ask("POST", "/invocations?x=1", ROWS, content_type=JSON)
    assert value(answer) == DOUBLED


def test_without_a_default_model_a_name_is_needed() -> None:
    status, text = error(_two().invoke(ROWS))
    assert status == 400 and "does not contain model name" in text and "half, other model" in text


@pytest.mark.parametrize(
    ("headers", "model"),
    [
        ({"x_amzn_sagemaker_custom_attributes": "tfs-model-name=other model"}, "other model"),
        ({"x_amzn_sagemaker_custom_attributes": "a,b=c, tfs-model-name=half ,d"}, "half"),
        ({"x_amzn_sagemaker_target_model": "other model"}, "other model"),
        ({"x_amzn_sagemaker_target_model": "half.tar.gz"}, "half"),
        ({"x_amzn_sagemaker_target_model": "half.tgz"}, "half"),
        ({"x_amzn_sagemaker_target_model": "half.keras"}, "half"),
        ({"x_amzn_sagemaker_target_model": "half.h5"}, "half"),
        (
            {
                "x_amzn_sagemaker_target_model": "half",
                "x_amzn_sagemaker_custom_attributes": "tfs-model-name=other model",
            },
            "half",
        ),
    ],
)
def test_headers_choose_the_model(headers: dict[str, str], model: str) -> None:
    server = _two()
    assert value(server.invoke(ROWS, **headers)) == DOUBLED
    assert {name for name, each in server.served.items() if each.runs} == {model}


def test_path_chooses_the_model() -> None:
    server = _two()
    answer = server.ask("POST", "/models/other%20model/invoke", ROWS, content_type=JSON)
    assert value(answer) == DOUBLED
    assert server.served["other model"].runs == 1


def test_version_and_method() -> None:
    server = HostServer(double())
    given = {"x-amzn-sagemaker-custom-attributes": "tfs-model-version=003,tfs-method=regress"}
    call = server.interface.route("POST", "/invocations", given, b"{}", server)
    assert isinstance(call, RoutedRequest)
    assert (call.model, call.version, call.request.verb) == ("half", 3, "regress")


@pytest.mark.parametrize(
    ("attributes", "status", "text"),
    [
        ("tfs-model-name=none", 404, "Model none is not loaded yet. The server has half."),
        ("tfs-model-version=4", 404, r"Servable not found for request: Specific(half, 4)"),
        ("tfs-model-version=x", 400, "tfs-model-version must be a number. Received: 'x'."),
        (f"tfs-model-version={'9' * 5000}", 400, "tfs-model-version must be a number."),
        ("tfs-method=explain", 400, "tfs-method must be one of predict, classify, regress."),
    ],
)
def test_attributes_that_choose_nothing(attributes: str, status: int, text: str) -> None:
    answer = HostServer(double()).invoke(ROWS, x_amzn_sagemaker_custom_attributes=attributes)
    assert error(answer)[0] == status
    assert text in error(answer)[1]


def test_a_model_that_is_not_served_yet() -> None:
    server = HostServer(double())
    server.state = "LOADING"
    assert error(server.invoke(ROWS)) == (404, "Servable not found for request: Latest(half)")


def test_list_of_models() -> None:
    found = value(_two().ask("GET", "/models"))
    assert list(found) == ["half", "other model"]
    (status,) = found["other model"]["model_version_status"]
    assert (status["version"], status["state"]) == ("7", "AVAILABLE")
    assert value(_two().ask("GET", "/models/other%20model")) == found["other model"]
    assert error(_two().ask("GET", "/models/none"))[0] == 404


def test_models_come_and_go(tmp_path: pathlib.Path) -> None:
    server = HostServer(multi_model=True)
    load = json.dumps({"model_name": "new", "url": str(tmp_path)})
    assert "success" in value(server.ask("POST", "/models", load))
    assert error(server.ask("POST", "/models", load)) == (409, "Model new is already loaded.")
    answer = server.ask("POST", "/models/new/invoke", ROWS, content_type=JSON)
    assert value(answer) == DOUBLED
    assert "success" in value(server.ask("DELETE", "/models/new"))
    status, text = error(server.ask("POST", "/models/new/invoke", ROWS))
    assert status == 404 and text.startswith("Model new is not loaded yet.")


def test_models_that_cannot_be_loaded_or_unloaded(tmp_path: pathlib.Path) -> None:
    server = HostServer(multi_model=True)
    place = json.dumps({"model_name": "new", "url": str(tmp_path / "none")})
    status, text = error(server.ask("POST", "/models", place))
    assert status == 404 and "Could not find valid base path" in text
    assert error(server.ask("DELETE", "/models/none"))[0] == 404
    for body in ("[]", "{}", "x", '{"model_name": 1, "url": "a"}', '{"model_name": "", "url": ""}'):
        assert error(server.ask("POST", "/models", body))[0] == 400
    other = HostServer(double())
    for method, path in (("POST", "/models"), ("DELETE", "/models/half")):
        status, text = error(other.ask(method, path, place))
        assert status == 404 and "SAGEMAKER_MULTI_MODEL=true" in text


def test_front_needs_no_numpy() -> None:
    code = (
        "import sys; from nanotf.sagemaker.serving.invocations import Invocations; Invocations();"
        "assert not {'numpy', 'tensorflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)
