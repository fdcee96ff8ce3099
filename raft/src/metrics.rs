//! Prometheus metrics of one member. The registry is the node's own; the process that hosts it gathers it.

use prometheus::{Gauge, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, Opts, Registry};

use crate::leadership::Role;
use crate::status::NodeStatus;

/// Metrics beside those of the log store, in one registry.
#[derive(Debug)]
pub(crate) struct NodeMetrics {
    pub(crate) registry: Registry,
    pub(crate) proposals: IntCounterVec,
    pub(crate) propose_seconds: Histogram,
    pub(crate) apply_held: HistogramVec,
    pub(crate) reads: IntCounter,
    pub(crate) read_rounds: IntCounter,
    pub(crate) suspensions: IntCounter,
    pub(crate) leader_changes: IntCounter,
    pub(crate) slow_disk_handovers: IntCounterVec,
    term: IntGauge,
    leads: IntGauge,
    last_log: IntGauge,
    committed: IntGauge,
    applied: IntGauge,
    purged: IntGauge,
    snapshot: IntGauge,
    since_snapshot: IntGauge,
    lag: Gauge,
    promotable: IntGauge,
}

impl NodeMetrics {
    pub(crate) fn new(registry: Registry) -> prometheus::Result<NodeMetrics> {
        fn add<T: prometheus::core::Collector + Clone + 'static>(
            registry: &Registry,
            metric: prometheus::Result<T>,
        ) -> prometheus::Result<T> {
            let metric = metric?;
            registry.register(Box::new(metric.clone()))?;
            Ok(metric)
        }
        let gauge = |name, help| add(&registry, IntGauge::new(name, help));
        let counter = |name, help| add(&registry, IntCounter::new(name, help));
        let buckets = prometheus::exponential_buckets(0.000_1, 2.0, 16)?;
        let slow_disk_handovers = add(
            &registry,
            IntCounterVec::new(
                Opts::new(
                    "tidepool_raft_slow_disk_handovers_total",
                    "Handovers that this member began as a leader because its own disk was slow, by result.",
                ),
                &["result"],
            ),
        )?;
        for result in ["handed_over", "refused"] {
            slow_disk_handovers.with_label_values(&[result]);
        }
        Ok(NodeMetrics {
            proposals: add(
                &registry,
                IntCounterVec::new(Opts::new("tidepool_raft_proposals_total", "Proposals by result."), &["result"]),
            )?,
            propose_seconds: add(
                &registry,
                Histogram::with_opts(
                    HistogramOpts::new("tidepool_raft_propose_seconds", "Time from a proposal to its outcome.")
                        .buckets(buckets),
                ),
            )?,
            apply_held: add(
                &registry,
                HistogramVec::new(
                    HistogramOpts::new(
                        "tidepool_raft_apply_held_seconds",
                        "Time that one step held the apply loop: an entry, or the freeze that begins a snapshot.",
                    )
                    .buckets(prometheus::exponential_buckets(0.000_01, 2.0, 20)?),
                    &["step"],
                ),
            )?,
            reads: counter("tidepool_raft_linearizable_reads_total", "Callers of the read barrier.")?,
            read_rounds: counter("tidepool_raft_read_rounds_total", "Confirmations of leadership asked for reads.")?,
            suspensions: counter(
                "tidepool_raft_suspensions_total",
                "Times the machine was found to have been suspended.",
            )?,
            leader_changes: counter("tidepool_raft_leadership_changes_total", "Changes of role, term or leader seen.")?,
            slow_disk_handovers,
            term: gauge("tidepool_raft_term", "Current term.")?,
            leads: gauge("tidepool_raft_is_leader", "1 while this member leads.")?,
            last_log: gauge("tidepool_raft_last_log_index", "Last entry in the log.")?,
            committed: gauge("tidepool_raft_committed_index", "Last entry committed by a quorum.")?,
            applied: gauge("tidepool_raft_applied_index", "Last entry applied.")?,
            purged: gauge("tidepool_raft_purged_index", "Last entry dropped from the log.")?,
            snapshot: gauge("tidepool_raft_snapshot_index", "Last entry the snapshot covers.")?,
            since_snapshot: gauge("tidepool_raft_bytes_since_snapshot", "Payload bytes applied since the snapshot.")?,
            lag: add(
                &registry,
                Gauge::new(
                    "tidepool_raft_lag_seconds",
                    "Age of the oldest committed entry not applied here; -1: not known.",
                ),
            )?,
            promotable: gauge("tidepool_raft_promotable", "1 while this member could lead without loss.")?,
            registry,
        })
    }

    /// Takes over the figures that are states, not events.
    pub(crate) fn observe(&self, status: &NodeStatus) {
        let set = |gauge: &IntGauge, value: u64| gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
        set(&self.term, status.leadership.term);
        self.leads.set(i64::from(status.leadership.role == Role::Leader));
        set(&self.last_log, status.last_log_index);
        set(&self.committed, status.committed_index);
        set(&self.applied, status.applied_index);
        set(&self.purged, status.purged_index);
        set(&self.snapshot, status.snapshot_index);
        set(&self.since_snapshot, status.bytes_since_snapshot);
        self.lag.set(status.lag.map_or(-1.0, |lag| lag.as_secs_f64()));
        self.promotable.set(i64::from(status.promotable().is_ok()));
    }
}
