"""Objects as bytes: the contract of Mooncake's test of the distributed object store."""

import array

import pytest

from compat.rig import pattern, set_up, until
from mooncake.store import MooncakeDistributedStore, ReplicateConfig, SoftPinAction


def removed_when_the_lease_ended(store, key):
    until(f"{key} is removed", lambda: store.remove(key) == 0)


def test_put_get_remove(store, key):
    value = pattern(100_000)
    assert store.put(key, value) == 0
    assert store.get(key) == value
    assert store.get_size(key) == len(value)
    assert store.is_exist(key) == 1
    removed_when_the_lease_ended(store, key)
    assert store.is_exist(key) == 0
    assert store.get(key) == b""
    assert store.get_size(key) == -704
    assert store.remove(key) == -704


def test_the_first_put_stays(store, key):
    assert store.put(key, b"first") == 0
    assert store.put(key, b"second!") == 0
    assert store.get(key) == b"first"


def test_a_leased_object_is_removed_by_force_only(store, key):
    store.put(key, b"v")
    assert store.get(key) == b"v"
    assert store.remove(key) == -706
    assert store.remove(key, True) == 0


@pytest.mark.parametrize(("key", "value"), [("", b"x"), ("k", b""), ("k" * 4097, b"x")])
def test_empty_and_overlong_are_invalid(store, key, value):
    assert store.put(key, value) == -600
    assert store.is_exist(key) in (0, -600)


@pytest.mark.parametrize("value", [None, "text", 5])
def test_a_value_that_is_no_buffer_is_a_type_error(store, value):
    with pytest.raises(TypeError):
        store.put("k", value)


@pytest.mark.parametrize("bad", [None, 5, 1.5])
def test_a_key_that_is_no_text_is_a_type_error(store, bad):
    with pytest.raises(TypeError):
        store.put(bad, b"v")
    with pytest.raises(TypeError):
        store.get(bad)


def test_unknown_keywords_are_type_errors(store):
    with pytest.raises(TypeError):
        store.put("k", b"v", conf=None)
    with pytest.raises(TypeError):
        store.put(name="k", value=b"v")
    assert store.put(key="kw", value=b"v", config=ReplicateConfig()) == 0


@pytest.mark.parametrize("odd", ["\0é", "a/b@c", "汉字", "k" * 4096])
def test_keys_are_any_text(store, odd):
    assert store.put(odd, b"v") == 0
    assert store.get(odd) == b"v"


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        (bytearray(b"abc"), b"abc"),
        (memoryview(b"abcdef")[::2], b"ace"),
        (array.array("i", [1, 2]), array.array("i", [1, 2]).tobytes()),
    ],
)
def test_any_buffer_is_a_value(store, key, value, stored):
    assert store.put(key, value) == 0
    assert store.get(key) == stored


def test_parts_are_joined(store, key):
    assert store.put_parts(key, b"a", b"", bytearray(b"bc"), memoryview(b"d")) == 0
    assert store.get(key) == b"abcd"
    assert store.put_parts(f"{key}-none") == -600
    with pytest.raises(TypeError):
        store.put_parts(f"{key}-text", "s")
    with pytest.raises(RuntimeError):
        store.put_parts(f"{key}-wide", array.array("i", [1]))


def test_batches(store, key):
    keys = [f"{key}-{n}" for n in range(100)]
    values = [pattern(n + 1, n) for n in range(100)]
    assert store.put_batch(keys, values) == 0
    assert store.get_batch(keys) == values
    assert store.get_batch([keys[0], f"{key}-none", keys[1]]) == [values[0], b"", values[1]]
    assert store.put_batch(keys[:2], values[:1]) == -600
    assert store.put_batch([], []) == 0
    assert store.get_batch([]) == []
    assert store.batch_is_exist([keys[0], f"{key}-none"]) == [1, 0]
    assert store.batch_is_exist([]) == []


def test_a_batch_names_its_first_failure_and_stores_the_rest(store, key):
    assert store.put_batch([f"{key}-a", f"{key}-b", f"{key}-c"], [b"1", b"", b"3"]) == -600
    assert store.batch_is_exist([f"{key}-a", f"{key}-b", f"{key}-c"]) == [1, 0, 1]


