"""Parts of objects: ranged reads, and sessions that read or write layer by layer."""

import pytest

from compat.rig import MIB, Buffer, pattern
from mooncake.store import ReplicateConfig


def test_the_documented_example(store, buffer, key):
    first, second = pattern(64, 1), pattern(64, 2)
    store.put_batch([f"{key}1", f"{key}2"], [first, second])
    results = store.get_into_ranges(
        [buffer.addr, buffer.addr + 32],
        [[f"{key}1", f"{key}2"], [f"{key}2", f"{key}1"]],
        [[[0, 20], [8]], [[4], [16]]],
        [[[1, 30], [2]], [[0], [10]]],
        [[[4, 3], [5]], [[6], [4]]],
    )
    assert results == [[[4, 3], [5]], [[6], [4]]]
    assert buffer[0:4] == first[1:5] and buffer[20:23] == first[30:33] and buffer[8:13] == second[2:7]
    assert buffer[36:42] == second[0:6] and buffer[48:52] == first[10:14]


def test_fragments_fail_one_by_one(store, buffer, key):
    store.put(key, pattern(50))
    results = store.get_into_ranges(
        [buffer.addr], [[key, f"{key}-none"]], [[[0, 10, 20], [30]]], [[[5, 45, 0], [0]]], [[[5, 10, 0], [3]]]
    )
    assert results == [[[5, -600, 0], [-704]]]


def test_shapes_that_do_not_match(store, buffer, key):
    store.put(key, pattern(50))
    assert store.get_into_ranges([buffer.addr], [[key], [key]], [[[0]]], [[[0]]], [[[1]]]) == [[[-600]]]
    assert store.get_into_ranges([buffer.addr], [[key]], [[[0, 1]]], [[[0]]], [[[1]]]) == [[[-600]]]
    assert store.get_into_ranges([], [], [], [], []) == []


def test_a_registered_buffer_is_not_left(store, key):
    store.put(key, pattern(50))
    memory = Buffer(8192)
    assert store.register_buffer(memory.addr, 100) == 0
    assert store.get_into_ranges([memory.addr], [[key]], [[[90]]], [[[0]]], [[[20]]]) == [[[-600]]]
    assert store.get_into_ranges([memory.addr], [[key]], [[[80]]], [[[0]]], [[[20]]]) == [[[20]]]
    store.unregister_buffer(memory.addr)


def test_many_ranges_of_a_large_object(store, buffer, key):
    value = pattern(3_000_001)
    store.put(key, value)
    sizes = [1 + 37 * n for n in range(200)]
    sources = [14_000 * n for n in range(200)]
    targets = [8000 * n for n in range(200)]
    assert store.get_into_ranges([buffer.addr], [[key]], [[targets]], [[sources]], [[sizes]]) == [[sizes]]
    for size, source, target in zip(sizes, sources, targets):
        assert buffer[target : target + size] == value[source : source + size]


def test_a_read_session(store, buffer, key):
    value = pattern(1000)
    store.put(key, value)
    assert store.batch_get_session_start([key, f"{key}-none"]) == [0, -704]
    for layer in range(10):
        results = store.batch_get_into_multi_buffer_ranges(
            [key, f"{key}-none"],
            [[buffer.addr + 100 * layer, buffer.addr + 100 * layer + 50], [buffer.addr]],
            [[50, 50], [1]],
            [[100 * layer, 100 * layer + 50], [0]],
        )
        assert results == [100, -600]
    assert buffer[:1000] == value
    assert store.batch_get_into_multi_buffer_ranges([key], [[buffer.addr]], [[5]], [[998]]) == [-600]
    assert store.batch_get_session_end([key, f"{key}-none"]) == 0
    assert store.batch_get_into_multi_buffer_ranges([key], [[buffer.addr]], [[5]], [[0]]) == [-600]
    assert store.batch_get_session_start([]) == [] and store.batch_get_session_end([]) == 0


def test_a_read_session_never_mixes_two_objects(store, buffer, key):
    store.put(key, b"a" * 1000)
    assert store.batch_get_session_start([key]) == [0]
    assert store.batch_get_into_multi_buffer_ranges([key], [[buffer.addr]], [[500]], [[0]]) == [500]
    assert store.upsert(key, b"b" * 1000) == 0
    # Tried without the comparison of object ids: the second half is of the new object, and counts as read.
    assert store.batch_get_into_multi_buffer_ranges([key], [[buffer.addr]], [[500]], [[500]]) == [-704]
    assert store.remove(key, True) == 0
    assert store.batch_get_into_multi_buffer_ranges([key], [[buffer.addr]], [[500]], [[500]]) == [-704]


