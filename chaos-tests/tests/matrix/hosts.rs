//! F10 and F25: clocks, processors and memory of the masters' hosts.

use std::time::Duration;

use anyhow::ensure;
use tidepool_chaos_tests::admin;
use tidepool_chaos_tests::nemesis::host::{OutOfMemory, Starve, WallClockJump};
use tidepool_chaos_tests::nemesis::{Nemesis, Who};
use tidepool_chaos_tests::trial::Trial;

use crate::rig::{binary, keys};
use crate::{calm, in_lab, on_loopback};

#[test]
fn f10_a_jump_of_the_wall_clock_changes_nothing() {
    on_loopback("F10", async {
        let mut trial = Trial::start(&binary(), None, |pool| {
            calm(pool);
            pool.built_in_faults = true;
        })
        .await?;
        let term = trial.status().await?.term;
        for hours in [1, -1] {
            for at in 0..3 {
                let mut jump = WallClockJump { who: Who::Master(at), by_ms: hours * 3_600_000 };
                trial.inject(&mut jump)?;
                // It looks at the wall clock for log lines and for what a snapshot says of its age. Nowhere to publish to: an error.
                let _ = admin::take_snapshot(trial.cluster.masters[at].rpc).await;
                trial.goes_on().await?;
                trial.heal(&mut jump)?;
            }
        }
        ensure!(trial.status().await?.term == term, "a jump of the wall clock cost an election");
        let findings = trial.judge().await?;
        ensure!(findings.outage.failed == 0, "{} calls failed", findings.outage.failed);
        Ok(findings)
    });
}

/// No row of its own: a leader that hardly runs may be replaced, and nothing is lost.
#[test]
fn f14_a_starved_leader_loses_nothing() {
    in_lab("F14", async |lab| {
        let mut trial = Trial::start(&binary(), Some(lab), |_| {}).await?;
        let (leader, _) = trial.leader_and_standby().await?;
        let mut starve = Starve::to(leader, 3);
        trial.inject(&mut starve)?;
        trial.goes_on_for(Duration::from_secs(2)).await?;
        trial.heal(&mut starve)?;
        trial.judge().await
    });
}

#[test]
fn f25_a_standby_without_memory_returns() {
    in_lab("F25", async |lab| {
        let mut trial = Trial::start(&binary(), Some(lab), |_| {}).await?;
        let (_, standby) = trial.leader_and_standby().await?;
        let mut tight = OutOfMemory::of(standby, 4 << 20);
        trial.inject(&mut tight)?;
        // Every key is memory for it.
        let mut round = 0;
        while standby.of(&mut trial.cluster)?.is_running()? {
            trial.put_all(&keys(&format!("memory/{round}"), 500), 64).await?;
            round += 1;
            ensure!(round < 500, "the limit was never met: {}", tight.describe());
        }
        trial.goes_on().await?;
        trial.heal(&mut tight)?;
        trial.whole().await?;
        trial.judge().await
    });
}
