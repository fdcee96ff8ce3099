"""Many threads, large objects, small space: nothing crashes, nothing is mixed up, nothing leaks."""

import os
import threading

import pytest

from compat.rig import MIB, Buffer, pattern
from mooncake.store import MooncakeDistributedStore


def available():
    """Bytes of memory that can be had, as the kernel estimates it."""
    with open("/proc/meminfo", encoding="ascii") as told:
        return next(int(line.split()[1]) * 1024 for line in told if line.startswith("MemAvailable"))


def in_threads(count, work):
    """Runs work(number) in so many threads; what they raised."""
    raised = []

    def run(number):
        try:
            work(number)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_eight_threads_of_a_hundred_mebibytes_each(make_store):
    store = make_store(segment=1024 * MIB, buffer=128 * MIB)
    barrier = threading.Barrier(8)
    values = [pattern(MIB, number) for number in range(8)]

    def work(number):
        keys = [f"thread-{number}-{n}" for n in range(100)]
        barrier.wait()
        for key in keys:
            assert store.put(key, values[number]) == 0
        barrier.wait()
        for key in keys:
            assert store.get(key) == values[number]
        barrier.wait()
        for key in keys:
            assert store.remove(key, True) == 0
        assert store.batch_is_exist(keys) == [0] * 100

    assert not in_threads(8, work)


# User report 51: a crash when concurrency went from 64 to 512.
def test_case_051_512_threads_of_batches_of_64(make_store):
    store = make_store(segment=256 * MIB)
    size = 512
    memory = Buffer(512 * 64 * size * 2)
    assert store.register_buffer(memory.addr, memory.size) == 0
    files = len(os.listdir("/proc/self/fd"))

    def work(number):
        keys = [f"batch-{number}-{n}" for n in range(64)]
        half = 64 * size
        start = number * 2 * half
        memory[start : start + half] = pattern(half, number)
        at = [memory.addr + start + n * size for n in range(64)]
        into = [each + half for each in at]
        for _ in range(3):
            assert store.batch_put_from(keys, at, [size] * 64) == [0] * 64
            assert store.batch_is_exist(keys) == [1] * 64
            assert store.batch_get_into(keys, into, [size] * 64) == [size] * 64
            assert memory[start + half : start + 2 * half] == pattern(half, number)
            assert store.batch_remove(keys, True) == [0] * 64

    assert not in_threads(512, work)[:3]
    assert store.put("after", b"v") == 0
    assert len(os.listdir("/proc/self/fd")) <= files + 16
    store.unregister_buffer(memory.addr)


def test_a_value_of_more_than_two_gibibytes(make_store, monkeypatch):
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "120000")
    size = (2 << 30) + 1
    if available() < 4 * size:
        pytest.skip("needs 8 GiB of free memory")
    store = make_store(segment=size + 512 * MIB)
    memory = Buffer(size)
    marks = [0, 1 << 20, (2 << 30) - 100, (2 << 30) - 5]
    for mark in marks:
        memory[mark : mark + 10] = pattern(10, mark)[: size - mark]
    assert store.put_from("large", memory.addr, size) == 0
    assert store.get_size("large") == size
    for mark in marks:
        memory[mark : mark + 10] = bytes(min(10, size - mark))
    assert store.get_into("large", memory.addr, size) == size
    for mark in marks:
        assert memory[mark : mark + 10] == pattern(10, mark)[: size - mark]
    assert store.remove("large", True) == 0


def test_a_full_pool_takes_new_objects_or_says_so(make_store):
    store = make_store(segment=32 * MIB)
    memory = Buffer(MIB)
    results = [store.put_from(f"fill-{n}", memory.addr, MIB) for n in range(100)]
    assert set(results) <= {0, -200}
    assert results.count(0) >= 24
    assert store.put_from("too-large", memory.addr, MIB) in (0, -200)
    assert store.put("far-too-large", bytes(64 * MIB)) == -200


def test_one_object_without_room_fails_alone(make_store):
    store = make_store(segment=32 * MIB)
    memory = Buffer(40 * MIB)
    sizes = [MIB, MIB, 40 * MIB, MIB]
    keys = [f"room-{n}" for n in range(4)]
    assert store.batch_put_from(keys, [memory.addr] * 4, sizes) == [0, 0, -200, 0]
    assert store.batch_is_exist(keys) == [1, 1, 0, 1]


def test_stores_come_and_go(cluster):
    files = None
    for turn in range(20):
        store = MooncakeDistributedStore()
        assert store.setup("localhost", "P2PHANDSHAKE", 16 * MIB, MIB, "tcp", "", cluster.addresses) == 0
        assert store.close() == 0
        if turn == 4:
            files = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) <= files + 8


@pytest.mark.parametrize("method", ["put", "get", "batch_is_exist"])
def test_close_ends_calls_that_are_under_way(make_store, method):
    store = make_store()
    arguments = {"put": ("k", bytes(MIB)), "get": ("k",), "batch_is_exist": (["k"],)}[method]
    stop = threading.Event()

    def work(number):
        while not stop.is_set():
            getattr(store, method)(*arguments)

    raised = []
    workers = threading.Thread(target=lambda: raised.extend(in_threads(8, work)))
    workers.start()
    assert store.close() == 0
    stop.set()
    workers.join()
    assert not raised
    assert store.health_check() == 1
