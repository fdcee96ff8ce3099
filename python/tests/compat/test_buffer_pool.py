"""The pool of host memory: reuse, limits, waiting, and that nobody is given what somebody still sees."""

import gc
import threading

import pytest

from compat.rig import MIB, pattern, until
from mooncake.buffer_pool import BufferPool, RegisteredBufferPool
from mooncake.store import MooncakeDistributedStore


@pytest.fixture
def pool(store):
    made = BufferPool(store, max_bytes=16 * MIB, alignment=4096)
    yield made
    gc.collect()
    made.close()


def test_a_lease(pool, store, key):
    lease = pool.acquire(1000)
    assert lease.size == 1000 and lease.ptr and lease.ptr % 4096 == 0
    lease.buffer[:] = pattern(1000)
    assert store.put_from(key, lease.ptr, 1000) == 0 and store.get(key) == pattern(1000)
    lease.release()
    lease.release()
    for name in ("ptr", "size", "buffer"):
        with pytest.raises(RuntimeError, match="closed"):
            getattr(lease, name)


def test_memory_is_used_again(pool):
    with pool.acquire(1000) as lease:
        address = lease.ptr
    with pool.buffer(900) as lease:
        assert lease.ptr == address


def test_a_view_keeps_the_memory(pool):
    lease = pool.acquire(16 * MIB)
    view = lease.buffer[100:200]
    lease.release()
    # Tried with the memory given back at release: the second lease is of the memory that the view still sees.
    with pytest.raises(RuntimeError, match="exhausted"):
        pool.acquire(16 * MIB, block=False)
    view[:5] = b"still"
    with pytest.raises(RuntimeError, match="active leases"):
        pool.close()
    del view
    pool.acquire(16 * MIB, block=False).release()


def test_exhaustion(pool):
    lease = pool.acquire(16 * MIB)
    with pytest.raises(RuntimeError, match="exhausted"):
        pool.acquire(1, block=False)
    with pytest.raises(RuntimeError, match="timed out"):
        pool.acquire(1, timeout=0.01)
    with pytest.raises(RuntimeError, match="capacity"):
        pool.acquire(16 * MIB + 1)
    with pytest.raises(RuntimeError, match="positive"):
        pool.acquire(0)
    lease.release()


def test_a_waiter_gets_what_is_released(pool):
    lease = pool.acquire(16 * MIB)
    got = []
    waiters = [threading.Thread(target=lambda: got.append(pool.acquire(4 * MIB, timeout=30))) for _ in range(4)]
    for waiter in waiters:
        waiter.start()
    lease.release()
    for waiter in waiters:
        waiter.join()
    assert len({each.ptr for each in got}) == 4
    got.clear()


def test_other_sizes_make_room(pool):
    leases = [pool.acquire(MIB) for _ in range(16)]
    del leases
    pool.acquire(16 * MIB, block=False).release()


def test_prewarm_and_limits(store):
    pool = RegisteredBufferPool(store, max_bytes=8 * MIB, alignment=4096, max_regions=2, prewarm_size=MIB, prewarm_count=2)
    with pytest.raises(RuntimeError, match="exhausted"):
        pool.prewarm(MIB, 1)
    one, two = pool.acquire(MIB), pool.acquire(MIB)
    with pytest.raises(RuntimeError, match="exhausted"):
        pool.acquire(MIB, block=False)
    del one, two
    pool.close()
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.acquire(1)


@pytest.mark.parametrize("alignment", [64, 4096, 2 * MIB, 8 * MIB])
def test_alignment(store, alignment):
    pool = BufferPool(store, max_bytes=4 * MIB, alignment=alignment)
    with pool.acquire(100) as lease:
        assert lease.ptr % alignment == 0
    pool.close()


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"max_bytes": -1}, TypeError),
        ({"alignment": 3}, RuntimeError),
        ({"min_size_class": 0}, RuntimeError),
        ({"unknown": 1}, TypeError),
    ],
)
def test_settings_that_cannot_be(store, settings, kind):
    with pytest.raises(kind):
        BufferPool(store, **settings)


def test_a_pool_needs_a_store_that_is_set_up():
    with pytest.raises(RuntimeError, match="store parameter"):
        BufferPool(object())
    with pytest.raises(RuntimeError, match="not initialized"):
        BufferPool(MooncakeDistributedStore())


def test_many_threads(store):
    pool = BufferPool(store, max_bytes=4 * MIB, alignment=4096)
    seen, wrong = set(), []
    lock = threading.Lock()

    def work(number):
        for turn in range(200):
            with pool.acquire(1 + (turn * 7919) % MIB, timeout=60) as lease:
                with lock:
                    if lease.ptr in seen:
                        wrong.append(lease.ptr)
                    seen.add(lease.ptr)
                lease.buffer[:1] = bytes([number])
                with lock:
                    seen.remove(lease.ptr)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    until("every lease is back", lambda: gc.collect() >= 0 and pool._leased == 0)
    pool.close()
