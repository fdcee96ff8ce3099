//! F19, F20, F23 and F24: members that are wiped, join, lag behind, or take snapshots.

use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use tidepool_chaos_tests::admin;
use tidepool_chaos_tests::clock::{monotonic_ns, ns_to_ms};
use tidepool_chaos_tests::cluster::Cluster;
use tidepool_chaos_tests::nemesis::Who;
use tidepool_chaos_tests::nemesis::disk::SlowSync;
use tidepool_chaos_tests::nemesis::process::{Kill, Wipe};
use tidepool_chaos_tests::trial::{Trial, WITHIN};
use tokio::task::JoinHandle;

use crate::rig::{binary, keys, wait_for};
use crate::{calm, on_loopback};

/// `tidepool member ...` as an operator runs it.
pub async fn member(cluster: &Cluster, arguments: &[&str]) -> Result<()> {
    let mut command = tokio::process::Command::new(binary());
    command.args(["member"]).args(arguments).args(["-o", "json", "--masters", &cluster.masters_text()]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    let output = tokio::time::timeout(WITHIN, command.output()).await??;
    if !output.status.success() {
        bail!("member {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(())
}

#[test]
fn f19_a_wiped_standby_is_refused() {
    on_loopback("F19", async {
        let mut trial = Trial::start(&binary(), None, |_| {}).await?;
        let (_, standby) = trial.leader_and_standby().await?;
        let mut wipe = Wipe(standby);
        trial.inject(&mut wipe)?;
        trial.heal(&mut wipe)?;
        let said = trial.ends_by_itself(standby).await?;
        ensure!(said.contains("member replace") || said.contains("member add"), "it is not told how to join: {said}");
        trial.goes_on().await?;
        let Who::Master(at) = standby else { bail!("a standby is a master") };
        let new = trial.cluster.add_master()?;
        let address = trial.cluster.masters[new].rpc;
        let old = (at + 1).to_string();
        member(&trial.cluster, &["replace", &old, &format!("{}@{address}", new + 1)]).await?;
        trial.cluster.masters.remove(at);
        trial.judge().await
    });
}

/// `tidepool member add` in the background; it may fail with the leader that it asks.
fn ask_for(cluster: &Cluster, newcomer: &str) -> JoinHandle<std::io::Result<ExitStatus>> {
    let mut command = tokio::process::Command::new(binary());
    command.args(["member", "add", newcomer, "--masters", &cluster.masters_text()]).kill_on_drop(true);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    tokio::spawn(async move { command.status().await })
}

/// It may have failed or succeeded: repeated, it completes, and all four vote.
async fn expect_added(trial: &mut Trial, newcomer: &str) -> Result<()> {
    let mut failure = None;
    for _ in 0..5 {
        failure = member(&trial.cluster, &["add", newcomer]).await.err();
        if failure.is_none() {
            break;
        }
    }
    ensure!(failure.is_none(), "{failure:?}");
    let voters = trial.status().await?.members.iter().filter(|member| member.voter).count();
    ensure!(voters == 4, "{voters} voters");
    Ok(())
}

#[test]
fn f20_a_member_joins_while_the_leader_dies() {
    on_loopback("F20", async {
        let mut trial = Trial::start(&binary(), None, |_| {}).await?;
        let new = trial.cluster.add_master()?;
        let newcomer = format!("{}@{}", new + 1, trial.cluster.masters[new].rpc);
        let (leader, _) = trial.leader_and_standby().await?;
        let leads = leader.of(&mut trial.cluster)?.rpc;
        let before = trial.status().await?.members.len();
        let asking = ask_for(&trial.cluster, &newcomer);
        // Killed as soon as the leader has begun: it lists the newcomer.
        wait_for("the change to begin", async || {
            let status = admin::status(leads).await.ok()?;
            (status.members.len() > before).then_some(())
        })
        .await;
        let mut kill = Kill(vec![leader]);
        trial.inject(&mut kill)?;
        trial.another_leads(leader).await?;
        trial.heal(&mut kill)?;
        asking.await??;
        expect_added(&mut trial, &newcomer).await?;
        trial.judge().await
    });
}

/// How long the disks of both standbys take for a sync while a member joins: nothing is committed in less.
const JOINT_FOR: Duration = Duration::from_millis(1_000);

/// The leader dies between the entry with which old and new voters both decide, and the one that ends this: the old ones have the
/// first, and none of it is committed, since it takes a sync of a standby that has not ended. Whoever leads next completes the change
/// or never had it; asked again it is done.
#[test]
fn f20_the_leader_dies_amid_the_joint_configuration() {
    on_loopback("F20", async {
        let mut trial = Trial::start(&binary(), None, |pool| {
            calm(pool);
            pool.built_in_faults = true;
        })
        .await?;
        let (leader, _) = trial.leader_and_standby().await?;
        let standbys = trial.others(leader);
        let new = trial.cluster.add_master()?;
        let newcomer = format!("{}@{}", new + 1, trial.cluster.masters[new].rpc);
        let leads = leader.of(&mut trial.cluster)?.rpc;
        let mut slow: Vec<SlowSync> = standbys.iter().map(|&who| SlowSync { who, by: JOINT_FOR }).collect();
        for slow in &mut slow {
            trial.inject(slow)?;
        }
        let asking = ask_for(&trial.cluster, &newcomer);
        // The last look at which the newcomer had no vote yet: what gives it one was logged after it.
        let id = new as u64 + 1;
        let mut voteless_ns = 0;
        wait_for("the newcomer to be given a vote", async || {
            let asked_ns = monotonic_ns();
            let status = admin::status(leads).await.ok()?;
            let is_voter = status.members.iter().any(|member| member.node_id == id && member.voter);
            if !is_voter {
                voteless_ns = asked_ns;
            }
            is_voter.then_some(())
        })
        .await;
        let mut kill = Kill(vec![leader]);
        let fault = trial.inject(&mut kill)?;
        let after_ms = ns_to_ms(fault.at_ns - voteless_ns);
        ensure!(
            after_ms < JOINT_FOR.as_secs_f64() * 1e3,
            "the leader died {after_ms} ms after the newcomer was no voter: the change may have been over"
        );
        println!("killed at most {after_ms} ms after the joint configuration was logged");
        for slow in &mut slow {
            trial.heal(slow)?;
        }
        trial.another_leads(leader).await?;
        trial.heal(&mut kill)?;
        asking.await??;
        expect_added(&mut trial, &newcomer).await?;
        trial.judge().await
    });
}

#[test]
fn f23_a_standby_beyond_the_log_comes_back_by_snapshot() {
    on_loopback("F23", async {
        let mut trial = Trial::start(&binary(), None, |pool| {
            let flags =
                [("--snapshot-log-bytes", "128KiB"), ("--keep-log-entries", "0"), ("--checkpoint-interval", "200ms")];
            pool.master_arguments =
                flags.iter().flat_map(|(flag, value)| [flag.to_string(), value.to_string()]).collect();
        })
        .await?;
        let (leader, standby) = trial.leader_and_standby().await?;
        let mut kill = Kill(vec![standby]);
        trial.inject(&mut kill)?;
        let last = admin::status(leader.of(&mut trial.cluster)?.rpc).await?.last_log_index;
        let mut round = 0;
        while admin::status(leader.of(&mut trial.cluster)?.rpc).await?.purged_index <= last {
            trial.put_all(&keys(&format!("beyond/{round}"), 200), 100).await?;
            round += 1;
            ensure!(round < 500, "the log was never purged beyond {last}");
        }
        trial.heal(&mut kill)?;
        trial.whole().await?;
        let status = admin::status(standby.of(&mut trial.cluster)?.rpc).await?;
        ensure!(status.snapshot_index > last, "it came back without a snapshot");
        trial.judge().await
    });
}

#[test]
fn f24_a_snapshot_under_load_is_not_felt() {
    on_loopback("F24", async {
        let mut trial = Trial::start(&binary(), None, calm).await?;
        trial.put_all(&keys("many", 5_000), 64).await?;
        let term = trial.status().await?.term;
        for _ in 0..3 {
            let (leader, _) = trial.leader_and_standby().await?;
            let covered = admin::compact(leader.of(&mut trial.cluster)?.rpc).await?;
            ensure!(covered > 0, "no snapshot was written");
            trial.goes_on_for(Duration::from_millis(300)).await?;
        }
        ensure!(trial.status().await?.term == term, "a snapshot cost an election");
        let findings = trial.judge().await?;
        ensure!(findings.outage.failed == 0, "{} calls failed", findings.outage.failed);
        Ok(findings)
    });
}
