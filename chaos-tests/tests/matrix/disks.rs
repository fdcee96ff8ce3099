//! F12 to F17: disks.

use std::time::Duration;

use anyhow::{Context, ensure};
use tidepool_chaos_tests::lab::{Knob, Lab};
use tidepool_chaos_tests::nemesis::disk::{Full, PowerCut, ReadOnly, SlowSync, SyncError, TornWrite, corrupt_largest};
use tidepool_chaos_tests::nemesis::process::Kill;
use tidepool_chaos_tests::nemesis::{Nemesis, Who};
use tidepool_chaos_tests::trial::Trial;

use crate::members::member;
use crate::rig::{binary, http_get, keys, wait_for};
use crate::{calm, in_lab, on_loopback, rounds};

#[test]
fn f12_a_standby_whose_disk_is_full_ends_and_returns() {
    in_lab("F12", async |lab: Lab| {
        let mut trial = Trial::start(&binary(), Some(lab), |pool| pool.disk_bytes = Some(256 << 20)).await?;
        let (_, standby) = trial.leader_and_standby().await?;
        let mut full = Full::of(standby);
        trial.inject(&mut full)?;
        // What the log's file has reserved lasts for a while: long keys use it up.
        let mut round = 0;
        while standby.of(&mut trial.cluster)?.is_running()? {
            let long: Vec<String> = (0..64).map(|at| format!("{round}-{at}-{}", "x".repeat(3_000))).collect();
            trial.put_all(&long, 64).await?;
            round += 1;
            ensure!(round < 2_000, "the full disk was never met");
        }
        trial.ends_by_itself(standby).await?;
        trial.goes_on().await?;
        trial.heal(&mut full)?;
        trial.whole().await?;
        let findings = trial.judge().await?;
        ensure!(findings.outage.failed == 0, "{} calls failed", findings.outage.failed);
        Ok(findings)
    });
}

#[test]
fn f13_a_leader_whose_fsync_fails_ends_and_returns() {
    on_loopback("F13", async {
        let mut trial = Trial::start(&binary(), None, |pool| pool.built_in_faults = true).await?;
        let (leader, _) = trial.leader_and_standby().await?;
        let mut broken = SyncError(leader);
        trial.inject(&mut broken)?;
        let said = trial.ends_by_itself(leader).await?;
        ensure!(said.to_lowercase().contains("input/output error"), "it does not say why: {said}");
        trial.goes_on().await?;
        trial.heal(&mut broken)?;
        trial.whole().await?;
        // The same with writes that are refused.
        let (leader, _) = trial.leader_and_standby().await?;
        let mut read_only = ReadOnly(leader);
        trial.inject(&mut read_only)?;
        let said = trial.ends_by_itself(leader).await?;
        ensure!(said.to_lowercase().contains("read-only file system"), "it does not say why: {said}");
        trial.goes_on().await?;
        trial.heal(&mut read_only)?;
        trial.judge().await
    });
}

#[test]
fn f14_a_slow_disk_of_a_standby_is_not_felt() {
    on_loopback("F14", async {
        let mut trial = Trial::start(&binary(), None, |pool| {
            calm(pool);
            pool.built_in_faults = true;
        })
        .await?;
        let (_, standby) = trial.leader_and_standby().await?;
        let term = trial.status().await?.term;
        let mut slow = SlowSync { who: standby, by: SLOWER };
        trial.inject(&mut slow)?;
        trial.goes_on_for(Duration::from_secs(3)).await?;
        ensure!(trial.status().await?.term == term, "a standby's slow disk cost an election");
        trial.heal(&mut slow)?;
        let findings = trial.judge().await?;
        findings.expect_unfelt()?;
        Ok(findings)
    });
}

/// How much longer a sync of a slow disk takes, and how long calls may take with one: so many of its syncs.
const SLOWER: Duration = Duration::from_millis(200);
const SLOW_SYNCS_MAX: u32 = 10;

/// The other two make a quorum without the leader's own disk; a call may wait for it, none fails. The leader hands over.
#[test]
fn f14_a_slow_disk_of_the_leader_is_bounded() {
    on_loopback("F14", async {
        let mut trial = Trial::start(&binary(), None, |pool| pool.built_in_faults = true).await?;
        let (leader, _) = trial.leader_and_standby().await?;
        let mut slow = SlowSync { who: leader, by: SLOWER };
        trial.inject(&mut slow)?;
        trial.goes_on_for(Duration::from_secs(3)).await?;
        trial.another_leads(leader).await?;
        trial.goes_on().await?;
        trial.heal(&mut slow)?;
        let findings = trial.judge().await?;
        ensure!(findings.outage.failed == 0, "{} calls failed", findings.outage.failed);
        findings.expect_p99_within(SLOWER * SLOW_SYNCS_MAX)?;
        Ok(findings)
    });
}

/// Longer than any wait of this test: until it is mended.
const HANGS: Duration = Duration::from_secs(3_600);

