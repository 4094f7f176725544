"""The same command on two hosts: processes of this machine at 127.0.0.1 and 127.0.0.2."""

from __future__ import annotations

import os
import pathlib
import random
import subprocess
import sys
import time
from collections.abc import Sequence

from processes import ROOT, SECONDS
from waiting import wait_until

from nanotf.wire.ports import is_free

ADDRESSES = ("127.0.0.1", "127.0.0.2")


class HostsRun:
    """The same command on two hosts."""

    def __init__(
        self,
        folder: pathlib.Path,
        source: str,
        options: Sequence[str],
        environments: Sequence[dict[str, str]],
    ) -> None:
        self.outputs = []
        self.hosts: list[subprocess.Popen[str]] = []
        port = _free_port()
        for index, environment in enumerate(environments):
            own = folder / f"host-{index}"
            own.mkdir()
            (own / "script.py").write_text(source)
            self.outputs.append(own / "output")
            variables = {
                **{k: v for k, v in os.environ.items() if k != "TF_CONFIG"},
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "PYTHONPATH": str(ROOT),
                "NANOTF_SECRET": "the secret of a test",
                "NANOTF_PORT": str(port),
                **environment,
            }
            with self.outputs[-1].open("w") as output:
                self.hosts.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "nanotf", "run", *options, "script.py"],
                        cwd=own,
                        env=variables,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        text=True,
                    )
                )

    def text(self, host: int) -> str:
        return self.outputs[host].read_text()

    def wait(self) -> list[int]:
        deadline = time.monotonic() + SECONDS
        return [host.wait(max(1.0, deadline - time.monotonic())) for host in self.hosts]

    def has_reached(self, text: str) -> None:
        def reached() -> bool:
            assert self.hosts[0].poll() is None, self.text(0)
            return text in self.text(0)

        wait_until(reached, f"the script prints {text!r}", SECONDS)

    def close(self) -> None:
        for host in self.hosts:
            if host.poll() is None:
                host.kill()
            host.wait()


def _free_port() -> int:
    # Below those that the system gives to connections, one of which could take it meanwhile.
    # Of the system's chance: tests seed their own.
    ports = random.SystemRandom().sample(range(20_000, 32_000), 100)
    return next(port for port in ports if is_free(port))
