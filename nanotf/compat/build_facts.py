"""Facts about the installed TensorFlow.

As a script, prints one line of JSON. It runs in its own process because TensorFlow takes seconds to
import and may crash on a processor that it was not built for.

| name | versions seen | why |
| --- | --- | --- |
| `tensorflow.python.util._pywrap_util_port.IsMklEnabled` | TensorFlow 2.14-2.21 | tells if its kernels use oneDNN in this process |
"""

from __future__ import annotations

import importlib
import json
from typing import Any

from nanotf.compat import versions


def build_facts() -> dict[str, Any]:
    """Returns versions and build features, by name."""
    tf = versions.require_tensorflow()
    package = versions.keras_module_name()
    keras = importlib.import_module(package)
    return {
        "tensorflow": tf.__version__,
        "keras": f"{package} {keras.__version__}",
        "backend": keras.backend.backend(),
        "onednn": uses_onednn(),
        "gpus": len(tf.config.list_physical_devices("GPU")),
    }


def uses_onednn() -> bool:
    """Returns True if TensorFlow is built with oneDNN and it is not switched off."""
    port = importlib.import_module("tensorflow.python.util._pywrap_util_port")
    return bool(port.IsMklEnabled())


if __name__ == "__main__":
    print(json.dumps(build_facts()))
