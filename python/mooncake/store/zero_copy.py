"""Whole objects from and into memory that the caller names by address.

Addresses need not be registered, as over TCP in Mooncake; memory that is not mapped here is refused (-600), never touched. The
caller keeps the memory as it is until the call returned. When a get fails, what its buffer holds is undefined.
"""

from collections.abc import Sequence
from typing import Optional

from mooncake.store import codes
from mooncake.store.deadlines import for_put
from mooncake.store.objects import RAISED, Objects, code_of
from mooncake.store.replicate import ReplicateConfig, group_names, put_options
from mooncake.store.sources import copied


class ZeroCopy(Objects):
    """Objects from and into addresses."""

    def put_from(self, key: str, buffer_ptr: int, size: int, config: Optional[ReplicateConfig] = None) -> int:
        """Stores `size` bytes at an address."""
        return self._put_from([key], [buffer_ptr], [size], size, config, False)[0]

    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: Optional[ReplicateConfig] = None) -> int:
        """As `put_from`, in place of what the key has."""
        return self._put_from([key], [buffer_ptr], [size], size, config, True)[0]

    def put_from_with_metadata(
        self,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: Optional[ReplicateConfig] = None,
    ) -> int:
        """Stores the metadata and after it the data, as one object."""
        pointers, sizes = [metadata_buffer_ptr, buffer_ptr], [metadata_size, size]
        if not metadata_size:
            pointers, sizes = pointers[1:], sizes[1:]
        return self._put_from([key], [pointers], [sizes], sum(sizes), config, False)[0]

    def batch_put_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], config: Optional[ReplicateConfig] = None
    ) -> list[int]:
        """0 or negative a key; a key that has an object already is 0, and the object stays."""
        if len(sizes) != len(keys):
            return [codes.INVALID_PARAMS] * len(keys)
        return self._put_from(keys, buffer_ptrs, sizes, sum(sizes), config, False)

    def batch_upsert_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], config: Optional[ReplicateConfig] = None
    ) -> list[int]:
        """As `batch_put_from`, in place of what the keys have."""
        if len(sizes) != len(keys):
            return [codes.INVALID_PARAMS] * len(keys)
        return self._put_from(keys, buffer_ptrs, sizes, sum(sizes), config, True)

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: Optional[ReplicateConfig] = None,
    ) -> list[int]:
        """Each object is gathered from several places. [] before `setup`, as in Mooncake; engines rely on it."""
        if self._client is None:
            return []
        if len(all_sizes) != len(keys):
            return [codes.INVALID_PARAMS] * len(keys)
        return self._put_from(keys, all_buffer_ptrs, all_sizes, sum(map(sum, all_sizes)), config, False)

    def _put_from(self, keys, pointers, sizes, total: int, config: Optional[ReplicateConfig], upsert: bool) -> list[int]:
        client = self._client
        if client is None or len(pointers) != len(keys):
            return [codes.INVALID_PARAMS] * len(keys)
        try:
            held = copied(pointers, sizes, total)
            results = client.put_from_many(
                keys,
                held.addresses if held else pointers,
                held.sizes if held else sizes,
                put_options(config, upsert),
                groups=group_names(config, len(keys)),
                deadline=for_put(self._deadline, total),
                codes=True,
                unchecked=True,
            )
            return codes.settled(results, codes.OF_PUTS)
        except RAISED as error:
            return codes.settled([code_of(error)] * len(keys), codes.OF_PUTS)

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Bytes of the object, now at that address; -704 when there is none, -600 when it is longer than `size`."""
        return self._get_into([key], [buffer_ptr], [size])[0]

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """As `get_into`, a key. A key may stand there twice: each place gets its bytes."""
        if len(sizes) != len(keys):
            return [codes.INVALID_PARAMS] * len(keys)
        return self._get_into(keys, buffer_ptrs, sizes)

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Each object is scattered over several places, which are filled in order. The last argument means nothing to a read."""
        if len(all_sizes) != len(keys):
            return [codes.INVALID_PARAMS] * len(keys)
        return self._get_into(keys, all_buffer_ptrs, all_sizes)

    def _get_into(self, keys, pointers, sizes) -> list[int]:
        client = self._client
        if client is None or len(pointers) != len(keys):
            return [codes.INVALID_PARAMS] * len(keys)
        try:
            results = client.get_into_addresses_many(
                keys, pointers, sizes, deadline=self._deadline, codes=True, unchecked=True
            )
            return codes.settled(results, codes.OF_GETS)
        except RAISED as error:
            return codes.settled([code_of(error)] * len(keys), codes.OF_GETS)
