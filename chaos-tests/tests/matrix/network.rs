//! F5 to F9 and F11: cut, lossy and late links.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use tidepool_chaos_tests::lab::{Direction, Lab, Relay, RelaySettings};
use tidepool_chaos_tests::nemesis::network::{Late, LinkDown, Loss, Partition};
use tidepool_chaos_tests::nemesis::process::Kill;
use tidepool_chaos_tests::nemesis::{Nemesis, Who};
use tidepool_chaos_tests::rogue::RogueClient;
use tidepool_chaos_tests::trial::{Findings, Trial, WITHIN};

use crate::rig::{binary, keys, wait_for};
use crate::{BACK_WITHIN, calm, in_lab, is_full};

/// `one` loses the other masters; clients still reach it.
fn cut_from_masters(trial: &Trial, one: Who, direction: Direction, shape: &str) -> Partition {
    Partition::between(shape, trial.others(one).into_iter().map(|other| (one, other, direction)).collect())
}

/// How long a leader of a minority may take to refuse: many times its lease (120 ms) and 50 ms, and half of what the caller waits.
const REFUSED_WITHIN: Duration = Duration::from_secs(5);

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
        ensure!(after <= REFUSED_WITHIN, "the leader of a minority took {after:?} to refuse");
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
        let findings = trial.judge().await?;
        findings.expect_back_within(BACK_WITHIN)?;
        Ok(findings)
    });
}

/// Writes go on within the load's own deadline, whoever leads.
async fn asymmetric(lab: Lab, direction_of_loss: fn(Who, Who) -> (Who, Who)) -> Result<Findings> {
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
    let findings = trial.judge().await?;
    findings.expect_back_within(BACK_WITHIN)?;
    Ok(findings)
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

/// Loses so many of a thousand packets of the leader and of a standby.
async fn lossy(lab: Lab, of_thousand: u32) -> Result<Findings> {
    let mut trial = Trial::start(&binary(), Some(lab), |_| {}).await?;
    let (leader, standby) = trial.leader_and_standby().await?;
    let mut at_leader = Loss { who: leader, of_thousand };
    let mut at_standby = Loss { who: standby, of_thousand };
    trial.inject(&mut at_leader)?;
    trial.inject(&mut at_standby)?;
    trial.goes_on_for(Duration::from_secs(3)).await?;
    trial.heal(&mut at_leader)?;
    trial.goes_on().await?;
    trial.judge().await
}

#[test]
fn f09_a_lossy_link_gives_right_answers() {
    let losses: &[u32] = if is_full() { &[10, 50, 300] } else { &[50] };
    for &of_thousand in losses {
        in_lab("F9", async move |lab: Lab| lossy(lab, of_thousand).await);
    }
}

/// Whatever is sent to a master arrives so late and up to half as much again later.
async fn late(lab: Lab, delay: Duration, election: &'static str) -> Result<Findings> {
    // Before the masters start: their connections go through the relays from the beginning.
    let names = ["master-1", "master-2", "master-3"];
    let relays: Result<Vec<Relay>> = names.iter().map(|name| Relay::start(&lab, &binary(), name, 50_051)).collect();
    let mut relays = relays?;
    let mut trial = Trial::start(&binary(), Some(lab), |pool| pool.election = election.into()).await?;
    let term = trial.status().await?.term;
    let delay_ms = delay.as_millis() as u64;
    let settings = RelaySettings { delay_ms, jitter_ms: delay_ms / 2, ..RelaySettings::default() };
    let mut late: Vec<Late> =
        (0..3).rev().map(|at| Late { who: Who::Master(at), relay: relays.remove(at), settings }).collect();
    for late in &mut late {
        trial.inject(late)?;
    }
    trial.goes_on_for(Duration::from_secs(3)).await?;
    ensure!(trial.status().await?.term == term, "an election at {delay:?} of delay");
    for late in &mut late {
        trial.heal(late)?;
    }
    trial.goes_on().await?;
    let findings = trial.judge().await?;
    let longest = findings.outage.longest_call_ms;
    ensure!(longest >= 2.0 * delay.as_secs_f64() * 1e3, "no call was late: {longest} ms");
    Ok(findings)
}

/// What is sent arrives within half of the shortest election timeout of the profile: the leader stays.
#[test]
fn f09_a_late_link_keeps_its_leader() {
    let short = (Duration::from_millis(20), "default");
    // The shortest election timeouts are 150 ms and a second.
    let long = [short, (Duration::from_millis(50), "default"), (Duration::from_millis(330), "wan")];
    for (delay, election) in if is_full() { long.to_vec() } else { vec![short] } {
        in_lab("F9", async move |lab: Lab| late(lab, delay, election).await);
    }
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
