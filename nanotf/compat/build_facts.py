"""What the installed TensorFlow says about itself.

Run, it prints one line of JSON. A process of its own, since TensorFlow takes seconds to import, and may
crash on a processor that it was not built for.

| name | versions seen | why |
| --- | --- | --- |
| `tensorflow.python.util._pywrap_util_port.IsMklEnabled` | TensorFlow 2.15-2.21 | whether its kernels use oneDNN in this process |
"""

from __future__ import annotations

import importlib
import json
from typing import Any

from nanotf.compat import versions


def build_facts() -> dict[str, Any]:
    """The versions, by name, and what was built in."""
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
    """Whether TensorFlow's kernels use oneDNN: built with it, and not switched off."""
    port = importlib.import_module("tensorflow.python.util._pywrap_util_port")
    return bool(port.IsMklEnabled())


if __name__ == "__main__":
    print(json.dumps(build_facts()))
