//! Counters and gauges of one datanode. Labels are bounded: codes, directions, segment names of this node.

use std::time::Duration;

use prometheus::{
    Gauge, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
};
use tidepool_proto::ErrorCode;

/// Which way payload went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Direction {
    Read,
    Write,
}

/// Metrics, and the registry they are exported from.
pub(crate) struct Metrics {
    pub(crate) registry: Registry,
    pub(crate) read_items: IntCounter,
    pub(crate) read_bytes: IntCounter,
    pub(crate) stored_items: IntCounter,
    pub(crate) stored_bytes: IntCounter,
    pub(crate) aborted_items: IntCounter,
    refusals: IntCounterVec,
    pub(crate) verified_bytes: IntCounter,
    arrival_seconds: Histogram,
    command_seconds: Histogram,
    verification_failures: IntCounter,
    pub(crate) fences: IntCounter,
    pub(crate) fence_acknowledgements: IntCounter,
    pub(crate) open_writes: IntGauge,
    pub(crate) ended_grants: IntGauge,
    pub(crate) fenced_replicas: IntGauge,
    pub(crate) fences_unacknowledged: IntGauge,
    segment_bytes: IntGaugeVec,
    prefaulted_bytes: IntGaugeVec,
    pub(crate) registered: IntGauge,
    pub(crate) registrations: IntCounter,
    pub(crate) successions: IntCounterVec,
    pub(crate) beats: IntCounter,
    pub(crate) last_beat_age_seconds: Gauge,
    pub(crate) leader_clock_rate: Gauge,
    pub(crate) data_connections_open: IntGauge,
    pub(crate) bad_frames: IntCounter,
    pub(crate) discarded_bytes: IntCounter,
    pub(crate) leader_searches: IntCounter,
    pub(crate) copies: IntCounterVec,
    pub(crate) connections: IntCounterVec,
    pub(crate) connections_refused: IntCounterVec,
}

impl Metrics {
    pub(crate) fn new() -> Result<Metrics, prometheus::Error> {
        let registry = Registry::new();
        let r = &registry;
        let items = counter_vec(r, "items_total", "payload items served, by outcome", &["outcome"])?;
        let bytes = counter_vec(r, "bytes_total", "payload bytes served, by outcome", &["outcome"])?;
        let seconds = histogram_vec(r, "verify_seconds", "time spent verifying one object in place", &["trigger"])?;
        let last_beat_age_seconds =
            Gauge::with_opts(opts("last_beat_age_seconds", "time since a leader answered a heartbeat"))?;
        r.register(Box::new(last_beat_age_seconds.clone()))?;
        let leader_clock_rate = Gauge::with_opts(opts(
            "leader_clock_rate",
            "how fast the leader's clock goes by this host's, over the last minute heard; 1 until that is known",
        ))?;
        leader_clock_rate.set(1.0);
        r.register(Box::new(leader_clock_rate.clone()))?;
        Ok(Metrics {
            read_items: items.with_label_values(&["read"]),
            read_bytes: bytes.with_label_values(&["read"]),
            stored_items: items.with_label_values(&["stored"]),
            stored_bytes: bytes.with_label_values(&["stored"]),
            aborted_items: items.with_label_values(&["aborted"]),
            refusals: counter_vec(
                r,
                "refusals_total",
                "items refused, by direction and error code",
                &["direction", "code"],
            )?,
            verified_bytes: counter(r, "verified_bytes_total", "stored bytes verified in place")?,
            arrival_seconds: seconds.with_label_values(&["arrival"]),
            command_seconds: seconds.with_label_values(&["command"]),
            verification_failures: counter(
                r,
                "verification_failures_total",
                "objects that failed verification in place",
            )?,
            fences: counter(r, "fences_total", "replica ids fenced on the leader's word, repeats included")?,
            fence_acknowledgements: counter(
                r,
                "fence_acknowledgements_total",
                "fence acknowledgements sent, repeats included",
            )?,
            open_writes: gauge(r, "open_writes", "writes in progress")?,
            ended_grants: gauge(r, "ended_grants", "used grants remembered until they expire")?,
            fenced_replicas: gauge(r, "fenced_replicas", "fenced replica ids remembered")?,
            fences_unacknowledged: gauge(r, "fences_unacknowledged", "fences whose acknowledgement has not arrived")?,
            segment_bytes: gauge_vec(r, "segment_bytes", "capacity of a segment", &["segment"])?,
            prefaulted_bytes: gauge_vec(
                r,
                "prefaulted_bytes",
                "bytes of a segment whose pages are in place",
                &["segment"],
            )?,
            registered: gauge(r, "registered", "1 while registered and mounted")?,
            registrations: counter(r, "registrations_total", "incarnations begun by this process")?,
            successions: counter_vec(
                r,
                "successions_total",
                "clusters followed that went on from this one, by what became of the content",
                &["content"],
            )?,
            beats: counter(r, "heartbeats_total", "heartbeats answered by a leader")?,
            leader_searches: counter(r, "leader_searches_total", "rounds over the masters in search of the leader")?,
            copies: counter_vec(r, "copies_total", "copies from other datanodes, by outcome", &["outcome"])?,
            connections: counter_vec(r, "connections_total", "connections accepted, by kind", &["kind"])?,
            connections_refused: counter_vec(
                r,
                "connections_refused_total",
                "connections closed unserved, by reason",
                &["reason"],
            )?,
            last_beat_age_seconds,
            leader_clock_rate,
            data_connections_open: gauge(r, "data_connections_open", "data connections open now")?,
            bad_frames: counter(r, "bad_frames_total", "data connections closed for a malformed frame")?,
            discarded_bytes: counter(r, "discarded_bytes_total", "payload bytes received and thrown away")?,
            registry,
        })
    }

