"""Objects from and into addresses, whole and in pieces, at every size and alignment."""

import ctypes

import pytest

from compat.rig import MIB, Buffer, pattern
from mooncake.store import MooncakeHostMemAllocator, bind_to_numa_node


def test_registering(store):
    memory = Buffer(4096)
    assert store.register_buffer(memory.addr, 4096) == 0
    assert store.register_buffer(memory.addr, 4096) == -600
    assert store.unregister_buffer(memory.addr) == 0
    assert store.unregister_buffer(memory.addr) == -600
    assert store.register_buffer(0, 10) == -600
    assert store.register_buffer(memory.addr, 0) == -600


def test_pieces_of_the_same_memory(store, make_store):
    other, memory = make_store(segment=0), Buffer(10_000)
    assert store.register_buffer(memory.addr, 1000) == 0
    assert store.register_buffer(memory.addr + 500, 1000) == -600
    assert store.register_buffer(memory.addr + 1000, 1000) == 0
    assert store.register_buffer(memory.addr, 500) == -600
    # Another store of the process has its own pieces.
    assert other.register_buffer(memory.addr + 500, 5000) == 0
    assert other.register_buffer(memory.addr + 9000, 1000) == 0
    for each, at in ((store, 0), (store, 1000), (other, 500), (other, 9000)):
        assert each.unregister_buffer(memory.addr + at) == 0
        assert each.unregister_buffer(memory.addr + at) == -600


def test_memory_of_a_gpu_is_refused(store):
    # What a device pointer is to the host: an address that is not mapped.
    assert store.register_buffer(0x7F00_0000_0000_0000, 4096) == -600


def test_put_from_and_get_into(store, buffer, key):
    value = pattern(50)
    buffer[:50] = value
    assert store.put_from(key, buffer.addr, 50) == 0
    for size, result in ((50, 50), (49, -600), (51, 50)):
        assert store.get_into(key, buffer.addr + 1000, size) == result
    assert buffer[1000:1050] == value
    assert store.get_into(f"{key}-none", buffer.addr, 50) == -704
    assert store.put_from(f"{key}-empty", buffer.addr, 0) == -600


def test_memory_need_not_be_registered(store, key):
    memory = Buffer(100)
    memory[:] = pattern(100)
    assert store.put_from(key, memory.addr, 100) == 0
    into = Buffer(100)
    assert store.get_into(key, into.addr, 100) == 100
    assert into[:] == memory[:]


def test_memory_that_is_not_there_is_refused(store, key):
    store.put(key, b"v" * 100)
    for address in (0, 16, 0x7F00_0000_0000_0000):
        assert store.put_from(f"{key}-p", address, 100) == -600
        assert store.get_into(key, address, 100) == -600
    freed = Buffer(1 * MIB)
    address = freed.addr
    del freed
    assert store.get_into(key, address, 100) in (-600, 100)  # the kernel may have given it to somebody else


def test_batches(store, buffer, key):
    keys = [f"{key}-{n}" for n in range(64)]
    sizes = [1 + 61 * n for n in range(64)]
    at = [buffer.addr + 8192 * n for n in range(64)]
    for n, size in enumerate(sizes):
        buffer[8192 * n :] = pattern(size, n)
    assert store.batch_put_from(keys, at, sizes) == [0] * 64
    assert store.batch_put_from(keys, at, sizes) == [0] * 64
    into = Buffer(64 * 8192)
    assert store.batch_get_into(keys, [into.addr + 8192 * n for n in range(64)], [8192] * 64) == sizes
    for n, size in enumerate(sizes):
        assert into[8192 * n : 8192 * n + size] == pattern(size, n)


def test_batches_answer_a_key(store, buffer, key):
    store.put(key, b"v" * 50)
    at = [buffer.addr, buffer.addr + 100, buffer.addr + 200]
    assert store.batch_get_into([key, f"{key}-none", key], at, [50, 50, 49]) == [50, -704, -600]
    assert store.batch_put_from([f"{key}-a", f"{key}-b"], at[:2], [10, 0]) == [0, -600]
    assert store.batch_put_from([f"{key}-a", f"{key}-b"], at[:2], [10]) == [-600, -600]
    assert store.batch_put_from([f"{key}-a", f"{key}-b"], at[:1], [10, 10]) == [-600, -600]
    assert store.batch_get_into([key], [], []) == [-600]
    assert store.batch_get_into([], [], []) == store.batch_put_from([], [], []) == []


