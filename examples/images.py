"""Images for the examples: Fashion-MNIST, or scikit-learn's digits without a network."""

from __future__ import annotations

import sys

import numpy as np
import tensorflow as tf

Images = tuple[np.ndarray, np.ndarray]


def load(name: str = "fashion_mnist") -> tuple[Images, Images]:
    """Returns training and test images, (rows, height, width, 1) in [0, 1], each with labels.

    Args:
        name: str, "fashion_mnist" (28x28, downloads 30 MB the first time) or "digits" (8x8).
    """
    if name == "fashion_mnist":
        try:
            (x, y), (x_test, y_test) = tf.keras.datasets.fashion_mnist.load_data()
        except Exception as error:  # Keras raises urllib's errors, and a bare Exception of its own
            reason = str(error).splitlines()[0]
            print(f"Fashion-MNIST cannot be downloaded ({reason}); digits it is.", file=sys.stderr)
            return load("digits")
        x, x_test = (images[..., None].astype("float32") / 255 for images in (x, x_test))
        return (x, y), (x_test, y_test)
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = data.images[..., None].astype("float32") / 16, data.target
    order = np.random.default_rng(0).permutation(len(x))
    train, test = order[:1500], order[1500:]
    return (x[train], y[train]), (x[test], y[test])