def test_a_put_session(store, buffer, key):
    a, b, other = f"{key}-a", f"{key}-b", f"{key}-other"
    store.put(other, b"v" * 50)
    assert store.batch_put_session_start([a, b, other], [20, 30, 50]) == [0, 0, -705]
    assert store.batch_put_session_start([a], [20]) == [-600]
    assert store.is_exist(a) == 0 and store.get(a) == b""
    buffer[:] = pattern(100)
    ranges = store.batch_put_from_multi_buffer_ranges
    assert ranges([a], [[buffer.addr, buffer.addr + 10]], [[10, 10]], [[0, 10]]) == [20]
    assert ranges([a], [[buffer.addr]], [[10]], [[15]]) == [-600]
    assert ranges([a], [[0]], [[10]], [[0]]) == [-600]
    assert ranges([f"{key}-none"], [[buffer.addr]], [[1]], [[0]]) == [-600]
    assert store.is_exist(a) == 0
    assert store.batch_put_session_end([a]) == [0]
    assert store.get(a) == pattern(100)[:20]
    assert store.batch_put_session_end([a]) == [-600]
    assert store.batch_put_session_revoke([b, a, f"{key}-none"]) == [0, -600, -600]
    assert store.batch_put_session_end([b]) == [-600] and store.is_exist(b) == 0


@pytest.mark.parametrize("sizes", [[0], [-1], []])
def test_a_put_session_of_nothing(store, key, sizes):
    assert store.batch_put_session_start([key], sizes) == [-600]


def test_what_is_put_together_has_a_limit(make_store, key, caplog, monkeypatch):
    monkeypatch.setattr("mooncake.store.sessions.STAGED_BYTES_MIN", MIB)
    store = make_store(buffer=0)
    a, b = f"{key}-1", f"{key}-2"
    assert store.batch_put_session_start([a, b], [600_000, 600_000]) == [0, -200]
    assert "600000 bytes of 1048576 are being put together" in caplog.text and b in caplog.text
    assert store.batch_put_session_revoke([a, b]) == [0, -600]
    assert store.batch_put_session_start([b], [600_000]) == [0]
    assert store.batch_put_session_end([b]) == [0]
    assert store.batch_put_session_start([a], [600_000]) == [0], "what was stored counts no longer"
    with_more = make_store(segment=0, buffer=4 * MIB)
    keys = [f"{key}-{n}" for n in range(3, 9)]
    assert with_more.batch_put_session_start(keys, [MIB] * 6) == [0, 0, 0, 0, -200, -200]


def test_sessions_have_a_limit(store, key, caplog, monkeypatch):
    monkeypatch.setattr("mooncake.store.sessions.SESSIONS_MAX", 2)
    keys = [f"{key}-{n}" for n in range(3)]
    assert store.batch_put_session_start(keys, [10, 10, 10]) == [0, 0, -200]
    assert "2 are open, the limit" in caplog.text
    assert store.batch_put_session_end(keys) == [0, 0, -600]
    assert store.batch_put_session_start(keys, [10, 10, 10]) == [-705, -705, 0]
    assert store.batch_put_session_end(keys) == [-600, -600, 0]
    caplog.clear()
    assert store.batch_get_session_start(keys) == [0, 0, -200]
    assert "2 are open, the limit" in caplog.text
    assert store.batch_get_session_end(keys) == 0


def test_a_put_session_has_a_config(store, key):
    config = ReplicateConfig()
    config.group_ids = ["g", ""]
    assert store.batch_put_session_start([f"{key}-1"], [10], config) == [-600]
    assert store.batch_put_session_start([f"{key}-1", f"{key}-2"], [10, 10], config) == [0, 0]
    assert store.batch_put_session_end([f"{key}-1", f"{key}-2"]) == [0, 0]


def test_another_writer_of_the_key_is_not_overwritten(store, make_store, buffer, key):
    assert store.batch_put_session_start([key], [10]) == [0]
    assert make_store(segment=0).put(key, b"other") == 0
    assert store.batch_put_session_end([key]) == [0]
    assert store.get(key) == b"other"
