//! What the auditor found on this master: counted, logged, shown. And the leader's part: an Audit op every so often.

use std::sync::Arc;

use prometheus::{Histogram, HistogramOpts, IntCounter, IntCounterVec, Opts, Registry};
use tidepool_proto::Error;

use super::core::{Service, unexpected};
use super::tenure::Tenure;
use crate::directory::limits::SHARDS;
use crate::directory::{AUDIT_STEP_ITEMS, AuditProgress, Op, Outcome, Violation, ViolationKind};

/// Steps that one round proposes at most: with more objects a round covers less than a shard.
const STEPS_PER_ROUND_MAX: u64 = 32;

/// Metrics of this master's auditor.
pub struct AuditMetrics {
    violations: IntCounterVec,
    passes: IntCounter,
    step_seconds: Histogram,
}

impl AuditMetrics {
    /// Metrics in no registry yet: apply may run before there is one.
    pub fn new() -> Result<AuditMetrics, prometheus::Error> {
        let violations = Opts::new("tidepool_audit_violations_total", "Differences that the auditor found, by kind");
        let violations = IntCounterVec::new(violations, &["kind"])?;
        // A series that is there at zero can be alarmed on.
        ViolationKind::ALL.iter().for_each(|kind| drop(violations.with_label_values(&[kind.name()])));
        let buckets = prometheus::exponential_buckets(0.000_031_25, 2.0, 12)?;
        let step_seconds = HistogramOpts::new("tidepool_audit_step_seconds", "Time that apply waited for one step");
        Ok(AuditMetrics {
            violations,
            passes: IntCounter::new("tidepool_audit_passes_total", "Whole passes over the directory")?,
            step_seconds: Histogram::with_opts(step_seconds.buckets(buckets))?,
        })
    }

    /// Shows them in a registry.
    pub fn register(&self, registry: &Registry) -> Result<(), prometheus::Error> {
        registry.register(Box::new(self.violations.clone()))?;
        registry.register(Box::new(self.passes.clone()))?;
        registry.register(Box::new(self.step_seconds.clone()))
    }

    /// Notes what steps of one entry found, and how long the entry took.
    pub fn note(&self, seconds: f64, progress: AuditProgress, violations: &[Violation]) {
        self.step_seconds.observe(seconds);
        self.passes.inc_by(progress.passes.saturating_sub(self.passes.get()));
        for violation in violations {
            self.violations.with_label_values(&[violation.kind.name()]).inc();
            tracing::error!(
                kind = violation.kind.name(),
                log_index = violation.index,
                facts = violation.facts,
                "audit: the state is not what is kept up about it"
            );
        }
    }
}

/// One round: a shard's worth of objects is covered.
pub async fn propose(service: &Arc<Service>, tenure: &Arc<Tenure>) -> Result<(), Error> {
    let in_shard = service.directory().slots() / SHARDS as u64;
    let steps = (1 + in_shard / AUDIT_STEP_ITEMS as u64).min(STEPS_PER_ROUND_MAX);
    // One by one, so that what else waits for the log goes in between.
    for _ in 0..steps {
        match tenure.proposer.propose_one(Op::Audit, None).await? {
            Outcome::Done => {}
            Outcome::Refused(error) => return Err(error),
            other => return Err(unexpected("audit", &other)),
        }
    }
    Ok(())
}
