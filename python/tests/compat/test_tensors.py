"""PyTorch tensors there and back: types, shapes, shards, buffers, files. Needs torch (a CPU build does)."""

import asyncio
import ctypes
import os
import struct

import pytest

from compat.rig import Buffer

if os.environ.get("TIDEPOOL_REQUIRE_TORCH"):
    import torch
else:
    torch = pytest.importorskip("torch", reason="tensor calls are not tested: PyTorch is not installed (scripts/test --full)")

from mooncake.async_store import MooncakeDistributedStoreAsync  # noqa: E402
from mooncake.store import (  # noqa: E402
    ParallelAxis,
    ReadTarget,
    ReplicateConfig,
    TensorParallelism,
    _deserialize_tensor,
    _serialize_tensor,
    _tensor_metadata_size,
)

HEADER = _tensor_metadata_size()
TYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64,
]  # fmt: skip


def made(*shape, dtype=torch.float32):
    """A tensor whose elements all differ, as far as its type has them."""
    count = 1
    for each in shape:
        count *= each
    return torch.arange(count).reshape(shape).to(dtype)


def serialized(tensor, extra=0):
    """(memory, bytes) of a tensor as `*_from` takes it."""
    header, address, length, _kept = _serialize_tensor(tensor)
    memory = Buffer(HEADER + length + extra)
    memory[:HEADER] = header
    if length:
        memory[HEADER:] = ctypes.string_at(address, length)
    return memory, HEADER + length


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type(store, key, dtype):
    tensor = made(3, 5, 7, dtype=dtype)
    assert store.put_tensor(key, tensor) == 0
    found = store.get_tensor(key)
    assert found.dtype == dtype and torch.equal(found, tensor)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1000, 33), (1, 2, 3, 4, 5, 6, 7, 8)])
def test_every_shape(store, key, shape):
    tensor = made(*shape)
    assert store.put_tensor(key, tensor) == 0
    found = store.get_tensor(key)
    assert found.shape == tensor.shape and torch.equal(found, tensor)


def test_a_tensor_that_is_not_contiguous(store, key):
    tensor = made(30, 40).t()[::2]
    assert store.put_tensor(key, tensor) == 0
    assert torch.equal(store.get_tensor(key), tensor)


def test_what_is_no_tensor(store, key):
    assert store.put_tensor(key, b"bytes") == -600
    assert store.put_tensor(key, made(*[1] * 9)) == -600
    assert store.get_tensor(key) is None
    store.put(key, b"some bytes")
    assert store.get_tensor(key) is None
    with pytest.raises(ValueError):
        _deserialize_tensor(b"x")
    with pytest.raises(ValueError):
        _serialize_tensor(b"x")


@pytest.mark.parametrize(("place", "byte"), [(0, 0), (8, 9), (10, 9), (12, 99), (16, 9), (20, 1), (31, 0x80), (28, 0xFF), (29, 1)])
def test_headers_that_were_damaged(store, key, place, byte):
    memory, size = serialized(made(4, 4))
    memory[place : place + 1] = bytes([byte])
    store.put_from(key, memory.addr, size)
    assert store.get_tensor(key) is None
    into = Buffer(size)
    assert store.get_tensor_into(key, into.addr, size) is None
    assert store.put_tensor_with_tp_from(f"{key}-tp", memory.addr, size, 0, 2, 0) == -600


HEAD = struct.Struct("<8sHHII Q8q")


@pytest.mark.parametrize(
    "shape", [(4, 8), (-4, -4), (2**62, 2**62), (0, 16), (4, 4, 2**40), (16, 0, 2**62), (2**32, 2**32, 2**32, 2**32)], ids=str
)
@pytest.mark.parametrize("length", [64, 0])
def test_shapes_that_do_not_fit_their_bytes(store, key, shape, length):
    memory, size = serialized(made(4, 4))
    size -= 64 - length
    magic, version, _, dtype, axes, *_ = HEAD.unpack(memory[: HEAD.size])
    memory[: HEAD.size] = HEAD.pack(magic, version, len(shape), dtype, axes, length, *shape, *[0] * (8 - len(shape)))
    if (shape, length) == ((0, 16), 0):
        assert store.put_tensor_from(key, memory.addr, size) == 0 and store.get_tensor(key).shape == (0, 16)
        return
    # Tried without a look at the shape: all of them that have no negative extent are stored.
    assert store.put_tensor_from(key, memory.addr, size) == -600
    assert store.put_from(key, memory.addr, size) == 0
    into = Buffer(size)
    assert store.get_tensor(key) is None and store.get_tensor_into(key, into.addr, size) is None
    with pytest.raises(ValueError):
        _deserialize_tensor(memory[:size])


