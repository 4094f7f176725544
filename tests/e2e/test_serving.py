"""`nanotf serve`: its answers are those of `model.predict`, whatever happens around them."""

import concurrent.futures
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile

import numpy as np
import pytest
import tensorflow as tf
from waiting import freeze

pytest.importorskip("httptools")

from tests.e2e import served
from tests.e2e.served import serving

ROWS = np.random.default_rng(5).normal(size=(41, 8, 8, 1)).astype(np.float32)


def small_cnn(seed=1, outputs=10):
    tf.keras.utils.set_random_seed(seed)
    return tf.keras.Sequential(
        [
            tf.keras.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(4, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(outputs),
        ]
    )


def save_version(model, base, number):
    """Saves a version beside the base folder, and moves it there in one step."""
    part = pathlib.Path(f"{base}.part")
    shutil.rmtree(part, ignore_errors=True)
    model.export(str(part)) if hasattr(model, "export") else tf.saved_model.save(model, str(part))
    base.mkdir(exist_ok=True)
    part.rename(base / str(number))


@pytest.fixture(scope="module")
def model():
    return small_cnn()


@pytest.fixture(scope="module")
def expected(model):
    return model.predict(ROWS, verbose=0)


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("serving")
    model.save(folder / "digits.keras")
    with serving(folder / "server", str(folder / "digits.keras"), "-n", "2") as found:
        yield found


# --------------------------------------------------------------------------------------- answers
@pytest.mark.parametrize("rows", [1, 7, 32, 41])
def test_answers_are_those_of_predict(server, expected, rows):
    found = server.predict(ROWS[:rows].tolist(), "digits")
    np.testing.assert_allclose(found, expected[:rows], atol=1e-5)


def test_clients_do_not_change_each_others_answers(server, expected):
    bad = ROWS[:1].copy()
    bad[:] = np.nan

    def ask(number):
        rng = random.Random(number)
        begin = rng.randrange(len(ROWS))
        end = min(len(ROWS), begin + rng.randrange(1, 6))
        if number % 7 == 0:
            assert server.ask("/v1/models/digits:predict", b"nonsense").status == 400
        elif number % 5 == 0:
            body = json.dumps({"instances": bad.tolist()}).encode()
            assert server.ask("/v1/models/digits:predict", body).status == 200
        else:
            found = server.predict(ROWS[begin:end].tolist(), "digits")
            np.testing.assert_allclose(found, expected[begin:end], atol=1e-5)

    with concurrent.futures.ThreadPoolExecutor(24) as threads:
        list(threads.map(ask, range(300)))
    assert server.metric('nanotf_batch_rows_count{model_name="digits"}') > 0


def test_all_interfaces_answer(server, expected):
    rows = ROWS[:3]
    found = server.ask("/invocations", {"instances": rows.tolist()})
    np.testing.assert_allclose(found.json["predictions"], expected[:3], atol=1e-5)
    (name,) = server.ask("/v2/models/digits").json["inputs"]
    tensor = {"name": name["name"], "shape": list(rows.shape), "datatype": "FP32"}
    tensor["data"] = rows.ravel().tolist()
    found = server.ask("/v2/models/digits/infer", {"inputs": [tensor]})
    data = np.reshape(found.json["outputs"][0]["data"], (3, -1))
    np.testing.assert_allclose(data, expected[:3], atol=1e-5)


def test_a_large_body(server, expected):
    rows = np.concatenate([ROWS] * 50)
    found = server.predict(rows.tolist(), "digits")
    np.testing.assert_allclose(found, np.concatenate([expected] * 50), atol=1e-5)


def test_wrong_requests_say_what_is_wrong(server):
    reply = server.ask("/v1/models/digits:predict", {"instances": [[1, 2]]})
    assert reply.status == 400
    assert "8" in reply.json["error"]
    assert server.ask("/v1/models/other:predict", {"instances": [1]}).status == 404
    assert server.ask("/nowhere").status == 404
    assert server.ask("/ping").status == 200
    assert server.ask("/v1/models/digits").json["model_version_status"][0]["state"] == "AVAILABLE"


def test_the_front_imports_neither_tensorflow_nor_numpy(server, expected):
    np.testing.assert_allclose(server.predict(ROWS[:2].tolist(), "digits"), expected[:2], atol=1e-5)
    maps = pathlib.Path(f"/proc/{server.process.pid}/maps").read_text()
    for library in ("libtensorflow", "_pywrap_tensorflow", "_multiarray_umath"):
        assert library not in maps


def test_curl_speaks_with_it(server, expected, tmp_path):
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    body = tmp_path / "body.json"
    body.write_text(json.dumps({"instances": ROWS[:2].tolist()}))
    address = f"http://127.0.0.1:{server.port}/v1/models/digits:predict"
    done = subprocess.run(
        [curl, "-s", "-d", f"@{body}", "-X", "POST", address],
        capture_output=True,
        check=True,
        timeout=served.SECONDS,
    )
    np.testing.assert_allclose(json.loads(done.stdout)["predictions"], expected[:2], atol=1e-5)


# ---------------------------------------------------------------------------------------- faults
def ask_until(server, expected, is_over, failures):
    """Asks again and again, and notes each answer that is not right."""
    number = 0
    while not is_over():
        number += 1
        begin = number % (len(ROWS) - 3)
        try:
            found = server.predict(ROWS[begin : begin + 3].tolist(), "digits")
            np.testing.assert_allclose(found, expected[begin : begin + 3], atol=1e-5)
        except Exception as error:
            failures.append(repr(error))
    return number


def test_killed_workers_cost_nobody_an_answer(server, expected):
    over, failures = [], []
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        asking = [
            threads.submit(ask_until, server, expected, lambda: over, failures) for _ in range(6)
        ]
        try:
            for _ in range(4):
                before = server.metric("nanotf_worker_restarts_total")
                os.kill(random.choice(server.workers()), signal.SIGKILL)
                server.wait_until(
                    lambda before=before: (
                        server.metric("nanotf_worker_restarts_total") > before
                        and server.metric("nanotf_workers") == 2
                    ),
                    "no other worker has come",
                )
        finally:
            over.append(True)
    assert not failures
    assert all(future.result() > 0 for future in asking)


def test_a_worker_that_hangs_is_replaced(model, expected, tmp_path):
    model.save(tmp_path / "digits.keras")
    words = [str(tmp_path / "digits.keras"), "-n", "1", "--timeout", "5"]
    with serving(tmp_path / "server", *words) as found:
        (worker,) = found.workers()
        freeze(worker)
        reply = found.ask("/v1/models/digits:predict", {"instances": ROWS[:1].tolist()})
        assert reply.status == 504
        found.wait_until(
            lambda: (
                found.metric("nanotf_worker_restarts_total") >= 1
                and found.metric("nanotf_workers") == 1
            ),
            "no other worker has come",
        )
        np.testing.assert_allclose(
            found.predict(ROWS[:2].tolist(), "digits"), expected[:2], atol=1e-5
        )


def test_too_many_requests_are_refused(model, tmp_path):
    model.save(tmp_path / "digits.keras")
    words = [str(tmp_path / "digits.keras"), "-n", "1", "--queue", "2", "--max-batch", "1"]
    with serving(tmp_path / "server", *words) as found:
        (worker,) = found.workers()
        freeze(worker)
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            body = {"instances": ROWS[:1].tolist()}

            def ask():
                return threads.submit(found.ask, "/v1/models/digits:predict", body)

            # In this order: of several in one turn of the server's loop, the worker takes none yet.
            asking = [ask(), ask()]
            found.wait_until(lambda: found.metric("nanotf_queue_requests") == 1, "one waits")
            asking += [ask() for _ in range(6)]
            found.wait_until(
                lambda: sum(future.done() for future in asking) == 5, "nothing is refused"
            )
            os.kill(worker, signal.SIGCONT)
            replies = [future.result() for future in asking]
    assert sorted(reply.status for reply in replies) == [200] * 3 + [429] * 5
    assert all(int(r.headers["retry-after"]) >= 1 for r in replies if r.status == 429)


# -------------------------------------------------------------------------------------- versions
def test_a_new_version_is_served_without_a_failed_request(tmp_path):
    base = tmp_path / "digits"
    one, two = small_cnn(1), small_cnn(2)
    save_version(one, base, 1)
    with serving(tmp_path / "server", str(base), "-n", "2", "--poll", "0.2") as found:
        over, failures, seen = [], [], set()
        both = [m.predict(ROWS[:3], verbose=0) for m in (one, two)]

        def ask():
            while not over:
                try:
                    answer = found.predict(ROWS[:3].tolist(), "digits")
                    (which,) = [n for n, e in enumerate(both) if np.allclose(answer, e, atol=1e-5)]
                    seen.add(which)
                except Exception as error:
                    failures.append(repr(error))

        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            asking = [threads.submit(ask) for _ in range(4)]
            try:
                save_version(two, base, 2)
                found.wait_until(lambda: found.metric("nanotf_workers") == 2, "no workers")
                path = "/v1/models/digits/versions/1"
                found.wait_until(
                    lambda: found.ask(path).json["model_version_status"][0]["state"] == "END",
                    "version 1 is still served",
                )
            finally:
                over.append(True)
            [future.result() for future in asking]
        assert not failures
        assert seen == {0, 1}
        answer = found.predict(ROWS[:3].tolist(), "digits")
        np.testing.assert_allclose(answer, both[1], atol=1e-5)
        assert found.ask("/v1/models/digits/versions/1:predict", {"instances": [1]}).status == 404


@pytest.mark.thorough
def test_old_versions_leave_no_files(model, expected, tmp_path):
    temporary, file = tmp_path / "temporary", tmp_path / "digits.keras"
    temporary.mkdir()
    model.save(file)
    words = [str(file), "-n", "1"]
    with serving(tmp_path / "server", *words, TMPDIR=str(temporary)) as found:
        (own,) = temporary.glob("nanotf-serve-*")
        (first,) = own.glob("version-*")
        (worker,) = own.glob("worker-*")
        other = small_cnn(seed=3)
        other.save(tmp_path / "part.keras")
        (tmp_path / "part.keras").replace(file)
        wanted = other.predict(ROWS[:2], verbose=0)

        def is_new():
            return np.allclose(found.predict(ROWS[:2].tolist(), "digits"), wanted, atol=1e-5)

        found.wait_until(is_new, "the new file is served")
        found.wait_until(lambda: not first.exists() and not worker.exists(), "old files go")
        assert len(list(own.glob("version-*"))) == len(list(own.glob("worker-*"))) == 1
        assert [path.name for path in temporary.iterdir()] == [own.name]
    assert list(temporary.iterdir()) == []


def test_a_version_that_cannot_be_loaded_leaves_the_old_one(tmp_path):
    base = tmp_path / "digits"
    save_version(small_cnn(1), base, 1)
    with serving(tmp_path / "server", str(base), "-n", "1", "--poll", "0.2") as found:
        before = found.predict(ROWS[:2].tolist(), "digits")
        broken = tmp_path / "2"
        shutil.copytree(base / "1", broken)
        (broken / "saved_model.pb").write_bytes(b"nonsense")
        broken.rename(base / "2")
        time.sleep(1.0)
        assert found.predict(ROWS[:2].tolist(), "digits") == before
        save_version(small_cnn(3), base, 3)
        found.wait_until(
            lambda: found.predict(ROWS[:2].tolist(), "digits") != before, "version 3 does not come"
        )


def test_a_version_that_fails_in_a_worker_leaves_the_old_one_and_other_models(tmp_path):
    for name, seed in (("a", 1), ("b", 2)):
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        small_cnn(seed).save(tmp_path / "models" / name / "1" / "model.keras")
    words = ["--models-dir", str(tmp_path / "models"), "-n", "1", "--poll", "0.2"]
    with serving(tmp_path / "server", *words) as found:
        rows = ROWS[:2].tolist()
        before = [found.predict(rows, name) for name in "ab"]
        (tmp_path / "part").mkdir()
        with zipfile.ZipFile(tmp_path / "part" / "model.keras", "w") as file:
            file.writestr("metadata.json", "{}")
            file.writestr("config.json", json.dumps({"class_name": "Nobody", "config": {}}))
            file.writestr("model.weights.h5", b"")
        (tmp_path / "part").rename(tmp_path / "models" / "a" / "2")

        def state_of_two():
            states = found.ask("/v1/models/a").json["model_version_status"]
            return {state["version"]: state["state"] for state in states}.get("2")

        found.wait_until(lambda: state_of_two() == "END", "version 2 does not fail")
        assert [found.predict(rows, name) for name in "ab"] == before
        assert found.ask("/ping").status == 200
        (tmp_path / "models" / "b" / "2").mkdir()
        small_cnn(3).save(tmp_path / "models" / "b" / "2" / "model.keras")
        found.wait_until(lambda: found.predict(rows, "b") != before[1], "b's version 2 is missing")
        assert found.predict(rows, "a") == before[0]


# ----------------------------------------------------------------------------------- start, end
def accepts(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def test_sigterm_answers_what_has_come(model, expected, tmp_path):
    model.save(tmp_path / "digits.keras")
    words = [str(tmp_path / "digits.keras"), "-n", "1", "--max-batch", "1"]
    with serving(tmp_path / "server", *words) as found:
        (worker,) = found.workers()
        freeze(worker)
        with concurrent.futures.ThreadPoolExecutor(3) as threads:
            asking = [threads.submit(found.predict, ROWS[:2].tolist(), "digits") for _ in range(3)]
            found.wait_until(
                lambda: found.metric("nanotf_queue_requests") == 2, "the requests do not wait"
            )
            found.process.send_signal(signal.SIGTERM)
            found.wait_until(lambda: not accepts(found.port), "it still takes connections")
            os.kill(worker, signal.SIGCONT)
            for future in asking:
                np.testing.assert_allclose(future.result(), expected[:2], atol=1e-5)
        assert found.process.wait(served.SECONDS) == 0


def test_a_model_that_cannot_be_loaded_ends_the_start(tmp_path):
    (tmp_path / "bad").mkdir()
    process = served.start(tmp_path / "one", str(tmp_path / "bad"))
    assert process.wait(served.SECONDS) == 2
    assert "Received" in (tmp_path / "one" / "log").read_text()
    save_version(small_cnn(), tmp_path / "digits", 1)
    (tmp_path / "digits" / "1" / "saved_model.pb").write_bytes(b"nonsense")
    words = [str(tmp_path / "digits"), "--start-timeout", "5"]
    process = served.start(tmp_path / "two", *words)
    assert process.wait(served.SECONDS) == 2
    assert "cannot serve digits" in (tmp_path / "two" / "log").read_text()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import os; os.abort()", "SIGABRT"),
        pytest.param(
            "import time; time.sleep(600)",
            "it was not loaded within 20 s",
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["kills", "hangs"],
)
def test_a_version_that_ends_its_workers_leaves_others(line, said, model, expected, tmp_path):
    """A model's code does here what a broken file or operation may do."""
    models = tmp_path / "models"
    (models / "digits").mkdir(parents=True)
    model.save(models / "digits" / "model.keras")
    words = ["--models-dir", str(models), "--load-timeout", "20", "-n", "1"]
    with serving(tmp_path / "server", *words) as found:
        shutil.copytree(models / "digits", models / ".part")
        (models / ".part" / "code").mkdir()
        (models / ".part" / "code" / "inference.py").write_text(line)
        (models / ".part").rename(models / "bad")

        def state():
            reply = found.ask("/v1/models/bad")
            return reply.json["model_version_status"][0] if reply.status == 200 else {}

        found.wait_until(lambda: state().get("state") == "END", "the version is given up")
        assert said in state()["status"]["error_message"]
        reply = found.ask("/v1/models/bad:predict", {"instances": ROWS[:1].tolist()})
        assert reply.status == 404 and said in reply.json["error"]
        np.testing.assert_allclose(
            found.predict(ROWS[:2].tolist(), "digits"), expected[:2], atol=1e-5
        )


def test_a_port_in_use_is_said(server, tmp_path):
    command = [sys.executable, "-m", "nanotf", "serve", str(tmp_path), "--port", str(server.port)]
    (tmp_path / "m.keras").write_bytes(b"")
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(served.ROOT)},
        timeout=served.SECONDS,
        check=False,
    )
    assert done.returncode == 2
    assert "Received" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "MODEL"),
        (("nowhere",), "must exist"),
        ((".", "--port", "70000"), "--port"),
        ((".", "--max-batch", "0"), "--max-batch"),
        ((".", "--timeout", "nan"), "--timeout"),
        ((".", "-n", "two"), "-n"),
    ],
)
def test_wrong_arguments(words, said, tmp_path, capsys, monkeypatch):
    from nanotf import cli

    monkeypatch.chdir(tmp_path)
    assert cli.main(["serve", *words]) == 2
    assert said in capsys.readouterr().err