/// A standby whose disk answers nothing says so within seconds, with the path and the time, and again; the others go on.
#[test]
fn f14_a_disk_that_does_not_answer_is_told_of() {
    on_loopback("F14", async {
        let mut trial = Trial::start(&binary(), None, |pool| {
            calm(pool);
            pool.built_in_faults = true;
        })
        .await?;
        let (_, standby) = trial.leader_and_standby().await?;
        let (path, log, http) = {
            let role = standby.of(&mut trial.cluster)?;
            (role.data_dir.join("log").display().to_string(), role.log().to_owned(), role.http)
        };
        let pending = async || -> Option<f64> {
            let (_, scrape) = http_get(http, "/metrics").await?;
            let line = scrape.lines().find_map(|line| line.strip_prefix("tidepool_raft_sync_pending_seconds "))?;
            line.trim().parse().ok()
        };
        let mut hangs = SlowSync { who: standby, by: HANGS };
        trial.inject(&mut hangs)?;
        let said = wait_for("the warning to be repeated", async || {
            let text = std::fs::read_to_string(&log).ok()?;
            let said: Vec<String> =
                text.lines().filter(|line| line.contains("does not answer a sync")).map(str::to_owned).collect();
            (said.len() >= 2).then_some(said)
        })
        .await;
        ensure!(said.iter().all(|line| line.contains(&path) && line.contains("so_far_s")), "{said:?}");
        let seconds = pending().await.context("no figure of the pending sync")?;
        ensure!(seconds >= 1.0, "the sync is said to be pending for {seconds} s");
        trial.goes_on().await?;
        trial.heal(&mut hangs)?;
        wait_for("the disk to be said to answer", async || {
            let text = std::fs::read_to_string(&log).ok()?;
            text.contains("answers syncs of the raft log again").then_some(())
        })
        .await;
        let findings = trial.judge().await?;
        findings.expect_unfelt()?;
        Ok(findings)
    });
}

#[test]
fn f15_a_power_cut_loses_nothing_that_was_acknowledged() {
    in_lab("F15", async |lab: Lab| {
        let mut trial = Trial::start(&binary(), Some(lab), |pool| pool.disk_bytes = Some(512 << 20)).await?;
        for _ in 0..rounds(2) {
            let mut all = PowerCut((0..3).map(Who::Master).collect());
            trial.inject(&mut all)?;
            trial.heal(&mut all)?;
            trial.goes_on().await?;
            trial.whole().await?;
        }
        trial.judge().await
    });
}

#[test]
fn f15_a_power_cut_of_the_leaders_host_is_survived() {
    in_lab("F15", async |lab: Lab| {
        let mut trial = Trial::start(&binary(), Some(lab), |pool| pool.disk_bytes = Some(512 << 20)).await?;
        let (leader, _) = trial.leader_and_standby().await?;
        let mut one = PowerCut(vec![leader]);
        trial.inject(&mut one)?;
        trial.goes_on().await?;
        trial.heal(&mut one)?;
        trial.whole().await?;
        trial.judge().await
    });
}

/// What the first of these would see if masters acknowledged what is not durable: here their disks lie to them. After the power cut
/// the pool does not serve, or something that was acknowledged is not there.
#[test]
fn f15_a_power_cut_finds_out_disks_that_lie() {
    let outcome = Lab::run(async |lab: Lab| {
        let mut trial = Trial::start(&binary(), Some(lab), |pool| {
            pool.disk_bytes = Some(512 << 20);
            pool.built_in_faults = true;
        })
        .await?;
        for master in &trial.cluster.masters {
            master.preload()?.set(Knob::SyncLies, 1)?;
        }
        let keys = keys("acknowledged", 200);
        trial.put_all(&keys, 1000).await?;
        let mut all = PowerCut((0..3).map(Who::Master).collect());
        trial.inject(&mut all)?;
        for master in &trial.cluster.masters {
            master.preload()?.set(Knob::SyncLies, 0)?;
        }
        trial.heal(&mut all)?;
        let read = trial.client.get_many(&keys, Some(Duration::from_secs(5))).await;
        Ok(read.iter().filter(|value| value.is_err()).count())
    });
    match outcome {
        Ok(lost) => assert!(lost.unwrap() > 0, "a power cut after fsyncs that did nothing cost nothing: it was none"),
        Err(refused) => eprintln!("skipped: {refused}"),
    }
}

#[test]
fn f16_a_torn_write_is_cut_off() {
    on_loopback("F16", async {
        let mut trial = Trial::start(&binary(), None, |pool| pool.built_in_faults = true).await?;
        for _ in 0..rounds(2) {
            let (leader, standby) = trial.leader_and_standby().await?;
            for who in [standby, leader] {
                let mut torn = TornWrite(who);
                trial.inject(&mut torn)?;
                trial.ends_by_itself(who).await?;
                trial.heal(&mut torn)?;
                trial.goes_on().await?;
                trial.whole().await?;
            }
        }
        trial.judge().await
    });
}

#[test]
fn f17_a_damaged_log_is_noticed_and_the_member_replaced() {
    on_loopback("F17", async {
        let mut trial = Trial::start(&binary(), None, |_| {}).await?;
        for round in 0..10 {
            trial.put_all(&keys(&format!("entries/{round}"), 200), 100).await?;
        }
        let (_, standby) = trial.leader_and_standby().await?;
        let mut kill = Kill(vec![standby]);
        trial.inject(&mut kill)?;
        let directory = standby.of(&mut trial.cluster)?.data_dir.clone();
        let damaged = corrupt_largest(&directory, ".log")?;
        kill.evidence(&mut trial.cluster)?;
        standby.of(&mut trial.cluster)?.start()?;
        let said =
            trial.ends_by_itself(standby).await.with_context(|| format!("after damage to {}", damaged.display()))?;
        ensure!(said.contains("STORAGE_CORRUPT"), "it does not say why: {said}");
        trial.goes_on().await?;
        // Nothing of it is trusted any more: another takes its place, under an id of its own.
        let Who::Master(at) = standby else { anyhow::bail!("a standby is a master") };
        let new = trial.cluster.add_master()?;
        let address = trial.cluster.masters[new].rpc;
        let old = (at + 1).to_string();
        member(&trial.cluster, &["replace", &old, &format!("{}@{address}", new + 1)]).await?;
        trial.cluster.masters.remove(at);
        trial.goes_on().await?;
        trial.judge().await
    });
}
