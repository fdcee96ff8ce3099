"""What is under way between the start and the end of a session: objects being read, and objects being put together."""

import threading
from typing import Optional

from tidepool import _native

#: Objects that one store may have open for reading, and for writing.
SESSIONS_MAX = 65536
#: Memory in which objects are put together, when the store's local buffer is smaller.
STAGED_BYTES_MIN = 1 << 30


class Staged:
    """An object that is being put together in memory of this process."""

    def __init__(self, memory: _native.Memory, size: int, config: tuple[_native.PutOptions, Optional[str]]) -> None:
        self.memory = memory
        self.size = size
        self.config = config


class Sessions:
    """Open sessions of one store, with limits; for any number of threads."""

    def __init__(self, buffer_bytes: int) -> None:
        self._reading: dict[str, tuple[int, int]] = {}  # key -> (object id, bytes)
        self._writing: dict[str, Staged] = {}
        self._staged = 0
        self._staged_max = max(buffer_bytes, STAGED_BYTES_MIN)
        self._lock = threading.Lock()

    def read(self, key: str) -> Optional[tuple[int, int]]:
        return self._reading.get(key)

    def begin_read(self, key: str, object_id: int, size: int) -> bool:
        with self._lock:
            if len(self._reading) >= SESSIONS_MAX and key not in self._reading:
                return False
            self._reading[key] = (object_id, size)
            return True

    def end_read(self, key: str) -> None:
        with self._lock:
            self._reading.pop(key, None)

    def is_writing(self, key: str) -> bool:
        return key in self._writing

    def staged(self, key: str) -> Optional[Staged]:
        return self._writing.get(key)

    def begin_write(self, key: str, size: int, config: tuple[_native.PutOptions, Optional[str]]) -> bool:
        """False when there is no room for it."""
        with self._lock:
            if self._staged + size > self._staged_max or len(self._writing) >= SESSIONS_MAX or key in self._writing:
                return False
            try:
                memory = _native.Memory(size)
            except (MemoryError, _native.TidepoolError):
                return False
            self._staged += size
            self._writing[key] = Staged(memory, size, config)
            return True

    def end_write(self, key: str) -> Optional[Staged]:
        """Takes it out, whatever becomes of it then."""
        with self._lock:
            staged = self._writing.pop(key, None)
            if staged is not None:
                self._staged -= staged.size
            return staged

    def clear(self) -> None:
        with self._lock:
            self._reading.clear()
            self._writing.clear()
            self._staged = 0
