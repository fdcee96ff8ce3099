//! F27, and datanodes that are slow, hang, flap, or return elsewhere: readers get another copy or a miss in time, and nothing leaks.

use std::time::Duration;

use anyhow::{Result, ensure};
use tidepool_chaos_tests::audit::remove_all;
use tidepool_chaos_tests::cluster::POLL_EVERY;
use tidepool_chaos_tests::lab::Lab;
use tidepool_chaos_tests::nemesis::network::Throttle;
use tidepool_chaos_tests::nemesis::process::{Flap, Kill, Pause};
use tidepool_chaos_tests::nemesis::{Nemesis, Who};
use tidepool_chaos_tests::ports;
use tidepool_chaos_tests::trial::{Findings, Trial};
use tidepool_client::ListPage;

use crate::rig::{WITHIN, binary, free_bytes, wait_for};
use crate::{in_lab, on_loopback};

/// Removes everything, and waits until every byte is free again: nothing leaked.
async fn judge_and_empty(trial: Trial, leases: Duration) -> Result<Findings> {
    let client = trial.client.clone();
    let capacity = trial.cluster.capacity_bytes();
    let mut status_of = trial.cluster.masters.iter().map(|master| master.rpc).collect::<Vec<_>>();
    let (findings, _pool) = trial.judge_and_keep().await?;
    let mut after = bytes::Bytes::new();
    loop {
        let ListPage { objects, more, next } = client.list(b"", 1000, &after, Some(WITHIN)).await?;
        let keys: Vec<&[u8]> = objects.iter().map(|object| &object.key[..]).collect();
        remove_all(&client, &keys).await?;
        if !more {
            break;
        }
        after = next;
    }
    ensure!(leases < WITHIN, "the leases are longer than the wait");
    wait_for("every byte to be free again", async || {
        for address in &mut status_of {
            if let Ok(status) = tidepool_chaos_tests::admin::status(*address).await
                && status.role == "leader"
            {
                return (free_bytes(&status) == capacity).then_some(());
            }
        }
        None
    })
    .await;
    Ok(findings)
}

const LEASE: Duration = Duration::from_secs(2);

fn short_leases(pool: &mut tidepool_chaos_tests::cluster::ClusterOptions) {
    let flags = ["--lease-ttl", "2s", "--lease-ttl-max", "2s", "--put-start-discard-timeout", "5s"];
    pool.master_arguments = flags.iter().map(|word| word.to_string()).collect();
}

#[test]
fn f27_a_datanode_and_the_leader_die_together() {
    on_loopback("F27", async {
        let mut trial = Trial::with_copies(&binary(), None, 2, short_leases).await?;
        let (leader, _) = trial.leader_and_standby().await?;
        trial.allow_misses();
        let mut both = Kill(vec![leader, Who::Datanode(0)]);
        trial.inject(&mut both)?;
        trial.goes_on().await?;
        trial.heal(&mut both)?;
        trial.goes_on().await?;
        judge_and_empty(trial, LEASE).await
    });
}

/// A put with two copies ends with one, or not at all, while a target hangs; readers take the other copy.
#[test]
fn f27_a_datanode_that_hangs_and_one_that_flaps() {
    on_loopback("F27", async {
        let mut trial = Trial::with_copies(&binary(), None, 2, |pool| {
            short_leases(pool);
            pool.datanodes = 3;
        })
        .await?;
        trial.allow_misses();
        let mut pause = Pause(Who::Datanode(0));
        trial.inject(&mut pause)?;
        trial.goes_on_for(Duration::from_secs(2)).await?;
        trial.heal(&mut pause)?;
        trial.whole().await?;
        trial.copies_are_back(2).await?;
        let mut flap = Flap { who: Who::Datanode(1), deaths: 0 };
        for _ in 0..3 {
            trial.inject(&mut flap)?;
            trial.goes_on().await?;
            trial.cluster.wait_serving(WITHIN).await?;
            trial.copies_are_back(2).await?;
        }
        trial.heal(&mut flap)?;
        judge_and_empty(trial, LEASE).await
    });
}

/// It comes back empty, at another port: a node of its own, and what it had is copied to it or elsewhere.
#[test]
fn f27_a_datanode_that_returns_at_another_port() {
    on_loopback("F27", async {
        let mut trial = Trial::with_copies(&binary(), None, 2, |pool| {
            short_leases(pool);
            pool.datanodes = 3;
        })
        .await?;
        let mut kill = Kill(vec![Who::Datanode(2)]);
        trial.inject(&mut kill)?;
        trial.goes_on().await?;
        let port = ports::reserve(1)?[0];
        let moved = std::net::SocketAddr::from(([127, 0, 0, 1], port));
        trial.cluster.datanodes[2].set_argument("--listen", &moved.to_string());
        trial.cluster.datanodes[2].rpc = moved;
        trial.heal(&mut kill)?;
        let give_up = std::time::Instant::now() + WITHIN;
        while !trial.status().await?.nodes.iter().any(|node| node.address == moved.to_string()) {
            ensure!(std::time::Instant::now() < give_up, "it is not listed at {moved}");
            tokio::time::sleep(POLL_EVERY).await;
        }
        trial.copies_are_back(2).await?;
        judge_and_empty(trial, LEASE).await
    });
}

#[test]
fn f27_a_slow_datanode_holds_up_only_its_own() {
    in_lab("F27", async |lab: Lab| {
        let mut trial = Trial::with_copies(&binary(), Some(lab), 2, |pool| {
            short_leases(pool);
            pool.datanodes = 3;
        })
        .await?;
        trial.allow_misses();
        let mut slow = Throttle { who: Who::Datanode(0), kbit_per_s: 2_000 };
        trial.inject(&mut slow)?;
        trial.goes_on_for(Duration::from_secs(2)).await?;
        slow.evidence(&mut trial.cluster)?;
        trial.heal(&mut slow)?;
        judge_and_empty(trial, LEASE).await
    });
}
