"""`nanotf serve` as the server of a SageMaker container, and with a user's `inference.py`."""

import json
import logging
import tarfile
import textwrap

import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip("httptools")

from nanotf.cli import serve
from nanotf.sagemaker.serving import container_settings
from tests.e2e.served import serving

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


def doubling():
    """A model that doubles its rows."""
    model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Rescaling(2.0)])
    model(ROWS)
    return model


def model_folder(base, code=None):
    """Writes what a model.tar.gz unpacks to; returns the folder."""
    folder = base / "model"
    version = folder / "export" / "Servo" / "7"
    version.parent.mkdir(parents=True)
    model = doubling()
    if hasattr(model, "export"):
        model.export(str(version))
    else:
        tf.saved_model.save(model, str(version))
    if code is not None:
        (folder / "code").mkdir()
        (folder / "code" / "inference.py").write_text(textwrap.dedent(code))
    return folder


def packed(folder):
    """Packs a folder as model.tar.gz."""
    archive = folder.with_name("model.tar.gz")
    with tarfile.open(archive, "w:gz") as tar:
        for entry in sorted(folder.iterdir()):
            tar.add(entry, entry.name)
    return archive


def invoke(server, body, **headers):
    reply = server.ask("/invocations", body, **headers)
    assert reply.status == 200, reply.body
    return reply


@pytest.mark.own_pool
def test_a_container_serves_what_lies_in_its_folder(tmp_path):
    model_folder(tmp_path)
    variables = {
        "SAGEMAKER_BASE_DIR": str(tmp_path),
        "SAGEMAKER_MODEL_SERVER_WORKERS": "1",
        "SAGEMAKER_TFS_DEFAULT_MODEL_NAME": "Servo",
    }
    with serving(tmp_path / "server", **variables) as server:
        assert server.ask("/ping").status == 200
        assert len(server.workers()) == 1
        found = invoke(server, ROWS.tolist()).json["predictions"]
        np.testing.assert_allclose(found, ROWS * 2)
        csv = invoke(server, b"1,2,3\n4,5,6\n", content_type="text/csv", accept="text/csv")
        assert csv.body.decode().split() == ["2.0,4.0,6.0", "8.0,10.0,12.0"]
        assert server.ask("/invocations", b"x", content_type="image/png").status == 415
        states = server.ask("/v1/models/Servo").json["model_version_status"]
        assert [state["version"] for state in states] == ["7"]


def test_a_handler_asks_the_rest_interface_of_its_only_worker(tmp_path):
    code = """
    import json, urllib.request

    def handler(data, context):
        rows = [float(text) for text in data.read().decode().split()]
        body = json.dumps({"instances": [rows]}).encode()
        with urllib.request.urlopen(context.rest_uri, body) as reply:
            found = json.load(reply)["predictions"][0]
        print("handled for", context.request_content_type)
        return " ".join(map(str, found)), "text/plain"
    """
    archive = packed(model_folder(tmp_path, code))
    with serving(tmp_path / "server", str(archive), "-n", "1") as server:
        reply = invoke(server, b"1 2 3", content_type="text/plain")
        assert (reply.body, reply.headers["content-type"]) == (b"2.0 4.0 6.0", "text/plain")
        server.wait_until(lambda: "handled for text/plain" in server.log(), "nothing is printed")


def test_functions_around_a_prediction(tmp_path):
    code = """
    import json

    def input_handler(data, context):
        return json.dumps({"instances": [[float(x) for x in data.read().split()]]})

    def output_handler(response, context):
        return "first " + str(response.json()["predictions"][0][0]), "text/plain"
    """
    folder = model_folder(tmp_path, code)
    with serving(tmp_path / "server", str(folder), "--unpacked", "-n", "1") as server:
        assert invoke(server, b"4 5 6", content_type="text/plain").body == b"first 8.0"


def test_a_model_of_the_users_own(tmp_path):
    code = """
    import json, pathlib

    def model_fn(model_dir):
        return json.loads((pathlib.Path(model_dir) / "table.json").read_text())

    def input_fn(data, content_type):
        return json.loads(data)["word"]

    def predict_fn(word, table):
        return table[word]

    def output_fn(number, accept):
        return json.dumps({"number": number})
    """
    folder = tmp_path / "model"
    (folder / "code").mkdir(parents=True)
    (folder / "code" / "inference.py").write_text(textwrap.dedent(code))
    (folder / "table.json").write_text(json.dumps({"one": 1, "two": 2}))
    with serving(tmp_path / "server", str(packed(folder)), "-n", "1") as server:
        assert invoke(server, {"word": "two"}).json == {"number": 2}
        failed = server.ask("/invocations", {"word": "three"})
        assert failed.status == 500
        assert "three" in failed.json["error"]
        server.wait_until(lambda: "KeyError" in server.log(), "no traceback is in the log")
        assert invoke(server, {"word": "one"}).json == {"number": 1}


def test_models_come_and_go(tmp_path):
    (tmp_path / "models").mkdir()
    one = model_folder(tmp_path / "one")
    variables = {"SAGEMAKER_BASE_DIR": str(tmp_path), "SAGEMAKER_MULTI_MODEL": "true"}
    with serving(tmp_path / "server", str(one), "-n", "1", **variables) as server:
        assert f"MODEL='{one}', which is not served" in server.log()
        assert server.ask("/ping").status == 200
        assert server.ask("/models/a/invoke", ROWS.tolist()).status == 404
        asked = {"model_name": "a", "url": str(one)}
        assert server.ask("/models", asked).status == 200
        assert server.ask("/models", asked).status == 409
        reply = server.ask("/models/a/invoke", ROWS.tolist())
        np.testing.assert_allclose(reply.json["predictions"], ROWS * 2)
        assert server.ask("/models", {"model_name": "b", "url": str(tmp_path / "no")}).status == 404
        cut = model_folder(tmp_path / "cut")
        (cut / "export" / "Servo" / "7" / "variables" / "variables.index").unlink()
        for _ in range(2):  # one that is refused leaves nothing behind
            refused = server.ask("/models", {"model_name": "b", "url": str(cut)})
            assert (refused.status, server.ask("/ping").status) == (404, 200)
            assert "variables.index" in refused.json["error"]
        assert server.ask("/models/a", method="DELETE").status == 200
        server.wait_until(
            lambda: server.ask("/models/a/invoke", ROWS.tolist()).status == 404, "a is still there"
        )


def test_a_model_beside_those_of_requests(tmp_path, caplog):
    """One command line may name the folder of a single model in all containers."""
    variables = {"SAGEMAKER_BASE_DIR": str(tmp_path), "SAGEMAKER_MULTI_MODEL": "true"}
    settings = container_settings.from_environment(variables)
    with caplog.at_level(logging.WARNING, "nanotf"):
        for model in (None, str(tmp_path / "model"), str(tmp_path / "models")):
            serve._tell_of_unserved(model, settings)
        assert not caplog.text
        serve._tell_of_unserved(str(tmp_path / "one" / "model"), settings)
    assert "which is not served" in caplog.text
