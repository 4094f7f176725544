"""The archives of a release, and an environment in which the wheel is installed.

Tests that use these fixtures belong to the group "distributions" of pytest-xdist, so that one
process makes them once.
"""

from __future__ import annotations

import sys

import pytest
from release import Distributions, Installation, build_environment, copy, install, run, tracked


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """The source distribution, built from a copy of this clone, and the wheel, built from it."""
    source = tmp_path_factory.mktemp("source")
    copy(tracked(), source)
    out = tmp_path_factory.mktemp("distributions")
    run(sys.executable, "-m", "build", "--outdir", out, source, env=build_environment())
    (sources,) = out.glob("nanotf-*.tar.gz")
    (wheel,) = out.glob("nanotf-*.whl")
    return Distributions(sources, wheel)


@pytest.fixture(scope="session")
def installed(
    distributions: Distributions, tmp_path_factory: pytest.TempPathFactory
) -> Installation:
    """A clean environment with the wheel, its requirements, and no TensorFlow."""
    return install(distributions.wheel, tmp_path_factory.mktemp("clean") / "venv")
