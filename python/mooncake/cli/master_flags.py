"""Each flag of `mooncake_master`: what of `tidepool master` it is, or that it has no effect, or that it cannot be followed."""

import os
import socket
from typing import Callable

from mooncake.cli import snapshots
from mooncake.cli.flags import (
    BOOLEANS_OF_LIBRARIES,
    FALSE,
    FILE_OF_FLAGS,
    HELPS,
    OF_LIBRARIES,
    REFUSED_OF_LIBRARIES,
    FlagError,
    is_true,
    number,
    refuse,
    seconds,
)

#: Flags of `tidepool master` itself, taken under their own names too.
OWN = frozenset(
    {
        "node_id", "members", "join", "data_dir", "election", "advertise", "snapshot_url", "restore_from",
        "accept_data_loss", "eviction_policy", "log_filter", "log_format", "port_file", "config",
    }
)  # fmt: skip
#: Tune what Tidepool does in its own way, or turns on what it always does: one warning, no effect.
WITHOUT_EFFECT = OF_LIBRARIES | frozenset(
    {
        "batch_oplog_retry_timeout_sec", "cluster_id", "cxl_path", "cxl_size", "dynamic_replication_action_cooldown_seconds",
        "enable_disk_eviction", "enable_http_metadata_server", "enable_metadata_cleanup_on_timeout", "enable_metric_reporting",
        "enable_multi_tenants", "enable_oplog", "eviction_high_watermark_ratio", "eviction_ratio", "global_file_segment_size",
        "http_metadata_server_host", "http_metadata_server_port", "kv_events_additional_salt", "kv_events_backend_id",
        "kv_events_bind_endpoint", "kv_events_block_size", "kv_events_dp_rank", "kv_events_emit_legacy_compat",
        "kv_events_emit_object_key", "kv_events_lora_name", "kv_events_model_name", "kv_events_queue_capacity",
        "kv_events_tenant_id", "max_kv_soft_pin_ttl", "max_retry_attempts", "max_threads", "max_total_finished_tasks",
        "max_total_pending_tasks", "max_total_processing_tasks", "memory_allocator", "nof_eviction_high_watermark_ratio",
        "nof_eviction_ratio", "nof_heartbeat_failures_threshold", "nof_heartbeat_interval_sec",
        "nof_heartbeat_probe_timeout_ms", "offload_cap_ratio", "offloading_queue_limit", "oplog_batch_max_entries",
        "oplog_poll_interval_ms", "pending_task_timeout_sec", "processing_task_timeout_sec", "promotion_admission_threshold",
        "promotion_max_per_heartbeat", "promotion_queue_limit", "put_start_release_timeout_sec", "quota_bytes",
        "rpc_conn_timeout_seconds", "rpc_enable_tcp_no_delay", "rpc_thread_num", "snapshot_catalog_backend_connstring",
        "snapshot_catalog_backend_type", "snapshot_catalog_store_connstring", "snapshot_catalog_store_type",
        "snapshot_child_timeout_seconds", "tenant_quota_connector_type",
    }
)  # fmt: skip
#: Promises that cannot be kept, unless the value is one of these.
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    **REFUSED_OF_LIBRARIES,
    "enable_cxl": (FALSE, "there is no CXL memory"),
    "enable_kv_events": (FALSE, "there is no event stream"),
    "enable_offload": (FALSE, "masters do not order offloading; run 'tidepool datanode' on hosts with disks"),
    "offload_on_evict": (FALSE, "masters do not order offloading; run 'tidepool datanode' on hosts with disks"),
    "offload_force_evict": (FALSE, "masters do not order offloading"),
    "promotion_on_hit": (FALSE, "there is no disk tier to promote from"),
    "root_fs_dir": (("",), "there is no shared file tier"),
    "rpc_interface": (("",), "give the address: --rpc_address"),
    "snapshot_backup_dir": (("",), "give one place: --snapshot_url"),
    "tenant_quota_connector_uri": (("",), "set tenants with 'tidepool tenant set'"),
    "pod_name": (("",), "leaders are elected by the masters themselves"),
    "pod_namespace": (("",), "leaders are elected by the masters themselves"),
}
#: Mooncake's high availability needs a coordination service; ours needs the list of masters.
ELECTION = ("enable_ha", "ha_backend_type", "ha_backend_connstring", "etcd_endpoints")
BOOLEANS = BOOLEANS_OF_LIBRARIES | frozenset(
    {
        "accept_data_loss", "allow_evict_soft_pinned_objects", "enable_cxl", "enable_disk_eviction", "enable_ha",
        "enable_http_metadata_server", "enable_kv_events", "enable_metadata_cleanup_on_timeout", "enable_metric_reporting",
        "enable_multi_tenants", "enable_offload", "enable_oplog", "enable_snapshot", "enable_snapshot_restore", "join",
        "kv_events_emit_legacy_compat", "kv_events_emit_object_key", "offload_force_evict", "offload_on_evict",
        "promotion_on_hit", "rpc_enable_tcp_no_delay",
    }
)  # fmt: skip


def _ms(name: str, value: str) -> str:
    return f"{int(number(name, value))}ms"


def _plain(name: str, value: str) -> str:
    return value


def _bool(name: str, value: str) -> str:
    return str(is_true(name, value)).lower()


def _strategy(name: str, value: str) -> str:
    if value == "cxl":
        raise FlagError("--allocation_strategy=cxl: there is no CXL memory")
    return "balanced" if value == "ssd_free_ratio_first" else value


