"""Tensors by shard: written as `TensorParallelism` says, read as `ReadTarget` wants them."""

import ctypes
import logging
from collections.abc import Sequence
from typing import Any, Optional

from mooncake.store import codes
from mooncake.store.parallelism import MODES, ParallelAxis, ReadTarget, TensorParallelism, partition_of, shard_key
from mooncake.store.replicate import ReplicateConfig
from mooncake.store.tensor_format import HEADER_BYTES, Header, NotATensor, copy_from, describe, tensor_at, torch_module
from mooncake.store.tensors import Tensors, Write
from tidepool import _native

log = logging.getLogger("mooncake.store")


def _shard_write(key: str, tensor: Any, parallelism: Optional[TensorParallelism], partition: object) -> list[Write]:
    """The write that stores a tensor as that shard. With several axes, or a partition, the whole tensor is given and cut here."""
    if parallelism is not None and not isinstance(parallelism, TensorParallelism):
        raise TypeError(f"parallelism takes a TensorParallelism, not {parallelism!r}")
    if parallelism is not None and partition is not None:
        raise NotATensor("parallelism and writer_partition are both given; give one")
    whole = partition is not None or (parallelism is not None and len(parallelism.axes) > 1)
    if partition is not None:
        parallelism = TensorParallelism([partition_of(partition)])
    if parallelism is None:
        return [Write(key, tensor)]
    parallelism.check()
    describe(tensor)
    axis = parallelism.tp()
    return [Write(shard_key(key, parallelism), _cut(tensor, axis) if whole and axis else tensor, parallelism)]


def _cut(tensor: Any, axis: ParallelAxis) -> Any:
    """The shard of one rank, of a whole tensor. All shards are of one size."""
    dim = axis.split_dim or 0
    if not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] % axis.size or axis.rank >= axis.size or axis.rank < 0:
        raise NotATensor(f"a tensor of shape {tuple(tensor.shape)} has no shard {axis.rank} of {axis.size} along {dim}")
    return tensor.chunk(axis.size, dim)[axis.rank]


