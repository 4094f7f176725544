"""The public API: `from nanotf.keras import Model, Sequential, nano, nano_multiprocessing`.

Called by users' programs and by `cli`.
May import `parent` and everything below it.
"""

from nanotf.compat.versions import check_backend

check_backend()  # names the package to install, before other imports fail without it

from nanotf.keras import layers, optimizers  # noqa: E402  # saved models name SparseAdam
from nanotf.keras.models import Model, Sequential  # noqa: E402
from nanotf.parent.loop.loop_call import nano  # noqa: E402
from nanotf.region.decorators import nano_bf16, nano_multiprocessing, nano_multiprocessing_loss  # noqa: E402

__all__ = [
    "Model",
    "Sequential",
    "layers",
    "nano",
    "nano_bf16",
    "nano_multiprocessing",
    "nano_multiprocessing_loss",
    "optimizers",
]
