//! What goes wrong: faults drawn from the seed, one after the other, and their end.
//!
//! Here: faults that end. Those after which a cluster goes on in another history are in `loss`, disks that go bad in `damage`.

mod damage;
mod loss;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::time::Duration;

use openraft::async_runtime::AsyncRuntime;
use openraft_rt_sim::SimRuntime;
use tidepool_proto::NodeId;
use tidepool_raft::sim::SplitMix;
use tidepool_raft::sim::surroundings::SimMachine;
use tidepool_raft::{Member, MemberChange};

use crate::datanode::{Process, address};
use crate::net::Net;
use crate::observe::Observer;
use crate::params::{Fault, Params};
use crate::quorum::{Image, MASTERS, Quorum};

/// How long one handover, compaction or change of members may take.
const ACT: Duration = Duration::from_secs(3);
/// How often a change of members is repeated when everything works again.
const CHANGES_MAX: usize = 20;
/// How often an image is published before a fault, in a hundred.
const PUBLISHED: u64 = 50;

/// Datanodes have ids from here.
pub const DATANODES_FROM: u64 = 101;
/// Clients have ids from here.
pub const CLIENTS_FROM: u64 = 201;

/// A change of members: somebody comes, and perhaps somebody goes for it.
#[derive(Clone, Copy, Debug)]
struct Change {
    new: u64,
    old: Option<u64>,
}

/// Breaks things and mends them.
pub struct Nemesis {
    /// The masters.
    pub quorum: Quorum,
    /// The datanodes, dead ones included.
    pub datanodes: BTreeMap<u64, Process>,
    net: Net,
    params: Params,
    random: SplitMix,
    skew: BTreeMap<u64, i64>,
    /// What is known of the log.
    pub observer: Observer,
    /// Changes of members that nobody knows to be done, the first of which is under way.
    changes: VecDeque<Change>,
    /// What a restore would begin from.
    image: Option<Image>,
    /// Whose disk has a bit that flipped, and did not start since.
    damaged: Option<u64>,
    /// How often the cluster went on in another history.
    losses: u64,
    /// Spare machines that were used.
    spares_used: u64,
    /// Faults that were carried out, by name.
    pub struck: BTreeMap<String, u64>,
}

impl Nemesis {
    /// Over a healthy cluster.
    pub fn new(
        quorum: Quorum,
        datanodes: BTreeMap<u64, Process>,
        net: Net,
        params: &Params,
        skew: BTreeMap<u64, i64>,
        observer: Observer,
    ) -> Nemesis {
        let random = SplitMix::new(params.seed ^ 0x6661_756c);
        let (changes, image, damaged, losses, spares_used, struck) =
            (VecDeque::new(), None, None, 0, 0, BTreeMap::new());
        let params = params.clone();
        Nemesis {
            quorum,
            datanodes,
            net,
            params,
            random,
            skew,
            observer,
            changes,
            image,
            damaged,
            losses,
            spares_used,
            struck,
        }
    }

    /// Breaks things until the time is over.
    pub async fn strike(&mut self) -> Result<(), String> {
        let until = crate::history::now() + self.params.faults_for.as_nanos() as u64;
        while crate::history::now() < until {
            let pause = self.random.range(20, self.params.fault_pause_ms);
            SimRuntime::sleep(Duration::from_millis(pause)).await;
            if self.params.faults.is_empty() {
                continue;
            }
            let publishes = self.params.faults.contains(&Fault::RestoreMasters) && !self.observer.is_alone();
            if publishes && self.random.chance(PUBLISHED) {
                self.image = self.quorum.image().or(self.image.take());
            }
            let fault = self.params.faults[self.random.below(self.params.faults.len() as u64) as usize];
            self.net.trace.say(&format!("fault {fault:?}"));
            *self.struck.entry(format!("{fault:?}")).or_default() += 1;
            self.carry_out(fault).await?;
            self.mend_some().await?;
        }
        Ok(())
    }

    fn a_master(&mut self) -> u64 {
        match self.quorum.leader() {
            Some(leader) if self.random.chance(60) => leader.machine.id,
            _ => self.any_master(),
        }
    }

    fn any_master(&mut self) -> u64 {
        let enrolled = self.quorum.enrolled();
        enrolled[self.random.below(enrolled.len() as u64) as usize]
    }

    fn a_datanode(&mut self) -> u64 {
        DATANODES_FROM + self.random.below(self.params.datanodes)
    }

