"""Whole objects as bytes: put, upsert, get, exist, remove, and what is known of their copies."""

import logging
from collections.abc import Sequence
from typing import Any, Optional

from mooncake.store import codes
from mooncake.store.buffers import BufferHandle
from mooncake.store.deadlines import LOOK_S, bytes_of, for_put
from mooncake.store.descriptors import ReplicaDescriptor, replicas_of
from mooncake.store.lifecycle import Lifecycle
from mooncake.store.replicate import ConfigRefused, ReplicateConfig, group_names, put_options
from mooncake.store.sources import COPIED_BYTES_MAX, frozen
from tidepool import _native

log = logging.getLogger("mooncake.store")


def code_of(error: BaseException) -> int:
    """The number of what a native call raised for the whole of a call."""
    log.debug("%s", error)
    if isinstance(error, _native.TidepoolError):
        return error.mooncake or codes.INTERNAL_ERROR
    return error.code if isinstance(error, ConfigRefused) else codes.INVALID_PARAMS


#: What a native call may raise for the whole of a call, apart from wrong types.
RAISED = (_native.TidepoolError, ConfigRefused, ValueError, OverflowError, BufferError)


def _contiguous(value: Any) -> Any:
    """The value as one run of bytes; a copy when it is not one."""
    view = memoryview(value)
    return value if view.c_contiguous else view.tobytes()


