"""Host memory by address: a pool with a limit, and the allocator that SGLang uses for its host cache."""

import os
import threading

from tidepool import _native

#: Memory that one allocator may have given out.
ALLOCATOR_BYTES_MAX = 1 << 44


class MemoryPool:
    """Page-aligned host memory by address, up to a limit. Counts as registered."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._given: dict[int, _native.Memory] = {}
        self._lock = threading.Lock()

    def allocate(self, size: int) -> int:
        """An address, or 0: the limit is reached, there is no memory, or `size` is not positive."""
        if size <= 0:
            return 0
        with self._lock:
            if self._used + size > self._limit:
                return 0
            try:
                memory = _native.Memory(size)
            except (MemoryError, ValueError, OverflowError, _native.TidepoolError):
                return 0
            self._used += size
            self._given[memory.address] = memory
            return memory.address

    def free(self, address: int) -> bool:
        """Whether it was one of ours."""
        with self._lock:
            memory = self._given.pop(address, None)
            if memory is None:
                return False
            self._used -= memory.size
            return True


class MooncakeHostMemAllocator:
    """Page-aligned memory that lives until it is freed, or until the allocator goes."""

    def __init__(self) -> None:
        self._pool = MemoryPool(ALLOCATOR_BYTES_MAX)

    def alloc(self, size: int) -> int:
        """An address, or 0."""
        return self._pool.allocate(size)

    def free(self, address: int) -> int:
        """0, or -1 when the address was not given out."""
        return 0 if self._pool.free(address) else -1


def bind_to_numa_node(node: int) -> None:
    """Lets the calling thread run on the processors of one NUMA node only; memory that it touches first then comes from there.
    Nothing happens when the host has no such node."""
    try:
        with open(f"/sys/devices/system/node/node{int(node)}/cpulist", encoding="ascii") as listed:
            processors = _processors(listed.read())
    except OSError:
        return
    wanted = processors & os.sched_getaffinity(0)
    if wanted:
        os.sched_setaffinity(0, wanted)


def _processors(listed: str) -> set[int]:
    found: set[int] = set()
    for part in filter(None, listed.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def get_alloc_func_addr() -> int:
    """Address of a C allocator for GPU-visible host memory, which Tidepool has none of."""
    raise NotImplementedError("get_alloc_func_addr: GPU memory is not supported; use MooncakeHostMemAllocator")


def get_free_func_addr() -> int:
    """The counterpart of `get_alloc_func_addr`."""
    raise NotImplementedError("get_free_func_addr: GPU memory is not supported; use MooncakeHostMemAllocator")
