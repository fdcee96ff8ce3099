//! F1 to F4: masters that are killed or stopped.

use std::time::Duration;

use anyhow::ensure;
use tidepool_chaos_tests::admin;
use tidepool_chaos_tests::matrix;
use tidepool_chaos_tests::nemesis::process::{Kill, Pause};
use tidepool_chaos_tests::trial::{Trial, WITHIN};
use tidepool_client::PutOptions;

use crate::rig::binary;
use crate::{BACK_WITHIN, calm, is_full, on_loopback, rounds};

#[test]
fn f01_a_killed_leader_loses_nothing() {
    on_loopback("F1", async {
        let mut trial = Trial::start(&binary(), None, |_| {}).await?;
        for _ in 0..rounds(2) {
            let (leader, _) = trial.leader_and_standby().await?;
            let mut kill = Kill(vec![leader]);
            trial.inject(&mut kill)?;
            trial.goes_on().await?;
            trial.another_leads(leader).await?;
            trial.heal(&mut kill)?;
            trial.whole().await?;
        }
        let findings = trial.judge().await?;
        findings.expect_back_within(BACK_WITHIN)?;
        // What was asked for again took effect once: else the answers to those who contend for keys would not fit together (F26).
        matrix::record("F26", &findings)?;
        Ok(findings)
    });
}

#[test]
fn f02_a_killed_standby_costs_nobody_a_call() {
    on_loopback("F2", async {
        let mut trial = Trial::start(&binary(), None, calm).await?;
        let (_, standby) = trial.leader_and_standby().await?;
        let term = trial.status().await?.term;
        let mut kill = Kill(vec![standby]);
        trial.inject(&mut kill)?;
        trial.goes_on().await?;
        trial.heal(&mut kill)?;
        trial.whole().await?;
        ensure!(trial.status().await?.term == term, "a standby's death cost an election");
        let findings = trial.judge().await?;
        findings.expect_unfelt()?;
        Ok(findings)
    });
}

#[test]
fn f02_without_a_majority_nothing_is_acknowledged() {
    on_loopback("F2", async {
        let mut trial = Trial::start(&binary(), None, |_| {}).await?;
        let (leader, standby) = trial.leader_and_standby().await?;
        // One standby is left: it must not acknowledge alone.
        let mut majority = Kill(vec![leader, standby]);
        trial.inject(&mut majority)?;
        let put = PutOptions { deadline: Some(Duration::from_secs(2)), ..PutOptions::default() };
        let alone = trial.client.put("alone", vec![1u8; 1000], put).await;
        ensure!(alone.is_err(), "one master of three acknowledged a put");
        trial.heal(&mut majority)?;
        trial.goes_on().await?;
        trial.whole().await?;
        let mut all =
            Kill([leader, standby].into_iter().chain(trial.others(leader)).fold(Vec::new(), |mut all, who| {
                if !all.contains(&who) {
                    all.push(who);
                }
                all
            }));
        trial.inject(&mut all)?;
        trial.heal(&mut all)?;
        trial.goes_on().await?;
        trial.judge().await
    });
}

#[test]
fn f03_a_stopped_leader_that_wakes_harms_nothing() {
    on_loopback("F3", async {
        let mut trial = Trial::start(&binary(), None, |_| {}).await?;
        // From shorter than an election timeout to longer than any lease of a leader, or much longer.
        let pauses: &[u64] = if is_full() { &[30, 100, 150, 1_000, 5_000, 30_000] } else { &[30, 150, 2_000] };
        for &millis in pauses {
            let (leader, _) = trial.leader_and_standby().await?;
            let mut pause = Pause(leader);
            trial.inject(&mut pause)?;
            tokio::time::sleep(Duration::from_millis(millis)).await;
            trial.heal(&mut pause)?;
            trial.goes_on().await?;
            trial.whole().await?;
        }
        trial.judge().await
    });
}

#[test]
fn f04_a_stopped_standby_is_not_missed() {
    on_loopback("F4", async {
        let mut trial = Trial::start(&binary(), None, calm).await?;
        let (leader, standby) = trial.leader_and_standby().await?;
        let term = trial.status().await?.term;
        let mut pause = Pause(standby);
        trial.inject(&mut pause)?;
        trial.goes_on_for(Duration::from_secs(2)).await?;
        trial.heal(&mut pause)?;
        trial.goes_on().await?;
        trial.whole().await?;
        let after = admin::status(leader.of(&mut trial.cluster)?.rpc).await?;
        ensure!(after.term == term && after.role == "leader", "an election: {} in term {}", after.role, after.term);
        ensure!(trial.cluster.leader(WITHIN).await.is_ok(), "nobody leads");
        let findings = trial.judge().await?;
        findings.expect_unfelt()?;
        Ok(findings)
    });
}
