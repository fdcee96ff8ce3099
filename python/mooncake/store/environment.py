"""Mooncake's environment variables: which we follow, which say nothing to us, and which ask for what we do not do."""

import logging
import os
import threading

log = logging.getLogger("mooncake.store")

#: Variables that tune what Tidepool does in its own way; each is named once in a warning, and changes nothing.
WITHOUT_EFFECT = frozenset(
    {
        "MC_FILEREAD_WORKERS",
        "MC_METADATA_CLUSTER_ID",
        "MC_MMAP_ARENA_POOL_SIZE",
        "MC_DISABLE_MMAP_ARENA",
        "MC_MS_AUTO_DISC",
        "MC_MS_FILTERS",
        "MC_RPC_CLIENT_IO_THREADS",
        "MC_STORE_CLIENT_METRIC",
        "MC_STORE_CLIENT_METRIC_BANDWIDTH",
        "MC_STORE_CLIENT_METRIC_INTERVAL",
        "MC_STORE_CLUSTER_ID",
        "MC_STORE_HUGEPAGE_SIZE",
        "MC_STORE_LOCAL_HOT_CACHE_ADMISSION_THRESHOLD",
        "MC_STORE_LOCAL_HOT_CACHE_BLOCK_SIZE",
        "MC_STORE_LOCAL_HOT_CACHE_SIZE",
        "MC_STORE_LOCAL_HOT_CACHE_USE_SHM",
        "MC_STORE_MEMCPY",
        "MC_STORE_NUMA_SOCKET_ID",
        "MC_STORE_PIN_MEMORY_MAX_BYTES",
        "MC_STORE_REPLICA_SCORING",
        "MC_STORE_RPC_CLIENT_IO_THREADS",
        "MC_STORE_USE_HUGEPAGE",
    }
)
#: Variables whose promise cannot be kept, unless they have one of these values: setup fails and says so.
REFUSED = {
    "MC_CXL_DEV_SIZE": ("0",),
    "MC_RPC_PROTOCOL": ("tcp",),
}

_warned: set[str] = set()
_lock = threading.Lock()


def warn_once(name: str, message: str) -> None:
    """Logs a warning about a setting, the first time in this process."""
    with _lock:
        if name in _warned:
            return
        _warned.add(name)
    log.warning("%s: %s", name, message)


def check() -> None:
    """Names what has no effect; ValueError for a variable whose promise cannot be kept."""
    for name, harmless in REFUSED.items():
        value = os.environ.get(name, "").strip().lower()
        if value and value not in harmless:
            raise ValueError(f"{name}={value}: Tidepool cannot do that; unset it")
    for name in sorted(WITHOUT_EFFECT.intersection(os.environ)):
        warn_once(name, "has no effect with Tidepool")


def milliseconds(name: str, default: float) -> float:
    """A time in milliseconds, as seconds. ValueError when it is not a positive number."""
    text = os.environ.get(name)
    if not text:
        return default
    value = float(text)
    if not 0 < value <= 3_600_000:
        raise ValueError(f"{name}={text}: give milliseconds, above 0 and at most an hour")
    return value / 1000


def number(name: str, default: int, low: int, high: int) -> int:
    """A whole number within limits. ValueError otherwise."""
    text = os.environ.get(name)
    if not text:
        return default
    value = int(text)
    if not low <= value <= high:
        raise ValueError(f"{name}={text}: give a number from {low} to {high}")
    return value
