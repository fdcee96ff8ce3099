"""Parts of objects into memory that the caller names by address."""

from collections.abc import Sequence

from mooncake.store import codes
from mooncake.store.objects import RAISED, code_of
from mooncake.store.zero_copy import ZeroCopy


class Ranges(ZeroCopy):
    """Ranged reads, any number of them in one call."""

    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Sequence[Sequence[Sequence[int]]],
        all_src_offsets: Sequence[Sequence[Sequence[int]]],
        all_sizes: Sequence[Sequence[Sequence[int]]],
    ) -> list[list[list[int]]]:
        """Fills buffer `i` at `dst_offsets[i][j][k]` with `sizes[i][j][k]` bytes of key `[i][j]` from `src_offsets[i][j][k]` on.

        Bytes read, or negative, in the same nesting. A range that leaves its object, or its registered buffer, is -600.
        """
        for given in (buffer_ptrs, all_keys, all_dst_offsets, all_src_offsets, all_sizes):
            if isinstance(given, dict):
                raise TypeError("get_into_ranges takes lists, not a dict")
        results: list[list[list[int]]] = []
        plan: list[tuple[list[int], int]] = []  # where in the results each read's answer goes
        keys, offsets, addresses, sizes = [], [], [], []
        whole = len(buffer_ptrs) == len(all_keys) == len(all_dst_offsets) == len(all_src_offsets) == len(all_sizes)
        for i, buffer in enumerate(buffer_ptrs):
            of_buffer: list[list[int]] = []
            results.append(of_buffer)
            keys_of = all_keys[i] if i < len(all_keys) else ()
            fits = whole and len(keys_of) == len(all_dst_offsets[i]) == len(all_src_offsets[i]) == len(all_sizes[i])
            end = buffer + self._registered[buffer] if buffer in self._registered else None
            for j, key in enumerate(keys_of):
                if not fits:
                    of_buffer.append([codes.INVALID_PARAMS])
                    continue
                wanted = all_sizes[i][j]
                if not len(all_dst_offsets[i][j]) == len(all_src_offsets[i][j]) == len(wanted):
                    of_buffer.append([codes.INVALID_PARAMS] * max(len(wanted), 1))
                    continue
                of_key = [0] * len(wanted)
                of_buffer.append(of_key)
                for k, (to, start, size) in enumerate(zip(all_dst_offsets[i][j], all_src_offsets[i][j], wanted)):
                    if min(to, start, size) < 0 or (end is not None and buffer + to + size > end):
                        of_key[k] = codes.INVALID_PARAMS
                    elif size:
                        keys.append(key)
                        offsets.append(start)
                        addresses.append(buffer + to)
                        sizes.append(size)
                        plan.append((of_key, k))
        for (of_key, k), answer in zip(plan, self._read_ranges(keys, offsets, addresses, sizes)):
            of_key[k] = answer
        return results

    def _read_ranges(self, keys, offsets, addresses, sizes) -> list[int]:
        """Bytes or negative a range."""
        client = self._client
        if client is None:
            return [codes.INVALID_PARAMS] * len(keys)
        if not keys:
            return []
        try:
            results = client.get_range_into_addresses_many(
                keys,
                offsets,
                addresses,
                sizes,
                deadline=self._deadline,
                codes=True,
                unchecked=True,
            )
            return codes.settled(results, codes.OF_GETS)
        except RAISED as error:
            return codes.settled([code_of(error)] * len(keys), codes.OF_GETS)
