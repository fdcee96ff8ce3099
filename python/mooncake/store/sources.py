"""What a put reads, held still: engines give up on a put after a time of their own, and fill its buffer with something else.

From 1 MiB on the client checksums what it is given before anything else, so bytes that changed later are refused (-801). Below
that it checksums as it sends, which may be after a wait for a new leader: such calls work on a copy.
"""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, Optional

from tidepool import _native

#: Payload of a call below which it is copied; the client checksums ahead from here on.
COPIED_BYTES_MAX = 1 << 20


class Copied:
    """Pieces of memory in a row, one an object: `addresses` and `sizes`, as long as this lives."""

    def __init__(self, memory: bytearray, sizes: list[int]) -> None:
        self._memory = memory
        self.sizes = sizes
        base, _ = _native.buffer_address(memory)
        self.addresses = list(accumulate(sizes[:-1], initial=base))


def copied(pointers: Sequence, sizes: Sequence, total: int) -> Optional[Copied]:
    """A copy of what is at these addresses (or lists of addresses). None when it is too much, or not all of it can be read: then
    the put itself says which."""
    if not 0 < total < COPIED_BYTES_MAX:
        return None
    if isinstance(sizes[0], (list, tuple)):
        of_objects = [sum(each) for each in sizes]
        pointers, sizes = list(chain.from_iterable(pointers)), list(chain.from_iterable(sizes))
    else:
        of_objects = list(sizes)
    if len(pointers) != len(sizes) or min(sizes) <= 0 or min(of_objects) <= 0:
        return None
    memory = bytearray(total)
    made = Copied(memory, of_objects)
    base = made.addresses[0]
    try:
        _native.copy_memory(list(accumulate(sizes[:-1], initial=base)), pointers, sizes, unchecked=True)
    except (ValueError, OverflowError):
        return None
    return made


def frozen(value: Any) -> Any:
    """A value that nobody else can change: bytes, or a tuple of them. What is no buffer stays what it is."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(frozen, value))
    try:
        return bytes(memoryview(value))
    except TypeError:
        return value