@pytest.mark.parametrize("size", [0, -1, 1 << 30])
def test_axes_of_a_header_that_was_damaged(store, key, size):
    assert store.put_tensor_with_parallelism(key, made(2, 4), tp(0, 2, 0)) == 0
    header = bytearray(store.get(f"{key}_tp_0"))
    assert header[HEAD.size + 8 : HEAD.size + 12] == (2).to_bytes(4, "little")
    header[HEAD.size + 8 : HEAD.size + 12] = size.to_bytes(4, "little", signed=True)
    assert store.upsert(f"{key}_tp_0", bytes(header)) == 0
    assert store.get_tensor_with_parallelism(key, target("full")) is None


@pytest.mark.parametrize("other", [(5, 7), (3,), (), (2, 4, 6, 1)], ids=str)
def test_shards_that_do_not_fit_together(store, key, other):
    assert store.put_tensor_with_parallelism(key, made(2, 4), tp(0, 2, 0)) == 0
    assert store.put_tensor_with_parallelism(key, made(*other), tp(1, 2, 0)) == 0
    assert store.get_tensor_with_parallelism(key, target("full")) is None
    assert store.put_tensor_with_parallelism(f"{key}-dim", made(4), tp(0, 2, 5)) == 0
    assert store.put_tensor_with_parallelism(f"{key}-dim", made(4), tp(1, 2, 5)) == 0
    assert store.get_tensor_with_parallelism(f"{key}-dim", target("full")) is None


def test_views_that_are_only_marked_as_conjugated_or_negated(store, key):
    tensor = torch.complex(made(3, 4), made(3, 4) + 1)
    views = {"conj": tensor.conj(), "imag": tensor.conj().imag, "adjoint": tensor.adjoint()}
    assert views["conj"].is_conj() and views["imag"].is_neg()
    for name, view in views.items():
        assert store.put_tensor(f"{key}-{name}", view) == 0
        # Tried without resolving them: the bytes of the other tensor are found.
        assert torch.equal(store.get_tensor(f"{key}-{name}"), view)


def test_tensors_without_elements_in_a_row(store, key):
    for tensor in (made(4, 4).to_sparse(), made(4, 4).to_sparse_csr(), torch.empty(4, device="meta")):
        assert store.put_tensor(key, tensor) == -600


@pytest.mark.parametrize("method", ["put_tensor_from", "upsert_tensor_from", "put_tensor_with_tp_from", "get_tensor_into"])
@pytest.mark.parametrize("address", [0, 16, 0x7F00_0000_0000_0000])
def test_memory_that_is_not_there(store, key, method, address):
    assert store.put_tensor(f"{key}-there", made(1000)) == 0
    assert getattr(store, method)(f"{key}-there" if method == "get_tensor_into" else key, address, 4096 + HEADER) in (-600, None)
    assert store.get_tensor_with_parallelism_into(f"{key}-there", address, 4096 + HEADER) is None
    assert store.put_tensor_with_parallelism_from(key, address, 4096) == -600


def test_a_found_tensor_is_its_own(store, key):
    store.put_tensor(key, made(10))
    store.get_tensor(key).fill_(0)
    assert torch.equal(store.get_tensor(key), made(10))


def test_batches_and_config(store, key):
    keys = [f"{key}-{n}" for n in range(4)]
    tensors = [made(n + 1, 3) for n in range(4)]
    config = ReplicateConfig()
    assert store.batch_put_tensor(keys[:2], tensors[:2]) == [0, 0]
    assert store.batch_pub_tensor(keys[2:], tensors[2:], config) == [0, 0]
    found = store.batch_get_tensor([*keys, f"{key}-none"])
    assert found[4] is None and all(torch.equal(a, b) for a, b in zip(found, tensors))
    assert store.batch_put_tensor(keys, tensors[:1]) == [-600] * 4
    assert store.pub_tensor(f"{key}-p", made(2), config) == 0
    config.replica_num = 0
    assert store.pub_tensor(f"{key}-q", made(2), config) == -600


