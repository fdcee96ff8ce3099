#!/usr/bin/env python3
"""Measures `MooncakeDistributedStore` of one or two installations, in turns within one run: one JSON object a line on stdout, and at the
end a table on stderr, with the ratio of the first to the second.

    mooncake_api.py --system tidepool=venv/bin/python --system mooncake=peer/bin/python
    mooncake_api.py --system NAME=PYTHON[=MASTER] ... [--rounds 5] [--case REGEX] [--placement remote,local]

PYTHON is the interpreter whose environment has the installation, MASTER the address of a master that is running for it; without one the
environment's own `mooncake_master` is started, and ended with the run. The ceiling beside each figure is of the same shape: one memcpy for whole values of one process, a loopback socket for the others.
`get_alone` and `put_alone` are medians of single calls in microseconds, beside a floor: the round trips of such a call over a loopback
socket, and for a put two appends with fdatasync to a file in the temporary directory, which a durable put cannot do without.
`get_threads` are single gets a second by eight threads of one process.
`local`: the client lends the memory itself; `remote`: a second process does, so every byte crosses a socket.
"""

import argparse
import ctypes
import json
import mmap
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

SIZES = {"4KiB": 4096, "64KiB": 65536, "1MiB": 1 << 20}
#: Longest wait for a master that was started here.
UP_S = 30.0
#: Keys of a batch, by size.
BATCH = {"4KiB": 128, "64KiB": 128, "1MiB": 32}
#: Calls of one measurement, by size.
SINGLE_CALLS = {"4KiB": 300, "64KiB": 200, "1MiB": 60}
BATCH_CALLS = 5
THREADS = 8
#: Round trips of a single call, one after the other: the directory and the payload; a put asks the directory twice.
ROUND_TRIPS = {"get_alone": 2, "put_alone": 3}
SEGMENT_BYTES = 1 << 30
NAMES = 5000


class Buffer:
    """Page-aligned memory with an address."""

    def __init__(self, size):
        self.data = mmap.mmap(-1, size)
        self._held = ctypes.c_char.from_buffer(self.data)
        self.addr = ctypes.addressof(self._held)
        self.size = size


# The worker: one process of one installation. Reads a case a line, answers its figure.


def connect(master, segment):
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 256 << 20, "tcp", "", master)
    if code:
        raise SystemExit(f"setup failed: {code}")
    return store


def owner(master):
    store = connect(master, SEGMENT_BYTES)
    print("ready", flush=True)
    sys.stdin.readline()
    store.close()


