"""The store for asyncio."""

import asyncio

import pytest

from compat.rig import Buffer, pattern
from mooncake.async_store import MooncakeDistributedStoreAsync


@pytest.fixture
def store(make_store):
    return make_store(MooncakeDistributedStoreAsync)


def test_calls_are_awaited(store, key):
    async def run():
        value = pattern(10_000)
        assert await store.async_put(key, value) == 0
        assert await store.async_get(key) == value
        assert await store.async_is_exist(key) == 1
        assert await store.async_get_size(key) == 10_000
        assert await store.async_put_batch([f"{key}-1", f"{key}-2"], [b"1", b"2"]) == 0
        assert await store.async_get_batch([f"{key}-1", f"{key}-2"]) == [b"1", b"2"]
        memory = Buffer(10_000)
        assert await store.async_get_into(key, buffer_ptr=memory.addr, size=10_000) == 10_000
        assert memory[:] == value
        assert await store.async_upsert(key, b"new") == 0
        assert await store.async_remove(key, force=True) == 0
        assert await store.async_get(key) == b""
        assert await store.async_health_check() == 0

    asyncio.run(run())


def test_ranges_and_sessions_are_awaited(store, key):
    async def run():
        value, memory = pattern(1000), Buffer(1000)
        assert await store.async_batch_put_session_start([key], [1000]) == [0]
        memory[:] = value
        assert await store.async_batch_put_from_multi_buffer_ranges([key], [[memory.addr]], [[1000]], [[0]]) == [1000]
        assert await store.async_batch_put_session_end([key]) == [0]
        memory[:] = bytes(1000)
        assert await store.async_get_into_ranges([memory.addr], [[key]], [[[10]]], [[[100]]], [[[50]]]) == [[[50]]]
        assert memory[10:60] == value[100:150]
        assert await store.async_batch_get_session_start([key]) == [0]
        assert await store.async_batch_get_into_multi_buffer_ranges([key], [[memory.addr]], [[20]], [[980]]) == [20]
        assert memory[:20] == value[980:]
        assert await store.async_batch_get_session_end([key]) == 0

    asyncio.run(run())


def test_many_at_once(store, key):
    async def run():
        values = {f"{key}-{n}": pattern(5000, n) for n in range(100)}
        assert await asyncio.gather(*(store.async_put(each, value) for each, value in values.items())) == [0] * 100
        assert await asyncio.gather(*(store.async_get(each) for each in values)) == list(values.values())

    asyncio.run(run())


def test_plain_calls_are_there_too(store, key):
    assert store.put(key, b"v") == 0 and store.get(key) == b"v"


@pytest.mark.parametrize("name", ["async_nothing", "nothing", "async_", "async__client"])
def test_names_that_are_not_there(store, name):
    with pytest.raises(AttributeError):
        getattr(store, name)


def test_before_setup():
    store = MooncakeDistributedStoreAsync()
    assert asyncio.run(store.async_put("k", b"v")) == -600
