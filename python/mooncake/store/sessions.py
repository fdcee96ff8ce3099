"""What is under way between the start and the end of a session: objects being read, and objects being put together."""

import logging
import threading
from collections.abc import Iterable
from typing import Optional

from tidepool import _native

log = logging.getLogger("mooncake.store")

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
            is_full = len(self._reading) >= SESSIONS_MAX and key not in self._reading
            if not is_full:
                self._reading[key] = (object_id, size)
        if is_full:
            log.error("no read session of key %r: %d are open, the limit: end some", key, SESSIONS_MAX)
        return not is_full

    def end_read(self, key: str) -> None:
        with self._lock:
            self._reading.pop(key, None)

    def is_writing(self, key: str) -> bool:
        return key in self._writing

    def staged(self, key: str) -> Optional[Staged]:
        return self._writing.get(key)

    def begin_write(self, key: str, size: int, config: tuple[_native.PutOptions, Optional[str]]) -> bool:
        """False when there is no room for it, and the log says why."""
        with self._lock:
            why = self._refusal(key, size)
            if why is None:
                try:
                    self._writing[key] = Staged(_native.Memory(size), size, config)
                    self._staged += size
                    return True
                except (MemoryError, _native.TidepoolError) as error:
                    why = str(error)
        log.error("no put session of key %r with %d bytes: %s", key, size, why)
        return False

    def _refusal(self, key: str, size: int) -> Optional[str]:
        if key in self._writing:
            return "one of this key is open"
        if len(self._writing) >= SESSIONS_MAX:
            return f"{SESSIONS_MAX} are open, the limit: end or revoke some"
        if self._staged + size > self._staged_max:
            return (
                f"{self._staged} bytes of {self._staged_max} are being put together: end or revoke some, or set up the store"
                f" with a larger local_buffer_size (above {STAGED_BYTES_MIN} it is the limit)"
            )
        return None

    def end_write(self, key: str) -> Optional[Staged]:
        """Takes it out; its memory counts until `forget`."""
        with self._lock:
            return self._writing.pop(key, None)

    def forget(self, ended: Iterable[Staged]) -> None:
        """Once nothing uses the memory of what was taken out any more."""
        with self._lock:
            self._staged -= sum(staged.size for staged in ended)

    def clear(self) -> None:
        with self._lock:
            self._reading.clear()
            self._staged -= sum(staged.size for staged in self._writing.values())
            self._writing.clear()
