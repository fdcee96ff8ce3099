"""Flags of Mooncake's programs (0.3.13.post1), as their own `--help` lists them; those that take no value apart."""

MASTER = (
    "allocation_strategy", "allow_evict_soft_pinned_objects", "alsologtoemail", "alsologtostderr",
    "batch_oplog_retry_timeout_sec", "client_ttl", "cluster_id", "colorlogtostderr", "config_path", "cxl_path", "cxl_size",
    "default_kv_lease_ttl", "default_kv_soft_pin_ttl", "drop_log_memory", "dynamic_replication_admission_qps_threshold",
    "dynamic_replication_heat_window_seconds", "dynamic_replication_max_memory_replicas", "dynamic_replication_mode",
    "enable_cxl", "enable_disk_eviction", "enable_ha", "enable_http_metadata_server", "enable_kv_events",
    "enable_metadata_cleanup_on_timeout", "enable_metric_reporting", "enable_multi_tenants", "enable_offload", "enable_oplog",
    "enable_snapshot", "enable_snapshot_restore", "etcd_endpoints", "eviction_high_watermark_ratio", "eviction_ratio",
    "flagfile", "fromenv", "global_file_segment_size", "ha_backend_connstring", "ha_backend_type", "help", "helpfull",
    "helpmatch", "helpon", "helppackage", "helpshort", "helpxml", "http_metadata_server_host", "http_metadata_server_port",
    "kv_events_additional_salt", "kv_events_backend_id", "kv_events_bind_endpoint", "kv_events_block_size", "kv_events_dp_rank",
    "kv_events_emit_legacy_compat", "kv_events_emit_object_key", "kv_events_lora_name", "kv_events_model_name",
    "kv_events_queue_capacity", "kv_events_tenant_id", "log_backtrace_at", "log_dir", "log_link", "log_prefix", "logbuflevel",
    "logbufsecs", "logemaillevel", "logfile_mode", "logmailer", "logtostderr", "max_kv_soft_pin_ttl", "max_log_size",
    "max_retry_attempts", "max_threads", "max_total_finished_tasks", "max_total_pending_tasks", "max_total_processing_tasks",
    "memory_allocator", "metrics_host", "metrics_port", "minloglevel", "mmap_arena_pool_size",
    "nof_eviction_high_watermark_ratio", "nof_eviction_ratio", "nof_heartbeat_failures_threshold", "nof_heartbeat_interval_sec",
    "nof_heartbeat_probe_timeout_ms", "offload_cap_ratio", "offload_force_evict", "offload_on_evict", "offloading_queue_limit",
    "oplog_batch_max_entries", "oplog_poll_interval_ms", "pending_task_timeout_sec", "pod_name", "pod_namespace", "port",
    "processing_task_timeout_sec", "promotion_admission_threshold", "promotion_max_per_heartbeat", "promotion_on_hit",
    "promotion_queue_limit", "put_start_discard_timeout_sec", "put_start_release_timeout_sec", "quota_bytes", "root_fs_dir",
    "rpc_address", "rpc_conn_timeout_seconds", "rpc_enable_tcp_no_delay", "rpc_interface", "rpc_port", "rpc_thread_num",
    "snapshot_backup_dir", "snapshot_catalog_backend_connstring", "snapshot_catalog_backend_type",
    "snapshot_catalog_store_connstring", "snapshot_catalog_store_type", "snapshot_child_timeout_seconds",
    "snapshot_interval_seconds", "snapshot_object_store_type", "snapshot_payload_backend_type", "snapshot_payload_store_type",
    "snapshot_retention_count", "stderrthreshold", "stop_logging_if_full_disk", "symbolize_stacktrace",
    "tab_completion_columns", "tab_completion_word", "tenant_quota_connector_type", "tenant_quota_connector_uri", "tryfromenv",
    "undefok", "use_mmap_arena_allocator", "v", "version", "vmodule",
)  # fmt: skip
MASTER_BOOLEANS = (
    "allow_evict_soft_pinned_objects", "alsologtostderr", "colorlogtostderr", "drop_log_memory", "enable_cxl",
    "enable_disk_eviction", "enable_ha", "enable_http_metadata_server", "enable_kv_events",
    "enable_metadata_cleanup_on_timeout", "enable_metric_reporting", "enable_multi_tenants", "enable_offload", "enable_oplog",
    "enable_snapshot", "enable_snapshot_restore", "help", "helpfull", "helppackage", "helpshort", "helpxml",
    "kv_events_emit_legacy_compat", "kv_events_emit_object_key", "log_prefix", "logtostderr", "offload_force_evict",
    "offload_on_evict", "promotion_on_hit", "rpc_enable_tcp_no_delay", "stop_logging_if_full_disk", "symbolize_stacktrace",
    "use_mmap_arena_allocator", "version",
)  # fmt: skip
CLIENT = (
    "alsologtoemail", "alsologtostderr", "colorlogtostderr", "device_names", "drop_log_memory", "enable_http_server",
    "enable_offload", "flagfile", "fromenv", "global_segment_size", "help", "helpfull", "helpmatch", "helpon", "helppackage",
    "helpshort", "helpxml", "host", "http_port", "local_buffer_size", "log_backtrace_at", "log_dir", "log_link", "log_prefix",
    "logbuflevel", "logbufsecs", "logemaillevel", "logfile_mode", "logmailer", "logtostderr", "master_server_address",
    "max_log_size", "metadata_server", "minloglevel", "mmap_arena_pool_size", "port", "protocol", "start_offload_rpc_server",
    "stderrthreshold", "stop_logging_if_full_disk", "symbolize_stacktrace", "tab_completion_columns", "tab_completion_word",
    "tenant_id", "threads", "tryfromenv", "undefok", "use_mmap_arena_allocator", "v", "version", "vmodule",
)  # fmt: skip
CLIENT_BOOLEANS = (
    "alsologtostderr", "colorlogtostderr", "drop_log_memory", "enable_http_server", "enable_offload", "help", "helpfull",
    "helppackage", "helpshort", "helpxml", "log_prefix", "logtostderr", "start_offload_rpc_server", "stop_logging_if_full_disk",
    "symbolize_stacktrace", "use_mmap_arena_allocator", "version",
)  # fmt: skip
