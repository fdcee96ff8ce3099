//! The deterministic simulation of members: the code of production on virtual time, one thread and one seed, over a
//! network that carries the same bytes and loses, delays and cuts on demand, and disks that lose power.
//!
//! `host` is the machine, `surroundings` what runs on it sees, `network` the wires, `cluster` the members on them.

mod cluster;
mod host;
mod network;
mod random;
mod runtime;
pub mod surroundings;
#[cfg(test)]
mod tests;

pub use cluster::{SimCluster, SimNode};
pub use host::seed_host;
pub use network::{SimLink, SimNetwork, World};
pub use random::SplitMix;
pub use runtime::MachineRuntime;
