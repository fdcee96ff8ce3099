//! F19, F20, F23 and F24: members that are wiped, join, lag behind, or take snapshots.

use std::process::Stdio;
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use tidepool_chaos_tests::admin;
use tidepool_chaos_tests::cluster::Cluster;
use tidepool_chaos_tests::nemesis::Who;
use tidepool_chaos_tests::nemesis::process::{Kill, Wipe};
use tidepool_chaos_tests::trial::{Trial, WITHIN};

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

#[test]
fn f20_a_member_joins_while_the_leader_dies() {
    on_loopback("F20", async {
        let mut trial = Trial::start(&binary(), None, |_| {}).await?;
        let new = trial.cluster.add_master()?;
        let newcomer = format!("{}@{}", new + 1, trial.cluster.masters[new].rpc);
        let (leader, _) = trial.leader_and_standby().await?;
        let Who::Master(at) = leader else { bail!("a leader is a master") };
        let (leads, address) = (trial.cluster.masters[at].rpc, newcomer.clone());
        let before = trial.status().await?.members.len();
        // Killed as soon as the leader has begun: it lists the newcomer.
        let began = async move {
            wait_for("the change to begin", async || {
                let status = admin::status(leads).await.ok()?;
                (status.members.len() > before).then_some(())
            })
            .await;
        };
        let masters = trial.cluster.masters_text();
        let asking = tokio::spawn(async move {
            let mut command = tokio::process::Command::new(binary());
            command.args(["member", "add", &address, "--masters", &masters]).kill_on_drop(true);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            command.status().await
        });
        began.await;
        let mut kill = Kill(vec![leader]);
        trial.inject(&mut kill)?;
        trial.another_leads(leader).await?;
        trial.heal(&mut kill)?;
        // It may have failed or succeeded: repeated, it completes.
        asking.await??;
        let mut failure = None;
        for _ in 0..5 {
            failure = member(&trial.cluster, &["add", &newcomer]).await.err();
            if failure.is_none() {
                break;
            }
        }
        ensure!(failure.is_none(), "{failure:?}");
        let voters = trial.status().await?.members.iter().filter(|member| member.voter).count();
        ensure!(voters == 4, "{voters} voters");
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
