"""Tidepool processes for the tests of the Mooncake layer: real masters and datanodes on free ports of the loopback address."""

import ctypes
import json
import mmap
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import time

import patience

READY_S = 30.0 * patience.FACTOR
#: Read lease of the clusters here, so that tests can wait for its end.
LEASE_S = 0.5 * patience.FACTOR
MIB = 1 << 20


def binary() -> str:
    """TIDEPOOL_BINARY, the one that was built in this tree, or the installed one."""
    built = pathlib.Path(__file__).resolve().parents[3] / "target" / "release" / "tidepool"
    found = os.environ.get("TIDEPOOL_BINARY") or (str(built) if built.exists() else shutil.which("tidepool"))
    assert found, "there is no tidepool binary: build it, or set TIDEPOOL_BINARY"
    return found


def until(what: str, condition, deadline_s: float = READY_S):
    """Waits for a condition; what it returned."""
    end = time.monotonic() + deadline_s
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.02)


def until_idle(deadline_s: float = READY_S) -> None:
    """Waits until no thread of this process has anything to do: none used a processor for a while."""

    def idle() -> bool:
        before = time.process_time()
        time.sleep(0.1)
        return time.process_time() - before < 0.005

    until("this process is idle", idle, deadline_s)


def free_port() -> int:
    with socket.socket() as asking:
        asking.bind(("127.0.0.1", 0))
        return asking.getsockname()[1]


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Process:
    """A role of the binary, until `stop` or `kill`."""

    def __init__(self, directory: pathlib.Path, name: str, *arguments: str) -> None:
        self.name = name
        self._arguments = arguments
        self._directory = directory
        self._ports = directory / f"{name}.ports"
        self.start()

    def start(self) -> None:
        self._ports.unlink(missing_ok=True)
        command = [binary(), *self._arguments, f"--port-file={self._ports}", f"--data-dir={self._directory / self.name}"]
        with open(self._directory / f"{self.name}.log", "ab") as log:
            # It ends with the tests, however they end.
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)

    def ports(self) -> dict:
        def read():
            assert self._process.poll() is None, f"{self.name} ended: {self.log()}"
            return self._ports.exists() and self._ports.read_text().strip().endswith("}")

        until(f"{self.name} is up", read)
        return json.loads(self._ports.read_text())

    def log(self) -> str:
        return (self._directory / f"{self.name}.log").read_text(errors="replace")[-4000:]

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()


def mounted(store, count: int) -> None:
    """Waits until the cluster of a store has so many segments."""
    until(f"{count} segments are mounted", lambda: len(store._client.segments()) >= count)


class Cluster:
    """Masters and datanodes. Members of a quorum have ports that were free a moment ago."""

    def __init__(self, directory: pathlib.Path, masters: int = 1, datanodes: int = 0, dram: str = "256MiB") -> None:
        self.directory = directory
        ports = [free_port() for _ in range(masters)]
        members = ",".join(f"{n + 1}=127.0.0.1:{port}" for n, port in enumerate(ports))
        self.masters = [
            Process(
                directory, f"master-{n + 1}", "master", f"--node-id={n + 1}", f"--members={members}", "--http-port=0",
                f"--lease-ttl={int(LEASE_S * 1000)}ms", f"--lease-ttl-max={int(LEASE_S * 1000)}ms", "--election=lan",
                "--snapshot-on-shutdown=false",
            )
            for n in range(masters)
        ]  # fmt: skip
        self.addresses = ",".join(f"127.0.0.1:{port}" for port in ports)
        for master in self.masters:
            master.ports()
        self.datanodes = [
            Process(
                directory, f"datanode-{n + 1}", "datanode", "--listen=127.0.0.1:0", "--http-port=0", f"--dram={dram}",
                f"--host-id=host-{n + 1}", f"--masters={self.addresses}", "--prefault=false",
            )
            for n in range(datanodes)
        ]  # fmt: skip
        for datanode in self.datanodes:
            datanode.ports()

    def stop(self) -> None:
        for process in self.datanodes + self.masters:
            process.stop()


class Buffer:
    """Memory with an address that stays: `addr`, and `data` to look at it."""

    def __init__(self, size: int, offset: int = 0) -> None:
        self._map = mmap.mmap(-1, size + offset)
        self._held = ctypes.c_char.from_buffer(self._map)
        self.addr = ctypes.addressof(self._held) + offset
        self.size = size
        self._offset = offset

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(self.size)
        return self._map[start + self._offset : stop + self._offset]

    def view(self) -> memoryview:
        """A view that can be written through, of all of it."""
        return memoryview(self._map)[self._offset : self._offset + self.size]

    def __setitem__(self, part: slice, data: bytes) -> None:
        start = part.indices(self.size)[0] + self._offset
        self._map[start : start + len(data)] = data


def pattern(size: int, seed: int = 0) -> bytes:
    """Bytes that are different at every place and for every seed."""
    block = b"".join(((seed * 1_000_003 + n) & 0xFFFFFFFF).to_bytes(4, "little") for n in range(min(size // 4 + 1, 16384)))
    return (block * (size // len(block) + 1))[:size]


def set_up(store, cluster, segment: int = 64 * MIB, buffer: int = 16 * MIB, hostname: str = "localhost", **more) -> int:
    """`setup` with what is the same for all tests."""
    return store.setup(hostname, "P2PHANDSHAKE", segment, buffer, "tcp", "", cluster.addresses, **more)
