"""Memory in and out: buffer objects, DLPack tensors, addresses."""

import array
import ctypes
import gc
import mmap

import numpy
import pytest

import tidepool
from tidepool import _native, errors


def test_every_kind_of_buffer_goes_in(store, keys):
    text = b"0123456789abcdef"
    kinds = [text, bytearray(text), memoryview(text), array.array("B", text), numpy.frombuffer(text, "u4")]
    kinds.append(numpy.frombuffer(text, "u1").reshape(4, 4))
    assert all(store.put_many(keys[: len(kinds)], kinds))
    assert all(value == text for value in store.get_many(keys[: len(kinds)]))


def test_a_value_outlives_the_store(pool, key):
    with pool.store() as store:
        store.put(key, b"x" * 100_000)
        value = store.get(key)
    del store
    gc.collect()
    assert value == b"x" * 100_000
    part = value[10:20]
    del value
    gc.collect()
    assert part == b"x" * 10


def test_numpy_sees_a_value_without_a_copy(store, key):
    store.put(key, numpy.arange(1000, dtype="f4"))
    value = store.native.get_many([key])[0]
    seen = numpy.frombuffer(value, "f4")
    assert seen.ctypes.data == value.address == value.ptr() and value.size() == len(value) == 4000
    assert (seen == numpy.arange(1000, dtype="f4")).all() and not seen.flags.writeable


def test_get_into_fills_what_it_is_given(store, key):
    store.put(key, b"x" * 70_000)
    for buffer in (bytearray(70_000), numpy.zeros(70_000, "u1"), _native.Memory(70_000)):
        assert store.get_into(key, buffer) == 70_000
        assert bytes(buffer) == b"x" * 70_000
    longer = bytearray(80_000)
    assert store.get_into(key, longer) == 70_000 and not any(longer[70_000:])


def test_buffers_that_cannot_be_used(store, key):
    store.put(key, b"x" * 100)
    with pytest.raises(errors.BadRequest) as raised:
        store.get_into(key, bytearray(99))
    assert raised.value.name == "BUFFER_TOO_SMALL" and raised.value.mooncake == -600
    for readonly in (b"x" * 100, memoryview(b"x" * 100), numpy.frombuffer(b"x" * 100, "u1")):
        with pytest.raises(BufferError):
            store.get_into(key, readonly)
    gaps = memoryview(bytearray(200))[::2]
    with pytest.raises(BufferError):
        store.get_into(key, gaps)
    with pytest.raises(BufferError):
        store.put("other", numpy.zeros((10, 10))[:, ::2])


def test_items_that_name_the_same_memory_are_filled_one_after_another(store, keys):
    """Engines name one scratch page for several keys. Tried with all in one wave: fails, with CHECKSUM_MISMATCH."""
    size = 300_000
    values = [bytes([65 + i]) * size for i in range(6)]
    store.put_many(keys[:6], values)
    scratch, own = bytearray(size), bytearray(size)
    for _ in range(20):
        assert store.get_into_many(keys[:6], [scratch, own, scratch, scratch, own, scratch]) == [size] * 6
        assert bytes(own) in values and bytes(scratch) in values
    (refused,) = store.get_into_many(keys[:1], [[memoryview(scratch)[:200_000], memoryview(scratch)[100_000:]]])
    assert refused.name == "INVALID_PARAMS" and "same memory" in refused.message


class Tensor:
    """Speaks DLPack and nothing else, as a torch tensor does."""

    def __init__(self, base, device=(1, 0)):
        self.base, self.device = base, device

    def __dlpack__(self, **_):
        return self.base.__dlpack__()

    def __dlpack_device__(self):
        return self.device


