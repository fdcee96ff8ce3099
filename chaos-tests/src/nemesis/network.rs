//! Links that are down, cut in one direction, lossy, late or narrow. All need a laboratory.

use anyhow::{Result, ensure};

use super::{Nemesis, Who, lab_of, stamped};
use crate::cluster::Cluster;
use crate::lab::{Direction, Relay, RelaySettings};
use crate::process::Fault;

/// Fewest packets that a rule must have dropped to count as a fault.
const DROPPED_MIN: u64 = 5;

/// The role's cable is pulled: nothing gets in or out, and no packet says so.
pub struct LinkDown(pub Who);

impl Nemesis for LinkDown {
    fn describe(&self) -> String {
        format!("link of {} down", self.0.name())
    }

    fn inject(&mut self, cluster: &mut Cluster) -> Result<Fault> {
        let lab = lab_of(cluster)?;
        stamped(|| lab.network().set_link(&self.0.name(), false))
    }

    fn heal(&mut self, cluster: &mut Cluster) -> Result<()> {
        lab_of(cluster)?.network().set_link(&self.0.name(), true)
    }

    fn evidence(&mut self, cluster: &mut Cluster) -> Result<String> {
        let address = self.0.of(cluster)?.rpc;
        lab_of(cluster)?.network().unreachable(&self.0.name(), address)
    }

    fn strikes_a_datanode(&self) -> bool {
        self.0.is_datanode()
    }
}

/// Some pairs of roles pass each other nothing.
pub struct Partition {
    /// Name of its shape.
    pub shape: String,
    /// From whom, to whom, and which ways.
    pub cuts: Vec<(Who, Who, Direction)>,
    /// Roles cut off from all clients: hears them, is heard by them.
    pub from_clients: Vec<(Who, bool, bool)>,
    dropped_before: u64,
}

impl Partition {
    /// These roles lose each other.
    pub fn between(shape: &str, cuts: Vec<(Who, Who, Direction)>) -> Partition {
        Partition { shape: shape.to_owned(), cuts, from_clients: Vec::new(), dropped_before: 0 }
    }

    /// `one` loses all `others` and the clients: as if it were behind another switch.
    pub fn of_one(one: Who, others: &[Who]) -> Partition {
        let cuts = others.iter().map(|&other| (one, other, Direction::Both)).collect();
        let shape = format!("{} alone", one.name());
        Partition { shape, cuts, from_clients: vec![(one, false, false)], dropped_before: 0 }
    }
}

impl Nemesis for Partition {
    fn describe(&self) -> String {
        format!("partition: {}", self.shape)
    }

    fn inject(&mut self, cluster: &mut Cluster) -> Result<Fault> {
        let network = lab_of(cluster)?.network();
        self.dropped_before = network.dropped()?;
        stamped(|| {
            for (from, to, direction) in &self.cuts {
                network.cut(&from.name(), &to.name(), *direction)?;
            }
            for (who, hears, is_heard) in &self.from_clients {
                network.cut_from_clients(&who.name(), *hears, *is_heard)?;
            }
            Ok(())
        })
    }

    fn heal(&mut self, cluster: &mut Cluster) -> Result<()> {
        lab_of(cluster)?.network().heal()
    }

    fn evidence(&mut self, cluster: &mut Cluster) -> Result<String> {
        dropped_since(cluster, self.dropped_before)
    }
}

/// Some of a role's packets are lost, in both directions.
pub struct Loss {
    /// Whose.
    pub who: Who,
    /// How many of a thousand.
    pub of_thousand: u32,
}

impl Nemesis for Loss {
    fn describe(&self) -> String {
        format!("{} loses {}.{} % of its packets", self.who.name(), self.of_thousand / 10, self.of_thousand % 10)
    }

    fn inject(&mut self, cluster: &mut Cluster) -> Result<Fault> {
        let lab = lab_of(cluster)?;
        stamped(|| lab.network().lose(&self.who.name(), self.of_thousand))
    }

    fn heal(&mut self, cluster: &mut Cluster) -> Result<()> {
        lab_of(cluster)?.network().heal()
    }

    fn evidence(&mut self, cluster: &mut Cluster) -> Result<String> {
        dropped_since(cluster, 0)
    }
}

/// What a role sends passes slowly.
pub struct Throttle {
    /// Whose.
    pub who: Who,
    /// How fast.
    pub kbit_per_s: u32,
}

impl Nemesis for Throttle {
    fn describe(&self) -> String {
        format!("{} sends at {} kbit/s", self.who.name(), self.kbit_per_s)
    }

    fn inject(&mut self, cluster: &mut Cluster) -> Result<Fault> {
        let lab = lab_of(cluster)?;
        stamped(|| lab.network().throttle(&self.who.name(), self.kbit_per_s))
    }

    fn heal(&mut self, cluster: &mut Cluster) -> Result<()> {
        lab_of(cluster)?.network().heal()
    }

    fn evidence(&mut self, cluster: &mut Cluster) -> Result<String> {
        lab_of(cluster)?.network().queueing(&self.who.name())
    }

    fn strikes_a_datanode(&self) -> bool {
        self.who.is_datanode()
    }
}

/// What is sent to a role arrives late, through a relay that was put in front of it before it was started.
pub struct Late {
    /// Whose name is shown.
    pub who: Who,
    /// The relay before it.
    pub relay: Relay,
    /// What it does while the fault is on.
    pub settings: RelaySettings,
}

impl Nemesis for Late {
    fn describe(&self) -> String {
        format!("what is sent to {}: {:?}", self.who.name(), self.settings)
    }

    fn inject(&mut self, _: &mut Cluster) -> Result<Fault> {
        stamped(|| self.relay.set(self.settings))
    }

    fn heal(&mut self, _: &mut Cluster) -> Result<()> {
        self.relay.set(RelaySettings::default())
    }

    fn evidence(&mut self, cluster: &mut Cluster) -> Result<String> {
        self.relay.evidence(lab_of(cluster)?)
    }
}

fn dropped_since(cluster: &Cluster, before: u64) -> Result<String> {
    let dropped = lab_of(cluster)?.network().dropped()?.saturating_sub(before);
    ensure!(dropped >= DROPPED_MIN, "only {dropped} packets were dropped");
    Ok(format!("{dropped} packets dropped"))
}