    async fn carry_out(&mut self, fault: Fault) -> Result<(), String> {
        let master = self.a_master();
        let datanode = self.a_datanode();
        match fault {
            Fault::KillMaster => {
                let pending = self.quorum.cluster().disk(master).map_or(0, |disk| disk.pending() as u64);
                let (kept, torn) = (self.random.range(0, pending) as usize, self.random.chance(30));
                self.quorum.kill(master, kept, torn);
            }
            Fault::PauseMaster => {
                if let Some(running) = self.quorum.get(master) {
                    running.machine.pause(true);
                    self.resume_later(running.machine);
                }
            }
            Fault::CutMasters => {
                let other = self.any_master();
                match self.random.chance(50) {
                    true => self.net.part(master, other),
                    false => self.net.cut(master, other),
                }
            }
            Fault::IsolateMaster => {
                let others = self.quorum.enrolled().into_iter().filter(|other| *other != master);
                others.for_each(|other| self.net.part(master, other));
            }
            Fault::HandOver => {
                if let Some(leader) = self.quorum.leader() {
                    // Refused when nobody is ready: that is what it is for.
                    drop(SimRuntime::timeout(ACT, leader.node.transfer_leader(None)).await);
                }
            }
            Fault::Compact => {
                if let Some(running) = self.quorum.get(master) {
                    drop(SimRuntime::timeout(ACT, running.node.compact()).await);
                }
            }
            Fault::DiskFault => {
                if let Some(disk) = self.quorum.cluster().disk(master) {
                    let kind = if self.random.chance(50) { io::ErrorKind::Other } else { io::ErrorKind::StorageFull };
                    match self.random.chance(50) {
                        true => disk.fail_next_write(kind),
                        false => disk.fail_next_sync(kind),
                    }
                }
            }
            Fault::StepClock => {
                if let Some(running) = self.quorum.get(master) {
                    let by_ms = self.random.range(0, 200_000) as i64 - 100_000;
                    running.machine.step_wall_clock(by_ms);
                }
            }
            Fault::KillDatanode => self.kill_datanode(datanode),
            Fault::PauseDatanode => {
                let machine = self.datanodes[&datanode].machine.clone();
                machine.pause(true);
                self.resume_later(machine);
            }
            Fault::CutDatanode => match self.random.chance(50) {
                true => self.quorum.enrolled().into_iter().for_each(|master| self.net.part(datanode, master)),
                false => {
                    let client = CLIENTS_FROM + self.random.below(self.params.clients);
                    self.net.part(datanode, client);
                }
            },
            Fault::FlipBit => {
                let bit = self.random.number();
                self.datanodes[&datanode].node.flip_bit(0, bit);
            }
            Fault::CutClient => {
                let client = CLIENTS_FROM + self.random.below(self.params.clients);
                self.net.part(client, master);
            }
            Fault::SlowDisk => {
                if let Some(disk) = self.quorum.cluster().disk(master) {
                    disk.set_sync_delay(Duration::from_micros(self.random.range(50, 60_000)));
                }
            }
            Fault::ReplaceMaster => self.replace_master().await?,
            Fault::RestoreMasters => self.restore_masters().await?,
            Fault::LoseMajority => self.lose_majority().await?,
            Fault::FlipMasterBit => self.damage(master)?,
        }
        Ok(())
    }

    /// An empty machine is started, taken in by the leader, and a standby removed; what is half done is completed later.
    async fn replace_master(&mut self) -> Result<(), String> {
        if !self.changes.is_empty() {
            return self.change_members().await;
        }
        let Some(leader) = self.quorum.leader().filter(|_| self.spares_used < self.params.spares()) else {
            return Ok(());
        };
        let standbys = self.quorum.enrolled().into_iter().filter(|id| *id != leader.machine.id);
        let standbys: Vec<u64> = standbys.collect();
        let old = standbys[self.random.below(standbys.len() as u64) as usize];
        self.spares_used += 1;
        self.changes.push_back(Change { new: MASTERS + self.spares_used, old: Some(old) });
        self.change_members().await
    }

    /// One attempt to complete the change that is under way.
    async fn change_members(&mut self) -> Result<(), String> {
        let Some(&Change { new, old }) = self.changes.front() else { return Ok(()) };
        self.quorum.enrol(new).await?;
        let Some(leader) = self.quorum.leader() else { return Ok(()) };
        let add = Some(Member { node_id: NodeId(new), address: crate::quorum::address(new) });
        let change = MemberChange { add, remove: old.map(NodeId) };
        let changing = leader.node.change_members(change, ACT);
        if let Ok(report) = SimRuntime::timeout(ACT * 2, changing).await {
            self.net.trace.say(&format!("master {new} for {old:?}: {:?}", report.result));
            if report.result.is_ok() {
                self.changes.pop_front();
                if let Some(old) = old {
                    self.quorum.dismiss(old);
                }
            }
        }
        Ok(())
    }

