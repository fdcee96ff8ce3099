"""How long a call may take: the store's time at most, less where waiting helps nobody, and more for what is large."""

from collections.abc import Sequence
from typing import Any, Optional

#: Rate below which a transfer counts as stuck.
BYTES_PER_S_MIN = 64 << 20
#: Gets up to this size have the store's plain time.
PLAIN_BYTES_MAX = 64 << 20
#: Calls that move no payload. A new leader is there sooner; an engine's scheduler does not wait longer for a hint.
LOOK_S = 2.0
#: Puts, before what their size adds: a pool without room is told to the engine (-200) rather than waited for.
PUT_S = 3.0


def for_size(deadline: float, total: int) -> Optional[float]:
    """Seconds for a get of so many bytes, of a store whose time is `deadline`; None: that time."""
    return None if total <= PLAIN_BYTES_MAX else deadline + total / BYTES_PER_S_MIN


def for_put(deadline: float, total: int) -> float:
    """Seconds for a put of so many bytes."""
    return min(PUT_S, deadline) + total / BYTES_PER_S_MIN


def bytes_of(values: Sequence[object]) -> int:
    """Bytes of values that are buffers, or lists of buffers."""
    total = 0
    for value in values:
        if isinstance(value, (list, tuple)):
            total += sum(map(_length, value))
        else:
            total += _length(value)
    return total


def _length(value: Any) -> int:
    if isinstance(value, (bytes, bytearray)):
        return len(value)
    try:
        return memoryview(value).nbytes
    except TypeError:
        # Not a buffer: the native call says so, or knows the length of a tensor.
        return 0
