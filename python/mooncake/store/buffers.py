"""`BufferPool`: host memory lent out in pieces, for calls that take addresses.

A piece goes back to the pool when its lease was released and nothing looks at it any more: a memoryview, a numpy array or a
tensor over it keeps it. Nobody is given memory that somebody else can still see.
"""

import ctypes
import threading
import time
import weakref
from typing import Any, Optional

from tidepool import _native

#: What a get hands out: the bytes where they arrived, with `ptr()`, `size()`, `len()` and the buffer protocol.
BufferHandle = _native.Value

#: Capacity of a pool that names none, for a store without a local buffer.
POOL_BYTES_DEFAULT = 1 << 30
_POINTER_BYTES = ctypes.sizeof(ctypes.c_void_p)


class _Region:
    """A piece of memory of one size class, in use or not."""

    __slots__ = ("address", "memory", "size")

    def __init__(self, size: int, alignment: int) -> None:
        # Native memory is page-aligned; a coarser alignment is found within a longer piece.
        self.memory = _native.Memory(size + (alignment if alignment > 4096 else 0))
        self.address = -(-self.memory.address // alignment) * alignment
        self.size = size

    def exporter(self, length: int) -> ctypes.Array:
        """An object that exports `length` bytes of it, and whose end can be watched."""
        start = self.address - self.memory.address
        return (ctypes.c_ubyte * length).from_buffer(self.memory, start)


class BufferLease:
    """A piece of memory until `release`, or the end of a `with`. Made by a pool."""

    def __init__(self, exporter: ctypes.Array, address: int, size: int) -> None:
        self._exporter: Optional[ctypes.Array] = exporter
        self._address = address
        self._size = size

    def _open(self) -> ctypes.Array:
        if self._exporter is None:
            raise RuntimeError("buffer lease is closed")
        return self._exporter

    @property
    def ptr(self) -> int:
        """Address of the first byte."""
        self._open()
        return self._address

    @property
    def size(self) -> int:
        """Bytes that were asked for."""
        self._open()
        return self._size

    @property
    def buffer(self) -> memoryview:
        """A writable view. As long as it lives the memory is not given to anybody else, also after `release`."""
        return memoryview(self._open()).cast("B")

    def release(self) -> None:
        """Gives it back. May be repeated."""
        self._exporter = None

    def __enter__(self) -> "BufferLease":
        self._open()
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()


class BufferPool:
    """Pieces of host memory in size classes, kept for reuse, up to `max_bytes`."""

    def __init__(
        self,
        store: Any,
        max_bytes: int = 0,  # 0: as much as the store's local buffer
        min_size_class: int = 65536,
        max_size_class: Optional[int] = None,
        alignment: int = 8388608,
        block_on_exhaustion: bool = True,
        default_timeout: Optional[float] = None,
        max_regions: Optional[int] = None,
        prewarm_size: Optional[int] = None,
        prewarm_count: int = 0,
    ) -> None:
        if getattr(store, "_buffer_bytes", None) is None:
            raise RuntimeError("BufferPool store parameter must be a MooncakeDistributedStore")
        if store.health_check() == 1:
            raise RuntimeError("MooncakeDistributedStore is not initialized")
        if not isinstance(max_bytes, int) or max_bytes < 0:
            raise TypeError(f"max_bytes takes an int of at least 0, not {max_bytes!r}")
        if min_size_class <= 0 or alignment <= 0:
            raise RuntimeError("min_size_class and alignment must be positive")
        if alignment & (alignment - 1) or alignment < _POINTER_BYTES:
            raise RuntimeError("alignment must be a power of two and at least sizeof(void*)")
        self._bytes_max = max_bytes or store._buffer_bytes or POOL_BYTES_DEFAULT
        self._class_min = min_size_class
        self._class_max = max_size_class
        self._alignment = alignment
        self._blocks = block_on_exhaustion
        self._timeout = default_timeout
        self._regions_max = max_regions
        self._free: dict[int, list[_Region]] = {}
        self._bytes = 0
        self._regions = 0
        self._leased = 0
        self._closed = False
        # Reentrant: a lease may end in the collector, within any of the steps below.
        self._changed = threading.Condition(threading.RLock())
        if prewarm_size is not None and prewarm_count:
            self.prewarm(prewarm_size, prewarm_count)

    def acquire(self, size: int, block: Optional[bool] = None, timeout: Optional[float] = None) -> BufferLease:
        """A piece of at least `size` bytes. RuntimeError: none is free and `block` is false, or `timeout` seconds passed, or the
        pool is closed or smaller than that."""
        wanted = self._class_of(size)
        blocks = self._blocks if block is None else block
        timeout = self._timeout if timeout is None else timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while True:
                if self._closed:
                    raise RuntimeError("buffer pool is closed")
                region = self._taken(wanted)
                if region is not None:
                    return self._lease(region, size)
                if not blocks:
                    raise RuntimeError("buffer pool is exhausted")
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise RuntimeError("timed out waiting for buffer")
                self._changed.wait(left)

    def buffer(self, size: int, block: Optional[bool] = None, timeout: Optional[float] = None) -> BufferLease:
        """`acquire`, for a `with`."""
        return self.acquire(size, block, timeout)

    def prewarm(self, size: int, count: int) -> None:
        """Makes `count` pieces for requests of `size` bytes ahead. RuntimeError when they do not fit."""
        wanted = self._class_of(size)
        with self._changed:
            for _ in range(count):
                region = self._made(wanted, make_room=False)
                if region is None:
                    raise RuntimeError("buffer pool is exhausted")
                self._free.setdefault(wanted, []).append(region)

    def close(self) -> None:
        """Gives the memory back. RuntimeError while leases, or views of them, are there. May be repeated."""
        with self._changed:
            if self._leased:
                raise RuntimeError("cannot close buffer pool with active leases")
            self._closed = True
            self._free.clear()
            self._bytes = self._regions = 0
            self._changed.notify_all()

    def _class_of(self, size: int) -> int:
        if not isinstance(size, int) or size <= 0:
            raise RuntimeError("requested buffer size must be positive")
        wanted = max(self._class_min, 1 << (size - 1).bit_length())
        if self._class_max is not None and wanted > self._class_max:
            wanted = size
        if size > self._bytes_max:
            raise RuntimeError("requested buffer size exceeds pool capacity")
        return min(wanted, self._bytes_max)

    def _taken(self, wanted: int) -> Optional[_Region]:
        free = self._free.get(wanted)
        return free.pop() if free else self._made(wanted, make_room=True)

    def _made(self, wanted: int, make_room: bool) -> Optional[_Region]:
        """A new piece; free ones of other sizes make room for it when they may. None: there is no room."""
        if self._closed:
            raise RuntimeError("buffer pool is closed")
        while self._bytes + wanted > self._bytes_max or (self._regions_max is not None and self._regions >= self._regions_max):
            other = next((size for size, free in self._free.items() if free), None)
            if other is None or not make_room:
                return None
            self._free[other].pop()
            self._bytes -= other
            self._regions -= 1
        region = _Region(wanted, self._alignment)
        self._bytes += wanted
        self._regions += 1
        return region

    def _lease(self, region: _Region, size: int) -> BufferLease:
        exporter = region.exporter(size)
        self._leased += 1
        weakref.finalize(exporter, self._returned, region).atexit = False  # type: ignore[misc]
        return BufferLease(exporter, region.address, size)

    def _returned(self, region: _Region) -> None:
        with self._changed:
            self._leased -= 1
            self._free.setdefault(region.size, []).append(region)
            self._changed.notify_all()


BufferLeaseView = BufferLease
RegisteredBufferPool = BufferPool
RegisteredBufferLease = BufferLease
RegisteredBufferLeaseView = BufferLeaseView