class Worker:
    def __init__(self, master, placement):
        self.store = connect(master, SEGMENT_BYTES if placement == "local" else 0)
        self.source, self.target = Buffer(64 << 20), Buffer(64 << 20)
        self.source.data[:] = os.urandom(1 << 20) * 64
        for buffer in (self.source, self.target):
            self.store.register_buffer(buffer.addr, buffer.size)
        self.turn = 0

    def run(self, case):
        self.turn += 1
        kind, size = case.split("/")
        if kind in ("is_exist", "batch_is_exist"):
            return self.look(kind, int(size))
        if kind in ("get_alone", "put_alone"):
            return self.alone(kind, size)
        if kind == "get_threads":
            return self.threads(size)
        return self.move(kind, size)

    def alone(self, kind, size_name):
        """Median of single calls in microseconds."""
        store, size, took = self.store, SIZES[size_name], []
        keys = [f"{kind}-{self.turn}-{n}" for n in range(SINGLE_CALLS[size_name])]
        if kind == "get_alone":
            assert store.batch_put_from(keys, [self.source.addr] * len(keys), [size] * len(keys)) == [0] * len(keys)
        for key in keys:
            began = time.perf_counter()
            if kind == "get_alone":
                ok = store.get_into(key, self.target.addr, size) == size
            else:
                ok = store.put_from(key, self.source.addr, size) == 0
            took.append(time.perf_counter() - began)
            assert ok, key
        store.batch_remove(keys, True)
        return statistics.median(took) * 1e6

    def threads(self, size_name):
        """Single gets a second by several threads, each of its own keys."""
        store, size = self.store, SIZES[size_name]
        count = SINGLE_CALLS[size_name]
        keys = [[f"threads-{self.turn}-{t}-{n}" for n in range(count)] for t in range(THREADS)]
        for part in keys:
            assert store.batch_put_from(part, [self.source.addr] * count, [size] * count) == [0] * count
        start, failed = threading.Barrier(THREADS + 1), []

        def get(part, into):
            start.wait()
            failed.extend(key for key in part if store.get_into(key, into, size) != size)

        all_threads = [
            threading.Thread(target=get, args=(part, self.target.addr + t * size)) for t, part in enumerate(keys)
        ]
        for thread in all_threads:
            thread.start()
        start.wait()
        began = time.perf_counter()
        for thread in all_threads:
            thread.join()
        took = time.perf_counter() - began
        assert not failed, failed[:3]
        for part in keys:
            store.batch_remove(part, True)
        return THREADS * count / took

    def look(self, kind, count):
        store, names = self.store, [f"name-{n:060}" for n in range(NAMES)]
        if self.turn == 1 or store.is_exist(names[-1]) != 1:
            for n in range(0, NAMES, 500):
                part = names[n : n + 500]
                assert store.batch_put_from(part, [self.source.addr] * 500, [64] * 500) == [0] * 500
        calls = 300 if count == 1 else 100
        parts = [names[(n * count) % (NAMES - count) :][:count] for n in range(calls)]
        began = time.perf_counter()
        if kind == "is_exist":
            assert all(store.is_exist(part[0]) == 1 for part in parts)
        else:
            assert all(sum(store.batch_is_exist(part)) == count for part in parts)
        return calls * count / (time.perf_counter() - began)

    def move(self, kind, size_name):
        """Bytes a second of a put or a get, after the other one where it needs it. Contents are compared once."""
        store, size = self.store, SIZES[size_name]
        batched = kind.startswith("batch_")
        count, calls = (BATCH[size_name], BATCH_CALLS) if batched else (1, SINGLE_CALLS[size_name])
        keys = [[f"{kind}-{self.turn}-{n}-{k}" for k in range(count)] for n in range(calls)]
        at = [self.source.addr + k * size for k in range(count)]
        into = [self.target.addr + k * size for k in range(count)]
        sizes, value = [size] * count, self.source.data[:size]
        put = {
            "put": lambda k: store.put(k[0], value) == 0,
            "put_from": lambda k: store.put_from(k[0], at[0], size) == 0,
            "batch_put_from": lambda k: store.batch_put_from(k, at, sizes) == [0] * count,
        }
        get = {
            "get": lambda k: len(store.get(k[0])) == size,
            "get_into": lambda k: store.get_into(k[0], into[0], size) == size,
            "batch_get_into": lambda k: store.batch_get_into(k, into, sizes) == sizes,
        }
        if kind in get:
            assert all(map(put["batch_put_from"], keys))
        wanted = (get if kind in get else put)[kind]
        began = time.perf_counter()
        ok = all(map(wanted, keys))
        took = time.perf_counter() - began
        assert ok, kind
        if kind in ("get_into", "batch_get_into"):
            assert self.target.data[: size * count] == self.source.data[: size * count]
        for part in keys:
            store.batch_remove(part, True)
        return calls * count * size / took


def work(master, placement):
    worker = Worker(master, placement)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps({"figure": worker.run(line.strip())}), flush=True)
    worker.store.close()


# The ceilings.


def copied(size, count):
    """Bytes a second of copies of that shape within one process."""
    source, target = Buffer(size * count), Buffer(size * count)
    source.data[:] = os.urandom(size) * count
    began = time.perf_counter()
    for _ in range(BATCH_CALLS):
        for k in range(count):
            ctypes.memmove(target.addr + k * size, source.addr + k * size, size)
    return BATCH_CALLS * count * size / (time.perf_counter() - began)


