"""Arguments that are none: a TypeError, or a number below 0; never a crash, never a hang, and the store goes on."""

import random

import pytest

from compat import api
from compat.rig import Buffer, pattern
from mooncake.store.tensor_format import HEADER_BYTES, Header

GARBAGE = [
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, -(2**63), 1.5, "", "k", "\udcff", b"", b"\xff", b"bytes", [], [None], [[]], [[[]]],
    ["k"], [b"k"], [-1], [0], [1], [2**64], [[1]], [[-1]], [["k"]], {}, {"k": 1}, (), ("k",), object(), bytearray(4),
    memoryview(b"abc"), range(3), iter([]), lambda: 0, "k" * 5000, [b"v", b"w"],
]  # fmt: skip
#: What may be raised: for a wrong type, for what there is not here, for a tensor call without torch or safetensors.
RAISED = (TypeError, NotImplementedError, ImportError)
#: Not here: they end the store, lend memory, or write files.
LEFT_OUT = {"close", "setup", "setup_dummy", "init_all", "allocate_and_mount_segment", "save_tensor_to_safetensor"}


def wanted(method):
    return [each.strip().lstrip("*") for each in api.METHODS[method].split(",") if each.strip()]


@pytest.mark.parametrize("method", sorted(set(api.METHODS) - LEFT_OUT))
def test_garbage_in_every_place(store, method):
    rng = random.Random(method)
    call = getattr(store, method)
    count = len(wanted(method))
    tries = [[garbage] * count for garbage in GARBAGE]
    tries += [[rng.choice(GARBAGE) for _ in range(rng.randint(0, count + 1))] for _ in range(150)]
    for arguments in tries:
        try:
            call(*arguments)
        except RAISED:
            continue
    assert store.put("after", b"v") == 0
    assert store.get("after") == b"v"


# What needs no torch of the calls that take stored tensors by address.
@pytest.mark.parametrize("method", ["put_tensor_from", "upsert_tensor_from"])
def test_a_stored_tensor_is_looked_at_before_it_is_put(store, key, method):
    call, elements, memory = getattr(store, method), bytes(64), Buffer(HEADER_BYTES + 64)
    for address in (0, 16, 0x7F00_0000_0000_0000):
        assert call(key, address, 4096) == -600
    for shape in [(4, 8), (4, 4, 2**40), (0, 16), (2**62, 2**62), (-4, -4)]:
        memory[:] = Header("float32", shape, 64, None).pack() + elements
        assert call(key, memory.addr, memory.size) == -600
    assert store.is_exist(key) == 0
    memory[:] = Header("float32", (4, 4), 64, None).pack() + elements
    assert call(key, memory.addr, memory.size) == 0
    assert call(key, memory.addr, memory.size - 1) == -600


@pytest.mark.parametrize("method", ["batch_put_from", "batch_get_into", "batch_upsert_from"])
def test_lists_that_are_partly_wrong(store, method):
    memory = Buffer(1000)
    memory[:] = pattern(1000)
    call = getattr(store, method)
    for keys, at, sizes in [
        (["a", None], [memory.addr] * 2, [10, 10]),
        (["a", "b"], [memory.addr, None], [10, 10]),
        (["a", "b"], [memory.addr, "x"], [10, 10]),
        (["a", "b"], [memory.addr] * 2, [10, "10"]),
        (["a", "b"], [memory.addr] * 2, [10, None]),
    ]:
        with pytest.raises(TypeError):
            call(keys, at, sizes)
    for keys, at, sizes in [
        (["a", "b"], [memory.addr, -5], [10, 10]),
        (["a", "b"], [memory.addr] * 2, [10, -10]),
        (["a", "b"], [memory.addr, 2**64], [10, 10]),
        (["a", "b"], [memory.addr] * 2, [10, 2**64]),
    ]:
        results = call(keys, at, sizes)
        assert len(results) == 2 and results[1] < 0
