"""Sessions: objects that are read, or put together, part by part (an engine's layers).

A read session is of the object that the key had when it began: when the key has another one, or none, its reads fail (-704) and
never mix the two. A put session is put together in this process and stored when it ends: objects are immutable and verified as a whole, so nothing
of one can be in the cluster before all of it is known. Nobody else sees any of it until then, and space in the cluster is not set
aside: a cluster without room says so at the end. What is put together has a limit (`sessions`).
"""

from collections.abc import Sequence
from typing import Optional

from mooncake.store import codes
from mooncake.store.deadlines import for_put
from mooncake.store.objects import RAISED, code_of
from mooncake.store.ranges import Ranges
from mooncake.store.replicate import ConfigRefused, ReplicateConfig, group_names, put_options
from mooncake.store.sessions import Staged
from tidepool import _native


def _uneven(keys: Sequence[str], *lists: Sequence) -> bool:
    return any(len(each) != len(keys) for each in lists)


class LayerWise(Ranges):
    """Objects part by part."""

    def batch_get_session_start(self, keys: Sequence[str]) -> list[int]:
        """0 a key that can be read, else negative. Grants read leases."""
        if self._client is None:
            return []
        present = self.batch_is_exist(keys)
        found = self._stats(keys)
        results = []
        for key, exists, stat in zip(keys, present, found):
            if isinstance(stat, int):
                results.append(stat)
            elif exists != 1:
                results.append(codes.OBJECT_NOT_FOUND if exists == 0 else exists)
            elif self._sessions.begin_read(key, stat["object_id"], stat["length"]):
                results.append(codes.OK)
            else:
                results.append(codes.NO_AVAILABLE_HANDLE)
        return results

    def batch_get_into_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_src_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Bytes a key, the sum of its ranges, or negative. -600 without a session, or when a range leaves its object."""
        if self._client is None:
            return []
        if _uneven(keys, all_buffer_ptrs, all_sizes, all_src_offsets):
            return [codes.INVALID_PARAMS] * len(keys)
        results = [codes.INVALID_PARAMS] * len(keys)
        counts: list[tuple[int, int]] = []  # (which key, how many ranges)
        flat_keys, offsets, addresses, sizes = [], [], [], []
        for n, key in enumerate(keys):
            session = self._sessions.read(key)
            if session is None or not len(all_buffer_ptrs[n]) == len(all_sizes[n]) == len(all_src_offsets[n]):
                continue
            if any(start < 0 or start + size > session[1] for start, size in zip(all_src_offsets[n], all_sizes[n])):
                continue
            wanted = [r for r in zip(all_buffer_ptrs[n], all_sizes[n], all_src_offsets[n]) if r[1]]
            counts.append((n, len(wanted)))
            flat_keys.extend([key] * len(wanted))
            for address, size, start in wanted:
                addresses.append(address)
                sizes.append(size)
                offsets.append(start)
        answers = iter(self._read_ranges(flat_keys, offsets, addresses, sizes))
        for n, count in counts:
            of_key = [next(answers) for _ in range(count)]
            results[n] = next((answer for answer in of_key if answer < 0), None) or sum(of_key)
        self._refuse_others(keys, results)
        return results

    def _refuse_others(self, keys: Sequence[str], results: list[int]) -> None:
        """An object is never changed and its id never used again: the same id after a read is the same object before it."""
        read = [n for n, result in enumerate(results) if result > 0]
        for n, stat in zip(read, self._stats([keys[n] for n in read])):
            session = self._sessions.read(keys[n])
            if isinstance(stat, int):
                results[n] = stat
            elif session is None or stat["object_id"] != session[0]:
                results[n] = codes.OBJECT_NOT_FOUND

    def _stats(self, keys: Sequence[str]) -> list:
        """What the directory says of each key, or a negative number."""
        client = self._client
        if client is None:
            return [codes.INVALID_PARAMS] * len(keys)
        if not keys:
            return []
        try:
            stats = client.stat_many(keys)
        except RAISED as error:
            return [code_of(error)] * len(keys)
        return [stat if isinstance(stat, dict) else stat.mooncake for stat in stats]

    def batch_get_session_end(self, keys: Sequence[str]) -> int:
        """Forgets the sessions; 0."""
        for key in keys:
            self._sessions.end_read(key)
        return codes.OK if self._client is not None else codes.INTERNAL_ERROR

    def batch_put_session_start(
        self, keys: Sequence[str], sizes: Sequence[int], config: Optional[ReplicateConfig] = None
    ) -> list[int]:
        """0 a key that parts may now be written of. -705: the key has an object; -600: a session is open; -200: no room here."""
        if self._client is None:
            return []
        if _uneven(keys, sizes):
            return [codes.INVALID_PARAMS] * len(keys)
        try:
            options = put_options(config)
            groups: Sequence[Optional[str]] = group_names(config, len(keys)) or (None,) * len(keys)
        except ConfigRefused as error:
            return [error.code] * len(keys)
        results = []
        for key, size, group, exists in zip(keys, sizes, groups, self.batch_is_exist(keys)):
            if exists != 0:
                results.append(codes.OBJECT_ALREADY_EXISTS if exists == 1 else exists)
            elif size <= 0 or size > _native.OBJECT_BYTES_MAX or self._sessions.is_writing(key):
                results.append(codes.INVALID_PARAMS)
            elif self._sessions.begin_write(key, size, (options, group)):
                results.append(codes.OK)
            else:
                results.append(codes.NO_AVAILABLE_HANDLE)
        return results

    def batch_put_from_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_dst_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Bytes written a key, or negative. The source may change once the call returned."""
        if self._client is None:
            return []
        if _uneven(keys, all_buffer_ptrs, all_sizes, all_dst_offsets):
            return [codes.INVALID_PARAMS] * len(keys)
        results = []
        for key, sources, sizes, starts in zip(keys, all_buffer_ptrs, all_sizes, all_dst_offsets):
            staged = self._sessions.staged(key)
            if staged is None or not len(sources) == len(sizes) == len(starts):
                results.append(codes.INVALID_PARAMS)
                continue
            if any(start < 0 or size < 0 or start + size > staged.size for start, size in zip(starts, sizes)):
                results.append(codes.INVALID_PARAMS)
                continue
            try:
                _native.copy_memory([staged.memory.address + start for start in starts], sources, sizes, unchecked=True)
                results.append(sum(sizes))
            except RAISED as error:
                results.append(code_of(error))
        return results

    def batch_put_session_end(self, keys: Sequence[str]) -> list[int]:
        """Stores the objects: 0 a key, -600 without a session. Bytes that were not written are zero."""
        if self._client is None:
            return []
        results = [codes.INVALID_PARAMS] * len(keys)
        by_options: dict[_native.PutOptions, list[tuple[int, str, Staged]]] = {}
        sessions, ended = self._sessions, []
        for n, key in enumerate(keys):
            staged = sessions.end_write(key)
            if staged is not None:
                ended.append(staged)
                by_options.setdefault(staged.config[0], []).append((n, key, staged))
        try:
            for options, entries in by_options.items():
                for (n, *_), code in zip(entries, self._store_staged(options, entries)):
                    results[n] = code
        finally:
            sessions.forget(ended)
        return results

    def _store_staged(
        self, options: _native.PutOptions, entries: Sequence[tuple[int, str, Staged]]
    ) -> Sequence[int]:
        client = self._client
        if client is None:
            return [codes.INVALID_PARAMS] * len(entries)
        groups = [staged.config[1] or "" for _, _, staged in entries]
        try:
            return client.put_many(
                [key for _, key, _ in entries],
                [staged.memory for _, _, staged in entries],
                options,
                groups=groups if any(groups) else None,
                deadline=for_put(self._deadline, sum(staged.size for _, _, staged in entries)),
                codes=True,
            )
        except RAISED as error:
            return [code_of(error)] * len(entries)

    def batch_put_session_revoke(self, keys: Sequence[str]) -> list[int]:
        """Drops what was put together: 0 a key, -600 without a session."""
        if self._client is None:
            return []
        sessions = self._sessions
        ended = [sessions.end_write(key) for key in keys]
        sessions.forget([staged for staged in ended if staged is not None])
        return [codes.INVALID_PARAMS if staged is None else codes.OK for staged in ended]
