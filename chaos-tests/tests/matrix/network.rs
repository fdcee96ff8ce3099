//! F5 to F9 and F11: cut, lossy and late links.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use tidepool_chaos_tests::lab::{Direction, Lab, Relay, RelaySettings};
use tidepool_chaos_tests::nemesis::network::{Late, LinkDown, Loss, Partition};
use tidepool_chaos_tests::nemesis::process::Kill;
use tidepool_chaos_tests::nemesis::{Nemesis, Who};
use tidepool_chaos_tests::rogue::RogueClient;
use tidepool_chaos_tests::trial::{Trial, WITHIN};

use crate::rig::{binary, keys, wait_for};
use crate::{calm, in_lab};

/// `one` loses the other masters; clients still reach it.
fn cut_from_masters(trial: &Trial, one: Who, direction: Direction, shape: &str) -> Partition {
    Partition::between(shape, trial.others(one).into_iter().map(|other| (one, other, direction)).collect())
}

#[test]
fn f05_a_leader_in_the_minority_acknowledges_nothing() {
    in_lab("F5", async |lab: Lab| {
        let mut trial = Trial::start(&binary(), Some(lab), |_| {}).await?;
        let (leader, _) = trial.leader_and_standby().await?;
        let old = leader.of(&mut trial.cluster)?.rpc;
        let mut rogue = wait_for("a session", async || RogueClient::open(old).await.ok()).await;
        let mut cut = cut_from_masters(&trial, leader, Direction::Both, "leader | the others");
        trial.inject(&mut cut)?;
        trial.another_leads(leader).await?;
        let since = keys("since", 20);
        trial.put_all(&since, 1000).await?;
        let asked = Instant::now();
        let acknowledged = rogue.put_start(&[b"in the minority"], 1000, 1).await;
        ensure!(acknowledged.is_err(), "the leader of a minority gave a grant: {acknowledged:?}");
        let (after, refused) = (asked.elapsed(), format!("{:#}", acknowledged.unwrap_err()));
        println!("refused after {after:?}: {refused}");
        // Refused by the leader, in words, and not given up by the client; the deadline of its call is 10 s.
        ensure!(refused.contains("UNAVAILABLE") || refused.contains("NOT_LEADER"), "refused as {refused}");
        for key in &since {
            // Refused, or right: never an absence from its old view.
            let seen = rogue.exists(key.as_bytes(), Duration::from_millis(300)).await;
            ensure!(!matches!(seen, Ok(false)), "the leader of a minority answered a stale read of {key}");
        }
        trial.goes_on().await?;
        trial.heal(&mut cut)?;
        trial.goes_on().await?;
        trial.judge().await
    });
}

/// Writes go on within the load's own deadline, whoever leads.
async fn asymmetric(
    lab: Lab,
    direction_of_loss: fn(Who, Who) -> (Who, Who),
) -> Result<tidepool_chaos_tests::trial::Findings> {
    let mut trial = Trial::start(&binary(), Some(lab), |_| {}).await?;
    let (leader, _) = trial.leader_and_standby().await?;
    let cuts = trial.others(leader).into_iter().map(|other| {
        let (from, to) = direction_of_loss(leader, other);
        (from, to, Direction::OneWay)
    });
    let mut cut = Partition::between("one way between the leader and the others", cuts.collect());
    trial.inject(&mut cut)?;
    trial.goes_on().await?;
    trial.goes_on_for(Duration::from_secs(1)).await?;
    trial.heal(&mut cut)?;
    trial.goes_on().await?;
    trial.judge().await
}

#[test]
fn f06_a_leader_that_hears_nobody_steps_aside() {
    in_lab("F6", async |lab: Lab| asymmetric(lab, |leader, other| (other, leader)).await);
}

#[test]
fn f06_a_leader_that_nobody_hears_is_replaced() {
    in_lab("F6", async |lab: Lab| asymmetric(lab, |leader, other| (leader, other)).await);
}

#[test]
fn f07_a_bridge_does_not_make_leaders_flap() {
    in_lab("F7", async |lab: Lab| {
        let mut trial = Trial::start(&binary(), Some(lab), |_| {}).await?;
        let (leader, standby) = trial.leader_and_standby().await?;
        let before = trial.status().await?.term;
        // The third hears both.
        let mut cut = Partition::between("leader | one standby", vec![(leader, standby, Direction::Both)]);
        trial.inject(&mut cut)?;
        let began = Instant::now();
        trial.goes_on_for(Duration::from_secs(5)).await?;
        let changes = trial.status().await?.term - before;
        let allowed = 1 + began.elapsed().as_secs() / 5;
        ensure!(changes <= allowed, "{changes} changes of term in {:?}", began.elapsed());
        trial.heal(&mut cut)?;
        trial.goes_on().await?;
        trial.judge().await
    });
}