    pub(crate) fn refused(&self, direction: Direction, code: ErrorCode) {
        let direction = match direction {
            Direction::Read => "read",
            Direction::Write => "write",
        };
        self.refusals.with_label_values(&[direction, code.name()]).inc();
    }

    pub(crate) fn verified_on_arrival(&self, bytes: u64, took: Duration) {
        self.verified_bytes.inc_by(bytes);
        self.arrival_seconds.observe(took.as_secs_f64());
    }

    pub(crate) fn verified_on_command(&self, bytes: u64, took: Duration) {
        self.verified_bytes.inc_by(bytes);
        self.command_seconds.observe(took.as_secs_f64());
    }

    pub(crate) fn verification_failed(&self) {
        self.verification_failures.inc();
    }

    pub(crate) fn segment(&self, name: &str, bytes: u64) {
        self.segment_bytes.with_label_values(&[name]).set(bytes as i64);
        self.prefaulted(name, 0);
    }

    pub(crate) fn prefaulted(&self, name: &str, bytes: u64) {
        self.prefaulted_bytes.with_label_values(&[name]).set(bytes as i64);
    }
}

fn opts(name: &str, help: &str) -> Opts {
    Opts::new(name, help).namespace("tidepool").subsystem("datanode")
}

fn counter(registry: &Registry, name: &str, help: &str) -> Result<IntCounter, prometheus::Error> {
    let metric = IntCounter::with_opts(opts(name, help))?;
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}

fn gauge(registry: &Registry, name: &str, help: &str) -> Result<IntGauge, prometheus::Error> {
    let metric = IntGauge::with_opts(opts(name, help))?;
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}

fn counter_vec(
    registry: &Registry,
    name: &str,
    help: &str,
    labels: &[&str],
) -> Result<IntCounterVec, prometheus::Error> {
    let metric = IntCounterVec::new(opts(name, help), labels)?;
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}

fn gauge_vec(registry: &Registry, name: &str, help: &str, labels: &[&str]) -> Result<IntGaugeVec, prometheus::Error> {
    let metric = IntGaugeVec::new(opts(name, help), labels)?;
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}

fn histogram_vec(
    registry: &Registry,
    name: &str,
    help: &str,
    labels: &[&str],
) -> Result<HistogramVec, prometheus::Error> {
    let buckets = prometheus::exponential_buckets(1e-6, 4.0, 12)?;
    let options = HistogramOpts::new(name, help).namespace("tidepool").subsystem("datanode").buckets(buckets);
    let metric = HistogramVec::new(options, labels)?;
    registry.register(Box::new(metric.clone()))?;
    Ok(metric)
}
