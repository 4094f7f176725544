"""A program for `test_ray.py`: replicas of `examples/ray_serve.py`, asked and killed."""

from __future__ import annotations

import concurrent.futures
import json
import os
import pathlib
import signal
import sys
import urllib.error
import urllib.request
from typing import Any

import numpy as np
import ray
import tensorflow as tf
from ray import serve
from ray_serve import ServedProgram
from waiting import wait_until

import nanotf

PORT = int(sys.argv[sys.argv.index("--port") + 1])
layers = tf.keras.layers


@tf.keras.utils.register_keras_serializable("nanotf_tests")
class Centred(layers.Layer):
    """Subtracts the mean of the batch: rows depend on each other."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs - tf.reduce_mean(inputs, 0)


@serve.deployment(max_ongoing_requests=64)
class WatchedProgram(ServedProgram.func_or_class):  # type: ignore[name-defined, misc]
    """A replica that tells whether it makes batches."""

    def makes_batches(self) -> bool:
        """Returns what it has decided."""
        return bool(self.batches)


def _asked(path: str, value: Any) -> tuple[int, Any, str | None]:
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", json.dumps(value).encode())
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.load(answer)["predictions"], answer.headers["X-Cores"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error).get("error"), None


def _answers(path: str, parts: list[np.ndarray]) -> list[tuple[int, Any, str | None]]:
    with concurrent.futures.ThreadPoolExecutor(len(parts)) as threads:
        return list(threads.map(lambda rows: _asked(path, {"instances": rows.tolist()}), parts))


def _replicas() -> list[int]:
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = process.read_bytes()
            parent = (process.parent / "environ").read_bytes()
        except OSError:
            continue
        if b"WatchedProgram" in words and os.environ["RAY_TMPDIR"].encode() in parent:
            found.append(int(process.parent.name))
    return found


def main() -> None:
    """Prints what was found as JSON."""
    folder = pathlib.Path.cwd()
    x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
    found: dict[str, Any] = {}
    serve.start(http_options={"port": PORT})
    for name, layer in (("apart", layers.Dense(2)), ("centred", Centred())):
        model = tf.keras.Sequential([layers.Input((3,)), layer])
        model.export(str(folder / "saved" / name))  # of a SavedModel, and of a Keras model
        source = model if name == "apart" else folder / "saved" / name
        nanotf.inference.make(source, folder=folder / name)
        options = {"num_cpus": 1} if name == "apart" else {"num_cpus": 0.5}
        replicas = WatchedProgram.options(num_replicas=1, ray_actor_options=options)
        handle = serve.run(replicas.bind(str(folder / name)), name=name, route_prefix=f"/{name}")
        parts = [*np.split(x, 16), np.zeros((1, 4), "float32")]
        answers = _answers(f"/{name}", parts)
        found[name] = {
            "statuses": [status for status, _, _ in answers],
            "cores": sorted({cores for _, _, cores in answers[:-1]}),
            "error": answers[-1][1],
            "batches": handle.makes_batches.remote().result(),
            "difference": max(
                float(np.abs(np.array(rows) - model(part).numpy()).max())
                for (_, rows, _), part in zip(answers[:-1], parts[:-1], strict=True)
            ),
        }
    serve.delete("centred")
    (replica,) = _replicas()
    os.kill(replica, signal.SIGKILL)
    wait_until(lambda: _replicas() not in ([], [replica]), "Ray starts another replica")
    wait_until(lambda: _asked("/apart", {"instances": x.tolist()})[0] == 200, "it answers")
    found["again"] = _asked("/apart", {"instances": x.tolist()})[2]
    found["wrong"] = [_asked("/apart", value)[0] for value in ([], {}, {"instances": "a"})]
    serve.shutdown()
    ray.shutdown()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