def test_upserts(store, key):
    for tensor in (made(4), made(2, 2), made(100)):
        assert store.upsert_tensor(key, tensor) == 0
        assert torch.equal(store.get_tensor(key), tensor)
    assert store.upsert_pub_tensor(key, made(3), ReplicateConfig()) == 0
    assert store.batch_upsert_tensor([key, f"{key}-2"], [made(5), made(6)]) == [0, 0]
    assert store.batch_upsert_pub_tensor([key], [made(7)], ReplicateConfig()) == [0]
    assert store.get_tensor(key).shape == (7,) and store.get_tensor(f"{key}-2").shape == (6,)


def test_into_and_from_memory(store, key):
    tensor = made(20, 5)
    store.put_tensor(key, tensor)
    memory = Buffer(HEADER + 400 + 100)
    store.register_buffer(memory.addr, memory.size)
    found = store.get_tensor_into(key, memory.addr, memory.size)
    assert torch.equal(found, tensor) and found.data_ptr() == memory.addr + HEADER
    assert store.get_tensor_into(key, memory.addr, 100) is None
    assert store.get_tensor_into(f"{key}-none", memory.addr, memory.size) is None
    assert store.put_tensor_from(f"{key}-copy", memory.addr, HEADER + 400) == 0
    assert torch.equal(store.get_tensor(f"{key}-copy"), tensor)
    assert store.put_tensor_from(f"{key}-long", memory.addr, HEADER + 401) == -600
    assert store.upsert_tensor_from(f"{key}-copy", memory.addr, HEADER + 400) == 0
    one, two = serialized(made(3)), serialized(made(4, dtype=torch.int64))
    keys, at, sizes = [f"{key}-1", f"{key}-2"], [one[0].addr, two[0].addr], [one[1], two[1]]
    assert store.batch_put_tensor_from(keys, at, sizes) == [0, 0]
    assert store.batch_upsert_tensor_from(keys, at, [sizes[0], 10]) == [0, -600]
    into = [Buffer(1000), Buffer(1000)]
    found = store.batch_get_tensor_into(keys, [each.addr for each in into], [1000, 1000])
    assert torch.equal(found[0], made(3)) and torch.equal(found[1], made(4, dtype=torch.int64))
    store.unregister_buffer(memory.addr)


def test_calls_of_tensors_are_awaited(make_store, key):
    store, tensor = make_store(MooncakeDistributedStoreAsync), made(4, 6)

    async def run():
        assert await store.async_put_tensor(key, tensor) == 0
        assert torch.equal(await store.async_get_tensor(key), tensor)
        assert await store.async_batch_put_tensor([f"{key}-1"], [tensor]) == [0]
        assert torch.equal((await store.async_batch_get_tensor([f"{key}-1"]))[0], tensor)
        assert await store.async_upsert_tensor(key, tensor + 1) == 0
        assert torch.equal(await store.async_get_tensor(key), tensor + 1)
        assert await store.async_pub_tensor(f"{key}-2", tensor, ReplicateConfig()) == 0
        assert await store.async_put_tensor_with_tp(f"{key}-3", tensor, tp_size=2) == 0
        assert torch.equal(await store.async_get_tensor_with_tp(f"{key}-3", 1, 2), tensor[2:])
        memory = Buffer(HEADER + 96)
        assert torch.equal(await store.async_get_tensor_into(f"{key}-2", memory.addr, memory.size), tensor)
        assert await store.async_put_tensor_with_parallelism(f"{key}-4", tensor) == 0
        assert torch.equal(await store.async_get_tensor_with_parallelism(f"{key}-4"), tensor)

    asyncio.run(run())


@pytest.mark.parametrize("dim", [0, 1])
def test_tensor_parallelism(store, key, dim):
    tensor = made(8, 12)
    assert store.put_tensor_with_tp(key, tensor, tp_rank=1, tp_size=4, split_dim=dim) == 0
    for rank, part in enumerate(tensor.chunk(4, dim)):
        assert torch.equal(store.get_tensor_with_tp(key, rank, 4, dim), part)
        assert store.is_exist(f"{key}_tp_{rank}") == 1
        memory = Buffer(1000)
        assert torch.equal(store.get_tensor_with_tp_into(key, memory.addr, 1000, rank, 4, dim), part)
    assert store.get_tensor_with_tp(key, 4, 4) is None
    assert store.put_tensor_with_tp(f"{key}-no", tensor, 0, 100, dim) == -600
    assert store.put_tensor_with_tp(f"{key}-no", tensor, 0, 2, 5) == -600


