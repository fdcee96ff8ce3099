//! Tests that break real processes, and the drills, demo and benchmarks that operators run.
//!
//! Everything here starts the `tidepool` binary as separate processes on loopback, with real data directories, real
//! sockets and real signals, and judges by what clients saw. It never links `master`, `raft` or `datanode`: what it
//! knows of a pool it learned through the client and the admin service.
//!
//! Start with [`cluster`] (a pool of processes) and [`process`] (one of them); [`load`] is one client under load in a
//! process of its own, [`bulk`] one that writes large values, [`fleet`] many of them, [`record`] the log each keeps; [`outage`] computes RTO
//! from those logs and [`audit`] counts RPO; [`contest`] has some clients work on the same few keys and judges whether their answers fit together; [`failover`] is one round of load, kill, recovery and verdict, which [`demo`] and
//! [`drill`] are made of; [`bench`](mod@bench) measures. [`lab`] gives every role links and a disk that can be broken, and
//! [`nemesis`] breaks them; [`trial`] is a pool under load that a test breaks and judges, [`matrix`] the table of faults and what
//! must hold, [`soak`] all of it mixed for as long as one likes.
//!
//! Architecture invariant: nothing here decides by sleeping. A condition is polled until a deadline.

pub mod admin;
pub mod audit;
pub mod bench;
pub mod bulk;
pub mod byte_size;
pub mod clock;
pub mod cluster;
pub mod content;
pub mod contest;
pub mod demo;
pub mod digests;
pub mod drill;
pub mod failover;
pub mod files;
pub mod findings;
pub mod fleet;
pub mod lab;
pub mod load;
mod logged;
pub mod matrix;
pub mod nemesis;
pub mod outage;
pub mod output;
pub mod plot;
pub mod ports;
pub mod process;
pub mod record;
pub mod rogue;
pub mod soak;
pub mod timeline;
pub mod trial;
pub mod worker;

pub use output::{Format, Verdict};
