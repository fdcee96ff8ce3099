"""PyTorch tensors: stored with their type and shape, whole or cut for tensor parallelism (`<key>_tp_<rank>`)."""

import ctypes
import logging
import os
from collections.abc import Sequence
from typing import Any, Optional

from mooncake.store import codes
from mooncake.store.buffers import BufferHandle
from mooncake.store.parallelism import ParallelAxis, TensorParallelism
from mooncake.store.replicate import ReplicateConfig
from mooncake.store.segments import Segments
from mooncake.store.tensor_format import (
    HEADER_BYTES,
    Header,
    NotATensor,
    copy_from,
    describe,
    header_at,
    tensor_at,
    tensor_of,
    torch_module,
)

log = logging.getLogger("mooncake.store")


class Write:
    """One object to be written: its key, the tensor, and the shard that it is."""

    def __init__(self, key: str, tensor: Any, parallelism: Optional[TensorParallelism] = None) -> None:
        if parallelism is not None:
            parallelism.check()
        self.key = key
        self.header, self.tensor = describe(tensor, parallelism)
        self.packed = self.header.pack()


def chunks(key: str, tensor: Any, tp_size: int, split_dim: int) -> list[Write]:
    """The writes of all shards of a tensor. NotATensor when it cannot be cut so."""
    if tp_size <= 1:
        return [Write(key, tensor)]
    describe(tensor)
    if not -tensor.dim() <= split_dim < tensor.dim():
        raise NotATensor(f"dimension {split_dim} of a tensor with {tensor.dim()}")
    parts = tensor.chunk(tp_size, split_dim)
    if len(parts) != tp_size:
        raise NotATensor(f"dimension {split_dim} has {tensor.shape[split_dim]} rows; {tp_size} shards cannot be cut of it")
    return [
        Write(f"{key}_tp_{rank}", part, TensorParallelism([ParallelAxis("tp", rank, tp_size, split_dim)]))
        for rank, part in enumerate(parts)
    ]