def test_buffers(store, key):
    value = pattern(5000)
    store.put(key, value)
    found, missing = store.batch_get_buffer([key, f"{key}-none"])
    assert missing is None
    assert bytes(found) == value and len(found) == found.size() == 5000 and found.ptr() != 0
    view = memoryview(found)
    del found
    assert bytes(view) == value
    assert store.get_buffer(f"{key}-none") is None
    assert bytes(store.get_buffer(key)) == value


def test_batch_remove(store, key):
    keys = [f"{key}-{n}" for n in range(3)]
    store.put_batch(keys, [b"v"] * 3)
    assert store.batch_remove([*keys[:2], f"{key}-none"], True) == [0, 0, -704]
    assert store.batch_remove([]) == []
    assert store.batch_is_exist(keys) == [0, 0, 1]


def test_remove_by_regex_and_all(store, key):
    store.put_batch([f"{key}-a1", f"{key}-a2", f"{key}-b"], [b"v"] * 3)
    assert store.remove_by_regex(f"{key}-nothing") == 0
    assert store.remove_by_regex("[", True) == -600
    assert store.remove_by_regex(f"^{key}-a", True) == 2
    assert store.batch_is_exist([f"{key}-a1", f"{key}-b"]) == [0, 1]
    assert store.remove_all() == 0  # its lease was just granted
    assert store.remove_all(True) == 1
    assert store.remove_all(force=True) == 0


def test_without_a_local_buffer_nothing_is_copied_in(make_store, key):
    store = make_store(buffer=0)
    assert store.put(key, b"v") == -600
    assert store.is_exist(key) == 0


def test_before_setup_and_after_close(make_store):
    for store in (MooncakeDistributedStore(), make_store()):
        assert store.close() == 0 and store.close() == 0
        assert store.health_check() == 1
        assert store.get("k") == b"" and store.get_batch(["a", "b"]) == store.get_batch([]) == [b""]
        assert store.put("k", b"v") == store.get_size("k") == store.remove("k") == store.is_exist("k") == -600
        assert store.batch_is_exist(["a", "b"]) == store.batch_remove(["a", "b"]) == [-600, -600]
        assert store.put_batch(["a"], [b"v"]) == store.put_parts("a", b"v") == store.upsert("a", b"v") == -600
        assert store.remove_all() == store.remove_by_regex("a") == -600
        assert store.get_buffer("a") is None and store.batch_get_buffer(["a"]) == [None]
        assert store.get_replica_desc("a") == [] and store.batch_get_replica_desc(["a"]) == {}
        assert store.batch_replica_clear(["a"]) == []
        assert store.put_from("a", 1, 1) == store.get_into("a", 1, 1) == store.register_buffer(1, 1) == -600
        assert store.batch_put_from(["a"], [1], [1]) == store.batch_get_into(["a"], [1], [1]) == [-600]
        # vLLM takes an empty answer for a store that is not there.
        assert store.batch_put_from_multi_buffers(["a"], [[1]], [[1]]) == []
        assert store.batch_get_into_multi_buffers(["a"], [[1]], [[1]]) == [-600]
        assert store.get_into_ranges([1], [["a"]], [[[0]]], [[[0]]], [[[1]]]) == [[[-600]]]
        assert store.batch_get_session_start(["a"]) == store.batch_put_session_start(["a"], [1]) == []
        assert store.batch_put_session_end(["a"]) == store.batch_put_session_revoke(["a"]) == []
        ranges = (["a"], [[1]], [[1]], [[0]])
        assert store.batch_get_into_multi_buffer_ranges(*ranges) == store.batch_put_from_multi_buffer_ranges(*ranges) == []
        assert store.batch_get_session_end(["a"]) == store.batch_get_session_end([]) == -1
        assert store.create_copy_task("a", ["s"]) == ((0, 0), -600) and store.query_task((0, 1)) == (None, -600)
        assert store.get_hostname() == ""
        assert store.unmount_segment(["a"]) == store.unmount_and_free_segment(["a"]) == store.unmount_local_disk_segment() == -1
        assert store.allocate_and_mount_segment(1 << 20) == {"ret": -1, "segment_ids": [], "allocated_size": 0}


def test_data_goes_with_the_store_that_held_it(make_store, cluster, key):
    store = make_store()
    assert store.put(key, b"v") == 0
    assert store.close() == 0
    assert set_up(store, cluster) == 0
    assert store.get(key) == b""


