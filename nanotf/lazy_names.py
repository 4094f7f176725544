"""Public names of a package that are imported when they are first used.

Importing a package then takes milliseconds, and imports TensorFlow only with a name that needs it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any

from nanotf.tracebacks import raising_at_the_call


def attach(
    package: dict[str, Any], homes: Mapping[str, str | None]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the functions `__getattr__` and `__dir__` of a package, see PEP 562.

    Args:
        package: the package's `globals()`, with `__all__`. A name is stored there at its first use.
        homes: mapping of each name to the module that has it, absolute or relative to the package
            (".steps"), or to None if the name is itself a module of the package.
    """
    name_of_package: str = package["__name__"]

    @raising_at_the_call
    def __getattr__(name: str) -> Any:
        if name not in homes:
            text = f"module {name_of_package!r} has no attribute {name!r}"
            raise AttributeError(text, name=name, obj=sys.modules[name_of_package])
        home = homes[name] or f".{name}"
        module = importlib.util.resolve_name(home, name_of_package)
        __import__(module)  # whose frames, unlike `import_module`'s, no traceback shows
        if homes[name] is None:
            return sys.modules[module]
        value = package[name] = getattr(sys.modules[module], name)
        return value

    def __dir__() -> list[str]:
        return sorted(package["__all__"])

    return __getattr__, __dir__
