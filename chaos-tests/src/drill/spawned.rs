//! A pool of separate processes that a drill strikes, each time in one way.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rand::Rng;
use tidepool_proto::v1::StatusResponse;

use super::options::DrillFault;
use crate::admin;
use crate::clock::monotonic_ns;
use crate::cluster::{Cluster, POLL_EVERY};
use crate::digests::DigestComparison;
use crate::failover::{CATCH_UP_WITHIN, DIGEST_WITHIN, Quorum, RECOVER_WITHIN, Struck};
use crate::nemesis::disk::PowerCut;
use crate::nemesis::network::Partition;
use crate::nemesis::process::{Kill, Pause};
use crate::nemesis::{Nemesis, Who};
use crate::process::Fault;

/// How long copies that went with a datanode may take to be made again.
const HEAL_WITHIN: Duration = Duration::from_secs(120);

/// A pool, and what is done to it.
pub struct Spawned<'a> {
    cluster: &'a mut Cluster,
    fault: DrillFault,
    /// What is done and not yet undone.
    active: Option<Box<dyn Nemesis>>,
}

impl<'a> Spawned<'a> {
    /// This pool, this fault.
    pub fn new(cluster: &'a mut Cluster, fault: DrillFault) -> Spawned<'a> {
        Spawned { cluster, fault, active: None }
    }

    fn others(&self, leader: usize) -> Vec<Who> {
        (0..self.cluster.masters.len()).filter(|&at| at != leader).map(Who::Master).collect()
    }

    fn all(&self) -> Vec<Who> {
        (0..self.cluster.masters.len()).map(Who::Master).collect()
    }

    /// Where it hits, and by what.
    fn aim(&self, leader: usize) -> Result<(Who, Box<dyn Nemesis>)> {
        let head = Who::Master(leader);
        let others = self.others(leader);
        let some = |all: &[Who]| -> Result<Who> {
            ensure!(!all.is_empty(), "the pool has nobody to strike");
            Ok(all[rand::rng().random_range(0..all.len())])
        };
        Ok(match self.fault {
            DrillFault::KillLeader => (head, Box::new(Kill(vec![head]))),
            DrillFault::PauseLeader => (head, Box::new(Pause(head))),
            DrillFault::IsolateLeader => (head, Box::new(Partition::of_one(head, &others))),
            DrillFault::KillStandby => {
                let who = some(&others)?;
                (who, Box::new(Kill(vec![who])))
            }
            DrillFault::KillDatanode => {
                let all: Vec<Who> = (0..self.cluster.datanodes.len()).map(Who::Datanode).collect();
                let who = some(&all)?;
                (who, Box::new(Kill(vec![who])))
            }
            DrillFault::PowerCut => (head, Box::new(PowerCut(self.all()))),
            DrillFault::FullRestart => (head, Box::new(Kill(self.all()))),
            DrillFault::Transfer | DrillFault::Restore => bail!("a {} strikes nobody", self.fault.name()),
        })
    }

    async fn wait_for_another(&mut self, leader: usize) -> Result<()> {
        let give_up = std::time::Instant::now() + RECOVER_WITHIN;
        while self.cluster.leader(RECOVER_WITHIN).await? == leader {
            ensure!(std::time::Instant::now() < give_up, "after {RECOVER_WITHIN:?} the same master leads");
            tokio::time::sleep(POLL_EVERY).await;
        }
        Ok(())
    }

    /// Publishes what there is, then loses every master and its disk, and starts them to restore it.
    async fn lose_and_restore(&mut self, leader: usize) -> Result<(Fault, u64)> {
        // What was acknowledged before the snapshot was asked for is in it.
        let saved_until_ns = monotonic_ns();
        admin::take_snapshot(self.cluster.masters[leader].rpc).await?;
        let fault = Kill(self.all()).inject(self.cluster)?;
        let url = restore_url(self.cluster)?;
        for master in &mut self.cluster.masters {
            std::fs::remove_dir_all(&master.data_dir)
                .with_context(|| format!("removing {}", master.data_dir.display()))?;
            master.set_argument("--restore-from", &url);
            master.start()?;
        }
        Ok((fault, saved_until_ns))
    }

    /// Until every object has its copies again: of two datanodes each has everything.
    async fn wait_for_copies(&mut self) -> Result<()> {
        let give_up = std::time::Instant::now() + HEAL_WITHIN;
        loop {
            let status = self.cluster.leader_status(RECOVER_WITHIN).await?;
            let stored: Vec<u64> = status.segments.iter().map(|segment| segment.complete_bytes).collect();
            let under_way: u64 = status.segments.iter().map(|segment| segment.processing_bytes).sum();
            if stored.len() == self.cluster.datanodes.len()
                && under_way == 0
                && stored.windows(2).all(|pair| pair[0] == pair[1])
            {
                return Ok(());
            }
            if std::time::Instant::now() > give_up {
                bail!("copies that went with a datanode were not made again within {HEAL_WITHIN:?}: {stored:?}");
            }
            tokio::time::sleep(POLL_EVERY).await;
        }
    }
}

/// Where a drilled pool publishes its snapshots.
pub(super) fn restore_url(cluster: &Cluster) -> Result<String> {
    let beside = cluster.work_dir().parent().context("the pool's directory has no parent")?;
    Ok(format!("file://{}", beside.join("snapshots").display()))
}

impl Quorum for Spawned<'_> {
    fn masters(&self) -> Vec<String> {
        self.cluster.masters.iter().map(|master| master.rpc.to_string()).collect()
    }

