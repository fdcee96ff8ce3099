//! What a master counts, under `tidepool_master_`.

use std::sync::Arc;

use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
};

use super::agreement::Verdict;

/// Metrics of the service; the Raft node keeps its own in the same registry.
pub struct ServiceMetrics {
    /// Keys handled, by operation and result code.
    pub keys: IntCounterVec,
    /// Calls slower than the slow-call setting.
    pub slow_calls: IntCounter,
    /// Ops packed into one entry.
    pub ops_per_entry: Histogram,
    /// Seconds from a mutation's arrival to its commit and apply.
    pub commit_seconds: Histogram,
    /// Lookups that found, or did not find, a readable object.
    pub lookups: IntCounterVec,
    /// Objects evicted, by reason.
    pub evicted_objects: IntCounterVec,
    /// Bytes evicted, by reason.
    pub evicted_bytes: IntCounterVec,
    /// Reads reported as failed, by kind.
    pub read_reports: IntCounterVec,
    /// Replicas dropped after their datanode found them corrupt.
    pub corrupt_replicas: IntCounter,
    /// Replicas from before a restore that their datanodes were asked for, by whether they hold them.
    pub presence_checked: IntCounterVec,
    /// Objects reclaimed while a predecessor's lease may still have run (L4).
    pub leases_broken: IntCounter,
    /// Grants discarded because they were neither ended nor revoked in time.
    pub grants_discarded: IntCounter,
    /// Copies between datanodes, by how they went.
    pub copies: IntCounterVec,
    /// Tasks that ended, by state.
    pub tasks_ended: IntCounterVec,
    /// Objects that are read often.
    pub hot_objects: IntGauge,
    /// Extra replicas of hot objects, by what became of them.
    pub extra_replicas: IntCounterVec,
    /// Datanodes found silent.
    pub nodes_suspected: IntCounter,
    /// Lease entries.
    pub leases: IntGauge,
    /// Bytes under lease.
    pub leased_bytes: IntGauge,
    /// Ops waiting for an entry.
    pub queued_ops: IntGauge,
    /// Requests that the eviction policies were not told of: they hear of so many keys a second, or too many waited.
    pub recency_dropped: IntCounter,
    /// Memory of the eviction policies.
    pub policy_bytes: IntGauge,
    /// Objects in the directory.
    pub objects: IntGauge,
    /// Bytes per segment and state.
    pub segment_bytes: IntGaugeVec,
    /// Largest free extent per segment.
    pub largest_free_extent: IntGaugeVec,
    /// Raft figures, by name.
    pub raft: IntGaugeVec,
    /// 1 when this master leads.
    pub is_leader: IntGauge,
    /// Last log index this master published.
    pub snapshot_index: IntGauge,
    /// Age of that snapshot.
    pub snapshot_age_seconds: IntGauge,
    /// Its bytes.
    pub snapshot_bytes: IntGauge,
    /// Seconds of publishing, by phase.
    pub snapshot_seconds: HistogramVec,
    /// Publications that failed, by reason.
    pub snapshot_failures: IntCounterVec,
    /// Memory held for a freeze that is being written.
    pub freeze_bytes: IntGauge,
    /// Checkpoints at which this master compared its state with the others', by what came of it.
    pub state_comparisons: IntCounterVec,
    /// 1 while no majority of the masters has one state: nothing is written.
    pub state_split: IntGauge,
    /// For how long the newest snapshot of this master has been waiting for a majority to vouch for it.
    pub snapshot_unagreed_seconds: IntGauge,
}

