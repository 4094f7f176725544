"""A described healthy machine, on which `nanotf doctor` finds nothing to fix."""

from __future__ import annotations

import dataclasses
from typing import Any

from machines import two_sockets

from nanotf.cli import doctor
from nanotf.cli.facts import Facts, Platform
from nanotf.cli.usage import Usage
from nanotf.machine.environment import initialised, shell_environment
from nanotf.machine.installed import Installed
from nanotf.machine.limits import System
from nanotf.machine.processor import Processor
from nanotf.machine.shell_state import Options
from nanotf.machine.tensorflow_build import TensorFlowBuild

GIB = 1 << 30
BUILD = TensorFlowBuild(
    ("tensorflow-cpu 2.21.0",),
    "2.21.0",
    "keras 3.15.1",
    "tensorflow",
    onednn=True,
    threads=61,
    allocator="/lib/libtcmalloc_minimal.so.4",
    float32=0.004,
    bfloat16=0.002,
)
GOOD = Facts(
    machine=two_sockets(),
    processor=Processor("A Processor", frozenset({"avx2", "avx512f", "avx512_bf16", "amx_bf16"})),
    platform=Platform("Linux 6.1.0 x86_64", "Debian GNU/Linux 12 (bookworm)", "glibc 2.36"),
    system=System(memory=256 * GIB, shm=128 * GIB, open_files=1024, processes=4096),
    usage=Usage((1.5, 1.0, 0.5), busy_cores=0.1, memory_available=200 * GIB, shm_free=127 * GIB),
    build=BUILD,
    tuned=BUILD,
    installed=Installed(allocators=(("tcmalloc", "/lib/libtcmalloc_minimal.so.4"),)),
    plugins=(),
    switched=None,
    native=(True, "_shm.so, avx512"),
    environ={},
)


def describe(options: Options | None = None, **changes: Any) -> Facts:
    """Describes the healthy machine, with changes; `nanotf-init` was sourced."""
    options = options or Options()
    changes.setdefault("tuned", changes.get("build", BUILD))
    facts = dataclasses.replace(GOOD, **changes)
    wanted = shell_environment(facts.machine, facts.environ, options, facts.installed)
    return dataclasses.replace(facts, environ=initialised(facts.environ, options, wanted))


def find(num_processes: int | None = None, **changes: Any) -> list[dict[str, str]]:
    """Returns the findings of the healthy machine with changes."""
    findings: list[dict[str, str]] = doctor.examine(num_processes, facts=describe(**changes))[
        "findings"
    ]
    return findings


def only(found: list[dict[str, str]], word: str) -> dict[str, str]:
    """Returns the only finding that contains a word."""
    (one,) = [finding for finding in found if word in finding["text"]]
    return one