def through_a_socket(size, count):
    """Bytes a second of requests of a few bytes that are answered with `count * size`, over loopback."""
    listening = socket.create_server(("127.0.0.1", 0))
    total = size * count
    calls = BATCH_CALLS if count > 1 else 100

    def serve():
        peer, _ = listening.accept()
        data = memoryview(bytearray(total))
        with peer:
            while peer.recv(64):
                peer.sendall(data)

    serving = threading.Thread(target=serve, daemon=True)
    serving.start()
    with socket.create_connection(listening.getsockname()) as asking:
        asking.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        into = memoryview(bytearray(total))
        began = time.perf_counter()
        for _ in range(calls):
            asking.sendall(b"get")
            left = total
            while left:
                left -= asking.recv_into(into[total - left :])
        took = time.perf_counter() - began
    serving.join()
    listening.close()
    return calls * total / took


def durable(size):
    """Median microseconds of two appends of that size, each with fdatasync."""
    took = []
    with tempfile.TemporaryFile() as file:
        for _ in range(100):
            began = time.perf_counter()
            for _ in range(2):
                os.write(file.fileno(), bytes(size))
                os.fdatasync(file.fileno())
            took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e6


def ceiling(case, placement):
    kind, size = case.split("/")
    if kind == "get_threads":
        return through_a_socket(SIZES[size], 1) / SIZES[size]
    if kind.endswith("_alone"):
        trips = ROUND_TRIPS[kind] * 1e6 * SIZES[size] / through_a_socket(SIZES[size], 1)
        return trips + (durable(300) if kind == "put_alone" else 0)
    if kind.endswith("is_exist"):
        calls = through_a_socket(64, 1) / 64
        return calls * int(size)
    count = BATCH[size] if kind.startswith("batch_") else 1
    return (copied if placement == "local" else through_a_socket)(SIZES[size], count)


# The driver.