class Objects(Lifecycle):
    """Objects by key."""

    def put(self, key: str, value: object, config: Optional[ReplicateConfig] = None) -> int:
        """Stores a value of at least one byte. 0 also when the key has an object already, which stays."""
        return self._put([key], [value], config, False)[0]

    def upsert(self, key: str, value: object, config: Optional[ReplicateConfig] = None) -> int:
        """Stores a value in place of what the key has. Readers see the old value until the new one is whole."""
        return self._put([key], [value], config, True)[0]

    def put_parts(self, key: str, *args: object, config: Optional[ReplicateConfig] = None) -> int:
        """Stores the concatenation of the parts."""
        return self._put([key], [_parts(args)], config, False)[0]

    def upsert_parts(self, key: str, *args: object, config: Optional[ReplicateConfig] = None) -> int:
        """Stores the concatenation of the parts in place of what the key has."""
        return self._put([key], [_parts(args)], config, True)[0]

    def put_batch(
        self, keys: Sequence[str], values: Sequence[object], config: Optional[ReplicateConfig] = None
    ) -> int:
        """0, or the number of the first that failed; the others are stored."""
        return _first(self._put(keys, values, config, False))

    def upsert_batch(
        self, keys: Sequence[str], values: Sequence[object], config: Optional[ReplicateConfig] = None
    ) -> int:
        """As `put_batch`, in place of what the keys have."""
        return _first(self._put(keys, values, config, True))

    def _put(self, keys: Sequence[str], values: Sequence[object], config: Optional[ReplicateConfig], upsert: bool) -> list:
        client = self._client
        if client is None or len(keys) != len(values) or self._buffer_bytes == 0:
            # Without a local buffer Mooncake has nowhere to copy a value to; programs rely on being told.
            return [codes.INVALID_PARAMS] * max(len(keys), 1)
        try:
            options = put_options(config, upsert)
            groups = group_names(config, len(keys))
            total = bytes_of(values)
            deadline = for_put(self._deadline, total)
            if total < COPIED_BYTES_MAX:
                values = list(map(frozen, values))
            try:
                return client.put_many(keys, values, options, groups=groups, deadline=deadline, codes=True)
            except BufferError:
                values = [tuple(map(_contiguous, v)) if isinstance(v, (list, tuple)) else _contiguous(v) for v in values]
                return client.put_many(keys, values, options, groups=groups, deadline=deadline, codes=True)
        except RAISED as error:
            return [code_of(error)] * len(keys)

    def get(self, key: str) -> bytes:
        """The bytes; b"" when there are none, for whatever reason."""
        return self.get_batch([key])[0]

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        """Bytes a key, b"" where there are none; [b""] before `setup`, as in Mooncake."""
        client = self._client
        if client is None:
            return [b""]
        try:
            return client.get_bytes_many(keys, missing=b"")
        except RAISED as error:
            code_of(error)
            return [b""] * len(keys)

    def get_buffer(self, key: str) -> Optional[BufferHandle]:
        """The bytes where they arrived, without a copy; None when there are none."""
        return self.batch_get_buffer([key])[0]

    def batch_get_buffer(self, keys: Sequence[str]) -> list[Optional[BufferHandle]]:
        """As `get_buffer`, a key."""
        client = self._client
        if client is None:
            return [None] * len(keys)
        try:
            found = client.get_many(keys)
        except RAISED as error:
            code_of(error)
            return [None] * len(keys)
        return [value if isinstance(value, BufferHandle) else None for value in found]

    def is_exist(self, key: str) -> int:
        """1 or 0. When nobody can be asked, or `setup` failed, it is 0 too: engines that do not look at what `setup` says take this
        answer for a truth value, and a number below 0 for a hit."""
        code = self.batch_is_exist([key])[0]
        return 0 if code in codes.NOT_ANSWERED or self._setup_failed else code

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """1, 0 or negative a key. Grants read leases."""
        deadline = min(LOOK_S, self._deadline)
        return self._codes(keys, lambda client: client.exist_many(keys, deadline=deadline, codes=True))

    def get_size(self, key: str) -> int:
        """Bytes of an object, or negative."""
        deadline = min(LOOK_S, self._deadline)
        return self._codes([key], lambda client: client.size_many([key], deadline=deadline, codes=True))[0]

    def remove(self, key: str, force: bool = False) -> int:
        """Removes an object. -706 while a reader may be on it, unless `force`: its space is not reused before then."""
        return self.batch_remove([key], force)[0]

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """As `remove`, a key. Many at once wait for each other: the masters keep the outcomes of so many a client."""
        return self._codes(keys, lambda client: client.remove_many(keys, force=force, deadline=self._deadline, codes=True))

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Removes objects in whose keys the pattern is found; how many."""
        if not regex_pattern:
            return codes.INVALID_PARAMS
        return self._remove_matching(regex_pattern, force)

    def remove_all(self, force: bool = False) -> int:
        """Removes every object of the tenant that no reader may be on (with `force`: all); how many."""
        return self._remove_matching("", force)

    def _remove_matching(self, regex: str, force: bool) -> int:
        client = self._client
        if client is None:
            return codes.INVALID_PARAMS
        removed, after = 0, None
        try:
            while True:
                page = client.remove_matching(regex=regex, force=force, after=after)
                removed += page["removed"]
                if page["next"] is None or page["next"] == after:
                    return removed
                after = page["next"]
        except RAISED as error:
            return code_of(error)

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """The copies that a reader may use; [] when there are none."""
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """As `get_replica_desc`; keys without copies are left out."""
        client = self._client
        if client is None:
            return {}
        try:
            stats = client.stat_many(keys)
        except RAISED as error:
            code_of(error)
            return {}
        found = {key: replicas_of(stat) for key, stat in zip(keys, stats) if isinstance(stat, dict)}
        return {key: replicas for key, replicas in found.items() if replicas}

    def batch_replica_clear(self, keys: Sequence[str], segment_name: str = "") -> list[str]:
        """Drops the copies on one segment (all, when none is named) of objects that no reader may be on; the keys it did so for."""
        client = self._client
        if client is None or not keys:
            return []
        try:
            cleared = client.clear_replicas(keys, segment_name)
        except RAISED as error:
            code_of(error)
            return []
        return [key for key, done in zip(keys, cleared) if done is True]

    def _codes(self, keys: Sequence[str], call) -> list[int]:
        client = self._client
        if client is None:
            return [codes.INVALID_PARAMS] * len(keys)
        try:
            return call(client)
        except RAISED as error:
            return [code_of(error)] * len(keys)


def _parts(parts: tuple) -> tuple:
    for part in parts:
        view = memoryview(part)
        if view.ndim != 1 or view.itemsize != 1:
            raise RuntimeError("a part must be a one-dimensional buffer of bytes")
    return parts


def _first(results: Sequence[int]) -> int:
    return next((code for code in results if code != 0), codes.OK)