class Tensors(Segments):
    """Tensors. Calls that store answer 0 or negative, calls that read a tensor or None. ImportError without torch."""

    # Storing what every call has made of its tensors: lists of writes, one list an argument.

    def _store(self, plans: Sequence, config: Optional[ReplicateConfig], upsert: bool) -> list[int]:
        """One number a plan: 0, or that of the first of its writes that failed. A plan is a list of writes, or a number."""
        writes = [write for plan in plans if isinstance(plan, list) for write in plan]
        headers = ctypes.create_string_buffer(b"".join(write.packed for write in writes), HEADER_BYTES * len(writes) + 1)
        base = ctypes.addressof(headers)
        pointers, sizes = [], []
        for n, write in enumerate(writes):
            at, length = base + n * HEADER_BYTES, write.header.length
            pointers.append((at, write.tensor.data_ptr()) if length else (at,))
            sizes.append((HEADER_BYTES, length) if length else (HEADER_BYTES,))
        total = sum(map(sum, sizes))
        stored = iter(self._put_from([write.key for write in writes], pointers, sizes, total, config, upsert))
        results = []
        for plan in plans:
            if isinstance(plan, list):
                answers = [next(stored) for _ in plan]
                results.append(next((code for code in answers if code), codes.OK))
            else:
                results.append(plan)
        return results

    def _plan(self, make) -> Any:
        """The writes that `make` makes, or -600 and a line in the log."""
        try:
            return make()
        except ValueError as error:
            log.warning("tensor: %s", error)
            return codes.INVALID_PARAMS

    def _plans(self, keys: Sequence[str], tensors: Sequence, make) -> list:
        if len(keys) != len(tensors):
            return [codes.INVALID_PARAMS] * len(keys)
        return [self._plan(lambda key=key, tensor=tensor: make(key, tensor)) for key, tensor in zip(keys, tensors)]

    def _whole(self, keys, tensors, config=None, upsert=False) -> list[int]:
        return self._store(self._plans(keys, tensors, lambda key, tensor: [Write(key, tensor)]), config, upsert)

    def _cut(self, keys, tensors, tp_size: int, split_dim: int, config=None) -> list[int]:
        plans = self._plans(keys, tensors, lambda key, tensor: chunks(key, tensor, tp_size, split_dim))
        return self._store(plans, config, False)

    def put_tensor(self, key: str, tensor: Any) -> int:
        return self._whole([key], [tensor])[0]

    def pub_tensor(self, key: str, tensor: Any, config: Optional[ReplicateConfig] = None) -> int:
        return self._whole([key], [tensor], config)[0]

    def upsert_tensor(self, key: str, tensor: Any) -> int:
        return self._whole([key], [tensor], None, True)[0]

    def upsert_pub_tensor(self, key: str, tensor: Any, config: Optional[ReplicateConfig] = None) -> int:
        return self._whole([key], [tensor], config, True)[0]

    def batch_put_tensor(self, keys: Sequence[str], tensors_list: Sequence) -> list[int]:
        return self._whole(keys, tensors_list)

    def batch_pub_tensor(
        self, keys: Sequence[str], tensors_list: Sequence, config: Optional[ReplicateConfig] = None
    ) -> list[int]:
        return self._whole(keys, tensors_list, config)

    def batch_upsert_tensor(self, keys: Sequence[str], tensors_list: Sequence) -> list[int]:
        return self._whole(keys, tensors_list, None, True)

    def batch_upsert_pub_tensor(
        self, keys: Sequence[str], tensors_list: Sequence, config: Optional[ReplicateConfig] = None
    ) -> list[int]:
        return self._whole(keys, tensors_list, config, True)

    def put_tensor_with_tp(self, key: str, tensor: Any, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0) -> int:
        """Cuts the tensor and stores the shards of all ranks, whatever `tp_rank` is."""
        return self._cut([key], [tensor], tp_size, split_dim)[0]

    def pub_tensor_with_tp(
        self,
        key: str,
        tensor: Any,
        config: Optional[ReplicateConfig] = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> int:
        return self._cut([key], [tensor], tp_size, split_dim, config)[0]

    def batch_put_tensor_with_tp(
        self, base_keys: Sequence[str], tensors_list: Sequence, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> list[int]:
        return self._cut(base_keys, tensors_list, tp_size, split_dim)

    def batch_pub_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence,
        config: Optional[ReplicateConfig] = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        return self._cut(base_keys, tensors_list, tp_size, split_dim, config)

    # From serialized tensors in memory: header and elements in a row, as `get_tensor_into` leaves them.

    def _checked_from(self, keys, buffer_ptrs, sizes, upsert: bool, config=None) -> list[int]:
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [codes.INVALID_PARAMS] * len(keys)
        wrong = {n for n, (at, size) in enumerate(zip(buffer_ptrs, sizes)) if not self._is_tensor(at, size)}
        right = [n for n in range(len(keys)) if n not in wrong]
        results = [codes.INVALID_PARAMS] * len(keys)
        wanted = [sizes[n] for n in right]
        stored = self._put_from([keys[n] for n in right], [buffer_ptrs[n] for n in right], wanted, sum(wanted), config, upsert)
        for n, code in zip(right, stored):
            results[n] = code
        return results

    def _is_tensor(self, address: int, size: int) -> bool:
        try:
            header_at(address, size)
        except NotATensor as error:
            log.warning("tensor: %s", error)
            return False
        return True

    def put_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        return self._checked_from([key], [buffer_ptr], [size], False)[0]

    def upsert_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        return self._checked_from([key], [buffer_ptr], [size], True)[0]

    def batch_put_tensor_from(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        return self._checked_from(keys, buffer_ptrs, sizes, False)

    def batch_upsert_tensor_from(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        return self._checked_from(keys, buffer_ptrs, sizes, True)

    def put_tensor_with_tp_from(
        self, key: str, buffer_ptr: int, size: int, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        return self.batch_put_tensor_with_tp_from([key], [buffer_ptr], [size], tp_rank, tp_size, split_dim)[0]

    def batch_put_tensor_with_tp_from(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> list[int]:
        """As `put_tensor_with_tp`, of a whole tensor in memory."""
        if not len(base_keys) == len(buffer_ptrs) == len(sizes):
            return [codes.INVALID_PARAMS] * len(base_keys)
        plans = self._plans(
            base_keys, list(zip(buffer_ptrs, sizes)), lambda key, at: chunks(key, copy_from(*at)[1], tp_size, split_dim)
        )
        return self._store(plans, None, False)

    # Reading.

    def _tensors(self, keys: Sequence[str]) -> list[Optional[tuple[Header, Any]]]:
        """(header, tensor) a key, None where there is none."""
        torch_module()
        results: list[Optional[tuple[Header, Any]]] = []
        for key, value in zip(keys, self.batch_get_buffer(keys)):
            try:
                results.append(tensor_of(value) if isinstance(value, BufferHandle) else None)
            except NotATensor as error:
                log.warning("object '%s': %s", key, error)
                results.append(None)
        return results

    def _tensors_into(self, keys, buffer_ptrs, sizes) -> list:
        torch_module()
        results = []
        for key, at, length in zip(keys, buffer_ptrs, self.batch_get_into(keys, buffer_ptrs, sizes)):
            try:
                results.append(tensor_at(at, length)[1] if length > 0 else None)
            except NotATensor as error:
                log.warning("object '%s': %s", key, error)
                results.append(None)
        return results

    def get_tensor(self, key: str) -> Any:
        return self.batch_get_tensor([key])[0]

    def batch_get_tensor(self, keys: Sequence[str]) -> list:
        return [found[1] if found else None for found in self._tensors(keys)]

    def get_tensor_into(self, key: str, buffer_ptr: int, size: int) -> Any:
        """The tensor, over the caller's memory: header, then elements."""
        return self._tensors_into([key], [buffer_ptr], [size])[0]

    def batch_get_tensor_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list:
        return self._tensors_into(keys, buffer_ptrs, sizes)

    def get_tensor_with_tp(self, key: str, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0) -> Any:
        """The shard of one rank."""
        return self.batch_get_tensor_with_tp([key], tp_rank, tp_size)[0]

    def batch_get_tensor_with_tp(self, base_keys: Sequence[str], tp_rank: int = 0, tp_size: int = 1) -> list:
        return self.batch_get_tensor(_of_rank(base_keys, tp_rank, tp_size))

    def get_tensor_with_tp_into(
        self, key: str, buffer_ptr: int, size: int, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> Any:
        return self.batch_get_tensor_with_tp_into([key], [buffer_ptr], [size], tp_rank, tp_size)[0]

    def batch_get_tensor_with_tp_into(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> list:
        return self._tensors_into(_of_rank(base_keys, tp_rank, tp_size), buffer_ptrs, sizes)

    def get_tensor_into_cuda(self, key: str, tensor: Any) -> int:
        raise NotImplementedError("get_tensor_into_cuda: GPU memory is not supported; use get_tensor and copy")

    def batch_get_tensor_into_cuda(self, keys: Sequence[str], tensors_list: Sequence) -> list[int]:
        raise NotImplementedError("batch_get_tensor_into_cuda: GPU memory is not supported; use batch_get_tensor and copy")

    # Files.

    def save_tensor_to_safetensor(self, key: str, file_name: Optional[str] = None) -> int:
        """Writes a tensor into a safetensors file, named like the key unless told; 0, -704 when there is none."""
        from safetensors.torch import save_file

        tensor = self.get_tensor(key)
        if tensor is None:
            return codes.OBJECT_NOT_FOUND
        save_file({key: tensor}, os.fspath(file_name or key))
        return codes.OK

    def load_tensor_from_safetensor(self, key: Optional[str] = None, file_name: Optional[str] = None) -> Any:
        """Reads a tensor of a safetensors file and stores it, under the file's name when no key is given; the tensor, or None.

        A file without that key gives its first tensor, and a warning.
        """
        from safetensors.torch import load_file

        if not isinstance(file_name, (str, os.PathLike)):
            raise TypeError(f"load_tensor_from_safetensor() takes a path for 'file_name', not {file_name!r}")
        if not os.path.exists(file_name):
            log.error("load_tensor_from_safetensor: there is no file '%s'", file_name)
            return None
        tensors = load_file(os.fspath(file_name))
        if not tensors:
            return None
        if key is not None and key not in tensors:
            log.warning("file '%s' has no tensor '%s'; its first one is taken", file_name, key)
        tensor = tensors.get(key, next(iter(tensors.values())))
        code = self.put_tensor(key or os.fspath(file_name), tensor)
        if code != codes.OK:
            log.error("load_tensor_from_safetensor: the tensor was read but not stored (%d)", code)
        return tensor


def _of_rank(keys: Sequence[str], tp_rank: int, tp_size: int) -> list[str]:
    return [f"{key}_tp_{tp_rank}" for key in keys] if tp_size > 1 else list(keys)
