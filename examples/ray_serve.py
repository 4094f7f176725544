"""Trains a small model on scikit-learn's handwritten digits, and serves it with Ray Serve.

    python examples/ray_serve.py [--replicas 2] [--cpus 1] [--engine tensorflow] [--port 8000]

Needs Ray Serve: pip install 'ray[serve]'. Without a cluster, Ray starts on this machine.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import pathlib
import socket
import tempfile
import urllib.request
from typing import Any

import numpy as np
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse

import nanotf

ROWS = 4  # of a request


# --8<-- [start:replica]
def claim_cores(count: int) -> dict[int, socket.socket]:
    """Pins this process to logical CPUs that no other replica on this machine has.

    Ray counts CPUs, and does not say which. The kernel gives the name of an abstract socket to one
    process, and takes it back when that ends.

    Returns:
        The sockets, by CPU. Empty if fewer are free: then the process stays unpinned.
    """
    claimed: dict[int, socket.socket] = {}
    for core in sorted(os.sched_getaffinity(0)):
        if len(claimed) < count:
            name = socket.socket(socket.AF_UNIX)
            with contextlib.suppress(OSError):  # another replica has this CPU
                name.bind(f"\0nanotf-replica-{core}")
                claimed[core] = name
    if not claimed or len(claimed) < count:
        return {}
    for thread in pathlib.Path("/proc/self/task").iterdir():  # new threads inherit it
        os.sched_setaffinity(int(thread.name), claimed)
    return claimed


@serve.deployment(
    max_ongoing_requests=64,  # more than a batch, so that batches fill
    max_queued_requests=1000,  # beyond them: status 503
    logging_config={"enable_access_log": False},
)
class ServedProgram:
    """A replica: it computes a saved program on CPUs of its own.

    Args:
        folder: of a program with one input and one output.
    """

    def __init__(self, folder: str) -> None:
        cpus = int(ray.get_runtime_context().get_assigned_resources().get("CPU", 0))
        self.cores = claim_cores(cpus)
        threads = max(1, cpus)  # also of a replica with a part of a CPU, which is not pinned
        os.environ["TF_NUM_INTRAOP_THREADS"] = str(threads)  # read when TensorFlow first computes
        self.program = nanotf.inference.load(folder, threads=threads)
        self.signature = self.program.signatures["serving_default"]
        (self.input,), (self.output,) = self.signature.inputs, self.signature.outputs
        shape = self.input.shape
        same_lengths = shape is not None and None not in shape[1:]
        self.batches = same_lengths and not self.program.reason_to_keep_together()

    async def __call__(self, request: Request) -> JSONResponse:
        """Answers `{"instances": rows}` with `{"predictions": rows}`."""
        try:  # here: a request that does not fit would fail the others of its batch
            rows = (await request.json())["instances"]
            array = self.signature.checked({self.input.name: rows})[self.input.name]
        except (ValueError, TypeError, KeyError) as error:
            text = f"{type(error).__name__}: {error}"
            return JSONResponse({"error": text}, status_code=400)
        found = await self.together(array) if self.batches else self.computed(array)
        answer: dict[str, Any] = {"predictions": found.tolist()}
        return JSONResponse(answer, headers={"X-Cores": ",".join(map(str, self.cores))})

    def computed(self, rows: np.ndarray) -> np.ndarray:
        """Returns the output of rows."""
        return self.program.run({self.input.name: rows})[self.output.name]

    @serve.batch(max_batch_size=32, batch_wait_timeout_s=0)
    async def together(self, requests: list[np.ndarray]) -> list[np.ndarray]:
        """Computes the rows of all requests that wait, at once."""
        found = self.computed(np.concatenate(requests))
        return np.split(found, np.cumsum([len(rows) for rows in requests])[:-1])


# --8<-- [end:replica]
def trained(images: np.ndarray, labels: np.ndarray) -> Any:
    """Returns a model of the digits."""
    import tensorflow as tf  # not at the top: replicas of other engines do without

    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            layers.Input((8, 8, 1), name="image"),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(images, labels, epochs=5, verbose=0)
    return model


def asked(address: str, rows: np.ndarray) -> tuple[np.ndarray, str]:
    """Returns the predictions of rows, and the CPUs of the replica that has computed them."""
    body = json.dumps({"instances": rows.tolist()}).encode()
    with urllib.request.urlopen(urllib.request.Request(address, body)) as answer:
        return np.array(json.load(answer)["predictions"], "float32"), answer.headers["X-Cores"]


def main() -> None:
    """Trains, serves, asks and compares."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--cpus", type=int, default=1, help="of a replica")
    parser.add_argument("--engine", default="tensorflow")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()

    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images[..., None] / 16).astype("float32")
    model = trained(images, digits.target)
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place) / "program"  # on a cluster: where all nodes can read it
        nanotf.inference.make(model, options.engine, folder=folder)
        serve.start(http_options={"port": options.port})
        resources = {"num_cpus": options.cpus}
        replicas = ServedProgram.options(num_replicas=options.replicas, ray_actor_options=resources)
        serve.run(replicas.bind(str(folder)), route_prefix="/digits")
        parts = [images[first : first + ROWS] for first in range(0, len(images), ROWS)]
        with concurrent.futures.ThreadPoolExecutor(16) as threads:
            address = f"http://127.0.0.1:{options.port}/digits"
            answers = list(threads.map(lambda rows: asked(address, rows), parts))
        serve.shutdown()
    ray.shutdown()
    scores = np.concatenate([found for found, _ in answers])
    print(f"logical CPUs of the replicas: {' and '.join(sorted({cores for _, cores in answers}))}")
    difference = np.abs(scores - model.predict(images, verbose=0)).max()
    print(f"largest difference from predict: {difference:.1e}")
    print(f"accuracy of the answers: {(scores.argmax(1) == digits.target).mean():.4f}")


if __name__ == "__main__":
    main()
