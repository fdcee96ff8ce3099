//! Masters that are lost for good: a cluster that goes on in another history.

use std::time::Duration;

use openraft::async_runtime::AsyncRuntime;
use openraft_rt_sim::SimRuntime;

use super::{Change, Nemesis};
use crate::quorum::{MASTERS, SPARES};

/// How often that may be in one run.
const LOSSES_MAX: u64 = 2;
/// How often whoever goes on alone was cut off from the others before, in a hundred, and for how long at most.
const LAGS: u64 = 60;
const LAGS_MS_MAX: u64 = 900;

impl Nemesis {
    /// All masters are lost, and a new cluster begins with what was published last.
    pub(super) async fn restore_masters(&mut self) -> Result<(), String> {
        let Some(image) = self.image.take().filter(|_| self.losses < LOSSES_MAX) else { return Ok(()) };
        self.losses += 1;
        self.net.trace.say("all masters are lost; one begins from an image");
        self.changes.clear();
        self.damaged = None;
        let kept = self.quorum.restore(&image, &self.observer)?;
        *self.struck.entry("RestoredKeys".to_owned()).or_default() += kept;
        let others = 1..=MASTERS;
        self.take_in(others).await
    }

    /// All masters but one are lost, and that one goes on alone with what its disk holds.
    pub(super) async fn lose_majority(&mut self) -> Result<(), String> {
        // Whoever comes or goes just now may be none that the quorum counts.
        let is_sure = |id: &u64| {
            self.damaged != Some(*id) && self.changes.iter().all(|change| change.new != *id && change.old != Some(*id))
        };
        let sure: Vec<u64> = self.quorum.running().iter().map(|r| r.machine.id).filter(is_sure).collect();
        let helpers = MASTERS - 1;
        if self.observer.is_alone()
            || sure.is_empty()
            || self.losses == LOSSES_MAX
            || self.spares_used + helpers > self.params.spares()
        {
            return Ok(());
        }
        self.losses += 1;
        let last = sure[self.random.below(sure.len() as u64) as usize];
        if self.random.chance(LAGS) {
            let others = self.quorum.enrolled().into_iter().filter(|other| *other != last);
            others.for_each(|other| self.net.part(last, other));
            SimRuntime::sleep(Duration::from_millis(self.random.range(20, LAGS_MS_MAX))).await;
        }
        let pending = self.quorum.cluster().disk(last).map_or(0, |disk| disk.pending() as u64);
        let kept = self.random.range(0, pending) as usize;
        self.net.trace.say(&format!("masters are lost; {last} goes on alone"));
        self.changes.clear();
        // What was published is of the cluster before.
        (self.image, self.damaged) = (None, None);
        self.quorum.go_on_alone(last, kept, &self.observer)?;
        let first = MASTERS + self.spares_used + 1;
        self.spares_used += helpers;
        self.take_in(first..=MASTERS + self.spares_used).await
    }

    /// Starts those that are left, and has `others` taken in, one after the other.
    async fn take_in(&mut self, others: std::ops::RangeInclusive<u64>) -> Result<(), String> {
        debug_assert!(*others.end() <= MASTERS + SPARES);
        let enrolled = self.quorum.enrolled();
        for id in &enrolled {
            self.quorum.start(*id).await?;
        }
        self.changes.extend(others.filter(|id| !enrolled.contains(id)).map(|id| Change { new: id, old: None }));
        self.change_members().await
    }
}
