"""How long a call may take: the store's time, and more for what is large."""

from collections.abc import Sequence
from typing import Optional

#: Rate below which a transfer counts as stuck.
BYTES_PER_S_MIN = 64 << 20
#: Calls up to this size have the store's plain time.
PLAIN_BYTES_MAX = 64 << 20


def for_size(connection: object, total: int) -> Optional[float]:
    """Seconds for a call that moves so many bytes; None: the store's time."""
    if total <= PLAIN_BYTES_MAX:
        return None
    return connection.settings.deadline + total / BYTES_PER_S_MIN


def for_bytes(connection: object, values: Sequence[object]) -> Optional[float]:
    """The same for values that are buffers, or lists of buffers."""
    total = 0
    for value in values:
        if isinstance(value, (list, tuple)):
            total += sum(map(_length, value))
        else:
            total += _length(value)
    return for_size(connection, total)


def _length(value: object) -> int:
    if isinstance(value, (bytes, bytearray)):
        return len(value)
    try:
        return memoryview(value).nbytes
    except TypeError:
        # Not a buffer: the native call says so, or knows the length of a tensor.
        return 0