#[test]
fn f08_a_returning_standby_disturbs_nobody() {
    in_lab("F8", async |lab: Lab| {
        let mut trial = Trial::start(&binary(), Some(lab), calm).await?;
        let (leader, standby) = trial.leader_and_standby().await?;
        let term = trial.status().await?.term;
        let mut down = LinkDown(standby);
        trial.inject(&mut down)?;
        trial.goes_on_for(Duration::from_secs(2)).await?;
        trial.heal(&mut down)?;
        trial.goes_on_for(Duration::from_secs(1)).await?;
        trial.whole().await?;
        let after = trial.status().await?;
        ensure!(after.term == term, "term {term} became {}", after.term);
        ensure!(Who::Master(trial.cluster.leader(WITHIN).await?) == leader, "another leads");
        let findings = trial.judge().await?;
        ensure!(findings.outage.failed == 0, "{} calls failed", findings.outage.failed);
        Ok(findings)
    });
}

#[test]
fn f09_a_lossy_link_gives_right_answers() {
    in_lab("F9", async |lab: Lab| {
        let mut trial = Trial::start(&binary(), Some(lab), |_| {}).await?;
        let (leader, standby) = trial.leader_and_standby().await?;
        let mut at_leader = Loss { who: leader, of_thousand: 50 };
        let mut at_standby = Loss { who: standby, of_thousand: 50 };
        trial.inject(&mut at_leader)?;
        trial.inject(&mut at_standby)?;
        trial.goes_on_for(Duration::from_secs(3)).await?;
        trial.heal(&mut at_leader)?;
        trial.goes_on().await?;
        trial.judge().await
    });
}

#[test]
fn f09_a_late_link_keeps_its_leader() {
    in_lab("F9", async |lab: Lab| {
        // Before the masters start: their connections go through the relays from the beginning.
        let names = ["master-1", "master-2", "master-3"];
        let relays: Result<Vec<Relay>> = names.iter().map(|name| Relay::start(&lab, &binary(), name, 50_051)).collect();
        let mut relays = relays?;
        // 150 ms is the shortest election timeout of this profile: what is sent arrives within half of it.
        let mut trial = Trial::start(&binary(), Some(lab), |pool| pool.election = "default".into()).await?;
        let term = trial.status().await?.term;
        let settings = RelaySettings { delay_ms: 20, jitter_ms: 10, ..RelaySettings::default() };
        let mut late: Vec<Late> =
            (0..3).rev().map(|at| Late { who: Who::Master(at), relay: relays.remove(at), settings }).collect();
        for late in &mut late {
            trial.inject(late)?;
        }
        trial.goes_on_for(Duration::from_secs(3)).await?;
        ensure!(trial.status().await?.term == term, "an election at 20 to 30 ms of delay");
        for late in &mut late {
            trial.heal(late)?;
        }
        trial.goes_on().await?;
        let findings = trial.judge().await?;
        ensure!(findings.outage.longest_call_ms >= 40.0, "no call was late: {} ms", findings.outage.longest_call_ms);
        Ok(findings)
    });
}

/// Both standbys forget by a restart that they just heard of a leader, and elect another, while the old leader is cut off and still
/// within its lease: it must answer nothing from its old view.
#[test]
fn f11_standbys_that_restart_within_a_lease_cause_no_stale_read() {
    in_lab("F11", async |lab: Lab| {
        let mut trial = Trial::start(&binary(), Some(lab), |_| {}).await?;
        let (leader, _) = trial.leader_and_standby().await?;
        let rogue = RogueClient::open(leader.of(&mut trial.cluster)?.rpc).await?;
        let mut restart = Kill(trial.others(leader));
        let mut cut = cut_from_masters(&trial, leader, Direction::Both, "leader | the others");
        trial.inject(&mut restart)?;
        trial.inject(&mut cut)?;
        trial.heal(&mut restart)?;
        let since = keys("since", 30);
        let mut stale = 0;
        let mut answers = 0;
        for key in &since {
            trial.put_all(std::slice::from_ref(key), 100).await?;
            let mut rogue = rogue.clone();
            match rogue.exists(key.as_bytes(), Duration::from_millis(100)).await {
                Ok(true) => {}
                Ok(false) => stale += 1,
                Err(_) => answers += 1,
            }
        }
        ensure!(stale == 0, "{stale} stale reads");
        ensure!(answers > 0, "the old leader was never asked");
        cut.evidence(&mut trial.cluster)?;
        trial.heal(&mut cut)?;
        trial.goes_on().await?;
        trial.judge().await
    });
}