def test_tensors_by_dlpack(store, key):
    base = numpy.arange(1000, dtype="f8").reshape(10, 100)
    store.put(key, Tensor(base))
    assert store.get(key) == base.tobytes()
    target = numpy.zeros((10, 100))
    assert store.get_into(key, Tensor(target)) == 8000
    assert (target == base).all()
    store.put(key + "-part", Tensor(base[3:5]))
    assert store.get(key + "-part") == base[3:5].tobytes()
    with pytest.raises(BufferError, match="contiguous"):
        store.put(key + "-gaps", Tensor(base[:, ::2]))


def test_a_gpu_tensor_is_refused_with_a_code(store, key):
    with pytest.raises(errors.NotSupported) as raised:
        store.put(key, Tensor(numpy.zeros(4), device=(2, 0)))
    assert raised.value.code == 9 and "host memory" in raised.value.message


def test_addresses_need_registration(store, keys):
    native = store.native
    memory = numpy.arange(64, dtype="u1")
    at = memory.ctypes.data
    (refused,) = native.put_from_many(keys[:1], [at], [64])
    assert refused.name == "INVALID_PARAMS" and "register" in refused.message
    assert native.put_from_many(keys[:1], [at], [64], codes=True) == [-600]
    tidepool.register(at, 64)
    assert native.put_from_many(keys[:1], [at], [64], codes=True) == [0]
    assert native.put_from_many(keys[1:2], [at], [65], codes=True) == [-600], "one byte beyond"
    assert native.put_from_many(keys[1:2], [[at + 32, at]], [[32, 32]], codes=True) == [0], "gathered"
    assert store.get(keys[1]) == bytes(range(32, 64)) + bytes(range(32))
    memory[:] = 0
    assert native.get_into_addresses_many(keys[:1], [at], [64], codes=True) == [64]
    assert bytes(memory) == bytes(range(64))
    assert native.get_range_into_addresses_many(keys[:1], [10], [[at, at + 8]], [[4, 4]], codes=True) == [8]
    assert bytes(memory[:4]) + bytes(memory[8:12]) == bytes(range(10, 18))
    tidepool.unregister(at)
    assert native.get_into_addresses_many(keys[:1], [at], [64], codes=True) == [-600]
    assert native.get_into_addresses_many(keys[:1], [at], [64], codes=True, unchecked=True) == [64]
    with pytest.raises(ValueError):
        tidepool.unregister(at)


def test_memory_that_is_gone_is_refused(store, key):
    """Tried without looking whether it is mapped: fails (a get then blames the datanode, which becomes suspect)."""
    native = store.native
    mapping = mmap.mmap(-1, 1 << 20)
    at = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    tidepool.register(at, 1 << 20)
    store.put(key, b"x" * 4096)
    assert native.get_into_addresses_many([key], [at], [1 << 20], codes=True) == [4096]
    gc.collect()
    mapping.close()
    (refused,) = native.get_into_addresses_many([key], [at], [1 << 20])
    assert refused.mooncake == -600 and "freed" in refused.message
    assert native.put_from_many(["other"], [at], [4096], codes=True, unchecked=True) == [-600]
    tidepool.unregister(at)


def test_what_is_no_memory_is_refused(store, key):
    """Tried without looking at the rights: fails, for the range that nobody may read."""
    for at, size in ((0, 10), (4096, 4096), ((1 << 47) - 4096, 4096), (1 << 63, 1 << 63)):
        with pytest.raises(ValueError):
            tidepool.register(at, size)
    # A range that nobody may read, as a GPU's addresses are reserved.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    reserved = libc.mmap(None, ctypes.c_size_t(1 << 20), 0, 0x22, -1, ctypes.c_long(0))
    with pytest.raises(ValueError, match="GPU"):
        tidepool.register(reserved, 1 << 20)
    store.put(key, b"x" * 4096)
    native = store.native
    for refused in (
        native.put_from_many([key + "-2"], [reserved], [4096], unchecked=True)[0],
        native.get_into_addresses_many([key], [reserved], [4096], unchecked=True)[0],
    ):
        assert refused.mooncake == -600 and "GPU" in refused.message
    readonly = mmap.mmap(-1, 4096, prot=mmap.PROT_READ)
    at = numpy.frombuffer(readonly, "u1").ctypes.data
    assert native.put_from_many([key + "-3"], [at], [4096], unchecked=True, codes=True) == [0]
    assert native.get_into_addresses_many([key], [at], [4096], unchecked=True, codes=True) == [-600]
    libc.munmap(ctypes.c_void_p(reserved), ctypes.c_size_t(1 << 20))


