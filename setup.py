"""Builds the native library with the package.

Everything else is in pyproject.toml. `python setup.py build_native` compiles in place, for
development.

Environment variables read: `CXX` and `CXXFLAGS`, by `nanotf.collectives.build`.
"""

import re
import runpy
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PACKAGE = Path("nanotf") / "collectives"
# An image, or the end of a link, which may have an image as its text.
RELATIVE_LINK = re.compile(r"(!\[[^\]]*\]|\])\((?!https?:|mailto:|#)([^)\s]+)\)")


def build_native(target=None):
    """Calls `build` of `nanotf.collectives.build`, which runs where nanotf cannot be imported."""
    return runpy.run_path(str(Path(__file__).parent / PACKAGE / "build.py"))["build"](target)


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
        build_native(None if self.editable_mode else Path(self.build_lib) / PACKAGE)


class BuildNative(Command):
    """The command `python setup.py build_native`."""

    description = "compile the native collectives in place"
    user_options: ClassVar = []  # setuptools takes no tuple

    def initialize_options(self):
        """Nothing to do."""

    def finalize_options(self):
        """Nothing to do."""

    def run(self):
        for path in build_native():
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
