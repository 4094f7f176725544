"""Builds the native collectives with the package, where a C++ compiler is found.

Everything else is in pyproject.toml. Without a compiler, or if compiling fails, the package
installs without them: nanotf then exchanges gradients in pure Python.
`python setup.py build_native` compiles in place, for development, and fails loudly.

Environment variables read: `NANOTF_REQUIRE_NATIVE`; with 1, the build fails if the native
collectives do not compile, for packages built once and installed on many machines. `CXX` and
`CXXFLAGS` are read by `nanotf.collectives.build`.
"""

import importlib.util
import logging
import os
import re
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PACKAGE = Path("nanotf") / "collectives"
# An image, or the end of a link, which may have an image as its text.
RELATIVE_LINK = re.compile(r"(!\[[^\]]*\]|\])\((?!https?:|mailto:|#)([^)\s]+)\)")


def load_build():
    """Loads `nanotf.collectives.build` alone, since nanotf's dependencies are absent here."""
    path = Path(__file__).parent / PACKAGE / "build.py"
    spec = importlib.util.spec_from_file_location("nanotf_native_build", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def absolute_links(text, source, version):
    """Points the links of README.md to the source repository, at a version's tag.

    A package index shows the text without the files beside it.

    Args:
        text: str, Markdown.
        source: str, the repository's address.
        version: str, the tag without its "v".

    Returns:
        str, Markdown.
    """

    def absolute(link):
        label, path = link.groups()
        kind = "raw" if label.startswith("!") else "blob"
        return f"{label}({source}/{kind}/v{version}/{path})"

    return RELATIVE_LINK.sub(absolute, text)


class BuildPython(build_py):
    """Compiles after the Python files are copied; in place for an editable install."""

    def run(self):
        super().run()
        build = load_build()
        target = None if self.editable_mode else Path(self.build_lib) / PACKAGE
        try:
            build.build(target)
        except Exception as error:
            if os.environ.get("NANOTF_REQUIRE_NATIVE") == "1":
                raise
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            logging.warning("nanotf: installing without the native collectives: %s", reason)


class BuildNative(Command):
    """The command `python setup.py build_native`."""

    description = "compile the native collectives in place"
    user_options: ClassVar = []  # setuptools takes no tuple

    def initialize_options(self):
        """Nothing to do."""

    def finalize_options(self):
        """Nothing to do."""

    def run(self):
        for path in load_build().build():
            print(path)


class NanotfDistribution(Distribution):
    """A distribution with compiled files, for one platform."""

    def has_ext_modules(self):
        return True

    def parse_config_files(self, *args, **kwargs):
        """Reads pyproject.toml, which names README.md and the source repository."""
        super().parse_config_files(*args, **kwargs)
        about = self.metadata
        about.long_description = absolute_links(
            about.long_description, about.project_urls["Source"], about.version
        )


class PlatformWheel(bdist_wheel):
    """A wheel for every Python of the platform: the library is not an extension module."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_py": BuildPython, "build_native": BuildNative, "bdist_wheel": PlatformWheel},
    distclass=NanotfDistribution,
)
