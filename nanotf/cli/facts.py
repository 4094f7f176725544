"""The facts that `nanotf doctor` examines."""

from __future__ import annotations

import concurrent.futures
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace

from nanotf.cli.usage import Usage, read_usage
from nanotf.collectives.native_library import native_status
from nanotf.machine import environment, shell_state, topology
from nanotf.machine.cpus import Machine
from nanotf.machine.installed import Installed, find_installed
from nanotf.machine.limits import System, read_system
from nanotf.machine.processor import Processor, read_processor
from nanotf.machine.tensorflow_build import TensorFlowBuild, installed_plugins, read_build

# Of AMD's plug-in zentf 2.20 and 2.21, which replaces oneDNN.
PLUGINS_OFF = {"TF_ENABLE_ZENDNN_OPTS": "0", "TF_ENABLE_ONEDNN_OPTS": "1"}
PLUGINS_ON = {"TF_ENABLE_ZENDNN_OPTS": "1", "TF_ENABLE_ONEDNN_OPTS": "0"}


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
    tuned: TensorFlowBuild  # the same, with the variables that `nanotf-init` would set
    installed: Installed
    plugins: tuple[str, ...]  # see `installed_plugins`
    # Without plug-ins that can be switched, and with them; None if there are none.
    switched: tuple[TensorFlowBuild, TensorFlowBuild] | None
    native: tuple[bool, str]  # whether the native library can be used, and why or why not
    environ: Mapping[str, str]


def gather() -> Facts:
    """Gathers the facts about this machine. Takes as long as importing TensorFlow."""
    machine = topology.describe_machine()
    usage = read_usage(machine)  # before TensorFlow's import makes the machine busy
    environ, installed = dict(os.environ), find_installed()
    tuned = shell_environment(machine, environ, installed).apply(environ)
    with concurrent.futures.ThreadPoolExecutor(1) as other:  # both imports of TensorFlow at once
        of_tuned = None if tuned == environ else other.submit(read_build, tuned)
        build = read_build(environ)
    plugins = installed_plugins()
    off, on = ({**environ, **switches} for switches in (PLUGINS_OFF, PLUGINS_ON))
    return Facts(
        machine=machine,
        processor=read_processor(),
        platform=_read_platform(),
        system=read_system(),
        usage=usage,
        build=build,
        tuned=of_tuned.result() if of_tuned else build,
        installed=installed,
        plugins=plugins,
        switched=(read_build(off), read_build(on)) if plugins else None,  # one after the other
        native=native_status(),
        environ=environ,
    )


def usable_cores(machine: Machine, environ: Mapping[str, str]) -> int:
    """Counts the cores that workers may use: the free cores, up to the environment's limit."""
    return len(machine.usable_cores()[: shell_state.cores_cap(environ)])


def shell_environment(
    machine: Machine, environ: Mapping[str, str], installed: Installed
) -> environment.Environment:
    """Returns the variables that `nanotf-init` would set.

    They use the cores that this process has now, even if `nanotf-init --cores` asked for more.
    A finding reports the cores.
    """
    state = shell_state.read_state(environ)
    options = state.options if state else shell_state.Options()
    if options.cores is not None:
        cores = min(options.cores, usable_cores(machine, environ))
        options = replace(options, cores=cores)
    return environment.shell_environment(machine, environ, options, installed)


def _read_platform() -> Platform:
    try:
        distribution = platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:  # macOS, and images without /etc/os-release
        distribution = ""
    return Platform(
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
        distribution=distribution,
        libc=" ".join(platform.libc_ver()).strip(),  # two empty texts if Python finds none
    )
