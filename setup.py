"""Builds the native collectives with the package, where a C++ compiler is there.

Everything else is in pyproject.toml. Without a compiler, or when compiling fails, the
package installs as it is: nanotf then moves gradients with its pure-Python implementation.
`python setup.py build_native` compiles in place, for development, and fails loudly.
"""

import importlib.util
import logging
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.build_py import build_py

PACKAGE = Path("nanotf") / "collectives"


def load_build():
    """`nanotf.collectives.build`, without importing nanotf, whose dependencies are absent here."""
    path = Path(__file__).parent / PACKAGE / "build.py"
    spec = importlib.util.spec_from_file_location("nanotf_native_build", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class BuildPython(build_py):
    """Compiles after the Python files were copied; in place for an editable install."""

    def run(self):
        super().run()
        build = load_build()
        target = None if self.editable_mode else Path(self.build_lib) / PACKAGE
        try:
            build.build(target)
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            logging.warning("nanotf: installing without the native collectives: %s", reason)


class BuildNative(Command):
    """`python setup.py build_native`."""

    description = "compile the native collectives in place"
    user_options: ClassVar = []  # setuptools takes no tuple

    def initialize_options(self):
        """Nothing to do."""

    def finalize_options(self):
        """Nothing to do."""

    def run(self):
        for path in load_build().build():
            print(path)


class PlatformDistribution(Distribution):
    """A wheel with compiled files is for this platform alone."""

    def has_ext_modules(self):
        return True


commands = {"build_py": BuildPython, "build_native": BuildNative}
try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1: the wheel is tagged for this Python alone
    pass
else:

    class PlatformWheel(bdist_wheel):
        """The library is not an extension module: it serves every Python of the platform."""

        def get_tag(self):
            return "py3", "none", super().get_tag()[2]

    commands["bdist_wheel"] = PlatformWheel

setup(
    cmdclass=commands,
    distclass=PlatformDistribution,
    # Sources too, so that `python -m nanotf.collectives.build` works in an installed package.
    package_data={"nanotf.collectives": ["native/*.cc", "native/*.h"]},
)
