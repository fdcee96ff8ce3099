"""Upserts: insert or replace, whole, for readers too."""

import threading

import pytest

from compat.rig import Buffer, pattern, until
from mooncake.store import ReplicateConfig


def test_insert_then_replace_by_any_size(store, key):
    for value in (b"one", b"two", b"three!", pattern(100_000), b"x"):
        assert store.upsert(key, value) == 0
        assert store.get(key) == value
        assert store.get_size(key) == len(value)
    assert store.upsert(key, b"") == -600
    assert store.get(key) == b"x"


def test_a_put_after_an_upsert_changes_nothing(store, key):
    assert store.upsert(key, b"new") == 0 and store.put(key, b"other") == 0
    assert store.get(key) == b"new"


def test_every_form(store, buffer, key):
    buffer[:100] = pattern(100)
    assert store.upsert_from(f"{key}-1", buffer.addr, 10) == 0
    assert store.upsert_parts(f"{key}-1", b"1", b"2") == 0
    assert store.get(f"{key}-1") == b"12"
    assert store.upsert_batch([f"{key}-1", f"{key}-2"], [b"a", b"b"]) == 0
    assert store.get_batch([f"{key}-1", f"{key}-2"]) == [b"a", b"b"]
    assert store.batch_upsert_from([f"{key}-1", f"{key}-2"], [buffer.addr, buffer.addr + 10], [10, 20]) == [0, 0]
    assert store.get_batch([f"{key}-1", f"{key}-2"]) == [pattern(100)[:10], pattern(100)[10:30]]
    assert store.upsert_batch([f"{key}-1"], [b"a", b"b"]) == -600
    assert store.batch_upsert_from([f"{key}-1"], [buffer.addr], []) == [-600]


def test_config(make_store, key):
    one, two = make_store(), make_store()
    config = ReplicateConfig()
    config.replica_num = 2

    def stored_twice():
        # One copy is enough where the other's segment does not answer in time, on a busy host.
        return one.upsert(key, b"v", config) == 0 and len(two.get_replica_desc(key)) == 2

    until("it has two copies", stored_twice)
    assert one.upsert(key, b"w") == 0 and two.get(key) == b"w"


def test_after_remove(store, key):
    assert store.upsert(key, b"v") == 0 and store.remove(key, True) == 0
    assert store.is_exist(key) == 0
    assert store.upsert(key, b"w") == 0 and store.get(key) == b"w"


def test_a_leased_object_is_replaced_and_its_reader_keeps_what_it_has(store, key):
    assert store.upsert(key, b"old" * 1000) == 0
    held = store.get_buffer(key)
    assert store.upsert(key, b"new" * 1000) == 0
    assert bytes(held) == b"old" * 1000 and store.get(key) == b"new" * 1000


@pytest.mark.parametrize("grows", [False, True])
def test_readers_see_one_value_or_the_other(store, make_store, key, grows):
    """Mooncake writes in place: a reader within its lease gets torn bytes."""
    values = [bytes([n]) * (65536 + (n if grows else 0)) for n in range(1, 40)]
    assert store.upsert(key, values[0]) == 0
    done = threading.Event()
    torn = []

    def read(reader):
        memory = Buffer(70000)
        while not done.is_set():
            length = reader.get_into(key, memory.addr, 70000)
            if length >= 0 and memory[:length] not in values:
                torn.append(memory[:16])

    readers = [threading.Thread(target=read, args=(make_store(segment=0),)) for _ in range(3)]
    for reader in readers:
        reader.start()
    for value in values:
        assert store.upsert(key, value) == 0
    done.set()
    for reader in readers:
        reader.join()
    assert not torn
    assert store.get(key) == values[-1]
