"""`AsyncStore`: the same results, many at once, cancelled, in loops that end."""

import asyncio
import gc
import os
import signal
import threading

import pytest

import tidepool
from support import free_port, freeze
from tidepool import errors


def test_every_call(pool, keys):
    async def run():
        async with tidepool.AsyncStore.connect(pool.masters) as store:
            a, b = keys[:2]
            assert (await store.put(a, b"one")).copies == 1
            assert await store.get(a) == b"one" and await store.get_bytes(a) == b"one"
            await store.upsert(a, b"other")
            assert all(await store.put_many([a, b], [b"x", b"two"]))
            assert await store.get_many([a, b]) == [b"other", b"two"]
            buffer = bytearray(10)
            assert await store.get_into(b, buffer) == 3 and buffer[:3] == b"two"
            assert await store.get_range(a, 1, 3) == b"the"
            assert await store.get_range_into(a, 1, memoryview(buffer)[:2]) == 2
            assert await store.exist_many([a, "never-put"]) == [True, False]
            assert (await store.stat(a))["length"] == 5
            assert {found["key"] async for found in store.list(a)} == {a.encode()}
            await store.pin(a)
            await store.unpin(a)
            assert await store.ping() > 0 and await store.segments() and store.leader() == pool.masters
            with pytest.raises(errors.NotFound) as raised:
                await store.get("never-put")
            assert raised.value.key == b"never-put"
            assert await store.get("never-put", default=1) == 1
            await store.remove(a, force=True)
            assert (await store.remove_matching(b, force=True))["removed"] == 1
        with pytest.raises(errors.Unavailable):
            await store.get(b)

    asyncio.run(run())


def test_many_at_once_take_no_thread_each(pool, key):
    async def run():
        store = await tidepool.AsyncStore.connect(pool.masters)
        before = threading.active_count()
        names = [f"{key}-{i}" for i in range(500)]
        await asyncio.gather(*(store.put(name, name.encode() * 100) for name in names))
        values = await asyncio.gather(*(store.get(name) for name in names))
        assert all(value == name.encode() * 100 for name, value in zip(names, values))
        assert threading.active_count() == before
        store.close()

    asyncio.run(run())


@pytest.fixture
def stopped_pool():
    """A pool that was connected to, and then stopped: calls stay under way until their deadline of a minute."""
    with tidepool.dev("64MiB") as pool:
        with pool.store():
            yield pool
        os.kill(pool.pid, signal.SIGCONT)


def test_a_cancelled_call_gives_its_memory_back(stopped_pool, key):
    """Tried without aborting the call: fails."""

    async def run():
        store = await tidepool.AsyncStore.connect(stopped_pool.masters)
        freeze(stopped_pool.pid)
        value, target = bytearray(1 << 20), bytearray(1 << 20)
        calls = [store.put(key, value, deadline=60.0), store.get_into(key, target, deadline=60.0)]
        tasks = [asyncio.create_task(call) for call in calls]
        done, _ = await asyncio.wait(tasks, timeout=0.1)
        assert not done
        for task in tasks:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        for buffer in (value, target):
            for _ in range(500):
                try:
                    buffer.append(1)
                    break
                except BufferError:
                    await asyncio.sleep(0.01)
            else:
                pytest.fail("the buffer is held by a call that was cancelled")
        os.kill(stopped_pool.pid, signal.SIGCONT)
        assert await store.exist("never-put", deadline=30.0) is False, "the store goes on"
        store.close()

    asyncio.run(run())


def test_a_deadline_ends_an_awaited_call(pool):
    async def run():
        with pytest.raises(tidepool.TidepoolError):
            await tidepool.AsyncStore.connect(f"127.0.0.1:{free_port()}", connect_deadline=0.2)

    asyncio.run(run())


def test_closing_ends_what_is_under_way(stopped_pool, key):
    """Tried without watching for the close: fails, at the deadline of the calls."""

    async def run():
        store = await tidepool.AsyncStore.connect(stopped_pool.masters)
        freeze(stopped_pool.pid)
        calls = [asyncio.create_task(store.put(f"{key}-{i}", bytes(1000), deadline=60.0)) for i in range(8)]
        done, _ = await asyncio.wait(calls, timeout=0.1)
        assert not done
        store.close()
        for result in await asyncio.gather(*calls, return_exceptions=True):
            assert isinstance(result, errors.Unavailable) and "closed" in result.message, result

    asyncio.run(run())


def test_a_loop_that_closes_with_calls_under_way(pool, key):
    async def run():
        store = await tidepool.AsyncStore.connect(pool.masters)
        store.native.put_many([key], [bytes(16 << 20)], loop=asyncio.get_running_loop())

    for _ in range(5):
        asyncio.run(run())
    gc.collect()
    with pool.store() as store:
        assert store.exist("never-put") is False