impl ServiceMetrics {
    /// Registers everything in `registry`.
    pub fn register(registry: &Registry) -> Result<Arc<ServiceMetrics>, prometheus::Error> {
        let counter = |name: &str, help: &str| -> Result<IntCounter, prometheus::Error> {
            let metric = IntCounter::new(format!("tidepool_master_{name}"), help)?;
            registry.register(Box::new(metric.clone()))?;
            Ok(metric)
        };
        let counters = |name: &str, help: &str, labels: &[&str]| -> Result<IntCounterVec, prometheus::Error> {
            let metric = IntCounterVec::new(Opts::new(format!("tidepool_master_{name}"), help), labels)?;
            registry.register(Box::new(metric.clone()))?;
            Ok(metric)
        };
        let gauge = |name: &str, help: &str| -> Result<IntGauge, prometheus::Error> {
            let metric = IntGauge::new(format!("tidepool_master_{name}"), help)?;
            registry.register(Box::new(metric.clone()))?;
            Ok(metric)
        };
        let gauges = |name: &str, help: &str, labels: &[&str]| -> Result<IntGaugeVec, prometheus::Error> {
            let metric = IntGaugeVec::new(Opts::new(format!("tidepool_master_{name}"), help), labels)?;
            registry.register(Box::new(metric.clone()))?;
            Ok(metric)
        };
        let histogram = |name: &str, help: &str, buckets: Vec<f64>| -> Result<Histogram, prometheus::Error> {
            let options = HistogramOpts::new(format!("tidepool_master_{name}"), help).buckets(buckets);
            let metric = Histogram::with_opts(options)?;
            registry.register(Box::new(metric.clone()))?;
            Ok(metric)
        };
        let state_comparisons = counters(
            "state_comparisons_total",
            "Comparisons of this master's state with the others' at a checkpoint, by what came of it",
            &["verdict"],
        )?;
        Verdict::NAMES.iter().for_each(|name| drop(state_comparisons.with_label_values(&[name])));
        Ok(Arc::new(ServiceMetrics {
            keys: counters("keys_total", "Keys handled, by operation and result code", &["op", "code"])?,
            slow_calls: counter("slow_calls_total", "Calls slower than the slow-call setting")?,
            ops_per_entry: histogram(
                "ops_per_entry",
                "Ops packed into one oplog entry",
                prometheus::exponential_buckets(1.0, 2.0, 11)?,
            )?,
            commit_seconds: histogram(
                "commit_seconds",
                "Seconds from a mutation's arrival to its commit and apply",
                prometheus::exponential_buckets(0.0001, 2.0, 16)?,
            )?,
            lookups: counters("lookups_total", "Keys looked up, by tier of the answer or miss", &["result"])?,
            evicted_objects: counters("evicted_objects_total", "Objects evicted, by reason", &["reason"])?,
            evicted_bytes: counters("evicted_bytes_total", "Bytes evicted, by reason", &["reason"])?,
            read_reports: counters("read_reports_total", "Failed reads reported by clients, by kind", &["kind"])?,
            corrupt_replicas: counter(
                "corrupt_replicas_total",
                "Replicas dropped after their datanode found them corrupt",
            )?,
            presence_checked: counters(
                "presence_checked_total",
                "Replicas from before a restore that their datanodes were asked for, by whether they hold them",
                &["result"],
            )?,
            leases_broken: counter(
                "leases_broken_total",
                "Objects reclaimed while a predecessor's lease may still have run",
            )?,
            grants_discarded: counter("grants_discarded_total", "Grants neither ended nor revoked in time")?,
            copies: counters("copies_total", "Copies between datanodes, by how they went", &["result"])?,
            tasks_ended: counters("tasks_ended_total", "Tasks that ended, by state", &["state"])?,
            hot_objects: gauge("hot_objects", "Objects that are read often, as dynamic replication counts them")?,
            extra_replicas: counters(
                "extra_replicas_total",
                "Extra replicas of hot objects: started, or dropped and why",
                &["event"],
            )?,
            nodes_suspected: counter("nodes_suspected_total", "Datanodes found silent")?,
            leases: gauge("leases", "Lease entries held by this leader")?,
            leased_bytes: gauge("leased_bytes", "Bytes under lease")?,
            queued_ops: gauge("queued_ops", "Ops waiting for an entry")?,
            recency_dropped: counter(
                "recency_dropped_total",
                "Requests that the eviction policies were not told of: they hear so much, or too many waited",
            )?,
            policy_bytes: gauge("policy_bytes", "Memory of the eviction policies")?,
            objects: gauge("objects", "Objects in the directory")?,
            segment_bytes: gauges("segment_bytes", "Bytes per segment and state", &["segment", "state"])?,
            largest_free_extent: gauges("largest_free_extent_bytes", "Largest free extent per segment", &["segment"])?,
            raft: gauges("raft", "Raft figures: term, log, committed, applied, purged, snapshot index", &["figure"])?,
            is_leader: gauge("is_leader", "1 when this master leads")?,
            snapshot_index: gauge("snapshot_published_index", "Last log index this master published; 0: none")?,
            snapshot_age_seconds: gauge("snapshot_age_seconds", "Age of the snapshot published last; 0: none")?,
            snapshot_bytes: gauge("snapshot_bytes", "Bytes of the snapshot published last")?,
            snapshot_seconds: {
                let options = HistogramOpts::new(
                    "tidepool_master_snapshot_seconds",
                    "Time that publishing took: writing the image, reading it back, sending it",
                );
                let buckets = prometheus::exponential_buckets(0.01, 2.0, 18)?;
                let metric = HistogramVec::new(options.buckets(buckets), &["phase"])?;
                registry.register(Box::new(metric.clone()))?;
                metric
            },
            snapshot_failures: counters("snapshot_failures_total", "Snapshots not published, by reason", &["reason"])?,
            freeze_bytes: gauge("freeze_bytes", "Memory held for an image that is being written")?,
            state_comparisons,
            state_split: gauge("state_split", "1 while no majority of the masters has one state: nothing is written")?,
            snapshot_unagreed_seconds: gauge(
                "snapshot_unagreed_seconds",
                "For how long no majority has vouched for the newest snapshot; the log is kept meanwhile",
            )?,
        }))
    }

    /// Counts one key's result.
    pub fn count(&self, op: &str, code: tidepool_proto::ErrorCode, keys: u64) {
        if keys > 0 {
            self.keys.with_label_values(&[op, code.name()]).inc_by(keys);
        }
    }
}
