//! What a trial found, and bounds that a row of the fault matrix may put on it.
//!
//! A bound is what must hold times a generous number, so that a busy host does not break it: it tells a call that waits for something that
//! does not come from one that is slow.

use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::outage::Outage;

/// A fault that must not be felt leaves the 99th percentile below so many times what it was before (twice is what must hold) ...
const UNFELT_TIMES: f64 = 10.0;
/// ... or below this, whatever it was: an idle host answers in less than a millisecond.
const UNFELT_MS: f64 = 2_000.0;

/// What a trial found.
#[derive(Clone, Debug)]
pub struct Findings {
    /// The outage around the last fault.
    pub outage: Outage,
    /// Acknowledged puts of the load.
    pub acknowledged: u64,
    /// Of them, how many could not be read back.
    pub lost: u64,
    /// Calls on contended keys whose answers fit together.
    pub contested: u64,
    /// 99th percentile of the calls before the first fault.
    pub p99_before_ms: Option<f64>,
    /// The same of all calls since.
    pub p99_after_ms: Option<f64>,
    /// What showed that the faults happened.
    pub evidence: Vec<String>,
}

impl Findings {
    /// Puts and gets that were sent after the last fault succeeded within this time of it.
    pub fn expect_back_within(&self, limit: Duration) -> Result<()> {
        for (what, ms) in [("put", self.outage.rto_write_ms), ("get", self.outage.rto_read_ms)] {
            let ms = ms.with_context(|| format!("no {what} that was sent after the fault succeeded"))?;
            ensure!(
                ms <= limit.as_secs_f64() * 1e3,
                "the first {what} after the fault took {ms} ms, {limit:?} at most"
            );
        }
        Ok(())
    }

    /// The 99th percentile since the first fault is below this.
    pub fn expect_p99_within(&self, limit: Duration) -> Result<()> {
        let ms = self.p99_after_ms.context("no call was made after the fault")?;
        ensure!(ms <= limit.as_secs_f64() * 1e3, "the 99th percentile since the fault is {ms} ms, {limit:?} at most");
        Ok(())
    }

    /// The fault was not felt: no call failed, and the 99th percentile is what it was, generously.
    pub fn expect_unfelt(&self) -> Result<()> {
        ensure!(self.outage.failed == 0, "{} calls failed", self.outage.failed);
        let before = self.p99_before_ms.context("no call was made before the fault")?;
        let limit = (UNFELT_TIMES * before).max(UNFELT_MS);
        self.expect_p99_within(Duration::from_secs_f64(limit / 1e3))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(rto: Option<f64>, p99: (f64, f64), failed: u64) -> Findings {
        let outage = Outage { rto_write_ms: rto, rto_read_ms: Some(1.0), failed, ..Outage::default() };
        let (p99_before_ms, p99_after_ms) = (Some(p99.0), Some(p99.1));
        Findings { outage, acknowledged: 1, lost: 0, contested: 0, p99_before_ms, p99_after_ms, evidence: Vec::new() }
    }

    #[test]
    fn bounds_are_kept_or_say_what_broke_them() {
        let second = Duration::from_secs(1);
        assert!(findings(Some(900.0), (1.0, 1.0), 0).expect_back_within(second).is_ok());
        let late = findings(Some(1_100.0), (1.0, 1.0), 0).expect_back_within(second).unwrap_err().to_string();
        assert!(late.contains("1100 ms") && late.contains("put"), "{late}");
        assert!(findings(None, (1.0, 1.0), 0).expect_back_within(second).is_err());
        assert!(findings(None, (1.0, 1_900.0), 0).expect_unfelt().is_ok());
        assert!(findings(None, (300.0, 2_900.0), 0).expect_unfelt().is_ok());
        assert!(findings(None, (1.0, 2_100.0), 0).expect_unfelt().is_err());
        assert!(findings(None, (1.0, 1.0), 1).expect_unfelt().is_err());
    }
}
