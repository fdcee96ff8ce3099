"""A cluster for tests and notebooks: the bundled program as a child."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any, Optional, Type, Union

from . import _program
from .store import Store

#: How long the child may take to stop when asked; then it is killed.
_STOP_WITHIN = 10.0
_LOOK_EVERY = 0.02


class DevPool:
    """A quorum of one and a datanode in one child process, on free ports of the loopback. Everything is gone when it is closed, when it is
    collected, or when this process ends. Made by `tidepool.dev()`."""

    #: Address of the master, for `Store`.
    masters: str
    #: "host:port" of the master's and the datanode's metrics.
    http: str
    datanode_http: str
    pid: int

    def __init__(self, dram: Union[int, str] = "1GiB", *, start_deadline: float = 30.0) -> None:
        directory = tempfile.mkdtemp(prefix="tidepool-dev-")
        port_file = Path(directory) / "ports.json"
        log = Path(directory) / "log"
        # The child's standard input ends with this process, however that ends. In a session of its own, so that a Ctrl-C meant for
        # this process does not stop it.
        command = [_program.path(), "dev", "--exit-with-stdin", "--free-ports", "--dram", str(dram)]
        command += ["--port-file", str(port_file), "--data-dir", str(Path(directory) / "data")]
        with open(log, "wb") as output:
            self._child = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
            )
        self._finalizer = weakref.finalize(self, _stop, self._child, directory, os.getpid())
        ports = self._wait(port_file, log, start_deadline)
        self.masters = str(ports["rpc"])
        self.http = str(ports["http"])
        self.datanode_http = str(ports["datanode_http"])
        self.pid = int(ports["pid"])

    def _wait(self, port_file: Path, log: Path, deadline: float) -> "dict[str, Any]":
        until = time.monotonic() + deadline
        while True:
            if port_file.exists():
                return dict(json.loads(port_file.read_text()))
            if self._child.poll() is not None or time.monotonic() > until:
                said = log.read_text(errors="replace")[-2000:]
                self.close()
                raise RuntimeError(f"the pool did not start within {deadline} s; it said:\n{said}")
            time.sleep(_LOOK_EVERY)

    def store(self, **options: Any) -> Store:
        """A new `Store` on this pool; options as for `Store`. Waits until the pool's memory can be put to."""
        store = Store(self.masters, **options)
        until = time.monotonic() + store.deadline
        while not store.segments() and time.monotonic() < until:
            time.sleep(_LOOK_EVERY)
        return store

    def close(self) -> None:
        """Stops the child and removes its files. May be repeated."""
        self._finalizer()

    def __enter__(self) -> "DevPool":
        return self

    def __exit__(
        self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]
    ) -> None:
        self.close()


def _stop(child: "subprocess.Popen[bytes]", directory: str, owner: int) -> None:
    if os.getpid() != owner:
        return
    if child.stdin is not None:
        child.stdin.close()
    try:
        child.wait(_STOP_WITHIN)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    shutil.rmtree(directory, ignore_errors=True)


def dev(dram: Union[int, str] = "1GiB", *, start_deadline: float = 30.0) -> DevPool:
    """Starts the bundled program as a child: a whole cluster in one process, with `dram` of memory (bytes, or text such as "256MiB").

    Use it as a context manager, or call `close()`."""
    return DevPool(dram, start_deadline=start_deadline)
