"""What tests start and wait for."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import patience
from tidepool import _program

#: Longest wait for anything to come up.
UP_WITHIN = 30.0 * patience.FACTOR
LOOK_EVERY = 0.02


def until(condition, within: float = UP_WITHIN, what: str = "the condition"):
    """Waits for a condition; its truthy value."""
    end = time.monotonic() + within
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"{what} did not come true within {within} s")
        time.sleep(LOOK_EVERY)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def state(pid: int) -> str:
    """The kernel's letter for what a process does: T is stopped, Z has ended."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def freeze(pid: int) -> None:
    """Stops a process, and waits until all of it has stopped: signals take their time."""
    os.kill(pid, signal.SIGSTOP)
    tasks = list(Path(f"/proc/{pid}/task").iterdir())
    until(lambda: all((task / "stat").read_text().rsplit(")", 1)[1].split()[0] == "T" for task in tasks), what="the stop")


class Role:
    """A child that runs one role."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        directory.mkdir()
        self.port_file = directory / "ports.json"
        self.log = directory / "log"
        command = [_program.path(), *arguments, "--port-file", str(self.port_file), "--data-dir", str(directory / "data")]
        with open(self.log, "wb") as output:
            self.child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def ports(self) -> dict:
        def written():
            assert self.child.poll() is None, self.log.read_text(errors="replace")[-2000:]
            return self.port_file.exists()

        until(written, what=f"the port file {self.port_file}")
        return json.loads(self.port_file.read_text())

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.ports()['http']}/readyz", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()


class Quorum:
    """Three masters and a datanode."""

    def __init__(self, directory: Path) -> None:
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(3)]
        self.masters = ",".join(addresses)
        members = ",".join(f"{i + 1}={address}" for i, address in enumerate(addresses))
        self.roles = {
            address: Role(
                directory / f"m{i + 1}",
                *["master", "--node-id", str(i + 1), "--members", members, "--http-port", "0"],
            )
            for i, address in enumerate(addresses)
        }
        self.datanode = Role(
            directory / "d1",
            *["datanode", "--listen", "127.0.0.1:0", "--http-port", "0", "--masters", self.masters, "--dram", "512MiB"],
        )
        until(self.datanode.is_ready, what="the datanode's readiness")

    def kill(self, address: str) -> None:
        self.roles.pop(address).kill()

    def close(self) -> None:
        for role in [*self.roles.values(), self.datanode]:
            role.kill()
