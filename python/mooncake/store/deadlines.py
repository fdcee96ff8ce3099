"""How long a call may take: the store's time, less where waiting helps nobody, and more for puts of much.

A get has the store's time whatever its size: an engine that gives up on it uses its memory for something else, and a get that went
on would write there. What takes longer needs a longer time of the store, by whoever knows the engine's patience.
"""

from collections.abc import Sequence
from typing import Any

#: Rate below which a put counts as stuck.
BYTES_PER_S_MIN = 64 << 20
#: Calls that move no payload. A new leader is there sooner; an engine's scheduler does not wait longer for a hint.
LOOK_S = 2.0
#: Puts, before what their size adds: a pool without room is told to the engine (-200) rather than waited for.
PUT_S = 3.0


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
