"""Drop-in Keras classes: `from nanotf.keras import Model, Sequential`."""

from nanotf.models import Model, Sequential

__all__ = ["Model", "Sequential"]
