"""The facts that `nanotf doctor` examines."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass

from nanotf.cli.usage import Usage, read_usage
from nanotf.collectives.native_library import native_status
from nanotf.machine import topology
from nanotf.machine.cpus import Machine
from nanotf.machine.installed import Installed, find_installed
from nanotf.machine.limits import System, read_system
from nanotf.machine.processor import Processor, read_processor
from nanotf.machine.tensorflow_build import TensorFlowBuild, read_build


@dataclass(frozen=True)
class Platform:
    """An operating system."""

    kernel: str = ""  # its name, release and instruction set
    distribution: str = ""  # its name and version; empty if unknown
    libc: str = ""  # the C library and its version; empty if unknown


@dataclass(frozen=True)
class Facts:
    """The facts that the doctor examines."""

    machine: Machine
    processor: Processor
    platform: Platform
    system: System
    usage: Usage
    build: TensorFlowBuild
    installed: Installed
    native: tuple[bool, str]  # whether the native library can be used, and why or why not
    environ: Mapping[str, str]


def gather() -> Facts:
    """Gathers the facts about this machine. Takes as long as importing TensorFlow."""
    machine = topology.describe_machine()
    usage = read_usage(machine)  # before TensorFlow's import makes the machine busy
    return Facts(
        machine=machine,
        processor=read_processor(),
        platform=_read_platform(),
        system=read_system(),
        usage=usage,
        build=read_build(os.environ),
        installed=find_installed(),
        native=native_status(),
        environ=dict(os.environ),
    )


def _read_platform() -> Platform:
    try:
        distribution = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:  # macOS, and images without /etc/os-release
        distribution = ""
    return Platform(
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
        distribution=distribution,
        libc=" ".join(platform.libc_ver()).strip(),
    )