    async fn leader_status(&mut self) -> Result<StatusResponse> {
        self.cluster.leader_status(RECOVER_WITHIN).await
    }

    async fn strike(&mut self, phase: Duration) -> Result<Struck> {
        let leader = self.cluster.leader(RECOVER_WITHIN).await?;
        tokio::time::sleep(phase).await;
        let name = self.cluster.masters[leader].name().to_owned();
        match self.fault {
            DrillFault::Transfer => {
                let at_ns = monotonic_ns();
                if let Err(error) = admin::transfer_leader(self.cluster.masters[leader].rpc, 0).await {
                    // A standby that was too slow to take over: then an election decides, and may decide for another.
                    tracing::warn!("{error:#}");
                    self.wait_for_another(leader).await.map_err(|late| error.context(late))?;
                }
                let fault = Fault { at_ns, certain_ns: monotonic_ns() };
                return Ok(Struck { at: Some(leader), name, fault, saved_until_ns: None });
            }
            DrillFault::Restore => {
                let (fault, saved_until_ns) = self.lose_and_restore(leader).await?;
                return Ok(Struck { at: None, name: "all".into(), fault, saved_until_ns: Some(saved_until_ns) });
            }
            _ => {}
        }
        let (who, mut nemesis) = self.aim(leader)?;
        let fault = nemesis.inject(self.cluster)?;
        let everybody = matches!(self.fault, DrillFault::PowerCut | DrillFault::FullRestart);
        if everybody {
            // Nobody is left who could take over: the return is part of the outage.
            nemesis.heal(self.cluster)?;
        } else {
            self.active = Some(nemesis);
        }
        let at = match who {
            Who::Master(at) if !everybody => Some(at),
            _ => None,
        };
        let name = if everybody { "all".into() } else { who.name() };
        Ok(Struck { at, name, fault, saved_until_ns: None })
    }

    async fn leader_name(&mut self) -> Result<String> {
        let at = self.cluster.leader(RECOVER_WITHIN).await?;
        Ok(self.cluster.masters[at].name().to_owned())
    }

    async fn bring_back(&mut self, struck: &Struck) -> Result<()> {
        if let Some(mut nemesis) = self.active.take() {
            nemesis.evidence(self.cluster)?;
            nemesis.heal(self.cluster)?;
        }
        match struck.at {
            Some(at) => self.cluster.wait_caught_up(at, CATCH_UP_WITHIN).await,
            None => self.cluster.wait_serving(CATCH_UP_WITHIN).await,
        }
    }

    async fn settle(&mut self) -> Result<()> {
        self.cluster.wait_serving(CATCH_UP_WITHIN).await?;
        if self.fault == DrillFault::KillDatanode {
            self.wait_for_copies().await?;
        }
        Ok(())
    }

    async fn compare_digests(&mut self) -> Result<DigestComparison> {
        self.cluster.compare_digests(DIGEST_WITHIN).await
    }
}