def test_tensor_parallelism_in_batches(store, key):
    keys, tensors = [f"{key}-1", f"{key}-2"], [made(4, 4), made(8)]
    assert store.batch_put_tensor_with_tp(keys, tensors, tp_size=2) == [0, 0]
    found = store.batch_get_tensor_with_tp([*keys, f"{key}-none"], 1, 2)
    assert torch.equal(found[0], tensors[0][2:]) and torch.equal(found[1], tensors[1][4:]) and found[2] is None
    assert store.batch_pub_tensor_with_tp([f"{key}-3"], [made(4)], ReplicateConfig(), 0, 2, 0) == [0]
    assert store.pub_tensor_with_tp(f"{key}-4", made(4), ReplicateConfig(), tp_size=2) == 0
    memory, size = serialized(made(6, 2))
    assert store.put_tensor_with_tp_from(f"{key}-5", memory.addr, size, 0, 3, 0) == 0
    assert torch.equal(store.get_tensor_with_tp(f"{key}-5", 2, 3), made(6, 2)[4:])
    assert store.batch_put_tensor_with_tp_from([f"{key}-6"], [memory.addr], [size], 0, 1, 0) == [0]
    assert torch.equal(store.get_tensor(f"{key}-6"), made(6, 2))
    into = [Buffer(1000), Buffer(1000)]
    found = store.batch_get_tensor_with_tp_into(keys, [each.addr for each in into], [1000, 1000], 0, 2)
    assert torch.equal(found[1], tensors[1][:4])


def tp(rank, size, dim):
    return TensorParallelism([ParallelAxis("tp", rank, size, dim)])


def target(mode, parallelism=None):
    wanted = ReadTarget()
    wanted.mode, wanted.parallelism = mode, parallelism
    return wanted


def test_defaults_of_the_request_objects():
    axis = ParallelAxis()
    assert (axis.kind, axis.rank, axis.size, axis.split_dim, axis.expert_id, axis.stage_id) == ("", 0, 1, None, None, None)
    assert TensorParallelism().axes == [] and ReadTarget().mode == "as_stored" and ReadTarget().parallelism is None


def test_shards_are_put_together_and_cut_anew(store, key):
    tensor = made(8, 12)
    for rank, part in enumerate(tensor.chunk(4, 1)):
        assert store.put_tensor_with_parallelism(key, part, tp(rank, 4, 1)) == 0
    assert torch.equal(store.get_tensor_with_parallelism(key, target("full")), tensor)
    assert torch.equal(store.get_tensor_with_parallelism(key, target("shard", tp(3, 4, 1))), tensor[:, 9:])
    assert torch.equal(store.get_tensor_with_parallelism(key, target("shard", tp(1, 2, 1))), tensor[:, 6:])
    assert torch.equal(store.get_tensor_with_parallelism(key, target("shard", tp(1, 2, 0))), tensor[4:])
    assert store.get_tensor_with_parallelism(key) is None
    assert torch.equal(store.get_tensor_with_parallelism(key, target("as_stored", tp(0, 4, 1))), tensor[:, :3])
    store.remove(f"{key}_tp_2", True)
    assert store.get_tensor_with_parallelism(key, target("full")) is None


def test_a_shard_of_a_whole_tensor(store, key):
    tensor = made(8, 12)
    assert store.put_tensor_with_parallelism(key, tensor) == 0
    assert torch.equal(store.get_tensor_with_parallelism(key), tensor)
    assert torch.equal(store.get_tensor_with_parallelism(key, target("shard", tp(1, 4, 0))), tensor[2:4])
    assert store.get_tensor_with_parallelism(key, target("shard", tp(1, 5, 0))) is None
    assert store.get_tensor_with_parallelism(key, target("shard")) is None


def test_writer_partitions(store, key):
    tensor = made(4, 6)
    for rank in range(3):
        assert store.put_tensor_with_parallelism(key, tensor, writer_partition=(rank, 3, 1)) == 0
    assert torch.equal(store.get_tensor_with_parallelism(key, target("full")), tensor)
    assert store.put_tensor_with_parallelism(f"{key}-no", tensor, tp(0, 3, 1), writer_partition=(0, 3, 1)) == -600
    assert store.put_tensor_with_parallelism(f"{key}-no", tensor, writer_partition=(3, 3, 1)) == -600
    assert store.put_tensor_with_parallelism(f"{key}-no", tensor, writer_partition="x") == -600