def _mode(name: str, value: str) -> str:
    return value if value in ("off", "observe", "enforce") else "off"


#: Mooncake's name -> (ours, translation of the value).
TRANSLATED: dict[str, tuple[str, Callable[[str, str], str]]] = {
    "default_kv_lease_ttl": ("lease-ttl", _ms),
    "default_kv_soft_pin_ttl": ("soft-pin-ttl", _ms),
    "allow_evict_soft_pinned_objects": ("evict-soft-pinned", _bool),
    "put_start_discard_timeout_sec": ("put-start-discard-timeout", seconds),
    "client_ttl": ("node-forget-timeout", seconds),
    "allocation_strategy": ("allocation-strategy", _strategy),
    "dynamic_replication_mode": ("dynamic-replication", _mode),
    "dynamic_replication_heat_window_seconds": ("dynamic-replication-window", seconds),
    "dynamic_replication_max_memory_replicas": ("dynamic-replicas-max", _plain),
    "snapshot_retention_count": ("snapshot-retain", _plain),
}
FOLLOWED = frozenset(
    {
        "rpc_port", "port", "rpc_address", "metrics_port", "metrics_host", "enable_snapshot", "enable_snapshot_restore",
        "snapshot_interval_seconds", "snapshot_object_store_type", "snapshot_payload_store_type", "snapshot_payload_backend_type",
        "dynamic_replication_admission_qps_threshold", "config_path", "version", FILE_OF_FLAGS,
    }
)  # fmt: skip
NAMES = frozenset(TRANSLATED) | FOLLOWED | HELPS | OWN | WITHOUT_EFFECT | frozenset(REFUSED) | frozenset(ELECTION)

#: Mooncake's; `tidepool master` itself listens on loopback unless told.
DEFAULT_HOST = "0.0.0.0"
DEFAULT_PORT = 50051
DEFAULT_HTTP_PORT = 9003
QUORUM_DIR = "/var/lib/tidepool/master"


def command(told: dict[str, str], published: Callable[[str], bool] = lambda url: True) -> tuple[list[str], list[str]]:
    """(arguments of `tidepool`, warnings). FlagError for what cannot be followed. `published` says whether there may be anything
    to restore at a place."""
    warnings = []
    for name in sorted(told):
        if name in WITHOUT_EFFECT:
            warnings.append(f"--{name} has no effect with Tidepool")
    refuse(told, REFUSED)
    if is_true("enable_ha", told.get("enable_ha", "false")) and "members" not in told:
        raise FlagError(
            "--enable_ha: no coordination service is needed; start every master with its id and the list of all: "
            "--node_id=1 --members=1=h1:50051,2=h2:50051,3=h3:50051"
        )
    arguments = ["master", *_addresses(told, warnings)]
    for name, (ours, translate) in TRANSLATED.items():
        if name in told:
            arguments.append(f"--{ours}={translate(name, told[name])}")
    if "default_kv_lease_ttl" in told:
        # Clients ask for a lease of their own; what Mooncake's flag promises is that none is longer.
        arguments.append(f"--lease-ttl-max={_ms('default_kv_lease_ttl', told['default_kv_lease_ttl'])}")
    own = {name: told[name] for name in OWN if name in told}
    own.setdefault("data_dir", _data_dir(told))
    arguments += _replication(told) + snapshots.arguments(told, own["data_dir"], published, warnings)
    arguments += [f"--{name.replace('_', '-')}={value}" for name, value in sorted(own.items())]
    return arguments, warnings


def _addresses(told: dict[str, str], warnings: list[str]) -> list[str]:
    port = int(number("rpc_port", told.get("rpc_port", "0"))) or int(number("port", told.get("port", "0"))) or DEFAULT_PORT
    host = told.get("rpc_address") or DEFAULT_HOST
    if not told.get("rpc_address"):
        warnings.append(
            f"listens on every address of this host ({DEFAULT_HOST}), as Mooncake's master does; --rpc_address=ADDRESS names one"
        )
    http = int(number("metrics_port", told.get("metrics_port", str(DEFAULT_HTTP_PORT))))
    if "metrics_host" in told and told["metrics_host"] != host:
        warnings.append("--metrics_host has no effect: every port is on the host of --rpc_address")
    found = [f"--listen={host}:{port}", f"--http-port={http}"]
    if host in ("0.0.0.0", "::") and "advertise" not in told and "members" not in told:
        found.append(f"--advertise={own_address()}:{port}")
    return found


def own_address() -> str:
    """The address of this host towards others; the loopback one where there is no network. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("192.0.2.1", 9))
            return asking.getsockname()[0]
        except OSError:
            return "127.0.0.1"


def _replication(told: dict[str, str]) -> list[str]:
    threshold = told.get("dynamic_replication_admission_qps_threshold")
    if threshold is None:
        return []
    window = number("dynamic_replication_heat_window_seconds", told.get("dynamic_replication_heat_window_seconds", "10"))
    reads = number("dynamic_replication_admission_qps_threshold", threshold) * window
    return [f"--dynamic-replication-reads={max(1, round(reads))}"]


def _data_dir(told: dict[str, str]) -> str:
    named = os.environ.get("TIDEPOOL_DATA_DIR")
    if named:
        return named
    parent = os.path.dirname(QUORUM_DIR)
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    if os.access(parent, os.W_OK):
        return QUORUM_DIR
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return os.path.join(state, "tidepool", f"master-{told.get('rpc_port') or told.get('port') or DEFAULT_PORT}")
