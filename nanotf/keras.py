"""What users import: `from nanotf.keras import Model, Sequential, nano, nano_multiprocessing`."""

from nanotf.custom_loop import nano
from nanotf.models import Model, Sequential
from nanotf.steps import nano_bf16, nano_multiprocessing, nano_multiprocessing_loss

__all__ = [
    "Model",
    "Sequential",
    "nano",
    "nano_bf16",
    "nano_multiprocessing",
    "nano_multiprocessing_loss",
]