class ParallelTensors(Tensors):
    """The `*_with_parallelism` calls."""

    def _parallel(self, keys, tensors, parallelisms, config, partitions, upsert: bool, load=lambda tensor: tensor) -> list[int]:
        count = len(keys)
        parallelisms = [None] * count if parallelisms is None else parallelisms
        partitions = [None] * count if partitions is None else partitions
        if not len(tensors) == len(parallelisms) == len(partitions) == count:
            return [codes.INVALID_PARAMS] * count
        plans = [
            self._plan(lambda each=each: _shard_write(each[0], load(each[1]), *each[2:]))
            for each in zip(keys, tensors, parallelisms, partitions)
        ]
        return self._store(plans, config, upsert)

    def _parallel_from(self, keys, buffer_ptrs, sizes, parallelisms, config, partitions, upsert: bool) -> list[int]:
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [codes.INVALID_PARAMS] * len(keys)
        at = list(zip(buffer_ptrs, sizes))
        return self._parallel(keys, at, parallelisms, config, partitions, upsert, lambda place: copy_from(*place)[1])

    def put_tensor_with_parallelism(
        self,
        key: str,
        tensor: Any,
        parallelism: Optional[TensorParallelism] = None,
        config: Optional[ReplicateConfig] = None,
        writer_partition: object = None,
    ) -> int:
        """Stores a tensor as one shard, or whole. With tensor parallelism alone `tensor` is the shard; with several axes, or a
        `writer_partition`, it is the whole tensor, of which the shard is cut."""
        return self._parallel([key], [tensor], [parallelism], config, [writer_partition], False)[0]

    def upsert_tensor_with_parallelism(
        self,
        key: str,
        tensor: Any,
        parallelism: Optional[TensorParallelism] = None,
        config: Optional[ReplicateConfig] = None,
        writer_partition: object = None,
    ) -> int:
        return self._parallel([key], [tensor], [parallelism], config, [writer_partition], True)[0]

    def batch_put_tensor_with_parallelism(
        self,
        keys: Sequence[str],
        tensors_list: Sequence,
        parallelisms: Optional[Sequence] = None,
        config: Optional[ReplicateConfig] = None,
        writer_partitions: Optional[Sequence] = None,
    ) -> list[int]:
        return self._parallel(keys, tensors_list, parallelisms, config, writer_partitions, False)

    def batch_upsert_tensor_with_parallelism(
        self,
        keys: Sequence[str],
        tensors_list: Sequence,
        parallelisms: Optional[Sequence] = None,
        config: Optional[ReplicateConfig] = None,
        writer_partitions: Optional[Sequence] = None,
    ) -> list[int]:
        return self._parallel(keys, tensors_list, parallelisms, config, writer_partitions, True)

    def put_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: Optional[TensorParallelism] = None,
        config: Optional[ReplicateConfig] = None,
        writer_partition: object = None,
    ) -> int:
        return self._parallel_from([key], [buffer_ptr], [size], [parallelism], config, [writer_partition], False)[0]

    def upsert_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: Optional[TensorParallelism] = None,
        config: Optional[ReplicateConfig] = None,
        writer_partition: object = None,
    ) -> int:
        return self._parallel_from([key], [buffer_ptr], [size], [parallelism], config, [writer_partition], True)[0]

    def batch_put_tensor_with_parallelism_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Optional[Sequence] = None,
        config: Optional[ReplicateConfig] = None,
        writer_partitions: Optional[Sequence] = None,
    ) -> list[int]:
        return self._parallel_from(keys, buffer_ptrs, sizes, parallelisms, config, writer_partitions, False)

    def batch_upsert_tensor_with_parallelism_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Optional[Sequence] = None,
        config: Optional[ReplicateConfig] = None,
        writer_partitions: Optional[Sequence] = None,
    ) -> list[int]:
        return self._parallel_from(keys, buffer_ptrs, sizes, parallelisms, config, writer_partitions, True)

    # Reading.

    def get_tensor_with_parallelism(self, key: str, target: Optional[ReadTarget] = None) -> Any:
        """What `target` wants of the tensor, or None. A shard that is not stored is cut from the whole tensor, and that is put
        together from its shards, when these are there."""
        return self.batch_get_tensor_with_parallelism([key], [target])[0]

    def batch_get_tensor_with_parallelism(self, keys: Sequence[str], targets: Optional[Sequence] = None) -> list:
        targets = [None] * len(keys) if targets is None else targets
        if len(targets) != len(keys):
            return [None] * len(keys)
        return [found[1] if found else None for found in map(self._wanted, keys, targets)]

    def get_tensor_with_parallelism_into(
        self, key: str, buffer_ptr: int, size: int, target: Optional[ReadTarget] = None
    ) -> Any:
        """The same over the caller's memory: header, then elements."""
        return self.batch_get_tensor_with_parallelism_into([key], [buffer_ptr], [size], [target])[0]

    def batch_get_tensor_with_parallelism_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], targets: Optional[Sequence] = None
    ) -> list:
        targets = [None] * len(keys) if targets is None else targets
        if not len(keys) == len(buffer_ptrs) == len(sizes) == len(targets):
            return [None] * len(keys)
        return [self._into(*each) for each in zip(keys, buffer_ptrs, sizes, targets)]

    def _into(self, key: str, address: int, size: int, target: Optional[ReadTarget]) -> Any:
        found = self._wanted(key, target)
        if found is None:
            return None
        header, tensor = describe(found[1], found[0].parallelism)
        total = HEADER_BYTES + header.length
        if total > size:
            log.warning("tensor '%s' has %d bytes with its header; the buffer has %d", key, total, size)
            return None
        packed = ctypes.create_string_buffer(header.pack(), HEADER_BYTES)
        targets, sources, sizes = [address], [ctypes.addressof(packed)], [HEADER_BYTES]
        if header.length:
            targets.append(address + HEADER_BYTES)
            sources.append(tensor.data_ptr())
            sizes.append(header.length)
        try:
            _native.copy_memory(targets, sources, sizes, unchecked=True)
        except ValueError as error:
            log.warning("tensor '%s': %s", key, error)
            return None
        return tensor_at(address, total)[1]

    def _wanted(self, key: str, target: Optional[ReadTarget]) -> Optional[tuple[Header, Any]]:
        if target is not None and not isinstance(target, ReadTarget):
            raise TypeError(f"target takes a ReadTarget, not {target!r}")
        mode = "as_stored" if target is None else target.mode
        parallelism = None if target is None else target.parallelism
        if mode not in MODES or (mode == "shard" and parallelism is None):
            log.warning("tensor '%s': a target of mode %r with parallelism %r", key, mode, parallelism)
            return None
        try:
            if parallelism is not None:
                parallelism.check()
            if mode == "as_stored":
                return self._tensors([shard_key(key, parallelism)])[0]
            if mode == "shard" and parallelism is not None:
                return self._shard(key, parallelism)
            return self._full(key, parallelism)
        except ValueError as error:
            log.warning("tensor '%s': %s", key, error)
            return None

    def _shard(self, key: str, parallelism: TensorParallelism) -> Optional[tuple[Header, Any]]:
        stored = self._tensors([shard_key(key, parallelism)])[0]
        axis = parallelism.tp()
        if stored is not None and (axis is None or _size_along_tp(stored[0]) in (None, axis.size)):
            return stored
        if axis is None:
            return None
        whole = self._full(key, parallelism)
        if whole is None:
            return None
        return describe(_cut(whole[1], axis), parallelism)

    def _full(self, key: str, parallelism: Optional[TensorParallelism]) -> Optional[tuple[Header, Any]]:
        whole = self._tensors([key])[0]
        if whole is not None:
            return whole
        if parallelism is None or parallelism.tp() is None:
            parallelism = TensorParallelism([ParallelAxis("tp", 0, 1, 0)])
        first = self._tensors([shard_key(key, parallelism.with_tp_rank(0, 1, 0))])[0]
        axis = first[0].parallelism.tp() if first and first[0].parallelism else None
        if axis is None or axis.split_dim is None:
            return None
        rest = [shard_key(key, parallelism.with_tp_rank(rank, axis.size, axis.split_dim)) for rank in range(1, axis.size)]
        shards = [shard for shard in [first, *self._tensors(rest)] if shard and _size_along_tp(shard[0]) == axis.size]
        if len(shards) < axis.size:
            return None
        try:
            return describe(torch_module().cat([shard[1] for shard in shards], axis.split_dim))
        except (RuntimeError, IndexError) as error:
            raise NotATensor(f"its {axis.size} shards do not fit together along {axis.split_dim}: {error}") from error


def _size_along_tp(header: Header) -> Optional[int]:
    axis = header.parallelism.tp() if header.parallelism else None
    return None if axis is None else axis.size
