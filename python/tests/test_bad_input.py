"""Arguments that make no sense: a documented exception, nothing sent, nothing hung."""

import pytest

import tidepool
from support import free_port
from tidepool import errors


@pytest.mark.parametrize("wrong", [None, 3, 1.5, ["a"], object()])
def test_keys_that_are_none(store, wrong):
    for call in (store.get, store.exist, store.remove, store.stat, lambda key: store.put(key, b"x")):
        with pytest.raises(TypeError, match="key"):
            call(wrong)


def test_keys_that_are_not_text(store):
    with pytest.raises(UnicodeEncodeError):
        store.get("\udc80 is no UTF-8")
    store.put(b"\x80\xff is no UTF-8 either", b"x")
    assert store.get(b"\x80\xff is no UTF-8 either") == b"x"


def test_keys_that_are_too_short_or_too_long(store):
    for key in ("", "k" * 4097):
        with pytest.raises(errors.BadRequest) as raised:
            store.put(key, b"x")
        assert raised.value.name == "INVALID_KEY"
    store.put("k" * 4096, b"x")
    assert store.exist("k" * 4096)


@pytest.mark.parametrize("wrong", [None, "text", 3, object(), {"a": 1}])
def test_values_that_are_none(store, key, wrong):
    with pytest.raises(TypeError, match="bytes-like"):
        store.put(key, wrong)
    with pytest.raises(TypeError, match="bytes-like"):
        store.get_into(key, wrong)


def test_an_empty_value_is_refused(store, key):
    for empty in (b"", [], [b"", b""]):
        with pytest.raises(errors.BadRequest):
            store.put(key, empty)


def test_lists_that_do_not_match(store, keys):
    with pytest.raises(ValueError, match="1 values for 2 keys"):
        store.put_many(keys[:2], [b"x"])
    with pytest.raises(ValueError):
        store.put_many(keys[:1], [b"x"], groups=["a", "b"])
    with pytest.raises(ValueError):
        store.get_into_many(keys[:2], [bytearray(1)])
    with pytest.raises(TypeError, match="keys is a list"):
        store.get_many("one-key")
    with pytest.raises(TypeError):
        store.get_many(None)
    assert store.get_many([]) == []
    assert store.put_many([], []) == []
    assert [bool(item) for item in store.exist_many(key for key in keys[:2])] == [False, False]


def test_numbers_out_of_range(store, key):
    for deadline in (-1.0, float("nan"), float("inf"), 1e12):
        with pytest.raises(ValueError):
            store.get(key, deadline=deadline)
    with pytest.raises(TypeError):
        store.get(key, deadline="soon")
    with pytest.raises(OverflowError):
        store.get_range(key, -1, 10)
    for wrong in ({"replicas": -1}, {"replicas": 1 << 40}):
        with pytest.raises(OverflowError):
            tidepool.PutOptions(**wrong)
    for wrong in ({"soft_pin": "yes"}, {"soft_pin_ttl": 1.0}, {"data_type": "nonsense"}, {"data_type": 99}):
        with pytest.raises(ValueError):
            tidepool.PutOptions(**wrong)
    with pytest.raises(errors.BadRequest):
        store.put(key, b"x", tidepool.PutOptions(replicas=16))
    native = store.native
    assert native.put_from_many([key], [0], [10], codes=True, unchecked=True) == [-600]
    assert native.put_from_many([key], [(1 << 64) - 5], [10], codes=True, unchecked=True) == [-600]
    assert native.put_from_many([key], [[4096, 8192]], [[10]], codes=True, unchecked=True) == [-600]
    with pytest.raises(OverflowError):
        native.put_from_many([key], [-1], [10])


def test_addresses_of_masters_that_make_no_sense():
    for masters in ("", ",", "host:port", "host:99999"):
        with pytest.raises(errors.BadRequest):
            tidepool.Store(masters, connect_deadline=0.1)


def test_masters_that_do_not_answer(pool):
    with pytest.raises((errors.Unavailable, errors.DeadlineExceeded)) as raised:
        tidepool.Store(f"127.0.0.1:{free_port()}", connect_deadline=0.3)
    assert "127.0.0.1" in raised.value.message
    with pytest.raises(tidepool.TidepoolError):
        tidepool.LocalNode(f"127.0.0.1:{free_port()}", 1 << 20, deadline=0.3)


def test_a_tenant_that_is_not_registered(pool):
    """Said at once, not after the 5 s that finding a leader may take."""
    with pytest.raises(errors.BadRequest) as raised:
        tidepool.Store(pool.masters, tenant="nobody", connect_deadline=60.0)
    assert raised.value.name == "TENANT_NOT_REGISTERED" and "tenant set" in raised.value.message


def test_memory_that_cannot_be_lent(pool):
    for wrong in ({"size": 1}, {"size": 1 << 60}, {"size": 1 << 20, "name": "a b"}, {"size": 1 << 20, "listen": "1.2.3.4:1"}):
        with pytest.raises(tidepool.TidepoolError):
            tidepool.LocalNode(pool.masters, **wrong)
