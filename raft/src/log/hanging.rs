//! A disk that does not answer: while one sync takes too long its member can vote for nobody and acknowledge nothing, and nothing else
//! would say why. It is said in the log, and shown as a metric, while it lasts.

use std::path::Path;
use std::sync::Weak;
use std::time::Duration;

use openraft::type_config::TypeConfigExt;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{Gauge, Registry};

use super::latency::AppendLatency;
use crate::types::Config;

/// A sync that takes longer is said to hang.
const SAY_AFTER: Duration = Duration::from_secs(1);
/// It is said again so often while it hangs.
const SAY_EVERY: Duration = Duration::from_secs(10);
/// Time between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// What is to be said after a look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Said {
    /// The sync under way has taken so long.
    Hangs(Duration),
    /// The one that was said to hang is answered; it had taken so long when that was said last.
    Answered(Duration),
}

/// What was said so far.
#[derive(Default)]
struct Complaint {
    /// How long the sync had taken when it was said to hang, the last time.
    told: Option<Duration>,
}

impl Complaint {
    /// A look that found a sync under way for so long; none: there is none.
    fn look(&mut self, pending: Option<Duration>) -> Option<Said> {
        let pending = pending.unwrap_or_default();
        match self.told {
            // Another one, or none.
            Some(told) if pending < told => {
                self.told = None;
                Some(Said::Answered(told))
            }
            Some(told) if pending < told + SAY_EVERY => None,
            None if pending < SAY_AFTER => None,
            _ => {
                self.told = Some(pending);
                Some(Said::Hangs(pending))
            }
        }
    }
}

/// Looks, and says what is to be said, as long as the store is open: `open` goes with it. Keeps no log open.
pub(super) fn watch<C: Config>(latency: AppendLatency<C>, path: &Path, open: Weak<()>) {
    let path = path.to_owned();
    // Detached: it ends when the store closes.
    drop(C::spawn(async move {
        let mut complaint = Complaint::default();
        while open.strong_count() > 0 {
            let pending = latency.pending();
            let seconds = |time: Duration| (time.as_secs_f64() * 10.0).round() / 10.0;
            match complaint.look(pending) {
                Some(Said::Hangs(so_far)) => tracing::warn!(
                    path = %path.display(),
                    so_far_s = seconds(so_far),
                    "the disk does not answer a sync of the raft log; until it does this master votes for nobody and acknowledges nothing: look at that disk"
                ),
                Some(Said::Answered(told)) => {
                    tracing::warn!(path = %path.display(), longer_than_s = seconds(told), "the disk answers syncs of the raft log again");
                }
                None => {}
            }
            C::sleep(LOOK_EVERY).await;
        }
    }));
}

/// How long the sync under way has taken so far, looked at when it is asked for.
struct Pending<C: Config> {
    latency: AppendLatency<C>,
    gauge: Gauge,
}

impl<C: Config> Collector for Pending<C> {
    fn desc(&self) -> Vec<&Desc> {
        self.gauge.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.gauge.set(self.latency.pending().unwrap_or_default().as_secs_f64());
        self.gauge.collect()
    }
}

/// Shows it.
pub(super) fn register<C: Config>(registry: &Registry, latency: AppendLatency<C>) -> Result<(), prometheus::Error> {
    let help = "How long the sync of the log that is under way has taken so far; 0: there is none.";
    let gauge = Gauge::new("tidepool_raft_sync_pending_seconds", help)?;
    registry.register(Box::new(Pending { latency, gauge }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sync_that_hangs_is_said_after_a_second_and_every_ten() {
        let mut complaint = Complaint::default();
        let said: Vec<(u64, Said)> =
            (0..150).filter_map(|at| Some((at, complaint.look(Some(Duration::from_millis(at * 200)))?))).collect();
        let hangs = |at: u64| (at, Said::Hangs(Duration::from_millis(at * 200)));
        assert_eq!(said, [hangs(5), hangs(55), hangs(105)]);
        assert_eq!(complaint.look(None), Some(Said::Answered(Duration::from_secs(21))));
        assert_eq!(complaint.look(None), None);
    }

    #[test]
    fn syncs_that_are_answered_in_time_are_not_mentioned_however_many() {
        let mut complaint = Complaint::default();
        for at in 0..100u64 {
            assert_eq!(complaint.look((at % 3 > 0).then(|| Duration::from_millis(at % 10 * 99))), None);
        }
    }

    #[test]
    fn another_sync_that_hangs_is_another_complaint() {
        let mut complaint = Complaint::default();
        assert_eq!(complaint.look(Some(Duration::from_secs(3))), Some(Said::Hangs(Duration::from_secs(3))));
        assert_eq!(complaint.look(Some(Duration::from_secs(2))), Some(Said::Answered(Duration::from_secs(3))));
        assert_eq!(complaint.look(Some(Duration::from_secs(2))), Some(Said::Hangs(Duration::from_secs(2))));
    }
}