def test_several_axes_take_the_whole_tensor(store, key):
    tensor = made(4, 6)

    def shard(stage, rank):
        return TensorParallelism([ParallelAxis("pp", stage, 2, None, None, stage), ParallelAxis("tp", rank, 2, 0)])

    for stage in range(2):
        for rank in range(2):
            assert store.put_tensor_with_parallelism(key, tensor + stage, shard(stage, rank)) == 0
    assert torch.equal(store.get_tensor_with_parallelism(key, target("shard", shard(1, 1))), tensor[2:] + 1)
    assert torch.equal(store.get_tensor_with_parallelism(key, target("full", shard(1, 0))), tensor + 1)


@pytest.mark.parametrize("axis", [ParallelAxis("xp", 0, 1), ParallelAxis("tp", 2, 2, 0), ParallelAxis("tp", 0, 0, 0)])
def test_axes_that_are_none(store, key, axis):
    assert store.put_tensor_with_parallelism(key, made(4), TensorParallelism([axis])) == -600


def test_parallelism_from_and_into_memory_and_in_batches(store, key):
    tensor = made(4, 6)
    memory, size = serialized(tensor)
    assert store.put_tensor_with_parallelism_from(f"{key}-1", memory.addr, size, writer_partition=(1, 2, 0)) == 0
    assert torch.equal(store.get_tensor_with_tp(f"{key}-1", 1, 2), tensor[2:])
    assert store.upsert_tensor_with_parallelism_from(f"{key}-1", memory.addr, size, tp(1, 2, 0)) == 0
    assert torch.equal(store.get_tensor_with_tp(f"{key}-1", 1, 2), tensor)
    keys = [f"{key}-2", f"{key}-3"]
    assert store.batch_put_tensor_with_parallelism(keys, [tensor, tensor], [None, tp(0, 1, 0)]) == [0, 0]
    assert store.batch_upsert_tensor_with_parallelism(keys, [tensor, tensor], writer_partitions=[None, (0, 2, 0)]) == [0, 0]
    assert store.upsert_tensor_with_parallelism(keys[0], tensor * 2) == 0
    at = [memory.addr, memory.addr]
    assert store.batch_put_tensor_with_parallelism_from([f"{key}-4", f"{key}-5"], at, [size, 5]) == [0, -600]
    assert store.batch_upsert_tensor_with_parallelism_from([f"{key}-4"], at[:1], [size], [None]) == [0]
    found = store.batch_get_tensor_with_parallelism([keys[0], keys[1]], [None, target("as_stored", tp(0, 2, 0))])
    assert torch.equal(found[0], tensor * 2) and torch.equal(found[1], tensor[:2])
    into = [Buffer(1000), Buffer(100)]
    wanted = [target("shard", tp(1, 2, 1)), None]
    found = store.batch_get_tensor_with_parallelism_into([keys[0]] * 2, [each.addr for each in into], [1000, 100], wanted)
    assert torch.equal(found[0], (tensor * 2)[:, 3:]) and found[1] is None
    assert found[0].data_ptr() == into[0].addr + HEADER
    found = store.get_tensor_with_parallelism_into(keys[0], into[0].addr, 1000)
    assert torch.equal(found, tensor * 2)


def test_gpu_calls_say_that_there_are_none(store, key):
    with pytest.raises(NotImplementedError):
        store.get_tensor_into_cuda(key, made(1))
    with pytest.raises(NotImplementedError):
        store.batch_get_tensor_into_cuda([key], [made(1)])


def test_safetensors(store, key, tmp_path, monkeypatch):
    pytest.importorskip("safetensors", reason="files of tensors are not tested: safetensors is not installed")
    monkeypatch.chdir(tmp_path)
    tensor = made(5, 5)
    store.put_tensor(key, tensor)
    assert store.save_tensor_to_safetensor(key) == 0 and (tmp_path / key).exists()
    assert store.save_tensor_to_safetensor(f"{key}-none", "f") == -704
    assert store.save_tensor_to_safetensor(key, str(tmp_path / "f")) == 0
    store.remove(key, True)
    assert torch.equal(store.load_tensor_from_safetensor(key, str(tmp_path / "f")), tensor)
    assert torch.equal(store.get_tensor(key), tensor)
    assert torch.equal(store.load_tensor_from_safetensor(f"{key}-other", str(tmp_path / "f")), tensor)
    assert torch.equal(store.get_tensor(f"{key}-other"), tensor)
    assert torch.equal(store.load_tensor_from_safetensor(file_name="f"), tensor)
    assert torch.equal(store.get_tensor("f"), tensor)
    assert store.load_tensor_from_safetensor(key, "no-such-file") is None
    with pytest.raises(TypeError):
        store.load_tensor_from_safetensor(key)
