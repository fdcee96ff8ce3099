//! Figures of the log store.

use prometheus::{Histogram, HistogramOpts, IntCounter, IntGauge, Registry};

/// Counters and histograms, registered once a store.
#[derive(Clone)]
pub(crate) struct LogMetrics {
    pub(crate) append_seconds: Histogram,
    pub(crate) sync_seconds: Histogram,
    pub(crate) entries_per_sync: Histogram,
    pub(crate) appended_entries: IntCounter,
    pub(crate) appended_bytes: IntCounter,
    pub(crate) read_from_disk_entries: IntCounter,
    pub(crate) queued_bytes: IntGauge,
    pub(crate) cached_bytes: IntGauge,
    pub(crate) failed: IntGauge,
}

impl LogMetrics {
    pub(crate) fn register(registry: &Registry) -> Result<LogMetrics, prometheus::Error> {
        let seconds = || prometheus::exponential_buckets(20e-6, 2.0, 18);
        let histogram = |name: &str, help: &str, buckets: Vec<f64>| {
            let histogram = Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets))?;
            registry.register(Box::new(histogram.clone()))?;
            Ok::<_, prometheus::Error>(histogram)
        };
        let counter = |name: &str, help: &str| {
            let counter = IntCounter::new(name, help)?;
            registry.register(Box::new(counter.clone()))?;
            Ok::<_, prometheus::Error>(counter)
        };
        let gauge = |name: &str, help: &str| {
            let gauge = IntGauge::new(name, help)?;
            registry.register(Box::new(gauge.clone()))?;
            Ok::<_, prometheus::Error>(gauge)
        };
        Ok(LogMetrics {
            append_seconds: histogram(
                "tidepool_raft_log_append_seconds",
                "Time to write one batch, before its sync",
                seconds()?,
            )?,
            sync_seconds: histogram("tidepool_raft_log_fsync_seconds", "Time of one sync", seconds()?)?,
            entries_per_sync: histogram(
                "tidepool_raft_log_entries_per_fsync",
                "Entries that one sync made durable",
                prometheus::exponential_buckets(1.0, 2.0, 14)?,
            )?,
            appended_entries: counter("tidepool_raft_log_appended_entries_total", "Entries made durable")?,
            appended_bytes: counter("tidepool_raft_log_appended_bytes_total", "Encoded bytes of entries made durable")?,
            read_from_disk_entries: counter(
                "tidepool_raft_log_disk_read_entries_total",
                "Entries read back from disk because they were no longer cached",
            )?,
            queued_bytes: gauge("tidepool_raft_log_queued_bytes", "Bytes accepted and not yet durable")?,
            cached_bytes: gauge("tidepool_raft_log_cached_bytes", "Bytes of entries held in memory")?,
            failed: gauge("tidepool_raft_log_failed", "1 after a disk failure ended the store")?,
        })
    }
}
