"""Trains a small model on scikit-learn's handwritten digits, serves it, and asks the server.

    python examples/serve_model.py [--epochs 5] [--workers 2]

Needs httptools, uvloop and orjson: pip install '.[serve]'.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

layers = tf.keras.layers
START_SECONDS = 300
END_SECONDS = 60


def trained(images: np.ndarray, labels: np.ndarray, epochs: int) -> tf.keras.Model:
    """Returns a model of the digits."""
    model = tf.keras.Sequential(
        [
            layers.Input((8, 8, 1), name="image"),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(images, labels, epochs=epochs, verbose=0)
    return model


@contextlib.contextmanager
def serving(folder: pathlib.Path, workers: int) -> Iterator[str]:
    """Serves a folder of versions in this context, at any port that is free.

    Yields:
        The server's address.
    """
    ready = folder.parent / "ready.json"
    command = [sys.executable, "-m", "nanotf", "serve", str(folder), "-n", str(workers)]
    server = subprocess.Popen([*command, "--port", "0", "--ready-file", str(ready)])
    try:
        end = time.monotonic() + START_SECONDS
        while not ready.exists():  # it is written in one step
            if server.poll() is not None:
                raise SystemExit("The server has ended.")
            if time.monotonic() > end:
                raise SystemExit(f"The server was not ready within {START_SECONDS} s.")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{json.loads(ready.read_text())['port']}"
    finally:
        server.send_signal(signal.SIGTERM)  # it answers what it has, and ends
        server.wait(END_SECONDS)


def asked(address: str, images: np.ndarray) -> np.ndarray:
    """Returns the server's scores of images."""
    body = json.dumps({"instances": images.tolist()}).encode()
    request = urllib.request.Request(f"{address}/v1/models/digits:predict", body)
    with urllib.request.urlopen(request) as answer:
        return np.array(json.load(answer)["predictions"], "float32")


def main() -> None:
    """Trains, serves, asks and compares."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    digits = load_digits()
    images = (digits.images[..., None] / 16).astype("float32")
    x_train, x_test, y_train, y_test = train_test_split(
        images, digits.target, test_size=0.25, random_state=0
    )
    model = trained(x_train, y_train, options.epochs)
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place) / "digits"
        model.export(str(folder / "1"))
        with serving(folder, options.workers) as address:
            scores = asked(address, x_test)
    difference = np.abs(scores - model.predict(x_test, verbose=0)).max()
    print(f"largest difference from predict: {difference:.1e}")
    print(f"accuracy of the server's answers: {(scores.argmax(1) == y_test).mean():.4f}")


if __name__ == "__main__":
    main()