def test_a_host_name_gets_a_port(store, make_store):
    host, port = store.get_hostname().split(":")
    assert host == "localhost" and 12300 <= int(port) <= 14300
    assert make_store(segment=0).get_hostname() != store.get_hostname()


def test_no_read_of_another_processs_disk_is_counted(store, key):
    assert store.put(key, b"v") == 0 and store.get(key) == b"v"
    assert store.get_offload_rpc_read_count() == 0


def test_health(store):
    assert MooncakeDistributedStore().health_check() == 1
    assert store.health_check() == 0


def test_nobody_answers(monkeypatch):
    monkeypatch.setenv("MC_RPC_CONNECT_TIMEOUT_MS", "1000")
    store = MooncakeDistributedStore()
    code = store.setup("localhost", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", "127.0.0.1:1")
    assert code < 0 and code != -600
    assert store.health_check() == 1


@pytest.mark.parametrize("call", ["put", "upsert"])
def test_soft_pin_rules(store, key, call):
    config = ReplicateConfig()
    config.soft_pin_action, config.soft_pin_ttl_ms = SoftPinAction.ENABLE, 60_000
    assert getattr(store, call)(key, b"v", config) == 0
    config.soft_pin_action = SoftPinAction.DISABLE
    assert getattr(store, call)(key, b"v", config=config) == -600
    config.soft_pin_action, config.soft_pin_ttl_ms = SoftPinAction.ENABLE, 10**12
    assert getattr(store, call)(key, b"v", config) == -600


@pytest.mark.parametrize(("field", "code"), [("nof_replica_num", -600), ("dfs_replica_num", -1601)])
def test_tiers_that_there_are_not(store, key, field, code):
    config = ReplicateConfig()
    setattr(config, field, 1)
    assert store.put(key, b"v", config) == code
    config = ReplicateConfig()
    config.replica_num = 0
    assert store.put(key, b"v", config) == -600


def test_groups(store, key):
    config = ReplicateConfig()
    config.group_ids = ["g1", "g2"]
    assert store.put_batch([f"{key}-1", f"{key}-2"], [b"1", b"2"], config) == 0
    assert store.put_batch([f"{key}-3"], [b"3"], config) == -600


def test_hints_of_place_are_hints(store, key):
    config = ReplicateConfig()
    config.preferred_segment, config.prefer_alloc_in_same_node = "nowhere:1", True
    assert store.put(key, b"v", config) == 0


def test_case_046_a_miss_has_one_number_and_is_never_zero_bytes(store, key, buffer):
    assert store.get(key) == b"" and store.get_size(key) == -704 and store.put(key, b"") == -600
    assert store.get_into(key, buffer.addr, buffer.size) == -704
    assert store.batch_get_into([key], [buffer.addr], [buffer.size]) == [-704]
    assert store.batch_get_into_multi_buffers([key], [[buffer.addr]], [[buffer.size]]) == [-704]


def test_case_047_what_a_store_without_memory_wrote_stays_and_what_one_held_goes_with_it(store, make_store, key):
    writer = make_store(segment=0)
    assert writer.put(key, b"stays") == 0
    assert writer.close() == 0
    assert store.get(key) == b"stays"

    holder = make_store()
    config = ReplicateConfig()
    config.preferred_segment = holder.get_hostname()
    assert holder.put(f"{key}-held", b"goes", config) == 0
    (copy,) = store.get_replica_desc(f"{key}-held")
    assert copy.get_memory_descriptor().buffer_descriptor.transport_endpoint == holder.get_hostname()
    assert holder.close() == 0
    assert store.is_exist(f"{key}-held") == 0 and store.get(f"{key}-held") == b""


def test_case_112_a_key_twice_in_a_batch(store, key, buffer):
    for size in (4096, 1 << 20):
        name, value = f"{key}-{size}", pattern(size, 7)
        assert store.put_batch([name, name], [value, pattern(size, 8)]) == 0
        assert store.get_batch([name, name]) == [value, value]
        buffer[:] = bytes(buffer.size)
        assert store.batch_get_into([name, name], [buffer.addr, buffer.addr + size], [size, size]) == [size, size]
        assert buffer[:size] == value and buffer[size : 2 * size] == value
        assert store.batch_is_exist([name, name]) == [1, 1]
        assert store.batch_put_from([f"{name}-p"] * 2, [buffer.addr, buffer.addr], [size, size]) == [0, 0]
        assert store.batch_remove([name, name], True) in ([0, -704], [-704, 0])
