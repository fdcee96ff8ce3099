"""Mooncake's environment variables: which we follow, which say nothing to us, and which ask for what we do not do."""

import logging
import os
import threading

log = logging.getLogger("mooncake.store")

#: Variables that are followed where they are needed.
FOLLOWED = frozenset(
    {
        "MC_RPC_CONNECT_TIMEOUT_MS", "MC_RPC_TIMEOUT_MS", "MC_STORE_CLIENT_MAX_PORT", "MC_STORE_CLIENT_MIN_PORT",
        "MC_STORE_CLIENT_SETUP_RETRIES", "MC_USE_IPV6",
    }
)  # fmt: skip
#: Variables that ask for what is done always.
NEEDLESS = frozenset({"MC_FORCE_TCP", "MOONCAKE_STORE_CHECKSUM"})
#: Variables that tune what Tidepool does in its own way, or has not: those that are set are named in one warning.
WITHOUT_EFFECT = frozenset(
    {
        "MC_AUTO_GID_MAX_RETRIES", "MC_CONN_PAUSE_TTL_MS", "MC_CUSTOM_TOPO_JSON", "MC_DISABLE_METACACHE",
        "MC_DISABLE_MMAP_ARENA", "MC_EFA_CQ_THREADS", "MC_EFA_NIC_SELECTION", "MC_ENABLE_DEST_DEVICE_AFFINITY",
        "MC_ENABLE_HCA_PEER_AFFINITY", "MC_ENABLE_PARALLEL_REG_MR", "MC_ENDPOINT_STORE_TYPE", "MC_FILEREAD_WORKERS",
        "MC_FORCE_HCA", "MC_FORCE_MNNVL", "MC_FRAGMENT_RATIO", "MC_GID_INDEX", "MC_HANDSHAKE_CONNECT_TIMEOUT",
        "MC_HANDSHAKE_LISTEN_BACKLOG", "MC_HANDSHAKE_MAX_LENGTH", "MC_HANDSHAKE_PORT", "MC_IB_PCI_RELAXED_ORDERING",
        "MC_IB_PORT", "MC_IB_SL", "MC_IB_TC", "MC_INTRA_NVLINK", "MC_LEGACY_RPC_PORT_BINDING", "MC_LOG_DIR", "MC_LOG_LEVEL",
        "MC_LOG_RDMA_SLICE_AFFINITY", "MC_MAX_CONCURRENT_REG_MR", "MC_MAX_CQE_PER_CTX", "MC_MAX_EP_PER_CTX", "MC_MAX_INLINE",
        "MC_MAX_MR_SIZE", "MC_MAX_PRC_PORT", "MC_MAX_RPC_PORT", "MC_MAX_SGE", "MC_MAX_WR", "MC_METADATA_CLUSTER_ID",
        "MC_MIN_PRC_PORT", "MC_MIN_REG_SIZE", "MC_MIN_RPC_PORT", "MC_MLX5_QP_LAG_PORT_BALANCE", "MC_MLX5_QP_UDP_SPORTS",
        "MC_MMAP_ARENA_POOL_SIZE", "MC_MS_AUTO_DISC", "MC_MS_FILTERS", "MC_MTU", "MC_NIC_PEER_AFFINITY", "MC_NOF_TRTYPE",
        "MC_NUM_COMP_CHANNELS_PER_CTX", "MC_NUM_CQ_PER_CTX", "MC_NUM_QP_PER_EP", "MC_PATH_ROUNDROBIN", "MC_PKEY_INDEX",
        "MC_RDMA_BIND_ADDRESS", "MC_RDMA_NOTIFY_BUFFER_SIZE", "MC_RDMA_NOTIFY_CONNECT_TIMEOUT_MS", "MC_RDMA_NOTIFY_ENABLED",
        "MC_RDMA_NOTIFY_MAX_PENDING_SENDS", "MC_RDMA_NOTIFY_OOB_FALLBACK", "MC_RDMA_NOTIFY_RECV_COUNT",
        "MC_RDMA_RAIL_PAUSE_SECONDS", "MC_REDIS_DB_INDEX", "MC_REDIS_PASSWORD", "MC_RETRY_CNT", "MC_RPC_CLIENT_IO_THREADS",
        "MC_SLICE_SIZE", "MC_SLICE_TIMEOUT", "MC_STORE_CLIENT_METRIC", "MC_STORE_CLIENT_METRIC_BANDWIDTH",
        "MC_STORE_CLIENT_METRIC_INTERVAL", "MC_STORE_CLUSTER_ID", "MC_STORE_HUGEPAGE_SIZE",
        "MC_STORE_LOCAL_HOT_ADMISSION_THRESHOLD", "MC_STORE_LOCAL_HOT_BLOCK_SIZE", "MC_STORE_LOCAL_HOT_CACHE_SIZE",
        "MC_STORE_LOCAL_HOT_CACHE_USE_SHM", "MC_STORE_MEMCPY", "MC_STORE_NUMA_SOCKET_ID",
        "MC_STORE_PINNED_RESTORE_ARENA_SIZE_BYTES", "MC_STORE_PIN_MEMORY_MAX_BYTES", "MC_STORE_REPLICA_SCORING",
        "MC_STORE_RPC_CLIENT_IO_THREADS", "MC_STORE_USE_HUGEPAGE", "MC_TCP_ADMISSION_TIMEOUT_MS",
        "MC_TCP_ENABLE_CONNECTION_POOL", "MC_TCP_LANES_PER_PEER", "MC_TCP_MAX_CONNECTIONS_PER_PEER",
        "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER", "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "MC_TCP_PROGRESS_TIMEOUT_SEC",
        "MC_TCP_PROTO", "MC_TCP_SLICE_SIZE", "MC_TCP_STATUS_TIMEOUT_SEC", "MC_TENT_CONF", "MC_TE_FILTERS",
        "MC_TE_METADATA_REFRESH_INTERVAL_SECONDS", "MC_TE_METRIC", "MC_TE_METRIC_INTERVAL_SECONDS",
        "MC_TE_RPC_CLIENT_IO_THREADS", "MC_TRACK_RDMA_POSTED_SLICES", "MC_USE_RDMA_TWOSIDED", "MC_USE_TENT",
        "MC_USE_TEV1", "MC_WORKERS_PER_CTX", "MC_YLT_LOG_LEVEL",
    }
)  # fmt: skip
#: The same, by how they begin.
WITHOUT_EFFECT_PREFIXES = (
    "MC_STORE_", "MOONCAKE_AWS_", "MOONCAKE_BUCKET_", "MOONCAKE_DFS_", "MOONCAKE_DISK_EVICTION_", "MOONCAKE_DISTRIBUTED_",
    "MOONCAKE_NVME_KV_", "MOONCAKE_OFFLOAD_", "MOONCAKE_OFFSET_", "MOONCAKE_SCANMETA_", "MOONCAKE_USE_URING",
)  # fmt: skip
#: Variables whose promise cannot be kept, unless they have one of these values: setup fails and says so.
REFUSED = {
    "MC_CXL_DEV_SIZE": ("0",),
    "MC_RPC_PROTOCOL": ("tcp",),
}
#: The address that memory is lent on: it is the one of `local_hostname`, or every one.
BIND_ADDRESS = "MC_TCP_BIND_ADDRESS"
#: Turns the disk behind a segment on, whatever `setup` says.
OFFLOAD_ENABLED = "MOONCAKE_OFFLOAD_ENABLED"

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
    unused = sorted(filter(is_without_effect, os.environ))
    if unused:
        warn_once(", ".join(unused), "no effect with Tidepool")


def check_bind_address(listens_on: str) -> None:
    """ValueError when memory is to be lent on another address than `listens_on`."""
    address = os.environ.get(BIND_ADDRESS, "").strip().strip("[]")
    if address not in ("", "0.0.0.0", "::", listens_on):
        raise ValueError(f"{BIND_ADDRESS}={address}: a store listens on its local_hostname, {listens_on}; give the address there")


def wants_ipv6() -> bool:
    """Whether memory is to be lent on an IPv6 address (`MC_USE_IPV6`)."""
    return os.environ.get("MC_USE_IPV6", "").strip().lower() not in ("", "0", "false", "no", "off")


def is_without_effect(name: str) -> bool:
    """Whether a variable of Mooncake's changes nothing here."""
    if name in WITHOUT_EFFECT:
        return True
    return name.startswith(WITHOUT_EFFECT_PREFIXES) and name not in FOLLOWED and name != OFFLOAD_ENABLED


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