class Process:
    def __init__(self, python, *arguments):
        self._process = subprocess.Popen(
            [python, os.path.abspath(__file__), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.read("ready")

    def read(self, wanted=None):
        for line in self._process.stdout:
            if wanted is None and line.startswith("{"):
                return json.loads(line)
            if wanted is not None and line.strip() == wanted:
                return None
        raise SystemExit(f"a worker ended: {self._process.args} ({self._process.wait()})")

    def ask(self, line):
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self.read()["figure"]

    def end(self):
        self._process.stdin.close()
        ended(self._process)


def ended(process):
    """Waits for a process, for a while."""
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Master:
    """The `mooncake_master` of an environment, on a free port, until `end`."""

    def __init__(self, python):
        with socket.create_server(("127.0.0.1", 0)) as free, socket.create_server(("127.0.0.1", 0)) as also_free:
            port, metrics_port = free.getsockname()[1], also_free.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        self._directory = tempfile.TemporaryDirectory(prefix="mooncake-api-")
        script = os.path.join(os.path.dirname(python), "mooncake_master")
        program = [script] if os.path.exists(script) else [python, "-m", "mooncake.cli"]
        command = [*program, f"--rpc_port={port}", f"--metrics_port={metrics_port}"]
        with open(os.path.join(self._directory.name, "log"), "wb") as log:
            self._process = subprocess.Popen(
                command, cwd=self._directory.name, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        deadline = time.monotonic() + UP_S
        while not self._listens(port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                with open(os.path.join(self._directory.name, "log"), errors="replace") as log:
                    told = log.read()[-2000:]
                self.end()
                raise SystemExit(f"the master did not come up: {command}\n{told}")
            time.sleep(0.05)

    def _listens(self, port):
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    def end(self):
        self._process.terminate()
        ended(self._process)
        self._directory.cleanup()


def unit_of(case):
    if "_alone" in case:
        return "us"
    return "keys/s" if "is_exist" in case or "_threads" in case else "bytes/s"


def table(rows, names):
    """Lines of a table: a row a case; with two systems, the ratio of the first to the second."""
    heads = ["case", "unit", *names, *(["ratio"] if len(names) == 2 else []), "ceiling"]
    lines = [heads]
    for case, of in rows.items():
        scale, unit = {"us": (1, "us"), "keys/s": (1e3, "k keys/s"), "bytes/s": (1e6, "MB/s")}[of[names[0]]["unit"]]
        cells = [f"{of[name]['median'] / scale:.1f} ({of[name]['min'] / scale:.1f}-{of[name]['max'] / scale:.1f})" for name in names]
        ratio = [f"{of[names[0]]['median'] / of[names[1]]['median']:.2f}"] if len(names) == 2 else []
        lines.append([case, unit, *cells, *ratio, f"{of[names[0]]['ceiling'] / scale:.1f}"])
    widths = [max(len(line[n]) for line in lines) for n in range(len(heads))]
    lines.insert(1, ["-" * width for width in widths])
    return ["| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths)) + " |" for line in lines]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", action="append", required=True, metavar="NAME=PYTHON[=MASTER]")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", default="", help="only cases in which this pattern is found")
    parser.add_argument("--placement", default="remote,local")
    arguments = parser.parse_args()
    systems = [each.split("=", 2) for each in arguments.system]
    if not all(len(each) > 1 for each in systems):
        parser.error("--system takes NAME=PYTHON, or NAME=PYTHON=MASTER")
    moves = ["put", "put_from", "get", "get_into", "batch_put_from", "batch_get_into"]
    cases = [f"{move}/{size}" for size in SIZES for move in moves] + ["is_exist/1", "batch_is_exist/32", "batch_is_exist/500"]
    cases += ["get_alone/4KiB", "get_threads/4KiB", "put_alone/4KiB"]
    cases = [case for case in cases if re.search(arguments.case, case)]
    started, rows = [], {}
    try:
        for system in systems:
            if len(system) == 2:
                started.append(Master(system[1]))
                system.append(started[-1].address)
        measure(systems, cases, arguments.placement.split(","), arguments.rounds, rows)
    finally:
        for master in started:
            master.end()
    print("\n".join(table(rows, [name for name, _, _ in systems])), file=sys.stderr)


def measure(systems, cases, placements, rounds, rows):
    """One JSON object a case and system on stdout, and in `rows`."""
    for placement in placements:
        owners, workers = [], {}
        for name, python, master in systems:
            if placement == "remote":
                owners.append(Process(python, "--owner", master))
            workers[name] = Process(python, "--worker", master, placement)
        for case in cases:
            if placement == "local" and ("is_exist" in case or "threads" in case or "alone" in case):
                continue
            figures, ceilings = {name: [] for name in workers}, []
            for _ in range(rounds):
                for name, worker in workers.items():
                    figures[name].append(worker.ask(case))
                ceilings.append(ceiling(case, placement))
            best = statistics.median(ceilings)
            for name, found in figures.items():
                median = statistics.median(found)
                row = {
                    "suite": "mooncake-api", "case": f"{placement}/{case}", "system": name, "runs": len(found),
                    "median": round(median, 1), "min": round(min(found), 1), "max": round(max(found), 1),
                    "unit": unit_of(case), "ceiling": round(best, 1),
                    "ratio_to_ceiling": round(median / best, 4), "load1": round(os.getloadavg()[0], 2),
                }  # fmt: skip
                rows.setdefault(row["case"], {})[name] = row
                print(json.dumps(row), flush=True)
        for process in [*workers.values(), *owners]:
            process.end()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--owner"]:
        owner(sys.argv[2])
    elif sys.argv[1:2] == ["--worker"]:
        work(sys.argv[2], sys.argv[3])
    else:
        main()