    /// Completes the changes that are under way.
    pub async fn complete_changes(&mut self) -> Result<(), String> {
        for _ in 0..CHANGES_MAX {
            if self.changes.is_empty() {
                return Ok(());
            }
            self.supervise().await?;
            self.change_members().await?;
            SimRuntime::sleep(Duration::from_millis(500)).await;
        }
        Err(format!("LIVENESS: changes of members do not come to their end: {:?}", self.changes))
    }

    fn resume_later(&mut self, machine: std::sync::Arc<SimMachine>) {
        let time = Duration::from_millis(self.random.range(20, 2_500));
        drop(SimRuntime::spawn(async move {
            SimRuntime::sleep(time).await;
            machine.pause(false);
        }));
    }

    fn kill_datanode(&mut self, id: u64) {
        self.net.hang_up(&address(id));
        if let Some(process) = self.datanodes.get(&id) {
            process.machine.die();
        }
        self.observer.datanode(&address(id), true);
    }

    /// Starts a master if it does not run. One that was removed meanwhile may refuse to, and one whose disk is damaged may find that.
    async fn start_master(&mut self, id: u64) -> Result<(), String> {
        let was_down = self.quorum.get(id).is_none();
        let started = self.quorum.start(id).await;
        let is_damaged = self.damaged == Some(id) && was_down;
        if is_damaged {
            self.damaged = None;
        }
        match started {
            Err(why) if is_damaged => self.give_up(id, &why),
            Err(_) if self.changes.front().is_some_and(|change| change.old == Some(id)) => Ok(()),
            result => result,
        }
    }

    /// Starts a datanode anew if it died: empty.
    fn start_datanode(&mut self, id: u64) -> Result<(), String> {
        if self.datanodes.get(&id).is_some_and(|process| !process.machine.is_dead()) {
            return Ok(());
        }
        let process = start_datanode(id, &self.net, &self.params, &self.skew)?;
        self.datanodes.insert(id, process);
        self.observer.datanode(&address(id), false);
        Ok(())
    }

    /// Sometimes something comes back.
    async fn mend_some(&mut self) -> Result<(), String> {
        for id in self.quorum.enrolled() {
            let stopped = self.quorum.get(id).is_some_and(|running| running.node.status().fatal.is_some());
            if stopped {
                self.quorum.kill(id, usize::MAX, false);
            }
            if self.quorum.get(id).is_none() && self.random.chance(60) {
                self.start_master(id).await?;
            }
        }
        // For a master that was given up another comes soon.
        let is_gone = |id: u64| !self.quorum.enrolled().contains(&id);
        if self.changes.front().is_some_and(|change| change.old.is_some_and(is_gone)) {
            self.change_members().await?;
        }
        for id in self.datanodes.keys().copied().collect::<Vec<_>>() {
            if self.random.chance(self.params.datanode_returns) {
                self.start_datanode(id)?;
            }
        }
        if self.random.chance(35) {
            self.net.heal();
        }
        Ok(())
    }

    /// Everything comes back.
    pub async fn heal(&mut self) -> Result<(), String> {
        self.net.trace.say("heal");
        self.net.heal();
        self.net.calm();
        for id in self.quorum.enrolled() {
            if let Some(running) = self.quorum.get(id) {
                running.machine.pause(false);
                if running.node.status().fatal.is_some() {
                    self.quorum.kill(id, usize::MAX, false);
                }
            }
            if let Some(disk) = self.quorum.cluster().disk(id) {
                disk.set_sync_delay(Duration::from_micros(200));
                disk.heal();
            }
            self.start_master(id).await?;
        }
        for id in self.datanodes.keys().copied().collect::<Vec<_>>() {
            self.datanodes[&id].machine.pause(false);
            self.start_datanode(id)?;
        }
        Ok(())
    }

    /// Masters that stopped by themselves are started again, as their supervisor would.
    pub async fn supervise(&mut self) -> Result<(), String> {
        for id in self.quorum.enrolled() {
            let fatal = self.quorum.get(id).and_then(|running| running.node.status().fatal);
            if let Some(why) = fatal {
                self.net.trace.say(&format!("master {id} is started again: {why}"));
                self.quorum.kill(id, usize::MAX, false);
                self.start_master(id).await?;
            }
        }
        Ok(())
    }
}

/// Where masters may be found.
pub fn masters(params: &Params) -> Vec<String> {
    (1..=MASTERS + params.spares()).map(|id| crate::quorum::address(id).to_string()).collect()
}

/// A datanode on a machine of its own.
pub fn start_datanode(id: u64, net: &Net, params: &Params, skew: &BTreeMap<u64, i64>) -> Result<Process, String> {
    let machine = SimMachine::new(id, skew.get(&id).copied().unwrap_or(0), Duration::from_secs(id));
    let masters = masters(params);
    Process::start(machine, net.clone(), masters, params.segment_bytes).map_err(|error| error.to_string())
}
