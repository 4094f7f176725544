"""The build backend: setuptools, with a C++ compiler where this machine has none.

pip installs what these functions return for the time of the build. So every install has the native
library, as the wheels of a release do.
"""

import runpy

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 - the other functions of a backend

COMPILER = "ziglang>=0.17.1,<0.18"


def _with_compiler(requirements):
    build = runpy.run_path("nanotf/collectives/build.py")  # pip calls in the root of the sources
    try:
        build["compiler"]()
    except build["BuildError"]:
        return [*requirements, COMPILER]
    return requirements


def get_requires_for_build_wheel(config_settings=None):
    """Returns the requirements of `build_wheel`."""
    return _with_compiler(build_meta.get_requires_for_build_wheel(config_settings))


def get_requires_for_build_editable(config_settings=None):
    """Returns the requirements of `build_editable`."""
    return _with_compiler(build_meta.get_requires_for_build_editable(config_settings))