def test_objects_are_gathered_and_scattered(store, buffer, key):
    buffer[:] = pattern(1000)
    at = [[buffer.addr, buffer.addr + 100], [buffer.addr + 200]]
    sizes = [[10, 20], [30]]
    assert store.batch_put_from_multi_buffers([f"{key}-1", f"{key}-2"], at, sizes) == [0, 0]
    assert store.get(f"{key}-1") == pattern(1000)[:10] + pattern(1000)[100:120]
    into = Buffer(1000)
    to = [[into.addr, into.addr + 100], [into.addr + 200], [into.addr + 300]]
    keys = [f"{key}-1", f"{key}-2", f"{key}-none"]
    assert store.batch_get_into_multi_buffers(keys, to, [[10, 20], [30], [5]]) == [30, 30, -704]
    assert into[100:120] == pattern(1000)[100:120]
    assert store.batch_get_into_multi_buffers([f"{key}-1"], [[into.addr]], [[10]]) == [-600]
    assert store.batch_get_into_multi_buffers([f"{key}-1"], [[into.addr, into.addr + 500]], [[25, 100]], True) == [30]
    assert into[500:505] == pattern(1000)[115:120]


def test_keys_may_share_a_scratch_page(store, key):
    """As engines do for pages that they do not need: each call is a byte count, and what stays is of one of them."""
    values = [pattern(8192, n) for n in range(4)]
    keys = [f"{key}-{n}" for n in range(4)]
    store.put_batch(keys, values)
    scratch = Buffer(8192)
    assert store.batch_get_into(keys, [scratch.addr] * 4, [8192] * 4) == [8192] * 4
    assert scratch[:] in values


@pytest.mark.parametrize(
    ("at", "sizes"), [([[0], [0]], [[10]]), ([[0, 0]], [[10]]), ([[]], [[]]), ([], [])]
)
def test_uneven_lists_are_invalid(store, buffer, key, at, sizes):
    at = [[buffer.addr for _ in each] for each in at]
    assert store.batch_put_from_multi_buffers([key], at, sizes) == [-600]
    store.put(key, b"v")
    assert store.batch_get_into_multi_buffers([key], at, sizes) == [-600]


def test_metadata_goes_before_the_data(store, buffer, key):
    buffer[:200] = pattern(200)
    assert store.put_from_with_metadata(key, buffer.addr, buffer.addr + 100, 10, 5) == 0
    assert store.get(key) == pattern(200)[100:105] + pattern(200)[:10]


def test_the_host_allocator(store, key):
    allocator = MooncakeHostMemAllocator()
    address = allocator.alloc(8192)
    assert address and address % 4096 == 0
    ctypes.memmove(address, pattern(8192), 8192)
    assert store.put_from(key, address, 8192) == 0
    assert store.get(key) == pattern(8192)
    assert allocator.free(address) == 0 and allocator.free(address) == -1
    assert allocator.alloc(0) == 0
    bind_to_numa_node(4096)  # no host has it: nothing happens


def check_sizes(store, sizes, offset):
    """Each size there and back, from and to addresses that nothing is aligned to; in batches of at most 16 MiB."""
    batch: list[int] = []
    for size in [*sizes, None]:
        if batch and (size is None or sum(batch) + size > 16 * MIB or len(batch) == 512):
            total = sum(batch) + 8 * len(batch)
            source, target = Buffer(total, offset), Buffer(total, offset + 2)
            keys, starts, at = [f"size-{offset}-{n}" for n in batch], [], 0
            for n in batch:
                starts.append(at)
                source[at : at + n] = pattern(n, n)
                at += n + (n % 7)
            assert store.batch_put_from(keys, [source.addr + s for s in starts], batch) == [0] * len(batch)
            assert store.batch_get_into(keys, [target.addr + s for s in starts], batch) == batch
            for start, n in zip(starts, batch):
                assert target[start : start + n] == source[start : start + n], n
            assert store.batch_remove(keys, True) == [0] * len(batch)
            batch = []
        if size is not None:
            batch.append(size)


# User report 53: transfers of 512 bytes came out wrong, of 630784 right.
@pytest.mark.parametrize("offset", [0, 1, 13])
def test_case_053_every_size_to_4097(store, offset):
    check_sizes(store, range(1, 4098), offset)


@pytest.mark.parametrize("offset", [0, 3])
def test_case_053_powers_of_two_and_their_neighbours(make_store, offset):
    store = make_store(segment=256 * MIB)
    check_sizes(store, [(1 << power) + by for power in range(13, 27) for by in (-1, 0, 1)], offset)


# User reports 54, 58: registration of lengths that no unit divides, and of much at once.
def test_case_058_any_length_can_be_registered(store):
    memory = Buffer(33 * MIB + 4097)
    part = memory.size // 16
    for n in range(16):
        assert store.register_buffer(memory.addr + n * part, part) == 0
    for n in range(16):
        assert store.unregister_buffer(memory.addr + n * part) == 0


def test_case_054_a_large_region_is_registered_in_one_go_and_used_across(store, key):
    memory = Buffer(1 << 30)
    assert store.register_buffer(memory.addr, memory.size) == 0
    middle = memory.addr + (64 * MIB) - 1000
    memory[64 * MIB - 1000 : 64 * MIB + 1000] = pattern(2000)
    assert store.put_from(key, middle, 2000) == 0
    assert store.get(key) == pattern(2000)
    assert store.unregister_buffer(memory.addr) == 0