def test_memory_is_aligned_registered_and_freed(store, key):
    memory = tidepool.Memory(10_000)
    assert memory.address % 4096 == 0 and memory.size == len(memory) == 10_000 and not any(bytes(memory))
    assert (memory.address, 10_000) in _native.registered()
    store.put(key, b"y" * 10_000)
    assert store.native.get_into_addresses_many([key], [memory.address], [10_000], codes=True) == [10_000]
    view = memoryview(memory)
    with pytest.raises(BufferError):
        memory.free()
    view.release()
    memory.free()
    assert store.native.get_into_addresses_many([key], [memory.address], [10_000], codes=True) == [-600]
    with pytest.raises(BufferError, match="freed"):
        memoryview(memory)
    memory.free()
    for wrong in (0, -1, 1 << 63):
        with pytest.raises((ValueError, OverflowError)):
            tidepool.Memory(wrong)
    with pytest.raises(TypeError):
        tidepool.Memory()
    with pytest.raises(TypeError):
        tidepool.Value()


def test_parts_of_a_memory_may_be_registered_too():
    memory = tidepool.Memory(8192)
    for address, size in ((memory.address, 100), (memory.address, 100), (memory.address + 10, 10)):
        tidepool.register(address, size)
    with pytest.raises(ValueError, match="100 bytes"):
        tidepool.register(memory.address, 8192)
    for address in (memory.address, memory.address, memory.address + 10):
        tidepool.unregister(address)
    assert (memory.address, 8192) in _native.registered(), "it needs no registration of its own"


def test_copy_memory():
    source, target = tidepool.Memory(8192), tidepool.Memory(8192)
    memoryview(source)[:] = bytes(range(256)) * 32
    _native.copy_memory([target.address + 4096, target.address], [source.address, source.address + 1], [4096, 16])
    assert bytes(target)[4096:] == bytes(source)[:4096] and bytes(target)[:16] == bytes(source)[1:17]
    with pytest.raises(ValueError):
        _native.copy_memory([target.address], [source.address], [8193])
    with pytest.raises(ValueError):
        _native.copy_memory([target.address], [], [1])


def test_what_a_call_was_given_is_given_back(store, keys):
    """A bytearray that is exported cannot be resized: it can when its call has ended."""
    value, target = bytearray(b"z" * 100_000), bytearray(100_000)
    store.put(keys[0], value)
    store.get_into(keys[0], target)
    store.get_into_many([keys[0], "never-put"], [target, value])
    with pytest.raises(TypeError):
        store.put_many(keys[:2], [value, 3])
    with pytest.raises(ValueError):
        store.put_many(keys[:2], [value])
    value.extend(b"more")
    target.extend(b"more")


def test_sizes_around_powers_of_two(store, key):
    sizes = sorted({n + d for n in (1, 4096, 65536, 1 << 20) for d in (-1, 0, 1)} - {0})
    names = [f"{key}-{size}" for size in sizes]
    payload = numpy.random.default_rng(1).bytes(max(sizes))
    assert all(store.put_many(names, [payload[:size] for size in sizes]))
    assert all(value == payload[:size] for size, value in zip(sizes, store.get_many(names)))
    odd = bytearray(max(sizes) + 3)
    for name, size in zip(names, sizes):
        assert store.get_into(name, memoryview(odd)[3:]) == size
        assert odd[3 : 3 + size] == payload[:size]
