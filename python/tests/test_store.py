"""What `Store` does with one key, and with many."""

import pytest

import tidepool
from support import until
from tidepool import errors


def test_put_and_get_back(store, key):
    result = store.put(key, b"hello")
    assert result and (result.copies, result.existed) == (1, False)
    value = store.get(key)
    assert isinstance(value, memoryview) and value.readonly
    assert value == b"hello" and store.get_bytes(key) == b"hello"
    assert store.get(key.encode()) == b"hello", "the same key as bytes"


def test_a_second_put_keeps_the_first_and_an_upsert_replaces_it(store, key):
    store.put(key, b"first")
    assert store.put(key, b"second").existed
    assert store.get(key) == b"first"
    assert store.upsert(key, b"third, longer").copies == 1
    assert store.get(key) == b"third, longer"
    with pytest.raises(ValueError):
        store.upsert(key, b"x", tidepool.PutOptions())


def test_a_miss_is_an_error_with_its_facts(store, key):
    with pytest.raises(errors.NotFound) as raised:
        store.get(key)
    error = raised.value
    assert isinstance(error, tidepool.TidepoolError)
    assert (error.name, error.code, error.mooncake) == ("OBJECT_NOT_FOUND", 20, -704)
    assert error.key == key.encode() and not error.retryable
    assert store.get(key, default=None) is None
    assert not store.exist(key)


def test_batches_have_a_result_a_key(store, keys):
    values = [bytes([i]) * (i * 100 + 1) for i in range(len(keys))]
    assert all(store.put_many(keys, values))
    assert store.get_many(keys) == values
    asked = [keys[0], "never-put", keys[0], "x" * 5000]
    first, missing, again, too_long = store.get_many(asked)
    assert first == again == values[0]
    assert not missing and missing.name == "OBJECT_NOT_FOUND" and missing.key == b"never-put"
    assert too_long.name == "INVALID_KEY"
    assert store.exist_many(asked)[:3] == [True, False, True]
    with pytest.raises(errors.NotFound):
        raise missing.exception()
    assert store.remove_many(keys[1:], force=True) == [None] * (len(keys) - 1)


def test_values_of_several_parts_are_joined(store, key):
    store.put(key, [b"ab", bytearray(b"cd"), memoryview(b"ef"), b""])
    assert store.get(key) == b"abcdef"
    head, tail = bytearray(2), bytearray(10)
    assert store.get_into(key, [head, tail]) == 6
    assert (bytes(head), bytes(tail[:4])) == (b"ab", b"cdef")


def test_ranges(store, key):
    payload = bytes(range(256)) * 1024
    store.put(key, payload)
    assert store.get_range(key, 70_000, 100) == payload[70_000:70_100]
    part = bytearray(1000)
    assert store.get_range_into(key, 131_000, part) == 1000
    assert part == payload[131_000:132_000]
    with pytest.raises(errors.BadRequest):
        store.get_range(key, len(payload) - 1, 2)


def test_stat_list_and_remove_by_match(store, key):
    names = {f"{key}/{i}".encode() for i in range(5)}
    options = tidepool.PutOptions(data_type="tensor", hard_pin=True)
    store.put_many(sorted(names), [b"12345"] * 5, options)
    stat = store.stat(f"{key}/0")
    assert (stat["length"], stat["state"], stat["data_type"], stat["hard_pinned"]) == (5, "COMPLETE", "tensor", True)
    (replica,) = stat["replicas"]
    assert replica["kind"] == "memory" and replica["listed"] and replica["endpoint"].startswith("127.0.0.1:")
    assert {found["key"] for found in store.list(f"{key}/")} == names
    assert {found["key"] for found in store.list(f"{key}/", "/[01]$")} == {f"{key}/0".encode(), f"{key}/1".encode()}
    assert not list(store.list(f"{key}/", data_type="weight"))
    assert store.remove_matching(f"{key}/", "/[01]$")["removed"] == 2
    assert store.remove_matching(f"{key}/")["removed"] == 3


def test_a_lease_refuses_a_remove_unless_forced(store, key):
    store.put(key, b"x")
    assert store.exist(key)
    with pytest.raises(errors.Conflict) as raised:
        store.remove(key)
    assert raised.value.mooncake == -706 and raised.value.retryable
    store.remove(key, force=True)
    assert not store.exist(key)


def test_pins(store, key):
    store.put(key, b"x")
    store.pin(key, ttl=60.0)
    assert 50 < store.stat(key)["soft_pin_remaining"] <= 60
    store.unpin(key)
    assert store.stat(key)["soft_pin_remaining"] == 0
    with pytest.raises(errors.NotFound):
        store.pin("never-put")


def test_groups(store, keys):
    store.put_many(keys[:3], [b"x"] * 3, groups=["g", "g", None])
    assert [store.stat(key)["group"] for key in keys[:3]] == [b"g", b"g", b""]


def test_looking_at_the_cluster(store, pool):
    (segment,) = [segment for segment in store.segments() if segment["capacity"] == 512 << 20]
    assert (segment["name"], segment["state"]) == ("dram-0", "MOUNTED") and segment["free"] > 0
    assert store.leader() == pool.masters
    assert 0 < store.ping() < 5
    assert store.metrics()["requests_sent"] > 0


def test_context_manager_and_closed_store(pool, key):
    with pool.store() as store:
        store.put(key, b"x")
    assert store.closed and "closed" in repr(store)
    for call in (lambda: store.get(key), lambda: store.put(key, b"y"), store.segments, store.leader):
        with pytest.raises(errors.Unavailable, match="closed"):
            call()
    store.close()


def test_tasks(pool, store, key):
    native = store.native
    store.put(key, b"x" * 1000)
    with tidepool.LocalNode(pool.masters, 8 << 20, name="other:1") as node:
        assert node.segments == ["other:1"] and node.ready()
        task = native.create_copy_task(key, ["other:1"])
        until(lambda: native.query_task(task)["state"] == "SUCCEEDED", what="the copy")
        assert {replica["segment"] for replica in store.stat(key)["replicas"]} == {"dram-0", "other:1"}
        moved = key + "-moved"
        store.put(moved, b"x", tidepool.PutOptions(preferred_segments=["dram-0"]))
        task = native.create_move_task(moved, "dram-0", "other:1")
        until(lambda: native.query_task(task)["state"] == "SUCCEEDED", what="the move")
        assert {replica["segment"] for replica in store.stat(moved)["replicas"]} == {"other:1"}
        with pytest.raises(errors.NotFound):
            native.query_task(1 << 60)
        with pytest.raises(errors.NotFound):
            native.create_copy_task(key, ["no-such-segment"])
    assert store.exist_many([key, moved]) == [True, False], "the only copy of one went with its node"
